"""Tests `headstart serve` under load: `python -m scripts.evidence.serve_load` writes
docs/reports/serve_load.json.

The server (`--drafter FOLDER`) is a separate process on loopback; its clients are the openai
client. It decodes by rule match, so every text is known beforehand. Answers are compared with plain
offline decoding, token by token, and differences are examined (inference/audit/comparison.py): a
near tie of float32 is counted, anything else is a mismatch. Phases:

1. load: `--clients` clients for `--minutes`, fewer than the server has places: no request may be
   refused or fail, and memory must not grow;
2. overload: more clients than places: the rest must be refused with 429 and Retry-After at once,
   the others answered;
3. SIGTERM in the middle of requests: they end, and so does the process, with status 0.

The exit status is 1 if a request failed, a text is a mismatch, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import openai
import torch

from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.manifest import write_json
from inference.measure.metrics import divide
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.server.metrics import resident_bytes
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from scripts.config.stage_configs import RunConfig
from scripts.evidence.common import Facts
from scripts.evidence.served import Served, serving
from scripts.run import drafters
from scripts.tools.common import PROMPTS, REPORTS, TARGET, command, cpu_target

SAMPLING = (
    SamplingSettings(),
    SamplingSettings(temperature=1.0),
    SamplingSettings(temperature=0.7, top_p=0.9),
    SamplingSettings(temperature=1.0, top_k=40, min_p=0.02),
)
SHOWN = tuple(
    f"headstart_{name}" for name in ("tau", "acceptance", "requests_total", "engine_seconds_total")
)
"""The server's metrics that the report shows."""
LIMITS = (16, 48, 32, 64, 24)
WARM_UP_SHARE = 1 / 3
"""Share of the load phase after which memory must not grow; until then, kernels are cached by
shape."""
GROWTH_ALLOWED = 0.03
"""Share by which memory at the end may exceed memory after the warm-up, since allocators vary."""


# Clients


@dataclass(frozen=True)
class Case:
    """A request with its known answer: the text and tokens of offline generation."""

    request: Request
    domain: str
    sampling: SamplingSettings
    expected: str
    tokens: tuple[int, ...]

    def arguments(self, model: str) -> Facts:
        """The arguments of the openai client for the request."""
        own, request = self.sampling, self.request
        return {
            "model": model,
            "prompt": list(request.tokens),
            "max_tokens": request.max_new_tokens,
            "temperature": own.temperature,
            "top_p": own.top_p,
            "seed": request.seed,
            "extra_body": {"top_k": own.top_k, "min_p": own.min_p, "return_token_ids": True},
            "extra_headers": {"X-Headstart-Domain": self.domain},
        }


@dataclass
class Seen:
    """The results of one phase. seconds: of whole answers; first: until the first streamed
    piece."""

    answers: int = 0
    identical: int = 0
    different: list[tuple[Case, str, tuple[int, ...]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    without_retry_after: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    wall: float = 0.0

    def note(self, case: Case, text: str, tokens: tuple[int, ...], seconds: float) -> None:
        self.answers += 1
        self.tokens += len(tokens)
        self.seconds.append(seconds)
        if (text, tokens) == (case.expected, case.tokens):
            self.identical += 1
        else:
            self.different.append((case, text, tokens))

    def facts(self, target: TargetModel, clients: int) -> Facts:
        """The phase in numbers; seconds as percentiles."""
        return {
            "clients": clients,
            "seconds": self.wall,
            "answers": self.answers,
            "failed": len(self.failures),
            "failures": sorted(set(self.failures))[:5],
            "refused": len(self.refused),
            "refused_without_retry_after": self.without_retry_after,
            "requests_per_second": divide(self.answers, self.wall),
            "tokens_per_second": divide(self.tokens, self.wall),
            "answer_seconds": percentiles(self.seconds),
            "first_piece_seconds": percentiles(self.first),
            "refusal_seconds": percentiles(self.refused),
            **self.examine(target),
        }

    def examine(self, target: TargetModel) -> dict[str, int]:
        """The causes of differing answers, with the number of answers for each."""
        ties = 0
        for case, text, tokens in self.different:
            if tokens == case.tokens:  # not a rounding difference
                continue
            verdict = audit(target, [case.request], [case.tokens], [tokens], case.sampling)
            shown = [token for token in tokens if token not in target.eos_token_ids]
            same_text = target.tokenizer.decode(shown, skip_special_tokens=True) == text
            ties += verdict.mismatches == 0 and same_text
        wrong = len(self.different) - ties
        return {"identical": self.identical, "near_ties": ties, "mismatches": wrong}


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
    return {**found, "max": max(values)}


async def ask(client: openai.AsyncOpenAI, model: str, case: Case, stream: bool, seen: Seen) -> None:
    """Send one request and add its result."""
    begin = time.monotonic()
    try:
        if stream:
            text, tokens = "", ()
            async for part in await client.completions.create(**case.arguments(model), stream=True):
                choice = part.choices[0]
                if not text and choice.text:
                    seen.first.append(time.monotonic() - begin)
                text += choice.text
                tokens = tuple(getattr(choice, "token_ids", None) or tokens)
        else:
            choice = (await client.completions.create(**case.arguments(model))).choices[0]
            text, tokens = choice.text, tuple(getattr(choice, "token_ids", ()))
        seen.note(case, text, tokens, time.monotonic() - begin)
    except openai.RateLimitError as error:
        seen.refused.append(time.monotonic() - begin)
        seen.without_retry_after += "retry-after" not in error.response.headers
    except openai.OpenAIError as error:
        seen.failures.append(f"{type(error).__name__}: {error}"[:200])


class Load:
    """The requests to a running server, and its metrics."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def client(self) -> openai.AsyncOpenAI:
        """A client that does not retry requests."""
        return openai.AsyncOpenAI(
            base_url=self.served.base, api_key="none", max_retries=0, timeout=120
        )

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name and labels."""
        text = httpx.get(self.served.base.removesuffix("/v1") + "/metrics").text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    async def load(
        self,
        cases: list[Case],
        clients: int,
        seconds: float,
        each: Callable[[], None] = lambda: None,
    ) -> Seen:
        """Clients that send one request after the other, every second one streamed.

        `each` is called twice a second.
        """
        seen, begin = Seen(), time.monotonic()

        async def one(number: int) -> None:
            order, count = random.Random(number), number
            while time.monotonic() - begin < seconds:
                await ask(client, self.served.model, order.choice(cases), count % 2 == 0, seen)
                count += 1

        async def watch() -> None:
            while True:
                each()
                await asyncio.sleep(0.5)

        async with self.client() as client:
            watching = asyncio.create_task(watch())
            await asyncio.gather(*(one(number) for number in range(clients)))
            watching.cancel()
        seen.wall = time.monotonic() - begin
        return seen

    async def each_once(self, cases: list[Case], clients: int) -> Seen:
        """Send every case once, `clients` at a time: the same work as an offline run over them."""
        seen, waiting = Seen(), list(reversed(cases))

        async def one() -> None:
            while waiting:
                await ask(client, self.served.model, waiting.pop(), False, seen)

        async with self.client() as client:
            begin = time.monotonic()
            await asyncio.gather(*(one() for _ in range(clients)))
            seen.wall = time.monotonic() - begin
        return seen

    def end(self, cases: list[Case]) -> Facts:
        """Request sixteen long answers, send SIGTERM when all have begun, and wait for them and the
        server."""

        async def interrupt() -> Seen:
            """Send SIGTERM while long answers run; returns what their clients received."""
            longest = sorted(cases, key=lambda case: -case.request.max_new_tokens)[:16]
            asking = asyncio.create_task(self.each_once(longest, 16))
            most = 0.0
            while most < 16 and not asking.done():  # until all have begun, or the first have ended
                await asyncio.sleep(0.02)
                found = await asyncio.to_thread(self.metrics)
                inside = found["headstart_requests_running"] + found["headstart_requests_waiting"]
                if inside < most:
                    break
                most = inside
            self.served.process.send_signal(signal.SIGTERM)
            return await asking

        begin = time.monotonic()
        seen = asyncio.run(interrupt())
        status, seconds = self.served.process.wait(60), time.monotonic() - begin
        failed = len(seen.failures)
        return {"status": status, "seconds": seconds, "answers": seen.answers, "failed": failed}


# Phases


def report(given: argparse.Namespace) -> int:
    """Run all phases, write and print; returns the exit status."""
    torch.set_num_threads(given.threads)
    target = cpu_target(given.target)
    found = drafters.find(given.drafter, RunConfig())
    decode = drafters.draft_settings(found, DecodeConfig())
    say("answering offline")
    cases = known_answers(target, given.cases)
    words = ["target=local", f"target.path={given.target}", "target.dtype=float32"]
    words += ["target.device=cpu", f"serve.drafter='{given.drafter}'", "serve.port=0"]
    words += [f"serve.queue={given.clients}", "serve.context=1024"]
    words += [f"decode.batch_size={given.rows}", "decode.rule=match"]
    words += [f"decode.shape={decode.shape}", f"decode.depth={decode.depth}"]
    places = given.rows + given.clients
    with serving(words, given.log, given.threads) as served:
        server = Load(served)
        begun = resident_bytes(served.process.pid)
        asyncio.run(server.each_once(cases, 4))  # creates buffers of every size
        say(f"{given.clients} clients for {given.minutes:g} minutes")
        memory: list[tuple[float, int]] = []
        clock = time.monotonic()

        def look() -> None:
            memory.append((time.monotonic() - clock, resident_bytes(served.process.pid)))

        below = asyncio.run(server.load(cases, given.clients, given.minutes * 60, look))
        say("overload")
        above = asyncio.run(server.load(cases, places + 120, given.overload_seconds))
        numbers = server.metrics()
        end = server.end(cases)
    shown: Facts = {
        "load": below.facts(target, given.clients),
        "overload": {**above.facts(target, places + 120), "places": places},
        "memory": memory_growth(begun, memory),
        "end": end,
    }
    shown["fine"] = is_fine(shown)
    packages = ("torch", "transformers", "fastapi", "h11", "openai")
    sizes = {"rows": given.rows, "queue": given.clients, "cases": len(cases), "limits": LIMITS}
    draft = {"shape": decode.shape, "depth": decode.depth}
    device = {**device_facts(torch.device("cpu")), "cores": os.cpu_count()}
    content = {
        "format": 1,
        "command": given.command,
        "machine": {**device, "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "drafter": {"name": found.name, "kind": found.kind, **draft},
        "server": sizes,
        "metrics": {key: numbers[key] for key in sorted(numbers) if key.startswith(SHOWN)},
        **shown,
    }
    write_json(given.out, content)
    print(json.dumps(shown, indent=2))
    return 0 if shown["fine"] else 1


def say(phase: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {phase}", file=sys.stderr, flush=True)


def is_fine(found: Facts) -> bool:
    load, overload, end = found["load"], found["overload"], found["end"]
    faults = [load[key] for key in ("failed", "refused", "mismatches")]
    faults += [overload[key] for key in ("failed", "mismatches", "refused_without_retry_after")]
    faults += [end["status"], end["failed"]]
    return (
        not any(faults) and overload["refused"] > 0 and found["memory"]["growth"] <= GROWTH_ALLOWED
    )


def known_answers(target: TargetModel, count: int) -> list[Case]:
    """Requests with different prompts, lengths and settings, each decoded alone and without a
    drafter."""
    prompts = load_prompts(PROMPTS)
    each = -(-count // len({prompt.domain for prompt in prompts}))
    prompts = select_prompts(prompts, each, seed=5)[:count]
    requests = to_requests(prompts, target.tokenizer, DecodeConfig())
    names = ("temperature", "top_k", "top_p", "min_p")
    engines = [
        Engine(target, None, DecodeConfig(**{name: getattr(own, name) for name in names}))
        for own in SAMPLING
    ]
    cases = []
    for number, request in enumerate(requests):
        limit, seed, way = LIMITS[number % len(LIMITS)], 1000 + number, number % len(SAMPLING)
        (answer,) = engines[way].generate([request.tokens], [seed], max_new_tokens=limit)
        asked = Request(number, request.tokens, seed, limit)
        tokens = tuple(answer.completion.tokens)
        domain = prompts[number].domain
        cases.append(Case(asked, domain, SAMPLING[way], answer.text, tokens))
    return cases


def memory_growth(begun: int, memory: list[tuple[float, int]]) -> Facts:
    """Resident bytes at the start, after the warm-up and at the end of the load phase.

    memory: (seconds, bytes), twice a second.
    """
    total, end = memory[-1]
    warm = next(size for at, size in memory if at >= WARM_UP_SHARE * total)
    return {
        "start": begun,
        "warm": warm,
        "end": end,
        "most": max(size for _, size in memory),
        "growth": end / warm - 1,
        "every_ten_seconds": [size for _, size in memory[::20]],
    }


main = command(
    report,
    drafter=("ngram", "checkpoint folder, or a kind without weights"),
    target=str(TARGET),
    clients=64,
    minutes=5.0,
    overload_seconds=30.0,
    rows=16,
    cases=64,
    threads=(1, "of the engine, offline and served"),
    log=(Path("outputs") / "serve_load.log", "of the server's output"),
    out=REPORTS / "serve_load.json",
)

if __name__ == "__main__":
    sys.exit(main())
