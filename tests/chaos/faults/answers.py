"""Faults in `headstart generate`, and in the answers that `headstart train` reads."""

from __future__ import annotations

import shutil
import signal
from typing import Any

from tests.chaos.ground import (
    CONTINUED,
    PROMPTS,
    REFUSED,
    Damage,
    Ground,
    Outcome,
    fault,
    flip_bit,
    grow_disk,
    rank_of,
    small_disk,
    truncate,
    write_lines,
)


def parts(ground: Ground, name: str) -> int:
    """How many part files a generate has written."""
    return len(list((ground.folder / "outputs" / name / "generate" / "parts").glob("*.parquet")))


@fault("kill -9", "generate, while answers are written")
def generate_killed(ground: Ground) -> Outcome:
    """What was written stays; the rest is answered."""
    command = ground.generate("run.name=generate_killed")
    ground.strike(command, lambda: parts(ground, "generate_killed") >= 3)
    ground.must(ground.run(command))
    return ground.compare_answers(ground.folder / "outputs/generate_killed/generate", CONTINUED)


@fault("kill -9", "generate, while parts are merged into shards")
def generate_killed_while_merging(ground: Ground) -> Outcome:
    """Shards are merged again from the parts."""
    command = ground.generate("run.name=merging", "generate.shard_rows=1")
    folder = ground.folder / "outputs/merging/generate"
    ground.strike(command, lambda: len(list((folder / "shards").glob("*.parquet"))) >= 2)
    ground.must(ground.run(command))
    found = ground.compare_answers(folder, CONTINUED)
    found.identical = None  # other shards on purpose: ids are compared
    return found


@fault("SIGTERM", "generate")
def generate_terminated(ground: Ground) -> Outcome:
    """What is finished is written first; exit status 0."""
    command = ground.generate("run.name=generate_terminated")
    ended = ground.strike(
        command, lambda: parts(ground, "generate_terminated") >= 2, signal.SIGTERM
    )
    ground.must(ended)
    ground.must(ground.run(command))
    return ground.compare_answers(ground.folder / "outputs/generate_terminated/generate", CONTINUED)


@fault("kill -9 of one rank of two", "generate under torchrun")
def generate_rank_killed(ground: Ground) -> Outcome:
    """The launcher ends the other rank; the same launch continues."""
    command = ground.generate("run.name=ranks")
    ground.strike(
        command,
        lambda: parts(ground, "ranks") >= 3,
        victim=lambda pid: rank_of(pid, 1),
        processes=2,
    )
    ground.must(ground.run(command, processes=2))
    return ground.compare_answers(ground.folder / "outputs/ranks/generate", CONTINUED)


@fault("full disk", "generate")
def generate_full_disk(ground: Ground) -> Outcome:
    """One message; with more room the same command continues."""
    with small_disk(ground.folder / "small", 48) as disk:
        command = ground.generate("run.name=full", f"run.root={disk}")
        ended = ground.must(ground.run(command), 2)
        grow_disk(disk, 4096)
        ground.must(ground.run(command))
        return ground.compare_answers(disk / "full" / "generate", CONTINUED, ended.complaint)


@fault("rows that are empty, broken or too long", "data set")
def bad_rows(ground: Ground) -> Outcome:
    """They are skipped with a reason; all other rows are answered, once."""
    good = [
        {"id": str(n), "domain": "code", "prompt": f"Write function number {n}."}
        for n in range(PROMPTS)
    ]
    bad: list[dict[str, Any]] = [
        {"id": "empty", "domain": "code", "prompt": ""},
        {"id": "none", "domain": "code", "prompt": None},
        {"id": "long", "domain": "code", "prompt": "word " * 20_000},
    ]
    path = write_lines(ground.folder / "bad.jsonl", [*good[:7], *bad, *good[7:]])
    ended = ground.must(ground.run([*ground.generate("run.name=bad"), f"data.path={path}"]))
    found = ground.compare_answers(ground.folder / "outputs/bad/generate", CONTINUED)
    found.identical = None  # other rows stand between, so batches and shard bytes differ
    found.words = ended.words.strip().splitlines()[-1]
    return found


@fault("no rows at all", "data set")
def empty_data(ground: Ground) -> Outcome:
    """Refused in one message."""
    path = write_lines(ground.folder / "nothing.jsonl", [])
    ended = ground.must(ground.run([*ground.generate("run.name=nothing"), f"data.path={path}"]), 2)
    return Outcome(REFUSED, words=ended.complaint)


@fault("flipped bit", "shard of answers that train reads")
def answers_flipped(ground: Ground) -> Outcome:
    """Found by the shard's hash."""
    return damaged(ground, "flipped", flip_bit)


@fault("truncated", "shard of answers that train reads")
def answers_truncated(ground: Ground) -> Outcome:
    """Found by the shard's size."""
    return damaged(ground, "truncated", truncate)


def damaged(ground: Ground, name: str, how: Damage) -> Outcome:
    """Train on a damaged copy of the answers: it must be refused by name, and the undamaged one
    then be accepted."""
    copy = ground.folder / f"answers_{name}"
    shutil.copytree(ground.answers, copy)
    shard = next(path for path in sorted(copy.rglob("*.parquet")))
    whole = shard.read_bytes()
    how(shard)
    command = [*ground.train(f"run.name={name}"), f"run.answers={copy}"]
    ended = ground.refused(command, shard.name)
    shard.write_bytes(whole)
    ground.must(ground.run(command))
    return ground.compare_training(
        ground.folder / f"outputs/{name}/train/medusa", REFUSED, ended.complaint
    )
