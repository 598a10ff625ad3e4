"""The plan for real targets on many GPUs: `python -m scripts.scale_plan` writes docs/reports/scale.json and the tables of
docs/scale.md (`--check`: compare the tables only).

Nothing here is typed by hand: every row is `headstart train --plan` for a target that is known by its config alone. What backs
the plan is worked out with it: the same count for the embedded target against its real steps, and the utilisation that
docs/reports/throughput.json measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes, write_json
from inference.measure.metrics import divide

ROOT = Path(__file__).resolve().parent.parent
REPORT, PAGE = ROOT / "docs" / "reports" / "scale.json", ROOT / "docs" / "scale.md"
THROUGHPUT = ROOT / "docs" / "reports" / "throughput.json"
START, END = "<!-- tables: written by scripts/scale_plan.py -->", "<!-- end of tables -->"
COUNTS = (8, 64, 512)
TOKENS, LENGTH, GPU = 1_000_000_000, 4096, "h100"
HEADS = {
    "eagle3": ["head=eagle3", "head.draft_vocab_size=32000", "head.ttt_steps=7"],
    "dspark": ["head=dspark", "decode=chain"],
}
TARGETS: dict[str, dict[str, list[str]]] = {
    "llama-3.1-8b": {"online": ["train.micro_batch=1", "engine.target_sharding=none"]},
    "qwen3-235b-a22b": {
        "online, target divided": ["train.micro_batch=2", "engine.target_sharding=zero3"],
        "features from a store": [
            "train.micro_batch=1", "features=store", "features.trainer_target=parts", "train.eval_every=0", "train.parity=false",
        ],
    },
}
"""Target (assets/configs/<name>) -> ways to get its features, each with what it sets."""
LEAST_PEAK = 0.7
"""Share of the middle measured peak below which a recipe's own probe of the peak counts as disturbed."""
BACKING = {"eagle3": ["head=eagle3", "head.ttt_steps=4"], "dspark": ["head=dspark", "head.num_anchors=64"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and the tables; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given not in ([], ["--check"]):
        print("usage: python -m scripts.scale_plan [--check]", file=sys.stderr)
        return 2
    try:
        if not given:
            write_json(REPORT, content())
        wanted = with_tables(PAGE.read_text(encoding="utf-8"), json.loads(REPORT.read_text(encoding="utf-8")))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if given:
        same = PAGE.read_text(encoding="utf-8") == wanted
        print(f"the tables of {PAGE.name} are {'up to date' if same else 'out of date'}")
        return int(not same)
    write_bytes(PAGE, wanted.encode())
    print(f"{REPORT.name}, {PAGE.name}")
    return 0


def content() -> dict[str, Any]:
    """The report."""
    plans = [
        {"target": target, "head": head, "features": way, **planned(target, head, changes, count)}
        for target, ways in TARGETS.items()
        for head in HEADS
        for way, changes in ways.items()
        for count in COUNTS
    ]
    return {
        "format": 1,
        "command": "python -m scripts.scale_plan",
        "tokens": TOKENS,
        "gpu": GPU,
        "plans": plans,
        "backing": {"counted": [counted(head) for head in BACKING], "utilisation": measured_utilisation()},
    }


def planned(target: str, head: str, changes: Sequence[str], count: int) -> dict[str, Any]:
    """`headstart train --plan` for one row, without what is the same in all."""
    from scripts.config import load_settings
    from scripts.plan import job_of
    from scripts.stages import STAGES
    from train.planning.plan import Speed, make_plan

    rows = 2 * max(64, count)
    settings = load_settings(
        STAGES["plan"],
        ["target=local", f"target.path=assets/configs/{target}", "target.device=cpu", *HEADS[head], "engine=deepspeed",
         f"train.sequence_length={LENGTH}", f"train.global_batch={rows}", *changes, f"plan.gpu={GPU}", f"plan.count={count}",
         f"plan.tokens={TOKENS}"],
    )  # fmt: skip
    return make_plan(job_of(settings), settings.plan, Speed.of(settings.plan))


def counted(head: str) -> dict[str, Any]:
    """What the plan says of one micro-batch on the embedded target, and what the real one took: FLOPs, and bytes at the peak."""
    import torch

    from heads.api.checkpoint import new_drafter
    from inference.target.model import TargetModel
    from scripts.config import load_settings
    from scripts.stages import STAGES
    from train.engines.base import Objective
    from train.planning.dry_run import dry_batch, dry_step, planned_drafter
    from train.planning.footprint import Footprint
    from train.planning.target import plan_target

    settings = load_settings(STAGES["train"], ["target=embedded", "target.device=cpu", *BACKING[head]])
    rows, length = 2, 512
    target = plan_target(settings.target)
    drafter = planned_drafter(settings.head.kind, settings.head.config, target)
    dry = dry_step(drafter, target, settings.engine, rows, length, 0.7)
    real = TargetModel.load(settings.target)
    seen = torch.ones(real.info.vocab_size)
    own = new_drafter(settings.head.kind, settings.head.config, real.info, real.weights, 0, seen).float()
    for parameter in own.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = dry_batch(drafter, target, settings.engine.dtype, rows, length, 0.7)
    segments = batch.segments.contiguous()
    with Footprint() as passed:
        taps, last = real.features(batch.tokens, batch.positions.contiguous(), segments, own.needs)
    batch.taps = None if taps is None else taps.to(settings.engine.dtype)
    batch.last_hidden = None if last is None else last.to(settings.engine.dtype)
    batch.target_logits = (lambda hidden: real.weights.logits(hidden.to(real.dtype))) if own.needs.logits else None
    with Footprint() as took:
        (Objective(own, settings.engine, "cpu")(batch) / 100).backward()
    forward = target.flops(rows, length)
    return {
        "head": head,
        "target_flops": {"planned": forward, "real": passed.flops, "ratio": divide(forward, passed.flops)},
        "target_bytes": {"planned": target.activations(rows, length, own.needs), "real": passed.peak,
                         "ratio": divide(target.activations(rows, length, own.needs), passed.peak)},
        "drafter_flops": {"planned": dry.flops, "real": took.flops, "ratio": divide(dry.flops, took.flops)},
        "drafter_bytes": {"planned": dry.peak, "real": took.peak, "ratio": divide(dry.peak, took.peak)},
    }  # fmt: skip


def measured_utilisation() -> dict[str, Any] | None:
    """The lowest, middle and highest utilisation of docs/reports/throughput.json; None while it is not there."""
    if not THROUGHPUT.is_file():
        return None
    rows = json.loads(THROUGHPUT.read_text(encoding="utf-8"))["rows"]
    kept, spoilt = sound(rows)
    shares = sorted(row["mfu"] for row in kept)
    return {
        "lowest": shares[0], "middle": shares[len(shares) // 2], "highest": shares[-1], "recipes": len(shares),
        "of": rows[0]["peak"]["source"], "left_out": {row["name"]: row["peak"]["tflops"] for row in spoilt},
        "median_peak_tflops": median(row["peak"]["tflops"] for row in rows),
    }  # fmt: skip


def sound(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows whose measured peak can be believed, and the others: one machine has one peak, so a probe far below the middle one was
    disturbed, and the utilisation that is worked out from it is too high.
    """
    least = LEAST_PEAK * median(row["peak"]["tflops"] for row in rows)
    return [row for row in rows if row["peak"]["tflops"] >= least], [row for row in rows if row["peak"]["tflops"] < least]


# ---- the page ----------------------------------------------------------------------------------------------------------


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    """`text` with the tables between the markers; raises `UserError` when they are not there exactly once."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise UserError(f"{PAGE.name} needs the lines '{START}' and '{END}' once each, in this order.")
    before, rest = text.split(START)
    return f"{before}{START}\n{tables(found)}\n{END}{rest.split(END)[1]}"


def tables(found: Mapping[str, Any]) -> str:
    """One table per target, then what backs them."""
    lines: list[str] = []
    for target in dict.fromkeys(plan["target"]["path"] for plan in found["plans"]):
        rows = [plan for plan in found["plans"] if plan["target"]["path"] == target]
        lines += table(target, rows)
    return "\n".join([*lines, *backing(found["backing"])])


def table(target: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The plans of one target."""
    from inference.report.markdown import markdown_table

    facts = rows[0]["target"]
    header = ["drafter, features", "GPUs", "GiB per GPU", "of them target", "fits", "s per step", "waiting for links", "tokens/s",
              "read, GB/s per GPU", "in all", "hours", "GPU-hours"]  # fmt: skip
    body = [
        [
            f"{row['head']}, {row['features']}", str(row["settings"]["processes"]), gib(row["memory_bytes"]["total"]),
            gib(row["memory_bytes"]["target"]), "yes" if row["fits"] else "**no**", f"{row['step_seconds']['total']:.2f}",
            f"{divide(row['step_seconds']['communication'], row['step_seconds']['total']):.0%}",
            f"{row['tokens_per_second']:,.0f}", *rates(row["reading"]), f"{row['hours']:.2f}", f"{row['device_hours']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    disk = {row["head"]: row["disk_bytes"] for row in rows}
    stores = "; ".join(
        f"{head}: " + ", ".join(f"{fmt} {count / 1e12:.1f} TB" for fmt, count in each["feature_store"].items())
        for head, each in disk.items()
    )
    states = ", ".join(f"{head} {each['states'] / 1e9:.1f} GB" for head, each in disk.items())
    return [
        f"### {Path(target).name}: {facts['parameters'] / 1e9:.1f} billion weights,"
        f" {facts['active'] / 1e9:.1f} billion of the layers' per token",
        "", *markdown_table(header, body), "", f"Disk: states {states}. A feature store, if one is used: {stores}.", "",
        *making(rows),
    ]  # fmt: skip


def rates(reading: Mapping[str, float] | None) -> list[str]:
    """GB/s that one GPU, and all of them, read of a store."""
    if reading is None:
        return ["-", "-"]
    return [f"{reading[name] / 1e9:,.1f}" for name in ("process_bytes_per_second", "total_bytes_per_second")]


def making(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows with a store leave out."""
    stored = [row for row in rows if row["reading"] is not None]
    if not stored:
        return []
    took = stored[0]["target_pass"]
    sizes = {row["head"]: row["reading"]["bytes_per_token"] / 1000 for row in stored}
    return [
        "Rows from a store hold the target in parts (`features.trainer_target=parts`) and read bf16 features ("
        + ", ".join(f"{head} {size:.1f} kB a token" for head, size in sizes.items())
        + f"). Their GPU-hours come on top of making the store: one pass of the target over all tokens, {took['flops']:.2g} FLOP "
        f"or {took['device_hours']:.0f} GPU-hours at the same speed.",
        "",
    ]  # fmt: skip


def backing(found: Mapping[str, Any]) -> list[str]:
    """What the plan says of the embedded target against what its steps took."""
    from inference.report.markdown import markdown_table

    names = ("target_flops", "drafter_flops", "target_bytes", "drafter_bytes")
    body = [[row["head"], *(f"{row[name]['ratio']:.3f}" for name in names)] for row in found["counted"]]
    titles = ["planned / real", "target FLOPs", "drafter FLOPs", "target bytes", "drafter bytes"]
    lines = ["### What backs it: the same count on the embedded target", "", *markdown_table(titles, body), ""]
    used = found["utilisation"]
    if used is not None:
        lines.append(
            f"Utilisation measured there over {used['recipes']} recipes: {used['lowest']:.0%} to {used['highest']:.0%}, middle "
            f"{used['middle']:.0%} ({used['of']})." + left_out(used)
        )
    return lines


def left_out(used: Mapping[str, Any]) -> str:
    """Which recipes do not count, and why."""
    if not used["left_out"]:
        return ""
    named = ", ".join(f"{name} ({peak:.2f} TFLOP/s)" for name, peak in used["left_out"].items())
    return (
        f" Left out: {named}, as a probe of the peak below {LEAST_PEAK:.0%} of the middle one "
        f"({used['median_peak_tflops']:.2f}) was disturbed by other work."
    )


def gib(count: int) -> str:
    """Bytes as GiB."""
    return f"{count / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
