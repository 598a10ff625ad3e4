"""Faults in `headstart features`: the store that trainings read, and the servers that they ask."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.fault_cases.ground import (
    CONTINUED,
    REFUSED,
    RETRIED,
    Damage,
    Ground,
    Outcome,
    UnsurvivedError,
    fault,
    flip_bit,
    trained_steps,
    truncate,
)

SMALL_SHARDS = "features.shard_mib=0.1"


def of_features(ground: Ground, *more: str) -> list[str]:
    """A command line of the features stage that fits the calm training."""
    return ["features", *(text for text in ground.train()[1:] if not text.startswith("decode.")), *more]


def store_command(ground: Ground, store: Path) -> list[str]:
    """The command line that writes a store for the calm training."""
    return of_features(ground, "features.format=fp32", f"features.path={store}", SMALL_SHARDS, "run.name=stores")


def stored_training(ground: Ground, store: Path, name: str) -> list[str]:
    """The calm training, from a store."""
    return ground.train(f"run.name={name}", "features=store", "features.format=fp32", f"features.path={store}")


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
    return ground.compare_training(ground.folder / f"outputs/{name}/train/medusa", REFUSED, ended.complaint)


@contextmanager
def server(ground: Ground, port: int) -> Iterator[subprocess.Popen[str]]:
    """A feature server on this port, ready to answer."""
    process = ground.start(of_features(ground, "features.serve=true", f"features.port={port}", "run.name=serving"))
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


def free_port() -> int:
    """A port that no one listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asking(ground: Ground, name: str, port: int, retries: int) -> list[str]:
    """The calm training, from a server."""
    return ground.train(
        f"run.name={name}", "features=remote", "features.format=fp32", f"features.servers=[http://127.0.0.1:{port}]",
        "features.timeout_seconds=3", f"features.retries={retries}", "features.ahead=1",
    )  # fmt: skip


@fault("hangs", "feature server")
def server_hangs(ground: Ground) -> Outcome:
    """The error names the server; the training continues when it answers again."""
    port, folder = free_port(), ground.folder / "outputs/hanging/train/medusa"
    command = asking(ground, "hanging", port, retries=1)
    with server(ground, port) as process:
        pid = process.pid
        ended = ground.strike(command, lambda: running(folder, 3), signal.SIGSTOP, victim=lambda _: pid)
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
