"""`headstart push`: the Hub folder of one trained drafter with its reports, and its upload (a dry run unless told otherwise).

headstart push run.name=demo run.drafter=eagle3 push.repo=user/name
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heads.api.checkpoint import WEIGHTS_FILE
from heads.api.errors import UserError, suggest
from scripts.drafters import Found, trained
from scripts.report import measured
from scripts.run import is_main_process

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.config import Settings
    from scripts.run import RunConfig


def run(settings: Settings) -> None:
    """Build <run>/push/<drafter>/ and, unless it is a dry run, upload it."""
    from inference.export.hub import push

    if not is_main_process():
        return
    found = choose(settings.run)
    assert found.checkpoint is not None, "trained drafters have a checkpoint"
    reports = reports_of(found.checkpoint, measured(settings.run))
    push(settings.push, found.checkpoint, reports, settings.run.directory / "push" / found.name)


def choose(run: RunConfig) -> Found:
    """The drafter named by run.drafter, or the only one; raises `UserError` when that is not clear."""
    known = trained(run)
    if run.drafter in known:
        return known[run.drafter]
    if not run.drafter and len(known) == 1:
        return next(iter(known.values()))
    if not known:
        raise UserError(
            f"'{run.directory}' holds no trained drafter. Train and measure one first, or set run.name."
        )
    if not run.drafter:
        raise UserError(
            f"this run has trained several drafters. Say which with run.drafter=<name>: {', '.join(known)}."
        )
    raise UserError(
        f"run.drafter: '{run.directory}' has trained no '{run.drafter}'.{suggest(run.drafter, known)}"
    )


def reports_of(checkpoint: Path, folders: list[Path]) -> list[Path]:
    """The reports that measured these very weights; all of them when none did, so that the refusal can say what they measured."""
    from inference.manifest import file_sha256
    from inference.report_schema import read_report

    digest = file_sha256(checkpoint / WEIGHTS_FILE)
    fitting = [
        folder
        for folder in folders
        if any(entry["draft"].get("weights_sha256") == digest for entry in read_report(folder)["drafters"])
    ]
    return fitting or folders
