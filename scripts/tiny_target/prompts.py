"""Chooses the prompts: group B for measuring (a file per domain), group A for training drafters and for watching their training."""

from __future__ import annotations

import collections
import json
import lzma
import random
from pathlib import Path

from heads.api.errors import UserError
from scripts.tiny_target.atomic import write_bytes
from scripts.tiny_target.phrasing import DOMAINS, PHRASINGS, Domain, Pair, question
from scripts.tiny_target.progress import note

PER_MODULE = 4
VALIDATION = 96
"""Prompts of group A kept out of training, for choosing checkpoints: the measurement must not choose what it measures."""


def load_pairs(folder: Path, group: str) -> list[Pair]:
    """Return the held-out pairs of group `A` or `B` as `prepare` wrote them; UserError where they are missing."""
    path = folder / f"{group}.jsonl.xz"
    if not path.is_file():
        raise UserError(f"{path} does not exist. `prepare` writes it; name its folder with --pairs.")
    return [Pair(**json.loads(line)) for line in lzma.decompress(path.read_bytes()).decode().split("\n") if line]


def choose(pairs: list[Pair], domain: Domain, count: int, seed: int, used: collections.Counter[str]) -> list[Pair]:
    """Return `count` pairs of one domain, taken by turns from the sources, at most four prompts per module over all domains.

    `used` counts the prompts per module and is updated. Functions need a docstring to be asked for their body, since nothing else
    says what they do. Raises UserError when the group cannot give so many.
    """
    rng = random.Random(f"{seed}:{domain}")
    queues: dict[str, list[Pair]] = {}
    for pair in pairs:
        private = any(part.startswith("_") for part in pair.name.split("."))
        in_tests = "/test" in pair.module or "conftest" in pair.module
        if pair.domain == domain and not private and not in_tests and (domain != "code" or '"""' in pair.shown):
            queues.setdefault(pair.module.split("/")[0], []).append(pair)
    for queue in queues.values():
        rng.shuffle(queue)
    chosen: list[Pair] = []
    asked: set[str] = set()
    while queues and len(chosen) < count:
        for source in sorted(queues):
            found = _next(queues[source], used, asked)
            if found is None:
                del queues[source]
                continue
            used[found.module] += 1
            asked.update(_wordings(found))
            chosen.append(found)
    if len(chosen) < count:
        raise UserError(f"the held-out group has {len(chosen)} {domain} prompts, {count} were asked for: hold out more packages.")
    return chosen[:count]


def _wordings(pair: Pair) -> set[str]:
    """Return every way `pair` may be asked: two functions can differ in the one wording that names their module only."""
    return {question(pair, phrasing) for phrasing in range(len(PHRASINGS[pair.domain]))}


def _next(queue: list[Pair], used: collections.Counter[str], asked: set[str]) -> Pair | None:
    while queue:
        pair = queue.pop()
        if used[pair.module] < PER_MODULE and asked.isdisjoint(_wordings(pair)):
            return pair
    return None


def rows(pairs: list[Pair], prefix: str, seed: int) -> list[dict[str, object]]:
    """Return the prompt rows of `pairs`: id, domain, messages, source."""
    rng = random.Random(f"{seed}:{prefix}")
    return [
        {
            "id": f"{prefix}-{pair.domain}-{index:04d}",
            "domain": pair.domain,
            "messages": [{"role": "user", "content": question(pair, rng.randrange(3))}],
            "source": pair.source,
        }
        for index, pair in enumerate(pairs)
    ]


def write_prompts(folder: Path, out: Path, measuring: int, training: int, seed: int) -> None:
    """Write `<domain>.jsonl` with `measuring` prompts each, and below `training/` about `training` more prompts, shuffled: the last
    ones in validation.jsonl, the others in train.jsonl."""
    group_b, group_a = load_pairs(folder, "B"), load_pairs(folder, "A")
    used_b: collections.Counter[str] = collections.Counter()
    used_a: collections.Counter[str] = collections.Counter()
    mixed: list[dict[str, object]] = []
    for domain in reversed(DOMAINS):  # prose first: it has the fewest modules to choose from
        found = rows(choose(group_b, domain, measuring, seed, used_b), "bench", seed)
        _write(out / f"{domain}.jsonl", found)
        mixed += rows(choose(group_a, domain, -(-training // len(DOMAINS)), seed, used_a), "train", seed)
    random.Random(seed).shuffle(mixed)
    _write(out / "training" / "train.jsonl", mixed[:-VALIDATION])
    _write(out / "training" / "validation.jsonl", mixed[-VALIDATION:])


def _write(path: Path, found: list[dict[str, object]]) -> None:
    write_bytes(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found).encode())
    note(f"{path.name}: {len(found)} prompts")
