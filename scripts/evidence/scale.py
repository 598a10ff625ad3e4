"""The plan for real targets on many GPUs: `python -m scripts.evidence.scale` writes
docs/reports/scale.json.

It writes the tables of docs/scale.md too (`--check`: only compare them). Every row is `headstart
train --plan` for a target that is known by its config alone. The report also holds the plan's
checks: the same count for the embedded target against its real steps, and the utilisation that
throughput.json measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

import torch

from heads.api.checkpoint import new_drafter
from inference.manifest import write_json
from inference.measure.metrics import divide
from inference.report.markdown import markdown_table
from inference.target.model import TargetModel
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.evidence import throughput
from scripts.evidence.common import DOCS, REPORTS, read_json
from scripts.stages.train import job_of
from scripts.tools.common import Section, make_parser, run
from train.engines.base import Objective
from train.planning.dry_run import dry_batch, dry_step, plan_drafter
from train.planning.footprint import Footprint
from train.planning.plan import Speed, make_plan
from train.planning.target import plan_target

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
"""Target (assets/configs/<name>) -> ways to get its features, each with its overrides."""
LEAST_PEAK = 0.7
"""Share of the median measured peak below which a recipe's probe of the peak counts as
disturbed."""
BACKING = {
    "eagle3": ["head=eagle3", "head.ttt_steps=4"],
    "dspark": ["head=dspark", "head.num_anchors=64"],
}


class PlanRow(TypedDict, total=False):
    """What `headstart train --plan` prints, as far as the tables show it, and the row's labels."""

    head: str
    features: str
    target: Mapping[str, Any]
    settings: Mapping[str, int]
    step_seconds: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    disk_bytes: Mapping[str, Any]
    reading: Mapping[str, float]
    target_pass: Mapping[str, float]
    fits: bool
    tokens_per_second: float
    hours: float
    device_hours: float


class Ratio(TypedDict):
    """A planned figure, the measured one, and their ratio."""

    planned: float
    real: float
    ratio: float


class Counted(TypedDict):
    """The plan's count of one micro-batch on the embedded target against its real steps."""

    head: str
    target_flops: Ratio
    target_bytes: Ratio
    drafter_flops: Ratio
    drafter_bytes: Ratio


class Utilisation(TypedDict):
    """Utilisation over the recipes of throughput.json whose probe of the peak is plausible."""

    lowest: float
    middle: float
    highest: float
    recipes: int
    of: str
    left_out: dict[str, float]
    median_peak_tflops: float


class Checks(TypedDict):
    """The plan's checks."""

    counted: list[Counted]
    utilisation: Utilisation | None


class Content(TypedDict):
    """scale.json."""

    format: int
    tokens: int
    gpu: str
    plans: list[PlanRow]
    backing: Checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and the tables; returns the exit status."""
    parser = make_parser("scripts.evidence.scale", __doc__)
    parser.add_argument("--check", action="store_true", help="only compare the page's tables")
    return run(parser, write, arguments)


def write(given: argparse.Namespace) -> int:
    """Write or compare; returns the exit status."""
    if not given.check:
        write_json(REPORT, {**content(), "command": given.command})
    return TABLES.write(PAGE, tables(read_json(REPORT)), given.check)


def content() -> Content:
    """The report."""
    plans = [
        planned(target, head, changes, count) | PlanRow(head=head, features=way)
        for target, ways in TARGETS.items()
        for head in HEADS
        for way, changes in ways.items()
        for count in COUNTS
    ]
    checks: Checks = {"counted": [counted(head) for head in BACKING], "utilisation": utilisation()}
    return {"format": 1, "tokens": TOKENS, "gpu": GPU, "plans": plans, "backing": checks}


def planned(target: str, head: str, changes: Sequence[str], count: int) -> PlanRow:
    """`headstart train --plan` for one row."""
    overrides = ["target=local", f"target.path=assets/configs/{target}", "target.device=cpu"]
    overrides += [*HEADS[head], "engine=deepspeed", f"train.sequence_length={LENGTH}"]
    overrides += [f"train.global_batch={2 * max(64, count)}", *changes]
    overrides += [f"plan.gpu={GPU}", f"plan.count={count}", f"plan.tokens={TOKENS}"]
    settings = load_settings(STAGES["plan"], overrides)
    return cast(PlanRow, make_plan(job_of(settings), settings.plan, Speed.of(settings.plan)))


def counted(head: str) -> Counted:
    """FLOPs, and bytes at the peak, of one micro-batch on the embedded target: planned and real."""
    overrides = ["target=embedded", "target.device=cpu", *BACKING[head]]
    settings = load_settings(STAGES["train"], overrides)
    rows, length, kind, config = 2, 512, settings.head.kind, settings.head.config
    target = plan_target(settings.target)
    drafter = plan_drafter(kind, config, target)
    dry = dry_step(drafter, target, settings.engine, rows, length, 0.7)
    real = TargetModel.load(settings.target)
    seen = torch.ones(real.info.vocab_size)
    own = new_drafter(kind, config, real.info, real.weights, 0, seen).float()
    for parameter in own.parameters():
        parameter.grad = torch.zeros_like(parameter)
    dtype = settings.engine.dtype
    batch = dry_batch(drafter, target, dtype, rows, length, 0.7)
    segments = batch.segments.contiguous()
    with Footprint() as passed:
        taps, last = real.features(batch.tokens, batch.positions.contiguous(), segments, own.needs)
    batch.taps = None if taps is None else taps.to(dtype)
    batch.last_hidden = None if last is None else last.to(dtype)
    if own.needs.logits:
        batch.target_logits = lambda hidden: real.weights.logits(hidden.to(real.dtype))
    else:
        batch.target_logits = None
    with Footprint() as took:
        (Objective(own, settings.engine, "cpu")(batch) / 100).backward()
    figures = {
        "target_flops": (target.flops(rows, length), passed.flops),
        "target_bytes": (target.activations(rows, length, own.needs), passed.peak),
        "drafter_flops": (dry.flops, took.flops),
        "drafter_bytes": (dry.peak, took.peak),
    }
    ratios = {
        name: Ratio(planned=plan, real=found, ratio=divide(plan, found))
        for name, (plan, found) in figures.items()
    }
    return cast(Counted, {"head": head, **ratios})


def utilisation() -> Utilisation | None:
    """The lowest, median and highest utilisation of throughput.json; None without that report."""
    rows: list[throughput.ThroughputRow] = read_json(REPORTS / "throughput.json").get("rows")
    if not rows:
        return None
    kept, disturbed = split_probes(rows)
    shares = sorted(row["mfu"] for row in kept)
    return {
        "lowest": shares[0],
        "middle": shares[len(shares) // 2],
        "highest": shares[-1],
        "recipes": len(shares),
        "of": rows[0]["peak"]["source"],
        "left_out": {row["name"]: row["peak"]["tflops"] for row in disturbed},
        "median_peak_tflops": median(row["peak"]["tflops"] for row in rows),
    }


def split_probes(
    rows: Sequence[throughput.ThroughputRow],
) -> tuple[list[throughput.ThroughputRow], list[throughput.ThroughputRow]]:
    """Rows whose measured peak is plausible, and the others.

    One machine has one peak: a probe far below the median was disturbed by other work, and the
    utilisation that is calculated from it is too high.
    """
    least = LEAST_PEAK * median(row["peak"]["tflops"] for row in rows)
    sound = [row for row in rows if row["peak"]["tflops"] >= least]
    return sound, [row for row in rows if row["peak"]["tflops"] < least]


# The page


def tables(found: Content) -> str:
    """One table per target, then the checks."""
    lines: list[str] = []
    for target in dict.fromkeys(plan["target"]["path"] for plan in found["plans"]):
        lines += table(target, [x for x in found["plans"] if x["target"]["path"] == target])
    return "\n".join([*lines, *checks(found["backing"])])


HEADER = ["drafter, features", "GPUs", "GiB per GPU", "of them target", "fits", "s per step"]
HEADER += ["waiting for links", "tokens/s", "read, GB/s per GPU", "in all", "hours", "GPU-hours"]


def table(target: str, rows: Sequence[PlanRow]) -> list[str]:
    """The plans of one target."""
    body, disk = [], {}
    for row in rows:
        step, memory, reading = row["step_seconds"], row["memory_bytes"], row["reading"]
        rates = ["-", "-"]
        if reading:
            names = ("process_bytes_per_second", "total_bytes_per_second")
            rates = [f"{reading[name] / 1e9:,.1f}" for name in names]
        disk[row["head"]] = row["disk_bytes"]
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
    stores = "; ".join(
        f"{head}: "
        + ", ".join(
            f"{name} {count / 1e12:.1f} TB" for name, count in each["feature_store"].items()
        )
        for head, each in disk.items()
    )
    states = ", ".join(f"{head} {each['states'] / 1e9:.1f} GB" for head, each in disk.items())
    facts = rows[0]["target"]
    return [
        f"### {Path(target).name}: {facts['parameters'] / 1e9:.1f} billion weights,"
        f" {facts['active'] / 1e9:.1f} billion of the layers' per token",
        "",
        *markdown_table(HEADER, body),
        "",
        f"Disk: states {states}. A feature store, if one is used: {stores}.",
        "",
        *store_note(rows),
    ]


def store_note(rows: Sequence[PlanRow]) -> list[str]:
    """What the rows with a store leave out."""
    stored = [row for row in rows if row["reading"]]
    if not stored:
        return []
    took = stored[0]["target_pass"]
    sizes = {row["head"]: row["reading"]["bytes_per_token"] / 1000 for row in stored}
    tokens = ", ".join(f"{head} {size:.1f} kB a token" for head, size in sizes.items())
    return [
        "Rows from a store hold the target in parts (`features.trainer_target=parts`) and read "
        f"bf16 features ({tokens}). Their GPU-hours come on top of making the store: one pass of "
        f"the target over all tokens, {took['flops']:.2g} FLOP or {took['device_hours']:.0f} "
        "GPU-hours at the same speed.",
        "",
    ]


def checks(found: Checks) -> list[str]:
    """The plan of the embedded target against its real steps."""
    names = ("target_flops", "drafter_flops", "target_bytes", "drafter_bytes")
    body = []
    for row in found["counted"]:
        ratios = (
            row["target_flops"],
            row["drafter_flops"],
            row["target_bytes"],
            row["drafter_bytes"],
        )
        body.append([row["head"], *(f"{ratio['ratio']:.3f}" for ratio in ratios)])
    header = [
        "planned / real",
        *(name.replace("_flops", " FLOPs").replace("_", " ") for name in names),
    ]
    title = "### What backs it: the same count on the embedded target"
    lines = [title, "", *markdown_table(header, body), ""]
    used = found["utilisation"]
    if used is not None:
        lines.append(
            f"Utilisation measured there over {used['recipes']} recipes: {used['lowest']:.0%} to "
            f"{used['highest']:.0%}, middle {used['middle']:.0%} ({used['of']}).{left_out(used)}"
        )
    return lines


def left_out(used: Utilisation) -> str:
    """Which recipes do not count, and why."""
    if not used["left_out"]:
        return ""
    named = ", ".join(f"{name} ({peak:.2f} TFLOP/s)" for name, peak in used["left_out"].items())
    return (
        f" Left out: {named}, as a probe of the peak below {LEAST_PEAK:.0%} of the middle one "
        f"({used['median_peak_tflops']:.2f}) was disturbed by other work."
    )


if __name__ == "__main__":
    sys.exit(main())
