"""Requests of several answers: every choice is that of a request of its own with its seed, in one
piece and streamed, of one prompt and of many."""

from __future__ import annotations

import copy
import time
from typing import Any

import httpx
import openai
import pytest

from inference.decoding.engine import Engine
from tests.inference.server.running import MODEL, Running, offline, serving

TALK: list[Any] = [{"role": "user", "content": "What is a list?"}]
SAMPLED: dict[str, Any] = {"model": MODEL, "temperature": 1, "max_tokens": 12}


def test_choices_have_their_own_seeds(running: Running, engine: Engine) -> None:
    """More of them than there are rows."""
    found = running.client.chat.completions.create(**SAMPLED, messages=TALK, n=6, seed=11)
    assert [choice.index for choice in found.choices] == list(range(6))
    seeds = found.headstart["seeds"]  # type: ignore[attr-defined]
    assert seeds == list(range(11, 17))
    total = 0
    for choice, seed in zip(found.choices, seeds, strict=True):
        wanted = offline(engine, TALK, seed, temperature=1.0, max_new_tokens=12)
        assert (choice.message.content, choice.finish_reason) == (wanted[0], wanted[2])
        total += wanted[1]
    assert len({choice.message.content for choice in found.choices}) > 3
    assert found.usage is not None and found.usage.completion_tokens == total
    assert found.usage.prompt_tokens == len(engine._tokens("What is a list?"))


def test_a_negative_seed_is_taken_modulo_2_to_the_63(running: Running, engine: Engine) -> None:
    """`best_of` may be given if it is `n`."""
    own: dict[str, Any] = {"extra_body": {"best_of": 2}, "seed": -1}
    found = running.client.chat.completions.create(**SAMPLED, messages=TALK, n=2, **own)
    seeds = found.headstart["seeds"]  # type: ignore[attr-defined]
    assert seeds == [(1 << 63) - 1, 0]
    for choice, seed in zip(found.choices, seeds, strict=True):
        wanted = offline(engine, TALK, seed, temperature=1.0, max_new_tokens=12)
        assert choice.message.content == wanted[0]


def test_a_stream_names_the_choice_of_every_part(running: Running) -> None:
    asked: dict[str, Any] = {**SAMPLED, "messages": TALK, "n": 3, "seed": 4, "stop": ["e"]}
    whole = running.client.chat.completions.create(**asked)
    parts = list(
        running.client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert parts[-1].usage == whole.usage and not parts[-1].choices
    for choice in whole.choices:
        own = [p.choices[0] for p in parts[:-1] if p.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(item.delta.content or "" for item in own) == choice.message.content
        ends = [item.finish_reason for item in own]
        assert ends == [None] * (len(ends) - 1) + [choice.finish_reason]
    assert len({part.id for part in parts}) == 1


def test_several_prompts_at_once(running: Running, engine: Engine) -> None:
    """Each is answered as if it were alone, with the request's seed."""
    prompts = ["Hello", "def add(a, b):", "What is"]
    tokenizer = engine.target.tokenizer
    for given in (prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        found = running.client.completions.create(**SAMPLED, prompt=given, seed=5, n=2)
        assert [choice.index for choice in found.choices] == list(range(6))
        for number, prompt in enumerate(prompts):
            for choice in range(2):
                ids = tokenizer.encode(prompt)
                text, _, _ = offline(engine, ids, 5 + choice, temperature=1.0, max_new_tokens=12)
                assert found.choices[2 * number + choice].text == text
        assert found.usage is not None
        read = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
        assert found.usage.prompt_tokens == read


def test_usage_runs_along_on_request(running: Running) -> None:
    """guidellm asks for it."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**SAMPLED, "messages": TALK, "stream": True, "stream_options": options}
    parts = list(running.client.chat.completions.create(**asked))
    counts = [part.usage.completion_tokens for part in parts]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == counts[-2] > 3


def test_choices_count_as_requests(engine: Engine) -> None:
    """A request cannot have more answers than a server takes requests; one that asks for more than
    there is room for waits for its turn or is told to come again."""
    with serving(engine, queue=4) as running:
        most = engine.decode.batch_size + 4
        with pytest.raises(openai.BadRequestError, match=f"takes {most} at once") as refused:
            running.client.chat.completions.create(**SAMPLED, messages=TALK, n=most + 1)
        assert refused.value.param == "n"
        with pytest.raises(openai.BadRequestError, match="Ask in several") as refused:
            running.client.completions.create(**SAMPLED, prompt=["a"] * (most + 1))
        assert refused.value.param == "prompt"
        found = running.client.chat.completions.create(**SAMPLED, messages=TALK, n=most)
        assert len(found.choices) == most
        long = {**SAMPLED, "max_tokens": 90, "extra_body": {"ignore_eos": True}}
        stream = running.client.chat.completions.create(
            **long, messages=TALK, n=most - 1, stream=True
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            running.client.chat.completions.create(**SAMPLED, messages=TALK, n=3)
        stream.close()  # all choices end with their client
        end = time.monotonic() + 30
        while running.service.open and time.monotonic() < end:
            time.sleep(0.02)
        assert not running.service.open and not len(running.service.places)


def test_an_answer_has_its_least_length(engine: Engine) -> None:
    """min_tokens holds back end of text and stop strings."""
    whole = Engine(engine.target).generate([[5, 6, 7]], [0], max_new_tokens=20)[0].completion.tokens
    target = copy.copy(engine.target)
    target.eos_token_ids = (whole[3],)
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 20,
        "temperature": 0,
    }
    with serving(Engine(target, engine.drafter, engine.decode)) as running:
        client = running.client.completions
        short = client.create(**asked)
        long = client.create(**asked, extra_body={"min_tokens": 9, "return_token_ids": True})
        letter = long.choices[0].text[-1]
        cut = client.create(**asked, stop=[letter], extra_body={"min_tokens": 9})
        with pytest.raises(openai.BadRequestError, match="more than the 20 of 'max_tokens'"):
            client.create(**asked, extra_body={"min_tokens": 21})
        with pytest.raises(openai.BadRequestError, match="min_tokens does not go"):
            client.create(**asked, extra_body={"min_tokens": 2, "guided_regex": "[ab]+"})
    assert short.usage is not None
    assert short.usage.completion_tokens == whole.index(whole[3]) + 1 < 5
    assert whole[3] not in long.choices[0].token_ids[:9]  # type: ignore[attr-defined]
    assert long.usage is not None and long.usage.completion_tokens > 9
    assert cut.usage is not None and cut.usage.completion_tokens >= 9


# The routes that clients look at


def test_tokens_there_and_back(running: Running, engine: Engine) -> None:
    headers = {"Authorization": f"Bearer {running.token}"}

    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{running.base}{path}", json=body, headers=headers)

    text = "def add(a, b):"
    found = post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True).json()
    tokenizer = engine.target.tokenizer
    assert found["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert "".join(found["token_strs"]) == text
    assert post("/detokenize", model=MODEL, tokens=found["tokens"]).json() == {"prompt": text}
    assert post("/detokenize", tokens=[1, "a"]).status_code == 422
    assert post("/detokenize").status_code == 422
    assert post("/detokenize", tokens=[1 << 40]).status_code == 400
    assert post("/detokenize", tokens=[-1]).status_code == 400
    assert post("/detokenize", model="other", tokens=[1]).status_code == 404
    assert post("/tokenize", prompt=["a", "b"]).status_code == 400
    assert httpx.post(f"{running.base}/detokenize", json={"tokens": [1]}).status_code == 401


def test_what_it_is_and_serves(running: Running, engine: Engine) -> None:
    headers = {"Authorization": f"Bearer {running.token}"}
    found = httpx.get(f"{running.base}/version", headers=headers).json()
    assert found["version"]
    (model,) = running.client.models.list().data
    assert model.root == engine.target.info.id  # type: ignore[attr-defined]
