"""The optional blocks of report.json: others' loops beside ours (`baselines`), `profile`, `costs`
and `roofline`.

Each is measured when `bench` asks for it, after the arms, on the same prompts and with the same
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from inference.decoding.arm import Arm
from inference.decoding.costs import measure_costs
from inference.decoding.requests import PassRecord, Request
from inference.measure import metrics
from inference.measure.answers import Record
from inference.measure.config import BenchConfig
from inference.measure.metrics import Outcome, Totals, divide
from inference.measure.profile import profile
from inference.measure.roofline import roofline
from inference.measure.vllm_process import ServedMode, measure_vllm
from inference.report.model import (
    Baseline,
    Costs,
    DrafterResult,
    LoopResult,
    Losses,
    Profile,
    Roofline,
)
from inference.target.model import TargetModel

TEXT_TOKENS = 1 << 16
"""Most token ids of prompts that are strung together as text for caches."""


@dataclass(frozen=True)
class Loop:
    """One decoding loop: the sums over its answers, and the answers themselves."""

    totals: Totals
    records: Sequence[Record]
    interleaved: bool = True
    """False for an engine that ran in a process of its own."""
    version: str | None = None
    """Version of a foreign engine."""
    tau: float | None = None
    """Tokens per pass where the engine counts them itself; None: by the records."""


class OptionalBlocks(TypedDict, total=False):
    """The blocks of `Report` that `bench` asks for."""

    profile: Profile
    costs: Costs
    roofline: Roofline
    baselines: dict[str, LoopResult]
    lost: Losses


def device_blocks(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    requests: Mapping[str, Request],
    lengths: Mapping[str, float],
    baseline: Baseline,
    drafters: Sequence[DrafterResult],
) -> OptionalBlocks:
    """The blocks `profile`, `costs` and `roofline`, as far as they are asked for.

    requests: prompt id -> request. lengths: see `mean_length`, for the baseline and every arm.
    baseline, drafters: the report's blocks of these names.
    """
    blocks: OptionalBlocks = {}
    text = [token for request in requests.values() for token in request.tokens][:TEXT_TOKENS]
    if config.profile.wanted:
        blocks["profile"] = profile(
            config.profile, target, arms, list(requests.values()), list(requests), config.seed
        )
    if config.costs.nodes:
        curves = measure_costs(config.costs, target, arms, text, config.seed)
        blocks["costs"] = Costs.model_validate(curves.to_dict())
    if config.roofline:
        blocks["roofline"] = roofline(target, arms, baseline, drafters, text, lengths)
    return blocks


def mean_length(requests: Mapping[str, Request], records: Sequence[Record]) -> float:
    """Cached tokens that a step of an arm finds on average."""
    cached, steps = 0, 0
    for record in records:
        length = len(requests[record.prompt].tokens)
        for _, committed, _ in record.passes:
            cached, steps, length = cached + length, steps + 1, length + committed
    return divide(cached, steps)


# Other people's loops


def served_loops(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    requests: Mapping[str, Request],
    warmup: Sequence[Request],
) -> dict[str, Loop]:
    """The modes of vLLM that are asked for, each measured in a process of its own."""
    modes = measure_vllm(config.baselines, target, arms, requests, warmup, config.repeats)
    return {mode.name: _served_loop(mode) for mode in modes}


def _served_loop(mode: ServedMode) -> Loop:
    records = []
    for (prompt, repeat), tokens in mode.tokens.items():
        # Recorded as one step: tau comes from the engine's own counters.
        steps = [(0, len(tokens) - 1, False)] if len(tokens) > 1 else []
        seconds = mode.seconds[prompt, repeat]
        records.append(Record(mode.name, prompt, repeat, tokens, steps, seconds))
    outcomes = [
        Outcome(record.prompt, "", [PassRecord(*step) for step in record.passes], record.seconds)
        for record in records
    ]
    drafts = mode.acceptance.get("drafts", 0)
    tau = 1.0 + divide(mode.acceptance.get("accepted_tokens", 0), drafts)
    return Loop(Totals.collect(outcomes, 0), records, False, mode.version, tau)


def baseline_block(plain: Loop, loops: Mapping[str, Loop], seed: int) -> dict[str, LoopResult]:
    """The `baselines` block: every loop beside our own without a drafter (`plain`), by name."""
    known = {(record.prompt, record.repeat): record.tokens for record in plain.records}
    return {name: _loop_result(loop, plain, known, seed) for name, loop in loops.items()}


def _loop_result(
    loop: Loop, plain: Loop, known: Mapping[tuple[str, int], list[int]], seed: int
) -> LoopResult:
    totals = loop.totals
    ratio, interval = metrics.speedup(totals, plain.totals, seed)
    whole, ours = end_to_end(loop.records), end_to_end(plain.records)
    own_tau = divide(totals.committed.sum(), totals.passes.sum())
    same = (record.tokens == known[record.prompt, record.repeat] for record in loop.records)
    return LoopResult(
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


def end_to_end(records: Sequence[Record]) -> float:
    """Tokens per second with prefill and its token."""
    tokens = sum(len(record.tokens) for record in records)
    return divide(tokens, sum(sum(record.seconds.values()) for record in records))
