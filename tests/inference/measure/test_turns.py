"""Conversations are measured turn by turn, each behind what plain decoding answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.measure.prompts import Prompt, load_prompts, prompt_seed
from inference.measure.turns import every_turn, next_turns
from inference.target.model import TargetModel
from scripts.tools.common import cpu_target

DECODE = DecodeConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return cpu_target()


def conversation(name: str = "one", turns: int = 2) -> Prompt:
    asked = ({"role": "user", "content": "Tell me about json in Python."},)
    return Prompt(name, "chat", messages=asked, turns=tuple(f"And {n}?" for n in range(turns)))


def answer(target: TargetModel, prompt: Prompt) -> str:
    """What plain decoding says, asked alone."""
    tokens = tuple(prompt.render(target.tokenizer))
    engine = Engine(target, None, DECODE.without_draft())
    request = Request(0, tokens, prompt_seed(DECODE.seed, prompt.id), DECODE.max_new_tokens)
    (done,) = engine.run([request])
    return str(target.tokenizer.decode(done.tokens, skip_special_tokens=True))


def test_every_turn_stands_behind_the_answers_of_plain_decoding(target: TargetModel) -> None:
    single = Prompt("alone", "chat", messages=({"role": "user", "content": "Explain `len`."},))
    found = every_turn([conversation(), single, conversation("two", 1)], target, DECODE)
    assert [one.id for one in found] == ["one", "alone", "two", "one/2", "two/2", "one/3"]
    by_id = {one.id: one for one in found}
    assert by_id["alone"] == single
    second, third = by_id["one/2"], by_id["one/3"]
    assert second.messages is not None and third.messages is not None
    assert [message["role"] for message in third.messages] == ["user", "assistant"] * 2 + ["user"]
    assert second.messages[1]["content"] == answer(target, by_id["one"])
    assert third.messages[:3] == second.messages
    assert third.messages[3]["content"] == answer(target, second)
    assert third.asked == "And 1?" and third.turns == ()
    # intervals draw a conversation as a whole
    assert [one.unit for one in found] == ["one", "alone", "two", "one", "two", "one"]
    assert {one.domain for one in found} == {"chat"}


def test_a_conversation_ends_where_nothing_is_answered_or_no_room_is_left(
    target: TargetModel,
) -> None:
    assert next_turns([conversation()], {"one": "  "}, 2) == []
    assert next_turns([conversation()], {}, 2) == []
    long = DecodeConfig(max_new_tokens=target.info.max_position_embeddings)
    assert [one.id for one in every_turn([conversation()], target, long)] == ["one"]


def test_turns_are_read_from_and_written_to_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    row = {"id": "a", "prompt": "Hello?", "turns": ["More.", "Again."]}
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (prompt,) = load_prompts(file)
    assert prompt.turns == ("More.", "Again.")
    file.write_text(json.dumps(prompt.to_line()) + "\n", encoding="utf-8")
    assert load_prompts(file) == [prompt]
    for wrong in ("More.", [""], [1]):
        file.write_text(json.dumps(row | {"turns": wrong}) + "\n", encoding="utf-8")
        with pytest.raises(UserError, match="turns must be a list of user messages"):
            load_prompts(file)
