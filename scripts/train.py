"""`headstart train`: one drafter on the answers of a run, kept at its best measured tau in <run>/train/<drafter>/best/."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.run import is_main_process, open_folder, prepare_process, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scripts.config import Settings


def run(settings: Settings) -> None:
    """Train, continuing an interrupted folder; a complete one is left alone."""
    from inference.manifest import MANIFEST_FILE, read_manifest

    out, answers = stage_folder(settings), answers_folder(settings)
    read_manifest(answers, "generate")  # says what to do when there are no answers yet
    folder = open_folder(settings, out, [answers / MANIFEST_FILE])
    if folder.complete:
        say(f"{shown(out)} is complete; nothing to do (run.overwrite=true starts again)")
        return
    prepare_process(settings.run)
    from train.run import train

    manifest = train(
        settings.head.kind,
        settings.head.config,
        target=settings.target,
        data=answers,
        out=out,
        config=settings.train,
        features=settings.features,
        engine=settings.engine,
        optim=settings.optim,
        schedule=settings.schedule,
        decode=settings.decode,
        joint=settings.joint,
        provenance=folder.session,
    )
    folder.finish()
    say(summary(manifest, out))


def stage_folder(settings: Settings) -> Path:
    """<root>/<name>/train/<drafter>: the drafter's name is the chosen head's unless it was given one."""
    return settings.run.directory / "train" / (settings.run.drafter or str(settings.choices["head"]))


def answers_folder(settings: Settings) -> Path:
    """The folder with the answers to train on: this run's, unless another was given."""
    return Path(settings.run.answers) if settings.run.answers else settings.run.directory / "generate"


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """One line: how long, how good, where."""
    best = manifest["best"]
    tau = "tau was not measured"
    if best["tau"] is not None:
        low, high = best["tau_ci95"]
        tau = f"best tau {best['tau']:.2f} [{low:.2f}, {high:.2f}] at step {best['step']}"
    line = f"{manifest['kind']}: {manifest['steps']} steps, {tau}; {shown(out / manifest['checkpoint'])}"
    if "joint" not in manifest:
        return line
    drift, target = manifest["joint"]["drift"], shown(out / manifest["joint"]["target"])
    same = f"{drift['agreement']:.1%} of tokens and {drift['identical']:.1%} of greedy answers are as before"
    return (
        f"{line}\nThe drafter belongs to a NEW target: {target}. It has moved from the original by KL {drift['kl']:.4f} per token; "
        f"{same}. Measure with target.path set to it."
    )


def say(text: str) -> None:
    """Print in the main process."""
    if is_main_process():
        print(text, flush=True)
