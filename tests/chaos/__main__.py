"""Inject every fault of `tests.chaos` for real and report how each one ended.

    python -m tests.chaos                                all of them, and docs/reports/faults.json
    python -m tests.chaos --only train_killed            some, printed only
    python -m tests.chaos --only train_killed --update   some, and their rows of the report

A fault is survived when the rerun (or the restart) has the result of a run without the fault, or
refused when one clear message names the cause and nothing that was written is lost. Full-disk
faults mount a small tmpfs and therefore need root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inference.manifest import write_bytes
from tests.chaos import answers, features, training  # noqa: F401 (registers the faults)
from tests.chaos.ground import FAILED, FAULTS, Fault, Ground, Outcome, UnsurvivedError

REPORT = Path(__file__).resolve().parents[2] / "docs" / "reports" / "faults.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject, print, write; returns 0 when every fault was survived or refused cleanly."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--only", nargs="+", choices=sorted(FAULTS), metavar="NAME", help=", ".join(FAULTS)
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="put the rows of --only into the report, in place of theirs",
    )
    parser.add_argument(
        "--folder", type=Path, help="where it happens; kept (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=REPORT)
    given = parser.parse_args(arguments)
    names = given.only or list(FAULTS)
    rows = inject(names, given.folder)
    show(rows)
    if not given.only or given.update:
        before = json.loads(given.out.read_text(encoding="utf-8"))["faults"] if given.only else []
        content = {"format": 1, "command": "python -m tests.chaos", "faults": merged(before, rows)}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(given.out, (json.dumps(content, indent=1) + "\n").encode())
    return 0 if all(row["ok"] for row in rows) else 1


def inject(names: Sequence[str], folder: Path | None) -> list[dict[str, Any]]:
    """One row per fault."""
    at = folder or Path(tempfile.mkdtemp(prefix="headstart-faults-"))
    at.mkdir(parents=True, exist_ok=True)
    ground, rows = Ground(at.resolve()), []
    console = Console(stderr=True)
    try:
        for name in names:
            begun = time.monotonic()
            row = row_of(name, FAULTS[name], ground)
            rows.append(row)
            what_was_seen = "" if row["ok"] else row["words"]
            console.print(
                f"{'ok ' if row['ok'] else 'BAD'} {name} {time.monotonic() - begun:.0f} s "
                f"{what_was_seen}"
            )
    finally:
        if folder is None:
            shutil.rmtree(at, ignore_errors=True)
    return rows


def merged(
    before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of a report with newer ones in place of theirs, in the order of the table."""
    found = {row["name"]: row for row in (*before, *rows)}
    return [found[name] for name in FAULTS if name in found]


def row_of(name: str, injected: Fault, ground: Ground) -> dict[str, Any]:
    """Inject one fault and describe how it ended."""
    try:
        found = injected.case(ground)
    except UnsurvivedError as error:
        found = Outcome(FAILED, words=str(error))
    words = found.words.replace(str(ground.folder), "...")
    values = asdict(found)
    return {
        "name": name,
        "what": injected.what,
        "where": injected.where,
        "outcome": values["outcome"],
        "samples_lost": values["lost"],
        "samples_doubled": values["doubled"],
        "identical": values["identical"],
        "ok": found.ok,
        "words": words,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    table = Table("fault", "where", "outcome", "lost", "doubled", "same result")
    for row in rows:
        same = {True: "yes", False: "NO", None: "-"}[row["identical"]]
        table.add_row(
            row["what"],
            row["where"],
            row["outcome"],
            str(row["samples_lost"]),
            str(row["samples_doubled"]),
            same,
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
