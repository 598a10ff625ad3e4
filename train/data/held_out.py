"""Keeps held-out prompts, of benchmarks and of tau's measurements, out of the training data.

A row repeats a held-out prompt when one of its messages contains a run of 50 letters and digits of
it (case, signs and spaces do not count; about eight words), or is the whole of it. Runs that many
held-out prompts share are their template, not their content, and do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from inference.measure.datasets import load_bench_prompts
from inference.measure.prompts import Prompt, load_prompts
from train.data.config import DataConfig
from train.data.dedup.shingles import Bytes, normalise, shingles, whole

WIDTH = 50
"""Bytes of a run."""
TEMPLATE = 10
"""A run that more prompts of one source share is their template."""
EXAMPLES = 10
"""Repeated prompts that are reported with their text."""


@dataclass(frozen=True)
class Repeat:
    """A held-out prompt found in a row: its source and id, and the common text."""

    source: str
    prompt: str
    text: str


class HeldOutIndex:
    """Held-out prompts, ready to be looked for. In memory: some twenty bytes per letter of them."""

    def __init__(
        self, prompts: Iterable[tuple[str, str, Sequence[str]]], exact: bool = False
    ) -> None:
        """prompts: (source, id, texts). exact: only whole prompts count."""
        self.exact = exact
        self.names: list[tuple[str, str]] = []
        self._whole: dict[int, int] = {}
        hashes, owners, sources = [], [], []
        for number, (source, name, texts) in enumerate(prompts):
            self.names.append((source, name))
            for content in map(normalise, texts):
                if len(content):
                    self._whole.setdefault(whole(content), number)
                hashes.append(np.unique(shingles(content, WIDTH)))
                owners.append(np.full(len(hashes[-1]), number, dtype=np.int64))
            sources.append(source)
        self._hashes, self._owners = _content_only(hashes, owners, sources)

    def __len__(self) -> int:
        return len(self.names)

    def digest(self) -> str:
        """Hash of everything that decides what is found."""
        content = [self.exact, sorted(self._whole), self._hashes.tolist()]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def find(self, texts: Iterable[str]) -> Repeat | None:
        """The first held-out prompt that one of a row's texts repeats."""
        for content in map(normalise, texts):
            number = self._whole.get(whole(content))
            if number is not None:
                return Repeat(*self.names[number], _excerpt(content))
            if self.exact or not len(self._hashes):
                continue
            hashes = shingles(content, WIDTH)
            places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            hits = np.flatnonzero(self._hashes[places] == hashes)
            if len(hits):
                first = int(hits[0])
                owner = int(self._owners[places[first]])
                return Repeat(*self.names[owner], _excerpt(content[first : first + WIDTH]))
        return None


def load_held_out(data: DataConfig) -> HeldOutIndex | None:
    """The held-out prompts of a configuration, None without; `UserError` for unreadable ones."""
    if data.decontaminate == "none":
        return None
    loaded = [(path, load_prompts(path)) for path in data.held_out]
    for bench in data.held_out_prompts:
        found = load_bench_prompts(bench.path, bench.dataset, bench.domains)
        loaded.append((bench.path, found.prompts))
    prompts = [(path, one.id, texts_of(one)) for path, several in loaded for one in several]
    return HeldOutIndex(prompts, exact=data.decontaminate == "exact") if prompts else None


def texts_of(prompt: Prompt) -> list[str]:
    """A prompt's user messages; none for one that is given as token ids."""
    return [message["content"] for message in prompt.messages or () if message["role"] == "user"]


class Findings(TypedDict):
    """Repeats as `input/state.json` and the report hold them: counts by source, and examples."""

    counts: dict[str, int]
    examples: list[dict[str, str]]


def add_finding(findings: Findings, row: str, repeat: Repeat) -> None:
    """Count a repeat; keep it as an example while there are few."""
    findings["counts"][repeat.source] = findings["counts"].get(repeat.source, 0) + 1
    if len(findings["examples"]) < EXAMPLES:
        findings["examples"].append({"row": row, **vars(repeat)})


def _content_only(hashes: list[Any], owners: list[Any], sources: list[str]) -> tuple[Any, Any]:
    """Sorted hashes and an owner of each, without those shared by over `TEMPLATE` of a source."""
    if not hashes:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    every, owner = np.concatenate(hashes), np.concatenate(owners)
    _, numbers = np.unique(np.array(sources), return_inverse=True)
    common = []
    for source in range(int(numbers.max(initial=-1)) + 1):
        values, counts = np.unique(every[numbers[owner] == source], return_counts=True)
        common.append(values[counts > TEMPLATE])
    kept = ~np.isin(every, np.concatenate(common))
    values, first = np.unique(every[kept], return_index=True)
    return values, owner[kept][first]


def _excerpt(content: Bytes) -> str:
    return content[: 2 * WIDTH].tobytes().decode("utf-8", "replace")
