"""Evidence for watch and refresh: `python -m scripts.evidence.staleness` writes
docs/reports/watch.json.

After `headstart loop experiment=families`. It fine-tunes the embedded target on C++ headers
(scripts/assets), and changes it in other ways: LoRA merged, quantised, with another system prompt.
A drafter of the unchanged target gets a reference on prompts that neither has seen; then `headstart
watch` decodes other unseen prompts with every version of the target. False alarms are counted on
streams resampled from the answers of the unchanged target. `headstart refresh` is compared with a
training from scratch on the new target's answers to 1,440 prompts, on held-out prompts of old and
new domains. Steps that are done are skipped, so the command may be repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch

from inference.decoding.config import DecodeConfig
from inference.manifest import read_manifest, write_json
from inference.measure.metrics import divide, interval95, resample_weights, tau_estimate
from inference.measure.prompts import load_prompts
from inference.staleness.evidence import Grid
from inference.staleness.reference import WATCH_FILE, Reference
from inference.staleness.result import STALENESS_FILE
from scripts.assets import changed_targets, cpp_headers
from scripts.evidence.common import (
    REPORTS,
    TauFacts,
    decode_prompts,
    family_recipe,
    read_json,
    run_on_target,
    sum_up,
    tau_facts,
)
from scripts.evidence.streams import Plan, Streams
from scripts.run.process import git_state
from scripts.tools.common import PROMPTS, ROOT, TARGET, add_options, make_parser, run
from scripts.tools.recording import cpu_target

TOKENS, WATCHED = 96, 200
SYSTEM = "You are a pirate captain. Answer every question in verse, and never write code."
STREAMS, LENGTH = 1000, 400
ALARM_RATE, TOLERANCE = 0.01, 0.05
SHARE = 0.1
"""Of the full training's tokens that a refresh may take."""
RESAMPLED = {"unchanged": 1, "finetuned": 5, "lora": 5}
"""Versions of the target whose answers are resampled, and into which part of all streams."""
WATCH_KEYS = ("verdict", "alarms", "alarm_after", "test", "domains")


RATES = {"distilled": 1.5e-3, "eagle3_copied": 3e-3}
"""Row of conf/experiment/families.yaml -> its best learning rate."""
HEADS = {"distilled": "distilled", "eagle3_copied": "eagle3"}
"""Row -> its kind, which names the refreshed drafter's folder."""


@dataclass(frozen=True)
class Change:
    """A version of the target: its folder (empty: the unchanged one) and further overrides."""

    folder: str = ""
    overrides: tuple[str, ...] = ()


CHANGES = {
    "unchanged": Change(),
    "finetuned": Change("finetuned"),
    "lora": Change("lora"),
    "int8": Change("", ("target.quantization=torchao-int8",)),
    "int4": Change("", ("target.quantization=bnb-4bit",)),
    "system": Change("", (f"watch.system='{SYSTEM}'",)),
}


@dataclass(frozen=True)
class Folders:
    """Where everything is. drafters: the run of the families' drafters."""

    work: Path
    drafters: Path
    row: str

    @property
    def old(self) -> Path:
        """The drafter of the unchanged target."""
        return self.drafters / "train" / f"{self.row}@{RATES[self.row]:g}" / "best"

    @property
    def prompts(self) -> Path:
        """All prompts."""
        return self.work / "prompts"

    @property
    def full(self) -> Path:
        """The training from scratch."""
        return self.work / "full" / "train" / self.row

    @property
    def refreshed(self) -> Path:
        """The refresh's run."""
        return self.work / f"refresh-{self.row}"

    @property
    def reference(self) -> Path:
        """The reference of the unchanged target."""
        return self.work / f"reference-{self.row}.json"

    @property
    def watches(self) -> Path:
        """The run of all watches."""
        return self.work / f"watch-{self.row}"

    def stage(self, name: str, run_name: str, folder: str, *overrides: str) -> None:
        """Run a stage on a version of the target; a watch may raise its alarm."""
        path = self.work / folder if folder else TARGET
        own = (f"run.threads={torch.get_num_threads()}", *overrides)
        statuses = (0, 1) if name == "watch" else (0,)
        run_on_target(name, path, self.work / run_name, *own, statuses=statuses)


class Training(TypedDict):
    """The facts of a training's manifest that the report holds."""

    steps: int
    tokens: int
    seconds: float


class SideTau(TauFacts):
    """tau of one drafter on the changed target, over all prompts and by domain."""

    domains: dict[str, float]


class Comparison(TypedDict):
    """tau of the old, the refreshed and the retrained drafter; ratios with paired intervals."""

    prompts: int
    sides: dict[str, SideTau]
    refreshed_by_full: float
    refreshed_by_full_ci95: tuple[float, float]
    gap_regained: float
    gap_regained_ci95: tuple[float, float]


class Resampled(TypedDict):
    """Alarms on resampled streams; answers_to_alarm: percentiles of those that raised one."""

    streams: int
    length: int
    alarms: int
    share: float
    share_within_200: float
    answers_to_alarm: dict[int, float] | None
    bound: float
    tolerance: float


class Watched(TypedDict, total=False):
    """The keys of staleness.json that the verdict of this report reads."""

    alarms: list[object]
    alarm_after: int | None


# Making


def make(folders: Folders) -> None:
    """The changed targets and all prompts."""
    if not (folders.prompts / "measuring.jsonl").is_file():
        changed_targets.write_prompts(folders.prompts, PROMPTS)
    pairs = cpp_headers.split_pairs(cpp_headers.operators())["train"]
    for name, recipe in changed_targets.RECIPES.items():
        changed_targets.finetune(TARGET, folders.work / name, pairs, recipe)


def train_full(folders: Folders) -> Training:
    """A drafter trained from scratch on answers of the fine-tuned target."""
    row, asked = folders.row, f"data.path={folders.prompts / 'train.jsonl'}"
    folders.stage("generate", "full", "finetuned", "data=embedded", asked)
    recipe = (*family_recipe(row), f"optim.lr={RATES[row]}", f"run.drafter={row}")
    validation = f"train.prompts=[{folders.prompts / 'validation.jsonl'}]"
    folders.stage("train", "full", "finetuned", *recipe, validation)
    found = read_manifest(folders.full, "train")
    return Training(steps=found["steps"], tokens=found["tokens"], seconds=found["seconds"])


def refresh(folders: Folders, full: Training) -> Any:
    """`headstart refresh` within its share of the full training's tokens; returns refresh.json."""
    steps = int(SHARE * full["tokens"]) // 512
    place = folders.prompts
    own = [f"refresh.drafter={folders.old}", f"refresh.old_target={TARGET}"]
    own += ["refresh.until=budget", f"train.max_steps={steps}", "train.global_batch=1"]
    own += ["train.micro_batch=1", "train.eval_every=26", "train.patience=0"]
    own += ["data=embedded", f"data.path={place / 'train.jsonl'}"]
    own += [f"train.prompts=[{place / 'validation.jsonl'}]"]
    own += ["bench=jsonl", f"bench.prompts={place / 'measuring.jsonl'}"]
    folders.stage("refresh", folders.refreshed.name, "finetuned", *own)
    return read_json(folders.refreshed / "refresh" / "refresh.json")


# Watching


def learn(folders: Folders) -> Reference:
    """The reference of the unchanged target."""
    if not folders.reference.is_file():
        own = [f"watch.drafter={folders.old}", "watch.learn=true"]
        own += [f"watch.reference={folders.reference}", f"decode.max_new_tokens={TOKENS}"]
        own += ["bench=jsonl", f"bench.prompts={folders.prompts / 'reference.jsonl'}"]
        folders.stage("watch", folders.watches.name, "", *own)
    return Reference.read(folders.reference)


def watch(folders: Folders, name: str) -> Watched:
    """The result of `headstart watch` on a version of the target.

    It sees `WATCHED` fresh prompts, and of the unchanged target all of them.
    """
    path = folders.watches / name / STALENESS_FILE
    if not path.is_file():
        most = 10_000 if name == "unchanged" else WATCHED
        own = [f"watch.name={name}", f"watch.drafter={folders.old}", "watch.stop=false"]
        own += [f"watch.reference={folders.reference}", f"watch.max_prompts={most}"]
        own += ["bench=jsonl", f"bench.prompts={folders.prompts / 'fresh.jsonl'}"]
        change = CHANGES[name]
        folders.stage("watch", folders.watches.name, change.folder, *own, *change.overrides)
    found = read_json(path)
    return cast(Watched, {key: found[key] for key in WATCH_KEYS})


def pools(*references: Reference) -> dict[str, list[tuple[int, int]]]:
    """(accepted, passes) of the answers of several references by domain."""
    found: dict[str, list[tuple[int, int]]] = {}
    for reference in references:
        for name, tally in reference.tallies.items():
            found.setdefault(name, []).extend(tally.pairs())
    return found


def resample(folders: Folders, reference: Reference, name: str, count: int) -> Resampled:
    """Alarms on streams whose reference is drawn from all answers of the unchanged target.

    Their fresh answers are drawn from these too ("unchanged") or from those of a changed target.
    """
    path = folders.work / f"streams-{folders.row}" / f"{name}.json"
    if path.is_file():
        return cast(Resampled, read_json(path))
    unchanged = pools(reference, Reference.read(folders.watches / "unchanged" / WATCH_FILE))
    changed = Reference.read(folders.watches / name / WATCH_FILE)
    fresh = unchanged if name == "unchanged" else pools(changed)
    sizes = {domain: len(tally.answers) for domain, tally in reference.tallies.items()}
    plan = Plan(sizes, LENGTH, TOLERANCE, ALARM_RATE)
    streams = Streams(Grid(reference.depth), reference.most, unchanged, fresh, plan)
    raised = sorted(value for value in streams.run(count) if value is not None)
    early = sum(value <= WATCHED for value in raised)
    after = {q: float(np.percentile(raised, q)) for q in (50, 95)} if raised else None
    found = Resampled(
        streams=count,
        length=LENGTH,
        alarms=len(raised),
        share=divide(len(raised), count),
        share_within_200=divide(early, count),
        answers_to_alarm=after,
        bound=ALARM_RATE,
        tolerance=TOLERANCE,
    )
    write_json(path, found)
    return found


# tau


def compare(folders: Folders) -> Comparison:
    """tau of the old, the refreshed and the retrained drafter; ratios with paired intervals."""
    target = cpu_target(folders.work / "finetuned")
    refreshed = folders.refreshed / "train" / HEADS[folders.row]
    checkpoints = {
        "old": folders.old,
        "refreshed": refreshed / "best",
        "full": folders.full / "best",
    }
    prompts = load_prompts(folders.prompts / "measuring.jsonl")
    decode = DecodeConfig(depth=4, max_new_tokens=TOKENS, batch_size=16)
    sides = {
        name: sum_up(decode_prompts(target, folder, prompts, decode, True), prompts, decode.depth)
        for name, folder in checkpoints.items()
    }
    weights = resample_weights(len(sides["full"].prompts), seed=0)
    drawn = {name: (weights @ x.committed) / (weights @ x.passes) for name, x in sides.items()}
    tau = {name: side.committed.sum() / side.passes.sum() for name, side in sides.items()}
    regained = (drawn["refreshed"] - drawn["old"], drawn["full"] - drawn["old"])
    rows = {}
    for name, side in sides.items():
        parts = side.domain_rows().items()
        domains = {domain: tau_estimate(side.take(part)).tau for domain, part in parts}
        rows[name] = SideTau(**tau_facts(tau_estimate(side)), domains=domains)
    return {
        "prompts": len(sides["full"].prompts),
        "sides": rows,
        "refreshed_by_full": divide(tau["refreshed"], tau["full"]),
        "refreshed_by_full_ci95": interval95(drawn["refreshed"], drawn["full"]),
        "gap_regained": divide(tau["refreshed"] - tau["old"], tau["full"] - tau["old"]),
        "gap_regained_ci95": interval95(*regained),
    }


# The report


def row_of(folders: Folders, given: argparse.Namespace) -> dict[str, object]:
    """All evidence for one drafter: its row of watch.json."""
    reference = learn(folders)
    watched = {name: watch(folders, name) for name in CHANGES if name not in given.skip}
    full = train_full(folders)
    refreshed = refresh(folders, full)
    tau, cost = compare(folders), refreshed["cost"]
    answers = read_manifest(folders.work / "full" / "generate", "generate")["counts"]
    share = divide(cost["training_tokens"], full["tokens"])
    left_out = ("drafter", "old_target")
    costs = {
        "full": {"answers": answers["done"], "answer_tokens": answers["tokens"], **full},
        "refresh": cost,
        "training_tokens_share": share,
        "settings": {k: v for k, v in refreshed["settings"].items() if k not in left_out},
    }
    streams = {
        name: resample(folders, reference, name, STREAMS // part)
        for name, part in RESAMPLED.items()
    }
    quiet = watched["unchanged"]["alarms"] == [] and streams["unchanged"]["share"] < 0.01
    return {
        "drafter": {"row": folders.row, "kind": reference.drafter["kind"]},
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


def report(given: argparse.Namespace) -> None:
    """Do all that is not done yet, and write."""
    torch.set_num_threads(given.threads)
    work, drafters = given.work.resolve(), given.drafters.resolve()
    places = [Folders(work, drafters, row) for row in given.rows]
    make(places[0])
    content = {
        "format": 1,
        "command": f"python -m scripts.evidence.staleness --rows {' '.join(given.rows)}",
        "git": git_state().get("revision", ""),
        "targets": {
            name: read_json(work / name / changed_targets.MADE_FILE)
            for name in changed_targets.RECIPES
        },
        "system": SYSTEM,
        "rows": {folders.row: row_of(folders, given) for folders in places},
    }
    write_json(given.out, content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do all that is not done yet; returns the exit status."""
    parser = make_parser("scripts.evidence.staleness", __doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "watch_report")
    families = ROOT / "outputs" / "families"
    parser.add_argument("--drafters", type=Path, default=families, help="the families' run")
    parser.add_argument("--rows", nargs="+", choices=list(RATES), default=list(RATES))
    skip = "where torchao or bitsandbytes is missing"
    parser.add_argument("--skip", nargs="+", choices=("int8", "int4"), default=[], help=skip)
    add_options(parser, threads=1, out=REPORTS / "watch.json")
    return run(parser, report, arguments)


if __name__ == "__main__":
    sys.exit(main())
