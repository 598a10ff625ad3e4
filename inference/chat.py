"""The one owner of chat templates: messages to token ids, and where in them the assistant speaks.

Three ways, in this order:

1. The tokenizer has a chat template with `{% generation %}` markers: the markers say which tokens are the
   assistant's.
2. It has a template without markers: the prompt of every assistant turn is rendered on its own and must be a
   prefix of the whole conversation, token by token; what follows it, up to the end-of-turn token, is the
   assistant's. A template for which this does not hold (it drops the reasoning of earlier turns, say) is
   refused, for training on it would teach what serving never shows.
3. It has no template: the plain form. A beginning-of-text token if the tokenizer has one, the messages' texts
   without role names and with a blank line between them, and an end-of-text token (if any) after each
   assistant turn. A prompt of one user message is thus exactly the user's text. This is said once per
   tokenizer in the log.

A rendered template already holds its special tokens, so it is never tokenised with further ones added.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from heads.api.errors import UserError

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
TURN_SEPARATOR = "\n\n"
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_told_plain: set[str] = set()

Message = dict[str, str]
Span = tuple[int, int]


def check_messages(messages: Any) -> list[Message]:
    """Return `messages` as plain {"role", "content"} dictionaries; raises `UserError` with a reason that
    quotes no content.

    Content may be a string or a list of OpenAI style text parts, which are joined. Other keys are dropped.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise UserError("messages must be a list with at least one {role, content} entry")
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise UserError("every message must be a mapping with 'role' and 'content'")
        if message["role"] not in ROLES:
            raise UserError(f"message role {message['role']!r} is not one of {', '.join(ROLES)}")
        content = _text(message["content"])
        if not content.strip():
            raise UserError(f"a message of role '{message['role']}' is empty")
        checked.append({"role": message["role"], "content": content})
    return checked


def render_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation that the assistant is to continue, generation prompt included.

    Raises `UserError` for malformed messages, a conversation that already ends with the assistant, or a
    template's own refusal.
    """
    checked = check_messages(messages)
    if checked[-1]["role"] == "assistant":
        raise UserError(
            "a prompt must not end with an assistant message; drop the last one so that the target can answer"
        )
    if not has_template(tokenizer):
        return _render_plain(tokenizer, checked)[0]
    return _apply(tokenizer, checked, generation_prompt=True)


def render_conversation(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[Span]]:
    """Token ids of a whole conversation and the spans [start, end) of what the assistant says, end-of-turn
    token included.

    Raises `UserError` for malformed messages, no assistant message, or a template that allows no way to find
    the spans.
    """
    checked = check_messages(messages)
    if all(message["role"] != "assistant" for message in checked):
        raise UserError("the conversation has no assistant message")
    if not has_template(tokenizer):
        return _render_plain(tokenizer, checked)
    if has_markers(tokenizer) and tokenizer.is_fast:
        return _render_marked(tokenizer, checked)
    return _render_by_prefix(tokenizer, checked)


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(tokenizer.chat_template)


def has_markers(tokenizer: Any) -> bool:
    """Whether the chat template marks what the assistant says with `{% generation %}`."""
    return bool(GENERATION_MARKER.search(_template(tokenizer)))


def spans_of(mask: Sequence[Any]) -> list[Span]:
    """The runs [start, end) of true entries in a mask."""
    spans: list[Span] = []
    start = None
    for place, inside in enumerate([*mask, False]):
        if inside and start is None:
            start = place
        elif not inside and start is not None:
            spans.append((start, place))
            start = None
    return spans


def check_unicode(text: str, what: str) -> str:
    """Return `text`; raises `UserError` for lone surrogates, which JSON lets through and tokenizers choke
    on."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode") from error
    return text


def _text(content: Any) -> str:
    if isinstance(content, str):
        return check_unicode(content, "a message")
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        texts = [
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ]
        if len(texts) == len(content):
            return check_unicode("".join(texts), "a message")
    raise UserError("message content must be text (a string or a list of text parts)")


def _template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise UserError(f"the tokenizer's chat templates have no default: {error}") from error


def _apply(tokenizer: Any, messages: list[Message], generation_prompt: bool = False) -> list[int]:
    """Render and tokenise, in one call, so that special tokens are written by the template alone."""
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=generation_prompt,
            return_dict=False,
            chat_template=_template(tokenizer),
        )
    except TemplateError as error:
        raise UserError(f"the chat template refuses this conversation: {error}") from error
    return list(ids)


def _render_marked(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[Span]]:
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            chat_template=_template(tokenizer),
        )
    except TemplateError as error:
        raise UserError(f"the chat template refuses this conversation: {error}") from error
    spans = spans_of(rendered["assistant_masks"])
    if not spans:
        raise UserError(
            "the chat template has {% generation %} markers but marks nothing in this conversation"
        )
    return list(rendered["input_ids"]), spans


def _render_by_prefix(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[Span]]:
    ids = _apply(tokenizer, messages)
    closing = _closing_ids(tokenizer)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if place == 0:
            raise UserError(
                "the conversation starts with an assistant message, so there is no prompt that leads to it"
            )
        before = _apply(tokenizer, messages[:place], generation_prompt=True)
        after = _apply(tokenizer, messages[: place + 1])
        if ids[: len(before)] != before or ids[: len(after)] != after or len(after) <= len(before):
            raise UserError(
                "the chat template has no {% generation %} markers and renders earlier turns differently "
                "once others follow, so "
                "assistant spans cannot be found; let the target regenerate the answers, or add markers to "
                "the template"
            )
        spans.append((len(before), _end_of_turn(tokenizer, ids, len(before), len(after), closing)))
    return ids, spans


def _closing_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return set(tokenizer.all_special_ids) | {number for number, token in added if token.special}


def _end_of_turn(tokenizer: Any, ids: list[int], start: int, end: int, closing: set[int]) -> int:
    """End of the span: after the turn's closing token, without the line break many templates put behind it.

    The target stops at the closing token, so whatever the template writes after it is never the target's.
    """
    last = max((place for place in range(start, end) if ids[place] in closing), default=None)
    if last is not None and not tokenizer.decode(ids[last + 1 : end]).strip():
        return last + 1
    return end


def _render_plain(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[Span]]:
    """The form for tokenizers without a template. Each text is tokenised alone, so a prompt is a prefix of
    its conversation."""
    name = str(tokenizer.name_or_path)
    if name not in _told_plain:
        _told_plain.add(name)
        logger.warning(
            "the tokenizer has no chat template: messages are written as plain text without role names "
            "(inference/chat.py)"
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
