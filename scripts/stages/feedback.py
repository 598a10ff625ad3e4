"""`headstart feedback`: records of verifications and the answers that they are of become training
data, in <run>/feedback/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE
from inference.target.model import TargetModel
from inference.verifications import FACTS_FILE
from scripts.config.schema import Settings
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process, shown
from train.feedback import build
from train.feedback.branches import BRANCHES, write_branches
from train.feedback.variations import VARIATIONS, write_variations
from train.generate.target_facts import TargetFacts
from train.recording import RECORDS

STAGE = "feedback"


def run(settings: Settings) -> None:
    """Write the folder; one of the same inputs is left alone."""
    config = settings.feedback
    out = settings.run.directory / STAGE
    answers = (
        []
        if config.sequences
        else [Path(name) for name in config.answers or (str(settings.run.directory / "generate"),)]
    )
    records = [Path(name) for name in config.records] or [folder / RECORDS for folder in answers]
    for one in records:  # to `build` they may be missing; here somebody asked for them
        if not (one / FACTS_FILE).is_file():
            raise UserError(
                f"'{one}' holds no records: there is no {FACTS_FILE}. Generate with "
                "generate.drafter and "
                "generate.records.enabled=true, serve with serve.log_rejections=true, or give "
                "other folders as feedback.records."
            )
    if (config.branches or config.variations) and (not answers or len(answers) != len(records)):
        raise UserError(
            "feedback.branches and feedback.variations go on from answers, of which each folder "
            "needs its records; given: "
            f"{len(answers)} folders of answers and {len(records)} of records. Give the missing "
            "ones, or set both to 0."
        )
    inputs = [folder / MANIFEST_FILE for folder in answers if (folder / MANIFEST_FILE).is_file()]
    folder = open_folder(settings, out, [*inputs, *(one / FACTS_FILE for one in records)])
    if folder.complete:
        print(
            f"{shown(out)} is complete; nothing to do (run.overwrite=true starts again)", flush=True
        )
        return
    if not is_main_process():
        return
    info = TargetFacts.load(settings.target).info if config.sequences else None
    pairs = list(zip(answers, records, strict=False))
    if config.branches:
        write_branches(pairs, out / BRANCHES, config)
    if config.variations:
        write_variations(
            TargetModel.load(settings.target), pairs, out / VARIATIONS, config, settings.run.seed
        )
    manifest = build(records, answers, out, config, folder.session, info=info)
    folder.finish()
    print(summary(manifest, out), flush=True)


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """What was found, by domain, and how to train on it."""
    found = manifest[STAGE]
    lines = [
        f"{found['documents']} of {manifest['counts']['input']} documents, "
        f"{found['verifications']} verifications, "
        f"{found['errors']} first errors; acceptance by depth "
        + " ".join("-" if share is None else f"{share:.2f}" for share in found["acceptance"])
    ]
    for name, one in found["domains"].items():
        tau = "-" if one["tau"] is None else f"{one['tau']:.2f}"
        lines.append(
            f"  {name}: tau {tau}, {one['share']:.0%} of the tokens, mean weight "
            f"{one['weight']:.2f}"
        )
    return "\n".join([*lines, f"Train on it with run.answers={shown(out)}"])
