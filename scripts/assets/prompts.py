"""Prompt files: questions chosen by turns, a limited number of each module, as JSON lines."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes
from scripts.assets.conversations import PHRASINGS, Pair

PromptRow = dict[str, Any]
"""`id`, `domain`, `messages`, `source`."""


def is_askable(pair: Pair) -> bool:
    """Return whether a user would ask about a Python pair: it is public and no test, and a function
    whose body is wanted has a docstring, since nothing else tells what the function does.
    """
    private = any(part.startswith("_") for part in pair.name.split("."))
    in_tests = "/test" in pair.module or "conftest" in pair.module
    return not private and not in_tests and (pair.domain != "code" or '"""' in pair.shown)


def choose(
    queues: Mapping[str, list[Pair]],
    count: int,
    per_module: int,
    used: Counter[str] | None = None,
    distinct: bool = True,
) -> list[Pair]:
    """Return `count` pairs, taken from the ends of `queues` by turns, `per_module` at most of a
    module.

    `used` counts the pairs per module and is updated. distinct: no two pairs share a wording (two
    functions can differ in the one wording that names their module only). Raises UserError when
    there are too few.
    """
    used = Counter() if used is None else used
    chosen: list[Pair] = []
    asked: set[str] = set()
    waiting = {name: list(queue) for name, queue in queues.items()}
    while waiting and len(chosen) < count:
        for name in list(waiting):
            while waiting[name]:
                pair = waiting[name].pop()
                wordings = {pair.question(number) for number in range(len(PHRASINGS[pair.domain]))}
                if used[pair.module] < per_module and not (distinct and asked & wordings):
                    used[pair.module] += 1
                    asked |= wordings
                    chosen.append(pair)
                    break
            else:
                del waiting[name]
    if len(chosen) < count:
        raise UserError(
            f"the held-out group gives {len(chosen)} prompts, {count} were asked for: ask for "
            "fewer, or prepare from more sources."
        )
    return chosen[:count]


def prompt_rows(
    pairs: Iterable[Pair], prefix: str, rng: random.Random | None = None
) -> list[PromptRow]:
    """Return the prompt rows of `pairs`, ids `prefix`-0000 and so on.

    rng: chooses one of the wordings; without it, the first is taken.
    """
    return [
        {
            "id": f"{prefix}-{index:04d}",
            "domain": pair.domain,
            "messages": pair.messages(rng.randrange(3) if rng else 0)[:1],
            "source": pair.source,
        }
        for index, pair in enumerate(pairs)
    ]


def read_rows(path: Path) -> list[PromptRow]:
    """Return the rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a .jsonl file atomically."""
    write_bytes(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
