"""Log-probabilities over HTTP are those of transformers' forward pass over the whole text: with a
drafter and without, in one piece and streamed, of answers and of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.decoding.engine import Engine
from inference.server.token_text import TokenTexts
from tests.inference.server.running import MODEL, Running, serving

TALK: list[Any] = [{"role": "user", "content": "What is a list?"}]
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module", params=["drafter", "plain"])
def server(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Running]:
    drafter = engine.drafter if request.param == "drafter" else None
    with serving(Engine(engine.target, drafter, engine.decode)) as found:
        yield found


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Any:
    """tokens [T] to the log-softmax [T, V] behind each, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(engine.target.info.id, dtype=torch.float64).eval()

    def logs(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]

    return logs


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_of_a_conversation(
    server: Running, engine: Engine, reference: Any, temperature: float
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": TALK,
        "max_tokens": 20,
        "seed": 3,
        "temperature": temperature,
        "logprobs": True,
        "top_logprobs": 4,
        "extra_body": IDS,
    }
    found = server.client.chat.completions.create(**asked)
    (choice,), texts = found.choices, TokenTexts(engine.target.tokenizer)
    tokens = choice.token_ids  # type: ignore[attr-defined]
    prompt = engine._tokens("What is a list?")
    rows = reference([*prompt, *tokens])[len(prompt) - 1 : -1]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(tokens)
    for item, token, row in zip(choice.logprobs.content, tokens, rows, strict=True):
        assert item.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert (item.token, bytes(item.bytes or [])) == (texts.text(token), texts.bytes_of(token))
        best = row.topk(4)
        assert [top.logprob for top in item.top_logprobs] == pytest.approx(best.values.tolist())
        named = [texts.text(token) for token in best.indices.tolist()]
        assert [top.token for top in item.top_logprobs] == named
    parts = list(server.client.chat.completions.create(**asked, stream=True))
    streamed = [
        item
        for part in parts
        for item in (part.choices[0].logprobs and part.choices[0].logprobs.content) or []
    ]
    assert streamed == choice.logprobs.content
    assert sum(bool(part.choices[0].logprobs) for part in parts) > 3


def test_without_most_likely_ones(server: Running) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 5, "logprobs": True}
    (choice,) = server.client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [item.top_logprobs for item in choice.logprobs.content] == [[]] * 5
    (choice,) = server.client.chat.completions.create(**{**asked, "logprobs": False}).choices
    assert choice.logprobs is None


@pytest.mark.parametrize("limit", [0, 1, 12])
def test_of_prompts_that_are_echoed(
    server: Running, engine: Engine, reference: Any, limit: int
) -> None:
    """As lm-eval asks for the likelihood of given texts: several prompts of token ids at once."""
    prompts = [[5, 6, 7, 9], [11, 3], [4]]
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompts,
        "max_tokens": limit,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
        "extra_body": IDS,
    }
    found = server.client.completions.create(**asked)
    tokenizer, texts = engine.target.tokenizer, TokenTexts(engine.target.tokenizer)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    written = 0
    for choice, prompt in zip(found.choices, prompts, strict=True):
        tokens = choice.token_ids  # type: ignore[attr-defined]
        assert len(tokens) <= limit
        written += len(tokens)
        assert choice.text.startswith(tokenizer.decode(prompt))
        given = choice.logprobs
        assert given is not None and given.tokens is not None and given.text_offset is not None
        assert given.token_logprobs is not None and given.top_logprobs is not None
        whole = [*prompt, *tokens]
        assert given.tokens == [texts.name(token) for token in whole]
        assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
        rows = reference(whole)[:-1]
        values = [float(row[token]) for row, token in zip(rows, whole[1:], strict=True)]
        assert given.token_logprobs[1:] == pytest.approx(values, abs=1e-5)
        for value, top, row in zip(
            given.token_logprobs[1:], given.top_logprobs[1:], rows, strict=True
        ):
            assert value in top.values()
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-5)
            assert len(top) == 1 + (value < max(top.values()))
        assert given.text_offset[0] == 0 and sorted(given.text_offset) == given.text_offset
        names = given.tokens
        for place, name, before in zip(given.text_offset, names, ["", *names], strict=False):
            # behind a part of a character the text may still wait for the rest of it
            if "bytes:" not in name + before:
                assert choice.text[place:].startswith(name), (place, name)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, written)


def test_an_echo_comes_first_in_a_stream(server: Running) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Hello there",
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
    }
    (whole,) = server.client.completions.create(**asked).choices
    parts = list(server.client.completions.create(**asked, stream=True))
    assert parts[0].choices[0].text == "Hello there"
    assert "".join(part.choices[0].text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert whole.logprobs is not None
        pieces = [getattr(part.choices[0].logprobs, name) for part in parts]
        assert [item for piece in pieces for item in piece] == getattr(whole.logprobs, name)


def test_they_end_where_a_stop_string_ends_the_text(server: Running) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": TALK,
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": True,
        "extra_body": IDS,
    }
    (whole,) = server.client.chat.completions.create(**asked).choices
    text = whole.message.content or ""
    stop = text[len(text) // 2 :][:2]
    (cut,) = server.client.chat.completions.create(**asked, stop=[stop]).choices
    parts = server.client.chat.completions.create(**asked, stop=[stop], stream=True)
    streamed = [
        item
        for part in parts
        for item in (part.choices[0].logprobs and part.choices[0].logprobs.content) or []
    ]
    assert cut.logprobs is not None and cut.logprobs.content is not None
    assert len(cut.logprobs.content) == len(cut.token_ids) < 30  # type: ignore[attr-defined]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert cut.logprobs.content == whole.logprobs.content[: len(cut.logprobs.content)] == streamed


def test_they_are_those_without_the_grammar(
    server: Running, engine: Engine, reference: Any
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 12,
        "temperature": 1,
        "seed": 5,
        "logprobs": 3,
        "n": 2,
        "extra_body": {**IDS, "guided_regex": "[ab]{6}"},
    }
    for choice in server.client.completions.create(**asked).choices:
        tokens = choice.token_ids  # type: ignore[attr-defined]
        assert set(choice.text) <= {"a", "b"} and len(choice.text) == 6
        rows = reference([5, 6, 7, *tokens])[2:-1]
        values = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-5)
        assert not any(math.isinf(value) for value in values)


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": 2}, "logprobs"),
        ("chat/completions", {"echo": True}, "echo"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    running: Running, path: str, changes: dict[str, Any], param: str
) -> None:
    given = {"messages": TALK} if path.startswith("chat") else {"prompt": "Hello"}
    found = httpx.post(
        f"{running.base}/v1/{path}",
        json={"model": MODEL, **given, **changes},
        headers={"Authorization": f"Bearer {running.token}"},
    )
    assert found.status_code in (400, 422)
    assert found.json()["error"]["param"] == param
