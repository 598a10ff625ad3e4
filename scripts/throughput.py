"""Training speed of every trainable recipe on the embedded target: writes docs/reports/throughput.json.

    python -m scripts.throughput --answers outputs/families/generate

Each recipe of `experiment=families` takes a few real steps (online features, no measuring of tau) in a process of its own, so
that its peak of memory is its own. The first steps are left out: they warm up, and the first one counts FLOPs. The report is
written after every recipe; `--only` replaces single rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.metrics import divide

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "reports" / "throughput.json"
WARM_UP = 2
EXPERIMENT = "experiment=families"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.throughput")
    parser.add_argument("--answers", type=Path, required=True, help="folder of a finished `headstart generate`")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps behind {WARM_UP} that warm up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--only", nargs="*", default=[], help="recipes; all where none is named")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.one:
            print(json.dumps(measure(given.one, given)))
            return 0
        return measure_all(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def recipes() -> dict[str, list[str]]:
    """Row of `experiment=families` -> what it sets; one row per kind of training, without what depends on decoding."""
    from scripts.config import load_settings
    from scripts.stages import STAGES

    sweep = load_settings(STAGES["loop"], [EXPERIMENT]).loop.sweep
    return {name: [f"head={row.head or name}", *row.overrides] for name, row in sweep.items()}


def measure_all(given: argparse.Namespace) -> int:
    """All recipes, each in its own process."""
    known = recipes()
    unknown = sorted(set(given.only) - set(known))
    if unknown:
        raise UserError(f"--only {unknown[0]}: there is no such row. Rows: {', '.join(known)}.")
    before = json.loads(given.out.read_text(encoding="utf-8")) if given.only and given.out.is_file() else {}
    rows = {row["name"]: row for row in before.get("rows", [])}
    for name in given.only or known:
        command = [sys.executable, "-W", "ignore", "-m", "scripts.throughput", "--one", name, "--answers", str(given.answers)]
        command += ["--steps", str(given.steps), "--threads", str(given.threads), "--rows", str(given.rows)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return 1
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        found = rows[name]
        memory = found["peak_memory_bytes"] / 2**20
        print(f"{name:20} {found['tokens_per_second']:9,.0f} tokens/s  mfu {found['mfu']:.1%}  {memory:,.0f} MiB", flush=True)
        write_json(given.out, report(given, [rows[each] for each in known if each in rows]))
    return 0


def report(given: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report's content."""
    from scripts.run import git_state, versions

    git = git_state()
    return {
        "format": 1,
        "command": "python -m scripts.throughput --answers outputs/families/generate",
        "settings": {"steps": given.steps, "warm_up": WARM_UP, "threads": given.threads, "rows": given.rows},
        "git": {"revision": git["revision"], "changed": bool(git["diff"])} if git else {},
        "versions": versions(),
        "rows": list(rows),
    }


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One recipe, in this process."""
    import torch

    from scripts.config import load_settings
    from scripts.stages import STAGES
    from train.run import train
    from train.tracking.tracker import LOG_FILE, read_log

    torch.set_num_threads(given.threads)
    settings = load_settings(STAGES["train"], [EXPERIMENT, *recipes()[name]])
    config = replace(
        settings.train, max_steps=WARM_UP + given.steps, global_batch=given.rows, micro_batch=given.rows,
        eval_every=0, save_every=0, parity=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="headstart-throughput-") as folder:
        out = Path(folder) / name
        train(
            settings.head.kind, settings.head.config, target=settings.target, data=given.answers, out=out, config=config,
            features=settings.features, engine=settings.engine, optim=settings.optim, schedule=settings.schedule,
            decode=settings.decode, joint=settings.joint,
        )  # fmt: skip
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        lines = [line for line in read_log(out / LOG_FILE) if "loss" in line]
    return {"name": name, **steady(lines, summary)}


def steady(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the steps behind the warm-up: ratios of sums."""
    from train.tracking.clock import PARTS

    timed = lines[WARM_UP:]
    tokens = timed[-1]["tokens"] - lines[WARM_UP - 1]["tokens"]
    seconds = sum(line["seconds"] for line in timed)
    parts = {name: sum(line["cost"][name] for line in timed) for name in PARTS}
    whole = sum(parts.values())
    used = sum(line["cost"]["mfu"] * sum(line["cost"][name] for name in PARTS) for line in timed)
    return {
        "kind": summary["kind"],
        "tokens_per_second": divide(tokens, seconds),
        "step_seconds": divide(seconds, len(timed)),
        "shares": {name: divide(part, whole) for name, part in parts.items()},
        "loader_wait_seconds": parts["data"],
        "mfu": divide(used, whole),
        "peak": summary["peak"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "padding": summary["padding"],
        "device": summary["device"],
        "engine": summary["engine"],
    }


if __name__ == "__main__":
    sys.exit(main())
