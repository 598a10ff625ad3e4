"""`headstart push`: builds the Hub folder of a trained drafter, with its reports and exports, and
uploads it.

It is a dry run unless push.dry_run=false.

headstart push run.name=demo run.drafter=eagle3 push.repo=user/name
headstart push run.name=demo run.drafter=all push.repo=user/@drafter-for-target
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from heads.api.checkpoint import weights_file
from heads.api.errors import UserError
from inference.decoding.rules.names import LOSSY
from inference.export.hub.config import DRAFTER
from inference.export.hub.folder import Sources
from inference.export.hub.push import push
from inference.folders import EXPORT_FILE, require_no_link
from inference.manifest import file_sha256
from inference.report.model import read_report
from scripts.config.schema import Settings
from scripts.run.drafters import choose
from scripts.stages.report import measurements


def run(settings: Settings) -> None:
    """Build <run>/push/<drafter>/ and, unless it is a dry run, upload it."""
    chosen, repo = choose(settings.run), settings.push.repo
    if len(chosen) > 1 and DRAFTER not in repo:
        raise UserError(
            f"run.drafter=all pushes {len(chosen)} drafters, each into a repository of its own: "
            f"write {DRAFTER} where push.repo is to hold the name "
            f"(push.repo=user/{DRAFTER}-for-target); given: '{repo}'."
        )
    for found in chosen:
        require_no_link(found.folder, settings.run.directory)
        run, reports = settings.run, reports_of(found.folder, measurements(settings.run))
        if not settings.push.allow_mismatches:
            reports = without_lossy(reports)
        exports = (run.directory / "export" / found.name).glob(f"*/{EXPORT_FILE}")
        by_engine = {path.parent.name: path.parent for path in exports}
        for folder in by_engine.values():
            require_no_link(folder, settings.run.directory)
        config = replace(settings.push, repo=repo.replace(DRAFTER, plain_name(found.name)))
        sources = Sources(found.folder, reports, by_engine)
        push(config, sources, run.directory / "push" / found.name)


def plain_name(name: str) -> str:
    """A drafter's name without the characters that the Hub refuses in a repository's name."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)


def reports_of(checkpoint: Path, folders: list[Path]) -> list[Path]:
    """The reports that measured exactly these weights; if there are none, all, for the error
    message."""
    digest = file_sha256(weights_file(checkpoint))
    fitting = [
        folder
        for folder in folders
        if any(one.draft.weights_sha256 == digest for one in read_report(folder).drafters)
    ]
    return fitting or folders


def without_lossy(reports: list[Path]) -> list[Path]:
    """The reports whose rule of acceptance is not lossy, with a line for each of the others; if
    there are none, all, for the error message."""
    lossy = [path for path in reports if read_report(path).settings.promise == LOSSY]
    if len(lossy) == len(reports):
        return reports
    for path in lossy:
        print(
            f"Left out: {path}, which was measured with a lossy rule. Publish it too, labelled as "
            "not lossless, with push.allow_mismatches=true."
        )
    return [path for path in reports if path not in lossy]
