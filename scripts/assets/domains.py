"""Writes assets/prompts/domains: prompts of the domains for which acceptance rates are published
(code, summaries, chat, translation, structured output, creative writing), for bench=domains.

    python -m scripts.assets.domains

All are made from the held-out prompts in assets/prompts, whose sources are in no training of the
embedded target. Chat has conversations of three turns about one package. Translation converts
parameters from one docstring notation to another. Structured output follows a JSON schema. Creative
prompts ask about a topic in a package that does not have it, so no known text answers them.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from inference.manifest import write_bytes
from scripts.assets.structured import PROMPTS, rows

COUNT = 32
"""Prompts of each domain."""
SAME = {"code": "code", "summaries": "summarise", "translation": "rewrite"}
"""Domain -> the file from which it takes the first prompts."""
TURNS = ("reference", "summarise", "explain")
"""Files from which a conversation asks, one turn each."""
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of a file of held-out prompts."""
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def row(domain: str, number: int, asked: str, sources: str, **more: Any) -> Row:
    """A row in the form of a prompt file."""
    messages = [{"role": "user", "content": asked}]
    named = {"id": f"domain-{domain}-{number:04d}", "domain": domain, "messages": messages}
    return {**named, **more, "source": sources}


def question(found: Row) -> str:
    return str(found["messages"][0]["content"])


def package(found: Row) -> str:
    return str(found["source"]).partition("/")[0]


def same(domain: str) -> list[Row]:
    """The first prompts of the file for this domain."""
    chosen = read(SAME[domain])[:COUNT]
    return [row(domain, n, question(one), one["source"]) for n, one in enumerate(chosen)]


def chat() -> list[Row]:
    """Conversations whose turns are about one package each; packages alternate."""
    asked = {name: read(name) for name in TURNS}
    packages = list(dict.fromkeys(map(package, asked[TURNS[0]])))
    found: list[Row] = []
    for number, name in itertools.product(range(COUNT), packages):
        about = [[one for one in asked[turn] if package(one) == name] for turn in TURNS]
        if len(found) < COUNT and all(len(several) > number for several in about):
            first, *others = (several[number] for several in about)
            sources = ", ".join(one["source"] for one in (first, *others))
            turns = [question(one) for one in others]
            found.append(row("chat", len(found), question(first), sources, turns=turns))
    return found


def creative() -> list[Row]:
    """Questions about what the documentation of a package says on a topic of the next package in
    the file."""
    found: list[Row] = []
    for one, other in itertools.pairwise(read(TURNS[0])):
        topic, strange = one["source"].partition("::")[2], package(other)
        if package(one) != strange and not topic.startswith("the module") and len(found) < COUNT:
            asked = f"Tell me about {topic} in {strange}."
            found.append(row("creative", len(found), asked, f"{one['source']}, {strange}"))
    return found


def structured() -> list[Row]:
    """The prompts of bench=structured."""
    chosen = rows()[:COUNT]
    return [
        row("structured", n, question(one), one["source"], json_schema=one["json_schema"])
        for n, one in enumerate(chosen)
    ]


def domains() -> dict[str, list[Row]]:
    """The rows of every file."""
    made = {"chat": chat(), "creative": creative(), "structured": structured()}
    return made | {domain: same(domain) for domain in SAME}


def main() -> None:
    """Write the files."""
    for domain, found in domains().items():
        content = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found)
        write_bytes(PROMPTS / "domains" / f"{domain}.jsonl", content.encode())


if __name__ == "__main__":
    main()
