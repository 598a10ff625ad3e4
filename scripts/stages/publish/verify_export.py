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
from scripts.run.process import prepare_process


def run(settings: Settings) -> int:
    if not settings.verify.dir:
        raise UserError(
            "verify.dir: give the folder to check, for instance one that `headstart export` wrote."
        )
    prepare_process(settings.run)
    return (live if settings.verify.mode == "live" else static)(settings)


def static(settings: Settings) -> int:
    found = verify(settings.verify, settings.target)
    print(f"{settings.verify.dir}: {found.layout} for {found.engine}")
    notes = [f"note: {note}" for note in found.notes]
    wrong = [f"WRONG {fault}" for fault in found.faults]
    print(*notes, *wrong, f"faults: {len(wrong)}" if wrong else "nothing wrong found", sep="\n")
    return 1 if wrong else 0


def live(settings: Settings) -> int:
    """The check with the engine itself; if it fails, the static one runs too."""
    config = settings.verify
    target = TargetModel.load(settings.target)
    rows = check_folder(config.live, target, Path(config.dir), config.source)
    print(*lines(rows), sep="\n")
    if not any(row.problems for row in rows):
        return 0
    static(settings)
    return 1
