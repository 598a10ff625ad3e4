"""Evidence for watch and refresh: `python -m scripts.evidence.staleness` writes
docs/reports/watch.json.

Run it after `make demo`. It fine-tunes the embedded target on C++ headers (scripts/assets), and
changes it in other ways: with a merged LoRA, quantised, with another system prompt. A drafter that
the demo trained on the unchanged target gets a reference on prompts that neither has seen; then
`headstart watch` decodes other unseen prompts with every version of the target. False alarms are
counted on streams resampled from the answers of the unchanged target. `headstart refresh` is
compared with a training by the demo's recipe on the new target's answers to 1,440 prompts, two
passes, on held-out prompts of old and new domains. Finished steps are skipped, so the command may
be repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from inference.decoding.config import DecodeConfig
from inference.manifest import read_manifest, write_json
from inference.measure.metrics import divide, interval95, middle95, resample_weights, tau_estimate
from inference.measure.prompts import load_prompts
from inference.staleness.evidence import Bets, Grid
from inference.staleness.reference import WATCH_FILE, Reference
from inference.staleness.result import STALENESS_FILE
from inference.staleness.sequential_test import DriftTest
from scripts.assets import changed_targets, cpp_headers
from scripts.evidence.common import Facts, decode_totals, read_json, run_on_target, tau_facts
from scripts.run.revision import git_state
from scripts.tools.common import PROMPTS, REPORTS, ROOT, TARGET, command, cpu_target

TOKENS, WATCHED, DEPTH = 96, 200, 3
SYSTEM = "You are a pirate captain. Answer every question in verse, and never write code."
STREAMS, LENGTH = 1000, 400
ALARM_RATE, TOLERANCE = 0.01, 0.05
STEPS = {"distilled": 200, "eagle3": 400}
"""Steps of the full training: about two passes over the answers, in rows of 512 with the demo's
batches."""
SHARE = 0.1
"""Share of the full training's tokens that a refresh may take."""
RESAMPLED = {"unchanged": 1, "finetuned": 5, "lora": 5}
"""Version of the target whose answers are resampled -> the number by which `STREAMS` is divided for
it."""
WATCH_KEYS = ("verdict", "alarms", "alarm_after", "test", "domains")
KINDS = ("distilled", "eagle3")
"""Drafters that the demo trains on its first answers, each by
conf/experiment/embedded_KIND.yaml."""
CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unchanged": ("", ()),
    "finetuned": ("finetuned", ()),
    "lora": ("lora", ()),
    "int8": ("", ("target.quantization=torchao-int8",)),
    "int4": ("", ("target.quantization=bnb-4bit", "decode.compile=false")),
    "system": ("", (f"watch.system='{SYSTEM}'",)),
}
"""Version of the target -> its folder (empty: the unchanged target), and further overrides."""


class Evidence:
    """All evidence for one drafter of the demo; every step is done once.

    work: the report's folder; drafters: the demo's run.
    """

    def __init__(self, work: Path, drafters: Path, kind: str) -> None:
        self.work, self.kind = work, kind
        self.old = drafters / "train" / kind / "best"
        self.prompts, self.target = work / "prompts", work / "finetuned"
        self.full = work / "full" / "train" / kind
        self.refresh_run, self.watches = work / f"refresh-{kind}", work / f"watch-{kind}"
        self.refreshed = self.refresh_run / "train" / kind / "best"
        self.reference_file = work / f"reference-{kind}.json"

    def stage(self, name: str, place: Path, target: Path, *overrides: str) -> None:
        """Run a stage on a version of the target; a watch may raise an alarm."""
        own = (f"run.threads={torch.get_num_threads()}", *overrides)
        statuses, recipe = (0, 1) if name == "watch" else (0,), f"demo,embedded_{self.kind}"
        run_on_target(name, target, place, *own, experiment=recipe, statuses=statuses)

    # Making

    def train_full(self) -> Facts:
        place, target = self.work / "full", self.target
        asked = (f"data.path={self.prompts / 'train.jsonl'}", "data.limit=null")
        self.stage("generate", place, target, "data=embedded", *asked)
        own = [f"train.prompts=[{self.prompts / 'validation.jsonl'}]"]
        own += [f"train.max_steps={STEPS[self.kind]}", f"train.eval_every={STEPS[self.kind]}"]
        self.stage("train", place, target, *own)
        found = read_manifest(self.full, "train")
        return {key: found[key] for key in ("steps", "tokens", "seconds")}

    def refresh(self, full: Facts) -> Facts:
        """`headstart refresh` within its share of the full training's tokens; returns
        refresh.json."""
        place = self.prompts
        own = [f"refresh.drafter={self.old}", f"refresh.old_target={TARGET}"]
        own += ["refresh.until=budget", f"train.max_steps={int(SHARE * full['tokens']) // 512}"]
        own += ["train.global_batch=1", "train.micro_batch=1", "train.eval_every=26"]
        own += ["train.patience=0", "data=embedded", f"data.path={place / 'train.jsonl'}"]
        own += [f"train.prompts=[{place / 'validation.jsonl'}]"]
        own += ["bench=jsonl", f"bench.prompts={place / 'measuring.jsonl'}"]
        self.stage("refresh", self.refresh_run, self.target, *own)
        found: Facts = read_json(self.refresh_run / "refresh" / "refresh.json")
        return found

    # Watching

    def watch(self, folder: str, prompts: str, *overrides: str) -> None:
        """`headstart watch` on a version of the target, with the prompts of a file."""
        own = [f"watch.drafter={self.old}", f"watch.reference={self.reference_file}"]
        own += ["bench=jsonl", f"bench.prompts={self.prompts / prompts}.jsonl", *overrides]
        self.stage("watch", self.watches, self.work / folder if folder else TARGET, *own)

    def reference(self) -> Reference:
        if not self.reference_file.is_file():
            self.watch("", "reference", "watch.learn=true", f"decode.max_new_tokens={TOKENS}")
        return Reference.read(self.reference_file)

    def watched(self, name: str) -> Facts:
        """The result of `headstart watch` on a version of the target.

        It sees `WATCHED` fresh prompts, and for the unchanged target all of them.
        """
        path = self.watches / name / STALENESS_FILE
        if not path.is_file():
            most = 10_000 if name == "unchanged" else WATCHED
            own = [f"watch.name={name}", "watch.stop=false", f"watch.max_prompts={most}"]
            folder, change = CHANGES[name]
            self.watch(folder, "fresh", *own, *change)
        found = read_json(path)
        return {key: found[key] for key in WATCH_KEYS}

    def resample(self, reference: Reference, name: str, count: int) -> Facts:
        """Alarms on streams whose reference is drawn from all answers of the unchanged target.

        Their fresh answers are drawn from the same answers ("unchanged") or from those of a changed
        target.
        """
        path = self.work / f"streams-{self.kind}" / f"{name}.json"
        if path.is_file():
            found: Facts = read_json(path)
            return found
        unchanged = pools(reference, Reference.read(self.watches / "unchanged" / WATCH_FILE))
        changed = Reference.read(self.watches / name / WATCH_FILE)
        fresh = unchanged if name == "unchanged" else pools(changed)
        sizes = {domain: len(tally.answers) for domain, tally in reference.tallies.items()}
        grid, rng = Grid(reference.depth), np.random.default_rng(0)
        ends = [alarm(grid, reference.most, unchanged, sizes, fresh, rng) for _ in range(count)]
        raised = sorted(end for end in ends if end is not None)
        after = {q: float(np.percentile(raised, q)) for q in (50, 95)} if raised else None
        found = {
            "streams": count,
            "length": LENGTH,
            "alarms": len(raised),
            "share": divide(len(raised), count),
            "share_within_200": divide(sum(value <= WATCHED for value in raised), count),
            "answers_to_alarm": after,
            "bound": ALARM_RATE,
            "tolerance": TOLERANCE,
        }
        write_json(path, found)
        return found

    # tau

    def compare(self) -> Facts:
        """tau of the old, the refreshed and the retrained drafter; ratios with paired intervals."""
        target = cpu_target(self.target)
        checkpoints = {"old": self.old, "refreshed": self.refreshed, "full": self.full / "best"}
        prompts = load_prompts(self.prompts / "measuring.jsonl")
        decode = DecodeConfig(depth=DEPTH, max_new_tokens=TOKENS, batch_size=16)
        sides = {
            name: decode_totals(target, folder, prompts, decode, changed_target=True)
            for name, folder in checkpoints.items()
        }
        weights = resample_weights(len(sides["full"].prompts), seed=0)
        drawn = {name: (weights @ x.committed) / (weights @ x.passes) for name, x in sides.items()}
        tau = {name: side.committed.sum() / side.passes.sum() for name, side in sides.items()}
        regained = (drawn["refreshed"] - drawn["old"], drawn["full"] - drawn["old"])
        is_gap = middle95(regained[1])[0] > 0  # otherwise the share is of nothing
        rows = {}
        for name, side in sides.items():
            parts = side.domain_rows().items()
            domains = {domain: tau_estimate(side.take(part)).tau for domain, part in parts}
            rows[name] = {**tau_facts(tau_estimate(side)), "domains": domains}
        return {
            "prompts": len(sides["full"].prompts),
            "sides": rows,
            "refreshed_by_full": divide(tau["refreshed"], tau["full"]),
            "refreshed_by_full_ci95": interval95(drawn["refreshed"], drawn["full"]),
            "gap_regained": divide(tau["refreshed"] - tau["old"], tau["full"] - tau["old"]),
            "gap_regained_ci95": interval95(*regained) if is_gap else None,
        }

    def collect(self, skipped: Sequence[str]) -> Facts:
        """The content of watch.json."""
        reference = self.reference()
        watched = {name: self.watched(name) for name in CHANGES if name not in skipped}
        full = self.train_full()
        refreshed = self.refresh(full)
        tau, cost = self.compare(), refreshed["cost"]
        answers = read_manifest(self.work / "full" / "generate", "generate")["counts"]
        share = divide(cost["training_tokens"], full["tokens"])
        settings = refreshed["settings"].items()
        costs = {
            "full": {"answers": answers["done"], "answer_tokens": answers["tokens"], **full},
            "refresh": cost,
            "training_tokens_share": share,
            "settings": {k: v for k, v in settings if k not in ("drafter", "old_target")},
        }
        streams = {
            name: self.resample(reference, name, STREAMS // part)
            for name, part in RESAMPLED.items()
        }
        quiet = watched["unchanged"]["alarms"] == [] and streams["unchanged"]["share"] < ALARM_RATE
        return {
            "drafter": {"kind": self.kind},
            "reference": {name: len(tally.answers) for name, tally in reference.tallies.items()},
            "watched": watched,
            "resampled": streams,
            "refresh": {"tau": tau, "cost": costs},
            "holds": {
                "alarm_within_200": (watched["finetuned"]["alarm_after"] or LENGTH) <= WATCHED,
                "false_alarms_below_1_percent": quiet,
                "regains_90_percent": tau["refreshed_by_full"] >= 0.9 and share <= SHARE,
            },
        }


Pools = dict[str, list[tuple[int, int]]]
"""Domain -> (accepted, passes) of answers."""


def pools(*references: Reference) -> Pools:
    found: Pools = {}
    for reference in references:
        for name, tally in reference.tallies.items():
            found.setdefault(name, []).extend(tally.pairs())
    return found


def alarm(
    grid: Grid,
    most: int,
    known: Pools,
    sizes: dict[str, int],
    fresh: Pools,
    rng: np.random.Generator,
) -> int | None:
    """Number of fresh answers until the watch alarms on a stream of `LENGTH` resampled ones; None:
    never.

    sizes: answers of the resampled reference by domain. If both pools are the same, the drafter is
    unchanged by construction.
    """
    names = sorted(sizes)
    answers = np.array([len(fresh[name]) for name in names], dtype=np.float64)
    order = rng.choice(len(names), LENGTH, p=answers / answers.sum())
    bets, drawn = {}, {}
    for number, name in enumerate(names):
        chosen = rng.integers(0, len(known[name]), sizes[name])
        bets[name] = Bets(grid, most, [known[name][i] for i in chosen])
        drawn[name] = iter(rng.integers(0, len(fresh[name]), int((order == number).sum())))
    test = DriftTest(grid, most, dict(bets), TOLERANCE, ALARM_RATE)
    for number in order:
        name = names[number]
        test.add(name, *fresh[name][next(drawn[name])])
        if test.alarm_after is not None:
            break
    return test.alarm_after


def report(given: argparse.Namespace) -> None:
    """Run every step that is not yet done, and write the report."""
    torch.set_num_threads(given.threads)
    work, drafters = given.work.resolve(), given.drafters.resolve()
    sides = [Evidence(work, drafters, kind) for kind in given.kinds]
    prompts = sides[0].prompts
    if not (prompts / "measuring.jsonl").is_file():
        changed_targets.write_prompts(prompts, PROMPTS)
    pairs = cpp_headers.split_pairs(cpp_headers.operators())["train"]
    targets = {}
    for name, recipe in changed_targets.RECIPES.items():
        changed_targets.finetune(TARGET, work / name, pairs, recipe)
        targets[name] = read_json(work / name / changed_targets.MADE_FILE)
    content = {
        "format": 1,
        "command": given.command,
        "git": git_state().get("revision", ""),
        "targets": targets,
        "system": SYSTEM,
        "kinds": {side.kind: side.collect(given.skip) for side in sides},
    }
    write_json(given.out, content)


main = command(
    report,
    work=ROOT / "outputs" / "watch_report",
    drafters=(ROOT / "outputs" / "demo", "the demo's run"),
    kinds={"nargs": "+", "choices": KINDS, "default": ["distilled"]},
    skip={
        "nargs": "+",
        "choices": ("int8", "int4"),
        "default": [],
        "help": "where torchao or bitsandbytes is missing",
    },
    threads=1,
    out=REPORTS / "watch.json",
)

if __name__ == "__main__":
    sys.exit(main())
