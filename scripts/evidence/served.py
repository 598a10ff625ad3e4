"""Sends requests to a real `headstart serve` in a separate process, from clients with separate
addresses. Every answer is a line of a file, so an interrupted caller sends only the rest."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from heads.api.errors import UserError
from inference.manifest import write_bytes
from scripts.tools.common import ROOT

SERVING = re.compile(r"serving '(.+)' with .* at (http://\S+/v1)")
"""The server's message once it listens."""
START_SECONDS, END_SECONDS, ANSWER_SECONDS = 300.0, 60.0, 300.0


@dataclass(frozen=True)
class Ask:
    """A request. number: its place in the traffic; store: whether the server may learn from it."""

    number: int
    prompt: tuple[int, ...]
    tokens: int
    store: bool


@dataclass(frozen=True)
class Answer:
    """The result of a request. at: seconds since 1970; accepted: drafted tokens that its
    verifications kept; failure: why there is no answer, empty if there is one."""

    number: int
    at: float
    tokens: tuple[int, ...] = ()
    passes: int = 0
    accepted: int = 0
    committed: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Served:
    """A server that runs. base: its address with /v1; model: the model's name."""

    process: subprocess.Popen[bytes]
    base: str
    model: str


@contextmanager
def serving(words: Sequence[str], log: Path, threads: int) -> Iterator[Served]:
    """A server with these overrides, ended as a user ends it. The output of the server and its
    learner is appended to `log`. Raises `UserError` if the server does not start."""
    command = [sys.executable, "-m", "scripts.cli", "serve", *words]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment
        )
    # a SIGTERM to this process also ends the server
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield Served(process, *_address(process, log, begin))
    finally:
        signal.signal(signal.SIGTERM, before)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path, begin: int) -> tuple[str, str]:
    """The server's address and the model's name, once its message is in `log`."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        said = log.read_bytes()[begin:].decode("utf-8", "replace")
        if found := SERVING.search(said):
            return found.group(2), found.group(1)
        if process.poll() is not None:
            raise UserError(f"the server did not start: {' / '.join(said.splitlines()[-3:])}")
        time.sleep(0.2)
    raise UserError(f"the server did not start within {START_SECONDS:g} s; see '{log}'.")


def ask_all(
    base: str, model: str, asked: Sequence[Ask], clients: int, seconds: float, out: Path
) -> None:
    """Send requests at equal intervals over `seconds` and append an `Answer` for each to the file
    `out`. `clients` clients take turns and wait for their own answers. No request is sent twice."""

    async def run() -> None:
        """All clients at once."""
        begin = time.monotonic()

        async def one(number: int) -> None:
            async with httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(local_address=_own_address(number)),
                timeout=ANSWER_SECONDS,
                trust_env=False,
            ) as client:
                for place in range(number, len(asked), clients):
                    due = begin + seconds * place / len(asked)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    answer = await _ask(client, base, model, asked[place])
                    file.write(json.dumps(asdict(answer)) + "\n")
                    file.flush()

        await asyncio.gather(*(one(number) for number in range(clients)))

    _cut(out)
    with out.open("a", encoding="utf-8") as file:
        asyncio.run(run())


def _cut(path: Path) -> None:
    """Remove the part of a line that an interruption left."""
    content = path.read_bytes() if path.is_file() else b""
    if not content.endswith(b"\n"):
        write_bytes(path, content[: content.rfind(b"\n") + 1])


def _own_address(client: int) -> str | None:
    """An address of this machine for a client; None if loopback has only one address."""
    return f"127.0.0.{2 + client}" if sys.platform == "linux" else None


async def _ask(client: httpx.AsyncClient, base: str, model: str, ask: Ask) -> Answer:
    """Send one request, greedy."""
    body = {"model": model, "prompt": list(ask.prompt), "max_tokens": ask.tokens, "temperature": 0}
    body |= {"seed": ask.number, "return_token_ids": True, "store": ask.store}
    try:
        found = await client.post(f"{base}/completions", json=body)
        found.raise_for_status()
        content = found.json()
        tokens, drafting = content["choices"][0]["token_ids"], content["headstart"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        failure = f"{type(error).__name__}: {error}"[:300]
        return Answer(ask.number, time.time(), failure=failure)
    passes, accepted = drafting["verify_passes"], drafting["accepted_drafts"]
    committed = round(drafting["tau"] * passes)
    return Answer(ask.number, time.time(), tuple(tokens), passes, accepted, committed)


def read_answers(path: Path) -> list[Answer]:
    """The answers in a file, by number; none if there is no file."""
    _cut(path)
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Answer(**{**line, "tokens": tuple(line["tokens"])}) for line in lines]
    return sorted(found, key=lambda one: one.number)
