"""`headstart push`: the Hub folder of a trained drafter with its reports and exports, and its upload (a dry run unless told
otherwise).

headstart push run.name=demo run.drafter=eagle3 push.repo=user/name
headstart push run.name=demo run.drafter=all push.repo=user/@drafter-for-target push.collection="Drafters for target"
"""

from __future__ import annotations

from dataclasses import replace
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


ALL = "all"
"""As run.drafter: every trained drafter of the run."""


def run(settings: Settings) -> None:
    """Build <run>/push/<drafter>/ and, unless it is a dry run, upload it."""
    from inference.export.hub import DRAFTER, push
    from inference.export.hub_folder import Sources

    if not is_main_process():
        return
    chosen = choose(settings.run)
    if len(chosen) > 1 and DRAFTER not in settings.push.repo:
        raise UserError(
            f"run.drafter=all pushes {len(chosen)} drafters, each into a repository of its own: write {DRAFTER} where push.repo "
            f"is to hold the name (push.repo=user/{DRAFTER}-for-target); given: '{settings.push.repo}'."
        )
    for found in chosen:
        assert found.checkpoint is not None, "trained drafters have a checkpoint"
        reports = reports_of(found.checkpoint, measured(settings.run))
        sources = Sources(found.checkpoint, reports, exports_of(settings.run, found.name))
        config = replace(settings.push, repo=settings.push.repo.replace(DRAFTER, found.name))
        push(config, sources, settings.run.directory / "push" / found.name)


def choose(run: RunConfig) -> list[Found]:
    """The drafter named by run.drafter, or the only one, or all; raises `UserError` when that is not clear."""
    known = trained(run)
    if run.drafter in known:
        return [known[run.drafter]]
    if known and (run.drafter == ALL or (not run.drafter and len(known) == 1)):
        return list(known.values())
    if not known:
        raise UserError(
            f"'{run.directory}' holds no trained drafter. Train and measure one first, or set run.name."
        )
    if not run.drafter:
        raise UserError(
            f"this run has trained several drafters. Say which with run.drafter=<name>, or all: {', '.join(known)}."
        )
    raise UserError(
        f"run.drafter: '{run.directory}' has trained no '{run.drafter}'.{suggest(run.drafter, known)}"
    )


def exports_of(run: RunConfig, drafter: str) -> dict[str, Path]:
    """Engine -> folder that `headstart export` wrote for this drafter of the run."""
    from inference.folders import EXPORT_FILE

    return {path.parent.name: path.parent for path in (run.directory / "export" / drafter).glob(f"*/{EXPORT_FILE}")}


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
