"""Shared parts of the reports that compare recipes on the small targets: trainings on the same
answers, each kept once it is done; their drafters' results on prompts that no training saw;
intervals over prompts and seeds."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.folders import copy_plain, discard
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.measure.metrics import RESAMPLES, Floats, Totals, tau_estimate
from inference.measure.prompts import Prompt, load_prompts, select_prompts
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from scripts.evidence.common import Facts, decode_totals, read_json, run_on_target, write_report
from scripts.tools.common import PROMPTS, REPORTS, ROOT, TARGET, VALIDATION, cpu_target
from train.data.answers import read_answers

SEEDS = (0, 1, 2)
CHECK = DecodeConfig(temperature=0.0, depth=5, max_new_tokens=64, batch_size=16)
"""How the validation prompts are decoded, by which learning rates are chosen."""
CHECKED = 48
"""Number of validation prompts."""
NEW_TOKENS = 96
"""New tokens of a measured prompt."""
COUNTED = ("committed", "passes", "accepted", "refused", "reached")
Integers = NDArray[np.int64]


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


class Bench:
    """Trainings and measurements on one target, kept in `work`.

    heads: those of conf/head that are trained on the place's answers; they read the target's
    features from a store that is written once. None: every training runs the target.
    """

    def __init__(
        self, place: Place, work: Path, threads: int, prompts: int, heads: Sequence[str] = ()
    ) -> None:
        if not place.answers.is_dir():
            raise UserError(
                f"there are no answers in {place.answers}; make them with `headstart generate "
                "experiment=families` or `python -m scripts.evidence.held_out`."
            )
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

    def once(self, name: str, key: object, train: Callable[[Path], Facts]) -> Path:
        """The checkpoint of the training `name`. `train` writes it into the given folder and
        returns facts, unless that was done before with an equal `key`, a JSON value of everything
        that determines the result."""
        folder = self.work / "trained" / f"{name}-{digest(key)}"
        if not (folder / "done.json").is_file():
            discard(folder)
            folder.mkdir(parents=True)
            write_json(folder / "done.json", train(folder / "checkpoint"))
        return folder / "checkpoint"

    def facts(self, checkpoint: Path) -> Facts:
        """The facts that `train` returned."""
        return {**read_json(checkpoint.parent / "done.json")}

    @cached_property
    def features(self) -> list[str]:
        """The overrides with which a training reads the store; makes the store if it is missing."""
        first, *others = self.heads
        words = [f"head={first}", f"features.heads=[{','.join(others)}]"]
        words += [f"run.answers={self.place.answers}", f"run.threads={self.threads}"]

        def write(out: Path) -> Facts:
            place, at = self.work / "run", f"features.path={out}"
            run_on_target("features", self.place.target, place, "features=store", at, *words)
            return {}

        path = self.once("features", [*self.heads, answers_facts(self.place.answers)], write)
        return ["features=store", f"features.path={path}"]

    def train(self, name: str, *overrides: str, answers: Path | None = None) -> Path:
        """The checkpoint of `headstart train` with the settings of experiment=families and these
        overrides. answers: None: those of the place."""
        read = answers or self.place.answers

        def run(out: Path) -> Facts:
            place, drafter = self.work / "run", out.parent.name
            words = [f"run.answers={read}", f"run.drafter={drafter}"]
            words += [f"run.threads={self.threads}", "train.eval_every=0", "train.parity=false"]
            words += self.features if self.heads and answers is None else []
            run_on_target("train", self.place.target, place, *overrides, *words)
            made = place / "train" / drafter
            copy_plain(made / "best", out)
            manifest = read_json(made / "manifest.json")
            return {key: manifest[key] for key in ("steps", "tokens", "seconds")}

        return self.once(name, [overrides, answers_facts(read)], run)

    def score(self, checkpoint: Path) -> float:
        """tau on the validation prompts."""
        return tau_estimate(self.totals(checkpoint, "validation", self.validation, CHECK)).tau

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
        arrays = {key: np.array(found[key]) for key in COUNTED}
        return Totals(found["prompts"], found["domains"], **arrays, seconds={})


def compared(ours: Sequence[Totals], theirs: Sequence[Totals]) -> Facts:
    """tau of two sides, one `Totals` per seed, and the ratio of (tau - 1), with 95% intervals over
    prompts (the same on both sides) and seeds (each side its own)."""
    (mine, my_draws), (other, other_draws) = sides = drawn([ours, theirs])
    content: Facts = {
        name: {"tau": value, "tau_ci95": interval(draws)}
        for name, (value, draws) in zip(("ours", "theirs"), sides, strict=True)
    }
    content["ratio"] = (mine - 1) / max(other - 1, TINY)
    content["ratio_ci95"] = interval((my_draws - 1) / np.maximum(other_draws - 1, TINY))
    return content


def drawn(sides: Sequence[Sequence[Totals]]) -> list[tuple[float, Floats]]:
    """tau of each side, one `Totals` per seed, and that of each resample [RESAMPLES]. Prompts are
    resampled equally on all sides, seeds separately on each."""
    random = np.random.default_rng(0)
    count = len(sides[0][0].prompts)
    rows = random.integers(count, size=(RESAMPLES, count))
    return [
        resampled(totals, random.integers(len(totals), size=(RESAMPLES, len(totals))), rows)
        for totals in sides
    ]


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


def put_rows(content: Facts, rows: Sequence[Facts], keys: Sequence[str]) -> None:
    """Add rows to a report, replacing those that are equal to one of them in `keys`."""

    def name(row: Facts) -> tuple[object, ...]:
        return tuple(row[key] for key in keys)

    new = {name(row) for row in rows}
    kept = [row for row in content.get("rows", []) if name(row) not in new]
    content["rows"] = [*kept, *rows]


def save(
    given: argparse.Namespace,
    content: Facts,
    settings: Mapping[str, object],
    page: Callable[[Facts], list[str]],
) -> None:
    """Write a report in its current state. given: of the command, which is recorded with its
    conditions; settings: further ones; page: makes the lines of its page."""
    content["settings"] = {
        **process_facts(),
        "device": device_facts(torch.device("cpu")),
        "prompts": given.prompts,
        "new_tokens": NEW_TOKENS,
        **settings,
    }
    content["command"] = given.command
    write_report(given.out, content, page(content))
