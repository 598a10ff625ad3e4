"""Faults at chosen places: each is injected once, where it hurts most.

A fault is survived when the rerun (or the restart) has the result of a run without it, or refused
when one clear message names the cause and nothing that was written is lost. Full-disk faults mount
a small tmpfs and therefore need root.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.faults import answers, features, training  # noqa: F401 (registers the faults)
from tests.chaos.ground import FAULTS, Fault, Ground, UnsurvivedError
from tests.chaos.rows import Row


def attack(seed: int, count: int, folder: Path, names: Sequence[str] = ()) -> list[Row]:
    """Inject the faults `names`, or `count` of all that there are: a row for each."""
    chosen = names or random.Random(seed).sample(list(FAULTS), min(count, len(FAULTS)))
    ground = Ground(folder)
    return [inject(name, FAULTS[name], ground) for name in FAULTS if name in chosen]


def inject(name: str, injected: Fault, ground: Ground) -> Row:
    """Inject one fault."""
    row = Row("faults", f"{name}: {injected.what}, {injected.where}")
    try:
        found = injected.case(ground)
        wrong = "" if found.ok else f"{found}"
    except UnsurvivedError as error:
        wrong = str(error)
    row.note(wrong.replace(str(ground.folder), "..."))
    return row
