"""Rounds against one open-loop training: docs/reports/loop.json and loop.md.

    headstart loop experiment=families               # the open-loop trainings
    python -m scripts.evidence.rounds                # all; or some: --kinds distilled --rows loop
    python -m scripts.evidence.rounds --few-prompts  # from 96 prompts; --seed 1: from 96 other ones
    python -m tests.chaos.kill_loop --kills 10       # adds a loop that is killed ten times

The rows of a kind are `open`, the open-loop training (two passes over the greedy answers of all
prompts); `loop`, rounds as conf/experiment/embedded_loop.yaml sets them; `answers`, the same rounds
without any feedback; `distinct`, one open-loop training on all answers that `loop` had, generated
at once. All have the same number of training tokens or fewer. Everything is measured on held-out
prompts that take part in no decision. What has been run is kept, so an interrupted command
continues; what has not been run is left out. (`ablation`, every switch of the rounds alone, was run
by scripts/loop_ablation.py of commit 24c5ba3; its rows stay in the report.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, cast

from heads.api.checkpoint import WEIGHTS_FILE
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import PassRecord
from inference.manifest import MANIFEST_FILE, file_sha256, read_manifest, write_json
from inference.measure.metrics import Outcome, Totals, gain, tau_estimate
from inference.measure.prompts import load_prompts
from inference.report.markdown import markdown_table
from inference.target.model import TargetModel
from scripts.evidence.common import (
    REPORTS,
    cell,
    decode_prompts,
    family_recipe,
    read_json,
    run_stage,
    write_page,
)
from scripts.tools.common import PROMPTS, TARGET, add_options, make_parser, run
from scripts.tools.recording import cpu_target
from train.feedback.build import build
from train.feedback.config import FeedbackConfig

SCRIPT = "scripts.evidence.rounds"
OPEN, LOOP, ANSWERS, DISTINCT = "open", "loop", "answers", "distinct"
RECIPE, FEW_RECIPE = "experiment=embedded_loop", "experiment=embedded_few_prompts"
KINDS = {
    "eagle3": ("eagle3_copied", 3e-3),
    "dspark": ("dspark", 1e-3),
    "distilled": ("distilled", 1.5e-3),
}
"""Kind -> its row in conf/experiment/families.yaml, and its learning rate."""
MORE = {"distilled": ("train.on_policy.share=0.5", "train.on_policy.window=8")}
"""What the rounds of a kind set besides: a switch that only this kind has."""
OFF = ("feedback.token_weights=false", "feedback.anchor_weights=false", "train.on_policy.share=0")
OPEN_STEPS = 122
"""As many as the open-loop trainings of experiment=families have."""
FEW_PROMPTS = 96
DECODE = DecodeConfig(temperature=0.0, shape="chain", depth=4, batch_size=16, max_new_tokens=96)
ROUND_KEYS = "round generated branches variations generation trials switches".split()
ROUND_KEYS += ["measured", "gain", "rises"]
"""The facts of a round. Without speeds: rounds run beside other work, on a machine that pauses."""


class Estimate(TypedDict, total=False):
    """tau (or its rise) and the gain in accepted drafts per pass (a ratio - 1), with intervals."""

    tau: float
    tau_ci95: Sequence[float]
    accepted: float
    accepted_ci95: Sequence[float]


class Generation(TypedDict):
    """Speed and losslessness of a round's generation with its drafter."""

    speedup: float
    lossless: Mapping[str, int]


class Round(TypedDict, total=False):
    """One round of a loop."""

    round: int
    generated: Mapping[str, float]
    branches: Mapping[str, float]
    variations: Mapping[str, float]
    generation: Generation
    switches: list[str]
    measured: Estimate
    gain: Estimate
    tokens: float
    steps: int


class RoundsRow(TypedDict, total=False):
    """One drafter on the held-out prompts, and what its training took; rounds: of a loop."""

    tau: float
    tau_ci95: Sequence[float]
    tar: float
    unconditional: Sequence[float]
    lossless: Mapping[str, int]
    weights_sha256: str
    over_open: Estimate
    over_plain: Estimate
    steps: int
    tokens: float
    answers: int
    best_round: int
    ended_by: str
    off: Mapping[str, str]
    rounds: list[Round]


class Kind(TypedDict, total=False):
    """The rows of a kind, each against the open loop; repeated: seed -> the same, other prompts."""

    overrides: Sequence[str]
    rows: dict[str, RoundsRow]
    loop_over_distinct: Estimate
    ablation: dict[str, RoundsRow]
    repeated: dict[str, Kind]


class FewPrompts(TypedDict):
    """The same from few prompts."""

    prompts: int
    kinds: dict[str, Kind]


class Settings(TypedDict, total=False):
    """What everything is measured on."""

    target: Mapping[str, str | int]
    prompts: int
    temperature: float
    depth: int
    max_new_tokens: int
    ablation_steps: int


class Killed(TypedDict):
    """The result of a loop that was killed again and again (tests/chaos/kill_loop.py)."""

    kills: int
    places: list[str]
    rounds: int
    same_weights: bool
    same_summary: bool


class Content(TypedDict, total=False):
    """loop.json."""

    format: int
    command: str
    kinds: dict[str, Kind]
    settings: Settings
    few_prompts: FewPrompts
    killed: Killed


class PromptPasses(TypedDict):
    """(accepted, committed, rejected) of every pass over a prompt."""

    id: str
    domain: str
    passes: list[tuple[int, int, int]]


class Measured(TypedDict):
    """Passes of a drafter on the held-out prompts; key: what they depend on."""

    key: Sequence[str | int]
    weights_sha256: str
    lossless: Mapping[str, int]
    prompts: list[PromptPasses]


def own_overrides(kind: str) -> list[str]:
    """The overrides of a kind: its recipe and learning rate in experiment=families."""
    row, rate = KINDS[kind]
    return [*family_recipe(row), f"optim.lr={rate:g}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, measure, write both files; returns the exit status."""
    parser = make_parser(SCRIPT, __doc__)
    rows = (LOOP, ANSWERS, DISTINCT)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", nargs="*", choices=rows, default=rows)
    add_options(
        parser, work=(Path("outputs/loop_report"), "for runs"), open=Path("outputs/families/train")
    )
    few = "rounds from few prompts instead"
    parser.add_argument("--few-prompts", action="store_true", help=few)
    parser.add_argument("--seed", type=int, default=0, help="with --few-prompts: other prompts")
    return run(parser, report, arguments)


def report(given: argparse.Namespace) -> None:
    """Run and measure, kind by kind."""
    content: Content = {"format": 1, "kinds": {}, **read_json(REPORTS / "loop.json")}
    held_out = HeldOut(cpu_target(), given.work)
    content["settings"] = {**content.get("settings", {}), **held_out.settings()}
    for kind in given.kinds:
        if given.few_prompts:
            from_few_prompts(kind, given, held_out, content)
        else:
            for row in given.rows:
                run_row(kind, row, given.work / kind)
            row, rate = KINDS[kind]
            opened = given.open / f"{row}@{rate:g}"
            comparison = Comparison(given.work / kind, opened, held_out)
            known = content["kinds"].get(kind, Kind())
            overrides = [*own_overrides(kind), *MORE.get(kind, ())]
            content["kinds"][kind] = {**known, "overrides": overrides, **comparison.content()}
        write(content)


def write(content: Content) -> None:
    """Write loop.json and loop.md."""
    few = content["few_prompts"]["kinds"].values() if "few_prompts" in content else ()
    seeds = sorted({int(seed) for entry in few for seed in entry.get("repeated", {})})
    script = f"python -m {SCRIPT}"
    commands = ["headstart loop experiment=families", script]
    commands += [f"{script} --few-prompts"] if few else []
    commands += [f"{script} --few-prompts --seed {seed}" for seed in seeds]
    commands += ["python -m tests.chaos.kill_loop --kills 10"] if "killed" in content else []
    content["command"] = " && ".join(commands)
    write_json(REPORTS / "loop.json", content)
    write_page(REPORTS / "loop.md", markdown(content))


# Running


def run_row(kind: str, row: str, work: Path) -> None:
    """Run a row to its end; stages that are complete are skipped."""
    own, more = own_overrides(kind), MORE.get(kind, ())
    place = (f"run.root={work}", f"run.name={row}", "run.threads=1")
    if row == DISTINCT:
        train_distinct(own, work, place)
        return
    if row == ANSWERS:  # its first round is that of `loop`
        for name in ("round-0", "round-1/generate", "round-1/speed.json"):
            source, link = work / LOOP / name, work / row / name
            if source.exists() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source.resolve())
    run_stage("loop", RECIPE, *own, *more, *(() if row == LOOP else OFF), *place)


def train_distinct(own: Sequence[str], work: Path, place: Sequence[str]) -> None:
    """One training on all answers that the rounds had, with as many steps as they had together."""
    rounds = read_json(work / LOOP / "loop.json")["rounds"]
    folder = work / DISTINCT / "answers"
    answers = [work / LOOP / f"round-{entry['round']}" / "generate" for entry in rounds]
    build([], answers, folder, FeedbackConfig())
    steps = sum(entry["training"]["steps"] for entry in rounds)
    run_stage("train", RECIPE, *own, f"train.max_steps={steps}", f"run.answers={folder}", *place)


def from_few_prompts(
    kind: str, given: argparse.Namespace, held_out: HeldOut, content: Content
) -> None:
    """Run and compare rounds from few prompts, for one kind."""
    work = given.work / "few_prompts" / (f"{kind}-{given.seed}" if given.seed else kind)
    own, data = own_overrides(kind), other_prompts(given.seed)
    place = [f"run.root={work}", f"run.name={LOOP}", "run.threads=1"]
    run_stage("loop", FEW_RECIPE, *own, *data, *place)
    run_stage("train", *open_training(own, given.seed, work))
    comparison = Comparison(work, work / OPEN / "train" / OPEN, held_out, FEW_PROMPTS)
    kinds = content.setdefault("few_prompts", {"prompts": FEW_PROMPTS, "kinds": {}})["kinds"]
    found: Kind = {"overrides": [*own, *data], **comparison.content()}
    known = kinds.setdefault(kind, Kind())
    if given.seed:
        known.setdefault("repeated", {})[str(given.seed)] = found
    else:
        known.update(found)


def other_prompts(seed: int) -> list[str]:
    """The overrides of a repetition: as many other prompts, another seed. 0: the recipe's own."""
    return ["data.shuffle=true", f"data.seed={seed}", f"run.seed={seed}"] if seed else []


def open_training(own: Sequence[str], seed: int, work: Path) -> list[str]:
    """The overrides of the open-loop training on the first round's answers, again and again.

    Those are greedy and made without a drafter, which is what an open loop begins with.
    """
    answers = work / LOOP / "round-0" / "generate"
    place = [
        f"run.root={work}",
        f"run.name={OPEN}",
        f"run.drafter={OPEN}",
        f"run.answers={answers}",
    ]
    steps = [f"train.max_steps={OPEN_STEPS}", f"run.seed={seed}", "run.threads=1"]
    return [FEW_RECIPE, *own, *place, *steps]


# Measuring


class HeldOut:
    """The held-out prompts, the target's own answers to them, and what drafters do with them.

    Acceptance does not depend on the batch, so prompts are decoded together and no clock runs.
    Every answer is compared with plain decoding. Results are kept in files and made again for other
    weights.
    """

    def __init__(self, target: TargetModel, work: Path) -> None:
        self.target = target
        names = ("code", "explain", "reference")
        self.prompts = load_prompts([PROMPTS / f"{name}.jsonl" for name in names])
        path = work / "plain.json"
        key = [target.info.revision, DECODE.max_new_tokens, len(self.prompts)]
        known = read_json(path)
        if known.get("key") != key:
            done = decode_prompts(target, None, self.prompts, replace(DECODE, shape="none"))
            known = {"key": key, "answers": [item.tokens for item in done]}
            write_json(path, known)
        self.plain: list[list[int]] = known["answers"]

    def settings(self) -> Settings:
        """What everything is measured on."""
        info, name = self.target.info, str(TARGET.relative_to(TARGET.parents[1]))
        return {
            "target": {"id": name, "revision": info.revision, "parameters": info.parameters},
            "prompts": len(self.plain),
            "temperature": DECODE.temperature,
            "depth": DECODE.depth,
            "max_new_tokens": DECODE.max_new_tokens,
        }

    def measure(self, checkpoint: Path, path: Path) -> Measured:
        """Passes per prompt of the drafter in `checkpoint`, and its losslessness; kept in
        `path`."""
        weights = file_sha256(checkpoint / WEIGHTS_FILE)
        key: list[str | int] = [weights, DECODE.depth, DECODE.max_new_tokens, len(self.plain)]
        found: Measured = read_json(path)
        if found.get("key") == key:
            return found
        done = decode_prompts(self.target, checkpoint, self.prompts, DECODE)
        rows: list[PromptPasses] = []
        for item in done:
            prompt = self.prompts[item.request.index]
            passes = [(p.accepted, p.committed, int(p.rejected)) for p in item.passes]
            rows.append({"id": prompt.id, "domain": prompt.domain, "passes": passes})
        requests, answers = [item.request for item in done], [item.tokens for item in done]
        sampling, width = DECODE.sampling(), DECODE.depth + 1
        report = audit(self.target, requests, self.plain, answers, sampling, width)
        found = Measured(key=key, weights_sha256=weights, lossless=report.counts(), prompts=rows)
        write_json(path, found)
        return found


def totals(found: Measured) -> Totals:
    """Sums per prompt of what `HeldOut.measure` found."""
    outcomes = []
    for row in found["prompts"]:
        passes = [PassRecord(a, c, bool(r)) for a, c, r in row["passes"]]
        outcomes.append(Outcome(row["id"], row["domain"], passes))
    return Totals.collect(outcomes, DECODE.depth)


def gain_facts(new: Measured, old: Measured) -> Estimate:
    """The gain of one drafter over another as loop.json holds it."""
    found = gain(totals(new), totals(old))
    return {
        "tau": found.tau,
        "tau_ci95": found.tau_ci95,
        "accepted": found.accepted,
        "accepted_ci95": found.accepted_ci95,
    }


@dataclass
class Comparison:
    """The rows of a kind that have been run, in `work`; the open-loop training is in `opened`."""

    work: Path
    opened: Path
    held_out: HeldOut
    answers: int = 1440
    """Answers that the open-loop training reads."""

    def content(self) -> Kind:
        """`rows`, each against the open loop, and `loop_over_distinct`."""
        base = self.held_out.measure(self.opened / "best", self.work / f"{OPEN}.json")
        rows = {OPEN: self.training_row(base, base, self.opened, self.answers)}
        content: Kind = {"rows": rows}
        for name in (LOOP, ANSWERS):
            if (self.work / name / "loop.json").is_file():
                rows[name] = self.loop_row(name, base)
        trained = next(iter((self.work / DISTINCT / "train").glob(f"*/{MANIFEST_FILE}")), None)
        if trained is not None and LOOP in rows:
            found = self.held_out.measure(trained.parent / "best", self.work / f"{DISTINCT}.json")
            answers = read_manifest(self.work / DISTINCT / "answers", "generate")["counts"]["done"]
            rows[DISTINCT] = self.training_row(found, base, trained.parent, answers)
            content["loop_over_distinct"] = gain_facts(self.best(LOOP), found)
        return content

    def best(self, name: str) -> Measured:
        """The best drafter of a loop on the held-out prompts."""
        folder = next(iter((self.work / name / "train").glob("*/best")))
        return self.held_out.measure(folder, self.work / f"{name}.json")

    def training_row(
        self, found: Measured, base: Measured, folder: Path, answers: int
    ) -> RoundsRow:
        """The row of one training."""
        manifest = read_manifest(folder, "train")
        steps, tokens = manifest["steps"], manifest["tokens"]
        return RoundsRow(**drafter_row(found, base), steps=steps, tokens=tokens, answers=answers)

    def loop_row(self, name: str, base: Measured) -> RoundsRow:
        """The row of a loop: its best drafter on the held-out prompts, and its rounds."""
        content = read_json(self.work / name / "loop.json")
        rounds: list[Round] = []
        for entry in content["rounds"]:
            kept = {key: entry[key] for key in ROUND_KEYS if key in entry}
            kept["measured"] = {
                key: value
                for key, value in entry["measured"].items()
                if not key.startswith("speedup")
            }
            sums = {"tokens": entry["spent"]["tokens"], "steps": entry["training"]["steps"]}
            rounds.append(cast(Round, kept | sums))
        return RoundsRow(
            **drafter_row(self.best(name), base),
            steps=sum(entry["steps"] for entry in rounds),
            tokens=content["spent"]["tokens"],
            answers=sum(answers_of(entry) for entry in rounds),
            best_round=content["best"]["round"],
            ended_by=content["ended_by"],
            off=content["off"],
            rounds=rounds,
        )


def drafter_row(found: Measured, base: Measured) -> RoundsRow:
    """A drafter's tau, losslessness, and gain over the open loop."""
    estimate = tau_estimate(totals(found))
    return RoundsRow(
        tau=estimate.tau,
        tau_ci95=estimate.ci95,
        tar=estimate.tar,
        unconditional=estimate.unconditional,
        lossless=found["lossless"],
        weights_sha256=found["weights_sha256"],
        over_open=gain_facts(found, base),
    )


def answers_of(entry: Round) -> int:
    """How many answers a round generated, those to prompts of its own making included."""
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
SWITCHES = [
    "switch alone",
    "steps",
    "training tokens",
    "tau",
    "accepted drafts per pass against none",
]
ROUNDS = ["round", "answers", "generation", "training tokens", "tau, validation prompts", "gain"]
ROUNDS += ["learns from"]
FEW = (
    "Both sides have the same prompts and as many training tokens as above, by `python -m "
    f"{SCRIPT} --few-prompts`. The open loop goes through its greedy answers again and again; in "
    "the rounds (`experiment=embedded_few_prompts`) the target also writes prompts of the same "
    "kind itself and answers them ([variations](../feedback.md))."
)


def markdown(content: Content) -> list[str]:
    """The lines of loop.md."""
    lines = ["# Rounds against one long training", "", *about(content)]
    for kind, entry in content["kinds"].items():
        lines += [f"## {kind}", "", *section(entry, content)]
    if "few_prompts" in content:
        few = content["few_prompts"]
        lines += [f"# From {few['prompts']} prompts", "", FEW, ""]
        for kind, entry in few["kinds"].items():
            lines += [f"## {kind}, {few['prompts']} prompts", "", *section(entry, content)]
    if "killed" in content:
        lines += ["## Killed", "", killed(content["killed"]), ""]
    return lines


def about(content: Content) -> list[str]:
    """What the page compares, and on what."""
    found = content["settings"]
    return [
        f"Written by `{content['command']}` from [loop.json](loop.json). Target "
        f"`{found['target']['id']}` ({found['target']['parameters']:,} parameters), "
        f"{found['prompts']} held-out prompts that took part in no decision, temperature "
        f"{found['temperature']:g}, chains of {found['depth']}, up to {found['max_new_tokens']} "
        "new tokens. Brackets: 95% bootstrap intervals over prompts; gains are paired. Training "
        "tokens: without padding, trials included. How rounds work: [rounds.md](../rounds.md).",
        "",
    ]


def section(entry: Kind, content: Content) -> list[str]:
    """A kind's tables."""
    lines = [f"`{' '.join(entry['overrides'])}`", "", *compared(entry)]
    for seed, again in entry.get("repeated", {}).items():
        title = f"Repeated with other prompts, as many, and seed {seed}:"
        lines += [title, "", *compared(again)]
    if "ablation" in entry:
        steps = content["settings"]["ablation_steps"]
        table = [switch_line(name, row) for name, row in entry["ablation"].items()]
        title = f"Every switch alone: {steps} steps from the drafter of round 0."
        lines += [title, "", *markdown_table(SWITCHES, table), ""]
    if LOOP in entry["rows"]:
        table = [round_line(found) for found in entry["rows"][LOOP]["rounds"]]
        lines += ["The rounds of the recipe:", "", *markdown_table(ROUNDS, table), ""]
    return lines


def compared(entry: Kind) -> list[str]:
    """The table of a kind's rows, and what it shows besides."""
    remarks = []
    if "loop_over_distinct" in entry:
        remarks.append(
            "- Rounds against one training on the same answers, generated at once: accepted drafts "
            f"per pass {percent(entry['loop_over_distinct'])}."
        )
    for name, row in entry["rows"].items():
        for switch, reason in row.get("off", {}).items():
            remarks.append(f"- Row {name}: the loop turned {switch} off by itself: {reason}.")
    table = [line(name, row) for name, row in entry["rows"].items()]
    return [*markdown_table(HEADER, table), "", *remarks, ""]


def line(name: str, row: RoundsRow) -> list[str]:
    """One row of a kind's table."""
    lossless = row["lossless"]
    ties = f", {lossless['near_ties']} near ties" if lossless["near_ties"] else ""
    return [
        LABELS[name],
        str(row["steps"]),
        f"{row['tokens']:,.0f}",
        f"{row['answers']:,}",
        cell(row["tau"], row["tau_ci95"]),
        "-" if name == OPEN else percent(row["over_open"]),
        f"{lossless['identical']}/{lossless['sequences']}{ties}",
    ]


def switch_line(name: str, row: RoundsRow) -> list[str]:
    """One row of the ablation."""
    plain = name == "plain"
    return [
        "none" if plain else name,
        str(row["steps"]),
        f"{row['tokens']:,.0f}",
        cell(row["tau"], row["tau_ci95"]),
        "-" if plain else percent(row["over_plain"]),
    ]


def round_line(entry: Round) -> list[str]:
    """One round of a loop."""
    measured, gained, speed = entry["measured"], entry.get("gain"), entry.get("generation")
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
        cell(measured["tau"], measured["tau_ci95"]),
        cell(gained["tau"], gained["tau_ci95"], "+.2f") if gained else "-",
        ", ".join(entry["switches"]) or "answers",
    ]


def percent(found: Estimate) -> str:
    """A gain in accepted drafted tokens per pass (tau - 1)."""
    return cell(found["accepted"], found["accepted_ci95"], "+.1%")


def killed(found: Killed) -> str:
    """The result of the loop that was killed again and again."""
    same = "the same" if found["same_weights"] else "OTHER"
    summary = "the same" if found["same_summary"] else "ANOTHER"
    places = ", ".join(dict.fromkeys(found["places"]))
    return (
        f"A loop of {found['rounds']} rounds, killed {found['kills']} times at random points (in: "
        f"{places}) and repeated: {same} weights to the bit, {summary} loop.json but for times."
    )


if __name__ == "__main__":
    sys.exit(main())
