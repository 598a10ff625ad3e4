"""Reads all sources once and stores their rows on disk, judged and in order, for any process.

    input/rows-00000.parquet ...   `BLOCK` rows each, while answers are being generated
    input/keys/, *.bin             data for judging the rows, until that is done
    input/state.json               where an interrupted reading continues: after a whole block
    input/verdict.bin              uint8 per row: kept, or why not (`duplicates.REASONS`)
    input/validation.jsonl         prompts that were held out of these rows, as is bench.jsonl; both
                                   are kept
    input/input.json               what was read and left out; kept when the rows are removed

Memory: one block, one partition of keys, one byte per row (nine while prompts are held out). The
fingerprint covers id, domain and content of every row, in order.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.folders import discard
from inference.manifest import PARTIAL, file_sha256, write_bytes, write_json
from train.data.answers import RESERVED, USES, parquet_bytes
from train.data.config import DataConfig, SourceConfig
from train.data.conversation import beginning_of, places_to_answer
from train.data.dedup.duplicates import HELD_OUT, KEPT, REASONS, KeyFiles, append_durably, judge
from train.data.dedup.shingles import SIGNATURE, band_keys, normalise, signature, whole
from train.data.held_out import Findings, HeldOutIndex, add_finding
from train.data.parquet import readable
from train.data.reserve import UNUSABLE, Fits, StoredRows, conversation_of, prompt_tokens, reserve
from train.data.sources import Mixture, Row, RowContent, SkippedRow, content_hash
from train.data.tables import BadRowError, local_files

logger = logging.getLogger(__name__)

REMOVE = "Remove the folder it lies in and run `headstart generate` again."
_SOURCE_FIELDS = [field.name for field in fields(SourceConfig)]
BLOCK = 4096
"""Rows that are read and written together."""
FORMAT = 1
ROWS, KEYS, STATE = "rows-{:05d}.parquet", "keys", "state.json"
VERDICT, SUMMARY, SIGNATURES, HELD = "verdict.bin", "input.json", "signatures.bin", "held_out.bin"
CONVERSATIONS = "conversations.bin"
SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "domain", "reason", "hash", "content")])


@dataclass(frozen=True)
class Input:
    """The input that was read: number of rows, fingerprint of all, hash of those left out ("" for
    none), and a report for manifests."""

    total: int
    fingerprint: str
    left_out: str
    report: dict[str, Any]
    """For manifests: rows, sources (`Mixture.report`), left_out by reason, held_out repeats."""


@dataclass
class InputBlock:
    """The result of one block: rows of the table, keys and signatures of the usable ones."""

    table: list[dict[str, str]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    signatures: list[NDArray[np.uint32]] = field(default_factory=list)
    held_out: list[int] = field(default_factory=list)
    conversations: list[int] = field(default_factory=list)


def ingest(
    data: DataConfig,
    folder: Path,
    held_out: HeldOutIndex | None,
    decode: Callable[[tuple[int, ...]], str],
    *,
    progress: Callable[[int], None] = lambda rows: None,
    answered: bool = False,
    fits: Fits = lambda prompt: True,
    sampled: bool = False,
) -> Input:
    """Read all rows into `folder`, continue an earlier reading, or use a complete one. decode: text
    of token ids; progress: called with the rows read; answered: the rows themselves are no longer
    needed; fits: whether the target can answer a prompt that may be held out; sampled: whether the
    target answers the rows, whose own answers are then not compared. Raises `UserError` for sources
    that cannot be read."""
    identity = identity_of(data, held_out, sampled)
    known = read_input(folder)
    if known is not None and known[0] == identity and (answered or (folder / VERDICT).is_file()):
        return known[1]
    reader = Reader(data, folder, held_out, decode, sampled)
    state = read_state(folder)
    if state is None or state.get("identity") != identity or not reader.restore(state):
        discard(folder)
        state = {"identity": identity, "rows": 0, "place": None, "findings": None, "held_out": 0}
    mixture = reader.read(state, progress)
    return reader.finish(mixture, state, fits)


@dataclass
class Reader:
    """Turns rows into blocks on disk."""

    data: DataConfig
    folder: Path
    held_out: HeldOutIndex | None
    decode: Callable[[tuple[int, ...]], str]
    sampled: bool = False

    def __post_init__(self) -> None:
        self.keys = KeyFiles(self.folder / KEYS)
        self.reserves = is_reserving(self.data)

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Drop what an interrupted run wrote after `state` (input/state.json). False, after a
        warning, if a file holds less than `state` counts: then all must be read again."""
        rows = state["rows"]
        keys = self.keys.forget_from(rows)
        sizes = {HELD: 8 * state["held_out"]}
        if self.data.deduplicate == "near":
            sizes[SIGNATURES] = 4 * SIGNATURE * rows
        if self.reserves:
            sizes[CONVERSATIONS] = 8 * rows
        short = [name for name, size in sizes.items() if not _cut(self.folder / name, size)]
        # states of earlier versions do not count the keys
        short += [KEYS] if keys != state.get("keys", keys) else []
        if short:
            logger.warning(
                "'%s' holds less than its %s counts (%s), as after a power failure; the rows are "
                "read again from the first",
                *(self.folder, STATE, ", ".join(short)),
            )
        return not short

    def read(self, state: dict[str, Any], progress: Callable[[int], None]) -> Mixture:
        """Read from the position in `state` to the end, and keep it up to date."""
        mixture = Mixture(self.data)
        findings: Findings = state["findings"] or Findings(counts={}, examples=[])
        rows = mixture.read(state["place"])
        while block := list(islice(rows, BLOCK)):
            made = self._block([row for _, row in block], findings)
            table = pa.Table.from_pylist(made.table, schema=SCHEMA)
            name = ROWS.format(state["rows"] // BLOCK)
            write_bytes(self.folder / name, parquet_bytes(table))
            self._write_keys(made, len(block))
            append_durably(self.folder / HELD, np.array(made.held_out, dtype=np.int64))
            if self.reserves:
                found = np.array(made.conversations, dtype=np.uint64)
                append_durably(self.folder / CONVERSATIONS, found)
            state |= {
                "rows": state["rows"] + len(block),
                "place": mixture.place(),
                "findings": findings,
                "held_out": state["held_out"] + len(made.held_out),
                "keys": self.keys.count(),
            }
            write_json(self.folder / STATE, state)
            progress(state["rows"])
        return mixture

    def _block(self, rows: list[Row | SkippedRow], findings: Findings) -> InputBlock:
        made = InputBlock()
        for row in rows:
            content: RowContent = {} if isinstance(row, SkippedRow) else row.content
            made.table.append(
                {
                    "id": row.id,
                    "domain": row.domain,
                    "reason": row.reason if isinstance(row, SkippedRow) else "",
                    "hash": content_hash(content),
                    "content": json.dumps(content, ensure_ascii=False) if content else "",
                }
            )
            if self.reserves:
                known = UNUSABLE
                if isinstance(row, Row):
                    known = conversation_of(row, self.data, self.decode)
                made.conversations.append(known)
            if isinstance(row, SkippedRow):
                continue
            texts = self._texts(row)
            repeat = self.held_out.find(texts) if self.held_out is not None else None
            if repeat is not None:
                add_finding(findings, row.id, repeat)
                made.held_out.append(row.index)
                continue
            made.numbers.append(row.index)
            made.ids.append(whole(_utf8(row.id)))
            if self.data.deduplicate != "none":
                text = "\n".join(self._learned(row) or texts)
                letters = normalise(text)
                # Rows with other tools are other rows, however alike the rest of them is.
                tools = whole(normalise(json.dumps(row.tools, sort_keys=True))) if row.tools else 0
                # A text without letters and digits has nothing to compare.
                made.texts.append(whole(letters if len(letters) else _utf8(text)) ^ tools)
                if self.data.deduplicate == "near":
                    made.signatures.append(signature(letters) ^ np.uint32(tools >> 32))
        return made

    def _learned(self, row: Row) -> list[str]:
        """The texts of a row by which duplicates are found: all, or if the target answers the row
        only those that it reads; tool calls included."""
        turn = self.data.turn
        if row.messages is None:
            if self.sampled and row.text is not None:
                return [beginning_of(row.text)]
            asked = prompt_tokens(row, turn) if self.sampled else ()
            return [self.decode(asked)] if asked else []
        messages = row.messages
        if self.sampled:
            try:
                places = places_to_answer(messages, turn)
            except BadRowError:  # it has no prompt
                places = []
            if places:
                kept = [at for at in range(places[-1]) if at not in places]
                messages = tuple(messages[at] for at in kept)
        texts = []
        for message in messages:
            texts.append(message["content"])
            calls = [call["function"] for call in message.get("tool_calls", ())]
            texts += [json.dumps(call, sort_keys=True) for call in calls]
        return texts

    def _texts(self, row: Row) -> list[str]:
        if row.text is not None:
            return [row.text]
        if row.messages is not None:
            return [message["content"] for message in row.messages]
        needed = self.held_out is not None or self.data.deduplicate != "none"
        return [self.decode(row.tokens or ())] if needed else []

    def _write_keys(self, made: InputBlock, rows: int) -> None:
        numbers = np.array(made.numbers, dtype=np.int64)
        self.keys.add("id", np.array(made.ids, dtype=np.uint64), numbers)
        if self.data.deduplicate != "none":
            self.keys.add("text", np.array(made.texts, dtype=np.uint64), numbers)
        if self.data.deduplicate == "near":
            table = np.zeros((rows, SIGNATURE), dtype=np.uint32)
            if made.signatures:
                found = np.stack(made.signatures)
                table[numbers % BLOCK] = found
                bands = band_keys(found)
                self.keys.add("band", bands.reshape(-1), np.repeat(numbers, bands.shape[1]))
            append_durably(self.folder / SIGNATURES, table)

    def finish(self, mixture: Mixture, state: dict[str, Any], fits: Fits) -> Input:
        """Judge the rows, hold prompts out, write the summary, and remove unneeded files."""
        data, folder, total = self.data, self.folder, state["rows"]
        signatures = folder / SIGNATURES
        near = signatures if data.deduplicate == "near" and signatures.is_file() else None
        held = np.fromfile(folder / HELD, dtype=np.int64) if total else np.zeros(0, dtype=np.int64)
        verdict = judge(self.keys, near, total, data.near_share, held)
        if self.reserves and total:
            rows = StoredRows(
                total,
                np.fromfile(folder / CONVERSATIONS, dtype=np.uint64),
                lambda numbers: load_rows(folder, numbers),
            )
            found = reserve(data, rows, verdict, self.decode, fits)
            for use, prompts in found.prompts.items():
                lines = [json.dumps(one.to_line(), ensure_ascii=False) + "\n" for one in prompts]
                write_bytes(folder / RESERVED.format(use), "".join(lines).encode())
        write_bytes(folder / VERDICT, verdict.tobytes())
        counts = Counter(verdict[verdict != KEPT].tolist())
        left_out = hashlib.sha256(verdict.tobytes()).hexdigest()[:32] if counts else ""
        report = {
            "rows": total,
            "sources": mixture.report(),
            "left_out": {REASONS[code]: count for code, count in sorted(counts.items())},
        }
        if counts[HELD_OUT]:
            report["held_out"] = state["findings"]
        result = Input(total, _fingerprint(folder), left_out, report)
        summary = {"format": FORMAT, "identity": state["identity"], **asdict(result)}
        write_json(folder / SUMMARY, summary)
        discard(folder / KEYS)
        for name in (STATE, SIGNATURES, HELD, CONVERSATIONS):
            (folder / name).unlink(missing_ok=True)
        return result


def is_reserving(data: DataConfig) -> bool:
    """Whether prompts are held out of the data itself."""
    return bool(data.reserve.validation or data.reserve.bench or data.reserve.prompts)


def load_rows(folder: Path, numbers: Sequence[int]) -> list[Row]:
    """The usable rows with these numbers, in ascending order."""
    found: list[Row] = []
    for first in sorted({number - number % BLOCK for number in numbers}):
        own = sorted(number for number in numbers if first <= number < first + BLOCK)
        rows = _block(folder, first).take([number - first for number in own]).to_pylist()
        read = [_row(number, row, KEPT) for number, row in zip(own, rows, strict=True)]
        found += [row for row in read if isinstance(row, Row)]
    return found


def _block(folder: Path, first: int) -> pa.Table:
    """The block of rows that begins with number `first`."""
    path = folder / ROWS.format(first // BLOCK)
    with readable(path, REMOVE):
        return pq.read_table(path)


def read_rows(
    folder: Path, rank: int, world: int, done: NDArray[np.bool_]
) -> Iterator[Row | SkippedRow]:
    """This process's rows that are not done (index % world == rank), in order, block by block."""
    verdict = np.fromfile(folder / VERDICT, dtype=np.uint8)
    for first in range(0, len(verdict), BLOCK):
        block = range(first, min(first + BLOCK, len(verdict)))
        wanted = [index for index in block if index % world == rank and not done[index]]
        if not wanted:
            continue
        rows = _block(folder, first).take([index - first for index in wanted]).to_pylist()
        for index, row in zip(wanted, rows, strict=True):
            yield _row(index, row, int(verdict[index]))


def require_own_input(folder: Path) -> None:
    """Raise `UserError` if `folder` holds files that reading never writes but would remove."""
    ours = {KEYS, STATE, VERDICT, SUMMARY, SIGNATURES, HELD, CONVERSATIONS}
    ours |= {RESERVED.format(use) for use in USES}
    for path in folder.iterdir() if folder.is_dir() else ():
        if not (path.name in ours or path.name.startswith("rows-") or path.name.endswith(PARTIAL)):
            raise UserError(
                f"'{path}' was not written by generation, which would replace '{folder}'. Give "
                "another folder."
            )


def remove_rows(folder: Path) -> None:
    """Remove the rows once they are answered; the summary is kept."""
    for path in [*folder.glob("rows-*.parquet"), folder / VERDICT]:
        path.unlink(missing_ok=True)


def read_input(folder: Path) -> tuple[str, Input] | None:
    """Identity and summary of what was read completely into `folder`, or None."""
    path = folder / SUMMARY
    stored = read_object(path, REMOVE) if path.is_file() else {}
    if stored.pop("format", None) != FORMAT:
        return None
    identity = str(stored.pop("identity", ""))
    try:
        return identity, Input(**stored)
    except TypeError as error:
        raise UserError(f"'{path}' is broken ({error}). {REMOVE}") from error


def read_state(folder: Path) -> dict[str, Any] | None:
    """How far the reading into `folder` is, or None."""
    path = folder / STATE
    return read_object(path, REMOVE) if path.is_file() else None


def is_input_of(
    folder: Path, data: DataConfig, held_out: HeldOutIndex | None, sampled: bool = False
) -> bool:
    """Whether `folder` holds this data, completely or in part, or nothing yet."""
    known, state = read_input(folder), read_state(folder)
    found = [known[0]] if known else []
    found += [str(state.get("identity"))] if state else []
    return not found or identity_of(data, held_out, sampled) in found


def identity_of(data: DataConfig, held_out: HeldOutIndex | None, sampled: bool = False) -> str:
    """Hash of all that decides the rows: sources, their files' sizes and times, what is left
    out."""
    names = ("deduplicate", "near_share", "decontaminate", "seed", "limit")
    content: list[Any] = [getattr(data, name) for name in names]
    for source in data.sources:
        own = {name: getattr(source, name) for name in _SOURCE_FIELDS if name != "share"}
        if source.share != (0, 1):  # folders from before shares existed keep their hash
            own["share"] = source.share
        files = local_files(source.path)
        paths = sorted(files.rglob("*")) if isinstance(files, Path) else files or []
        stats = [(str(path), path.stat()) for path in paths]
        content += [own, [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]]
    if held_out is not None:
        content.append(held_out.digest())
    if is_reserving(data):  # folders from before prompts were held out keep their hash
        known = [file_sha256(Path(path)) for path in data.reserve.prompts if Path(path).is_file()]
        content += [asdict(data.reserve), known, data.turn, data.reasoning]
    if data.deduplicate != "none" and sampled and data.turn != "last":
        content.append(["answers of the target", data.turn])
    elif data.deduplicate != "none" and not sampled:
        content.append("answers of the data")
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _cut(path: Path, size: int) -> bool:
    """Cut a file to `size` bytes; False if it has fewer."""
    if not path.is_file():
        return size == 0
    if path.stat().st_size < size:
        return False
    with path.open("r+b") as file:
        file.truncate(size)
    return True


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("rows-*.parquet")):
        with readable(path, REMOVE):
            rows = pq.read_table(path, columns=["id", "domain", "hash"]).to_pylist()
        for row in rows:
            digest.update(_utf8(f"{row['id']}\0{row['domain']}\0{row['hash']}\n"))
    return digest.hexdigest()


def _row(index: int, stored: Mapping[str, str], verdict: int) -> Row | SkippedRow:
    named = (index, stored["id"], stored["domain"])
    if stored["reason"] or verdict != KEPT:
        return SkippedRow(*named, stored["reason"] or REASONS[verdict])
    content: dict[str, Any] = json.loads(stored["content"])
    content = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    if content["spans"] is not None:
        content["spans"] = tuple((start, end) for start, end in content["spans"])
    return Row(*named, **content)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
