"""Compares training speed with vLLM's `speculators`: tokens per second and memory.

    python -m scripts.evidence.speculators --python PYTHON --answers outputs/families/generate

PYTHON is an interpreter that has speculators. Both sides have the same target, the same answers
(cut in the same way), the same architecture and 2 threads. Each side is a separate process; all are
alive at once and timed in turns. One step reads 4,096 positions on both sides: 8 rows of 512 for
Headstart, one packed row for the library. The library packs everything into one row, whose
attention is dense on a CPU, so it is also timed with shorter rows and compared at its fastest.
Memory is compared with equally many positions at once on both sides: 4,096, and 512 (ours
accumulates the gradients of 8 rows). The library's features are made beforehand and not timed with
its steps; ours are made in the step, so the comparison is to our disadvantage. The cost of making
the library's features with plain transformers is reported too. scripts.evidence.peers compares
quality.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.target.hardware import device_facts
from scripts.evidence.common import Facts, family_recipe, read_json, settings_of
from scripts.evidence.foreign.speculators_worker import Channel, peak_bytes
from scripts.evidence.sides import LENGTH, VERSION, Setting, Side, fresh
from scripts.stages.train import job_of
from scripts.tools.common import REPORTS, ROOT, TARGET, command
from train import setup
from train.distributed import join_world
from train.loop import Trainer
from train.memory import keep_freed_memory
from train.stopping import StopRequest

MODULE = "scripts.evidence.speculators"
ROWS = 8
PLACES = LENGTH * ROWS
SHORTER = (2048, 1024, 512)
"""Shorter rows of the library that are also timed, in tokens."""
ROW_BY_ROW = "ours, one row at a time"
BLOCKS = "--num-layers 5 --full-attention-indices 0 1 2 3 4 --max-anchors 512".split()
EAGLE3 = (
    "--ttt-steps 4 --no-norm-before-residual --no-norm-before-fc --fc-norm --norm-output".split()
)
KINDS: dict[str, tuple[Sequence[str], float]] = {
    "eagle3": (EAGLE3, 1e-2),
    "dspark": ([*BLOCKS, "--block-size", "7"], 1e-3),
    "dflash": ([*BLOCKS, "--block-size", "8"], 1e-3),
}
"""Architecture -> the library's flags, and our learning rate (recipe: experiment=families)."""
ADAMW = ("--optimizer", "adamw", "--lr", "3e-3")
"""The library is timed with AdamW, the cheaper of its optimisers."""


def name_of(places: int) -> str:
    return f"speculators, rows of {places}"


def our_side(setting: Setting, kind: str, name: str, steps: int, at_once: int = ROWS) -> Side:
    """Our side of a training of `steps` steps, `at_once` rows per forward pass."""
    out = fresh(setting.work / f"ours-{name}")
    overrides = ["experiment=[families]", *family_recipe(kind), f"optim.lr={KINDS[kind][1]}"]
    overrides += [f"train.max_steps={steps}", "train.eval_every=0", "train.parity=false"]
    overrides += ["train.seed=0", f"train.micro_batch={at_once}"]
    overrides += ["train.save_every=0", "target=local", f"target.path={setting.target}"]
    overrides += ["target.dtype=float32", "target.device=cpu"]
    job = {"overrides": overrides, "answers": str(setting.answers), "out": str(out)}
    write_json(out / "job.json", {**job, "threads": setting.threads})
    command = [sys.executable, "-m", MODULE, "--side", str(out / "job.json")]
    return Side(command, out / "log.txt")


def timing(
    setting: Setting, name: str, warm: int, rounds: int, shorter: Sequence[int] = SHORTER
) -> Facts:
    """Tokens per second and peak memory of all sides, timed in turns; ratios are ours over theirs.

    One round is two of our steps, and as many positions on the library's side; `warm` rounds are
    not counted.
    """
    sides: dict[str, tuple[Side, int]] = {
        "ours": (our_side(setting, name, name, 1000), 2),
        ROW_BY_ROW: (our_side(setting, name, f"{name}-1", 1000, at_once=1), 2),
    }
    for places in (PLACES, *shorter):
        flags = (*KINDS[name][0], *ADAMW)
        side = setting.theirs(name, f"{name}-{places}", places, flags, 1000)
        sides[name_of(places)] = (side, 2 * PLACES // places)
    rows: dict[str, Facts] = {}
    for label, (side, _) in sides.items():
        weights = side.answer()["trained_weights"]
        rows[label] = {"trained_weights": weights, "tokens": 0, "seconds": 0.0}
    for turn in range(warm + rounds):
        for label, (side, count) in sides.items():
            found, row = side.ask(do="steps", count=count), rows[label]
            row["peak_bytes"] = found["peak_bytes"]
            if turn >= warm:
                row["tokens"] += found["tokens"]
                row["seconds"] += found["seconds"]
    for side, _ in sides.values():
        side.end()
    speeds = {}
    for label, row in rows.items():
        speeds[label] = row["tokens_per_second"] = row["tokens"] / row["seconds"]
    made = setting.making(name)
    fastest = max((x for x in speeds if not x.startswith("ours")), key=speeds.__getitem__)
    whole = 1 / (1 / speeds[fastest] + made["seconds"] / made["tokens"])
    return {
        "sides": rows,
        "their_features_tokens_per_second": made["tokens"] / made["seconds"],
        "their_fastest": fastest,
        "speed_ratio": speeds["ours"] / speeds[fastest],
        "speed_ratio_at_equal_steps": speeds["ours"] / speeds[name_of(PLACES)],
        "speed_ratio_with_their_features": speeds["ours"] / whole,
        "memory_ratio": {
            str(places): rows[label]["peak_bytes"] / rows[name_of(places)]["peak_bytes"]
            for places, label in ((PLACES, "ours"), (LENGTH, ROW_BY_ROW))
            if name_of(places) in rows
        },
    }


def compare(given: argparse.Namespace) -> None:
    """Compare, and write the report."""
    if given.side:
        job = read_json(given.side)
        torch.set_num_threads(job["threads"])
        follow_commands(job, Channel())
        return
    if not given.python or not given.answers:
        raise UserError(
            "give --python, one that has speculators, and --answers, a folder of generate."
        )
    answers, target, work = (x.resolve() for x in (given.answers, given.target, given.work))
    setting = Setting(given.python, answers, target, work, given.threads)
    tokens = setting.write_rows()
    facts = {
        **process_facts(),
        "device": {**device_facts(torch.device("cpu")), "threads": given.threads},
        "command": f"python -m {MODULE} --python PYTHON --answers outputs/families/generate",
    }
    shared = {"facts": facts, "places_per_step": PLACES, "tokens": tokens}
    rows = {name: timing(setting, name, warm=1, rounds=4) for name in given.kinds}
    known = read_json(given.out).get("timing", {})
    report = {"format": 1, "timing": {**known, **shared, **rows}}
    write_json(given.out, report)
    print(json.dumps(report, indent=1))


def follow_commands(job: Facts, channel: Channel) -> None:
    """Our side: `headstart train` with the job's overrides. Its trainer takes its steps on command,
    with the protocol of foreign/speculators_worker.py."""
    keep_freed_memory()
    inputs = replace(
        job_of(settings_of("train", *job["overrides"])),
        data=Path(job["answers"]),
        out=Path(job["out"]),
    )
    made = setup.Run(inputs, join_world(torch.device("cpu")))
    weights = sum(p.numel() for p in made.drafter.parameters() if p.requires_grad)
    epoch = made.loader.steps_per_epoch
    channel.say(ready=True, trained_weights=weights, steps_per_epoch=epoch)

    class Commanded(Trainer):
        """Takes as many steps as are requested, until there are no more commands."""

        def run(self) -> str:
            stream = self.loader.iterate(0, 1_000_000)
            with StopRequest() as request:
                for command in channel.commands():
                    if command["do"] == "save":
                        made.write_checkpoint(self.engine.weights(), Path(command["to"]))
                        channel.say(saved=command["to"])
                        continue
                    begun, before = time.perf_counter(), self.progress.tokens
                    for _ in range(command["count"]):
                        self.step(*next(stream), request)
                    seconds, tokens = time.perf_counter() - begun, self.progress.tokens - before
                    channel.say(seconds=seconds, tokens=tokens, peak_bytes=peak_bytes())
            return "there are no more commands"

    with patch.object(setup, "Trainer", Commanded):
        made.run(None)


main = command(
    compare,
    python={"help": f"a python that has speculators {VERSION}"},
    answers={"type": Path, "help": "folder of `headstart generate`"},
    target=TARGET,
    kinds={"nargs": "+", "choices": sorted(KINDS), "default": ["eagle3", "dspark"]},
    threads=2,
    work=ROOT / "outputs" / "speculators",
    out=REPORTS / "speculators.json",
    side={"type": Path, "help": argparse.SUPPRESS},
)

if __name__ == "__main__":
    sys.exit(main())
