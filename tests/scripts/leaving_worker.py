"""Runs `headstart` as a program of its own and sends it a scheduler's signal at a named place.

    python -m tests.scripts.leaving_worker signals '[[["train", ...], "train.setup:load_target",
    "SIGTERM"], ...]' python -m tests.scripts.leaving_worker ranks FOLDER '["train", ...]'
    train.setup:Run.compare_paths

signals: every entry is one run in a forked process (torch is imported once), which gets the signal
when it comes to the place, and once more on its way out; null lets it finish. The exit statuses are
printed as JSON.

ranks: two processes of one launch. The first one stays at the place, the second one goes on until
it waits for the first. Then both get SIGTERM, the waiting one first and alone. Their statuses are
printed, the waiting one's first.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inference.decoding.engine  # noqa: F401 - what all of the forked processes need
import scripts.run.runner  # noqa: F401
import train.run  # noqa: F401
from scripts.cli import main
from scripts.run import signals as leaving
from tests.loopback import free_port
from tests.waiting import until


def before(place: str, act: Callable[[], None]) -> None:
    """Let `act` happen when the function at `place` (module:dotted.name) is called."""
    module, path = place.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    plain = getattr(owner, name)

    def acted(*arguments: Any, **named: Any) -> Any:
        act()
        return plain(*arguments, **named)

    setattr(owner, name, acted)


def forked(work: Callable[[], int]) -> int:
    """Start `work` in a process of its own, which ends with what it returns; returns the process's
    id."""
    child = os.fork()
    if child:
        return child
    status = 70  # an exception, printed below
    try:
        status = work()
    except SystemExit as leaving_now:
        status = int(leaving_now.code or 0)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers and launchers tell more than once
    except Exception as error:  # noqa: BLE001 - a status of its own
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(child: int) -> int:
    """The exit status of a process; negative when a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def signals(jobs: list[list[Any]]) -> list[int]:
    """See the module."""
    statuses = []
    for command, place, name in jobs:

        def work(command: list[str] = command, place: str | None = place, name: str = name) -> int:
            if place is not None:
                before(place, lambda: os.kill(os.getpid(), signal.Signals[name]))
            return main(command)

        statuses.append(ended(forked(work)))
    return statuses


def ranks(folder: Path, command: list[str], place: str) -> list[int]:
    """See the module."""
    port = str(free_port())
    leaving.GRACE_SECONDS = 1.0
    there = folder / "there"

    def stay() -> None:
        there.touch()
        time.sleep(600)

    def work(rank: int) -> int:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(
            {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **{name: str(value) for name, value in own.items()},
            }
        )
        if rank == 0:
            before(place, stay)
        return main(command)

    children = [forked(lambda rank=rank: work(rank)) for rank in range(2)]
    until(there.exists, 600.0)
    time.sleep(2.0)  # the other process has nothing to do meanwhile but to come to where it waits
    statuses = []
    for child in reversed(children):
        os.kill(child, signal.SIGTERM)
        statuses.append(ended(child))
    return statuses


if __name__ == "__main__":
    if sys.argv[1] == "signals":
        print(json.dumps(signals(json.loads(sys.argv[2]))))
    else:
        print(json.dumps(ranks(Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])))
