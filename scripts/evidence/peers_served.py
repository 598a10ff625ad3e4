"""Serves drafters of both sides of a comparison with `speculators` by vLLM (peers.py).

The library's drafter is served from the folder that the library saved and once more from our export
of our import of it (`AGAIN`), ours from our export. The engine's acceptance is compared with that
of our decoder, which peers.py reports: chains of `DEPTH`, temperature 0. DSpark needs vLLM's V2
runner, which on a CPU runs under Triton's interpreter, and answers few prompts, shortly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from inference.export.check import live
from inference.export.check.config import LiveConfig
from inference.export.check.live import Served
from inference.measure.prompts import load_prompts
from inference.measure.vllm_process import EngineProcess
from inference.report.markdown import markdown_table
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.common import Facts
from scripts.evidence.serving import FEW, INTERPRETED, POSITIONS, SHORT, Bench
from scripts.evidence.small_targets import Place
from scripts.tools.common import ROOT

DEPTH = 7
"""Drafted tokens of a step."""
ANSWERED = LiveConfig(prompts_per_domain=4, max_new_tokens=96, batches=(1,), seconds=3600.0)
"""The prompts of a kind that vLLM's default runner serves."""
INTERPRETED_KINDS = ("dspark",)
AGAIN = "speculators, exported again"
CAUSAL = (
    "vLLM runs the blocks of the library's own DFlash folders causally: it applies their "
    "`sliding_window_non_causal: false` to layers with full attention too, which the library "
    "trains in both directions. Exported again, they run as they were trained."
)


def serve_both(
    python: str, place: Place, target: TargetModel, kind: str, ours: Path, theirs: Path
) -> list[Facts]:
    """A row for each side, and one for our export of theirs.

    python: of an environment with vLLM; ours: a checkpoint; theirs: a folder that the library
    saved. Raises `UserError` if vLLM cannot be run; if it refuses a drafter, the row's `problems`
    says so.
    """
    with TemporaryDirectory(prefix="peers-served") as scratch:
        bench = Bench(TargetConfig(path=str(place.target)), target, Path(scratch))
        saved, imported = bench.saved(theirs, "speculators")

        def exported(checkpoint: Path, name: str) -> Served:
            out = bench.scratch / f"exported-{name}"
            bench.write(checkpoint, out)
            return replace(live.read_served(out, target), name=name)

        served = [exported(ours, "ours"), saved, exported(imported, AGAIN)]
        chains = [chain_of(one) for one in served]
        slow = kind in INTERPRETED_KINDS
        config = replace(ANSWERED, python=python)
        if slow:
            config = replace(config, prompts_per_domain=FEW, max_new_tokens=SHORT)
        requests = live.make_requests(config, load_prompts(place.measuring), target, DEPTH)
        environment = INTERPRETED if slow else {"PYTHONPATH": str(ROOT)}
        process = EngineProcess(python, config.seconds, environment=environment)
        positions = POSITIONS if slow else None
        if slow:
            room = POSITIONS - 2 * SHORT
            requests = [request for request in requests if len(request.tokens) < room]
        rows = live.live_check(target, chains, requests, process, config.batches, positions)
    return [{"kind": kind, "side": row.name, **row.to_dict()} for row in rows]


def chain_of(served: Served) -> Served:
    """A drafter that drafts `DEPTH` tokens in every step."""
    return replace(served, speculative={**served.speculative, "num_speculative_tokens": DEPTH})


def served_lines(rows: list[Facts]) -> list[str]:
    """The section of peers.md."""
    if not rows:
        return []
    header = ["target", "kind", "side", "identical", "tau, vLLM", "tau, Headstart", "notes"]
    table = []
    for row in rows:
        notes = "; ".join([*row["problems"], *row.get("corrected", ())])
        first = [row["target"], row["kind"], row["side"]]
        if "tau_engine" not in row:
            table.append([*first, "-", "-", "-", notes])
            continue
        figures = [f"{row['tau_engine']:.3f}", f"{row['tau_ours']:.3f}"]
        table.append([*first, f"{row['identical']}/{row['sequences']}", *figures, notes])
    causal = ["", CAUSAL] if any(row["kind"] == "dflash" for row in rows) else []
    return [
        "## Served by vLLM",
        "",
        f"The first seed's drafters in {rows[0]['engine']}, float32, temperature 0, {DEPTH} "
        "drafted tokens a step: the library's from the folder that it saved, ours from its export. "
        "**identical**: answers that are the engine's own plain answers. **tau**: the engine's "
        "definition (1 + accepted drafts / drafting steps), on the same prompts. **exported "
        "again**: our export of our import of the library's drafter. DSpark: fewer and shorter "
        "answers, because vLLM's V2 runner is interpreted on a CPU.",
        *causal,
        "",
        *markdown_table(header, table),
        "",
    ]
