"""Training speed of every trainable recipe on the embedded target: writes
docs/reports/throughput.json.

    python -m scripts.evidence.throughput --answers outputs/families/generate

Each recipe of `experiment=families` takes a few real steps (online features, no measuring of tau)
in a process of its own, so that its peak of memory is its own. The first steps are left out: they
warm up, and the first one counts FLOPs. The report is written after every recipe; `--only` replaces
single rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.metrics import divide
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.evidence.common import REPORTS, read_json, run_stage
from scripts.run.process import git_state, versions
from scripts.tools.common import ROOT, add_options, make_parser, run
from train.tracking.clock import PARTS
from train.tracking.tracker import LOG_FILE, read_log

MODULE = "scripts.evidence.throughput"
WARM_UP = 2
EXPERIMENT = "experiment=families"
KEPT = ("kind", "peak", "peak_memory_bytes", "padding", "device", "engine")


class Peak(TypedDict):
    """The peak that utilisation is relative to, and where it is from."""

    tflops: float
    source: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = make_parser(MODULE, __doc__)
    parser.add_argument(
        "--answers", type=Path, required=True, help="folder of `headstart generate`"
    )
    steps = f"timed steps, after {WARM_UP} that warm up"
    parser.add_argument("--steps", type=int, default=6, help=steps)
    add_options(parser, threads=2, rows=(8, "rows per step"))
    parser.add_argument("--only", nargs="*", default=[], help="recipes; none named: all")
    parser.add_argument("--out", type=Path, default=REPORTS / "throughput.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return run(parser, measure, arguments)


def recipes() -> dict[str, list[str]]:
    """Row of `experiment=families` -> its overrides."""
    sweep = load_settings(STAGES["loop"], [EXPERIMENT]).loop.sweep
    return {name: [f"head={row.head or name}", *row.overrides] for name, row in sweep.items()}


def measure(given: argparse.Namespace) -> None:
    """One recipe in this process (`--one`), or all of them, each in its own."""
    known = recipes()
    if given.one:
        print(json.dumps({"name": given.one, **train_briefly(known[given.one], given)}))
        return
    unknown = sorted(set(given.only) - set(known))
    if unknown:
        raise UserError(f"--only {unknown[0]}: there is no such row. Rows: {', '.join(known)}.")
    before = read_json(given.out) if given.only else {}
    rows: dict[str, ThroughputRow] = {row["name"]: row for row in before.get("rows", [])}
    for name in given.only or known:
        options = {"answers": given.answers, "steps": given.steps, "rows": given.rows}
        options |= {"threads": given.threads, "one": name}
        command = [sys.executable, "-W", "ignore", "-m", MODULE]
        command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        if done.returncode:
            raise UserError(f"{name} failed:\n{done.stderr[-2000:]}")
        found = rows[name] = json.loads(done.stdout.splitlines()[-1])
        memory = found["peak_memory_bytes"] / 2**20
        speed = f"{found['tokens_per_second']:9,.0f} tokens/s  mfu {found['mfu']:.1%}"
        print(f"{name:20} {speed}  {memory:,.0f} MiB", flush=True)
        write_json(given.out, report(given, [rows[each] for each in known if each in rows]))


class ThroughputRow(TypedDict, total=False):
    """One recipe: figures of the steps that count, and what the training's summary says."""

    name: str
    tokens_per_second: float
    step_seconds: float
    shares: Mapping[str, float]
    loader_wait_seconds: float
    mfu: float
    kind: str
    peak: Peak
    peak_memory_bytes: int
    padding: float
    device: Mapping[str, object]
    engine: str


def report(given: argparse.Namespace, rows: Sequence[ThroughputRow]) -> dict[str, object]:
    """The report's content."""
    git = git_state()
    steps = {"steps": given.steps, "warm_up": WARM_UP}
    return {
        "format": 1,
        "command": f"python -m {MODULE} --answers outputs/families/generate",
        "settings": {**steps, "threads": given.threads, "rows": given.rows},
        "git": {"revision": git["revision"], "changed": bool(git["diff"])} if git else {},
        "versions": versions(),
        "rows": list(rows),
    }


def train_briefly(overrides: Sequence[str], given: argparse.Namespace) -> ThroughputRow:
    """Train a recipe for a few steps, in this process; returns the figures of those that count."""
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="headstart-throughput-") as folder:
        sizes = [f"train.max_steps={WARM_UP + given.steps}", "train.eval_every=0"]
        sizes += [f"train.global_batch={given.rows}", f"train.micro_batch={given.rows}"]
        sizes += ["train.save_every=0", "train.parity=false"]
        place = [f"run.root={folder}", "run.name=run", "run.drafter=drafter"]
        place += [f"run.answers={given.answers}", f"run.threads={given.threads}"]
        run_stage("train", EXPERIMENT, *overrides, *sizes, *place)
        out = Path(folder) / "run" / "train" / "drafter"
        lines = [line for line in read_log(out / LOG_FILE) if "loss" in line]
        return steady(lines, read_json(out / "summary.json"))


def steady(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> ThroughputRow:
    """Figures of the steps after the warm-up: ratios of sums."""
    timed = lines[WARM_UP:]
    tokens = timed[-1]["tokens"] - lines[WARM_UP - 1]["tokens"]
    parts = {name: sum(line["cost"][name] for line in timed) for name in PARTS}
    whole = sum(parts.values())
    used = sum(line["cost"]["mfu"] * sum(line["cost"][name] for name in PARTS) for line in timed)
    seconds = sum(line["seconds"] for line in timed)
    found: ThroughputRow = {
        "tokens_per_second": divide(tokens, seconds),
        "step_seconds": divide(seconds, len(timed)),
        "shares": {name: divide(part, whole) for name, part in parts.items()},
        "loader_wait_seconds": parts["data"],
        "mfu": divide(used, whole),
    }
    return cast(ThroughputRow, {**found, **{name: summary[name] for name in KEPT}})


if __name__ == "__main__":
    sys.exit(main())
