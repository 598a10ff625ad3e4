"""`headstart verify-export`: whether an exported folder is what its engine needs, and drafts what our drafter drafts.

headstart verify-export verify.dir=outputs/demo/export/eagle3/vllm
headstart verify-export verify.dir=... verify.mode=live verify.live.python=<a Python that has vLLM>

Ends with status 1 when something is wrong.
"""

from __future__ import annotations

from pathlib import Path

from heads.api.errors import UserError
from inference.export.live_check_folder import check_folder, lines
from inference.export.verify import verify
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run.process import is_main_process


def run(settings: Settings) -> int:
    """Check verify.dir and print what was found; the exit status."""
    if not is_main_process():
        return 0
    if not settings.verify.dir:
        raise UserError(
            "verify.dir: give the folder to check, for instance one that `headstart export` wrote."
        )
    if settings.verify.mode == "live":
        return live(settings)
    return static(settings)


def static(settings: Settings) -> int:
    """The check without an engine."""
    found = verify(settings.verify, settings.target)
    print(f"{settings.verify.dir}: {found.layout} for {found.engine}")
    if found.forward is not None:
        gap = "" if found.forward.worst is None else f", largest difference {found.forward.worst:.2g}"
        print(
            f"forward: {found.forward.compared} rows of logits compared{gap}; {found.forward.accepted} of {found.forward.drafted} "
            "drafted tokens are what the target says itself"
        )
    for note in found.notes:
        print(f"note: {note}")
    for fault in found.faults:
        print(f"WRONG {fault}")
    print("nothing wrong found" if not found.faults else f"{len(found.faults)} faults")
    return 1 if found.faults else 0


def live(settings: Settings) -> int:
    """The check with the engine itself; when they part, the static check names the cause."""
    config = settings.verify
    rows = check_folder(config.live, TargetModel.load(settings.target), Path(config.dir), config.source)
    for line in lines(rows):
        print(line)
    if not any(row.problems for row in rows):
        return 0
    static(settings)
    return 1
