"""Faults in `headstart features`: the store that trainings read, and the servers that they ask."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.ground import (
    CONTINUED,
    LONGEST,
    REFUSED,
    RETRIED,
    Damage,
    Ground,
    Outcome,
    UnsurvivedError,
    fault,
    flip_bit,
    small_disk,
    trained_steps,
    truncate,
)
from tests.loopback import free_port
from train.features.store.claims import Claims

SMALL_SHARDS = "features.shard_mib=0.1"
DISK_KIB = 80 * 1024
"""Room for the store and for the reserve that writers leave to others (64 MiB)."""


def of_features(ground: Ground, *more: str) -> list[str]:
    """A command line of the features stage that fits the calm training."""
    return [
        "features",
        *(text for text in ground.train()[1:] if not text.startswith("decode.")),
        *more,
    ]


def store_command(ground: Ground, store: Path) -> list[str]:
    """The command line that writes a store for the calm training."""
    return of_features(
        ground, "features.format=fp32", f"features.path={store}", SMALL_SHARDS, "run.name=stores"
    )


def stored_training(ground: Ground, store: Path, name: str) -> list[str]:
    """The calm training, from a store."""
    return ground.train(
        f"run.name={name}", "features=store", "features.format=fp32", f"features.path={store}"
    )


def shards(store: Path) -> list[Path]:
    """The shards of a store."""
    return sorted(store.rglob("*.safetensors"))


@fault("kill -9", "features, while shards are written")
def store_killed(ground: Ground) -> Outcome:
    """What is missing is written; a training from it equals one that runs the target."""
    store = ground.folder / "store_killed"
    command = store_command(ground, store)
    ground.strike(command, lambda: len(shards(store)) >= 2)
    ground.must(ground.run(command))
    ground.must(ground.run(stored_training(ground, store, "store_killed")))
    return ground.compare_training(ground.folder / "outputs/store_killed/train/medusa", CONTINUED)


@fault("kill -9 of one writer of two", "features, while both write shards")
def store_writer_killed(ground: Ground) -> Outcome:
    """The other one takes the dead writer's shard over and writes all that is missing.

    Whichever claims a shard first is held there until the other one has written some, so that both
    are at work when it dies.
    """
    store = ground.folder / "store_writer_killed"
    writers = {
        process.pid: process
        for process in (ground.start(store_command(ground, store)) for _ in range(2))
    }
    claims = Claims(store)
    try:
        until(lambda: any(claim.pid in writers for claim in claims.all().values()), writers)
        victim = next(claim.pid for claim in claims.all().values() if claim.pid in writers)
        hold(victim, store)
        held = set(claims.all())
        until(lambda: len(shards(store)) >= 3 and set(claims.all()) != held, writers)
        os.kill(victim, signal.SIGKILL)
        ground.end(writers.pop(victim))
        ((_, other),) = writers.items()
        ended = ground.must(ground.end(other))
    finally:
        for process in writers.values():
            process.kill()
    if not (store / "manifest.json").is_file():
        raise UnsurvivedError(f"the other writer did not end the store: {ended.words[-400:]}")
    ground.must(ground.run(stored_training(ground, store, "store_writer_killed")))
    return ground.compare_training(
        ground.folder / "outputs/store_writer_killed/train/medusa", CONTINUED
    )


def until(ready: Callable[[], bool], writers: dict[int, subprocess.Popen[str]]) -> None:
    """Wait until `ready`; raises `UnsurvivedError` when a writer ends before that, or it takes too
    long."""
    deadline = time.monotonic() + LONGEST
    while not ready():
        for process in writers.values():
            if process.poll() is not None:
                raise UnsurvivedError(
                    f"a writer ended before the fault came: {process.communicate()[0][-600:]}"
                )
        if time.monotonic() > deadline:
            raise UnsurvivedError("did not get to the point where the fault was to come")
        time.sleep(0.002)


def hold(pid: int, store: Path) -> None:
    """Stop a writer where it stands, but not while claims change hands, for which the other one
    would wait."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        folder = os.open(store / "claims", os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            os.kill(pid, signal.SIGCONT)
        finally:
            os.close(folder)
        time.sleep(0.002)


@fault("full disk", "features, while shards are written")
def store_full_disk(ground: Ground) -> Outcome:
    """Somebody else fills the disk, which had room at the start: one message; with room again the
    same command continues."""
    with small_disk(ground.folder / "small_store", DISK_KIB) as disk:
        command = store_command(ground, disk / "store")
        writer = ground.start(command)
        until(lambda: len(shards(disk / "store")) >= 2, {writer.pid: writer})
        os.kill(writer.pid, signal.SIGSTOP)  # filling takes a moment
        fill(disk / "of_somebody_else")
        os.kill(writer.pid, signal.SIGCONT)
        ended = ground.must(ground.end(writer), 2)
        (disk / "of_somebody_else").unlink()
        ground.must(ground.run(command))
        ground.must(ground.run(stored_training(ground, disk / "store", "store_full_disk")))
    return ground.compare_training(
        ground.folder / "outputs/store_full_disk/train/medusa", CONTINUED, ended.complaint
    )


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


@fault("flipped bit", "shard of features that train reads")
def store_flipped(ground: Ground) -> Outcome:
    """Found by the shard's hash."""
    store = ground.folder / "store_flipped"
    ground.must(ground.run(store_command(ground, store)))
    return damaged_store(ground, store, "store_flipped", flip_bit)


@fault("truncated", "shard of features that train reads")
def store_truncated(ground: Ground) -> Outcome:
    """Found by the shard's size."""
    store = ground.folder / "store_truncated"
    ground.must(ground.run(store_command(ground, store)))
    return damaged_store(ground, store, "store_truncated", truncate)


def damaged_store(ground: Ground, store: Path, name: str, how: Damage) -> Outcome:
    """It is refused by name; what the message says to do mends it."""
    shard = shards(store)[1]
    how(shard)
    command = stored_training(ground, store, name)
    ended = ground.refused(command, shard.name)
    shard.unlink()
    ground.must(ground.run(store_command(ground, store)))
    ground.must(ground.run(command))
    return ground.compare_training(
        ground.folder / f"outputs/{name}/train/medusa", REFUSED, ended.complaint
    )


@contextmanager
def server(ground: Ground, port: int) -> Iterator[subprocess.Popen[str]]:
    """A feature server on this port, ready to answer."""
    process = ground.start(
        of_features(ground, "features.serve=true", f"features.port={port}", "run.name=serving")
    )
    assert process.stdout is not None
    try:
        while line := process.stdout.readline():
            if "features of" in line:
                break
        if process.poll() is not None:
            raise UnsurvivedError("the feature server did not start")
        yield process
    finally:
        process.kill()
        process.communicate()


def asking(ground: Ground, name: str, port: int, retries: int) -> list[str]:
    """The calm training, from a server."""
    return ground.train(
        f"run.name={name}",
        "features=remote",
        "features.format=fp32",
        f"features.servers=[http://127.0.0.1:{port}]",
        "features.timeout_seconds=3",
        f"features.retries={retries}",
        "features.ahead=1",
    )


@fault("hangs", "feature server")
def server_hangs(ground: Ground) -> Outcome:
    """The error names the server; the training continues when it answers again."""
    port, folder = free_port(), ground.folder / "outputs/hanging/train/medusa"
    command = asking(ground, "hanging", port, retries=1)
    with server(ground, port) as process:
        pid = process.pid
        ended = ground.strike(
            command, lambda: running(folder, 3), signal.SIGSTOP, victim=lambda _: pid
        )
        ground.must(ended, 2)
        if str(port) not in ended.words:
            raise UnsurvivedError(f"the message does not name the server: {ended.words[-400:]}")
        process.send_signal(signal.SIGCONT)
        ground.must(ground.run(command))
    return ground.compare_training(folder, REFUSED, ended.complaint)


@fault("kill -9, and started again", "feature server")
def server_killed(ground: Ground) -> Outcome:
    """Requests are repeated until the server is there again."""
    port, folder = free_port(), ground.folder / "outputs/asking/train/medusa"
    with server(ground, port) as process:
        training = ground.start(asking(ground, "asking", port, retries=12))
        while training.poll() is None and not running(folder, 3):
            time.sleep(0.01)
        process.kill()
    with server(ground, port):
        ground.must(ground.end(training))
    return ground.compare_training(folder, RETRIED)


def running(folder: Path, steps: int) -> bool:
    """Whether a training has done so many steps."""
    return (folder / "log.jsonl").is_file() and len(trained_steps(folder)) >= steps
