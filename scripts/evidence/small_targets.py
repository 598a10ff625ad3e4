"""The small targets that recipes are compared on: trainings on the same answers, each kept once it
is done, what their drafters do with prompts that no training saw, intervals over prompts and seeds,
and what the reports about them share.
"""

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
"""How the validation prompts are decoded, by which rates are chosen."""
CHECKED = 48
"""Validation prompts."""
NEW_TOKENS = 96
"""New tokens of a measured prompt."""
COUNTED = ("committed", "passes", "accepted", "refused", "reached")
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """A target, its answers, and prompts that no drafter learns from."""

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
    """How the measured prompts are decoded: chains of `depth`."""
    return DecodeConfig(
        temperature=temperature, rule=rule, depth=depth, max_new_tokens=NEW_TOKENS, batch_size=16
    )


def digest(content: object) -> str:
    """Twelve hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def answers_facts(answers: Path) -> Facts:
    """What says, in the manifest of answers, what a training on them reads."""
    manifest = read_answers(answers)
    shards = [entry["sha256"] for entry in manifest["shards"]]
    return {"target": manifest["target"].get("revision"), "shards": shards}


class Bench:
    """Trainings and measurements on one target, kept in `work`.

    heads: those of conf/head that are trained on the place's answers; they read what the target
    computes from a store that is written once. None: every training runs the target itself.
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
        """The checkpoint of the training `name`: `train` writes it into the folder it is given and
        returns facts, unless it was done before with an equal `key`, a JSON value of all that
        decides what comes out."""
        folder = self.work / "trained" / f"{name}-{digest(key)}"
        if not (folder / "done.json").is_file():
            discard(folder)
            folder.mkdir(parents=True)
            write_json(folder / "done.json", train(folder / "checkpoint"))
        return folder / "checkpoint"

    def facts(self, checkpoint: Path) -> Facts:
        """What `train` returned."""
        return {**read_json(checkpoint.parent / "done.json")}

    @cached_property
    def features(self) -> list[str]:
        """The overrides with which a training reads the store; makes it if it is not there."""
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
        overrides. answers: None: the place's."""
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
        """Sums per prompt; those of an earlier call with the same prompts and settings are read
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
    """tau of each side, one `Totals` per seed, and that of each resample [RESAMPLES]: of prompts,
    the same on all sides, and of seeds, each side its own."""
    random = np.random.default_rng(0)
    count = len(sides[0][0].prompts)
    rows = random.integers(count, size=(RESAMPLES, count))
    return [
        resampled(totals, random.integers(len(totals), size=(RESAMPLES, len(totals))), rows)
        for totals in sides
    ]


TINY = 1e-9


def resampled(totals: Sequence[Totals], seeds: Integers, rows: Integers) -> tuple[float, Floats]:
    """tau over all seeds and prompts, and that of each resample [R]: seeds [R, S], rows [R, P]."""
    committed = np.stack([one.committed for one in totals])  # [S, P]
    passes = np.stack([one.passes for one in totals])
    above = committed[seeds[:, :, None], rows[:, None]].sum((1, 2))
    below = passes[seeds[:, :, None], rows[:, None]].sum((1, 2))
    return float(committed.sum() / passes.sum()), above / below


def interval(drawn: Floats) -> list[float]:
    """The middle 95% of what was drawn."""
    return [float(value) for value in np.percentile(drawn, (2.5, 97.5))]


# What reports share


def options_of_report(name: str) -> dict[str, Any]:
    """Options of the command (`scripts.tools.common.command`) that writes docs/reports/<name>."""
    return {
        "prompts": (48, "held-out prompts that are decoded"),
        "threads": 2,
        "out": (REPORTS / name, "without its ending"),
    }


def options_of_bench(name: str) -> dict[str, Any]:
    """`options_of_report`, and where trainings and measurements are kept."""
    return {"work": ROOT / "outputs" / name, **options_of_report(name)}


def some_of(names: Sequence[str]) -> dict[str, Any]:
    """An option that takes one or several of `names`; without it, all."""
    return {"nargs": "+", "choices": [*names], "default": [*names]}


def earlier(out: Path) -> Facts:
    """The content of a report that an earlier command has written, or of an empty one."""
    return {"format": 1, **read_json(out.with_suffix(".json"))}


def put_rows(content: Facts, rows: Sequence[Facts], keys: Sequence[str]) -> None:
    """Add rows to a report, in place of those that are equal to one of them in `keys`."""

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
    """Write a report as it stands. given: of the command, which is recorded with its conditions;
    settings: further ones; page: makes the lines of its page."""
    content["settings"] = {
        **process_facts(),
        "device": device_facts(torch.device("cpu")),
        "prompts": given.prompts,
        "new_tokens": NEW_TOKENS,
        **settings,
    }
    content["command"] = given.command
    write_report(given.out, content, page(content))
