"""Keeps held-out prompts, of benchmarks and of tau's measurements, out of the training data.

A row repeats a held-out prompt if one of its messages contains a run of 50 letters and digits of it
(case, signs and spaces do not count; about eight words; a Chinese, Japanese or Korean character
counts as two), or equals all of it. Runs that many
held-out prompts share are their template, not their content, and do not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from heads.api.errors import UserError
from heads.api.reading import read_json_lines
from inference.measure.datasets import DatasetConfig, Loaded, load_bench_prompts
from inference.measure.prompts import CONTENT_KEYS, Prompt, load_prompts
from train.data import tables
from train.data.config import DataConfig
from train.data.dedup.shingles import Bytes, normalise, runs_of, shingles, whole
from train.data.reserve import Decode, prompt_of
from train.data.sources import SkippedRow, Source
from train.data.tables import BadRowError

logger = logging.getLogger(__name__)

WIDTH = 50
"""Letters and digits of a run (`dedup.shingles.runs_of`)."""
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
    """An index of held-out prompts. It takes about twenty bytes of memory per letter of them."""

    def __init__(
        self, prompts: Iterable[tuple[str, str, Sequence[str]]], exact: bool = False
    ) -> None:
        """prompts: (source, id, texts). exact: whether only whole prompts count."""
        self.exact = exact
        self.names: list[tuple[str, str]] = []
        self._whole: dict[int, int] = {}
        hashes, owners, sources = [], [], []
        known = set[tuple[str, int]]()
        for number, (source, name, texts) in enumerate(prompts):
            self.names.append((source, name))
            for content in map(normalise, texts):
                # A short message of several, such as "yes", is not specific to its prompt.
                runs, text = np.unique(shingles(content, WIDTH)), whole(content)
                if len(runs) if len(texts) > 1 else len(content):
                    self._whole.setdefault(text, number)
                # A text that a source repeats is one text: its runs are no template.
                if (source, text) in known:
                    continue
                known.add((source, text))
                hashes.append(runs)
                owners.append(np.full(len(hashes[-1]), number, dtype=np.int64))
            sources.append(source)
        self._hashes, self._owners = _content_only(hashes, owners, sources)

    def __len__(self) -> int:
        return len(self.names)

    def digest(self) -> str:
        """Hash of everything on which the findings depend."""
        content = [self.exact, sorted(self._whole), self._hashes.tolist()]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def find(self, texts: Iterable[str]) -> Repeat | None:
        """The first held-out prompt that a row's texts repeat."""
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
                owner = int(self._owners[places[hits[0]]])
                begins, ends = runs_of(content, WIDTH)
                found = content[begins[hits[0]] : ends[hits[0]]]
                return Repeat(*self.names[owner], _excerpt(found))
        return None


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts in a prompt file or folder, or in a file of any other form that `data` reads;
    rows without a prompt are left out. Raises `UserError` if there are none."""
    file = Path(path).expanduser()
    if not file.is_file() or is_prompt_file(file):
        return load_prompts(path)
    data, found, reasons = DataConfig(str(path)), dict[str, Prompt](), Counter[str]()
    for row in Source(data):
        try:
            if isinstance(row, SkippedRow):
                raise BadRowError(row.reason)
            found.setdefault(row.id, prompt_of(row, data))
        except (BadRowError, UserError) as error:
            reasons[str(error)] += 1
    if not found:
        raise UserError(f"no row of '{path}' gives a prompt: {reasons.most_common(1)[0][0]}.")
    if reasons:
        logger.warning("%d rows of '%s' give no prompt: %s", reasons.total(), path, min(reasons))
    return list(found.values())


def is_prompt_file(file: Path) -> bool:
    """Whether a file is read as prompts (`load_prompts`) and not as data: by its first line."""
    if file.suffix != ".jsonl":
        return file.suffix not in tables.BUILDERS
    try:
        _, row = next(read_json_lines(file), (0, None))
    except UserError:
        return True
    return not isinstance(row, Mapping) or any(row.get(key) is not None for key in CONTENT_KEYS)


def load_any_prompts(source: str, dataset: DatasetConfig, domains: Sequence[str]) -> Loaded:
    """The prompts of a measurement, from any source of `load_bench_prompts` or `read_prompts`."""
    file = Path(source).expanduser()
    known = file.suffix in (".jsonl", *tables.BUILDERS)
    if not dataset.reads_table and known and file.is_file() and not is_prompt_file(file):
        return Loaded(read_prompts(source), source, "")
    return load_bench_prompts(source, dataset, domains)


def load_held_out(data: DataConfig, decode: Decode) -> HeldOutIndex | None:
    """The held-out prompts of a configuration, None without; `UserError` for unreadable ones.
    decode: text of token ids."""
    if data.decontaminate == "none":
        return None
    loaded = [(path, read_prompts(path)) for path in data.held_out]
    for bench in data.held_out_prompts:
        found = load_any_prompts(bench.path, bench.dataset, bench.domains)
        loaded.append((bench.path, found.prompts))
    prompts = [(path, one.id, texts_of(one, decode)) for path, several in loaded for one in several]
    return HeldOutIndex(prompts, exact=data.decontaminate == "exact") if prompts else None


def texts_of(prompt: Prompt, decode: Decode) -> list[str]:
    """A prompt's text or user messages; all of a prompt that is given as token ids."""
    if prompt.tokens is not None:
        return [decode(prompt.tokens), *prompt.turns]
    given = [message["content"] for message in prompt.messages or () if message["role"] == "user"]
    plain = [] if prompt.text is None else [prompt.text]
    return [*plain, *given, *prompt.turns]


class Findings(TypedDict):
    """Repeats, as in `input/state.json` and the report: counts by source, and examples."""

    counts: dict[str, int]
    examples: list[dict[str, str]]


def add_finding(findings: Findings, row: str, repeat: Repeat) -> None:
    """Count a repeat, and keep it as an example while there are few."""
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
