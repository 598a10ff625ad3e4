"""Makes the report's block `lost`: decodes the sample with every arm, measures what wider verifications cost, splits the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.api.drafter import forget
from inference.decoding.arm import Arm
from inference.decoding.costs import CostConfig, CostCurves, measure_costs
from inference.decoding.requests import Request
from inference.measure.breakdown.config import LostConfig
from inference.measure.breakdown.counts import (
    POSITIONS,
    Counts,
    Rates,
    calibration,
    count,
    draws,
    expected_tau,
    ones,
    rate_with_interval,
    state_rates,
)
from inference.measure.breakdown.observe import Watched, watch
from inference.measure.breakdown.split import Measured, best_tree, split
from inference.measure.breakdown.transcripts import transcript, write_transcripts
from inference.measure.config import BenchConfig
from inference.measure.metrics import Totals, divide
from inference.measure.prompts import Prompt, select_prompts
from inference.target.model import TargetModel


@dataclass(frozen=True)
class Sample:
    """The prompts that are decoded once more."""

    prompts: list[Prompt]
    requests: list[Request]

    @classmethod
    def choose(cls, config: LostConfig, prompts: Sequence[Prompt], requests: Sequence[Request]) -> Sample:
        """The first prompts of every domain, in the measured order, with their requests."""
        chosen = {prompt.id for prompt in select_prompts(prompts, config.prompts_per_domain)}
        pairs = [(p, r) for p, r in zip(prompts, requests, strict=True) if p.id in chosen]
        return cls([p for p, _ in pairs], [r for _, r in pairs])

    def count(self, answers: Sequence[Watched], depth: int) -> Counts:
        return count(answers, self.ids, self.domains, depth)

    @property
    def ids(self) -> list[str]:
        return [prompt.id for prompt in self.prompts]

    @property
    def domains(self) -> list[str]:
        return [prompt.domain for prompt in self.prompts]

    def shown(self, per_domain: int) -> list[int]:
        """Rows of the first `per_domain` prompts of every domain."""
        if not per_domain:
            return []
        chosen = {prompt.id for prompt in select_prompts(self.prompts, per_domain)}
        return [row for row, prompt in enumerate(self.prompts) if prompt.id in chosen]


def lost_block(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    sample: Sample,
    totals: Mapping[str, Totals],
    baseline: Totals,
    lengths: Mapping[str, float],
    costs: Mapping[str, Any] | None,
    out: Path,
) -> dict[str, Any]:
    """The block `lost` of report.json; writes `out`/transcripts.json beside it.

    totals: of every arm by its name. lengths: cached tokens that a step of an arm finds on average. costs: the report's cost
    curves, if it has any.
    """
    lost = config.lost
    widening = {arm.name: _widening(lost, target, arm, sample, lengths[arm.name], costs, config.seed) for arm in arms}
    found, texts = {}, []
    for arm in arms:
        watched = _watched(target, arm, arm.decode.temperature, sample, lost.candidates if lost.transcripts else 0)
        measured = Measured(
            totals[arm.name].like(baseline), baseline, config.repeats, arm.decode.tree().num_nodes, widening[arm.name]
        )
        found[arm.name] = _arm_block(lost, target, arm, sample, watched, measured, config.seed)
        texts += [
            transcript(arm.name, sample.prompts[row], watched[row], target.tokenizer, arm.decode.temperature)
            for row in sample.shown(lost.transcripts)
        ]
    if texts:
        write_transcripts(out, target.info.id, lost.candidates, texts)
    return {"prompts": len(sample.prompts), "arms": found}


def _widening(
    config: LostConfig,
    target: TargetModel,
    arm: Arm,
    sample: Sample,
    length: float,
    costs: Mapping[str, Any] | None,
    seed: int,
) -> float:
    """verify(n) / verify(1) for the arm's draft at the mean length of its steps."""
    nodes, cached = arm.decode.tree().num_nodes, max(1, round(length))
    if costs is not None:
        curves = CostCurves.from_dict(costs)
    else:
        text = [token for request in sample.requests for token in request.tokens]
        cached = min(cached, target.info.max_position_embeddings - nodes - 1)
        grid = CostConfig(nodes=(1, nodes), lengths=(cached,), repeats=config.repeats)
        curves = measure_costs(grid, target, [], text, seed)
    return divide(curves.verify(nodes, 1, cached), curves.verify(1, 1, cached))


def _watched(
    target: TargetModel, arm: Arm, temperature: float, sample: Sample, candidates: int
) -> list[Watched]:
    with ExitStack() as stack:
        forget(arm.drafter)
        stack.callback(forget, arm.drafter)
        return watch(target, arm.drafter, replace(arm.decode, temperature=temperature), sample.requests, candidates)


def _arm_block(
    config: LostConfig,
    target: TargetModel,
    arm: Arm,
    sample: Sample,
    watched: Sequence[Watched],
    measured: Measured,
    seed: int,
) -> dict[str, Any]:
    depth = arm.decode.tree().max_depth
    counts = sample.count(watched, depth)
    groups = {"all": counts, **{name: counts.take(rows) for name, rows in counts.domain_rows().items()}}
    domains = {
        name: {**split(measured.take(name), group, seed), **_calibrated(watched, group, seed)}
        for name, group in groups.items()
        if name != "all" and measured.take(name).arm.passes.any() and group.passes.any()
    }
    rates = Rates.of(counts, ones(counts))
    best = best_tree(rates.ranks[0], measured.nodes)
    block = {
        "widening": measured.widening,
        **split(measured, counts, seed),
        "domains": domains,
        "depths": {
            name: [state_rates(group, draws(group, seed), level + 1) for level in range(depth)]
            for name, group in groups.items()
        },
        "positions": _positions(sample, watched, depth, seed),
        "temperatures": [_temperature(counts, arm.decode.temperature, seed)],
        "tree": {
            "nodes": measured.nodes,
            "own": float(expected_tau(rates.kept)[0]),
            "best": best.tau,
            "choices": [list(path) for path in best.choices],
        },
    }
    estimate = next((answer.estimate for answer in watched if answer.estimate), "")
    if estimate:
        block["calibration"] = {"estimate": estimate, **calibration(counts, draws(counts, seed))}
    for temperature in config.temperatures:
        if temperature != arm.decode.temperature:
            other = sample.count(_watched(target, arm, temperature, sample, 0), depth)
            block["temperatures"].append(_temperature(other, temperature, seed))
    block["temperatures"].sort(key=lambda row: row["temperature"])
    return block


def _positions(sample: Sample, watched: Sequence[Watched], depth: int, seed: int) -> list[dict[str, Any]]:
    """Acceptance and overlap by place in the answer, where there are any states."""
    found = []
    for first, end in POSITIONS:

        def inside(place: int, state: Any, first: int = first, end: int = end) -> bool:
            return place >= first and (not end or place < end)

        counts = count(watched, sample.ids, sample.domains, depth, inside)
        if counts.tested.any():
            states = state_rates(counts, draws(counts, seed))
            found.append({"first": first, "end": end, **states, **_calibrated(watched, counts, seed)})
    return found


def _calibrated(watched: Sequence[Watched], counts: Counts, seed: int) -> dict[str, Any]:
    """`calibration` of some of the states, without its bins; empty where drafts have no confidence."""
    if not any(answer.estimate for answer in watched):
        return {}
    found = calibration(counts, draws(counts, seed))
    return {"calibration": {name: found[name] for name in ("ece", "ece_ci95")}}


def _temperature(counts: Counts, temperature: float, seed: int) -> dict[str, Any]:
    """tau of the sample at a temperature, and what the tables say of its states."""
    weights = draws(counts, seed)
    tau, interval = rate_with_interval(counts.committed, counts.passes, weights)
    said = calibration(counts, weights)
    return {
        "temperature": float(temperature),
        "tau": tau,
        "tau_ci95": interval,
        "ece": said["ece"],
        "ece_ci95": said["ece_ci95"],
        **state_rates(counts, weights),
    }
