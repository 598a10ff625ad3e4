"""Turns any dataset of prompts or conversations into rows with a stable id.

No row is dropped silently: a `Source` yields one `Row` or one `SkippedRow` per row of the dataset
(after shuffle and limit), in an order that depends only on the configuration, and can continue from
any place. A `Mixture` interleaves several sources by weight: the source of row i is a function of
(seed, i) and of the sources that have run out by then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from heads.api.errors import UserError
from inference.target.chat import Message, Span, check_unicode
from train.data.config import DataConfig, SourceConfig
from train.data.forms import find_form
from train.data.permute import stable_permutation, unit_interval
from train.data.streams import Place, StreamedRows, TableRows
from train.data.tables import BadRowError, RawRow, open_table

KIND_PROBE = 1000
"""Rows that are inspected to find what a column holds."""


class RowContent(TypedDict, total=False):
    """What a row's hash covers, in the order in which it is stored."""

    messages: tuple[Message, ...] | None
    tokens: tuple[int, ...] | None
    spans: tuple[Span, ...] | None
    tools: tuple[dict[str, object], ...] | None
    text: str | None


@dataclass(frozen=True)
class Row:
    """One usable row. `messages`, `tokens` or `text` is set; `spans` only for pre-tokenised rows
    that bring them, `tools` only for conversations that do."""

    index: int
    id: str
    domain: str
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None
    tools: tuple[dict[str, object], ...] | None = None
    text: str | None = None

    @property
    def content(self) -> RowContent:
        """What the row's hash covers; fields that earlier versions did not have only if set."""
        more = [name for name in ("tools", "text") if getattr(self, name)]
        names = ("messages", "tokens", "spans", *more)
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
        probe = (row for _, row in islice(self.rows.read(None), KIND_PROBE))
        self.form = find_form(config, self.rows.columns, probe)

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
        """Rows that were returned: those of `taken` that belong to this share."""
        part, parts = self.config.share
        return max(0, -(-(self.taken - part) // parts))

    def place(self) -> Place:
        """Where the last row that `read` gave ends."""
        return {"taken": self.taken, "rows": self.rows.place()}

    def describe(self) -> str:
        """A description of the form found in the dataset."""
        return self.form.describe(self.rows.columns)

    def _read(self, index: int, number: int, raw: RawRow | BadRowError) -> Row | SkippedRow:
        identity, domain = f"{self.label}row-{number}", self.config.domain
        try:
            if isinstance(raw, BadRowError):
                raise raw
            if self.form.domain:
                given = raw.get(self.form.domain) or domain
                domain = check_unicode(str(given), "the domain")
            content = cast(RowContent, self.form.content(raw))
            require_storable(content)
            identity = self._identity(raw, content)
        except (BadRowError, UserError) as error:
            return SkippedRow(index, identity, domain, str(error))
        return Row(index, identity, domain, **content)

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
        self.labels = unique_labels([Path(source.path).stem for source in data.sources])
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
        """The rows read from each source. ran_out_at: the row at which it ended, if it did."""
        weights = sum(source.config.weight for source in self.sources)
        return [
            {
                "name": label,
                "path": source.config.path,
                "rows": source.used,
                "share_asked": source.config.weight / weights,
                "share": source.used / max(1, self.index),
                "ran_out_at": self.ended.get(number),
                "kind": source.form.kind,
                "read_as": source.describe(),
            }
            for number, (label, source) in enumerate(zip(self.labels, self.sources, strict=True))
        ]

    def _pick(self) -> int:
        left = [number for number in range(len(self.sources)) if number not in self.ended]
        weights = np.array([self.sources[number].config.weight for number in left])
        edges = np.cumsum(weights) / weights.sum()
        place = unit_interval(self.data.seed, self.index)
        return left[min(int(np.searchsorted(edges, place, side="right")), len(left) - 1)]


def unique_labels(names: Sequence[str]) -> list[str]:
    """The names of sources, those of several with a number that makes them unique."""
    labels: list[str] = []
    for place, name in enumerate(names):
        numbered = (f"{name}{number}" for number in count(place))
        alone = names.count(name) == 1
        taken = {*names, *labels}
        labels.append(name if alone else next(label for label in numbered if label not in taken))
    return labels


def open_rows(config: SourceConfig) -> TableRows:
    """The rows of a table in the configured order; raises `UserError` if it has none."""
    table = open_table(config)
    count = len(table)
    if not count:
        raise UserError(
            f"dataset '{config.path}' is empty: it has no rows. Check data.path, data.name and "
            "data.split."
        )
    numbers = stable_permutation(count, config.seed) if config.shuffle else np.arange(count)
    return TableRows(table, numbers[: config.limit])


def require_storable(content: RowContent) -> None:
    """Raise `BadRowError` or `UserError` for a row that cannot be stored as JSON in UTF-8, such as
    one with a date in a tool's arguments."""
    try:
        text = json.dumps(content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRowError(f"the row has a value that JSON does not have ({error})") from error
    check_unicode(text, "the row")


def content_hash(content: RowContent) -> str:
    """Hex SHA-256 of a row's messages, tokens and spans; the same on every machine."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
