"""Chat templates: converts messages to token ids, and finds the assistant's tokens. All code that
uses chat templates goes through this module.

There are three ways, in this order:

1. The tokenizer has a chat template with `{% generation %}` markers: the markers give the
   assistant's tokens.
2. It has a template without markers: the prompt of every assistant turn is rendered separately and
   must be a prefix of the whole conversation, token by token. What follows it, up to the
   end-of-turn token, is the assistant's. A template that violates this (for example, it drops the
   reasoning of earlier turns) is refused, because the drafter would be trained on text that does
   not occur in serving.
3. It has no template: the plain form. It is a beginning-of-text token if the tokenizer has one, the
   messages' texts without role names, with a blank line between them, and an end-of-text token (if
   any) after each assistant turn. So a prompt of one user message is exactly the user's text. A
   warning is logged once per tokenizer.

A rendered template already contains its special tokens, so no further ones are added when it is
tokenised. Tool calls, tool results, tool descriptions and a template's own arguments
(`enable_thinking`, ...) go through the template; the plain form supports none of them.
`inference.target.templates` renders templates, within limits.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from heads.api.errors import UserError
from inference.target import templates
from inference.target.templates import Rendered

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
TURN_SEPARATOR = "\n\n"
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_warned_tokenizers: set[str] = set()


class FunctionCall(TypedDict):
    """The function that a tool call names."""

    name: str
    arguments: dict[str, object]


class ToolCall(TypedDict):
    """A tool call in OpenAI's format."""

    id: NotRequired[str]
    type: str
    function: FunctionCall


class ToolParts(TypedDict, total=False):
    """The parts of a message besides its text."""

    tool_calls: list[ToolCall]
    """Of an assistant."""
    reasoning_content: str
    """Of an assistant."""
    name: str
    """Of a tool."""
    tool_call_id: str
    """Of a tool."""


class Message(ToolParts):
    """A chat message; `role` is one of `ROLES`."""

    role: str
    content: str


Span = tuple[int, int]
TURNS = ("all", "first", "last")


class TurnsDifferError(UserError):
    """The template renders earlier turns differently once others follow."""


def check_messages(messages: Any, empty: bool = False) -> list[Message]:
    """Return `messages` without unknown keys. Raises `UserError`; its message quotes no content.

    Content may be a string or a list of OpenAI style text parts, which are joined. A message with
    tool calls and a tool's result may be empty, and any other with `empty`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise UserError("messages must be a list with at least one {role, content} entry")
    checked: list[Message] = []
    for message in messages:
        given = message if isinstance(message, Mapping) else {}
        if "role" not in given or not ("content" in given or given.get("tool_calls")):
            raise UserError("every message must be a mapping with 'role' and 'content'")
        if message["role"] not in ROLES:
            raise UserError(f"message role {message['role']!r} is not one of {', '.join(ROLES)}")
        extra = _tool_parts(message)
        content = "" if message.get("content") is None and extra else _text(message.get("content"))
        if not empty and not content.strip() and not extra:
            raise UserError(f"a message of role '{message['role']}' is empty")
        checked.append({"role": message["role"], "content": content, **extra})
    return checked


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None = None,
    arguments: Mapping[str, object] | None = None,
    empty: bool = False,
) -> list[int]:
    """Token ids of a conversation that the assistant continues, generation prompt included. tools:
    descriptions of the tools it may call; arguments: further values for the template; empty:
    whether messages may be.

    Raises `UserError` for malformed messages, or messages that end with the assistant's.
    """
    checked = check_messages(messages, empty)
    if checked[-1]["role"] == "assistant":
        raise UserError(
            "a prompt must not end with an assistant message; drop the last one so that the "
            "target can answer"
        )
    if not has_template(tokenizer):
        return _render_plain(tokenizer, checked, tools)[0]
    return _ids(tokenizer, checked, _extras(tools, arguments), prompt=True)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, object]],
    turns: str = "all",
    tools: Sequence[Mapping[str, object]] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[list[int], list[Span]]:
    """Token ids of a whole conversation, and the spans [start, end) of the assistant's text,
    end-of-turn token included. turns: the turns to return: all, first or last.

    Raises `UserError` for malformed messages, no assistant message, or a template whose spans
    cannot be found (`TurnsDifferError` if single turns could be found).
    """
    assert turns in TURNS, turns
    checked = check_messages(messages)
    if all(message["role"] != "assistant" for message in checked):
        raise UserError("the conversation has no assistant message")
    if not has_template(tokenizer):
        ids, spans = _render_plain(tokenizer, checked, tools)
    elif has_markers(tokenizer) and tokenizer.is_fast:
        ids, spans = _render_marked(tokenizer, checked, _extras(tools, arguments))
    else:
        return _render_by_prefix(tokenizer, checked, _extras(tools, arguments), turns)
    return ids, {"all": spans, "first": spans[:1], "last": spans[-1:]}[turns]


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(tokenizer.chat_template)


def has_markers(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's text with `{% generation %}`."""
    return bool(GENERATION_MARKER.search(_template(tokenizer)))


def spans_of(mask: Sequence[Any]) -> list[Span]:
    """The runs [start, end) of true entries in a mask."""
    edges = [bool(inside) for inside in (False, *mask, False)]
    turns = [place for place in range(len(mask) + 1) if edges[place] != edges[place + 1]]
    return list(zip(turns[::2], turns[1::2], strict=True))


def check_unicode(text: str, what: str) -> str:
    """Return `text`; raises `UserError` for lone surrogates, which tokenizers cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode") from error
    return text


def without_nulls(value: Any) -> Any:
    """A value without the keys of its mappings, at any depth, that have no value: a table fills
    every row's struct with the keys of all rows, so they were not given. Raises `UserError` for a
    value that is nested too deeply."""
    try:
        return _without_nulls(value)
    except RecursionError as error:
        raise UserError("tools or the arguments of a tool call are nested too deeply") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_without_nulls(each) for each in value]
    return value


def _text(content: Any) -> str:
    if isinstance(content, str):
        return check_unicode(content, "a message")
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return check_unicode("".join(map(str, texts)), "a message")
    raise UserError("message content must be text (a string or a list of text parts)")


def _tool_parts(message: Mapping[str, Any]) -> ToolParts:
    parts: ToolParts = {}
    if message["role"] == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
                raise UserError("the tool calls of a message must be a list")
            parts["tool_calls"] = [_tool_call(call) for call in calls]
        if isinstance(reasoning := message.get("reasoning_content"), str):
            parts["reasoning_content"] = check_unicode(reasoning, "the reasoning")
    if message["role"] == "tool":
        names: tuple[Literal["name", "tool_call_id"], ...] = ("name", "tool_call_id")
        parts |= {name: str(message[name]) for name in names if message.get(name)}  # type: ignore[typeddict-item]
    return parts


def _tool_call(call: Any) -> ToolCall:
    """A tool call whose arguments are a mapping, which most templates expect."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError("a tool call must be a mapping with 'function': {'name', 'arguments'}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise UserError("the arguments of a tool call are not JSON") from error
    if not isinstance(arguments, Mapping):
        raise UserError("the arguments of a tool call must be a mapping")
    given = {str(key): value for key, value in without_nulls(arguments).items()}
    named: FunctionCall = {"name": function["name"], "arguments": given}
    if call.get("id"):
        return {"id": str(call["id"]), "type": "function", "function": named}
    return {"type": "function", "function": named}


def _extras(
    tools: Sequence[Mapping[str, object]] | None, arguments: Mapping[str, object] | None
) -> dict[str, object]:
    """Keyword arguments of `apply_chat_template` beyond the messages."""
    return {**(arguments or {}), **({"tools": [dict(tool) for tool in tools]} if tools else {})}


def _template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise UserError(f"the tokenizer's chat templates have no default: {error}") from error


def _render(
    tokenizer: Any, messages: list[Message], extras: Mapping[str, object], marks: bool = False
) -> Rendered:
    """The template's text, special tokens included."""
    values = {**tokenizer.special_tokens_map, **extras}
    return templates.render(_template(tokenizer), messages, values, marks)


def _ids(
    tokenizer: Any, messages: list[Message], extras: Mapping[str, object], prompt: bool = False
) -> list[int]:
    """Token ids of the messages; prompt: include the generation prompt."""
    text = _render(tokenizer, messages, {**extras, "add_generation_prompt": prompt}).text
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render_marked(
    tokenizer: Any, messages: list[Message], extras: Mapping[str, object]
) -> tuple[list[int], list[Span]]:
    rendered = _render(tokenizer, messages, extras, marks=True)
    encoded = tokenizer(rendered.text, add_special_tokens=False)
    ids = list(encoded["input_ids"])
    inside = [False] * len(ids)
    for start, end in rendered.spans:
        first = encoded.char_to_token(start) if start < end else None
        if first is not None:
            last = encoded.char_to_token(end - 1)
            stop = len(ids) if last is None else last + 1
            # A character may be several tokens, of which `char_to_token` gives the first.
            while stop < len(ids) and (place := encoded.token_to_chars(stop)) and place.start < end:
                stop += 1
            inside[first:stop] = [True] * (stop - first)
    spans = spans_of(inside)
    if not spans:
        raise UserError(
            "the chat template has {% generation %} markers but marks nothing in this conversation"
        )
    return ids, spans


def _render_by_prefix(
    tokenizer: Any, messages: list[Message], extras: Mapping[str, object], turns: str
) -> tuple[list[int], list[Span]]:
    ids = _ids(tokenizer, messages, extras)
    closing = closing_ids(tokenizer)
    spans = []
    assistant = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place in {"all": assistant, "first": assistant[:1], "last": assistant[-1:]}[turns]:
        if place == 0:
            raise UserError(
                "the conversation starts with an assistant message, so there is no prompt that "
                "leads to it"
            )
        before = _ids(tokenizer, messages[:place], extras, prompt=True)
        after = _ids(tokenizer, messages[: place + 1], extras)
        if ids[: len(before)] != before or ids[: len(after)] != after or len(after) <= len(before):
            raise TurnsDifferError(
                "the chat template has no {% generation %} markers and renders earlier turns "
                "differently once others follow, so assistant spans cannot be found; let the "
                "target regenerate the answers, or add markers to the template"
            )
        spans.append((len(before), _end_of_turn(tokenizer, ids, len(before), len(after), closing)))
    return ids, spans


def closing_ids(tokenizer: Any) -> set[int]:
    """All special tokens, any of which may close a turn."""
    added = tokenizer.added_tokens_decoder.items()
    return set(tokenizer.all_special_ids) | {number for number, token in added if token.special}


def _end_of_turn(tokenizer: Any, ids: list[int], start: int, end: int, closing: set[int]) -> int:
    """End of the span: after the turn's closing token, without a line break after it.

    The target stops at the closing token; the template writes what follows.
    """
    last = max((place for place in range(start, end) if ids[place] in closing), default=None)
    if last is not None and not tokenizer.decode(ids[last + 1 : end]).strip():
        return last + 1
    return end


def _render_plain(
    tokenizer: Any, messages: list[Message], tools: Any
) -> tuple[list[int], list[Span]]:
    """Render without a template: each text is tokenised separately, so prompts are prefixes."""
    if tools or any("tool_calls" in message for message in messages):
        raise UserError(
            "the tokenizer has no chat template, so tools and tool calls cannot be written"
        )
    name = str(tokenizer.name_or_path)
    if name not in _warned_tokenizers:
        _warned_tokenizers.add(name)
        logger.warning(
            "the tokenizer has no chat template: messages are written as plain text without role "
            "names (inference/target/chat.py)"
        )
    ids: list[int] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    spans = []
    for place, message in enumerate(messages):
        start = len(ids)
        text = message["content"] if place == 0 else TURN_SEPARATOR + message["content"]
        ids.extend(tokenizer.encode(text, add_special_tokens=False))
        if message["role"] == "assistant":
            if tokenizer.eos_token_id is not None:
                ids.append(tokenizer.eos_token_id)
            spans.append((start, len(ids)))
    return ids, spans
