"""A real server on loopback in a thread of this process, and the real openai client for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.server.config import ServeConfig
from inference.server.front.secret import Secret
from inference.server.front.server import bind
from inference.server.run import Server
from inference.server.service import Service

MODEL = "micro"


class Running:
    """A server that runs. thread: in which it runs; base: its address; client: the openai client
    for it, which does not repeat what fails."""

    def __init__(
        self, service: Service, server: Server, thread: threading.Thread, base: str, token: str
    ) -> None:
        self.service, self.server, self.thread = service, server, thread
        self.base, self.token = base, token
        self.client = openai.OpenAI(
            base_url=f"{base}/v1", api_key=token or "none", max_retries=0, timeout=60
        )

    def asynchronous(self) -> openai.AsyncOpenAI:
        """The openai client for use in an event loop."""
        return openai.AsyncOpenAI(
            base_url=f"{self.base}/v1", api_key=self.token or "none", max_retries=0, timeout=60
        )

    def metrics(self) -> dict[str, float]:
        """/metrics as a mapping from 'name{labels}' to its value."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        lines = (
            httpx.get(f"{self.base}/metrics", headers=headers).raise_for_status().text.splitlines()
        )
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def end(self) -> None:
        """What a signal does."""
        assert self.service.loop is not None
        self.service.loop.call_soon_threadsafe(self.server.end)


@contextmanager
def serving(
    engine: Engine,
    token: str = "",
    records: Path | None = None,
    samples: Path | None = None,
    admin: Secret | None = None,
    checkpoint: str = "",
    **config: Any,
) -> Iterator[Running]:
    """Serve `engine` until the block ends."""
    given = replace(ServeConfig(port=0, name=MODEL, grace_seconds=20), **config)
    listening = bind("serve", given.host, given.port)
    secret = Secret(token.encode()) if token else None
    own = {"admin": admin, "checkpoint": checkpoint, "samples": samples}
    service = Service(given, engine, "test", secret, records, **own)  # type: ignore[arg-type]
    service.start()
    begun = threading.Event()
    server = Server(service, listening, begun.set)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert begun.wait(30)
    scheme = "https" if given.ssl_certfile else "http"
    port = listening.getsockname()[1]
    running = Running(service, server, thread, f"{scheme}://127.0.0.1:{port}", token)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.end()
        thread.join(40)
        service.stop()
        assert not thread.is_alive(), "the server did not end"


def offline(engine: Engine, prompt: Any, seed: int = 0, **changes: Any) -> tuple[str, int, str]:
    """What `Engine.generate` answers without a drafter, one prompt at a time: text, tokens,
    finish."""
    plain = Engine(engine.target, None, DecodeConfig())
    (answer,) = plain.generate([prompt], [seed], **changes)
    return answer.text, len(answer.completion.tokens), answer.completion.finish
