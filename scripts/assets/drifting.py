"""Makes prompts of drifting traffic, for the report on learning from traffic.

`python`: functions to write and documentation in English, from modules that the embedded target has
not seen. `drift`: C++ headers (`cpp_headers`) and descriptions as JSON, half of each as long as
there are enough of the latter. `finetuned` and `merged`: both of these mixed, half of each in each,
for changed targets. One prompt in `PROBED` is a probe, which nothing learns from, and those of the
first two files are probes in the mixed ones too. The Python prompts and those that ask for JSON are
about the standard library of this machine's Python and its manual's topics, so other versions give
other prompts.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from scripts.assets import cpp_headers, python_sources
from scripts.assets.conversations import (
    Pair,
    PromptRow,
    choose,
    is_askable,
    pairs_of,
    prompt_rows,
    write_rows,
)

ENGLISH, JSON = ("code", "explain", "reference"), ("json",)
MOST_JSON = 560
"""Prompts that ask for JSON; the standard library yields few more."""
PER_MODULE = 1000
"""Most prompts from a module: all that it has."""
PROBED = 5
"""One request in this many is a probe. The number does not divide the number of clients, so each
client sends both."""


def is_probe(number: int) -> bool:
    """Whether the request at this place of a file is a probe."""
    return number % PROBED == PROBED - 1


@cache
def python_pairs() -> tuple[Pair, ...]:
    """Everything that can be asked about the standard library. For JSON, which is rare, it includes
    modules that the embedded target knows."""
    found = []
    for source in (python_sources.from_stdlib, python_sources.from_topics):
        for document in source():
            own = (pair for pair in pairs_of(document) if is_askable(pair))
            found += [pair for pair in own if pair.domain in JSON or document.group != "train"]
    return tuple(found)


def write_prompts(folder: Path, count: int) -> None:
    """Write `count` prompts each to python.jsonl, drift.jsonl, finetuned.jsonl and merged.jsonl;
    raises `UserError` if there are too few. If the files exist, nothing is done."""
    if (folder / "merged.jsonl").is_file():
        return
    described = min((count + 1) // 2, MOST_JSON)
    headers = cpp_headers.split_pairs(cpp_headers.operators())
    unseen = list({pair.question(): pair for pair in (*headers["A"], *headers["B"])}.values())
    code = cpp_headers.choose_prompts(unseen, count - described, "cpp", random.Random("cpp"))
    rows = {
        "python": asked_about(ENGLISH, count, "python"),
        "drift": [*code, *asked_about(JSON, described, "json")],
    }
    for name, own in rows.items():
        random.Random(name).shuffle(own)
    for number, name in enumerate(("finetuned", "merged")):
        rows[name] = mixed([rows["python"], rows["drift"]], number, random.Random(name))
    for name, own in rows.items():
        write_rows(folder / f"{name}.jsonl", own)


def mixed(files: Sequence[Sequence[PromptRow]], number: int, rng: random.Random) -> list[PromptRow]:
    """Half of the prompts of each file in a random order, the even (number 0) or the odd ones.
    Their probes are probes again, and their other prompts are not."""
    kinds: dict[bool, list[PromptRow]] = {True: [], False: []}
    for rows in files:
        for probes, own in kinds.items():
            own += [row for n, row in enumerate(rows) if is_probe(n) == probes][number::2]
    for own in kinds.values():
        rng.shuffle(own)
    found: list[PromptRow] = []
    while kinds[is_probe(len(found))]:
        found.append(kinds[is_probe(len(found))].pop())
    return found


def asked_about(domains: tuple[str, ...], count: int, prefix: str) -> list[PromptRow]:
    """Return `count` prompts of these domains in turn."""
    queues: dict[str, list[Pair]] = defaultdict(list)
    for pair in python_pairs():
        if pair.domain in domains:
            queues[pair.domain].append(pair)
    rng = random.Random(prefix)
    for queue in queues.values():
        rng.shuffle(queue)
    return prompt_rows(choose(queues, count, PER_MODULE), prefix, rng)


def json_pairs() -> list[Pair]:
    """The pairs for teaching a target to describe functions as JSON."""
    return [pair for pair in python_pairs() if pair.domain in JSON]
