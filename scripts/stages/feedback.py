"""`headstart feedback`: turns records of verifications and their answers into training data, in
<run>/feedback/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE
from inference.target.model import TargetModel
from inference.verifications import FACTS_FILE, RECORDS
from scripts.config.schema import Settings
from scripts.run.folder import open_folder, require_run, with_later
from scripts.run.process import is_main_process, prepare_process, say, shown
from train.data.answers import read_answers
from train.feedback.branches import BRANCHES, write_branches
from train.feedback.build import build, summary
from train.feedback.variations import VARIATIONS, write_variations
from train.generate.target_facts import TargetFacts


def run(settings: Settings) -> None:
    """Write the folder; one made from the same inputs is left unchanged, one made from others
    refused, as when a server has recorded more since."""
    prepare_process(settings.run)
    config, out = settings.feedback, settings.run.directory / "feedback"
    named = config.answers or (str(settings.run.directory / "generate"),)
    answers = [] if config.sequences else [Path(name) for name in named]
    records = [Path(name) for name in config.records] or [folder / RECORDS for folder in answers]
    if not config.records and not config.answers:
        require_run(settings.run)
    for one in records:  # `build` allows them to be missing; here they were requested
        if not (one / FACTS_FILE).is_file():
            raise UserError(
                f"'{one}' holds no records: there is no {FACTS_FILE}. Generate with "
                "generate.drafter and generate.records.enabled=true, serve with "
                "serve.log_rejections=true, or give other folders as feedback.records."
            )
    if (config.branches or config.variations) and (not answers or len(answers) != len(records)):
        raise UserError(
            "feedback.branches and feedback.variations go on from answers, of which each folder "
            f"needs its records; given: {len(answers)} folders of answers and {len(records)} of "
            "records. Give the missing ones, or set both to 0."
        )
    inputs = [folder / MANIFEST_FILE for folder in answers if (folder / MANIFEST_FILE).is_file()]
    inputs += [one / FACTS_FILE for one in records]
    tables = [path for one in records for path in sorted(one.glob("*.parquet"))]
    folder = open_folder(settings, out, with_later(settings, out, inputs, tables))
    if folder.skip() or not is_main_process():
        return
    info = TargetFacts.load(settings.target).info if config.sequences else None
    pairs = list(zip(answers, records, strict=False))
    if config.branches:
        write_branches(pairs, out / BRANCHES, config)
    manifest = build(records, answers, out, config, folder.session, info=info)
    if config.variations:  # after everything that may be refused: they take longest
        target = TargetModel.load(settings.target)
        data: dict[str, Any] = read_answers(answers[0]).get("data", {})
        arguments = data.get("template_arguments")  # with which the answers' prompts were rendered
        seed = settings.run.seed
        write_variations(target, pairs, out / VARIATIONS, config, seed, (), arguments)
    folder.finish()
    say(f"{summary(manifest)}\nTrain on it with run.answers={shown(out)}")
