"""Measures the training speed of every trainable recipe on the embedded target: writes
docs/reports/throughput.json.

    python -m scripts.evidence.throughput --answers outputs/families/generate

Each recipe of `experiment=families` takes a few real steps (online features, no measuring of tau)
of as many rows as the experiment's, in a separate process, so that its peak memory is measured
separately. The first steps are left out: they warm up, and the first one counts FLOPs. The report
is written after every recipe. A repeated command measures the recipes whose rows are missing, or
were measured with other settings or at another commit; `--only` measures the named ones in any
case. Other rows stay, each with its settings and commit. Recipes that go on from another row's
drafter are measured only if they are named, because that drafter must exist.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.metrics import divide
from scripts.evidence.common import Facts, family_recipes, read_json, settings_of
from scripts.run.process import versions
from scripts.run.revision import git_state
from scripts.tools.common import REPORTS, ROOT, command
from train.tracking.clock import PARTS
from train.tracking.tracker import LOG_FILE, read_log

WARM_UP = 2
EXPERIMENT = "experiment=families"
KEPT = ("kind", "peak", "peak_memory_bytes", "padding", "device", "engine")


def measure(given: argparse.Namespace) -> None:
    """Measure all recipes, or those of --only, each in a separate process."""
    known, git = family_recipes(), git_state()
    unknown = sorted(set(given.only) - set(known))
    if unknown:
        raise UserError(f"--only {unknown[0]}: there is no such row. Rows: {', '.join(known)}.")
    given.rows = given.rows or settings_of("train", EXPERIMENT).train.global_batch
    rows: dict[str, Facts] = {row["name"]: row for row in kept_rows(read_json(given.out))}
    conditions: Facts = {
        "settings": {
            **{key: getattr(given, key) for key in ("steps", "threads", "rows")},
            "warm_up": WARM_UP,
        },
        "git": {"revision": git["revision"], "changed": bool(git["diff"])} if git else {},
    }
    alone = [name for name, words in known.items() if not any(map(goes_on, words))]
    for name in given.only or alone:
        if name in rows and is_same(rows[name], conditions) and not given.only:
            continue
        row = rows[name] = {"name": name, **conditions, **train_briefly(name, known[name], given)}
        memory = row["peak_memory_bytes"] / 2**20
        speed = f"{row['tokens_per_second']:9,.0f} tokens/s  mfu {row['mfu']:.1%}"
        print(f"{name:20} {speed}  {memory:,.0f} MiB", flush=True)
        content = {
            "format": 1,
            "command": given.command,
            **conditions,
            "versions": versions(),
            "rows": [rows[each] for each in known if each in rows],
        }
        write_json(given.out, content)


def goes_on(override: str) -> bool:
    """Whether an override names the drafter that a training starts from."""
    return override.startswith("train.refresh.init_from=")


def is_same(row: Facts, conditions: Facts) -> bool:
    """Whether a row has these settings and this commit. Whether files were changed does not count,
    because the report itself is one of them."""
    revision = conditions["git"].get("revision")
    return row["settings"] == conditions["settings"] and row["git"].get("revision") == revision


def kept_rows(content: Facts) -> list[Facts]:
    """The rows of an earlier report, each with its settings and commit; those of earlier versions
    have those of the report."""
    shared = {key: content.get(key, {}) for key in ("settings", "git")}
    return [shared | row for row in content.get("rows", [])]


def train_briefly(name: str, overrides: Sequence[str], given: argparse.Namespace) -> Facts:
    """Train a recipe for a few steps; returns the figures of the counted steps."""
    with TemporaryDirectory(prefix="headstart-throughput-") as folder:
        sizes = [f"train.max_steps={WARM_UP + given.steps}", "train.eval_every=0"]
        sizes += [f"train.global_batch={given.rows}", f"train.micro_batch={given.rows}"]
        sizes += ["train.save_every=0", "train.parity=false"]
        place = [f"run.root={folder}", "run.name=run", "run.drafter=drafter"]
        place += [f"run.answers={given.answers.resolve()}", f"run.threads={given.threads}"]
        command = [sys.executable, "-W", "ignore", "-m", "scripts.cli", "train", EXPERIMENT]
        done = subprocess.run(
            [*command, *overrides, *sizes, *place],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(given.threads)},
            check=False,
        )
        if done.returncode:
            raise UserError(f"{name} failed:\n{done.stderr[-2000:]}")
        out = Path(folder) / "run" / "train" / "drafter"
        lines = [line for line in read_log(out / LOG_FILE) if "loss" in line]
        return steady(lines, read_json(out / "summary.json"))


def steady(lines: Sequence[Mapping[str, Any]], summary: Facts) -> Facts:
    """Figures of the steps after the warm-up (ratios of sums), and of the training's summary."""
    timed = lines[WARM_UP:]
    tokens = timed[-1]["tokens"] - lines[WARM_UP - 1]["tokens"]
    parts = {name: sum(line["cost"][name] for line in timed) for name in PARTS}
    whole = sum(parts.values())
    used = sum(line["cost"]["mfu"] * sum(line["cost"][name] for name in PARTS) for line in timed)
    seconds = sum(line["seconds"] for line in timed)
    return {
        "tokens_per_second": divide(tokens, seconds),
        "step_seconds": divide(seconds, len(timed)),
        "shares": {name: divide(part, whole) for name, part in parts.items()},
        "loader_wait_seconds": parts["data"],
        "mfu": divide(used, whole),
        **{name: summary[name] for name in KEPT},
    }


main = command(
    measure,
    answers={"type": Path, "required": True, "help": "folder of `headstart generate`"},
    steps=(24, f"timed steps, after {WARM_UP} that warm up"),
    threads=2,
    rows=(0, "rows per step; 0: as the experiment"),
    only={"nargs": "*", "default": [], "help": "recipes; none named: all"},
    out=REPORTS / "throughput.json",
)

if __name__ == "__main__":
    sys.exit(main())
