"""The block `baselines` of report.json: other decoding loops, on the same prompts and with the same
weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference.decoding.arm import Arm
from inference.decoding.requests import Request
from inference.measure import metrics
from inference.measure.answers import Record
from inference.measure.config import BenchConfig
from inference.measure.metrics import Totals, divide
from inference.measure.prompts import Requests
from inference.measure.vllm_process import measure_vllm
from inference.report.model import LoopResult
from inference.target.model import TargetModel


@dataclass(frozen=True)
class Loop:
    """One decoding loop: the sums over its answers, and the answers themselves."""

    totals: Totals
    records: Sequence[Record]
    interleaved: bool = True
    """False for an engine that ran in a separate process."""
    version: str | None = None
    """Version of a foreign engine."""
    tau: float | None = None
    """Tokens per pass if the engine counts them itself; None: computed from the records."""


def served_loops(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    requests: Requests,
    warmup: Sequence[Request],
    parts: Mapping[str, tuple[str, str]],
) -> dict[str, Loop]:
    """The requested modes of vLLM. parts: the domain and the unit of every prompt, by its id."""
    loops = {}
    for mode in measure_vllm(config.baselines, target, arms, requests, warmup, config.repeats):
        records = []
        for answer in mode.answers:
            tokens, key = answer["tokens"], (answer["id"], answer["repeat"])
            # recorded as one step: tau comes from the engine's own counters
            steps = [(0, len(tokens) - 1, False)] if len(tokens) > 1 else []
            records.append(Record(mode.name, *key, tokens, steps, answer["seconds"]))
        totals = Totals.collect([record.outcome(*parts[record.prompt]) for record in records], 0)
        counted = mode.acceptance
        tau = 1.0 + divide(counted.get("accepted_tokens", 0), counted.get("drafts", 0))
        loops[mode.name] = Loop(totals, records, False, mode.version, tau)
    return loops


def baseline_block(plain: Loop, loops: Mapping[str, Loop], seed: int) -> dict[str, LoopResult]:
    """Every other loop, and ours without a drafter (`plain`), by name."""
    known = {record.prompt: record.tokens for record in plain.records}
    ours, found = end_to_end(plain.records), {}
    for name, loop in loops.items():
        totals, whole = loop.totals, end_to_end(loop.records)
        ratio, interval = metrics.speedup(totals, plain.totals, seed)
        own_tau = divide(totals.committed.sum(), totals.passes.sum())
        same = (record.tokens == known[record.prompt] for record in loop.records)
        found[name] = LoopResult(
            tokens_per_second=metrics.tokens_per_second(totals),
            tokens_per_second_ci95=metrics.tokens_per_second_ci95(totals, seed),
            ratio=ratio,
            ratio_ci95=interval,
            end_to_end_tokens_per_second=whole,
            end_to_end_ratio=divide(whole, ours),
            tau=own_tau if loop.tau is None else loop.tau,
            sequences=len(loop.records),
            identical=sum(same),
            interleaved=loop.interleaved,
            **({} if loop.version is None else {"version": loop.version}),
        )
    return found


def end_to_end(records: Sequence[Record]) -> float:
    """Tokens per second including prefill and its token."""
    tokens = sum(len(record.tokens) for record in records)
    return divide(tokens, sum(sum(record.seconds.values()) for record in records))
