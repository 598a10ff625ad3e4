"""Turns any dataset of prompts or conversations into rows with a stable id.

No row is dropped silently: a `Source` yields one `Row` or one `SkippedRow` per row of the dataset
(after shuffle and limit), in an order that depends on the configuration alone, and can continue
from any place. A `Mixture` interleaves several sources by weight: which one is asked for row i is a
function of (seed, i) and of which sources have run out by then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from heads.api.errors import UserError, suggest
from inference.target.chat import Message, Span, check_messages, check_unicode
from train.data.config import DataConfig, SourceConfig
from train.data.permute import stable_permutation, unit_interval
from train.data.streams import Place, StreamedRows, TableRows
from train.data.tables import BadRowError, RawRow, open_table

__all__ = ["DataConfig", "Mixture", "Row", "SkippedRow", "Source", "content_hash"]

COLUMN_NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "tokens": ("tokens", "input_ids"),
    "prompt": ("prompt",),
}
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"),
    "tool": "tool",
}
KIND_PROBE = 1000
"""Rows that are looked at to find what a column holds."""


class RowContent(TypedDict, total=False):
    """What a row's hash covers, in the order in which it is stored."""

    messages: tuple[Message, ...] | None
    tokens: tuple[int, ...] | None
    spans: tuple[Span, ...] | None
    tools: tuple[dict[str, object], ...] | None


@dataclass(frozen=True)
class Row:
    """One usable row. `messages` or `tokens` is set; `spans` only for pre-tokenised rows that bring
    them, `tools` only for conversations that do."""

    index: int
    id: str
    domain: str
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None
    tools: tuple[dict[str, object], ...] | None = None

    @property
    def content(self) -> RowContent:
        names = ("messages", "tokens", "spans", *(("tools",) if self.tools else ()))
        return cast(RowContent, {name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be used, with the reason; its content is not repeated."""

    index: int
    id: str
    domain: str
    reason: str


class Source:
    """An opened dataset; `read` yields a `Row` or `SkippedRow` per row, from any place."""

    def __init__(self, config: SourceConfig, label: str = "") -> None:
        self.config, self.label, self.taken = config, label, 0
        self.rows = StreamedRows(config) if config.streaming else open_rows(config)
        self.column = self._find_column()
        self.kind = self._find_kind()

    def __iter__(self) -> Iterator[Row | SkippedRow]:
        return self.read(None)

    def read(self, place: Place | None) -> Iterator[Row | SkippedRow]:
        """Rows from a place (rows taken, place in the dataset) on; `index` counts this source's."""
        self.taken = place["taken"] if place else 0
        if self.taken == self.config.limit:
            return
        part, parts = self.config.share
        for number, raw in self.rows.read(place["rows"] if place else None):
            self.taken += 1
            if (self.taken - 1) % parts == part:
                yield self._read(self.used - 1, number, raw)
            if self.taken == self.config.limit:
                return

    @property
    def used(self) -> int:
        """Rows that were given: those of `taken` that belong to this share."""
        part, parts = self.config.share
        return max(0, -(-(self.taken - part) // parts))

    def place(self) -> Place:
        """Where the last row that `read` gave ends."""
        return {"taken": self.taken, "rows": self.rows.place()}

    def _find_column(self) -> str:
        config, columns = self.config, self.rows.columns
        for field in ("column", "id_column", "domain_column"):
            name = getattr(config, field)
            if name is not None and name not in columns:
                raise UserError(
                    f"dataset '{config.path}' has no column '{name}' "
                    f"(data.{field}).{suggest(name, columns)}"
                )
        if config.column is not None:
            return config.column
        kinds = COLUMN_NAMES if config.kind == "auto" else [config.kind]
        known = [name for kind in kinds for name in COLUMN_NAMES[kind]]
        for name in known:
            if name in columns:
                return name
        raise UserError(
            f"dataset '{config.path}' has none of the columns {', '.join(known)}. "
            f"Set data.column to one of: {', '.join(columns) or 'nothing'}."
        )

    def _find_kind(self) -> str:
        """The configured kind, or that of the first row with text, ids or messages."""
        if self.config.kind != "auto":
            return self.config.kind
        for _, row in islice(self.rows.read(None), KIND_PROBE):
            value = None if isinstance(row, BadRowError) else row.get(self.column)
            if isinstance(value, str):
                return "prompt"
            if isinstance(value, Mapping):
                return "messages"
            if isinstance(value, Sequence) and value and isinstance(value[0], (int, Mapping)):
                return "tokens" if isinstance(value[0], int) else "messages"
        raise UserError(
            f"column '{self.column}' of dataset '{self.config.path}' holds neither text, token "
            "ids nor messages in any row."
        )

    def _read(self, index: int, number: int, raw: RawRow | BadRowError) -> Row | SkippedRow:
        identity, domain = f"{self.label}row-{number}", self.config.domain
        try:
            if isinstance(raw, BadRowError):
                raise raw
            if self.config.domain_column is not None:
                given = raw.get(self.config.domain_column) or domain
                domain = check_unicode(str(given), "the domain")
            content = self._content(raw)
            identity = self._identity(raw, content)
        except (BadRowError, UserError) as error:
            return SkippedRow(index, identity, domain, str(error))
        return Row(index, identity, domain, **content)

    def _content(self, raw: RawRow) -> RowContent:
        value = raw.get(self.column)
        if value is None:
            raise BadRowError(f"column '{self.column}' is missing or null")
        if self.kind == "messages":
            tools = read_tools(raw.get(self.config.tools_column))
            content: RowContent = {"messages": tuple(check_messages(from_sharegpt(value)))}
            # Without tools the id is that of versions that did not know them.
            return {**content, "tools": tools} if tools else content
        if self.kind == "tokens":
            tokens = read_tokens(value)
            spans = read_spans(raw.get(self.config.spans_column), len(tokens))
            return {"tokens": tokens, "spans": spans}
        if not isinstance(value, str):
            raise BadRowError(f"the prompt is {type(value).__name__}, not text")
        if not check_unicode(value, "the prompt").strip():
            raise BadRowError("the prompt is empty")
        return {"messages": ({"role": "user", "content": value},)}

    def _identity(self, raw: RawRow, content: RowContent) -> str:
        if self.config.id_column is None:
            return content_hash(content)[:32]
        given = raw.get(self.config.id_column)
        if given is None or given == "":
            raise BadRowError(f"column '{self.config.id_column}' (the row's id) is empty")
        return self.label + check_unicode(str(given), "the id")


class Mixture:
    """Several sources as one: `unit_interval(seed, i)` picks that of row i among those left."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        labels = [Path(source.path).stem for source in data.sources]
        self.labels = [
            label if labels.count(label) == 1 else f"{label}{number}"
            for number, label in enumerate(labels)
        ]
        self.sources = [
            Source(config, f"{label}/" if data.mixture else "")
            for config, label in zip(data.sources, self.labels, strict=True)
        ]
        self.index = 0
        self.ended: dict[int, int] = {}

    def read(self, place: Place | None = None) -> Iterator[tuple[int, Row | SkippedRow]]:
        """(number of the source, row) from a place (rows given, where sources ran out, the place in
        each) on; `index` counts all rows."""
        self.index = place["index"] if place else 0
        self.ended = {int(number): at for number, at in place["ended"].items()} if place else {}
        places: list[Place | None] = place["sources"] if place else [None] * len(self.sources)
        begun = [source.read(at) for source, at in zip(self.sources, places, strict=True)]
        for source, at in zip(self.sources, places, strict=True):
            source.taken = at["taken"] if at else 0
        self._resumed = list(places)
        limit = self.data.limit if self.data.mixture else None
        while len(self.ended) < len(self.sources) and self.index != limit:
            number = self._pick()
            row = next(begun[number], None)
            if row is None:
                self.ended[number] = self.index
                continue
            self._resumed[number] = None
            self.index += 1
            yield number, replace(row, index=self.index - 1)

    def place(self) -> Place:
        """Where the last row that `read` gave ends."""
        places = [
            kept if kept is not None or not source.taken else source.place()
            for kept, source in zip(self._resumed, self.sources, strict=True)
        ]
        return {"index": self.index, "ended": dict(self.ended), "sources": places}

    def report(self) -> list[dict[str, Any]]:
        """What was read of each source. ran_out_at: the row at which it ended, if it did."""
        weights = sum(source.config.weight for source in self.sources)
        return [
            {
                "name": label,
                "path": source.config.path,
                "rows": source.used,
                "share_asked": source.config.weight / weights,
                "share": source.used / max(1, self.index),
                "ran_out_at": self.ended.get(number),
            }
            for number, (label, source) in enumerate(zip(self.labels, self.sources, strict=True))
        ]

    def _pick(self) -> int:
        left = [number for number in range(len(self.sources)) if number not in self.ended]
        weights = np.array([self.sources[number].config.weight for number in left])
        edges = np.cumsum(weights) / weights.sum()
        place = unit_interval(self.data.seed, self.index)
        return left[min(int(np.searchsorted(edges, place, side="right")), len(left) - 1)]


def open_rows(config: SourceConfig) -> TableRows:
    """The rows of a table in the configured order; raises `UserError` when it has none."""
    table = open_table(config)
    count = len(table)
    if not count:
        raise UserError(
            f"dataset '{config.path}' is empty: it has no rows. Check data.path, data.name and "
            "data.split."
        )
    numbers = stable_permutation(count, config.seed) if config.shuffle else np.arange(count)
    return TableRows(table, numbers[: config.limit])


def content_hash(content: RowContent) -> str:
    """Hex SHA-256 of a row's messages, tokens and spans; the same on every machine."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def from_sharegpt(messages: Any) -> Any:
    """ShareGPT {from, value} entries, also as a mapping of lists (older sequences of `datasets`),
    as {role, content}; anything else unchanged, for `check_messages` to judge."""
    if isinstance(messages, Mapping) and messages:
        columns = list(messages.values())
        if all(isinstance(column, list) for column in columns):
            entries = zip(*columns, strict=False)
            messages = [dict(zip(messages, entry, strict=True)) for entry in entries]
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return messages
    return [_from_sharegpt(message) for message in messages]


def _from_sharegpt(message: Any) -> Any:
    given = message if isinstance(message, Mapping) else {}
    speaker = given.get("from")
    if speaker is None or given.get("role") is not None:
        return message
    if speaker not in SHAREGPT_ROLES:
        raise BadRowError(f"speaker {speaker!r} is not one of {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[speaker], "content": given.get("value")}


def read_tools(value: Any) -> tuple[dict[str, object], ...] | None:
    """Descriptions of tools, given as a list or its JSON, None for none; or `BadRowError`."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise BadRowError("the tools are not JSON") from error
    if not value:
        return None
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRowError("the tools are not a list of descriptions")
    return tuple(dict(tool) for tool in value)


def read_tokens(value: Any) -> tuple[int, ...]:
    """Token ids; raises `BadRowError` unless a non-empty list of non-negative integers."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise BadRowError("tokens are empty or not a list")
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in value):
        raise BadRowError("tokens are not all non-negative integers")
    return tuple(value)


def read_spans(value: Any, length: int) -> tuple[Span, ...] | None:
    """Answer spans or None; raises `BadRowError` unless ascending and inside the tokens."""
    if value is None:
        return None
    try:
        spans = tuple((int(start), int(end)) for start, end in value)
    except (TypeError, ValueError) as error:
        raise BadRowError("spans are not a list of [start, end) pairs") from error
    bounds = [0, *(bound for span in spans for bound in span), length]
    if bounds != sorted(bounds) or any(start >= end for start, end in spans):
        raise BadRowError("spans are not ascending [start, end) pairs inside the tokens")
    return spans
