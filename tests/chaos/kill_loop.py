"""Kill a loop of rounds again and again: it must end like the same loop without a kill.

`kill_and_compare` runs one loop twice. One copy gets SIGKILL at random points, each after the
progress of the one before it, and is repeated after each; then both results are compared: the
weights of the best drafter bit by bit, and loop.json without its times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.api.checkpoint import WEIGHTS_FILE
from scripts import cli
from scripts.evidence import rounds
from scripts.evidence.common import read_json
from scripts.stages.loop.facts import LOOP_FILE
from scripts.tools.common import REPORTS, command
from tests import forked

CLOCKED = ("seconds", "gpu_hours", "plain_seconds", "drafted_seconds", "speedup", "speedup_ci95")
"""Keys of loop.json that hold what a clock said."""
LONGEST_SECONDS = 1200.0
PLAY = "import sys; from tests.chaos.kill_loop import play; play(sys.argv[1:])"
FEW = [
    rounds.RECIPE,
    *rounds.own_overrides("distilled"),
    *"debug=fast sampling.batch_size=1 loop.round.overrides=[] loop.round.prompts=share".split(),
    *"loop.round.patience=0 train.save_every=2 train.parity=false data.limit=24 run.threads=1".split(),
]
"""The loop of the report: the embedded target, a few prompts and steps."""


def kill_and_compare(overrides: Sequence[str], folder: Path, kills: int) -> dict[str, Any]:
    """Play `headstart loop` with `overrides` calmly and killed `kills` times, below `folder`:
    killed where, and what is the same.

    overrides must leave run.root and run.name alone, and give paths that hold in any working
    directory.
    """
    draw = random.Random(0)
    calm, killed = folder / "calm", folder / "killed"
    begun = time.monotonic()
    finish(overrides, calm)
    lasted = time.monotonic() - begun
    kept, places = files(calm), []
    stride = max(1, len(kept) // (kills + 1))
    for _ in range(kills):
        more = draw.randint(max(1, stride // 2), stride)
        place = kill(overrides, killed, kept, more, draw.uniform(0.0, 0.2))
        if place is None:
            break
        places.append(place)
    finish(overrides, killed)
    differing = differences(timeless(summary(calm)), timeless(summary(killed)))
    return {
        "kills": len(places),
        "places": places,
        "same_weights": weights(calm) == weights(killed),
        "same_summary": not differing,
        "differing": differing,
        "rounds": len(summary(calm)["rounds"]),
        "calm_seconds": lasted,
    }


def play(overrides: list[str]) -> None:
    """The loop in this process and its working directory, its output in log."""
    file = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(cli.main(["loop", *overrides, "run.root=.", "run.name=run"]))


def started(overrides: Sequence[str], folder: Path) -> forked.Process:
    """A process that plays the loop in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return forked.start("-c", PLAY, *overrides, cwd=folder)


def finish(overrides: Sequence[str], folder: Path) -> None:
    """Play the loop to its end."""
    process = started(overrides, folder)
    status = process.wait(LONGEST_SECONDS)
    log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    assert status == 0, f"the loop ended with status {status}:\n{log[-3000:]}"


def kill(
    overrides: Sequence[str], folder: Path, kept: set[str], more: int, delay: float
) -> str | None:
    """Kill the loop `delay` seconds after it has written `more` further files of `kept`, those that
    stay; so that points are spread over its work however fast the machine is. Returns where it was,
    or None if it ended before.
    """
    reached = len(files(folder) & kept) + more
    process = started(overrides, folder)
    log = folder / "log"
    while process.poll() is None and len(files(folder) & kept) < reached:
        time.sleep(0.005)
    time.sleep(delay)
    if process.poll() is not None:
        return None
    process.kill()
    process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.strip("[]") for line in reversed(lines) if line.startswith("[")), "start")


def files(folder: Path) -> set[str]:
    """Every file below the run, as a path in it."""
    found: set[str] = set()
    try:
        for path in (folder / "run").rglob("*"):
            if path.is_file():
                found.add(str(path.relative_to(folder)))
    except FileNotFoundError:  # a folder was renamed meanwhile: what has been seen counts
        pass
    return found


def summary(folder: Path) -> dict[str, Any]:
    """The loop.json of a finished run."""
    content: dict[str, Any] = json.loads((folder / "run" / LOOP_FILE).read_text(encoding="utf-8"))
    return content


def weights(folder: Path) -> list[bytes]:
    """The weights of the best round and of the run's drafter."""
    best = folder / summary(folder)["best"]["checkpoint"]
    return [
        path.read_bytes()
        for path in (
            best / WEIGHTS_FILE,
            *sorted((folder / "run" / "train").glob(f"*/best/{WEIGHTS_FILE}")),
        )
    ]


def timeless(content: Any) -> Any:
    """`content` without what a clock said."""
    if isinstance(content, Mapping):
        return {key: timeless(value) for key, value in content.items() if key not in CLOCKED}
    if isinstance(content, list):
        return [timeless(item) for item in content]
    return content


def differences(ours: Any, theirs: Any, place: str = "loop.json") -> list[str]:
    """Where two contents differ: a line with the place and both values for each."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = ((f"{place}.{key}", ours[key], theirs[key]) for key in ours)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = ((f"{place}[{n}]", *both) for n, both in enumerate(zip(ours, theirs, strict=True)))
    else:
        return [] if ours == theirs else [f"{place}: {ours!r}, killed {theirs!r}"]
    return [line for where, mine, other in pairs for line in differences(mine, other, where)]


def report(given: argparse.Namespace) -> None:
    """Kill a small loop on the embedded target and put the result into docs/reports/loop.json."""
    folder = Path(tempfile.mkdtemp(prefix="headstart-kills-"))
    try:
        found = {"settings": FEW, **kill_and_compare(FEW, folder, given.kills)}
        del found["differing"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rounds.write({**read_json(REPORTS / "loop.json"), "killed": found})


main = command(report, kills=10)

if __name__ == "__main__":
    sys.exit(main())
