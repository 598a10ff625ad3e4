"""Shared parts of the reports that compare recipes on the small targets: trainings on the same
answers, each kept once it is done; their drafters' results on prompts that no training saw;
intervals over prompts and seeds.

A kept training is found again by the settings that decide its result (`decisive`), with all
defaults, so that a default that changes makes it be done again. A report holds only rows that were
measured with the same settings (`begin`)."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec, union
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.folders import copy_plain, discard
from inference.manifest import file_sha256, write_json
from inference.measure.config import process_facts
from inference.measure.metrics import RESAMPLES, Floats, Totals, tau_estimate
from inference.measure.prompts import Prompt, load_prompts, select_prompts
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from scripts.config.schema import HeadSettings, Settings
from scripts.evidence.common import (
    Facts,
    decode_totals,
    read_json,
    run_on_target,
    settings_of,
    write_report,
)
from scripts.tools.common import PROMPTS, REPORTS, ROOT, TARGET, VALIDATION, cpu_target
from train.data.answers import read_answers
from train.data.pack import PackedData
from train.features.store.codec import bytes_per_token

SEEDS = (0, 1, 2)
CHECKS = tuple(
    DecodeConfig(temperature=temperature, rule=rule, depth=5, max_new_tokens=64, batch_size=16)
    for temperature, rule in ((0.0, "match"), (1.0, "block"))
)
"""How the validation prompts are decoded, by which learning rates are chosen: reports measure at
both temperatures."""
CHECKED = 48
"""Number of validation prompts."""
NEW_TOKENS = 96
"""New tokens of a measured prompt."""
COUNTED = ("committed", "passes", "accepted", "refused", "reached")
UNMEASURED = ("train.eval_every=0", "train.parity=false")
DECISIVE = "head optim schedule train features joint sampling feedback loop".split()
"""The groups of settings that decide the result of a training, or of a loop of trainings."""
IDLE = {
    "train": ("prompts", "tracker", "peak_tflops", "save_every", "keep"),
    "features": ("shard_mib", "quota_gib", "ahead", "wait_seconds", "timeout_seconds", "retries"),
}
"""Keys of these groups that do not."""
EXACT = "fp32"
"""features.format with which a store gives the numbers that a training computes itself."""
RESERVE_BYTES = 10 << 30
"""Free disk space that a feature store must leave."""
Integers = NDArray[np.int64]
EXPERIMENT = "experiment=[families]"


@dataclass(frozen=True)
class Place:
    """A target, its answers, and prompts on which no drafter is trained."""

    target: Path
    answers: Path
    validation: Path
    measuring: Path


PLACES = {
    "embedded": Place(TARGET, ROOT / "outputs/families/generate", VALIDATION, PROMPTS),
    "held_out": Place(
        ROOT / "outputs/held_out/target",
        ROOT / "outputs/held_out/run/generate",
        ROOT / "outputs/held_out/data/prompts/validation.jsonl",
        ROOT / "outputs/held_out/data/prompts/measuring",
    ),
}
"""Made by `headstart generate experiment=families` and `python -m scripts.evidence.held_out`."""


def require_answers(place: Place) -> None:
    """Raise `UserError` if a place has no answers."""
    if not place.answers.is_dir():
        raise UserError(
            f"there are no answers in {place.answers}; make them with `headstart generate "
            "experiment=families` or `python -m scripts.evidence.held_out --answers-only`."
        )


def chain(depth: int, temperature: float = 0.0, rule: str = "match") -> DecodeConfig:
    """The decode settings of the measured prompts: chains of `depth`."""
    return DecodeConfig(
        temperature=temperature, rule=rule, depth=depth, max_new_tokens=NEW_TOKENS, batch_size=16
    )


def digest(content: object) -> str:
    """Twelve hexadecimal digits that identify a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def answers_facts(answers: Path) -> Facts:
    """The parts of the answers' manifest that determine what a training reads."""
    manifest = read_answers(answers)
    shards = [entry["sha256"] for entry in manifest["shards"]]
    return {"target": manifest["target"].get("revision"), "shards": shards}


def decisive(settings: Settings) -> Facts:
    """The settings that decide the result of a training, or of a loop of trainings, apart from the
    target and the answers: JSON values with all defaults."""
    whole = settings.with_defaults
    found: Facts = {
        group: {key: value for key, value in whole[group].items() if key not in IDLE.get(group, ())}
        for group in DECISIVE
        if group in whole
    }
    return found | {"precision": settings.engine.precision}


def identity(settings: Settings, answers: Path) -> list[Facts]:
    """Everything that decides the result of a training on `answers`: JSON values. A head that
    starts from a model of its own depends on the weights there."""
    found = [decisive(settings), answers_facts(answers)]
    source = getattr(settings.head.config, "from_model", "")
    weights = sorted(Path(source).glob("*.safetensors")) if source else []
    return [*found, {one.name: file_sha256(one) for one in weights}] if weights else found


def trained_weights(drafter: TrainableDrafter) -> int:
    """Number of a drafter's weights that a training changes."""
    return sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)


def holds(store: FeatureSpec, wanted: FeatureSpec) -> bool:
    """Whether a store of `store` has all that a training reads."""
    last = wanted.last_hidden or wanted.logits
    return {*wanted.taps} <= {*store.taps} and (store.last_hidden or store.logits or not last)


class Bench:
    """Trainings and measurements on one target, kept in `work`.

    heads: those of conf/head that are trained on the place's answers; they read the target's
    features from a store that is written once. None: every training runs the target. One store
    serves all trainings with the same answers, row length, precision and format.
    """

    def __init__(
        self, place: Place, work: Path, threads: int, prompts: int, heads: Sequence[str] = ()
    ) -> None:
        require_answers(place)
        torch.set_num_threads(threads)
        self.place, self.work, self.threads, self.heads = place, work, threads, heads
        found = load_prompts(place.measuring)
        domains = len({prompt.domain for prompt in found})
        self.measuring = select_prompts(found, max(1, prompts // domains), seed=0)
        self.validation = load_prompts(place.validation)[:CHECKED]

    @cached_property
    def model(self) -> TargetModel:
        """The target, in float32."""
        return cpu_target(self.place.target)

    def once(
        self, name: str, key: object, train: Callable[[Path], Facts], continues: bool = False
    ) -> Path:
        """The checkpoint of the training `name`. `train` writes it into the given folder and
        returns facts, unless that was done before with an equal `key`, a JSON value of everything
        that determines the result. continues: `train` goes on from what an interrupted command has
        left in the folder, which otherwise is deleted."""
        folder = self.folder(name, key)
        if not (folder / "done.json").is_file():
            if not continues:
                discard(folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "done.json", train(folder / "checkpoint"))
        return folder / "checkpoint"

    def facts(self, checkpoint: Path) -> Facts:
        """The facts that `train` returned."""
        return {**read_json(checkpoint.parent / "done.json")}

    def folder(self, name: str, key: object) -> Path:
        return self.work / "trained" / f"{name}-{digest(key)}"

    def drafter(self, head: HeadSettings) -> TrainableDrafter:
        """A drafter of these settings without values."""
        info = self.model.info
        with torch.device("meta"):
            return get_kind(head.kind).drafter_class(head.config, info)

    @cached_property
    def needs(self) -> FeatureSpec:
        """What the store of `heads` holds."""
        every = (settings_of("train", EXPERIMENT, f"head={name}").head for name in self.heads)
        return union(self.drafter(head).needs for head in every)

    def features(self, settings: Settings, answers: Path) -> list[str]:
        """The overrides with which a training reads a store, which is made now if it is missing.

        A format that is not `EXACT` has a store of the training's own head. Empty if the training
        must run the target itself: because it has another source of features, because it reads what
        the store does not hold, or because the disk has no room; raises `UserError` if such a
        training needs another format, which only a store has.
        """
        form, length = settings.features.format, settings.train.sequence_length
        if settings.features.mode != "online" or settings.train.on_policy.share:
            return []
        own, info = self.drafter(settings.head).needs, self.model.info
        name = str(settings.choices["head"])
        heads, needs = (self.heads, self.needs) if form == EXACT else ([name], own)
        if not holds(needs, own):
            return []
        precision = settings.engine.precision
        key = {
            "answers": answers_facts(answers),
            "taps": needs.taps,
            "last_hidden": needs.last_hidden or needs.logits,
            "format": form,
            "sequence_length": length,
            "precision": precision,
        }
        if not (self.folder("features", key) / "done.json").is_file():
            tokens = PackedData.from_manifest(answers, info, length).report.tokens
            wanted = bytes_per_token(needs, info, form) * tokens
            self.work.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.work).free
            if wanted + RESERVE_BYTES > free:
                lacking = f"a store of {wanted / 1e9:.1f} GB for '{answers}' has no room"
                if form != EXACT:
                    raise UserError(
                        f"{lacking} ({free / 1e9:.1f} GB are free, {RESERVE_BYTES / 1e9:.1f} GB of "
                        f"them are left to others), and features.format={form} needs it. Free some "
                        "space, or give --work on another disk."
                    )
                print(f"{lacking}: the target runs in its trainings", flush=True)
                return []
        first, *others = heads
        words = [f"head={first}", f"features.heads=[{','.join(others)}]", "features=store"]
        words += [f"features.format={form}", f"train.sequence_length={length}"]
        words += [f"engine.precision={precision}", f"run.answers={answers}"]
        words += [f"run.threads={self.threads}"]

        def write(out: Path) -> Facts:
            at = f"features.path={out}"
            run_on_target("features", self.place.target, self.work / "run", at, *words)
            return {}

        path = self.once("features", key, write, continues=True)
        return ["features=store", f"features.format={form}", f"features.path={path}"]

    def train(
        self, name: str, *overrides: str, answers: Path | None = None, stored: bool | None = None
    ) -> Path:
        """The checkpoint of `headstart train` with the settings of experiment=families and these
        overrides.

        answers: None: those of the place. stored: whether these answers have a store, if the bench
        has `heads`; None: those of the place alone.
        """
        read = answers or self.place.answers
        settings = settings_of("train", EXPERIMENT, *overrides, *UNMEASURED)
        from_store = bool(self.heads) and (answers is None if stored is None else stored)
        if settings.features.mode == "online" and settings.features.format != EXACT:
            assert from_store, "a format without a store would change nothing"

        def run(out: Path) -> Facts:
            place, drafter = self.work / "run", out.parent.name
            words = [f"run.answers={read}", f"run.drafter={drafter}", *UNMEASURED]
            words += [f"run.threads={self.threads}"]
            words += self.features(settings, read) if from_store else []
            run_on_target("train", self.place.target, place, *overrides, *words)
            made = place / "train" / drafter
            copy_plain(made / "best", out)
            manifest = read_json(made / "manifest.json")
            found = {key: manifest[key] for key in ("steps", "tokens", "seconds")}
            return found | {"trained_weights": trained_weights(self.drafter(settings.head))}

        return self.once(name, identity(settings, read), run)

    def identity(self, *overrides: str) -> str:
        """A digest of everything that decides the results of `train` with these overrides."""
        settings = settings_of("train", EXPERIMENT, *overrides, *UNMEASURED)
        return digest(identity(settings, self.place.answers))

    def score(self, checkpoint: Path) -> float:
        """tau on the validation prompts, the mean of `CHECKS`."""
        found = [self.totals(checkpoint, "validation", self.validation, check) for check in CHECKS]
        return sum(tau_estimate(totals).tau for totals in found) / len(found)

    def totals(
        self, checkpoint: Path, name: str, prompts: Sequence[Prompt], decode: DecodeConfig
    ) -> Totals:
        """Sums per prompt. If an earlier call had the same prompts and settings, its result is read
        from the training's folder."""
        key = [asdict(decode), [prompt.to_line() for prompt in prompts]]
        kept = checkpoint.parent / f"{name}-{digest(key)}.json"
        found = read_json(kept)
        if not found:
            totals = decode_totals(self.model, checkpoint, prompts, decode)
            sums = {key: getattr(totals, key).tolist() for key in COUNTED}
            found = {"prompts": totals.prompts, "domains": totals.domains, **sums}
            write_json(kept, found)
        arrays: dict[str, Any] = {key: np.array(found[key]) for key in COUNTED}
        return Totals(found["prompts"], found["domains"], **arrays, seconds={})


def compared(ours: Sequence[Totals], theirs: Sequence[Totals], paired: bool = False) -> Facts:
    """tau of two sides, one `Totals` per seed, and the ratio of (tau - 1), with 95% intervals over
    prompts (the same on both sides) and seeds (each side its own; paired: the same on both, for
    trainings that share initial values and the order of rows)."""
    (mine, my_draws), (other, other_draws) = sides = drawn([ours, theirs], paired)
    content: Facts = {
        name: {"tau": value, "tau_ci95": interval(draws)}
        for name, (value, draws) in zip(("ours", "theirs"), sides, strict=True)
    }
    content["ratio"] = (mine - 1) / max(other - 1, TINY)
    content["ratio_ci95"] = interval((my_draws - 1) / np.maximum(other_draws - 1, TINY))
    return content


def drawn(sides: Sequence[Sequence[Totals]], paired: bool = False) -> list[tuple[float, Floats]]:
    """tau of each side, one `Totals` per seed, and that of each resample [RESAMPLES]. Prompts are
    resampled equally on all sides, seeds separately on each, or (paired) equally too."""
    random = np.random.default_rng(0)
    count = len(sides[0][0].prompts)
    rows = random.integers(count, size=(RESAMPLES, count))

    def seeds(totals: Sequence[Totals]) -> Integers:
        return random.integers(len(totals), size=(RESAMPLES, len(totals)))

    if paired:
        assert len({len(totals) for totals in sides}) == 1, "paired sides have the same seeds"
        shared = seeds(sides[0])
        return [resampled(totals, shared, rows) for totals in sides]
    return [resampled(totals, seeds(totals), rows) for totals in sides]


TINY = 1e-9


def resampled(totals: Sequence[Totals], seeds: Integers, rows: Integers) -> tuple[float, Floats]:
    """tau over all seeds and prompts, and that of each resample [R]. seeds [R, S], rows [R, P]."""
    committed = np.stack([one.committed for one in totals])  # [S, P]
    passes = np.stack([one.passes for one in totals])
    above = committed[seeds[:, :, None], rows[:, None]].sum((1, 2))
    below = passes[seeds[:, :, None], rows[:, None]].sum((1, 2))
    return float(committed.sum() / passes.sum()), above / below


def interval(drawn: Floats) -> list[float]:
    """The middle 95% of the drawn values."""
    return [float(value) for value in np.percentile(drawn, (2.5, 97.5))]


# Shared code of the reports


def options_of_report(name: str) -> dict[str, Any]:
    """Options of the command (`scripts.tools.common.command`) that writes docs/reports/<name>."""
    return {
        "prompts": (48, "held-out prompts that are decoded"),
        "threads": 2,
        "out": (REPORTS / name, "without its ending"),
    }


def options_of_bench(name: str) -> dict[str, Any]:
    """`options_of_report`, and the folder of trainings and measurements."""
    return {"work": ROOT / "outputs" / name, **options_of_report(name)}


def some_of(names: Sequence[str]) -> dict[str, Any]:
    """An option that takes one or several of `names`; without it, all of them."""
    return {"nargs": "+", "choices": [*names], "default": [*names]}


def earlier(out: Path) -> Facts:
    """The content of a report that an earlier command wrote, or of an empty one."""
    return {"format": 1, **read_json(out.with_suffix(".json"))}


def measured_with(given: argparse.Namespace, settings: Mapping[str, object]) -> Facts:
    """The settings that all rows of a report share, as JSON values."""
    shared = {"prompts": given.prompts, "new_tokens": NEW_TOKENS, **settings}
    return {**json.loads(json.dumps(shared))}


def begin(given: argparse.Namespace, settings: Mapping[str, object]) -> Facts:
    """The content of a report that is to be continued. settings: as for `save`; raises `UserError`
    if the report's rows were measured with others."""
    content = earlier(given.out)
    require_same(given.out, content, measured_with(given, settings))
    return content


def require_same(out: Path, content: Facts, settings: Facts) -> None:
    """Raise `UserError` unless a report's rows, if it has any, were measured with `settings`."""
    before = content.get("settings", {})
    other = [key for key, value in settings.items() if before.get(key) != value]
    if before and other:
        told = ", ".join(f"{key} {before.get(key)} (now {settings[key]})" for key in other)
        raise UserError(
            f"'{out.with_suffix('.json')}' has rows that were measured with {told}. Rows of "
            "different settings do not stand in one table: give the same settings, another --out, "
            "or delete the report; trainings and measurements under --work are kept."
        )


def put_rows(
    content: Facts, rows: Sequence[Facts], keys: Sequence[str], table: str = "rows"
) -> None:
    """Add rows to a table of a report, replacing those that are equal to one of them in `keys`."""

    def name(row: Facts) -> tuple[object, ...]:
        return tuple(row[key] for key in keys)

    new = {name(row) for row in rows}
    kept = [row for row in content.get(table, []) if name(row) not in new]
    content[table] = [*kept, *rows]


def save(
    given: argparse.Namespace,
    content: Facts,
    settings: Mapping[str, object],
    page: Callable[[Facts], list[str]],
) -> None:
    """Write a report in its current state. given: of the command, which is recorded with its
    conditions; settings: further ones, which all rows share; page: makes the lines of its page.
    Raises `UserError` if the report's earlier rows were measured with other settings."""
    shared = measured_with(given, settings)
    require_same(given.out, content, shared)
    device = device_facts(torch.device("cpu"))
    content["settings"] = {**process_facts(), "device": device, **shared}
    content["command"] = given.command
    write_report(given.out, content, page(content))
