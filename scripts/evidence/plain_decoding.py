"""Checks that plain decoding is a fair baseline: `python -m scripts.evidence.plain_decoding`.

Arms: our loop without a drafter and with each `--drafter` (n-gram lookup if none is given),
uncompiled and compiled; transformers' greedy `generate` and prompt lookup and, with `--assistant`
(a drafter of kind distilled), its assisted generation with default settings and with our depth.
Each half, compiled or not, is a measurement of `inference.measure.run`: same weights, threads,
dtype and prompts, greedy, batch 1, all arms in turns.

The report (docs/reports/plain_decoding.json) has for every arm: seconds of whole calls, including
prefill; tokens; how many texts equal those of our plain loop; and how much faster per token it is
than the `generate` of the same half, with a bootstrap interval over prompts. For our arms it also
has milliseconds per step and phase, and for drafters tau, speedup and efficiency
(`inference.measure.metrics`). Compiling takes place before the measured calls. The command also
writes the table in docs/decoder.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from heads.api.checkpoint import load_drafter, new_drafter, read_config
from heads.api.registry import get_kind
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.execution.compiled import seconds_spent
from inference.manifest import write_json
from inference.measure import metrics
from inference.measure.answers import FINAL_FILE, Record, read_records
from inference.measure.baselines import BaselinesConfig
from inference.measure.config import BASELINE, BenchConfig
from inference.measure.prompts import load_prompts
from inference.measure.run import measure
from inference.report.claims import ratio_text
from inference.report.markdown import markdown_table
from inference.target.loading import DTYPES
from inference.target.model import TargetModel
from scripts.evidence.common import DOCS, Facts
from scripts.tools.common import PROMPTS, REPORTS, TARGET, Section, command, cpu_target, named

REPORT, PAGE = REPORTS / "plain_decoding.json", DOCS / "decoder.md"
SECTION = Section("plain decoding", "scripts/evidence/plain_decoding.py")
GENERATE = "transformers_generate"
WARM_UP = 8
"""Unmeasured prompts, long and short ones, for which every compiled graph is made."""


def report(given: argparse.Namespace) -> None:
    """Compare, write and print; raises `UserError` for a model that cannot be loaded."""
    if given.threads:
        torch.set_num_threads(given.threads)
    target = cpu_target(given.target, given.dtype)
    rows: Facts = {}
    for compiled in (False, True) if given.compile else (False,):
        prompts, found = measure_loops(given, target, compiled)
        # transformers' loops belong to the uncompiled half
        rows = {**rows, **found, **rows}
    content = {
        "target": named(given.target),
        "dtype": given.dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "prompts": prompts,
        "repeats": given.repeats,
        "max_new_tokens": given.tokens,
        "compile_seconds": round(seconds_spent(), 1),
        "arms": rows,
        "command": given.command,
    }
    write_json(given.out, content)
    if given.out == REPORT:
        SECTION.write(PAGE, table(content))
    print(json.dumps(content, indent=2))


def folder_and_depth(given: str) -> tuple[Path, int | None]:
    """FOLDER or FOLDER:DEPTH."""
    folder, _, depth = given.rpartition(":")
    return (Path(folder), int(depth)) if folder and depth.isdigit() else (Path(given), None)


def measure_loops(
    given: argparse.Namespace, target: TargetModel, compiled: bool
) -> tuple[int, Facts]:
    """Number of prompts, and rows of one half; our arms are called ours_<kind>[_compiled]."""
    decode = DecodeConfig(
        shape="chain", depth=given.depth, max_new_tokens=given.tokens, compile=compiled
    )
    arms = []
    depths = dict(given.drafter)
    for path in dict.fromkeys([*depths, *filter(None, [given.assistant])]):
        drafter = load_drafter(path, target.info, target.weights)
        draft = replace(decode, depth=depths.get(path) or given.depth)
        arms.append(Arm(read_config(path)["kind"], drafter, draft, str(path)))
    if not arms:
        settings = get_kind("ngram").config_class()
        drafter = new_drafter("ngram", settings, target.info, target.weights, seed=0)
        arms.append(Arm("ngram", drafter, decode))
    assisted = ("assisted", "assisted_constant") if given.assistant else ()
    bench = BenchConfig(
        prompts=str(given.prompts),
        prompts_per_domain=given.count,
        warmup_prompts=WARM_UP,
        repeats=given.repeats,
        baselines=BaselinesConfig(("generate", *assisted, "prompt_lookup")),
    )
    prompts = sorted(load_prompts(given.prompts), key=lambda prompt: len(str(prompt.messages)))
    ends = [prompts[place // 2 if place % 2 else -1 - place // 2] for place in range(len(prompts))]
    with TemporaryDirectory() as scratch:
        found = measure(bench, target, arms, ends, Path(scratch))
        assert found.repeats is not None
        records = defaultdict[str, list[Record]](list)
        for record in read_records(Path(scratch) / FINAL_FILE):
            if record.repeat in found.repeats.kept:
                records[record.arm].append(record)
    drafted = {one.name: one for one in found.drafters}
    suffix = "_compiled" if compiled else ""
    result = {}
    for name in records:
        row = summarise(name, records)
        own = name == BASELINE or name in drafted
        if own:
            row |= phases(records[name])
        if name in drafted:
            one = drafted[name]
            keys = ("tau", "speedup", "ideal_speedup", "efficiency")
            row |= {key: round(getattr(one, key), 4) for key in keys}
            row["speedup_ci95"] = [round(x, 4) for x in one.speedup_ci95]
        label = "plain" if name == BASELINE else name
        result[f"ours_{label}{suffix}" if own else name] = row
    return found.settings.prompts, result


def summarise(name: str, records: Mapping[str, Sequence[Record]]) -> Facts:
    """One arm. Its speed relative to `generate` is in tokens per second of whole calls."""
    plain = {(item.prompt, item.repeat): item.tokens for item in records[BASELINE]}
    tokens, seconds = per_prompt(records[name])
    other_tokens, other_seconds = per_prompt(records[GENERATE])
    weights = metrics.resample_weights(len(seconds), seed=0)
    fast = (weights @ tokens) / (weights @ seconds)
    slow = (weights @ other_tokens) / (weights @ other_seconds)
    ratio = (tokens.sum() / seconds.sum()) / (other_tokens.sum() / other_seconds.sum())
    return {
        "tokens": int(tokens.sum()),
        "identical_texts": sum(x.tokens == plain[x.prompt, x.repeat] for x in records[name]),
        "seconds": round(float(seconds.sum()), 4),
        "ms_per_token": round(1000 * float(seconds.sum() / tokens.sum()), 4),
        "speed_over_generate": round(float(ratio), 4),
        "ci95": [round(x, 4) for x in metrics.interval95(fast, slow)],
    }


def per_prompt(records: Sequence[Record]) -> tuple[metrics.Floats, metrics.Floats]:
    """Tokens and seconds, including prefill, by prompt, with repeats summed."""
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for record in records:
        sums[record.prompt][0] += len(record.tokens)
        sums[record.prompt][1] += sum(record.seconds.values())
    tokens, seconds = np.array([sums[prompt] for prompt in sorted(sums)], dtype=np.float64).T
    return tokens, seconds


def phases(records: Sequence[Record]) -> Facts:
    """The milliseconds of our steps by phase."""
    passes = sum(len(record.passes) for record in records)
    split = {
        phase: 1000 * sum(record.seconds.get(phase, 0.0) for record in records) / max(1, passes)
        for phase in metrics.PHASES
    }
    inside = (split["draft"] + split["verify"]) / sum(split.values())
    return {
        "step_ms": {phase: round(value, 4) for phase, value in split.items()},
        "outside_draft_and_verify": round(1 - inside, 4),
    }


HEADER = ["arm", "ms / token", "over generate", "tau", "speedup", "efficiency"]
HEADER += ["outside draft and verify", "texts"]


def table(content: Facts) -> str:
    """The table in docs/decoder.md."""
    rows = []
    for name, arm in content["arms"].items():
        outside = arm.get("outside_draft_and_verify")
        drafted = ["", "", ""]
        if "tau" in arm:
            speedup = ratio_text(arm["speedup"], arm["speedup_ci95"])
            drafted = [f"{arm['tau']:.2f}", speedup, f"{arm['efficiency']:.2f}"]
        rows.append(
            [
                name,
                f"{arm['ms_per_token']:.2f}",
                "1" if name == GENERATE else ratio_text(arm["speed_over_generate"], arm["ci95"]),
                *drafted,
                "" if outside is None else f"{outside:.1%}",
                f"{arm['identical_texts']}/{content['prompts'] * content['repeats']}",
            ]
        )
    facts = (
        f"{content['target']}, {content['dtype']}, {content['threads']} threads, batch 1, "
        f"{content['prompts']} prompts x {content['repeats']} repeats, up to "
        f"{content['max_new_tokens']} new tokens: "
        f"[plain_decoding.json](reports/plain_decoding.json), by `{content['command']}`."
    )
    return "\n".join([*markdown_table(HEADER, rows), "", facts])


main = command(
    report,
    target=TARGET,
    prompts=(PROMPTS, "a file or a folder"),
    count=(4, "prompts per domain"),
    tokens=(128, "most new tokens of an answer"),
    repeats=1,
    threads=(0, "0: as torch chooses"),
    dtype={"default": "float32", "choices": sorted(DTYPES)},
    drafter={
        "type": folder_and_depth,
        "action": "append",
        "default": [],
        "metavar": "FOLDER[:DEPTH]",
        "help": "with a depth of its own where it cannot draft so deep; may be repeated",
    },
    depth=(4, "drafted tokens of a chain"),
    assistant={"type": Path, "help": "a checkpoint of kind distilled"},
    compile={"action": argparse.BooleanOptionalAction, "default": True},
    out=REPORT,
)

if __name__ == "__main__":
    sys.exit(main())
