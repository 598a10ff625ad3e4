"""Answers over HTTP are those of offline generation: any settings, alone and together, in one piece
and streamed."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import httpx
import pytest

from inference.decoding.engine import Engine
from inference.target.chat import render_prompt
from tests.inference.server.running import MODEL, Running, offline, serving

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"temperature": 1.2, "extra_body": {"top_k": 12, "min_p": 0.02}, "seed": 5},
    {"temperature": 1, "extra_body": {"min_p": 0.1}, "seed": 1 << 40},
]
PROMPTS = ["What is a list?", "Hello", "def add(a, b):", "user assistant system Bye now. Hi there"]


def plain(
    engine: Engine, prompt: Any, settings: dict[str, Any], **more: Any
) -> tuple[str, int, str]:
    """The same request, offline."""
    flat = {**settings, **settings.get("extra_body", {}), **more}
    flat.pop("extra_body", None)
    return offline(engine, prompt, flat.pop("seed", 0), **flat)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_answer_is_that_of_offline_generation(
    running: Running, engine: Engine, settings: dict[str, Any]
) -> None:
    for prompt in PROMPTS[:2]:
        found = running.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=30, **settings
        )
        text, tokens, finish = plain(engine, prompt, settings, max_new_tokens=30)
        choice = found.choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, finish)
        assert found.usage is not None and found.usage.completion_tokens == tokens
        assert found.usage.total_tokens == found.usage.prompt_tokens + tokens
        assert found.model == MODEL and found.id.startswith("chatcmpl-")


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_a_stream_says_the_same_as_an_answer_in_one_piece(
    running: Running, settings: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 30,
    }
    whole = running.client.chat.completions.create(**asked, **settings)
    parts = list(
        running.client.chat.completions.create(
            **asked, **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == whole.choices[
        0
    ].finish_reason
    assert parts[-1].usage == whole.usage and not parts[-1].choices
    assert len({part.id for part in parts}) == 1 and len(parts) > 4


def test_a_text_completion_takes_text_and_token_ids(running: Running, engine: Engine) -> None:
    ids = engine.target.tokenizer.encode(PROMPTS[2])
    text, _, finish = offline(engine, ids, max_new_tokens=12)
    for prompt in (PROMPTS[2], ids, [PROMPTS[2]], [ids]):
        found = running.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=12, temperature=0
        )
        assert (found.choices[0].text, found.choices[0].finish_reason) == (text, finish)
        assert found.usage is not None and found.usage.prompt_tokens == len(ids)
    parts = running.client.completions.create(
        model=MODEL, prompt=ids, max_tokens=12, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == text


def test_token_ids_come_on_request(running: Running, engine: Engine) -> None:
    plain_engine = Engine(engine.target)
    (answer,) = plain_engine.generate([[5, 6, 7]], [0], max_new_tokens=15)
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 15,
        "temperature": 0,
    }
    asked["extra_body"] = {"return_token_ids": True}
    found = running.client.completions.create(**asked)
    assert found.choices[0].token_ids == answer.completion.tokens  # type: ignore[attr-defined]
    parts = list(running.client.completions.create(**asked, stream=True))
    assert parts[-1].choices[0].token_ids == answer.completion.tokens  # type: ignore[attr-defined]


def test_end_of_text_is_ignored_on_request(engine: Engine) -> None:
    """Load generators ask for answers of a fixed length: the text goes on as if nothing ended it,
    beside requests that do end."""
    whole = Engine(engine.target).generate([[5, 6, 7]], [0], max_new_tokens=20)[0].completion.tokens
    target = copy.copy(engine.target)
    target.eos_token_ids = (whole[4], whole[9])
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 20,
        "temperature": 0,
    }
    extra = [{"return_token_ids": True, "ignore_eos": ignored} for ignored in (True, False)]

    async def ask(running: Running) -> list[Any]:
        client = running.asynchronous()
        calls = [client.completions.create(**asked, extra_body=each) for each in extra * 3]
        return await asyncio.gather(*calls)

    ends = whole.index(whole[4]) + 1
    ends = min(ends, whole.index(whole[9]) + 1)
    with serving(Engine(target, engine.drafter, engine.decode)) as running:
        for number, found in enumerate(asyncio.run(ask(running))):
            choice, count = found.choices[0], found.usage.completion_tokens
            if number % 2:
                assert (choice.token_ids, choice.finish_reason) == (whole[:ends], "stop")
            else:
                assert (choice.token_ids, choice.finish_reason) == (whole, "length")
            assert count == len(choice.token_ids)


def test_tokens_are_counted_as_a_completion_reads_them(running: Running) -> None:
    talk = [{"role": "user", "content": PROMPTS[0]}]
    headers = {"Authorization": f"Bearer {running.token}"}

    def tokenize(**body: Any) -> httpx.Response:
        return httpx.post(f"{running.base}/tokenize", json=body, headers=headers)

    text = tokenize(prompt=PROMPTS[2], add_special_tokens=True).json()
    assert text["tokens"] == running.service.engine.target.tokenizer.encode(PROMPTS[2])
    assert text["max_model_len"] == running.service.context
    found = running.client.chat.completions.create(model=MODEL, messages=talk, max_tokens=1)  # type: ignore[arg-type]
    assert found.usage is not None
    assert tokenize(model=MODEL, messages=talk).json()["count"] == found.usage.prompt_tokens
    assert tokenize(model="another", prompt="x").status_code == 404
    assert tokenize().status_code == 400
    assert httpx.post(f"{running.base}/tokenize", json={"prompt": "x"}).status_code == 401


def test_a_conversation_is_rendered_by_the_template(running: Running, engine: Engine) -> None:
    talk = [
        {"role": "system", "content": "Hi there."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}],
        },
        {"role": "assistant", "content": "A sequence."},
        {"role": "user", "content": "Hello!"},
    ]
    found = running.client.chat.completions.create(
        model=MODEL, messages=talk, max_tokens=9, temperature=0
    )  # type: ignore[arg-type]
    assert found.choices[0].message.content == offline(engine, talk, max_new_tokens=9)[0]


def test_messages_may_be_empty(running: Running, engine: Engine) -> None:
    """Interfaces send an empty system prompt."""
    talk: list[Any] = [{"role": "system", "content": ""}, {"role": "user", "content": "Hello"}]
    found = running.client.chat.completions.create(
        model=MODEL, messages=talk, max_tokens=9, temperature=0
    )
    ids = render_prompt(engine.target.tokenizer, talk, empty=True)
    assert found.choices[0].message.content == offline(engine, ids, max_new_tokens=9)[0]
    assert found.usage is not None and found.usage.prompt_tokens == len(ids)
    assert len(ids) > len(render_prompt(engine.target.tokenizer, talk[1:]))


def test_without_a_seed_answers_differ_and_say_theirs(running: Running, engine: Engine) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 1,
        "max_tokens": 20,
    }
    found = [running.client.chat.completions.create(**asked) for _ in range(3)]
    assert len({item.choices[0].message.content for item in found}) > 1
    for item in found:
        seed = item.headstart["seed"]  # type: ignore[attr-defined]
        text, _, _ = offline(engine, "Hello", seed, temperature=1.0, max_new_tokens=20)
        assert item.choices[0].message.content == text


def test_many_clients_at_once_get_each_their_own(running: Running, engine: Engine) -> None:
    """More than there are rows, ragged in prompt, length and settings, half of them streamed."""

    def limit(number: int) -> int:
        return 3 + 5 * number % 37

    async def ask(client: Any, number: int) -> str:
        settings, prompt = SETTINGS[number % len(SETTINGS)], PROMPTS[number % len(PROMPTS)]
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": limit(number),
            **settings,
        }
        if number % 2:
            parts = await client.chat.completions.create(**asked, stream=True)
            return "".join([part.choices[0].delta.content or "" async for part in parts])
        found = await client.chat.completions.create(**asked)
        return str(found.choices[0].message.content)

    async def everybody() -> list[str]:
        async with running.asynchronous() as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    found = asyncio.run(everybody())
    for number, text in enumerate(found):
        settings, prompt = SETTINGS[number % len(SETTINGS)], PROMPTS[number % len(PROMPTS)]
        assert text == plain(engine, prompt, settings, max_new_tokens=limit(number))[0], number


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text_before_them(
    running: Running, engine: Engine, stream: bool
) -> None:
    text, tokens, _ = offline(engine, PROMPTS[0], max_new_tokens=40)
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 40,
        "temperature": 0,
        "stop": [stop, "never said"],
    }
    if stream:
        parts = list(
            running.client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        finish, usage = (
            [part.choices[0].finish_reason for part in parts if part.choices][-1],
            parts[-1].usage,
        )
    else:
        found = running.client.chat.completions.create(**asked)
        said, finish, usage = (
            found.choices[0].message.content,
            found.choices[0].finish_reason,
            found.usage,
        )
    assert said == text[: text.index(stop)] and finish == "stop"
    assert 0 < usage.completion_tokens < tokens


def test_models_are_listed_and_health_needs_no_token(running: Running) -> None:
    assert [model.id for model in running.client.models.list()] == [MODEL]
    assert running.client.models.retrieve(MODEL).owned_by == "headstart"
    for path, word in (("/health", "ok"), ("/ready", True)):
        found = httpx.get(running.base + path)
        assert found.status_code == 200 and word in found.json().values()
