"""The clients of `scripts.load_test`: the real openai client, many at once, each answer noted with its tokens and times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from inference.decoding.sampling.distribution import SamplingSettings

DOMAINS = ("code", "chat", "math", "qa")


@dataclass(frozen=True)
class Case:
    """A request whose answer is known. expected: what offline generation gives, as text and tokens."""

    number: int
    prompt: tuple[int, ...]
    limit: int
    seed: int
    sampling: SamplingSettings
    expected: str = ""
    tokens: tuple[int, ...] = ()

    def request(self, model: str) -> dict[str, Any]:
        """The arguments of the openai client."""
        own = self.sampling
        return {
            "model": model, "prompt": list(self.prompt), "max_tokens": self.limit, "temperature": own.temperature,
            "top_p": own.top_p, "seed": self.seed,
            "extra_body": {"top_k": own.top_k, "min_p": own.min_p, "return_token_ids": True},
            "extra_headers": {"X-Headstart-Domain": DOMAINS[self.number % len(DOMAINS)]},
        }  # fmt: skip


@dataclass
class Seen:
    """What one phase saw. seconds: of whole answers; first: to the first piece of streamed ones."""

    answers: int = 0
    identical: int = 0
    different: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    without_retry_after: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    wall: float = 0.0

    def note(self, case: Case, text: str, tokens: tuple[int, ...], seconds: float) -> None:
        """Book an answer."""
        self.answers += 1
        self.tokens += len(tokens)
        self.seconds.append(seconds)
        if (text, tokens) == (case.expected, case.tokens):
            self.identical += 1
        else:
            self.different.append((case.number, text, tokens))


async def ask(client: openai.AsyncOpenAI, model: str, case: Case, stream: bool, seen: Seen) -> None:
    """One request; whatever comes of it is noted."""
    begin = time.monotonic()
    try:
        if stream:
            text, tokens = "", ()
            async for part in await client.completions.create(**case.request(model), stream=True):
                choice = part.choices[0]
                if not text and choice.text:
                    seen.first.append(time.monotonic() - begin)
                text += choice.text
                tokens = tuple(getattr(choice, "token_ids", None) or tokens)
        else:
            found = await client.completions.create(**case.request(model))
            text, tokens = found.choices[0].text, tuple(found.choices[0].token_ids)
        seen.note(case, text, tokens, time.monotonic() - begin)
    except openai.RateLimitError as error:
        seen.refused.append(time.monotonic() - begin)
        seen.without_retry_after += "retry-after" not in error.response.headers
    except openai.OpenAIError as error:
        seen.failures.append(f"{type(error).__name__}: {error}"[:200])


async def load(
    base: str, model: str, cases: list[Case], clients: int, seconds: float, streams: bool = True,
    each: Callable[[], None] = lambda: None,
) -> Seen:  # fmt: skip
    """`clients` clients that ask one request after the other for `seconds`, every second one streamed. each: called twice a
    second.
    """
    seen = Seen()
    begin = time.monotonic()
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=120) as client:

        async def one(number: int) -> None:
            order = random.Random(number)
            count = 0
            while time.monotonic() - begin < seconds:
                await ask(client, model, order.choice(cases), streams and (count + number) % 2 == 0, seen)
                count += 1

        async def watch() -> None:
            while True:
                each()
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(number) for number in range(clients)))
        watching.cancel()
    seen.wall = time.monotonic() - begin
    return seen


async def each_once(base: str, model: str, cases: list[Case], clients: int) -> Seen:
    """Every case once, `clients` at a time: the same work as an offline run over them."""
    seen, waiting = Seen(), list(reversed(cases))
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=120) as client:

        async def one() -> None:
            while waiting:
                await ask(client, model, waiting.pop(), False, seen)

        begin = time.monotonic()
        await asyncio.gather(*(one() for _ in range(clients)))
        seen.wall = time.monotonic() - begin
    return seen
