"""`headstart train`: one drafter on the answers of a run, kept at its best measured tau.

Writes <run>/train/<drafter>/ with the drafter in best/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference.manifest import MANIFEST_FILE, read_manifest
from scripts.config.schema import Settings
from scripts.run.folder import answers_folder, open_folder, stage_folder
from scripts.run.process import is_main_process, prepare_process, shown
from train.run import train


def run(settings: Settings) -> None:
    """Train, continuing an interrupted folder; a complete one is left alone."""
    out, answers = stage_folder(settings), answers_folder(settings)
    read_manifest(answers, "generate")  # its error tells how to generate answers
    folder = open_folder(settings, out, [answers / MANIFEST_FILE])
    if folder.complete:
        say(f"{shown(out)} is complete; nothing to do (run.overwrite=true starts again)")
        return
    prepare_process(settings.run)
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


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """One line: steps, best tau, place; and for a joint training the target's drift."""
    best = manifest["best"]
    tau = "tau was not measured"
    if best["tau"] is not None:
        low, high = best["tau_ci95"]
        tau = f"best tau {best['tau']:.2f} [{low:.2f}, {high:.2f}] at step {best['step']}"
    place = shown(out / manifest["checkpoint"])
    line = f"{manifest['kind']}: {manifest['steps']} steps, {tau}; {place}"
    if "joint" not in manifest:
        return line
    drift, target = manifest["joint"]["drift"], shown(out / manifest["joint"]["target"])
    return (
        f"{line}\nThe drafter belongs to a NEW target: {target}. It has moved from the original by "
        "KL "
        f"{drift['kl']:.4f} per token; {drift['agreement']:.1%} of tokens and "
        f"{drift['identical']:.1%} of "
        "greedy answers are as before. Measure with target.path set to it."
    )


def say(text: str) -> None:
    """Print in the main process."""
    if is_main_process():
        print(text, flush=True)
