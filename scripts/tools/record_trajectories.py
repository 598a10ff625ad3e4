"""Writes acceptance trajectories of finished measurements: `python -m
scripts.tools.record_trajectories ARM=FOLDER ...`.

A trajectory is the number of accepted drafts in each pass of an arm. `scripts/tools/replay.py`
replays it for drafters without trained weights (`python -m scripts.evidence.gpu speed`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from heads.api.errors import UserError
from inference.manifest import write_bytes
from scripts.tools.common import REPORTS, command
from scripts.tools.replay import Trajectory


def report(given: argparse.Namespace) -> None:
    """Write the trajectories of all arms."""
    found = {}
    for source in given.sources:
        arm, equals, folder = source.partition("=")
        if not equals:
            raise UserError(
                f"arms are given as ARM=FOLDER, such as eagle3=outputs/demo/measure; given: "
                f"'{source}'."
            )
        trajectory = Trajectory.of_records(Path(folder), arm)
        found[arm] = {"accepted": list(trajectory.accepted), "source": trajectory.source}
    lines = (f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in found.items())
    write_bytes(given.out, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    print(given.out)


main = command(
    report,
    sources={"positional": True, "nargs": "+", "metavar": "ARM=FOLDER"},
    out=REPORTS / "trajectories.json",
)

if __name__ == "__main__":
    sys.exit(main())
