"""Compares rounds with one open-loop training: docs/reports/loop.json and loop.md.

    headstart loop experiment=families               # the open-loop trainings
    python -m scripts.evidence.rounds                # all; or some: --kinds distilled --rows loop
    python -m scripts.evidence.rounds --few-prompts  # from 96 prompts; --seed 1: from 96 other ones
    python -m tests.chaos.kill_loop --kills 10       # adds a loop that is killed ten times

The rows of a kind are `open`, the open-loop training (two passes over the greedy answers of all
prompts); `loop`, rounds as conf/experiment/embedded_loop.yaml sets them; `answers`, the same rounds
without any feedback; `distinct`, one open-loop training on all answers that `loop` had, generated
at once. All have the same number of training tokens or fewer. All measurements use held-out prompts
that take part in no decision. Finished runs are kept, so an interrupted command continues; the
report leaves out rows that have not been run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from heads.api.checkpoint import WEIGHTS_FILE
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import PassRecord
from inference.manifest import MANIFEST_FILE, file_sha256, read_manifest, write_json
from inference.measure.metrics import Outcome, Totals, gain, tau_estimate
from inference.measure.prompts import load_prompts
from inference.report.markdown import markdown_table
from inference.target.model import TargetModel
from scripts.evidence import common
from scripts.evidence.common import Facts, cell, decode_prompts, read_json, run_stage
from scripts.tools.common import PROMPTS, REPORTS, command, cpu_target
from train.feedback.build import build
from train.feedback.config import FeedbackConfig

SCRIPT = "scripts.evidence.rounds"
OPEN, LOOP, ANSWERS, DISTINCT = "open", "loop", "answers", "distinct"
RUN = (LOOP, ANSWERS, DISTINCT)
RECIPE, FEW_RECIPE = "experiment=embedded_loop", "experiment=embedded_few_prompts"
KINDS = {"eagle3": "eagle3_copied", "dspark": "dspark", "distilled": "distilled"}
"""Kind -> its row in conf/experiment/families.yaml."""
MORE = {"distilled": ("train.on_policy.share=0.5", "train.on_policy.window=8")}
"""Overrides of the rounds of one kind: a switch that only this kind has."""
OFF = ("feedback.token_weights=false", "feedback.anchor_weights=false", "train.on_policy.share=0")
OPEN_STEPS, OPEN_ANSWERS = 488, 1440
"""Steps and answers of the open-loop trainings of experiment=families."""
FEW_PROMPTS = 96
DECODE = DecodeConfig(temperature=0.0, shape="chain", depth=4, batch_size=16, max_new_tokens=96)
ROUND_KEYS = "round generated branches variations generation trials switches gain rises".split()
"""The facts of a round, without speeds: rounds run on a machine with other load."""


def own_overrides(kind: str) -> list[str]:
    """The overrides of a kind: its recipe and learning rate in experiment=families."""
    return common.family_overrides(KINDS[kind])


def report(given: argparse.Namespace) -> None:
    """Run and measure, kind by kind."""
    content: Facts = {"format": 1, "kinds": {}, **read_json(REPORTS / "loop.json")}
    held_out = HeldOut(cpu_target(), given.work)
    content["settings"] = content.get("settings", {}) | held_out.settings()
    for kind in given.kinds:
        if given.few_prompts:
            from_few_prompts(kind, given, held_out, content)
        else:
            for row in given.rows:
                run_row(kind, row, given.work / kind)
            open_loop = f"{KINDS[kind]}@{common.family_rate(KINDS[kind]):g}"
            found = compare(held_out, given.work / kind, given.open / open_loop)
            overrides = [*own_overrides(kind), *MORE.get(kind, ())]
            known = content["kinds"].get(kind, {})
            content["kinds"][kind] = known | {"overrides": overrides} | found
        write(content)


def write(content: Facts) -> None:
    few = content.get("few_prompts", {}).get("kinds", {}).values()
    seeds = sorted({int(seed) for entry in few for seed in entry.get("repeated", {})})
    script, kinds = f"python -m {SCRIPT}", list(content["kinds"])
    whole = script if set(kinds) == set(KINDS) else f"{script} --kinds {' '.join(kinds)}"
    commands = ["headstart loop experiment=families", whole]
    commands += [f"{script} --few-prompts"] if few else []
    commands += [f"{script} --few-prompts --seed {seed}" for seed in seeds]
    commands += ["python -m tests.chaos.kill_loop --kills 10"] if "killed" in content else []
    content["command"] = " && ".join(commands)
    common.write_report(REPORTS / "loop", content, markdown(content))


# Running


def run_row(kind: str, row: str, work: Path) -> None:
    """Run a row to its end, skipping complete stages. Every answer is measured once, because no
    speed is used."""
    own = own_overrides(kind)
    place = (f"run.root={work}", f"run.name={row}", "run.threads=1")
    if row == DISTINCT:  # as many steps as all rounds together
        rounds = read_json(work / LOOP / "loop.json")["rounds"]
        folder = work / DISTINCT / "answers"
        answers = [work / LOOP / f"round-{entry['round']}" / "generate" for entry in rounds]
        build([], answers, folder, FeedbackConfig())
        steps = sum(entry["training"]["steps"] for entry in rounds)
        run_stage(
            "train", RECIPE, *own, f"train.max_steps={steps}", f"run.answers={folder}", *place
        )
        return
    if row == ANSWERS:  # its first round is that of `loop`
        for name in ("round-0", "round-1/generate", "round-1/speed.json"):
            source, link = work / LOOP / name, work / row / name
            if source.exists() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source.resolve())
    switches = () if row == LOOP else OFF
    run_stage("loop", RECIPE, *own, *MORE.get(kind, ()), *switches, *place, "bench.repeats=1")


def from_few_prompts(
    kind: str, given: argparse.Namespace, held_out: HeldOut, content: Facts
) -> None:
    """Run rounds from few prompts, for one kind, and compare them."""
    work = given.work / "few_prompts" / (f"{kind}-{given.seed}" if given.seed else kind)
    own, data = own_overrides(kind), other_prompts(given.seed)
    place = [f"run.root={work}", f"run.name={LOOP}", "run.threads=1"]
    run_stage("loop", FEW_RECIPE, *own, *data, *place)
    run_stage("train", *open_training(own, given.seed, work))
    found = compare(held_out, work, work / OPEN / "train" / OPEN, FEW_PROMPTS)
    found = {"overrides": [*own, *data], **found}
    kinds = content.setdefault("few_prompts", {"prompts": FEW_PROMPTS, "kinds": {}})["kinds"]
    known = kinds.setdefault(kind, {})
    if given.seed:
        known.setdefault("repeated", {})[str(given.seed)] = found
    else:
        known.update(found)


def other_prompts(seed: int) -> list[str]:
    """The overrides of a repetition: as many other prompts, and another seed. 0: those of the
    recipe."""
    return ["data.shuffle=true", f"data.seed={seed}", f"run.seed={seed}"] if seed else []


def open_training(own: Sequence[str], seed: int, work: Path) -> list[str]:
    """The overrides of the open-loop training on the first round's answers, repeatedly.

    These answers are greedy and made without a drafter, as in an open loop.
    """
    place = [f"run.root={work}", f"run.name={OPEN}", f"run.drafter={OPEN}"]
    place += [f"run.answers={work / LOOP / 'round-0' / 'generate'}", "run.threads=1"]
    return [FEW_RECIPE, *own, *place, f"train.max_steps={OPEN_STEPS}", f"run.seed={seed}"]


# Measuring


class HeldOut:
    """The held-out prompts, the target's own answers to them, and the drafters' results on them.

    Acceptance does not depend on the batch, so prompts are decoded together, without timing. Every
    answer is compared with plain decoding. Results are kept in files and computed again for other
    weights.
    """

    def __init__(self, target: TargetModel, work: Path) -> None:
        self.target = target
        names = ("code", "explain", "reference")
        self.prompts = load_prompts([PROMPTS / f"{name}.jsonl" for name in names])
        path = work / "plain.json"
        self.asked = [prompt.to_line() for prompt in self.prompts]
        key = [target.info.revision, DECODE.max_new_tokens, self.asked]
        known = read_json(path)
        if known.get("key") != key:
            done = decode_prompts(target, None, self.prompts, replace(DECODE, shape="none"))
            known = {"key": key, "answers": [item.tokens for item in done]}
            write_json(path, known)
        self.plain: list[list[int]] = known["answers"]

    def settings(self) -> Facts:
        info = self.target.info
        facts = {"revision": info.revision, "parameters": info.parameters}
        return {
            "target": {"id": "assets/tiny-target", **facts},
            "prompts": len(self.plain),
            "temperature": DECODE.temperature,
            "depth": DECODE.depth,
            "max_new_tokens": DECODE.max_new_tokens,
        }

    def measure(self, checkpoint: Path, path: Path) -> Facts:
        """Passes (accepted, committed, rejected) per prompt of the drafter in `checkpoint`, and its
        losslessness; kept in `path`."""
        weights = file_sha256(checkpoint / WEIGHTS_FILE)
        revision = self.target.info.revision
        key = [revision, weights, DECODE.depth, DECODE.max_new_tokens, self.asked]
        found: Facts = read_json(path)
        if found.get("key") == key:
            return found
        done = decode_prompts(self.target, checkpoint, self.prompts, DECODE)
        rows = []
        for item in done:
            prompt = self.prompts[item.request.index]
            passes = [(p.accepted, p.committed, int(p.rejected)) for p in item.passes]
            rows.append({"id": prompt.id, "domain": prompt.domain, "passes": passes})
        requests, answers = [item.request for item in done], [item.tokens for item in done]
        sampling, width = DECODE.sampling(), DECODE.depth + 1
        lossless = audit(self.target, requests, self.plain, answers, sampling, width).counts()
        found = {"key": key, "weights_sha256": weights, "lossless": lossless, "prompts": rows}
        write_json(path, found)
        return found


def totals(found: Facts) -> Totals:
    """Sums per prompt from the results of `HeldOut.measure`."""
    outcomes = []
    for row in found["prompts"]:
        passes = [PassRecord(a, c, bool(r)) for a, c, r in row["passes"]]
        outcomes.append(Outcome(row["id"], row["domain"], passes))
    return Totals.collect(outcomes, DECODE.depth)


def gain_facts(new: Facts, old: Facts) -> Facts:
    """The gain of one drafter over another: of tau, and of accepted drafts per pass as ratio -
    1."""
    found = gain(totals(new), totals(old))
    return {key: getattr(found, key) for key in ("tau", "tau_ci95", "accepted", "accepted_ci95")}


def compare(held_out: HeldOut, work: Path, opened: Path, answers: int = OPEN_ANSWERS) -> Facts:
    """The entries of `rows` that have been run in `work`, each compared with the open-loop training
    in `opened`, which read `answers` answers; and `loop_over_distinct`."""

    def measured(name: str, checkpoint: Path) -> Facts:
        return held_out.measure(checkpoint, work / f"{name}.json")

    def row_of(found: Facts) -> Facts:
        estimate = tau_estimate(totals(found))
        return {
            "tau": estimate.tau,
            "tau_ci95": estimate.ci95,
            "tar": estimate.tar,
            "unconditional": estimate.unconditional,
            "lossless": found["lossless"],
            "weights_sha256": found["weights_sha256"],
            "over_open": gain_facts(found, base),
        }

    def training_row(found: Facts, folder: Path, answers: int) -> Facts:
        manifest = read_manifest(folder, "train")
        spent = {key: manifest[key] for key in ("steps", "tokens")}
        return {**row_of(found), **spent, "answers": answers}

    base = measured(OPEN, opened / "best")
    rows, found = {OPEN: training_row(base, opened, answers)}, {}
    for name in (LOOP, ANSWERS):
        if (work / name / "loop.json").is_file():
            found[name] = measured(name, next(iter((work / name / "train").glob("*/best"))))
            rows[name] = row_of(found[name]) | loop_facts(read_json(work / name / "loop.json"))
    content: Facts = {"rows": rows}
    trained = next(iter((work / DISTINCT / "train").glob(f"*/{MANIFEST_FILE}")), None)
    if trained is not None and LOOP in rows:
        distinct = measured(DISTINCT, trained.parent / "best")
        read = read_manifest(work / DISTINCT / "answers", "generate")["counts"]["done"]
        rows[DISTINCT] = training_row(distinct, trained.parent, read)
        content["loop_over_distinct"] = gain_facts(found[LOOP], distinct)
    return content


def loop_facts(content: Facts) -> Facts:
    """The cost of a loop, and its rounds, from its loop.json."""
    rounds = []
    for entry in content["rounds"]:
        measured = entry["measured"].items()
        measured = {key: value for key, value in measured if not key.startswith("speedup")}
        spent = {"tokens": entry["spent"]["tokens"], "steps": entry["training"]["steps"]}
        kept = {key: entry[key] for key in ROUND_KEYS if key in entry}
        rounds.append({**kept, "measured": measured, **spent})
    return {
        "steps": sum(entry["steps"] for entry in rounds),
        "tokens": content["spent"]["tokens"],
        "answers": sum(answers_of(entry) for entry in rounds),
        "best_round": content["best"]["round"],
        "ended_by": content["ended_by"],
        "off": content["off"],
        "rounds": rounds,
    }


def answers_of(entry: Facts) -> int:
    """Number of answers that a round generated, including those to prompts that it made."""
    made = [entry.get("generated"), entry.get("variations"), entry.get("branches")]
    return sum(int(found["answers"]) for found in made if found)


# The page

LABELS = {
    OPEN: "open loop: one training on greedy answers, generated once",
    LOOP: "**rounds, as the recipe sets them**",
    ANSWERS: "rounds, fresh answers alone",
    DISTINCT: "one training on all answers that the rounds had",
}
HEADER = ["row", "steps", "training tokens", "answers", "tau"]
HEADER += ["accepted drafts per pass against the open loop", "lossless"]
ROUNDS = ["round", "answers", "generation", "training tokens", "tau, validation prompts", "gain"]
ROUNDS += ["learns from"]
FEW = (
    "Both sides have the same prompts and as many training tokens as above, by `python -m "
    f"{SCRIPT} --few-prompts`. The open loop goes through its greedy answers again and again; in "
    "the rounds (`experiment=embedded_few_prompts`) the target also writes prompts of the same "
    "kind itself and answers them ([variations](../feedback.md))."
)


def markdown(content: Facts) -> list[str]:
    """The lines of loop.md."""
    settings = content["settings"]
    lines = [
        "# Rounds against one long training",
        "",
        f"Written by `{content['command']}` from [loop.json](loop.json). Target "
        f"`{settings['target']['id']}` ({settings['target']['parameters']:,} parameters), "
        f"{settings['prompts']} held-out prompts that took part in no decision, temperature "
        f"{settings['temperature']:g}, chains of {settings['depth']}, up to "
        f"{settings['max_new_tokens']} "
        "new tokens. Brackets: 95% bootstrap intervals over prompts; gains are paired. Training "
        "tokens: without padding, trials included. How rounds work: [rounds.md](../rounds.md).",
        "",
    ]
    for kind, entry in content["kinds"].items():
        lines += [f"## {kind}", "", *section(entry)]
    if few := content.get("few_prompts"):
        lines += [f"# From {few['prompts']} prompts", "", FEW, ""]
        for kind, entry in few["kinds"].items():
            lines += [f"## {kind}, {few['prompts']} prompts", "", *section(entry)]
    if found := content.get("killed"):
        same = "the same" if found["same_weights"] else "OTHER"
        summary = "the same" if found["same_summary"] else "ANOTHER"
        places = ", ".join(dict.fromkeys(found["places"]))
        lines += [
            "## Killed",
            "",
            f"A loop of {found['rounds']} rounds, killed {found['kills']} times at random points "
            f"(in: {places}) and repeated: {same} weights to the bit, {summary} loop.json but for "
            "times.",
            "",
        ]
    return lines


def section(entry: Facts) -> list[str]:
    lines = [f"`{' '.join(entry['overrides'])}`", "", *compared(entry)]
    for seed, again in entry.get("repeated", {}).items():
        title = f"Repeated with other prompts, as many, and seed {seed}:"
        lines += [title, "", *compared(again)]
    if LOOP in entry["rows"]:
        table = [round_line(found) for found in entry["rows"][LOOP]["rounds"]]
        lines += ["The rounds of the recipe:", "", *markdown_table(ROUNDS, table), ""]
    return lines


def compared(entry: Facts) -> list[str]:
    """The table of a kind's rows, and remarks."""
    remarks, table = [], []
    if "loop_over_distinct" in entry:
        remarks.append(
            "- Rounds against one training on the same answers, generated at once: accepted drafts "
            f"per pass {percent(entry['loop_over_distinct'])}."
        )
    for name, row in entry["rows"].items():
        for switch, reason in row.get("off", {}).items():
            remarks.append(f"- Row {name}: the loop turned {switch} off by itself: {reason}.")
        lossless = row["lossless"]
        ties = f", {lossless['near_ties']} near ties" if lossless["near_ties"] else ""
        change = "-" if name == OPEN else percent(row["over_open"])
        same = f"{lossless['identical']}/{lossless['sequences']}{ties}"
        spent = [str(row["steps"]), f"{row['tokens']:,.0f}", f"{row['answers']:,}"]
        table.append([LABELS[name], *spent, tau_cell(row), change, same])
    return [*markdown_table(HEADER, table), "", *remarks, ""]


def tau_cell(found: Facts, form: str = ".2f") -> str:
    return cell(found["tau"], found["tau_ci95"], form)


def percent(found: Facts) -> str:
    """A gain in accepted drafted tokens per pass (tau - 1)."""
    return cell(found["accepted"], found["accepted_ci95"], "+.1%")


def round_line(entry: Facts) -> list[str]:
    """One line about a round of a loop."""
    gained, speed = entry.get("gain"), entry.get("generation")
    fast = "plain"
    if speed:
        lossless = speed["lossless"]
        fast = (
            f"x {speed['speedup']:.2f}; {lossless['identical']}/{lossless['sequences']} as plain, "
            f"{lossless['mismatches']} wrong"
        )
    return [
        str(entry["round"]),
        f"{answers_of(entry):,}",
        fast,
        f"{entry['tokens']:,.0f}",
        tau_cell(entry["measured"]),
        tau_cell(gained, "+.2f") if gained else "-",
        ", ".join(entry["switches"]) or "answers",
    ]


main = command(
    report,
    kinds={"nargs": "*", "choices": list(KINDS), "default": list(KINDS)},
    rows={"nargs": "*", "choices": RUN, "default": RUN},
    work=(Path("outputs/loop_report"), "for runs"),
    open=Path("outputs/families/train"),
    few_prompts=(False, "rounds from few prompts instead"),
    seed=(0, "with --few-prompts: other prompts"),
)

if __name__ == "__main__":
    sys.exit(main())
