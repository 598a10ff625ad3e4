"""`headstart verify-export`: checks whether an exported folder is what its engine needs.

headstart verify-export verify.dir=outputs/demo/export/eagle3/vllm
headstart verify-export verify.dir=... verify.mode=live verify.live.python=<a Python that has vLLM>

A live check decodes the prompts that `measure` would decode: the given ones, or those held out of
the drafter's training data.

Ends with status 1 if it finds a fault.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heads.api.errors import UserError
from inference.export.check.live import check_folder, lines, require_vllm
from inference.export.check.verify import find_source, verify
from inference.export.layouts.folder import Folder
from inference.measure.prompts import Prompt, load_prompts
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run.drafters import answers_of, at
from scripts.run.process import prepare_process
from scripts.run.prompts import load
from train.data.answers import held_out_prompts


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
    """The check with the engine; if it fails, the static check runs too."""
    config = settings.verify
    require_vllm(Path(config.dir))
    prompts = prompts_of(settings)
    target = TargetModel.load(settings.target)
    rows = check_folder(config.live, target, Path(config.dir), prompts, config.source)
    print(*lines(rows), sep="\n")
    if not any(row.problems for row in rows):
        return 0
    static(settings)
    return 1


def prompts_of(settings: Settings) -> list[Prompt]:
    """verify.live.prompts, or else the prompts that `measure` would use for the export's drafter in
    the run of its training answers. Raises `UserError` if there are none."""
    config = settings.verify
    if config.live.prompts:
        return load_prompts(config.live.prompts)
    checkpoint, _ = find_source(Folder.read(Path(config.dir)), config.source)
    answers = [] if checkpoint is None else answers_of(at(checkpoint)) or []
    held = next((one for one in answers if held_out_prompts(one, "bench")), None)
    if held is not None and not settings.given("run.answers"):
        settings = settings.put(run=replace(settings.run, answers=str(held)))
    return load(settings).prompts
