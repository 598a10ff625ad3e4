"""Malformed and hostile requests to both servers, beside clients whose answers are compared with
offline ones.

`headstart serve` and a feature server run as processes of their own, on a micro target in float64.
A request fails when it is answered with a failure of ours (status 500) or, where an answer is due,
not at all; a client when its answer differs from the offline one. What a request is follows from
the seed alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from safetensors.torch import save

from heads.api.target_info import TargetInfo
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests import forked
from tests.chaos.rows import Areas, Row
from tests.inference.tokenizers import save_micro_target

TOKEN = "a-token-for-the-attack"
MODEL = "micro"
SERVE, FEATURES = "serve", "features"
LONGEST = 60.0
"""Seconds after which an answer counts as missing, on a machine with other work."""
POSITIONS = 131_072
"""Of the besieged server: a prompt of a megabyte is not refused by its length alone."""
LIVELY = re.compile(r"at (https?://[^/;\s]+)")
WORDS = (b"\xb2", b"-1", b"1e3", b"9" * 30, b"", b"0x10", b"1, 2", b"+5")
"""What is no length."""
FRAMES = "length, half body, half headers, noise, headers, chunks, mutation, token, path".split(
    ", "
)
SERVE_KINDS = [*FRAMES, *"number surrogate constant depth type".split()]
FEATURES_KINDS = [*FRAMES, "ask", "ask text", "rows", "key"]
"""What can be wrong with a request."""


@dataclass(frozen=True)
class Sent:
    """A request as bytes. leaves: its client goes without reading an answer."""

    kind: str
    data: bytes
    leaves: bool = False


@dataclass
class Server:
    """A server that runs as a process of its own; log: what it prints."""

    process: forked.Process
    host: str
    port: int
    log: list[str] = field(default_factory=list)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), LONGEST)

    @property
    def base(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def running(stage: str, folder: Path, target: Path, *more: str) -> Iterator[Server]:
    """A stage that serves, until the block ends."""
    variable = "HEADSTART_SERVE_TOKEN" if stage == SERVE else "HEADSTART_FEATURES_TOKEN"
    process = forked.start(
        "scripts.cli",
        stage,
        "target=local",
        f"target.path={target}",
        "target.dtype=float64",
        "target.device=cpu",
        f"run.root={folder / 'out'}",
        *more,
        env={**os.environ, variable: TOKEN},
    )
    try:
        log, found = [], None
        while found is None and (line := process.stdout.readline()):
            log.append(line)
            found = LIVELY.search(line)
        if found is None:
            raise RuntimeError(f"the server did not start: {''.join(log)}")
        address = urlsplit(found.group(1))
        server = Server(process, address.hostname or "", address.port or 0, log)
        reader = threading.Thread(target=lambda: log.extend(process.stdout), daemon=True)
        reader.start()
        yield server
    finally:
        process.kill()
        process.wait(30)


# What is sent


def serve_request(order: random.Random) -> Sent:
    """A request to `headstart serve` with something wrong with it."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
    name = order.choice(["temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "stop"])
    kind = order.choice(SERVE_KINDS)
    path, given = "/v1/completions", f"Authorization: Bearer {TOKEN}".encode()
    content = json.dumps(body)
    if kind == "number":
        digits = order.choice([309, 310, 1000, 4300, 4301, 20_000])
        content = content[:-1] + f', "{name}": {order.choice(["", "-"])}1{"0" * digits}}}'
    elif kind == "surrogate":
        place = order.choice(["model", "prompt", "user", "zz\ud800", "stop"])
        content = json.dumps({**body, place: order.choice(["\ud800", "\udfffx", ["a\ud912"]])})
    elif kind == "constant":
        number = order.choice(["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
        content = content[:-1] + f', "{name}": {number}}}'
    elif kind == "depth":
        deep = order.choice(["[", '{"a":', '[{"a":']) * order.choice([65, 500, 5000, 100_000])
        content = order.choice([deep, content[:-1] + f', "{name}": {deep}'])
    elif kind == "type":
        wrong = order.choice([True, [], {}, "x", [[]], {"a": {}}, -1, 1.5, [None], "9" * 400])
        content = json.dumps({**body, name: wrong})
    elif kind == "token":
        given = order.choice([b"Authorization: Bearer x", b"Authorization: \xff", b"X-Nothing: 1"])
    elif kind == "path":
        path = order.choice(
            ["/", "/v1/../metrics", "/v1/completions/%00", "/v1/models/" + "a" * 9000]
        )
    raw = content.encode()
    if kind == "mutation":
        raw = mutated(order, raw)
    return framed(order, kind, path, [given], raw)


def features_request(order: random.Random, key: str, info: TargetInfo) -> Sent:
    """A request to a feature server with something wrong with it."""
    wish: dict[str, Any] = {"taps": [1], "last_hidden": False, "format": "fp32", "top_logits": 0}
    kind = order.choice(FEATURES_KINDS)
    shape = (order.randint(1, 2), order.randint(1, 8))
    rows = {
        name: torch.ones(shape, dtype=torch.int32) for name in ("tokens", "positions", "segments")
    }
    if kind == "rows":
        name = order.choice(list(rows))
        limit = max(info.vocab_size, info.max_position_embeddings)
        other = order.choice([-1, limit, 2**31 - 1])
        rows[name] = order.choice(
            [torch.full(shape, other, dtype=torch.int32), rows[name].float(), torch.ones(0, 4)]
        )
        if name == "segments" and other > 0:
            rows["tokens"] = -rows["tokens"]
    body = save(rows)
    if kind == "mutation":
        body = mutated(order, body)
    ask = json.dumps(wish)
    if kind == "ask":
        part = order.choice(list(wish))
        wrong = order.choice(["[1e999]", "[-1]", "1e999", "null", '"\\ud800"', "9" * 400, "[[[]]]"])
        ask = json.dumps({**wish, part: "?"}).replace('"?"', wrong)
    elif kind == "ask text":
        ask = order.choice(["", "[" * 3000, "[" * 30_000, "{", "5", '"\\ud800"', "\xff\xb2"])
    given = f"Bearer {TOKEN}" if kind != "token" else order.choice(["Bearer x", "\xb2", "Bearer"])
    lines = [
        f"Authorization: {given}".encode("latin-1"),
        f"X-Headstart-Key: {key if kind != 'key' else 'another'}".encode(),
        b"X-Headstart-Ask: " + ask.encode("latin-1"),
    ]
    path = "/features" if kind != "path" else order.choice(["/", "/identity", "/features/../x"])
    return framed(order, kind, path, lines, body)


def framed(order: random.Random, kind: str, path: str, lines: list[bytes], body: bytes) -> Sent:
    """The bytes of a POST, with what `kind` does to its frame."""
    length = str(len(body)).encode()
    if kind == "length":
        length = order.choice(WORDS)
    elif kind == "half body":
        body = body[: len(body) // 2]
    head = [b"POST " + path.encode() + b" HTTP/1.1", b"Host: x", b"Content-Length: " + length]
    if kind == "headers":
        bad = [
            b"Content-Length: 1",
            b"A b: c",
            b": x",
            b"X: " + b"y" * 40_000,
            b"X: \x00",
            b"Host: y",
        ]
        head.append(order.choice([*bad, b"Transfer-Encoding: gzip, chunked"]))
    elif kind == "chunks":
        head[2] = b"Transfer-Encoding: chunked"
        body = order.choice([b"zz\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"1\r\nabc\r\n0\r\n\r\n"])
    data = b"\r\n".join((*head, *lines, b"", body))
    if kind == "noise":
        data = order.randbytes(order.randint(1, 400)) + b"\r\n\r\n"
    elif kind == "half headers":
        data = data[: data.index(b"\r\n\r\n") - order.randint(1, 40)]
    return Sent(kind, data, leaves=kind in ("half body", "half headers"))


def mutated(order: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, cut out or put in."""
    found = bytearray(data)
    for _ in range(order.randint(1, 6)):
        place = order.randrange(len(found) + 1)
        match order.randrange(3):
            case 0:
                found[place : place + 1] = order.randbytes(1)
            case 1:
                del found[place : place + order.randint(1, 8)]
            case _:
                found[place:place] = order.choice([b'"', b"{", b"]", b"\\u", b"\xff", b"1e9", b","])
    return bytes(found)


# How it is answered


def wrong_with(server: Server, sent: Sent) -> str:
    """What is wrong with how a server takes a request; empty where nothing is."""
    try:
        with server.connect() as connection:
            with contextlib.suppress(OSError):  # refused while it is being sent
                connection.sendall(sent.data)
            if sent.leaves:
                return ""
            answer = b""
            while b"\r\n" not in answer and (data := connection.recv(65536)):
                answer += data
    except TimeoutError:
        return f"{sent.kind}: no answer within {LONGEST:g} s to {sent.data[:200]!r}"
    except OSError as error:
        return f"{sent.kind}: {error} at {sent.data[:200]!r}"
    status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
    # 501: a transfer encoding that there is not
    failed = status == 0 or (status >= 500 and status != 501)
    return f"{sent.kind}: {status} to {sent.data[:300]!r}" if failed else ""


def fuzz(server: Server, row: Row, requests: Sequence[Sent]) -> None:
    """Send all requests, some at a time."""
    with ThreadPoolExecutor(8) as pool:
        for wrong in pool.map(lambda sent: wrong_with(server, sent), requests):
            row.note(wrong)


@dataclass(frozen=True)
class Question:
    """A request with its answer, as the engine gives it offline."""

    body: dict[str, Any]
    text: str


def questions(target: TargetModel, count: int, seed: int) -> list[Question]:
    """Requests of different prompts, lengths and seeds."""
    order, found = random.Random(seed), []
    for number in range(count):
        prompt = [order.randrange(5, target.info.vocab_size) for _ in range(order.randint(1, 30))]
        heat, tokens = order.choice([0.0, 0.8]), order.randint(5, 60)
        engine = Engine(target, None, DecodeConfig(temperature=heat))
        (answer,) = engine.generate([prompt], [number], max_new_tokens=tokens)
        asked = {"prompt": prompt, "seed": number, "temperature": heat, "max_tokens": tokens}
        found.append(Question({"model": MODEL, **asked}, answer.text))
    return found


@contextmanager
def clients(server: Server, asked: list[Question], count: int, row: Row) -> Iterator[None]:
    """`count` clients that ask one question after the other while the block runs."""
    ended, lock = threading.Event(), threading.Lock()

    def one(number: int) -> None:
        order = random.Random(number)
        with httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=LONGEST) as client:
            while not ended.is_set():
                question = order.choice(asked)
                wrong = ask(client, server, question)
                with lock:
                    row.note(wrong)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def ask(client: httpx.Client, server: Server, question: Question) -> str:
    """What is wrong with a server's answer; empty where nothing is."""
    for _ in range(2):
        try:
            found = client.post(f"{server.base}/v1/completions", json=question.body)
            break
        except httpx.TransportError as error:
            # an idle connection may have gone to make room, which any client tries again
            wrong = f"{type(error).__name__}: {error}"
    else:
        return wrong
    if found.status_code != 200:
        return f"{found.status_code}: {found.text[:200]}"
    same = found.json()["choices"][0]["text"] == question.text
    return "" if same else f"another text for {question.body}"


def hold(server: Server, count: int, half: Callable[[int], bytes]) -> list[socket.socket]:
    """So many connections, with half a request on each."""
    found = []
    for number in range(count):
        connection = server.connect()
        with contextlib.suppress(OSError):
            connection.sendall(half(number))
        found.append(connection)
    return found


def half_sent(number: int) -> bytes:
    """Half of the headers, or half of a body."""
    if number % 2:
        return b"POST /v1/completions HTTP/1.1\r\nX-a: "
    token = f"Authorization: Bearer {TOKEN}\r\n".encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
    return head + (token if number % 4 else b"") + b"\r\n{"


def large_prompt(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request with a prompt of a megabyte, as plain text or as a message."""
    text = "x y " * 250_000
    if number % 2:
        return "chat/completions", {"messages": [{"role": "user", "content": text}]}
    return "completions", {"prompt": text}


def under_siege(server: Server, question: Question, row: Row, connections: int) -> None:
    """The seconds of an answer in peace, and with half-sent requests on so many connections and
    twenty prompts of a megabyte in flight. More than twice the usual time is a failure.

    The prompts have fewer characters than the server takes and more tokens, so each is made into
    tokens before it is refused, or waits for that until the block ends.
    """
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(headers=headers, timeout=LONGEST) as client:

        def seconds() -> float:
            begun = time.monotonic()
            row.note(ask(client, server, question))
            return time.monotonic() - begun

        seconds()
        usual = statistics.median(seconds() for _ in range(9))
        held = hold(server, connections, half_sent)

        def prompt(number: int) -> str:
            path, body = large_prompt(number)
            url = f"{server.base}/v1/{path}"
            asked = {"model": MODEL, **body}
            answer = httpx.post(url, json=asked, headers=headers, timeout=2 * LONGEST)
            late = answer.status_code == 429 and "not tokenised within" in answer.text
            read = answer.status_code == 400 and "the prompt takes" in answer.text
            why = f"a large prompt got {answer.status_code}: {answer.text[:200]}"
            return "" if late or read else why

        with ThreadPoolExecutor(20) as pool:
            sent = [pool.submit(prompt, number) for number in range(20)]
            found = [seconds()]
            while len(found) < 9 or not all(one.done() for one in sent):
                found.append(seconds())
            for one in sent:
                row.note(one.result())
    besieged = statistics.median(found)
    for connection in held:
        row.note("")
        connection.close()
    slow = besieged > 2 * usual
    row.note(f"{besieged:.3f} s in place of {usual:.3f} s" if slow else "")
    row.figures = {"usual_seconds": usual, "besieged_seconds": besieged, "answers": len(found)}


def aftermath(server: Server, stage: str, row: Row) -> None:
    """The server is alive, its log shows no traceback and is short, and it ends as asked."""
    if stage == SERVE:
        health = httpx.get(f"{server.base}/health", timeout=LONGEST).status_code
        row.note("" if health == 200 else f"/health: {health}")
        shown = httpx.get(
            f"{server.base}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=LONGEST
        ).text
        errors = re.search(r'requests_total\{outcome="error"\} (\S+)', shown)
        row.note("" if errors and float(errors.group(1)) == 0 else "requests ended with an error")
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(60)
    row.note("" if status == 0 else f"it ended with status {status}")
    time.sleep(0.2)  # until the last lines are read
    text = "".join(server.log)
    row.note("a traceback in the log" if "Traceback" in text else "")
    row.note("" if len(text) < 200_000 else f"a log of {len(text)} bytes")
    row.note("the token is in the log" if TOKEN in text else "")


def attack(seed: int, count: int, folder: Path, connections: int = 1500) -> list[Row]:
    """`count` malformed requests to both servers together, and the siege of `headstart serve`
    with so many connections."""
    folder.mkdir(parents=True, exist_ok=True)
    path = save_micro_target(folder / "micro")
    target = TargetModel.load(TargetConfig(str(path), dtype="float64", device="cpu"))
    order = random.Random(seed)
    malformed = [serve_request(order) for _ in range(count - count // 2)]
    rows = Areas("protocol")
    asked = questions(target, 40, seed)
    longest = max(asked, key=lambda question: int(question.body["max_tokens"]))
    own = ("serve.port=0", f"serve.name={MODEL}", "serve.drafter=ngram", "decode.batch_size=8")
    with running(SERVE, folder, path, *own) as server:
        with clients(server, asked, 32, rows["server: answers beside them"]):
            fuzz(server, rows["server: malformed requests"], malformed)
        aftermath(server, SERVE, rows["server: afterwards"])
    wide = save_micro_target(folder / "wide", positions=POSITIONS)
    own = (*own, f"serve.context={POSITIONS}")
    with running(SERVE, folder, wide, *own) as server:
        under_siege(server, longest, rows["server: half-sent requests"], connections)
        aftermath(server, SERVE, rows["server: after the siege"])
    features = rows["feature server: malformed requests"]
    with running(FEATURES, folder, path, "features.serve=true", "features.port=0") as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        facts = httpx.get(f"{server.base}/identity", headers=headers, timeout=LONGEST).json()
        wrong = [features_request(order, facts["key"], target.info) for _ in range(count // 2)]
        held = hold(server, connections, half_sent)
        fuzz(server, features, wrong)
        again = httpx.get(f"{server.base}/identity", headers=headers, timeout=LONGEST)
        features.note("" if again.json() == facts else "its identity has changed")
        for connection in held:
            connection.close()
        aftermath(server, FEATURES, features)
    return list(rows.values())
