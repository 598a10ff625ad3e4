"""The parts of a conversation that are rendered, answered and supervised, and how long ones are
cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from inference.target.chat import Message, Span
from train.data.tables import BadRowError

THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
OPENED_BY_THE_PROMPT = re.compile(r"\A(?:(?!<think>).)*?</think>\s*", re.DOTALL)
NEXT: Message = {"role": "assistant", "content": "."}
"""Placeholder for the next answer, before which the reasoning of earlier ones is dropped."""
CUT_ATTEMPTS = 12
LONGEST_BEGINNING = 600
"""Most characters of a plain text that the target gets to continue."""


def apply_reasoning(messages: Sequence[Message], policy: str) -> list[Message]:
    """The conversation with <think>...</think> of the assistant's turns kept or dropped by
    `policy`; raises `BadRowError` if a turn has only reasoning that is to be dropped."""
    said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    dropped = {"keep": [], "drop": said, "last": said[:-1]}[policy]
    changed = list(messages)
    for place in dropped:
        message = messages[place].copy()
        message.pop("reasoning_content", None)
        message["content"] = without_thinking(message["content"])
        if not message["content"].strip() and "tool_calls" not in message:
            raise BadRowError("an assistant turn is nothing but reasoning")
        changed[place] = message
    return changed


def before_answer(messages: Sequence[Message], place: int, policy: str) -> list[Message]:
    """The messages before an answer at `place`, their reasoning kept or dropped by `policy`: those
    of the assistant are earlier turns."""
    return apply_reasoning([*messages[:place], NEXT], policy)[:-1]


def without_thinking(text: str) -> str:
    """A turn's text without its reasoning, also if the template's prompt has opened the
    reasoning."""
    return THINKING.sub("", OPENED_BY_THE_PROMPT.sub("", text, count=1))


def places_to_answer(messages: Sequence[Message], turn: str) -> list[int]:
    """How many messages come before each answer; raises `BadRowError` without a user message. If
    all turns are answered, those in which the assistant calls tools stay, because the tools'
    results belong to them."""
    if all(message["role"] != "user" for message in messages):
        raise BadRowError("the conversation has no user message")
    asked = [place for place, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if turn == "first":
        return [next(place for place in asked if messages[place]["role"] == "user") + 1]
    if turn == "last":
        return [asked[-1] + 1]
    following = [(place, messages[place : place + 1]) for place in (at + 1 for at in asked)]
    return [
        place
        for place, after in following
        if not after or (after[0]["role"] == "assistant" and "tool_calls" not in after[0])
    ]


def beginning_of(text: str) -> str:
    """The part of a plain text that the target continues: half of it, at most `LONGEST_BEGINNING`
    characters, up to the end of a word if there is one."""
    end = max(1, min(len(text) // 2, LONGEST_BEGINNING))
    cut = max(text.rfind(" ", 0, end + 1), text.rfind("\n", 0, end + 1))
    return text[: cut if cut > 0 and text[:cut].strip() else end]


def fit_prompt(
    messages: Sequence[Message],
    longest: int,
    policy: str,
    render: Callable[[Sequence[Message]], list[int]],
    tokenizer: Any,
) -> tuple[list[int], int]:
    """Token ids of a prompt of at most `longest` tokens, and how many were cut; or `BadRowError`.
    left: the oldest turns go first (a system message stays), then the beginning of the last user
    message; right: its end; middle: the middle of the longest message."""
    kept, tokens = list(messages), render(messages)
    before = len(tokens)
    while policy == "left" and len(tokens) > longest:
        shorter = _without_oldest(kept)
        if shorter is None:
            break
        kept, tokens = shorter, render(shorter)
    for _ in range(CUT_ATTEMPTS):
        if len(tokens) <= longest:
            return tokens, before - len(tokens)
        if policy == "middle":
            place = max(range(len(kept)), key=lambda place: len(kept[place]["content"]))
        else:
            place = max(place for place, message in enumerate(kept) if message["role"] == "user")
        text = _cut_text(kept[place]["content"], len(tokens) - longest, policy, tokenizer)
        kept[place] = {**kept[place], "content": text}
        tokens = render(kept)
    raise BadRowError(f"the prompt cannot be cut to {longest} tokens")


def fit_document(
    tokens: Sequence[int],
    spans: Sequence[Span],
    longest: int,
    policy: str,
    limit: str = "data.max_tokens",
) -> tuple[list[int], list[Span], int]:
    """The document cut to `longest` tokens, its spans, the number cut; or `BadRowError`. limit:
    what sets `longest`, for the error."""
    excess = len(tokens) - longest
    if excess <= 0:
        return list(tokens), list(spans), 0
    if policy == "skip":
        raise BadRowError(f"the document is longer than {limit}={longest}")
    begin = {"left": 0, "right": longest, "middle": longest // 2}[policy]
    end = begin + excess
    kept = [*tokens[:begin], *tokens[end:]]
    moved = []
    for start, stop in spans:
        # Spans before the gap stay, spans after it move, and the gap itself is removed.
        low = min(start, begin) if start < end else start - excess
        high = min(stop, begin) if stop < end else stop - excess
        if low < high:
            moved.append((low, high))
    if not moved or moved[-1][1] < 2:
        raise BadRowError("no answer is left when the document is cut")
    return kept, moved, excess


def _without_oldest(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation from its second user message on, system messages kept; None without one."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    system = [message for message in messages[: users[0]] if message["role"] == "system"]
    return [*system, *messages[users[1] :]]


def _cut_text(text: str, excess: int, policy: str, tokenizer: Any) -> str:
    """The text without about `excess` tokens; raises `BadRowError` if nothing would be left."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    left = len(ids) - excess
    if left < 1:
        raise BadRowError("the prompt is too long even without its longest message's text")
    if policy == "left":
        ids = ids[-left:]
    elif policy == "right":
        ids = ids[:left]
    else:
        ids = [*ids[: (left + 1) // 2], *ids[len(ids) - left // 2 :]]
    cut = str(tokenizer.decode(ids, skip_special_tokens=False)).strip("\ufffd")
    if not cut.strip():
        raise BadRowError("the prompt is too long even without its longest message's text")
    return cut
