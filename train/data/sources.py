"""Where prompts and conversations come from: any dataset, turned into rows with a stable id, or a reason why
one was skipped.

Nothing disappears: iterating over a `Source` yields one `Row` or one `SkippedRow` per row of the dataset
(after shuffle and limit), in an order that depends on the configuration alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heads.api.errors import UserError, suggest
from inference.chat import Message, Span, check_messages, check_unicode
from train.data.permute import stable_permutation
from train.data.tables import BadRowError, Table, open_table

KINDS = ("auto", "messages", "prompt", "tokens")
TURNS = ("first", "last")
COLUMN_NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "tokens": ("tokens", "input_ids"),
    "prompt": ("prompt",),
}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class DataConfig:
    """Which dataset, and how its columns are read."""

    path: str
    """Hub dataset id, or a local .jsonl, .json, .parquet or .arrow file, a folder of one kind of them, a
    glob, or a saved dataset."""
    name: str | None = None
    """Configuration of a Hub dataset (its `name` in `datasets.load_dataset`)."""
    split: str = "train"
    """Split of a Hub or saved dataset; local files are one split."""
    revision: str | None = None
    """Git revision of a Hub dataset; None takes the newest, so name one where runs must be repeatable."""
    kind: str = "auto"
    """What the column holds: messages (OpenAI {role, content} or ShareGPT {from, value}), prompt (text),
    tokens (ids), or auto."""
    column: str | None = None
    """Column with the content; None looks for messages, conversations, conversation, tokens, input_ids,
    prompt, in this order."""
    spans_column: str = "spans"
    """Column with answer spans [[start, end), ...] of pre-tokenised rows; used when it exists."""
    id_column: str | None = None
    """Column with unique row ids; None makes ids from a hash of the content."""
    domain_column: str | None = None
    """Column with the row's domain (code, chat, ...); None uses `domain` for all rows."""
    domain: str = "general"
    """Domain of all rows when there is no `domain_column`, and of rows whose value there is empty."""
    turn: str = "last"
    """Which user message the target answers: the first or the last one of a conversation. Earlier turns stay
    as context."""
    limit: int | None = None
    """Most rows to use, counted after shuffling; None uses all."""
    shuffle: bool = False
    """Whether rows are taken in a random order (fixed by `seed`)."""
    seed: int = 0
    """Seed of the shuffle."""
    max_prompt_tokens: int | None = None
    """Longer prompts are skipped and counted; None allows what the target's positions allow."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"data.kind '{self.kind}' is not known.{suggest(self.kind, KINDS)}")
        if self.turn not in TURNS:
            raise UserError(f"data.turn '{self.turn}' is not known.{suggest(self.turn, TURNS)}")
        for field in ("limit", "max_prompt_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"data.{field} must be at least 1, or null for no limit; given: {value}.")


@dataclass(frozen=True)
class Row:
    """One usable row. `messages` or `tokens` is set; `spans` only for pre-tokenised rows that bring them."""

    index: int
    id: str
    domain: str
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be used, with the reason; its content is not repeated."""

    index: int
    id: str
    domain: str
    reason: str


class Source:
    """An opened dataset. Iterating yields `Row` and `SkippedRow`, one per row; may be repeated."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.table: Table = open_table(config.path, config.name, config.split, config.revision)
        if not len(self.table):
            raise UserError(
                f"dataset '{config.path}' is empty: it has no rows. Check data.path, data.name and "
                "data.split."
            )
        self.column = self._find_column()
        self._numbers = self._choose()
        self.kind = self._find_kind()

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Row | SkippedRow]:
        seen: set[str] = set()
        for index, number in enumerate(self._numbers):
            row = self._read(index, int(number))
            if isinstance(row, Row) and row.id in seen:
                row = SkippedRow(index, row.id, row.domain, "the id or the content is that of an earlier row")
            elif isinstance(row, Row):
                seen.add(row.id)
            yield row

    def _find_column(self) -> str:
        columns = self.table.columns
        for field in ("column", "id_column", "domain_column"):
            name = getattr(self.config, field)
            if name is not None and name not in columns:
                raise UserError(
                    f"dataset '{self.config.path}' has no column '{name}' "
                    f"(data.{field}).{suggest(name, columns)}"
                )
        if self.config.column is not None:
            return self.config.column
        kinds = (
            COLUMN_NAMES if self.config.kind == "auto" else {self.config.kind: COLUMN_NAMES[self.config.kind]}
        )
        for name in (name for names in kinds.values() for name in names):
            if name in columns:
                return name
        raise UserError(
            f"dataset '{self.config.path}' has none of the columns "
            f"{', '.join(n for names in kinds.values() for n in names)}. "
            f"Set data.column to one of: {', '.join(columns) or 'nothing'}."
        )

    def _choose(self) -> np.ndarray:
        count = len(self.table)
        numbers = stable_permutation(count, self.config.seed) if self.config.shuffle else np.arange(count)
        return numbers[: self.config.limit]

    def _find_kind(self) -> str:
        """The configured kind, or that of the first row whose value is text, a list of ids or a list of
        messages."""
        if self.config.kind != "auto":
            return self.config.kind
        for number in self._numbers:
            try:
                value = self.table[int(number)].get(self.column)
            except BadRowError:
                continue
            if isinstance(value, str):
                return "prompt"
            if isinstance(value, Mapping):
                return "messages"
            if isinstance(value, Sequence) and value and isinstance(value[0], (int, Mapping)):
                return "tokens" if isinstance(value[0], int) else "messages"
        raise UserError(
            f"column '{self.column}' of dataset '{self.config.path}' holds neither text, token ids nor "
            "messages in any row."
        )

    def _read(self, index: int, number: int) -> Row | SkippedRow:
        identity, domain = f"row-{number}", self.config.domain
        try:
            raw = self.table[number]
            if self.config.domain_column is not None:
                domain = check_unicode(str(raw.get(self.config.domain_column) or domain), "the domain")
            content = self._content(raw)
            identity = self._identity(raw, content)
        except (BadRowError, UserError) as error:
            return SkippedRow(index, identity, domain, str(error))
        return Row(index, identity, domain, **content)

    def _content(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        value = raw.get(self.column)
        if value is None:
            raise BadRowError(f"column '{self.column}' is missing or null")
        if self.kind == "messages":
            return {"messages": tuple(check_messages(from_sharegpt(value)))}
        if self.kind == "tokens":
            tokens = read_tokens(value)
            return {"tokens": tokens, "spans": read_spans(raw.get(self.config.spans_column), len(tokens))}
        if not isinstance(value, str):
            raise BadRowError(f"the prompt is {type(value).__name__}, not text")
        if not check_unicode(value, "the prompt").strip():
            raise BadRowError("the prompt is empty")
        return {"messages": ({"role": "user", "content": value},)}

    def _identity(self, raw: Mapping[str, Any], content: Mapping[str, Any]) -> str:
        if self.config.id_column is None:
            return content_hash(content)[:32]
        given = raw.get(self.config.id_column)
        if given is None or given == "":
            raise BadRowError(f"column '{self.config.id_column}' (the row's id) is empty")
        return check_unicode(str(given), "the id")


def content_hash(content: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a row's messages, tokens and spans; the same on every machine."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()


def from_sharegpt(messages: Any) -> Any:
    """ShareGPT {from, value} entries as {role, content}; anything else is returned as it is, for
    `check_messages` to judge.

    Columns that `datasets` stores as a mapping of lists (its older sequences of records) are turned back into
    records first.
    """
    if (
        isinstance(messages, Mapping)
        and messages
        and all(isinstance(value, list) for value in messages.values())
    ):
        messages = [
            dict(zip(messages, entry, strict=False)) for entry in zip(*messages.values(), strict=False)
        ]
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return messages
    converted = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("from") is not None and message.get("role") is None:
            role = SHAREGPT_ROLES.get(message["from"])
            if role is None:
                raise BadRowError(f"speaker {message['from']!r} is not one of {', '.join(SHAREGPT_ROLES)}")
            converted.append({"role": role, "content": message.get("value")})
        else:
            converted.append(message)
    return converted


def prompt_of(messages: Sequence[Message], turn: str) -> list[Message]:
    """The part of a conversation up to and including its first or last user message; raises `BadRowError`
    when there is none."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise BadRowError("the conversation has no user message")
    return list(messages[: (places[0] if turn == "first" else places[-1]) + 1])


def read_tokens(value: Any) -> tuple[int, ...]:
    """A row's token ids; raises `BadRowError` unless it is a non-empty list of non-negative integers."""
    tokens = tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    if not tokens:
        raise BadRowError("tokens are empty or not a list")
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise BadRowError("tokens are not all non-negative integers")
    return tokens


def read_spans(value: Any, length: int) -> tuple[Span, ...] | None:
    """Answer spans of a pre-tokenised row, None when it has none; raises `BadRowError` unless ascending and
    inside the tokens."""
    if value is None:
        return None
    try:
        spans = tuple((int(start), int(end)) for start, end in value)
    except (TypeError, ValueError) as error:
        raise BadRowError("spans are not a list of [start, end) pairs") from error
    bounds = [bound for span in spans for bound in span]
    if (
        bounds != sorted(bounds)
        or any(start >= end for start, end in spans)
        or (bounds and (bounds[0] < 0 or bounds[-1] > length))
    ):
        raise BadRowError("spans are not ascending [start, end) pairs inside the tokens")
    return spans
