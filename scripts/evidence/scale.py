"""Plans for real targets on many GPUs: `python -m scripts.evidence.scale` writes
docs/reports/scale.json.

It also writes the tables of docs/scale.md (`--check`: only compare them). Every row is `headstart
train --plan` for a target that is known only by its config.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from inference.manifest import write_json
from inference.measure.metrics import divide
from inference.report.markdown import markdown_table
from scripts.config.schema import Settings
from scripts.evidence.common import DOCS, Facts, read_json, settings_of
from scripts.stages.train import job_of
from scripts.tools.common import REPORTS, Section, command
from train.planning.plan import Speed, make_plan

REPORT, PAGE = REPORTS / "scale.json", DOCS / "scale.md"
TABLES = Section("tables", "scripts/evidence/scale.py")
COUNTS = (8, 64, 512)
TOKENS, LENGTH, GPU = 1_000_000_000, 4096, "h100"
HEADS = {
    "eagle3": ["head=eagle3", "head.draft_vocab_size=32000", "head.ttt_steps=7"],
    "dspark": ["head=dspark", "decode=chain"],
}
FROM_STORE = "train.micro_batch=1 features=store features.trainer_target=parts train.eval_every=0"
TARGETS = {
    "llama-3.1-8b": {"online": ["train.micro_batch=1", "engine.target_sharding=none"]},
    "qwen3-235b-a22b": {
        "online, target divided": ["train.micro_batch=2", "engine.target_sharding=zero3"],
        "features from a store": [*FROM_STORE.split(), "train.parity=false"],
    },
}
"""Target (assets/configs/<name>) -> ways to get its features, each with overrides."""


def write(given: argparse.Namespace) -> int:
    if not given.check:
        plans = [
            {**plan(target, head, changes, count), "head": head, "features": way}
            for target, ways in TARGETS.items()
            for head in HEADS
            for way, changes in ways.items()
            for count in COUNTS
        ]
        content = {"format": 1, "command": given.command, "tokens": TOKENS, "gpu": GPU}
        write_json(REPORT, {**content, "plans": plans})
    return TABLES.write(PAGE, tables(read_json(REPORT)), given.check)


def plan(target: str, head: str, changes: Sequence[str], count: int) -> Facts:
    """`headstart train --plan` for one row."""
    settings = row_settings(target, head, changes, count)
    return {**make_plan(job_of(settings), settings.plan, Speed.of(settings.plan))}


def row_settings(target: str, head: str, changes: Sequence[str], count: int) -> Settings:
    """The settings of one row."""
    # the tokens are given, so the data are not read; but a target without data of its own has no
    # default
    overrides = ["target=local", f"target.path=assets/configs/{target}", "target.device=cpu"]
    overrides += ["target.dtype=bfloat16", "data=ultrachat"]
    overrides += [*HEADS[head], "engine=deepspeed", f"train.sequence_length={LENGTH}"]
    overrides += [f"train.global_batch={2 * max(64, count)}", *changes]
    overrides += [f"plan.gpu={GPU}", f"plan.count={count}", f"plan.tokens={TOKENS}"]
    return settings_of("plan", *overrides)


# The page

HEADER = ["drafter, features", "GPUs", "GiB per GPU", "of them target", "fits", "s per step"]
HEADER += ["waiting for links", "tokens/s", "read, GB/s per GPU", "in all", "hours", "GPU-hours"]


def tables(found: Facts) -> str:
    """One table per target."""
    lines: list[str] = []
    for target in dict.fromkeys(row["target"]["path"] for row in found["plans"]):
        lines += table(target, [x for x in found["plans"] if x["target"]["path"] == target])
    return "\n".join(lines)


def table(target: str, rows: Sequence[Facts]) -> list[str]:
    """The plans of one target."""
    body = []
    for row in rows:
        step, memory, reading = row["step_seconds"], row["memory_bytes"], row["reading"]
        rates = ["-", "-"]
        if reading:
            names = ("process_bytes_per_second", "total_bytes_per_second")
            rates = [f"{reading[name] / 1e9:,.1f}" for name in names]
        body.append(
            [
                f"{row['head']}, {row['features']}",
                str(row["settings"]["processes"]),
                f"{memory['total'] / 2**30:.1f}",
                f"{memory['target'] / 2**30:.1f}",
                "yes" if row["fits"] else "**no**",
                f"{step['total']:.2f}",
                f"{divide(step['communication'], step['total']):.0%}",
                f"{row['tokens_per_second']:,.0f}",
                *rates,
                f"{row['hours']:.2f}",
                f"{row['device_hours']:.0f}",
            ]
        )
    disk = {row["head"]: row["disk_bytes"] for row in rows}
    sizes = {
        head: ", ".join(f"{name} {size / 1e12:.1f} TB" for name, size in x["feature_store"].items())
        for head, x in disk.items()
    }
    stores = "; ".join(f"{head}: {size}" for head, size in sizes.items())
    states = ", ".join(f"{head} {x['states'] / 1e9:.1f} GB" for head, x in disk.items())
    facts = rows[0]["target"]
    lines = [
        f"### {Path(target).name}: {facts['parameters'] / 1e9:.1f} billion weights,"
        f" {facts['active'] / 1e9:.1f} billion of the layers' per token",
        "",
        *markdown_table(HEADER, body),
        "",
        f"Disk: states {states}. A feature store, if one is used: {stores}.",
        "",
    ]
    stored = {row["head"]: row for row in rows if row["reading"]}
    if stored:
        took = next(iter(stored.values()))["target_pass"]
        read = {head: row["reading"]["bytes_per_token"] / 1000 for head, row in stored.items()}
        tokens = ", ".join(f"{head} {size:.1f} kB a token" for head, size in read.items())
        lines += [
            "Rows from a store hold the target in parts (`features.trainer_target=parts`) and read "
            f"bf16 features ({tokens}). Their GPU-hours come on top of making the store: one pass "
            f"of the target over all tokens, {took['flops']:.2g} FLOP or "
            f"{took['device_hours']:.0f} GPU-hours at the same speed.",
            "",
        ]
    return lines


main = command(write, check=(False, "only compare the page's tables"))

if __name__ == "__main__":
    sys.exit(main())
