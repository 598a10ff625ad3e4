"""`headstart audit`: does the text stay the target's, with every drafter? Writes
<run>/<name>/audit.json and audit.md.

Ends with status 1 when something was found that rounding does not explain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from heads.api.checkpoint import new_drafter
from inference.audit.config import AuditConfig
from inference.audit.findings import AUDIT_FILE, make_audit, read, write
from inference.audit.report import print_summary, write_markdown
from inference.audit.suite import Contestant, run_audit
from inference.measure.config import process_facts
from inference.target.model import TargetModel
from scripts.config.own import RunConfig
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found, weight_files
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process, prepare_process, shown
from scripts.stages.measure import prompts
from scripts.stages.report import console

FRESH = " (fresh)"
"""Behind the kind of a drafter that was initialised for the audit: it proves the loop, not the
weights."""


def run(settings: Settings) -> int:
    """Audit, print the summary; returns the exit status. An unchanged complete audit is only shown
    again."""
    if not is_main_process():
        return 0
    out = settings.run.directory / settings.audit.name
    found = chosen(settings.audit, settings.run)
    folder = open_folder(
        settings, out, [file for item in found for file in weight_files(item)], stage_decides=True
    )
    if folder.complete:
        print(
            f"{shown(out)} is complete; nothing has changed (run.overwrite=true audits again)",
            flush=True,
        )
    else:
        prepare_process(settings.run)
        audited(settings, found, out, folder.session["git"], console())
        folder.finish()
    audit = read(out)
    print_summary(audit, console())
    print(shown(out / AUDIT_FILE), flush=True)
    return 0 if audit.verdict.lossless else 1


def audited(
    settings: Settings, found: Sequence[Found], out: Path, git: dict[str, Any], console: Console
) -> None:
    """Run the checks and write audit.json and audit.md."""

    def load_target(precision: str) -> TargetModel:
        return TargetModel.load(replace(settings.target, dtype=precision))

    contestants = [contestant(item, settings) for item in found]
    if all(item.checkpoint is None for item in found):
        contestants.insert(0, fresh(settings))
    with console.status("audit") as status:
        say: Callable[[str], None] = status.update if console.is_terminal else NowAndThen()
        findings = run_audit(
            settings.audit, settings.decode, load_target, contestants, prompts(settings.bench), say
        )
    asked = {
        "audit": asdict(settings.audit),
        "decode": asdict(settings.decode),
        "dtype": settings.target.dtype,
    }
    audit = make_audit(findings, asked, {**process_facts(), "git": git})
    write(audit, out)
    write_markdown(audit, out)


class NowAndThen:
    """Prints progress where there is no terminal, but not every line of it."""

    seconds = 30.0

    def __init__(self) -> None:
        self.last = -math.inf

    def __call__(self, text: str) -> None:
        if time.monotonic() - self.last >= self.seconds:
            self.last = time.monotonic()
            print(text, flush=True)


def chosen(config: AuditConfig, run: RunConfig) -> list[Found]:
    """The drafters that exist: named ones, else the run's trained ones, then the kinds without
    weights."""
    named = [drafters.find(name, run) for name in config.drafters]
    return [
        *(named or drafters.trained(run).values()),
        *(drafters.find(kind, run) for kind in config.kinds),
    ]


def contestant(found: Found, settings: Settings) -> Contestant:
    """A drafter that exists, with the draft it was trained for."""

    def load(target: TargetModel) -> Any:
        return drafters.load(found, target)

    return Contestant(found.name, load, drafters.draft_settings(found, settings.decode))


def fresh(settings: Settings) -> Contestant:
    """The drafter of head=, freshly initialised."""
    head = settings.head

    def load(target: TargetModel) -> Any:
        return new_drafter(
            head.kind, head.config, target.info, target.weights, seed=settings.run.seed
        )

    return Contestant(head.kind + FRESH, load, settings.decode)
