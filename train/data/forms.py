"""The meaning of a dataset's columns: conversations, prompts with or without answers, token ids and
plain text, recognised by the columns' names and by the content of the first usable row."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from heads.api.errors import UserError, suggest
from inference.target.chat import (
    Message,
    Span,
    check_messages,
    check_unicode,
    spans_of,
    without_nulls,
)
from train.data.config import SourceConfig
from train.data.tables import BadRowError, RawRow

Kind = Literal["messages", "prompt", "tokens", "text"]

COLUMNS: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(("messages", "conversations", "conversation"), ("messages",)),
    **dict.fromkeys(("tokens", "input_ids"), ("tokens",)),
    "prompt": ("prompt", "messages"),
    **dict.fromkeys(("instruction", "question"), ("prompt",)),
    "text": ("text",),
}
"""Columns with the content, in the order in which they are searched, and what they may hold."""
ANSWERS = {
    "prompt": ("completion", "response"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
}
"""Columns with the answer to a prompt, by the prompt's column."""
CONTEXTS = {"instruction": ("input", "context")}
"""Columns with a prompt's input; it is appended to the prompt after an empty line."""
SYSTEMS = ("system", "system_prompt")
MASKS = ("loss_mask", "assistant_masks", "completion_mask", "labels")
"""Columns that mark the answers' tokens: 1 at each, or the token itself in `labels`."""
IGNORED_LABEL = -100
DOMAIN = "domain"
NAMES = {"prompt": "prompts", "instruction": "instructions (Alpaca)", "question": "questions"}
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"),
    "tool": "tool",
}


@dataclass(frozen=True)
class Form:
    """How the rows of a dataset are read: kind and column of the content, and further columns. A
    row's own columns are searched for those that the first rows did not have ("")."""

    kind: Kind
    column: str
    name: str
    """For people."""
    answer: str = ""
    context: str = ""
    system: str = ""
    tools: str = ""
    spans: str = ""
    mask: str = ""
    domain: str = ""
    identity: str = ""

    @property
    def columns(self) -> list[str]:
        """The columns that are read; the content's first."""
        own = (self.context, self.answer, self.system, self.tools, self.spans, self.mask)
        return [name for name in (self.column, *own, self.domain, self.identity) if name]

    def describe(self, columns: Sequence[str]) -> str:
        """A description of the form found in a dataset with these columns."""
        beside = [name for name in (self.context, self.answer, self.system) if name]
        text = f"{self.name} ({listed('column', [self.column, *beside])})"
        if self.kind == "tokens":
            told = self.mask or (self.spans if self.spans in columns else "")
            text += f", answers by '{told}'" if told else ", each row a whole prompt"
        if self.domain in columns:
            text += f", domains from '{self.domain}'"
        unread = [name for name in columns if name not in self.columns]
        return text + (f"; not read: {listed('column', unread)}" if unread else "")

    def content(self, row: RawRow) -> dict[str, Any]:
        """The content of one row, as fields of `train.data.sources.Row`; raises `BadRowError` or
        `UserError` with the reason why it cannot be used."""
        value = row.get(self.column)
        if value is None:
            raise BadRowError(f"column '{self.column}' is missing or null")
        if self.kind == "tokens":
            tokens = read_tokens(value)
            spans = read_spans(value_of(row, self.spans), len(tokens))
            mask = self.mask or ("" if self.spans in row else first_of(MASKS, row))
            if spans is None and mask:
                spans = read_mask(row.get(mask), len(tokens), mask)
            return {"tokens": tokens, "spans": spans}
        if self.kind == "text":
            return {"text": read_text(value, "the text")}
        if self.kind == "messages":
            messages = check_messages([*listed_messages(from_sharegpt(value)), *self._answer(row)])
        else:
            said = read_text(value, "the prompt")
            context = self.context or first_of(CONTEXTS.get(self.column, ()), row)
            if about := value_of(row, context):
                said = f"{said}\n\n{read_text(about, listed('column', [context]))}"
            messages = check_messages([{"role": "user", "content": said}, *self._answer(row)])
        messages = [*self._system(row, messages), *messages]
        tools = read_tools(value_of(row, self.tools))
        # Without tools, the id is the same as in versions that did not support them.
        return {"messages": tuple(messages), **({"tools": tools} if tools else {})}

    def _answer(self, row: RawRow) -> list[Any]:
        value = value_of(row, self.answer or first_of(ANSWERS.get(self.column, ()), row))
        if value is None or value == "":
            return []
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        found = from_sharegpt([value] if isinstance(value, Mapping) else value)
        return listed_messages(found)

    def _system(self, row: RawRow, messages: Sequence[Message]) -> list[Message]:
        value = value_of(row, self.system or first_of(SYSTEMS, row))
        if not isinstance(value, str) or not value.strip() or messages[0]["role"] == "system":
            return []
        return [{"role": "system", "content": check_unicode(value, "the system message")}]


def find_form(
    config: SourceConfig, columns: Sequence[str], rows: Iterable[RawRow | BadRowError]
) -> Form:
    """The form of a dataset with these columns. rows: some of its first ones. Raises `UserError`
    for columns that do not exist, or whose content is not recognised."""
    if not columns:
        raise UserError(
            f"dataset '{config.path}': none of its first rows could be read as one. Each line must "
            "be a JSON object."
        )
    for field in ("column", "id_column", "domain_column"):
        name = getattr(config, field)
        if name is not None and name not in columns:
            raise UserError(
                f"dataset '{config.path}' has no column '{name}' "
                f"(data.{field}).{suggest(name, columns)}"
            )
    column = config.column or find_column(config, columns)
    kind, sample = find_kind(config, column, rows)
    talks, tokens = kind in ("messages", "prompt"), kind == "tokens"
    answers = ANSWERS.get(column, ()) if talks else ()
    usual = config.domain == SourceConfig.domain
    marked = tokens and config.spans_column not in columns
    return Form(
        kind,
        column,
        name_of(kind, column, sample),
        answer=first_of(answers, columns),
        context=first_of(CONTEXTS.get(column, ()) if talks else (), columns),
        system=first_of(SYSTEMS if talks else (), columns),
        tools=config.tools_column if talks else "",
        spans=config.spans_column if tokens else "",
        mask=first_of(MASKS if marked else (), columns),
        domain=config.domain_column or (DOMAIN if usual else ""),
        identity=config.id_column or "",
    )


def first_of(names: Iterable[str], columns: Container[str]) -> str:
    """The first of `names` that is among the columns of a dataset or row; "" for none."""
    return next((name for name in names if name in columns), "")


def value_of(row: RawRow, column: str) -> Any:
    """A row's value of a column; None without one, or if the column is ""."""
    return row.get(column) if column else None


def find_column(config: SourceConfig, columns: Sequence[str]) -> str:
    """The column with the content; raises `UserError` if no name is known."""
    known = [name for name, kinds in COLUMNS.items() if config.kind in ("auto", kinds[0])]
    for name in known:
        if name in columns:
            return name
    raise UserError(
        f"dataset '{config.path}' has none of the columns {', '.join(known)}. Set data.column to "
        f"one of: {', '.join(columns)}."
    )


def find_kind(
    config: SourceConfig, column: str, rows: Iterable[RawRow | BadRowError]
) -> tuple[Kind, Any]:
    """What the column holds, from the configuration or from the first row with text, ids or
    messages, and that row's value."""
    sample = None
    for row in rows:
        value = None if isinstance(row, BadRowError) else row.get(column)
        sample = value if sample is None else sample
        if config.kind != "auto":
            if value is not None:
                break
        elif isinstance(value, str):
            # A configured column is a prompt, whatever its name.
            return "text" if COLUMNS.get(column) == (
                "text",
            ) and not config.column else "prompt", value
        elif isinstance(value, Mapping):
            return "messages", value
        elif isinstance(value, Sequence) and value and isinstance(value[0], (int, Mapping)):
            return ("tokens" if isinstance(value[0], int) else "messages"), value
    if config.kind != "auto":
        return config.kind, sample
    raise UserError(
        f"column '{column}' of dataset '{config.path}' holds neither text, token "
        "ids nor messages in any row."
    )


def name_of(kind: Kind, column: str, sample: Any) -> str:
    """The form's name for people."""
    if kind == "tokens":
        return "token ids"
    if kind == "text":
        return "plain text"
    if kind == "prompt":
        return NAMES.get(column, "prompts")
    # a sample that is no list of mappings has neither name; its row is refused with a reason
    entry = sample[0] if isinstance(sample, Sequence) and sample else sample
    sharegpt = isinstance(entry, Mapping) and "from" in entry
    return "ShareGPT conversations" if sharegpt else "OpenAI messages"


def listed(what: str, names: Sequence[str]) -> str:
    """ "column 'a'", "columns 'a', 'b'"."""
    quoted = ", ".join(f"'{name}'" for name in names)
    return f"{what}{'s' if len(names) > 1 else ''} {quoted}"


# Values of columns


def listed_messages(messages: Any) -> Any:
    """A list of messages as it is; anything else is left for `check_messages` to check."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        check_messages(messages)
    return messages


def from_sharegpt(messages: Any) -> Any:
    """ShareGPT {from, value} entries, also as a mapping of lists (older sequences of `datasets`),
    as {role, content}; anything else unchanged, for `check_messages` to check."""
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
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise BadRowError(f"speaker {speaker!r} is not one of {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[speaker], "content": given.get("value")}


def read_text(value: Any, what: str) -> str:
    """A text that is not empty; raises `BadRowError` otherwise."""
    if not isinstance(value, str):
        raise BadRowError(f"{what} is {type(value).__name__}, not text")
    if not check_unicode(value, what).strip():
        raise BadRowError(f"{what} is empty")
    return value


def read_tools(value: Any) -> tuple[dict[str, object], ...] | None:
    """Descriptions of tools, given as a list or its JSON, None for none; raises `BadRowError`."""
    if not isinstance(value, str):
        value = without_nulls(value)
    elif value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
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
    if any(type(token) is not int or not 0 <= token < 2**31 for token in value):
        raise BadRowError("tokens are not all non-negative integers")
    return tuple(value)


def read_spans(value: Any, length: int) -> tuple[Span, ...] | None:
    """Answer spans or None; raises `BadRowError` unless ascending and inside the tokens."""
    if value is None:
        return None
    try:
        spans = tuple((int(start), int(end)) for start, end in value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRowError("spans are not a list of [start, end) pairs") from error
    bounds = [0, *(bound for span in spans for bound in span), length]
    if bounds != sorted(bounds) or any(start >= end for start, end in spans):
        raise BadRowError("spans are not ascending [start, end) pairs inside the tokens")
    return spans


def read_mask(value: Any, length: int, column: str) -> tuple[Span, ...]:
    """Answer spans of a mask with an entry per token (in `labels`, of all that is not -100); or
    `BadRowError`."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) != length:
        raise BadRowError(f"'{column}' does not have one entry per token")
    if column == "labels":
        inside = [entry != IGNORED_LABEL for entry in value]
    elif any(entry not in (0, 1) for entry in value):
        raise BadRowError(f"'{column}' has entries that are neither 0 nor 1")
    else:
        inside = [bool(entry) for entry in value]
    if not any(inside):
        raise BadRowError(f"'{column}' marks no answer")
    return tuple(spans_of(inside))
