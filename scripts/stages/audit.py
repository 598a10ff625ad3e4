"""`headstart audit`: checks that every drafter leaves the target's text unchanged. Writes
<run>/<name>/audit.json and audit.md.

Ends with status 1 if it finds a difference that rounding does not explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from heads.api.checkpoint import new_drafter
from inference.audit.findings import AUDIT_FILE, make_audit, read, write
from inference.audit.report import print_summary, write_markdown
from inference.audit.suite import Contestant, run_audit
from inference.measure.config import process_facts
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import StageFolder, open_folder, require_run
from scripts.run.process import console, prepare_process, progress, say, shown
from scripts.run.prompts import bench_of, load, prompt_files


def run(settings: Settings) -> int:
    """Audit, print the summary; returns the exit status."""
    config, out = settings.audit, settings.run.directory / settings.audit.name
    if not config.drafters and not settings.given("audit.kinds"):
        require_run(settings.run, "To audit in a new run, give audit.drafters or audit.kinds.")
    named = [drafters.find(name, settings.run) for name in config.drafters]
    found = named or list(drafters.list_trained(settings.run).values())
    found += [drafters.find(kind, settings.run) for kind in config.kinds]
    files = [*drafters.weight_files(found), *prompt_files(bench_of(settings).prompts)]
    untrained = drafters.described(found)
    folder = open_folder(
        settings, out, files, drafters=untrained, stage_decides=True, may_refuse=True
    )
    if not folder.skip():
        prepare_process(settings.run)
        examine(settings, found, folder)
        folder.finish()
    audit = read(out)
    print_summary(audit, console())
    say(shown(out / AUDIT_FILE))
    return 0 if audit.verdict.lossless else 1


def examine(settings: Settings, found: Sequence[Found], folder: StageFolder) -> None:
    """Run the audit of the drafters and write audit.json and audit.md."""
    config, decode, head = settings.audit, settings.decode, settings.head

    def load_target(precision: str) -> TargetModel:
        return TargetModel.load(replace(settings.target, dtype=precision))

    def initialise(target: TargetModel) -> Any:
        seed = settings.run.seed
        return new_drafter(head.kind, head.config, target.info, target.weights, seed=seed)

    asked = drafters.asked_draft(settings)
    contestants = [
        Contestant(
            item.name, partial(drafters.load, item), drafters.draft_settings(item, decode, asked)
        )
        for item in found
    ]
    if all(item.checkpoint is None for item in found):
        # a drafter that is initialised for the audit tests the loop, not the weights
        contestants.insert(0, Contestant(f"{head.kind} (fresh)", initialise, decode))
    with progress("audit") as show:
        prompts = load(settings).prompts
        findings = run_audit(config, decode, load_target, contestants, prompts, show)
    given = {"audit": asdict(config), "decode": asdict(decode), "dtype": settings.target.dtype_name}
    audit = make_audit(findings, given, {**process_facts(), "git": folder.session["git"]})
    folder.write()
    write(audit, folder.path)
    write_markdown(audit, folder.path)
