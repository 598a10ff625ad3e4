"""`headstart.train` trains a drafter on prompts, with the command line's stages and settings.

A call does the same as `headstart generate` followed by `headstart train`, with the same folders,
defaults and messages. A repeated call continues what was interrupted and skips what is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.overrides import name_or_path, spell, spell_groups
from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import stage_folder
from scripts.run.runner import run_one
from scripts.stages.loop.steps import derive_generation
from train.manifest import read_training


@dataclass(frozen=True)
class Trained:
    """A finished training. checkpoint: the drafter's folder; target: Hub id or folder of the model
    that it drafts for; tau: the best measured one with its 95% interval, None if none was measured;
    steps: updates done; folder: the folder of all files written."""

    checkpoint: Path
    target: str
    kind: str
    tau: float | None
    tau_ci95: tuple[float, float] | None
    steps: int
    folder: Path


def train(
    head: str,
    *,
    target: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | Mapping[str, Any] | None = None,
    answers: str | Path | None = None,
    run: str | None = None,
    root: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Trained:
    """Train a drafter and return its checkpoint and its measured tau.

    head: a head config (`headstart train --help` lists them). target: a Hub id or a folder, or the
    name of an option (`conf/target/`); None: the embedded one. data: a file of prompts, or the name
    of an option (`conf/data/`); None: the embedded prompts. answers: a folder of `generate` to
    train on; `data` is then not answered. run, root: the run writes to `root/run/`; None: the
    recipe's, else `outputs/default/`. overrides: settings as on the command line ("optim.lr=1e-4").
    settings: the same by group, as an option's name or a mapping: `engine="torch"`,
    `optim={"lr": 1e-4}`, `train={"max_steps": 500}`. `target` and `data` may be mappings too,
    for keys of the recipe's or the embedded one; keys of `head` and `run` are given as `overrides`
    ("head.num_heads=2").

    Raises `UserError` for what the command line refuses: unknown names (the message suggests the
    nearest one), values out of range, a folder that was made with other settings.
    """
    both = compose(head, target, data, answers, run, root, overrides, settings)
    training, generation = both.derive("train"), derive_generation(both, None)
    if not both.run.answers:  # all is checked before anything starts
        run_one(generation)
    run_one(training)
    return read_result(stage_folder(training), training.target.path)


def compose(
    head: str,
    target: str | Path | Mapping[str, Any] | None,
    data: str | Path | Mapping[str, Any] | None,
    answers: str | Path | None,
    run: str | None,
    root: str | Path | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
) -> Settings:
    """The settings of both stages, checked; arguments as of `train`. Raises `UserError`."""
    given = [spell("head", head)]
    named = {"run.name": run, "run.root": root, "run.answers": answers}
    given += [spell(key, value) for key, value in named.items() if value is not None]
    if target is not None:
        given += name_or_path("target", "local", target)
    if data is not None:
        given += name_or_path("data", "jsonl", data)
    return load_settings(STAGES["loop"], [*given, *spell_groups(settings), *overrides])


def read_result(folder: Path, target: str) -> Trained:
    """The outcome of a finished training in `folder`. target: the model it was trained for; a joint
    training replaces it by its new target."""
    manifest = read_training(folder)
    best = manifest["best"]
    if "joint" in manifest:
        target = str(folder / manifest["joint"]["target"])
    bounds = best["tau_ci95"]
    interval = None if best["tau"] is None or bounds is None else (bounds[0], bounds[1])
    checkpoint = folder / manifest["checkpoint"]
    kind, tau, steps = manifest["kind"], best["tau"], manifest["steps"]
    return Trained(checkpoint, target, kind, tau, interval, steps, folder)
