"""The costs of the simulated server on this machine, for one way to draft: its steps, its prefill,
and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from heads.kernels.dispatch import choose
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import pick_bytes
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.measure.metrics import divide
from inference.target.memory import drafter_state_bytes, picking_bytes, plan_memory
from inference.target.model import TargetModel
from inference.traffic.simulate import Costs
from inference.tune.costs import StepCosts
from inference.tune.survey import Survey, Task

READ_TOGETHER = 4
"""Prompts read at once at one point of the prefill measurement; the other point is one prompt."""


@dataclass(frozen=True)
class Prefill:
    """Seconds of a prefill: once per call, and per token of the padded prompts."""

    once: float
    per_token: float


def measure_prefill(
    target: TargetModel, drafter: Any, draft: Draft, decode: DecodeConfig, task: Task, repeats: int
) -> Prefill:
    """Time the engine's prefill of one short prompt and of several long ones, the drafter's start
    included, and fit a line through both. Answers end with their first token, so nothing else is
    decoded."""
    ordered = sorted(task.requests, key=lambda request: len(request.tokens))
    points = []
    for chosen in ([ordered[0]], [ordered[-1]] * READ_TOGETHER):
        own = replace(draft.on(decode), batch_size=len(chosen))
        engine = Engine(target, None if draft == NONE else drafter, own)
        requests = [Request(place, item.tokens, item.seed, 1) for place, item in enumerate(chosen)]
        seconds = []
        for attempt in range(repeats + 1):
            engine.clock.reset()
            list(engine.run(requests))
            if attempt:  # the first attempt allocates
                seconds.append(engine.clock.seconds["prefill"])
        points.append((len(chosen) * len(chosen[0].tokens), median(seconds)))
    (few, short), (many, long) = points
    slope = max(0.0, divide(long - short, many - few))
    return Prefill(max(0.0, short - slope * few), slope)


def server_costs(
    costs: StepCosts, draft: Draft, rows: int, prefill: Prefill, lengths: Sequence[int]
) -> Costs:
    """The costs for the simulator. lengths: two different numbers of cached tokens; steps are
    assumed to be linear in the length."""
    low, high = lengths[0], lengths[-1]
    near, far = ([costs.step(draft, n, at) for n in range(1, rows + 1)] for at in (low, high))
    slopes = [max(0.0, divide(b - a, high - low)) for a, b in zip(near, far, strict=True)]
    fixed = [max(0.0, a - slope * low) for a, slope in zip(near, slopes, strict=True)]
    return Costs(tuple(fixed), tuple(slopes), prefill.once, prefill.per_token)


def kept_tokens(found: Survey, draft: Draft, task: Task) -> dict[str, list[int]]:
    """Tokens committed by each verification, by domain ("": all). An answer's last verification is
    left out, as the answer's end cuts it."""
    by_domain: dict[str, list[int]] = {"": []}
    for answer, domain in zip(found.answers[draft], task.domains, strict=True):
        counts = [record.committed for record in answer.passes[:-1]]
        by_domain.setdefault(domain, []).extend(counts)
        by_domain[""] += counts
    return {domain: counts or by_domain[""] or [1] for domain, counts in by_domain.items()}


def memory_bytes(
    target: TargetModel, drafter: Any, draft: Draft, decode: DecodeConfig, rows: int, context: int
) -> dict[str, int]:
    """Bytes that `rows` rows of `context` positions take: the target's cache, the drafter's state
    and weights, and a pass's activations."""
    engine = Engine(target, None if draft == NONE else drafter, draft.on(decode))
    slots, info = context + engine.tree.num_nodes + 1, target.info
    embedding, nodes = target.weights.embedding, engine.tree.num_nodes
    state = drafter_state_bytes(engine.drafter, engine.tree, rows, slots, info, embedding)
    kernel = choose(TREE_ATTENTION, target.device, target.dtype).implementation == "triton"
    chunk = min(decode.prefill_chunk, context)
    plan = plan_memory(
        *(info, target.dtype, target.cache_sizes(), rows, slots, nodes, state, chunk, kernel),
        sampling=picking_bytes(
            pick_bytes(decode.sampling(), own=True), target.device, target.dtype
        ),
    )
    return {
        "cache": plan.cache,
        "state": plan.drafter,
        "activations": plan.activations,
        "weights": engine.memory_bytes()["drafter"],
    }
