"""Conversations: each turn is a separate prompt, behind the answers to the turns before it.

These answers are those of plain decoding, so that every drafter is measured on the same prompts.
The first turn keeps the prompt's id; the others are "<id>/2", "<id>/3", ...
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import count

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.measure.prompts import Prompt, to_requests
from inference.target.chat import Message
from inference.target.model import TargetModel


def every_turn(
    prompts: Sequence[Prompt], target: TargetModel, decode: DecodeConfig
) -> list[Prompt]:
    """The prompts of all turns: all first ones, all second ones, ... decode: sampling settings and
    length of the answers. A conversation ends early if a turn does not fit into the target's
    positions, or if an answer is empty."""
    found = list(prompts)
    asked = conversations(prompts)
    for number in count(2):
        if not asked:
            return found
        turns = next_turns(asked, _answers(asked, target, decode), number)
        found += turns
        asked = conversations(turns)
    raise AssertionError("unreachable")


def conversations(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with a further turn."""
    return [prompt for prompt in prompts if prompt.turns]


def next_turns(prompts: Sequence[Prompt], answers: Mapping[str, str], number: int) -> list[Prompt]:
    """The following turn, the `number`th of the conversation, for prompts that have one. answers:
    by the ids of `prompts`. The conversation ends if its answer is missing or empty."""
    following = []
    for prompt in prompts:
        answer = answers.get(prompt.id, "")
        if not answer.strip():
            continue
        assert prompt.messages is not None
        said: tuple[Message, ...] = (
            {"role": "assistant", "content": answer},
            {"role": "user", "content": prompt.turns[0]},
        )
        name = prompt.id.removesuffix(f"/{number - 1}") if number > 2 else prompt.id
        messages = (*prompt.messages, *said)
        turns = prompt.turns[1:]
        made = replace(prompt, id=f"{name}/{number}", messages=messages, turns=turns)
        following.append(replace(made, origin=prompt.unit))
    return following


def is_further_turn(name: str, measured: Container[str]) -> bool:
    """Whether a prompt's id is that of a second or later turn. measured: all ids."""
    first, _, number = name.rpartition("/")
    return number.isdigit() and first in measured


def _answers(
    prompts: Sequence[Prompt], target: TargetModel, decode: DecodeConfig
) -> dict[str, str]:
    """The target's answers without a drafter, by the prompts' ids."""
    limit, tokenizer = target.info.max_position_embeddings, target.tokenizer
    requests = to_requests(prompts, tokenizer, decode, capacity=limit, overlong="skip")
    engine = Engine(target, None, decode.without_draft())
    return {
        prompts[done.request.index].id: tokenizer.decode(done.tokens, skip_special_tokens=True)
        for done in engine.run(requests)
    }
