"""Answers of a small target to many different prompts, and sets of them: the first ones, the
flattest ones, those to prompts that were written from a few, and those that continue from rejected
tokens.

The prompts are those of existing answers, and more that the target writes from their beginnings
(train/feedback/variations.py), in a random order. So any number of first prompts is a sample of the
same mixture and part of every larger set. Sets beyond this pool add prompts that the target writes
next. A set is a folder in the form of `headstart generate`. Its name contains a digest of its
inputs, and it is made once.

Legend: B rows, T positions, M supervised tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from heads.api.checkpoint import WEIGHTS_FILE
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.manifest import (
    MANIFEST_FILE,
    FileEntry,
    file_entry,
    file_sha256,
    write_bytes,
    write_manifest,
)
from inference.measure.metrics import Floats
from inference.target.model import TargetModel
from inference.verifications import RECORDS
from scripts.evidence.common import run_on_target, settings_of
from scripts.evidence.small_targets import EXPERIMENT, Bench, answers_facts, digest
from scripts.stages.loop.plan import TOKEN_ROWS
from train.data.answers import DONE, SHARD_SCHEMA, SHARDS, AnswerRow, parquet_bytes, read_answers
from train.data.masks import mask_of
from train.feedback.branches import write_branches
from train.feedback.build import AnswerSource, read_lines, write_lines
from train.feedback.config import FeedbackConfig
from train.feedback.variations import write_variations

SPARE = 0.05
"""Share of extra prompts, because generation leaves out prompts that repeat another one except for
case and spaces, or that are used for measuring."""
BEGUN, LEAST_BEGUN = 2, 64
"""Texts that the target begins for one file of written prompts, per prompt and in total."""
SHARD_ROWS = 4096
BATCH_TOKENS = 4096
"""Positions of a batch whose distributions are computed at once."""
KEPT = ("round", "target", "sampling", "data")
"""Keys that a set takes from the manifest of its source answers."""
Line = dict[str, Any]
"""A prompt: id, domain, tokens."""


class AnswerSets:
    """The sets of one target. pool: number of different prompts in random order, among them those
    of the target's own answers."""

    def __init__(self, bench: Bench, pool: int) -> None:
        self.bench, self.pool = bench, pool
        self.folder = bench.work / "answers"

    @property
    def info(self) -> TargetInfo:
        return self.bench.model.info

    def rows(self, answers: Path) -> Iterator[AnswerRow]:
        """The documents of a set in their order."""
        return (document.row for document in AnswerSource(answers, None).documents(self.info))

    def made(self, name: str, key: object, make: Callable[[Path], None]) -> Path:
        """The set `name`, which `make` writes unless it exists with an equal key."""
        out = self.folder / f"{name}-{digest(key)}"
        if not (out / MANIFEST_FILE).is_file():
            make(out)
        return out

    # Prompts

    def prompts_of(self, answers: Path) -> Path:
        """A file with the prompts of a set."""
        file = self.folder / "prompts" / f"{digest(answers_facts(answers))}.jsonl"
        if not file.is_file():
            write_lines(file, map(prompt_line, self.rows(answers)))
        return file

    def written(self, answers: Path, count: int) -> list[Line]:
        """`count` prompts that the target writes from the beginnings of those of `answers`. Raises
        `UserError` if hardly any text is a new prompt."""
        prompts = rows_in(answers)
        each = max(BEGUN, math.ceil(LEAST_BEGUN / prompts))
        config, begun = FeedbackConfig(variations=each), each * prompts
        folder = self.folder / f"written-{digest([answers_facts(answers), wishes(config)])}"
        files: list[Path] = []
        found: list[Line] = []
        while len(found) < count:
            file = folder / f"{len(files):04d}.jsonl"
            if not file.is_file():
                pair, seed = (answers, answers / RECORDS), len(files)
                write_variations(self.bench.model, [pair], file, config, seed, files)
            new = list(read_lines([file]))
            if len(new) < max(1, begun // 100):
                raise UserError(
                    f"{len(found) + len(new)} prompts are written from those of '{answers}', "
                    f"{count} are needed, and of {begun} further texts {len(new)} were new ones. "
                    "Ask for fewer answers."
                )
            files.append(file)
            found += new
        return found[:count]

    def answered(self, name: str, prompts: Path, *overrides: str) -> Path:
        """The target's greedy answers to a file of prompts, without prompts that repeat others."""
        words = ["data=embedded", f"data.path={prompts}", *overrides]
        words += [f"data.{key}={value}" for key, value in TOKEN_ROWS.items()]
        words += [f"run.threads={self.bench.threads}"]
        sampling = settings_of("generate", EXPERIMENT, *overrides).with_defaults["sampling"]
        run = self.folder / f"{name}-{digest([overrides, sampling, file_sha256(prompts)])}"
        if not (run / "generate" / MANIFEST_FILE).is_file():
            run_on_target("generate", self.bench.place.target, run, *words)
        return run / "generate"

    # Sets

    def ordered(self, more: int) -> list[Line]:
        """The prompts of the pool in random order with their spare ones, and `more` after them."""
        own, wanted = self.bench.place.answers, with_spare(self.pool)
        lines = [prompt_line(row) for row in self.rows(own)]
        needed, mixed = wanted + more - len(lines), max(0, wanted - len(lines))
        written = self.written(own, needed) if needed > 0 else []
        lines += written[:mixed]
        random.Random("answer sets").shuffle(lines)
        return [*lines, *written[mixed:]][: wanted + more]

    @cached_property
    def all(self) -> Path:
        """The answers to all prompts of the pool."""
        own, wanted = self.bench.place.answers, with_spare(self.pool)
        key = [answers_facts(own), wanted, wishes(FeedbackConfig())]
        prompts = self.folder / "prompts" / f"all-{digest(key)}.jsonl"
        if not prompts.is_file():
            write_lines(prompts, self.ordered(0))
        return at_least(self.pool, self.answered("all", prompts))

    def further(self, count: int) -> Path:
        """The answers to prompts after those of the pool, at least `count`."""
        own, wanted = self.bench.place.answers, with_spare(self.pool)
        key = [answers_facts(own), wanted, count, wishes(FeedbackConfig())]
        prompts = self.folder / "prompts" / f"further-{digest(key)}.jsonl"
        if not prompts.is_file():
            write_lines(prompts, self.ordered(with_spare(count))[wanted:])
        return at_least(count, self.answered("further", prompts))

    def first(self, count: int) -> Path:
        """The first `count` answers; beyond the pool, all of it and further ones."""
        if count > self.pool:
            parts = [self.first(self.pool), self.further(count - self.pool)]
            return self.joined(f"first-{count}", parts, count)
        return self.made(
            f"first-{count}",
            [answers_facts(self.all), count],
            lambda out: write_set(out, islice(self.rows(self.all), count), self.all),
        )

    def flattest(self, answers: Path, count: int) -> Path:
        """The `count` flattest documents of a set, in the set's order."""

        def make(out: Path) -> None:
            rows = list(self.rows(answers))
            order = np.argsort(-flatness(self.bench.model, rows), kind="stable")
            write_set(out, (rows[index] for index in sorted(order[:count])), answers)

        return self.made(f"flattest-{count}", [answers_facts(answers), count], make)

    def from_few(self, few: int, count: int) -> Path:
        """The first `few` answers, and answers to prompts that the target writes from theirs, up to
        `count`."""
        start = self.first(few)
        key = [answers_facts(start), count, wishes(FeedbackConfig())]
        prompts = self.folder / "prompts" / f"few-{digest(key)}.jsonl"
        if not prompts.is_file():
            write_lines(prompts, self.written(start, with_spare(count - few)))
        return self.joined(f"from-{few}", [start, self.answered("few", prompts)], count)

    def branched(self, answers: Path, checkpoint: Path, depth: int, count: int) -> Path:
        """A set, and answers that continue from tokens that the target rejected there although it
        held them likely, up to `count` if there are enough. checkpoint: the drafter whose chains of
        `depth` were rejected."""
        weights = file_sha256(checkpoint / WEIGHTS_FILE)
        each = math.ceil((count - rows_in(answers)) / rows_in(answers))
        config = FeedbackConfig(branches=each)
        key = [answers_facts(answers), weights, depth, count, wishes(config)]
        branches = self.folder / "prompts" / f"branches-{digest(key)}.jsonl"
        if not branches.is_file():
            words = ["sampling.shape=chain", f"sampling.depth={depth}"]
            words += [f"generate.drafter={checkpoint}", "generate.records.enabled=true"]
            drafted = self.answered("drafted", self.prompts_of(answers), *words)
            write_branches([(drafted, drafted / RECORDS)], branches, config)
        if not branches.stat().st_size:
            return answers
        return self.joined("branched", [answers, self.answered("branches", branches)], count)

    def joined(self, name: str, folders: Sequence[Path], count: int) -> Path:
        """The documents of several folders one after the other, at most `count`."""
        return self.made(
            name,
            [[answers_facts(folder) for folder in folders], count],
            lambda out: write_set(
                out, islice(chain.from_iterable(map(self.rows, folders)), count), folders[0]
            ),
        )


def with_spare(count: int) -> int:
    """The number of prompts of which at least `count` are answered."""
    return math.ceil(count * (1 + SPARE))


def at_least(count: int, answers: Path) -> Path:
    """`answers`; raises `UserError` if there are fewer than `count`."""
    if rows_in(answers) < count:
        raise UserError(
            f"{rows_in(answers)} different prompts were answered in '{answers}', and {count} "
            "answers are needed: ask for fewer."
        )
    return answers


def wishes(config: FeedbackConfig) -> Line:
    """The settings that decide which variations and branches are written."""
    return {k: v for k, v in asdict(config).items() if k.startswith(("variation", "branch"))}


def prompt_line(row: AnswerRow) -> Line:
    """The prompt of a document."""
    begin = row["spans"][0][0]
    return {"id": row["id"], "domain": row["domain"], "tokens": row["tokens"][:begin]}


def rows_in(answers: Path) -> int:
    """Number of documents in a set."""
    return sum(entry["rows"] for entry in read_answers(answers)["shards"])


def write_set(out: Path, rows: Iterable[AnswerRow], source: Path) -> None:
    """Write documents as a folder of answers; their origin is recorded as in `source`."""
    shards: list[FileEntry] = []
    supervised, left = 0, iter(rows)
    while part := list(islice(left, SHARD_ROWS)):
        name = f"{SHARDS}/shard-{len(shards):05d}.parquet"
        write_bytes(out / name, parquet_bytes(pa.Table.from_pylist(part, SHARD_SCHEMA)))
        shards.append(file_entry(out, name, rows=len(part)))
        supervised += sum(end - begin for row in part for begin, end in row["spans"])
    count = sum(entry["rows"] for entry in shards)
    counts = {"input": count, DONE: count, "failed": 0, "skipped": 0, "tokens": supervised}
    facts = {key: value for key, value in read_answers(source).items() if key in KEPT}
    write_manifest(out, "generate", {**facts, "counts": counts, "shards": shards})


@torch.no_grad()
def flatness(target: TargetModel, rows: Sequence[AnswerRow]) -> Floats:
    """How flat the target's distributions are at the supervised tokens of each document: the mean
    over its supervised tokens of the cosine between the distribution p that predicts the token and
    the uniform one, 1 / (sqrt(V) |p|), in (0, 1] ("Flatter Tokens are More Valuable for Speculative
    Draft Model Training", Fan et al., arXiv 2601.18902, which keeps the flattest documents)."""
    found = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["tokens"]))
    begin = 0
    while begin < len(order):
        taken = [order[begin]]
        for index in order[begin + 1 :]:  # lengths ascend, so the last one's is the batch's
            if (len(taken) + 1) * len(rows[index]["tokens"]) > BATCH_TOKENS:
                break
            taken.append(index)
        found[taken] = _flatness_together(target, [rows[index] for index in taken])
        begin += len(taken)
    return found


def _flatness_together(target: TargetModel, rows: Sequence[AnswerRow]) -> list[float]:
    """`flatness` of the rows of one batch [B, T]. They are padded on the right, which no position
    reads."""
    length = max(len(row["tokens"]) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    predicts = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        size = len(row["tokens"])
        tokens[number, :size] = torch.tensor(row["tokens"])
        supervised = mask_of([(low, high) for low, high in row["spans"]], size)
        predicts[number, : size - 1] = torch.from_numpy(supervised[1:])
    states = target.last_states(tokens)
    chances = target.weights.project(states[predicts]).float().softmax(-1)  # [M, V]
    flat = 1 / (chances.norm(dim=-1) * math.sqrt(chances.shape[-1]))
    parts = flat.split(predicts.sum(1).tolist())
    return [float(part.double().mean()) if len(part) else 0.0 for part in parts]
