"""Attack every stage and both servers, and report how many attempts of each kind failed.

    python -m tests.chaos                                  all parts, and docs/reports/chaos.json
    python -m tests.chaos --only disks damage              some, and their rows of the report
    python -m tests.chaos --only damage --count 50         with another number of attempts
    python -m tests.chaos --only train_killed              some of the faults
    python -m tests.chaos --sample                         a few of each, printed only (CI)

What is done follows from --seed; when something is hit depends on the machine as well.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.chaos import bad_inputs, damage, disks, faults, interruptions, protocol
from tests.chaos.ground import FAULTS
from tests.chaos.rows import Row, content, save, show
from tests.chaos.stages import alone

REPORT = Path(__file__).resolve().parents[2] / "docs" / "reports" / "chaos.json"
COMMAND = "python -m tests.chaos"
Attack = Callable[[int, int, Path], list[Row]]
"""From seed, number of attempts and an empty folder to rows."""


@dataclass(frozen=True)
class Part:
    """An attack, with its number of attempts: all of them, and a sample."""

    attack: Attack
    count: int
    sample: int


PARTS = {
    "faults": Part(faults.attack, len(FAULTS), 1),
    "interruptions": Part(interruptions.attack, 200, 8),
    "damage": Part(damage.attack, 600, 12),
    "disks": Part(disks.attack, len(disks.WAYS) * len(alone()), 4),
    "inputs": Part(lambda seed, count, _: [bad_inputs.attack(seed, count)], 600, 12),
    "protocol": Part(protocol.attack, 1000, 100),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print, write; returns 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n")[0])
    names = [*PARTS, *FAULTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"parts or faults: {names}"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="attempts of each part")
    parser.add_argument("--sample", action="store_true", help="a few attempts of each part")
    parser.add_argument(
        "--folder", type=Path, help="where it happens; kept (default: a temporary one)"
    )
    parser.add_argument(
        "--out", type=Path, help=f"the report (default: {REPORT.name}, with --sample none)"
    )
    given = parser.parse_args(arguments)
    out = given.out or (None if given.sample else REPORT)
    found: list[Row] = []
    for name, attack, count in chosen(given):
        rows = run(name, attack, given.seed, count, given.folder)
        found += rows
        if out is not None:
            command = f"{COMMAND} --only {name} --seed {given.seed} --count {count}"
            lines = [content(row, given.seed, command) for row in rows]
            save(out, lines, {name} & PARTS.keys())
    show(found)
    return 1 if any(row.failed for row in found) else 0


def chosen(given: argparse.Namespace) -> list[tuple[str, Attack, int]]:
    """Name, attack and number of attempts of what is asked for: whole parts, then single faults."""
    wanted = given.only or list(PARTS)
    found = []
    for name, part in PARTS.items():
        if name in wanted:
            count = given.count or (part.sample if given.sample else part.count)
            found.append((name, part.attack, count))
    for name in FAULTS:
        if name in wanted:
            found.append((name, one_fault(name), 1))
    return found


def one_fault(name: str) -> Attack:
    return lambda seed, count, folder: faults.attack(seed, count, folder, [name])


def run(name: str, attack: Attack, seed: int, count: int, folder: Path | None) -> list[Row]:
    """The rows of one attack, which happens below `folder`."""
    at = (folder or Path(tempfile.mkdtemp(prefix="headstart-chaos-"))).resolve() / name
    begun = time.monotonic()
    try:
        at.mkdir(parents=True)
        rows = attack(seed, count, at)
    finally:
        if folder is None:
            shutil.rmtree(at.parent, ignore_errors=True)
    tried, failed = sum(row.tried for row in rows), sum(row.failed for row in rows)
    seconds = time.monotonic() - begun
    Console(stderr=True).print(f"{name}: tried {tried}, failed {failed}, {seconds:.0f} s")
    return rows


if __name__ == "__main__":
    sys.exit(main())
