"""Records of a generation's verifications, written part by part next to the answers.

Every part file of answers (train/data/answers.py) has its records in files of the same name below
<out>/records/, written just before it. After a kill there may be records without a part. They are
removed before the generation continues, because their rows are answered again, so no verification
is lost or duplicated. A sequence's name is its row's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from heads.api.errors import UserError
from inference import verifications
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.manifest import checkpoint_hash
from inference.verifications import RECORDS, SCHEMAS, SEQUENCES, VERIFICATIONS, RecordsConfig
from train.data.answers import DONE, PARTS, StoredAnswer
from train.generate.sampling import backend_of
from train.generate.turns import Talk


def require_drafts(decode: DecodeConfig, drafter: str | None) -> None:
    """Raise `UserError` when there is nothing to record: no drafter, or another decoder."""
    if drafter is None or decode.shape == "none" or backend_of(decode) != "own":
        raise UserError(
            "generate.records.enabled records what a drafter drafts while our own decoder "
            "generates. Set generate.drafter to a checkpoint folder, sampling.shape=chain and "
            f"sampling.backend=own; given: generate.drafter={drafter}, "
            f"sampling.shape={decode.shape}, sampling.backend={backend_of(decode)}."
        )


class PartLog(verifications.VerificationLog):
    """A log whose waiting rows can be dropped."""

    def drop_waiting(self) -> None:
        with self._lock:
            self._rows = {name: [] for name in SCHEMAS}


class PartRecords:
    """The records of one process; `world` processes share the size limit evenly."""

    def __init__(
        self, out: Path, config: RecordsConfig, engine: Engine, drafter: str, world: int
    ) -> None:
        self.temperature = engine.decode.temperature
        facts = verifications.record_facts(engine, drafter, checkpoint_hash(drafter))
        limits = (config.max_bytes // world, config.redact)
        self.log = PartLog(out / RECORDS, facts, *limits, held=None)
        self.log.bytes //= world
        self._turns: dict[int, list[tuple[Completion, int]]] = {}
        self._recorded: set[int] = set()

    def take(self, talk: Talk, completion: Completion) -> None:
        """Keep a finished turn of `talk` until its row is written."""
        self._turns.setdefault(talk.row.index, []).append((completion, talk.offset))

    def write(self, name: str, answers: Sequence[StoredAnswer]) -> None:
        """Write the records of the rows of the part file `name`. Their turns are kept until the
        next part, because a part that could not be written is written again, with its records. So
        what an earlier call gathered and did not write is dropped."""
        self.log.drop_waiting()
        indices = {answer.index for answer in answers}
        for index in self._recorded - indices:
            self._turns.pop(index, None)
        self._recorded = indices
        for answer in answers:
            turns = self._turns.get(answer.index, [])
            if answer.status != DONE or not turns:
                continue
            for completion, offset in turns:
                self.log.completion(answer.id, answer.domain, completion, self.temperature, offset)
            begin = answer.spans[0][0]
            named, tokens, temperature = (answer.id, answer.domain), answer.tokens, self.temperature
            prompt, said = tokens[:begin], tokens[begin:]
            self.log.sequence(*named, prompt, said, answer.seed, temperature, answer.finish)
        self.log.flush(name)


def drop_unanswered(out: Path) -> None:
    """Remove records whose part file of answers was not written."""
    parts = {path.stem for path in (out / PARTS).glob("*.parquet")}
    for path in (out / RECORDS).glob("*.parquet*"):
        name = path.name.split(".")[0].removeprefix(f"{VERIFICATIONS}-")
        if path.suffix != ".parquet" or name.removeprefix(f"{SEQUENCES}-") not in parts:
            path.unlink()


def count_records(out: Path, answered: int) -> dict[str, Any]:
    """The manifest's entry: rows of both tables, and answers without a record."""
    tables = {"verifications": VERIFICATIONS, "sequences": SEQUENCES}
    files = {name: (out / RECORDS).glob(f"{table}-*.parquet") for name, table in tables.items()}
    counts = {
        name: sum(pq.read_metadata(path).num_rows for path in paths)
        for name, paths in files.items()
    }
    return {"folder": RECORDS, **counts, "missing": answered - counts["sequences"]}
