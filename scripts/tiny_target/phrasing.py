"""How a user asks in each domain, and how a conversation becomes messages.

A few plain phrasings per domain: enough that the model does not learn one sentence by heart, few enough for eight million
parameters.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

Domain = Literal["code", "explain", "reference"]
DOMAINS: tuple[Domain, ...] = ("code", "explain", "reference")
Messages = list[dict[str, str]]

SYSTEM = (
    "You are a helpful assistant for Python programmers.",
    "Answer questions about Python code and its documentation.",
    "You are a programming assistant. Be precise.",
)
PHRASINGS: dict[Domain, tuple[str, ...]] = {
    "code": (
        "Write the body of this function from `{where}`.\n\n{shown}",
        "Complete the following Python function:\n\n{shown}",
        "Implement `{name}`.\n\n{shown}",
    ),
    "explain": (
        "What does `{where}.{name}` do?\n\n{shown}",
        "Write the docstring of `{name}` in `{where}`.\n\n{shown}",
        "Explain `{name}` from `{where}`:\n\n{shown}",
    ),
    "reference": (
        "What does the documentation of {where} say about \"{name}\"?",
        "Explain \"{name}\" ({where}).",
        "Tell me about {name} in {where}.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One question and its answer before phrasing.

    `module` is the file or topic it came from, `name` the qualified name or heading, `where` what the user calls the place,
    `shown` the code in the question (empty for reference).
    """

    domain: Domain
    module: str
    where: str
    name: str
    shown: str
    answer: str

    @property
    def source(self) -> str:
        """Return `module::name`, the origin that a prompt row carries."""
        return f"{self.module}::{self.name}"


def question(pair: Pair, phrasing: int) -> str:
    """Return the user's message for `pair`; `phrasing` counts modulo the templates of its domain."""
    templates = PHRASINGS[pair.domain]
    return templates[phrasing % len(templates)].format(where=pair.where, name=pair.name, shown=pair.shown).strip()


def dialogue(pairs: list[Pair], rng: random.Random) -> Messages:
    """Return one conversation over `pairs` (one or more turns), with a system message in one case of eight."""
    messages: Messages = []
    if rng.random() < 0.125:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    for pair in pairs:
        messages.append({"role": "user", "content": question(pair, rng.randrange(3))})
        messages.append({"role": "assistant", "content": pair.answer})
    return messages
