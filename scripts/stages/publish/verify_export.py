"""`headstart verify-export`: whether an exported folder is what its engine needs.

headstart verify-export verify.dir=outputs/demo/export/eagle3/vllm
headstart verify-export verify.dir=... verify.mode=live verify.live.python=<a Python that has vLLM>

Ends with status 1 when something is wrong.
"""

from __future__ import annotations

from pathlib import Path

from heads.api.errors import UserError
from inference.export.check.live import check_folder, lines
from inference.export.check.verify import verify
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
    for note in found.notes:
        print(f"note: {note}")
    for fault in found.faults:
        print(f"WRONG {fault}")
    print("nothing wrong found" if not found.faults else f"{len(found.faults)} faults")
    return 1 if found.faults else 0


def live(settings: Settings) -> int:
    """The check with the engine itself; if text or acceptance differ, the static one runs too."""
    config = settings.verify
    target = TargetModel.load(settings.target)
    rows = check_folder(config.live, target, Path(config.dir), config.source)
    for line in lines(rows):
        print(line)
    if not any(row.problems for row in rows):
        return 0
    static(settings)
    return 1
