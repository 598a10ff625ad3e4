"""A relay in front of an engine, for which a server of our own stands: requests and answers pass as
they are, and samples hold the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.server.config import ServeConfig
from inference.server.front.secret import Secret
from inference.server.front.server import HttpServer, bind
from inference.server.front.site import Message, Receive, Send, Site
from inference.server.relay import OPEN_PATHS, AnswerReader, Relay, run_relay
from inference.server.samples import TrafficSamples
from inference.verifications import record_facts
from tests.inference.server.running import MODEL, Running, serving
from tests.inference.server.test_limits import settles, slow
from train.learning.traffic import read_samples

USER = [{"role": "user", "content": "Hello"}]


@dataclass
class Relayed:
    """A relay that runs. base: its address; folder: of its samples."""

    relay: Relay
    base: str
    folder: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base}/v1", api_key="k", max_retries=0, timeout=60)

    def samples(self, count: int = 0) -> list[dict[str, Any]]:
        """The sequences that were sampled, oldest first, once there are `count`: a client has its
        answer a moment before."""
        end = time.monotonic() + 10
        while True:
            self.relay.samples.flush()
            found = read_samples(self.folder).sequences
            if len(found) >= count:
                return found
            assert time.monotonic() < end, "too few samples"
            time.sleep(0.02)


@contextmanager
def relayed(
    engine: Engine, base: str, folder: Path, share: float = 1.0, secret: Secret | None = None
) -> Iterator[Relayed]:
    samples = TrafficSamples(folder, record_facts(engine, "d"), 10**9, share)
    relay = Relay(f"{base}/v1", samples, ServeConfig().domain)
    site = Site(relay, secret=secret, open_paths=OPEN_PATHS, refused=relay.refused)
    with fronted(site) as own:
        yield Relayed(relay, own, folder)


@contextmanager
def fronted(site: Site) -> Iterator[str]:
    """An application behind a front on loopback; its address."""
    listening = bind("serve", "127.0.0.1", 0)
    port, begun = listening.getsockname()[1], threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        front = HttpServer(site, listening)
        front.start()
        begun.set()
        await end.wait()
        await front.close(2.0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert begun.wait(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Running]:
    with serving(engine) as found:
        yield found


@pytest.fixture
def before(engine: Engine, served: Running, tmp_path: Path) -> Iterator[Relayed]:
    """A relay before a server of ours."""
    with relayed(engine, served.base, tmp_path / "traffic") as found:
        yield found


def streamed(parts: Any, chat: bool) -> tuple[str, list[int]]:
    """Text and token ids of a stream."""
    text, ids = "", list[int]()
    for part in parts:
        for choice in part.choices:
            text += (choice.delta.content or "") if chat else choice.text
            ids += getattr(choice, "token_ids", None) or []
    return text, ids


def streamed_lines(text: str) -> list[Any]:
    """The JSON of a stream's events."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def prompt_ids(served: Running, asked: dict[str, Any], chat: bool) -> list[int]:
    """The tokens of what was asked, as the engine reads it."""
    tokenizer = served.service.engine.target.tokenizer
    if chat:
        rendered = tokenizer.apply_chat_template(
            asked["messages"], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer.encode(rendered, add_special_tokens=False))
    return list(tokenizer.encode(asked["prompt"]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_passes_as_it_is_and_its_tokens_are_sampled(
    served: Running, before: Relayed, chat: bool, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0.5, "seed": 3}
    asked |= {"messages": USER} if chat else {"prompt": "Hello"}

    def ask(client: openai.OpenAI, **more: Any) -> tuple[str, list[int]]:
        create = client.chat.completions.create if chat else client.completions.create
        answer = create(**asked, stream=stream, **more)
        if stream:
            return streamed(answer, chat)
        (choice,) = answer.choices
        ids = getattr(choice, "token_ids", None)
        return (choice.message.content if chat else choice.text), list(ids or [])

    headers = {"X-Headstart-Domain": "code"}
    text, _ = ask(served.client)
    expected, ids = ask(served.client, extra_body={"return_token_ids": True})
    assert ask(before.client, extra_headers=headers) == (expected, ids) and text == expected
    (row,) = before.samples(1)
    assert row["tokens"][row["prompt_length"] :] == ids and row["answer_length"] == len(ids)
    assert row["domain"] == "code" and row["temperature"] == 0.5 and row["client"]
    assert row["finish"] in ("stop", "length") and "127.0.0.1" not in str(row)
    assert row["tokens"][: row["prompt_length"]] == prompt_ids(served, asked, chat)


def test_every_choice_of_every_prompt_is_a_sample_of_its_own(before: Relayed) -> None:
    prompts = [[10, 11, 12], [20, 21]]
    done = before.client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=6, temperature=1.0, seed=1
    )
    rows = before.samples(4)
    found = [(row["tokens"][: row["prompt_length"]], row["answer_length"]) for row in rows]
    assert [prompt for prompt, _ in found] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert len(done.choices) == 4 and all(0 < length <= 6 for _, length in found)


@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ({"store": False}, {}),
        ({"echo": True}, {}),
        ({}, {"X-Headstart-Store": "false"}),
        ({"max_tokens": "many"}, {}),
    ],
)
def test_what_is_not_to_be_stored_passes_untouched(
    served: Running, before: Relayed, more: dict[str, Any], headers: dict[str, str]
) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "temperature": 0, **more}
    answers = [
        httpx.post(f"{base}/v1/completions", json=body, headers=headers)
        for base in (served.base, before.base)
    ]
    own, passed = (answer.json() for answer in answers)
    for name in ("id", "created", "headstart"):  # of each request itself, and times
        for content in (own, passed):
            content.pop(name, None)
    assert own == passed and answers[0].status_code == answers[1].status_code
    assert "token_ids" not in str(passed) and before.samples() == []


def test_other_paths_pass_and_so_do_errors_and_queries(served: Running, before: Relayed) -> None:
    assert (
        httpx.get(f"{before.base}/v1/models").json() == httpx.get(f"{served.base}/v1/models").json()
    )
    assert "headstart_requests_total" in httpx.get(f"{before.base}/metrics").text
    for path in ("/nothing?here=1", "/v1/models/none", "/v1//models", "/%2e%2e/x%3Fy"):
        own, passed = (httpx.get(base + path) for base in (served.base, before.base))
        assert (own.status_code, own.json()) == (passed.status_code, passed.json()) and own.is_error
    broken = httpx.post(f"{before.base}/v1/completions", content=b"{")
    assert broken.status_code == 400 and before.samples() == []


def test_a_share_of_the_answers_is_sampled(engine: Engine, served: Running, tmp_path: Path) -> None:
    with relayed(engine, served.base, tmp_path / "t", share=0.0) as none:
        none.client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
        assert none.samples() == []


def test_a_relay_may_want_a_token_of_its_own(
    engine: Engine, served: Running, tmp_path: Path
) -> None:
    secret = Secret(b"a-token-of-sixteen")
    with relayed(engine, served.base, tmp_path / "t", secret=secret) as guarded:
        assert httpx.get(f"{guarded.base}/v1/models").status_code == 401
        assert httpx.get(f"{guarded.base}/health").status_code == 200
        headers = {"Authorization": "Bearer a-token-of-sixteen"}
        assert httpx.get(f"{guarded.base}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "line", [b"@127.0.0.1:1/v1", b"http://127.0.0.1:1/v1", b".elsewhere/v1", b"*"]
)
def test_a_request_cannot_name_another_host(before: Relayed, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(before.base).port or 0), 20) as client:
        client.sendall(b"GET " + line + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


def test_an_engine_that_does_not_answer_is_said_to_be_so(engine: Engine, tmp_path: Path) -> None:
    with bind("serve", "127.0.0.1", 0) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with relayed(engine, address, tmp_path / "t") as alone:
        answer = httpx.post(f"{alone.base}/v1/completions", json={"model": "m", "prompt": "x"})
        assert answer.status_code == 502
        assert "does not answer (ConnectError)" in answer.json()["error"]["message"]


def test_an_answer_that_the_engine_breaks_off_ends_the_clients_too(
    engine: Engine, tmp_path: Path
) -> None:
    async def breaking(scope: Message, receive: Receive, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        raise ConnectionResetError("killed")

    with fronted(Site(breaking)) as base, relayed(engine, base, tmp_path / "t") as found:
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{found.base}/v1/completions", json={"prompt": "x", "stream": True})
        assert found.samples() == []


def leave(client: httpx.Client, asked: dict[str, Any]) -> None:
    """Ask, and leave with the first part of the answer, or before."""
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_raw())
        raise httpx.ReadTimeout("enough")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engines_row(
    engine: Engine, tmp_path: Path, stream: bool
) -> None:
    with serving(slow(engine)) as running, relayed(engine, running.base, tmp_path / "t") as found:
        asked = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "temperature": 0}
        ask = httpx.Client(base_url=found.base, timeout=0.4)
        with ask, pytest.raises(httpx.ReadTimeout):
            leave(ask, asked | {"stream": stream})
        settles(running)
        assert running.metrics()['headstart_requests_total{outcome="cancelled"}'] == 1
        assert found.samples() == []


def test_an_address_must_be_one(engine: Engine, tmp_path: Path) -> None:
    samples = TrafficSamples(tmp_path, record_facts(engine, "d"), 10**9, 1.0)
    with pytest.raises(UserError, match=r"serve\.engine must be the address.*localhost:8000"):
        Relay("localhost:8000", samples, ServeConfig().domain)


def test_a_cookie_of_one_client_is_not_sent_for_another(engine: Engine, tmp_path: Path) -> None:
    cookies = []

    async def engine_with_cookies(scope: Message, receive: Receive, send: Send) -> None:
        cookies.append(dict(scope["headers"]).get(b"cookie"))
        head = [(b"set-cookie", b"session=first")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"{}"})

    site = Site(engine_with_cookies)
    with fronted(site) as base, relayed(engine, base, tmp_path / "t") as found:
        answer = httpx.get(f"{found.base}/v1/models")
        assert answer.headers["set-cookie"] == "session=first"
        httpx.get(f"{found.base}/v1/models")
        httpx.get(f"{found.base}/v1/models", headers={"cookie": "session=own"})
    assert cookies == [None, None, b"session=own"]


def test_nested_json_is_the_engines_to_refuse(served: Running, before: Relayed) -> None:
    body = b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    answers = [
        httpx.post(f"{base}/v1/completions", content=body) for base in (served.base, before.base)
    ]
    assert answers[0].status_code == answers[1].status_code == 400


def test_an_answer_that_calls_a_tool_is_a_sample_that_has_ended() -> None:
    reader = AnswerReader(stream=False)
    choice = {"index": 0, "prompt_token_ids": [1], "token_ids": [2], "finish_reason": "tool_calls"}
    reader.feed(json.dumps({"choices": [choice]}).encode())
    assert [one.finish for one in reader.end()] == ["tool_calls"] and reader.ids


def test_nothing_is_kept_of_an_answer_that_is_too_long_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference.server.relay.LARGEST_READ", 1000)
    reader = AnswerReader(stream=False)
    for _ in range(3):
        reader.feed(b"x" * 600)
    assert not reader.readable and not reader._rest and not reader.end()


def test_a_second_signal_ends_open_answers_at_once(engine: Engine, tmp_path: Path) -> None:
    reached, end = threading.Event(), asyncio.Event()

    async def silent(scope: Message, receive: Receive, send: Send) -> None:
        reached.set()
        await end.wait()

    samples = TrafficSamples(tmp_path, record_facts(engine, "d"), 10**9, 1.0)
    config = ServeConfig(grace_seconds=120.0)
    listening = bind("serve", "127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/models"

    def leave_no_time() -> None:
        with suppress(httpx.HTTPError):
            ask = threading.Thread(target=httpx.get, args=(address,), daemon=True)
            ask.start()
        assert reached.wait(30)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    with fronted(Site(silent)) as base:
        relay = Relay(base, samples, config.domain)
        killer = threading.Thread(target=leave_no_time)
        begun = time.monotonic()
        run_relay(relay, Site(relay), listening, config, killer.start)
        killer.join()
    assert time.monotonic() - begun < 60


# Reading


def events(*contents: Any) -> bytes:
    lines = [f"data: {json.dumps(content)}\n\n".encode() for content in contents]
    return b": comment\n\n" + b"".join(lines) + b"data: [DONE]\n\n"


CHAT = events(
    {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [5]}]},
    {"choices": [{"index": 0, "token_ids": [6, 7], "finish_reason": None}]},
    {"choices": [{"index": 0, "token_ids": [8], "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 2}},
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    reader = AnswerReader(stream=True)
    for start in range(0, len(CHAT), size):
        reader.feed(CHAT[start : start + size])
    (choice,) = reader.end()
    assert (choice.prompt, choice.tokens, choice.finish) == ([1, 2], [5, 6, 7, 8], "stop")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b'{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}',
        b'{"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]}',
        b'{"choices": [{"index": 0, "token_ids": 5, "prompt_token_ids": [1]}]}',
        b'{"choices": {"index": 0}}',
        b'{"choices": [{"index": 0, "token_ids": ["5"], "prompt_token_ids": [1]}]}',
        b'{"choices": [{"index": 0, "token_ids": [1.0], "prompt_token_ids": [1]}]}',
        b'{"choices": [{"index": 0, "token_ids": [4294967296], "prompt_token_ids": [1]}]}',
        b'{"choices": [{"index": 0, "token_ids": [1], "prompt_token_ids": [1], "finish_reason": []}]}',
        b"[" * 10_000,
        b"[1, 2]",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_token_ids_is_no_sample(content: bytes, stream: bool) -> None:
    reader = AnswerReader(stream)
    reader.feed(b"data: " + content + b"\n\n" if stream else content)
    assert reader.end() == []
