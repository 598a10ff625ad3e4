"""The small targets that recipes are compared on: trainings on the same answers, each kept once it
is done, what their drafters do with prompts that no training saw, and intervals over prompts and
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.folders import copy_plain, discard
from inference.manifest import write_json
from inference.measure.metrics import RESAMPLES, Floats, Totals, tau_estimate
from inference.measure.prompts import Prompt, load_prompts, select_prompts
from inference.target.model import TargetModel
from scripts.evidence.common import Facts, decode_totals, read_json, run_on_target
from scripts.tools.common import PROMPTS, ROOT, TARGET, VALIDATION, cpu_target

SEEDS = (0, 1, 2)
CHECK = DecodeConfig(temperature=0.0, depth=5, max_new_tokens=64, batch_size=16)
"""How the validation prompts are decoded, by which rates are chosen."""
CHECKED = 48
"""Validation prompts."""
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


class Bench:
    """Trainings and measurements on one target, kept in `work`."""

    def __init__(self, place: Place, work: Path, threads: int, prompts: int) -> None:
        if not place.answers.is_dir():
            raise UserError(
                f"there are no answers in {place.answers}; make them with `headstart generate "
                "experiment=families` or `python -m scripts.evidence.held_out`."
            )
        torch.set_num_threads(threads)
        self.place, self.work, self.threads = place, work, threads
        found = load_prompts(place.measuring)
        domains = len({prompt.domain for prompt in found})
        self.measuring = select_prompts(found, max(1, prompts // domains), seed=0)
        self.validation = load_prompts(place.validation)[:CHECKED]

    @cached_property
    def model(self) -> TargetModel:
        """The target, in float32."""
        return cpu_target(self.place.target)

    def once(self, name: str, train: Callable[[Path], Facts]) -> Path:
        """The checkpoint of the training `name`: `train` writes it into the folder it is given and
        returns facts, unless it was done before."""
        folder = self.work / "trained" / name
        if not (folder / "done.json").is_file():
            discard(folder)
            folder.mkdir(parents=True)
            write_json(folder / "done.json", train(folder / "checkpoint"))
        return folder / "checkpoint"

    def facts(self, checkpoint: Path) -> Facts:
        """What `train` returned."""
        return {**read_json(checkpoint.parent / "done.json")}

    def train(self, name: str, *overrides: str) -> Path:
        """The checkpoint of `headstart train` with the settings of experiment=families and these
        overrides."""

        def run(out: Path) -> Facts:
            place = self.work / "run"
            words = [f"run.answers={self.place.answers}", f"run.drafter={name}"]
            words += [f"run.threads={self.threads}", "train.eval_every=0", "train.parity=false"]
            run_on_target("train", self.place.target, place, *overrides, *words)
            made = place / "train" / name
            copy_plain(made / "best", out)
            manifest = read_json(made / "manifest.json")
            return {key: manifest[key] for key in ("steps", "tokens", "seconds")}

        return self.once(name, run)

    def score(self, checkpoint: Path) -> float:
        """tau on the validation prompts."""
        return tau_estimate(self.totals(checkpoint, "validation", self.validation, CHECK)).tau

    def totals(
        self, checkpoint: Path, name: str, prompts: Sequence[Prompt], decode: DecodeConfig
    ) -> Totals:
        """Sums per prompt; those of an earlier call are read from the training's folder."""
        kept = checkpoint.parent / f"{name}.json"
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
    random = np.random.default_rng(0)
    count = len(ours[0].prompts)
    rows = random.integers(count, size=(RESAMPLES, count))
    content: Facts = {}
    gains = []
    for name, totals in (("ours", ours), ("theirs", theirs)):
        seeds = random.integers(len(totals), size=(RESAMPLES, len(totals)))
        value, drawn = resampled(totals, seeds, rows)
        content[name] = {"tau": value, "tau_ci95": interval(drawn)}
        gains.append((value - 1, drawn - 1))
    (mine, my_draws), (other, other_draws) = gains
    content["ratio"] = mine / max(other, TINY)
    content["ratio_ci95"] = interval(my_draws / np.maximum(other_draws, TINY))
    return content


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
