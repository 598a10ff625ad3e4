"""Records of verifications for later training: drafts, rejections and both models' probabilities.

A folder of parquet shards (docs/formats.md, Records) that a server, a measurement or a generation
writes while it decodes. `verifications-*.parquet` has one row per verification of one sequence,
`sequences-*.parquet` one per sequence; `records.json` names the target and the drafter. Any parquet
reader can read them:

    datasets.load_dataset("parquet", data_files=str(folder / "verifications-*.parquet"))

Redacted records contain no token and no text. Equal prompts of one process can still be recognised
by a hash, whose key is random and not stored. With both models, a guessed prompt can be tested,
because the remaining numbers (lengths, accepted tokens, log p and log q) follow from the text.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import pyarrow as pa
import pyarrow.parquet as pq

from heads.api.config import PositiveFloat, config
from heads.api.errors import UserError
from heads.api.reading import read_object
from heads.api.target_info import TargetInfo
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, PassRecord
from inference.manifest import write_bytes, write_json

FORMAT = 1
FACTS_FILE = "records.json"
RECORDS = "records"
"""The folder of a stage's records."""
VERIFICATIONS, SEQUENCES = "verifications", "sequences"
RECORD_FILE = re.compile(rf"({VERIFICATIONS}|{SEQUENCES})-\d+(-\d+)?\.parquet")
"""A shard of a log, or the records of a part of answers, which have the part's name."""
SCHEMAS = {
    VERIFICATIONS: pa.schema(
        [
            ("sequence", pa.string()),
            ("position", pa.int64()),
            ("domain", pa.string()),
            ("drafted", pa.list_(pa.int32())),
            ("log_q", pa.list_(pa.float32())),
            ("log_p", pa.list_(pa.float32())),
            ("accepted", pa.int32()),
            ("error_depth", pa.int32()),
            ("pick", pa.int32()),
            ("pick_log_q", pa.float32()),
            ("pick_log_p", pa.float32()),
            ("temperature", pa.float32()),
            ("time", pa.float64()),
        ]
    ),
    SEQUENCES: pa.schema(
        [
            ("sequence", pa.string()),
            ("domain", pa.string()),
            ("prompt_hash", pa.string()),
            ("client", pa.string()),
            ("prompt_length", pa.int32()),
            ("answer_length", pa.int32()),
            ("tokens", pa.list_(pa.int32())),
            ("seed", pa.int64()),
            ("temperature", pa.float32()),
            ("finish", pa.string()),
            ("time", pa.float64()),
        ]
    ),
}
SECRET_COLUMNS = {VERIFICATIONS: ("drafted", "pick"), SEQUENCES: ("tokens", "seed")}
"""Columns that are empty in redacted records: with a seed, prompts could be tried until a length
fits."""
ROWS_PER_SHARD = 8192


@config("records")
@dataclass(frozen=True)
class RecordsConfig:
    """The records that `generate` and `measure` write of their verifications."""

    enabled: bool = False
    """Record the drafts, their probabilities in both models, and where they failed."""
    max_megabytes: PositiveFloat = 1024.0
    """Size in megabytes at which recording ends."""
    redact: bool = False
    """Leave out all tokens: positions, depths, lengths and log-probabilities stay."""

    @property
    def max_bytes(self) -> int:
        """The size limit in bytes."""
        return int(self.max_megabytes * 1e6)


class RecordedDrafter(TypedDict):
    """The drafter named in records. kind: None for plain decoding."""

    name: str
    kind: str | None
    weights_sha256: str


class RecordFacts(TypedDict, total=False):
    """The content of records.json. Files of earlier versions may lack keys."""

    format: int
    redacted: bool
    target: dict[str, str]
    """Its id, revision and tokenizer_hash."""
    drafter: RecordedDrafter
    draft: dict[str, int | str]
    """Its shape, depth, nodes and adaptive lengths."""
    rule: str
    """The acceptance rule above temperature 0; match where it is not given."""


class VerificationLog:
    """Writes records. Rows gather in memory until `flush`, or until a shard is full; a shard
    appears complete or not at all.

    facts: the origin of the records (`target`, `drafter`, ...), stored in `records.json`.
    max_bytes: the size at which writing stops. Rows beyond it are counted in `dropped`, as are rows
    beyond `held` that wait for a flush (None: any number may wait). Safe to use from two threads,
    one that adds and one that flushes. Continues a folder of the same facts; raises `UserError` for
    a folder of other facts.
    """

    def __init__(
        self,
        folder: Path,
        facts: RecordFacts,
        max_bytes: int,
        redact: bool = False,
        *,
        held: int | None = 8 * ROWS_PER_SHARD,
    ) -> None:
        self.folder, self.max_bytes, self.redact, self.held = folder, max_bytes, redact, held
        self.written = self.dropped = 0
        self.full = False
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
        facts = {"format": FORMAT, "redacted": redact, **facts}
        found = list(folder.glob("*.parquet"))
        if odd := [path.name for path in found if not RECORD_FILE.fullmatch(path.name)]:
            raise UserError(
                f"'{folder}' holds '{odd[0]}', which is no file of records. Choose another folder."
            )
        if not (folder / FACTS_FILE).is_file():
            write_json(folder / FACTS_FILE, facts)
        known = read_facts(folder)
        keys = known.keys() | facts.keys()
        different = sorted(k for k in keys - {"rule"} if known.get(k) != facts.get(k))
        if recorded_rule(known) != recorded_rule(facts):
            different.append("rule")
        if different:
            raise UserError(
                f"'{folder}' holds records of something else ({', '.join(different)} differ). "
                "Choose another folder."
            )
        self.bytes = sum(path.stat().st_size for path in found)
        self._next = 1 + max((int(path.stem.rsplit("-", 1)[1]) for path in found), default=-1)

    # Adding

    def verification(
        self, sequence: str, position: int, domain: str, record: PassRecord, temperature: float
    ) -> None:
        """Add one verification, whose root is at `position` of the sequence."""
        assert record.details is not None, "passes were decoded without details"
        row = {
            "sequence": sequence,
            "position": position,
            "domain": domain,
            **vars(record.details),
            "accepted": record.accepted,
            "error_depth": record.accepted + 1 if record.rejected else 0,
            "temperature": temperature,
        }
        self._add(VERIFICATIONS, row)

    def sequence(
        self,
        sequence: str,
        domain: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        seed: int | None,
        temperature: float,
        finish: str,
        client: str = "",
    ) -> None:
        """Add one finished sequence: its prompt and answer as token ids. client: the client that
        sent the request, recorded as a keyed hash; empty: not recorded."""
        row = {
            "sequence": sequence,
            "domain": domain,
            "prompt_hash": self._keyed(array("q", prompt).tobytes()),
            "client": self._keyed(client.encode()) if client else None,
            "prompt_length": len(prompt),
            "answer_length": len(answer),
            "tokens": (*prompt, *answer),
            "seed": seed,
            "temperature": temperature,
            "finish": finish,
        }
        self._add(SEQUENCES, row)

    def _keyed(self, value: bytes) -> str:
        return hmac.digest(self._key, value, "sha256").hex()[:32]

    def _add(self, table: str, row: dict[str, Any]) -> None:
        hidden = dict.fromkeys(SECRET_COLUMNS[table]) if self.redact else {}
        with self._lock:
            # no flush came, or it was too slow
            late = self.held is not None and len(self._rows[table]) >= self.held
            if self.full or late:
                self.dropped += 1
            else:
                self._rows[table].append({**row, "time": time.time(), **hidden})

    def completion(
        self, sequence: str, domain: str, found: Completion, temperature: float, offset: int = 0
    ) -> None:
        """Add the verifications of an answer. offset: tokens of the sequence before its prompt."""
        # the first token of the answer comes from prefill
        root = offset + len(found.request.tokens)
        for record in found.passes:
            self.verification(sequence, root, domain, record, temperature)
            root += record.committed

    @property
    def due(self) -> bool:
        """Whether a shard is full."""
        return any(len(rows) >= ROWS_PER_SHARD for rows in self._rows.values())

    # Writing

    def flush(self, name: str = "") -> None:
        """Write the gathered rows. A shard that would pass `max_bytes` is not written and ends
        recording. name: writes all rows to one shard of this name per table, instead of the next
        number."""
        with self._lock:
            rows, self._rows = self._rows, {name: [] for name in SCHEMAS}
        for table, gathered in rows.items():
            step = max(1, len(gathered)) if name else ROWS_PER_SHARD
            for start in range(0, max(len(gathered), bool(name)), step):
                self._write(table, gathered[start : start + step], name)

    def _write(self, table: str, rows: list[dict[str, Any]], name: str) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, SCHEMAS[table]), sink, compression="zstd")
        content = sink.getvalue().to_pybytes()
        if self.full or self.bytes + len(content) > self.max_bytes:
            self.full, self.dropped = True, self.dropped + len(rows)
            return
        write_bytes(self.folder / f"{table}-{name or f'{self._next:05d}'}.parquet", content)
        self._next += 1
        self.bytes += len(content)
        self.written += len(rows)


def recorded_rule(facts: RecordFacts) -> str:
    """The acceptance rule above temperature 0, one of `inference.decoding.rules.names.RULES`."""
    return facts.get("rule", "match")


def target_facts(info: TargetInfo) -> dict[str, str]:
    """What records say of their target."""
    return {"id": info.id, "revision": info.revision, "tokenizer_hash": info.tokenizer_hash}


def record_facts(
    engine: Engine, drafter: str, weights_sha256: str = "", rule: str = ""
) -> RecordFacts:
    """The facts of an engine's records. drafter: its name; rule: the acceptance rule above
    temperature 0, by default the engine's rule."""
    info, own = engine.target.info, engine.drafter
    return {
        "target": target_facts(info),
        "drafter": {
            "name": drafter,
            "kind": None if own is None else own.kind,
            "weights_sha256": weights_sha256,
        },
        "draft": {
            "shape": engine.decode.shape,
            "depth": engine.tree.max_depth,
            "nodes": engine.tree.num_nodes,
            "adaptive": engine.decode.adaptive,
        },
        "rule": rule or engine.decode.acceptance,
    }


def read_facts(folder: Path) -> RecordFacts:
    """The facts of the records in a folder; raises `UserError` if it has none or they have another
    format."""
    path = folder / FACTS_FILE
    if not path.is_file():
        raise UserError(f"'{folder}' holds no records: there is no {FACTS_FILE}.")
    facts = cast(RecordFacts, read_object(path, "Record again."))
    if facts.get("format") != FORMAT:
        words = f"that this version does not know; it reads format {FORMAT}."
        raise UserError(f"'{path}' has a format of records {words}")
    return facts


def read_table(folder: Path, table: str = VERIFICATIONS) -> pa.Table:
    """All rows of a table in the order they were written; raises `UserError` for other files."""
    read_facts(folder)
    shards, schema = sorted(folder.glob(f"{table}-*.parquet")), SCHEMAS[table]
    try:
        parts = [pq.read_table(path, schema=schema) for path in shards]
    except (pa.ArrowInvalid, OSError) as error:
        damage = f"'{folder}' holds a damaged shard of {table} ({error}). Delete that file."
        raise UserError(damage) from error
    return pa.concat_tables(parts) if parts else schema.empty_table()


def read_dataset(folder: Path, table: str = VERIFICATIONS) -> Any:
    """The same as a `datasets.Dataset`, memory-mapped for tables larger than memory."""
    from datasets import load_dataset  # seconds to import: only for those who read records

    read_facts(folder)
    return load_dataset("parquet", data_files=str(folder / f"{table}-*.parquet"), split="train")
