"""A long prompt, or a client with many requests, does not keep others waiting; and what is refused
hears why."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.decoding.engine import Engine
from inference.server.front.tls import client_context
from inference.server.service import SHORT_PROMPT, characters
from tests.inference.server.front.served import certificate
from tests.inference.server.running import MODEL, Running, offline, serving
from tests.inference.server.test_limits import slow
from tests.waiting import until

WORD = "Hello"


def ask(running: Running, prompt: Any, source: str = "127.0.0.1", tokens: int = 40) -> Any:
    """Status and JSON of the answer to a greedy request from an address of this machine."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(transport=transport, timeout=60) as client:
        found = client.post(f"{running.base}/v1/completions", json=body)
    return found.status_code, found.json()


@pytest.fixture
def text(engine: Engine) -> str:
    """What a greedy request for `WORD` answers."""
    return offline(engine, engine.target.tokenizer.encode(WORD), max_new_tokens=40)[0]


def test_prompts_that_cannot_fit_are_not_tokenised(
    engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty of a megabyte in flight, and a request is answered meanwhile."""
    with serving(engine) as running, ThreadPoolExecutor(20) as pool:
        sizes: list[int] = []
        plain = running.service._tokens

        def counted(asked: Any, prompt: Any, tokenizer: Any) -> Any:
            sizes.append(len(prompt))
            return plain(asked, prompt, tokenizer)

        monkeypatch.setattr(running.service, "_tokens", counted)
        large = [pool.submit(ask, running, "x y " * 250_000) for _ in range(20)]
        status, body = ask(running, WORD)
        assert (status, body["choices"][0]["text"]) == (200, text)
        limit = running.service.longest_prompt
        for future in large:
            status, body = future.result()
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert body["error"]["message"].startswith(
                f"the prompt has 1000000 characters; {limit} are the most here (128 positions"
            )
        assert sizes == [len(WORD)]
        seen = running.metrics()
        assert seen['headstart_requests_total{outcome="invalid"}'] == 20


@contextmanager
def holding(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Long prompts are not tokenised before the block ends."""
    gate, plain = threading.Event(), running.service._tokens

    def held(asked: Any, prompt: Any, tokenizer: Any) -> Any:
        if len(prompt) > SHORT_PROMPT:
            gate.wait()
        return plain(asked, prompt, tokenizer)

    # as of a target with a long context
    running.service.longest_prompt = 1 << 30
    monkeypatch.setattr(running.service, "_tokens", held)
    yield
    gate.set()


def test_long_prompts_wait_for_each_other_alone(
    engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine) as running, ThreadPoolExecutor(4) as pool:
        with holding(running, monkeypatch):
            long = [pool.submit(ask, running, "x y " * 5000) for _ in range(4)]
            until(lambda: len(running.service.places) == 4)
            status, body = ask(running, WORD)
            assert (status, body["choices"][0]["text"]) == (200, text)
            assert not any(future.done() for future in long)
        for future in long:
            status, body = future.result()
            assert (status, body["error"]["param"]) == (400, "prompt")
            assert "128 positions per request" in body["error"]["message"]


def test_what_was_waited_for_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are free: nobody waits for one."""
    with serving(engine, queue_seconds=0.5) as running, holding(running, monkeypatch):
        status, body = ask(running, "x y " * 5000)
        assert status == 429 and body["error"]["message"] == (
            "the server is busy: the prompt, of 20000 characters, was not tokenised within 0.5 s. "
            "Ask again later."
        )


def test_clients_take_turns_for_rows(engine: Engine, text: str) -> None:
    order: list[str] = []

    def note(source: str) -> Callable[[Future[Any]], None]:
        return lambda future: order.append(source)

    with serving(slow(engine)) as running, ThreadPoolExecutor(11) as pool:
        greedy = [pool.submit(ask, running, WORD, "127.0.0.2") for _ in range(10)]
        for future in greedy:
            future.add_done_callback(note("greedy"))
        until(lambda: len(running.service.open) == 10)
        modest = pool.submit(ask, running, WORD, "127.0.0.3")
        modest.add_done_callback(note("modest"))
        for future in (*greedy, modest):
            status, body = future.result()
            assert (status, body["choices"][0]["text"]) == (200, text)
    # two rows: those that ran already, and those that got their row before
    assert order.index("modest") <= 5


def test_in_a_full_server_the_greediest_clients_last_request_makes_room(engine: Engine) -> None:
    with serving(slow(engine), queue=3) as running, ThreadPoolExecutor(7) as pool:
        greedy = [pool.submit(ask, running, WORD, "127.0.0.2") for _ in range(5)]
        until(lambda: len(running.service.places) == 5)
        modest = pool.submit(ask, running, WORD, "127.0.0.3")
        assert modest.result()[0] == 200
        found = [future.result() for future in greedy]
        assert sorted(status for status, _ in found) == [200] * 4 + [429]
        (body,) = [body for status, body in found if status == 429]
        assert "this address has the most requests" in body["error"]["message"]
        assert not len(running.service.places)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_answers_over_https(engine: Engine, text: str, tmp_path: Path) -> None:
    pair = certificate(tmp_path)
    with serving(engine, ssl_certfile=pair[0], ssl_keyfile=pair[1]) as running:
        assert running.base.startswith("https://")
        body = {"model": MODEL, "prompt": WORD, "max_tokens": 40, "temperature": 0}
        trusting = client_context("features.ssl_cafile", pair[0])
        with httpx.Client(verify=trusting, timeout=60) as client:
            found = client.post(f"{running.base}/v1/completions", json=body)
            assert found.json()["choices"][0]["text"] == text
            streamed = client.post(f"{running.base}/v1/completions", json={**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{running.base}/health")


def test_what_a_template_makes_long_counts_as_long() -> None:
    talk = [{"role": "user", "content": "x"}] * 2000
    assert characters(talk) == 10_000
    assert characters(talk, names=True) > SHORT_PROMPT
    assert characters([1] * SHORT_PROMPT + [None], names=True) > SHORT_PROMPT
