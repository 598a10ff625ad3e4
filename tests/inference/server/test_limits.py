"""What a server refuses and how it says so: bad requests, no token, too much at once, too slow,
gone. Through the real client."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.server.app import build_app
from inference.server.errors import ClientGoneError
from tests.inference.server.running import MODEL, Running, offline, serving

REQUESTS = "headstart_requests_total"
USER = [{"role": "user", "content": "Hello"}]


def nested(levels: int) -> Any:
    """A list in a list in a list."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"n": 0}, 400, "n", "at least 1; given 0"),
    ({"n": 1000}, 400, "n", "at once. Ask in several requests"),
    ({"best_of": 2}, 400, "best_of", "'best_of' is supported only as 'n', which is 1"),
    ({"min_tokens": -1}, 400, "min_tokens", "at least 0"),
    ({"min_tokens": 4}, 400, "min_tokens", "is 4, more than the 3 of 'max_tokens'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "not supported"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "set it to 0"),
    ({"response_format": {"type": "xml"}}, 400, "response_format", "needs a .type. of"),
    ({"temprature": 1}, 400, "temprature", "not a parameter.*temperature"),
    ({"temperature": -1}, 400, "temperature", r"must lie in \[0, 1000\]; given: -1"),
    ({"temperature": 1e308}, 400, "temperature", r"must lie in \[0, 1000\]; given: 1e\+308"),
    ({"temperature": 1e-300}, 400, "temperature", "above 0 must be at least 1e-09"),
    ({"top_p": 0}, 400, "top_p", "above 0 and at most 1"),
    ({"temperature": "hot"}, 422, "temperature", "must be a number; given a value of type str"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"max_tokens": 500}, 400, "max_tokens", "128 positions"),
    ({"max_tokens": True}, 422, "max_tokens", "whole number"),
    ({"seed": 1 << 63}, 400, "seed", f"must be -{1 << 63} to {(1 << 63) - 1}"),
    ({"seed": ~(1 << 63)}, 400, "seed", "must be -"),
    ({"stop": [1]}, 422, "stop", "must be text"),
    ({"stop": ""}, 400, "stop", "1 to 256 characters"),
    ({"stream": "yes"}, 422, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "needs 'stream'"),
    ({"messages": []}, 400, "messages", "at least one"),
    ({"messages": "Hello"}, 422, "messages", "must be a list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages", "wizard"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
        "must be text",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "not valid Unicode"),
    ({"messages": [{"role": "user", "content": "Hello " * 400}]}, 400, "prompt", "128 positions"),
    (
        {"messages": [{"role": "user", "content": "a" * 99999}]},
        400,
        "prompt",
        r"100\d\d\d characters",
    ),
    ({"model": "\ud800"}, 400, "model", "'model' is not valid Unicode"),
    *(({name: 10**309}, 400, None, "has 310 digits") for name in ("temperature", "top_p", "min_p")),
    ({"seed": 10**50}, 400, None, "has 51 digits"),
    ({"\ud800": 1}, 400, None, "name is not valid Unicode"),
    ({"chat_template_kwargs": {"a": nested(70)}}, 400, None, "more than 64 levels"),
    ({"temperature": float("inf")}, 400, None, "Infinity is no number"),
    (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        400,
        "chat_template_kwargs",
        "'chat_template' is no value",
    ),
    (
        {"chat_template_kwargs": {"tokenize": False}},
        400,
        "chat_template_kwargs",
        "'tokenize' is no value",
    ),
    ({"model": "gpt-4"}, 404, "model", "served is 'micro'"),
    ({"model": None}, 400, "model", "missing"),
]


def post(
    running: Running, body: Any, path: str = "/v1/chat/completions", **headers: str
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {
        "Authorization": f"Bearer {running.token}",
        "Content-Type": "application/json",
        **headers,
    }
    return httpx.post(running.base + path, content=content, headers=sent, timeout=30)


def refusal(found: httpx.Response) -> dict[str, Any]:
    """The error of a response, in OpenAI's shape."""
    error: dict[str, Any] = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("change", "status", "param", "words"), BAD, ids=lambda value: str(value)[:40]
)
def test_a_bad_request_is_named(
    running: Running, change: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    invalid = 'headstart_requests_total{outcome="invalid"}'
    before = running.metrics()[invalid]
    found = post(running, {"model": MODEL, "messages": USER, "max_tokens": 3, **change})
    error = refusal(found)
    assert (found.status_code, error["param"]) == (status, param)
    assert running.metrics()[invalid] == before + 1
    assert re.search(words, error["message"]), error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize(
    "prompt", [[5, 100000], [-1], [], "", {"a": 1}, ["a", 5], [[5], "a", {}], [1.5]], ids=str
)
def test_a_bad_prompt_is_refused(running: Running, prompt: Any) -> None:
    found = post(running, {"model": MODEL, "prompt": prompt, "max_tokens": 3}, "/v1/completions")
    if prompt == "":  # the tokenizer may put a beginning of text before it
        assert found.status_code in (200, 400)
        return
    assert found.status_code in (400, 422) and refusal(found)["param"] == "prompt"


NO_JSON = [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}']


@pytest.mark.parametrize("body", NO_JSON, ids=lambda body: str(body)[:9])
def test_what_is_not_json_is_refused(running: Running, body: bytes) -> None:
    assert post(running, body).status_code in (400, 422)


def test_parameters_that_change_nothing_are_taken(running: Running) -> None:
    body = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 3,
        "user": "x",
        "metadata": {"a": "b"},
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "stop": None,
        "response_format": {"type": "text"},
        "top_k": -1,
    }
    assert post(running, body).status_code == 200


def test_large_requests_are_refused_before_they_are_read(running: Running) -> None:
    large = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 1_200_000}]}
    found = post(running, large)
    assert found.status_code == 413 and "1048576 bytes" in refusal(found)["message"]

    def parts() -> Iterator[bytes]:  # without a length said beforehand
        for _ in range(20):
            yield b"x" * 100_000

    headers = {"Authorization": f"Bearer {running.token}"}
    assert (
        httpx.post(running.base + "/v1/completions", content=parts(), headers=headers).status_code
        == 413
    )


def test_only_the_token_opens(running: Running) -> None:
    wrong = openai.OpenAI(
        base_url=f"{running.base}/v1", api_key="a-token-for-the-test", max_retries=0
    )
    with pytest.raises(openai.AuthenticationError, match="valid bearer token"):
        wrong.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    for given in ("", running.token, f"Basic {running.token}", "Bearer é"):
        sent = {"Authorization": given.encode("utf-8")}
        for path in ("/v1/models", "/metrics", "/nowhere"):
            found = httpx.get(running.base + path, headers=sent)  # type: ignore[arg-type]
            assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
            assert running.token not in found.text


def test_unknown_paths_answer_in_the_same_shape(running: Running) -> None:
    headers = {"Authorization": f"Bearer {running.token}"}
    for path, status in (
        ("/v1/embeddings", 404),
        ("/docs", 404),
        ("/openapi.json", 404),
        ("/v1/chat/completions", 405),
    ):
        found = httpx.get(running.base + path, headers=headers)
        assert found.status_code == status
        refusal(found)


# Too much, too long, gone


def slow(engine: Engine) -> Engine:
    """The engine with a pause in every step, two rows."""
    found = Engine(
        engine.target, engine.drafter, DecodeConfig(batch_size=2, depth=3, max_new_tokens=40)
    )
    advance = found.advance

    def paused(run: Any) -> Any:
        time.sleep(0.02)
        return advance(run)

    found.advance = paused  # type: ignore[method-assign]
    return found


def long(client: Any, seed: int = 0, **more: Any) -> Any:
    """A request that takes the micro target a while: its greedy text does not end."""
    return client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=40, temperature=0, seed=seed, **more
    )


def test_overload_answers_429_at_once_and_the_rest_is_served(engine: Engine) -> None:
    async def ask(client: Any) -> Any:
        try:
            return await long(client)
        except openai.RateLimitError as error:
            return error

    async def everybody(running: Running) -> list[Any]:
        async with running.asynchronous() as client:
            return await asyncio.gather(*(ask(client) for _ in range(20)))

    with serving(slow(engine), queue=3) as running:
        found = asyncio.run(everybody(running))
        refused = [item for item in found if isinstance(item, openai.RateLimitError)]
        answered = [item for item in found if not isinstance(item, Exception)]
        assert len(answered) == 5 and len(refused) == 15  # two rows and a queue of three
        text = offline(engine, engine.target.tokenizer.encode("Hello"), max_new_tokens=40)[0]
        assert {item.choices[0].text for item in answered} == {text}
        for error in refused:
            assert 1 <= int(error.response.headers["retry-after"]) <= 60
            assert error.code == "overloaded"
        assert long(running.client).choices[0].text == text
        seen = running.metrics()
        assert seen['headstart_requests_total{outcome="overloaded"}'] == 15


def test_waiting_too_long_for_a_row_and_answering_too_long(engine: Engine) -> None:
    with serving(slow(engine), queue_seconds=0.2) as running:

        async def three() -> list[Any]:
            async with running.asynchronous() as client:
                return await asyncio.gather(
                    *(long(client) for _ in range(3)), return_exceptions=True
                )

        assert sorted(type(item).__name__ for item in asyncio.run(three())) == [
            "Completion",
            "Completion",
            "RateLimitError",
        ]
    with serving(slow(engine), request_seconds=0.3) as running:
        with pytest.raises(openai.APIStatusError, match=r"longer than 0\.3 s") as error:
            long(running.client)
        assert error.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"longer than 0\.3 s"):
            list(long(running.client, stream=True))
        assert running.metrics()['headstart_requests_total{outcome="timeout"}'] == 2
        settles(running)


def connected(running: Running) -> socket.socket:
    """A bare connection, for what no client library would do."""
    return socket.create_connection(("127.0.0.1", int(running.base.rsplit(":", 1)[1])))


def settles(running: Running) -> None:
    """Wait until no row is in use; fails when that takes long."""
    end = time.monotonic() + 5
    while running.metrics()["headstart_requests_running"]:
        assert time.monotonic() < end, "a row stayed in use"
        time.sleep(0.02)
    assert not running.service.open


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(engine: Engine, stream: bool) -> None:
    with serving(slow(engine)) as running:
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": "Hello",
                "max_tokens": 40,
                "temperature": 0,
                "stream": stream,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with connected(running) as connection:
            connection.sendall(head + body)
            end = time.monotonic() + 5
            # A gauge that nobody has set yet is not among the metrics.
            while not running.metrics().get("headstart_requests_running"):
                assert time.monotonic() < end
        settles(running)
        seen = running.metrics()
        assert seen['headstart_requests_total{outcome="cancelled"}'] == 1
        assert running.service.engine.clock.passes < 35


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_written_is_no_failure_of_the_server(
    engine: Engine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """A client that is killed is noticed by a write that fails, or by its end of the connection."""
    asked = {"model": MODEL, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    body = json.dumps(asked | {"stream": stream}).encode()
    request = {"type": "http.request", "body": body, "more_body": False}
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    scope |= {"method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    pending = [request]

    async def receive() -> Any:
        return pending.pop() if pending else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise ClientGoneError("killed")

    with serving(engine) as running:
        answering = build_app(running.service)(scope, receive, send)
        assert running.service.loop is not None
        with pytest.raises(ClientGoneError):
            asyncio.run_coroutine_threadsafe(answering, running.service.loop).result(30)
        settles(running)
        seen = running.metrics()
    ended = {name: count for name, count in seen.items() if name.startswith(REQUESTS) and count}
    assert ended == {f'{REQUESTS}{{outcome="{"cancelled" if stream else "length"}"}}': 1}
    assert "refused with 5" not in caplog.text and "failed" not in caplog.text


def test_a_request_that_does_not_arrive_is_given_up(engine: Engine) -> None:
    with serving(engine, body_seconds=0.3) as running, connected(running) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_an_engine_that_fails_answers_500_and_goes_on(engine: Engine) -> None:
    broken = Engine(engine.target, engine.drafter, engine.decode)
    advance, faults = broken.advance, [True]

    def failing(run: Any) -> Any:
        if faults and any(item is not None and len(item.tokens) > 5 for item in run.running):
            faults.pop()
            raise RuntimeError("secret: out of memory at 0x7f")
        return advance(run)

    broken.advance = failing  # type: ignore[method-assign]
    text = offline(engine, engine.target.tokenizer.encode("Hello"), max_new_tokens=40)[0]
    with serving(broken) as running:
        with pytest.raises(openai.InternalServerError, match="can be repeated") as error:
            long(running.client)
        assert "secret" not in str(error.value)
        assert long(running.client).choices[0].text == text
        assert httpx.get(f"{running.base}/health").status_code == 200


def test_an_engine_that_keeps_failing_ends_the_server(engine: Engine) -> None:
    broken = Engine(engine.target, engine.drafter, engine.decode)

    def failing(run: Any) -> Any:
        raise RuntimeError("broken")

    broken.advance = failing  # type: ignore[method-assign]
    with serving(broken) as running:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                long(running.client)
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
            long(running.client)
        running.thread.join(20)
        assert running.server.failed and not running.thread.is_alive()


# The end


def test_ending_lets_requests_end_and_takes_no_new_ones(engine: Engine) -> None:
    with serving(slow(engine)) as running:

        async def talk() -> tuple[Any, Any, int]:
            async with running.asynchronous() as client:
                first = asyncio.create_task(long(client))
                while not running.service.open:
                    await asyncio.sleep(0.01)
                running.end()
                while not running.service.draining:
                    await asyncio.sleep(0.01)
                async with httpx.AsyncClient() as plain:
                    ready = (await plain.get(f"{running.base}/ready")).status_code
                try:
                    second: Any = await long(client)
                except openai.APIStatusError as error:
                    second = error
                return await first, second, ready

        first, second, ready = asyncio.run(talk())
        assert (
            first.choices[0].text
            == offline(engine, engine.target.tokenizer.encode("Hello"), max_new_tokens=40)[0]
        )
        assert (second.status_code, second.response.headers["retry-after"], ready) == (
            503,
            "5",
            503,
        )


def test_what_outlasts_the_grace_is_broken_off(engine: Engine) -> None:
    with serving(slow(engine), grace_seconds=0.2) as running:

        async def talk() -> Any:
            async with running.asynchronous() as client:
                first = asyncio.create_task(long(client))
                while not running.service.open:
                    await asyncio.sleep(0.01)
                running.end()
                return (await asyncio.gather(first, return_exceptions=True))[0]

        error = asyncio.run(talk())
        assert error.status_code == 503 and "has stopped" in error.message
