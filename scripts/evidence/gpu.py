"""Acceptance of a device: `python -m scripts.evidence.gpu correctness|speed|contexts|training --out
FOLDER`.

Each of the four runs is planned to take at most ten minutes on a GPU of the H100 class; none has
run there as a whole. It needs no network and no package beside torch, transformers, triton and
pytest, and writes a file per part as soon as the part ends. The status is 0 if every part ran and
passed its limits, else 1. `--size tiny` runs the same parts on toy shapes, for a CPU. docs/gpu.md
describes the parts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from heads.api.errors import UserError, suggest
from inference.target.loading import DTYPES, pick_device
from scripts.evidence.acceptance import correctness, speed, training
from scripts.evidence.acceptance.parts import CALL_SECONDS, Part, Setting, run_parts
from scripts.evidence.acceptance.shapes import SIZES
from scripts.tools.common import command

STAGES: Mapping[str, Sequence[Part]] = {
    "correctness": correctness.PARTS,
    "speed": speed.PARTS,
    "contexts": speed.CONTEXTS,
    "training": training.PARTS,
}


def report(given: argparse.Namespace) -> int:
    """Run the parts of one stage; returns the exit status."""
    parts = STAGES[given.stage]
    names = [part.name for part in parts]
    for name in given.only or ():
        if name not in names:
            raise UserError(f"{given.stage} has no part '{name}'.{suggest(name, names)}")
    chosen = [part for part in parts if not given.only or part.name in given.only]
    device = pick_device(given.device)
    size = given.size or ("full" if device.type == "cuda" else "tiny")
    dtype = given.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    setting = Setting(device, DTYPES[dtype], SIZES[size])

    def alone(part: Part, seconds: float) -> list[str]:
        where = ["--out", str(given.out), "--device", str(device), "--dtype", dtype]
        which = ["--size", size, "--seconds", str(seconds), "--only", part.name]
        return ["-m", "scripts.evidence.gpu", given.stage, *where, *which]

    times = given.out, given.seconds, given.command
    passed = run_parts(given.stage, chosen, setting, *times, jobs=given.jobs, alone=alone)
    print(f"{given.stage}: {'passed' if passed else 'NOT PASSED'}, see {given.out}")
    return 0 if passed else 1


main = command(
    report,
    stage={"positional": True, "choices": sorted(STAGES)},
    out=(Path("gpu"), "folder of the reports"),
    device="auto",
    dtype={"choices": sorted(DTYPES), "help": "default: bfloat16 on a GPU, float32 elsewhere"},
    size={"choices": sorted(SIZES), "help": "default: full on a GPU, tiny elsewhere"},
    seconds=(CALL_SECONDS, "parts that would end later are not begun"),
    jobs=(1, "parts that measure no time run so many at once, in processes of their own"),
    only={"nargs": "*", "metavar": "PART", "help": "parts to run; default: all"},
)

if __name__ == "__main__":
    sys.exit(main())
