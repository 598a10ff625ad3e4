"""Structured output over HTTP, asked for in OpenAI's way and in vLLM's: answers follow it, alone and
beside free ones, and what cannot be kept is refused in OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from heads.jump_forward import Config, Drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.structured.constraint import Constraint
from tests.inference.decoding.structured.parts import (
    CHOICES,
    DATE,
    PERSON,
    SUM,
    is_person,
    structured_target,
)
from tests.inference.server.running import MODEL, Running, serving

SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"response_format": SCHEMA}, is_person),
    "json": ({"structured_outputs": {"json": PERSON}}, is_person),
    "guided_json": ({"guided_json": json.dumps(PERSON)}, is_person),
    "regex": ({"structured_outputs": {"regex": DATE}}, lambda text: re.fullmatch(DATE, text)),
    "guided_regex": ({"guided_regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text)),
    "choice": ({"structured_outputs": {"choice": CHOICES}}, lambda text: text in CHOICES),
    "guided_choice": ({"guided_choice": CHOICES}, lambda text: text in CHOICES),
    "emoji": ({"guided_choice": ["👍", "👎"]}, lambda text: text in ("👍", "👎")),
    "grammar": ({"guided_grammar": SUM}, lambda text: re.fullmatch(r"[\d+]+", text)),
}
USER = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    target = structured_target()
    drafter = Drafter(Config(), target.info)
    config = DecodeConfig(batch_size=4, depth=3, max_new_tokens=60)
    with serving(Engine(target, drafter, config), context=200) as found:
        yield found


def ask(running: Running, extra: dict[str, Any], seed: int = 1, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": USER, "max_tokens": 60, "temperature": 1.0, "seed": seed}
    return running.client.chat.completions.create(**asked, extra_body=extra, **more)  # type: ignore[call-overload]


@pytest.mark.parametrize("way", WAYS)
def test_answers_follow_what_was_asked_for(running: Running, way: str) -> None:
    extra, follows = WAYS[way]
    ended = 0
    for seed in range(3):
        (choice,) = ask(running, extra, seed).choices
        if choice.finish_reason == "stop":
            ended += 1
            assert follows(choice.message.content), choice.message.content
    assert ended


def test_an_answer_is_that_of_the_engine_streamed_or_not(running: Running) -> None:
    found = ask(running, {"response_format": SCHEMA}, seed=5)
    stream = ask(running, {"response_format": SCHEMA}, seed=5, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(pieces) == found.choices[0].message.content
    plain = Engine(structured_target(), None, DecodeConfig(shape="none", temperature=1.0))
    (request,) = plain.requests([USER], [5])
    request = replace(request, max_new_tokens=60, constraint=Constraint.schema(PERSON))
    (done,) = plain.run([request])
    assert plain._answer(done).text == found.choices[0].message.content
    assert found.headstart["accepted_drafts"] > 2  # keys of the schema


def test_constrained_and_free_requests_run_together(running: Running) -> None:
    ways = [WAYS["json_schema"][0], {}, WAYS["regex"][0], {}, WAYS["choice"][0], {}]
    alone = [
        ask(running, extra, seed).choices[0].message.content for seed, extra in enumerate(ways)
    ]
    with ThreadPoolExecutor(len(ways)) as pool:
        found = pool.map(lambda place: ask(running, ways[place], place), range(len(ways)))
        assert [each.choices[0].message.content for each in found] == alone


def test_a_json_object(running: Running) -> None:
    choices = [
        ask(running, {"response_format": {"type": "json_object"}}, seed).choices[0]
        for seed in range(4)
    ]
    assert all(choice.message.content.startswith("{") for choice in choices)
    assert any(choice.message.content.startswith('{"') for choice in choices)
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_an_object_that_needs_a_key_has_one(running: Running) -> None:
    schema = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1}
    for seed in range(3):
        (choice,) = ask(running, {"guided_json": schema}, seed).choices
        assert choice.message.content.startswith(('{"a": ', '{"b": '))


def test_completions_take_it_as_well(running: Running) -> None:
    found = running.client.completions.create(
        model=MODEL, prompt="A date:", max_tokens=30, extra_body={"guided_regex": "[ab]{2}"}
    )
    assert re.fullmatch("[ab]{2}", found.choices[0].text)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "'schema'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format",
        "keyword 'not'",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
        "response_format",
        "JSON schema cannot be used",
    ),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": '{"required": [{}]}'}, "guided_json", "wrong type"),
    ({"guided_json": '{"required": [1, "a"]}'}, "guided_json", "wrong type"),
    ({"guided_json": '{"allOf": 5}'}, "guided_json", "wrong type"),
    ({"guided_json": '{"properties": {"\\ud800": 3}}'}, "guided_json", "?"),
    ({"guided_json": '{"type": "string", "pattern": "\\ud800"}'}, "guided_json", "surrogates"),
    ({"guided_json": {"minItems": 2}}, "guided_json", "'minItems' without type"),
    ({"guided_regex": "(("}, "guided_regex", "parenthesis"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "cannot be kept"),
    ({"guided_grammar": 'x ::= "a"'}, "guided_grammar", "root"),
    ({"guided_choice": []}, "guided_choice", "list of texts"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs", "must be text"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "together"),
    ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "ignore_eos"),
]


@pytest.mark.parametrize(("extra", "param", "words"), BAD, ids=str)
def test_what_cannot_be_kept_is_refused(
    running: Running, extra: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(running, extra)
    body: Any = raised.value.body
    assert body["param"] == param and words in body["message"]
    assert body["type"] == "invalid_request_error"
    assert ask(running, {}).choices[0].message.content is not None  # the server goes on


def test_a_grammar_with_a_dead_end_is_refused_and_the_server_goes_on(running: Running) -> None:
    """Token 0 is no text, so nothing can be answered."""
    for _ in range(4):  # more than the failures in a row that end a server
        with pytest.raises(openai.BadRequestError):
            ask(running, {"guided_grammar": 'root ::= Token(0) "x"'})
    assert ask(running, {}).choices[0].message.content is not None


def test_without_xgrammar_a_request_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from inference.decoding.structured import grammars

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(grammars, "_known", type(grammars._known)())
    body = {"model": MODEL, "messages": USER, "guided_regex": "a"}
    found = httpx.post(f"{running.base}/v1/chat/completions", json=body)
    assert found.status_code == 400 and "with its extra `structured`" in found.text
