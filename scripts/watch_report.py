"""Evidence for watch and refresh: docs/reports/watch.json.

    headstart loop experiment=families && python -m scripts.watch_report

Fine-tunes the embedded target on C++ headers (scripts/watch_targets), and changes it otherwise: LoRA merged, quantised, under
another system prompt. A drafter of the unchanged target is given a reference on prompts that neither has seen; then `headstart
watch` decodes other unseen prompts with every version of the target. False alarms are counted on streams resampled from what the
unchanged target gave. `headstart refresh` is compared with a training from scratch on the new target's answers to 1,440 prompts, on
held-out prompts of old and new domains. Every step that is done is skipped, so the command may be repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.manifest import read_manifest, write_json
from inference.measure.metrics import Outcome, Totals, divide, interval95, resample_weights, tau_estimate
from inference.measure.prompts import load_prompts, to_requests
from inference.staleness.evidence import Grid
from inference.staleness.reference import WATCH_FILE, Reference
from inference.staleness.result import STALENESS_FILE
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts import cli
from scripts.held_out_target.making import read_json
from scripts.run import git_state
from scripts.watch_targets import making, prompts
from scripts.watch_targets.streams import Plan, Streams

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "assets" / "tiny-target"
TOKENS, WATCHED = 96, 200
SYSTEM = "You are a pirate captain. Answer every question in verse, and never write code."
STREAMS, LENGTH = 1000, 400
SHARE = 0.1
"""Of the full training's tokens that a refresh may take."""
RESAMPLED = {"unchanged": 1, "finetuned": 5, "lora": 5}
"""Versions of the target whose answers are resampled, and into which part of all streams."""


@dataclass(frozen=True)
class Row:
    """A recipe of conf/experiment/families.yaml."""

    head: str
    rate: float
    overrides: tuple[str, ...]


ROWS = {
    "distilled": Row("distilled", 1.5e-3, ("head.from_target_layers=[0,3,5]", "head.share_embeddings=true")),
    "eagle3_copied": Row("eagle3", 3e-3, ("head.ttt_steps=4", "head.from_target_layer=7")),
}


@dataclass(frozen=True)
class Change:
    """A version of the target: the folder made for it (empty: the unchanged one) and what a stage is told besides."""

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
class Place:
    """Where everything lies. drafters: the run of the families' drafters."""

    work: Path
    drafters: Path
    row: str

    @property
    def old(self) -> Path:
        """The drafter of the unchanged target."""
        return self.drafters / "train" / f"{self.row}@{ROWS[self.row].rate:g}" / "best"

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

    def stage(self, name: str, run: str, folder: str, *overrides: str) -> int:
        """Run a stage on a version of the target; returns its status, raises `UserError` for an error."""
        path = self.work / folder if folder else TARGET
        shared = ["experiment=[families]", "target=local", f"target.path={path}", "target.dtype=float32",
                  f"run.root={self.work}", f"run.name={run}", f"run.threads={torch.get_num_threads()}"]  # fmt: skip
        status = cli.main([name, *shared, *overrides])
        if status not in (0, 1) or (status == 1 and name != "watch"):
            raise UserError(f"`headstart {name}` failed, see above; run the same command again to go on.")
        return status


# ---- making --------------------------------------------------------------------------------------------------------------------


def make(place: Place) -> None:
    """The changed targets and all prompts."""
    if not (place.prompts / "measuring.jsonl").is_file():
        making.write_prompts(place.prompts / "headers", making.rows_by_group())
        prompts.write_all(place.prompts, ROOT / "assets" / "prompts", place.prompts / "headers")
    for name, recipe in making.RECIPES.items():
        if not (place.work / name / making.MADE_FILE).is_file():
            making.finetune(TARGET, place.work / name, making.rows_by_group()["train"], recipe)


def train_full(place: Place) -> dict[str, Any]:
    """Answers of the fine-tuned target to all prompts, and a drafter trained on them from scratch; returns its manifest."""
    row = ROWS[place.row]
    place.stage("generate", "full", "finetuned", "data=embedded", f"data.path={place.prompts / 'train.jsonl'}")
    recipe = (f"head={row.head}", *row.overrides, f"optim.lr={row.rate}", f"run.drafter={place.row}")
    place.stage("train", "full", "finetuned", *recipe, f"train.prompts=[{place.prompts / 'validation.jsonl'}]")
    return read_manifest(place.full, "train")


def refresh(place: Place, full: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """`headstart refresh` within its share of the full training's tokens; returns refresh.json."""
    size = 512
    steps = int(SHARE * full["tokens"]) // size
    place.stage(
        "refresh", f"refresh-{place.row}", "finetuned", f"refresh.drafter={place.old}", f"refresh.old_target={TARGET}",
        "refresh.until=budget", f"train.max_steps={steps}", "train.global_batch=1", "train.micro_batch=1", "train.eval_every=26",
        "train.patience=0",
        "data=embedded", f"data.path={place.prompts / 'train.jsonl'}", f"train.prompts=[{place.prompts / 'validation.jsonl'}]",
        "bench=jsonl", f"bench.prompts={place.prompts / 'measuring.jsonl'}", *changes,
    )  # fmt: skip
    found: dict[str, Any] = read_json(place.refreshed / "refresh" / "refresh.json")
    return found


# ---- watching ------------------------------------------------------------------------------------------------------------------


def learn(place: Place) -> Reference:
    """The reference of the unchanged target."""
    path = place.work / f"reference-{place.row}.json"
    if not path.is_file():
        learn = (f"watch.drafter={place.old}", "watch.learn=true", f"watch.reference={path}", f"decode.max_new_tokens={TOKENS}")
        place.stage("watch", f"watch-{place.row}", "", *learn, "bench=jsonl", f"bench.prompts={place.prompts / 'reference.jsonl'}")
    return Reference.read(path)


def watch(place: Place, name: str) -> dict[str, Any]:
    """What `headstart watch` says of a version of the target, looking after each of `WATCHED` fresh prompts (unchanged: all)."""
    change, run = CHANGES[name], f"watch-{place.row}"
    most = 10_000 if name == "unchanged" else WATCHED
    path = place.work / run / name / STALENESS_FILE
    if not path.is_file():
        place.stage(
            "watch", run, change.folder, f"watch.name={name}", f"watch.drafter={place.old}", "watch.stop=false",
            f"watch.reference={place.work / f'reference-{place.row}.json'}", "bench=jsonl",
            f"bench.prompts={place.prompts / 'fresh.jsonl'}", f"watch.max_prompts={most}", *change.overrides,
        )  # fmt: skip
    found: dict[str, Any] = read_json(path)
    return found


def pools(*references: Reference) -> dict[str, list[tuple[int, int]]]:
    """(accepted, passes) of the answers of several references by domain."""
    found: dict[str, list[tuple[int, int]]] = {}
    for reference in references:
        for name, tally in reference.tallies.items():
            found.setdefault(name, []).extend(tally.pairs())
    return found


def resampled(place: Place, reference: Reference, name: str, count: int) -> dict[str, Any]:
    """Alarms on streams whose reference is drawn from all answers of the unchanged target, and whose fresh answers are drawn from
    these too ("unchanged") or from those of a changed target.
    """
    path = place.work / f"streams-{place.row}" / f"{name}.json"
    if path.is_file():
        known: dict[str, Any] = read_json(path)
        return known
    folder = place.work / f"watch-{place.row}"
    unchanged = pools(reference, Reference.read(folder / "unchanged" / WATCH_FILE))
    fresh = unchanged if name == "unchanged" else pools(Reference.read(folder / name / WATCH_FILE))
    sizes = {domain: len(tally.answers) for domain, tally in reference.tallies.items()}
    rate, tolerance = 0.01, 0.05
    streams = Streams(Grid(reference.depth), reference.most, unchanged, fresh, Plan(sizes, LENGTH, tolerance, rate))
    after = streams.run(count)
    raised = sorted(value for value in after if value is not None)
    found = {
        "streams": count, "length": LENGTH, "alarms": len(raised), "share": divide(len(raised), count),
        "share_within_200": divide(sum(value <= WATCHED for value in raised), count),
        "answers_to_alarm": {q: float(np.percentile(raised, q)) for q in (50, 95)} if raised else None,
        "bound": rate, "tolerance": tolerance,
    }  # fmt: skip
    write_json(path, found)
    return found


# ---- tau -----------------------------------------------------------------------------------------------------------------------


def totals(target: TargetModel, checkpoint: Path, path: Path) -> Totals:
    """What a drafter does on the prompts of `path`, greedy chains of 4."""
    decode = DecodeConfig(depth=4, max_new_tokens=TOKENS, batch_size=16)
    found = load_prompts(path)
    drafter = load_drafter(checkpoint, target.info, target.weights, changed_target=True)
    requests = to_requests(found, target.tokenizer, decode, capacity=target.info.max_position_embeddings, overlong="skip")
    done = {completion.request.index: completion for completion in Engine(target, drafter, decode).run(requests)}
    return Totals.collect([Outcome(found[i].id, found[i].domain, done[i].passes) for i in sorted(done)], 4)


def compare(place: Place) -> dict[str, Any]:
    """tau of the old, the refreshed and the fully retrained drafter on the fine-tuned target; ratios with paired intervals."""
    target = TargetModel.load(TargetConfig(path=str(place.work / "finetuned"), dtype="float32", device="cpu"))
    refreshed = place.refreshed / "train" / ROWS[place.row].head
    folders = {"old": place.old, "refreshed": refreshed / "best", "full": place.full / "best"}
    sides = {name: totals(target, folder, place.prompts / "measuring.jsonl") for name, folder in folders.items()}
    weights = resample_weights(len(sides["full"].prompts), seed=0)
    drawn = {name: (weights @ side.committed) / (weights @ side.passes) for name, side in sides.items()}
    tau = {name: side.committed.sum() / side.passes.sum() for name, side in sides.items()}
    regained = (drawn["refreshed"] - drawn["old"], drawn["full"] - drawn["old"])
    rows: dict[str, Any] = {}
    for name, side in sides.items():
        estimate = tau_estimate(side)
        rows[name] = {
            "tau": estimate.tau, "tau_ci95": list(estimate.ci95), "acceptance": list(estimate.unconditional),
            "domains": {domain: tau_estimate(side.take(part)).tau for domain, part in side.domain_rows().items()},
        }  # fmt: skip
    return {
        "prompts": len(sides["full"].prompts),
        "sides": rows,
        "refreshed_by_full": divide(tau["refreshed"], tau["full"]),
        "refreshed_by_full_ci95": list(interval95(drawn["refreshed"], drawn["full"])),
        "gap_regained": divide(tau["refreshed"] - tau["old"], tau["full"] - tau["old"]),
        "gap_regained_ci95": list(interval95(*regained)),
    }


# ---- the report ----------------------------------------------------------------------------------------------------------------


def report_of(place: Place, given: argparse.Namespace) -> dict[str, Any]:
    """All evidence for one drafter."""
    reference = learn(place)
    watched = {name: watch(place, name) for name in CHANGES if name not in given.skip}
    full = train_full(place)
    refreshed = refresh(place, full, given.refresh)
    tau = compare(place)
    kept = ("verdict", "alarms", "alarm_after", "test", "domains")
    answers = read_manifest(place.work / "full" / "generate", "generate")["counts"]
    trained = {key: full[key] for key in ("steps", "tokens", "seconds")}
    cost = {
        "full": {"answers": answers["done"], "answer_tokens": answers["tokens"], **trained},
        "refresh": refreshed["cost"],
        "training_tokens_share": divide(refreshed["cost"]["training_tokens"], full["tokens"]),
        "settings": {key: value for key, value in refreshed["settings"].items() if key not in ("drafter", "old_target")},
    }
    streams = {name: resampled(place, reference, name, given.streams // part) for name, part in RESAMPLED.items()}
    return {
        "drafter": {"row": place.row, "kind": reference.drafter["kind"]},
        "reference": {name: len(tally.answers) for name, tally in reference.tallies.items()},
        "watched": {name: {key: found[key] for key in kept} for name, found in watched.items()},
        "resampled": streams,
        "refresh": {"tau": tau, "cost": cost},
        "holds": {
            "alarm_within_200": (watched["finetuned"]["alarm_after"] or LENGTH) <= WATCHED,
            "false_alarms_below_1_percent": watched["unchanged"]["alarms"] == [] and streams["unchanged"]["share"] < 0.01,
            "regains_90_percent": tau["refreshed_by_full"] >= 0.9 and cost["training_tokens_share"] <= SHARE,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Do all that is not done yet; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.watch_report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "watch_report")
    parser.add_argument("--drafters", type=Path, default=ROOT / "outputs" / "families", help="the families' run")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--skip", nargs="+", choices=("int8", "int4"), default=[], help="where torchao or bitsandbytes is missing")
    parser.add_argument("--refresh", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the refresh")
    parser.add_argument("--streams", type=int, default=STREAMS, help="of the unchanged target; a fifth of others")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "watch.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    try:
        places = [Place(given.work.resolve(), given.drafters.resolve(), row) for row in given.rows]
        make(places[0])
        rows = {place.row: report_of(place, given) for place in places}
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    recipes = {name: read_json(places[0].work / name / making.MADE_FILE) for name in making.RECIPES}
    command = "python -m scripts.watch_report" + (f" --rows {' '.join(given.rows)}" if given.rows != list(ROWS) else "")
    write_json(given.out, {"format": 1, "command": command, "git": git_state().get("revision", ""),
                           "targets": recipes, "system": SYSTEM, "rows": rows})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
