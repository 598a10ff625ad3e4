"""Prompts for the report on staleness: what the embedded target's makers held out (group B), and the new domain beside the old."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.manifest import write_bytes
from scripts.tiny_target import corpus
from scripts.tiny_target.conversations import pairs_of
from scripts.tiny_target.corpus import Document
from scripts.tiny_target.phrasing import DOMAINS, Pair
from scripts.tiny_target.prompts import rows

Row = dict[str, Any]
UNSEEN = 256
"""Prompts of each domain, of which half make the reference and half are the fresh traffic; `reference` has fewer."""
MIXED = 720
"""Prompts of old and new domains each that the changed target answers for a full training."""


def read(path: Path) -> list[Row]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write a .jsonl file."""
    write_bytes(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found).encode())


def installed() -> list[Document]:
    """What is installed here and could be asked about."""
    return [*corpus.from_stdlib(), *corpus.from_topics(), *corpus.from_site_packages()]


def unseen(bench: Path, documents: Iterable[Document], seed: int = 0) -> list[Row]:
    """Prompts of the three old domains that neither target nor drafters have seen: those of `bench` and more from group B of
    `documents`.
    """
    known = [row for domain in DOMAINS for row in read(bench / f"{domain}.jsonl")]
    sources = {row["source"] for row in known}
    held_out = corpus.deduplicate(document for document in documents if document.group == "B")
    pairs = [pair for document in held_out for pair in pairs_of(document) if fitting(pair) and pair.source not in sources]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    found = list(known)
    for domain in DOMAINS:
        there = sum(row["domain"] == domain for row in known)
        found += rows([pair for pair in pairs if pair.domain == domain][: UNSEEN - there], "more", seed)
    asked = {row["messages"][0]["content"]: row for row in found}  # some functions are asked about in one wording
    return list(asked.values())


def fitting(pair: Pair) -> bool:
    """Whether the makers of the bench would have taken a pair."""
    private = any(part.startswith("_") for part in pair.name.split("."))
    in_tests = "/test" in pair.module or "conftest" in pair.module
    return not private and not in_tests and (pair.domain != "code" or '"""' in pair.shown)


def halves(found: Sequence[Row], seed: int = 0) -> tuple[list[Row], list[Row]]:
    """The rows dealt to two parts at random, half of every domain each."""
    rng = random.Random(seed)
    parts: tuple[list[Row], list[Row]] = ([], [])
    for domain in DOMAINS:
        own = [row for row in found if row["domain"] == domain]
        rng.shuffle(own)
        for place, row in enumerate(own):
            parts[place % 2].append(row)
    return parts


def write_all(folder: Path, assets: Path, headers: Path) -> None:
    """Write reference.jsonl and fresh.jsonl (old domains, unseen), train.jsonl, validation.jsonl and measuring.jsonl (old and new
    domains in equal parts, shuffled). headers: the folder of the new domain's prompts.
    """
    for name, part in zip(("reference", "fresh"), halves(unseen(assets, installed())), strict=True):
        write(folder / f"{name}.jsonl", part)
    rng = random.Random("mixed")
    for name, count in (("train", MIXED), ("validation", 48)):
        old = rng.sample(read(assets / "training" / f"{name}.jsonl"), count)
        mixed = [*old, *read(headers / f"{name}.jsonl")]
        rng.shuffle(mixed)
        write(folder / f"{name}.jsonl", mixed)
    bench = [row for domain in DOMAINS for row in read(assets / f"{domain}.jsonl")[:64]]
    write(folder / "measuring.jsonl", [*bench, *read(headers / "measuring.jsonl")])
