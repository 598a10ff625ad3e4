"""Records of a measurement's verifications: <out>/records/<arm>/ (docs/formats.md, Records).

Computing the probabilities of drafts takes time that a measurement must not include. So the prompts
are decoded once more without timing, in the same order, and the steps are compared with the timed
ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from heads.api.drafter import forget
from inference.decoding.arm import Arm
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.folders import discard, require_folder_name
from inference.measure.answers import Record
from inference.measure.prompts import Prompt
from inference.target.model import TargetModel
from inference.verifications import RECORDS, RecordsConfig, VerificationLog, record_facts

logger = logging.getLogger(__name__)


def write_records(
    config: RecordsConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    prompts: Sequence[tuple[Prompt, Request]],
    measured: Mapping[str, Iterable[Record]],
    out: Path,
) -> None:
    """Record what every arm drafts, replacing earlier records. measured: the timed answers of each
    arm."""
    discard(out / RECORDS)
    for arm in arms:
        engine = Engine(target, arm.drafter, arm.decode, details=True)
        log = VerificationLog(
            out / RECORDS / require_folder_name("measure.drafters", arm.name.replace("/", "_")),
            record_facts(engine, arm.name, arm.weights_sha256),
            config.max_bytes,
            config.redact,
        )
        timed = {record.prompt: record for record in measured[arm.name] if record.repeat == 0}
        forget(arm.drafter)
        others = 0
        for prompt, request in prompts:
            (found,) = engine.run([request])
            known, name, temperature = timed[prompt.id], prompt.id, arm.decode.temperature
            others += (found.passes, found.tokens) != (known.outcome().passes, known.tokens)
            log.completion(name, prompt.domain, found, temperature)
            texts = (request.tokens, found.tokens, request.seed)
            log.sequence(name, prompt.domain, *texts, temperature, found.finish)
            if log.due:
                log.flush()
        log.flush()
        if others:
            logger.warning(
                "records of '%s': %d of %d prompts were decoded in other steps than while they "
                "were timed",
                arm.name,
                others,
                len(prompts),
            )
        if log.full:
            logger.warning(
                "recording '%s' has ended: measure.records.max_megabytes is reached", arm.name
            )
