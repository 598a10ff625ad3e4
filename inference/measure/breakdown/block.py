"""Makes the report's block `lost`: decodes the sample with every arm, measures what wider
verifications cost, splits the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from heads.api.drafter import forget
from inference.decoding.arm import Arm
from inference.decoding.costs import CostConfig, CostCurves, measure_costs
from inference.decoding.requests import Request
from inference.measure.breakdown.config import LostConfig
from inference.measure.breakdown.counts import (
    POSITIONS,
    Counts,
    Rates,
    calibration_bins,
    calibration_gap,
    count,
    draws,
    expected_tau,
    ones,
    rate_with_interval,
    state_rates,
)
from inference.measure.breakdown.observe import State, Watched, watch
from inference.measure.breakdown.split import Measured, best_tree, split
from inference.measure.breakdown.transcripts import transcript, write_transcripts
from inference.measure.config import BenchConfig
from inference.measure.metrics import Totals, divide
from inference.measure.prompts import Prompt, select_prompts
from inference.report.model import (
    Block,
    Calibration,
    CalibrationGap,
    Costs,
    DomainLoss,
    DrafterLoss,
    Losses,
    PositionStates,
    TemperatureStates,
    TreeComparison,
)
from inference.target.model import TargetModel

Part = TypeVar("Part", bound=Block)


@dataclass(frozen=True)
class Sample:
    """The prompts that are decoded once more."""

    prompts: list[Prompt]
    requests: list[Request]

    @classmethod
    def choose(
        cls, config: LostConfig, prompts: Sequence[Prompt], requests: Sequence[Request]
    ) -> Sample:
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
    costs: Costs | None,
    out: Path,
) -> Losses:
    """The block `lost` of report.json; writes `out`/transcripts.json beside it.

    totals: of every arm by its name. lengths: mean number of cached tokens in the steps of an arm.
    costs: the report's cost curves, if it has any.
    """
    lost, seed = config.lost, config.seed
    widening = {  # measured for all arms before anything else is decoded
        arm.name: _widening(lost, target, arm, sample, lengths[arm.name], costs, seed)
        for arm in arms
    }
    losses, transcripts = {}, []
    for arm in arms:
        temperature, nodes = arm.decode.temperature, arm.decode.tree().num_nodes
        candidates = lost.candidates if lost.transcripts else 0
        watched = _watch_arm(target, arm, temperature, sample, candidates)
        arm_totals = totals[arm.name].like(baseline)
        measured = Measured(arm_totals, baseline, config.repeats, nodes, widening[arm.name])
        losses[arm.name] = _drafter_loss(lost, target, arm, sample, watched, measured, seed)
        transcripts += [
            transcript(arm.name, sample.prompts[row], watched[row], target.tokenizer, temperature)
            for row in sample.shown(lost.transcripts)
        ]
    if transcripts:
        write_transcripts(out, target.info.id, lost.candidates, transcripts)
    return Losses(prompts=len(sample.prompts), arms=losses)


def _widening(
    config: LostConfig,
    target: TargetModel,
    arm: Arm,
    sample: Sample,
    length: float,
    costs: Costs | None,
    seed: int,
) -> float:
    """verify(n) / verify(1) for the arm's draft at the mean length of its steps."""
    nodes, cached = arm.decode.tree().num_nodes, max(1, round(length))
    if costs is not None:
        curves = CostCurves.from_dict(costs.model_dump())
    else:
        text = [token for request in sample.requests for token in request.tokens]
        cached = min(cached, target.info.max_position_embeddings - nodes - 1)
        grid = CostConfig(nodes=(1, nodes), lengths=(cached,), repeats=config.repeats)
        curves = measure_costs(grid, target, [], text, seed)
    return divide(curves.verify(nodes, 1, cached), curves.verify(1, 1, cached))


def _watch_arm(
    target: TargetModel, arm: Arm, temperature: float, sample: Sample, candidates: int
) -> list[Watched]:
    decode = replace(arm.decode, temperature=temperature)
    forget(arm.drafter)
    try:
        return watch(target, arm.drafter, decode, sample.requests, candidates)
    finally:
        forget(arm.drafter)


def _drafter_loss(
    config: LostConfig,
    target: TargetModel,
    arm: Arm,
    sample: Sample,
    watched: Sequence[Watched],
    measured: Measured,
    seed: int,
) -> DrafterLoss:
    depth = arm.decode.tree().max_depth
    counts = sample.count(watched, depth)
    domains = {name: counts.take(rows) for name, rows in counts.domain_rows().items()}
    rates = Rates.of(counts, ones(counts))
    best = best_tree(rates.ranks[0], measured.nodes)
    by_temperature = {arm.decode.temperature: counts}
    for temperature in config.temperatures:
        if temperature not in by_temperature:
            answers = _watch_arm(target, arm, temperature, sample, 0)
            by_temperature[temperature] = sample.count(answers, depth)
    loss = DrafterLoss(
        widening=measured.widening,
        **dict(split(measured, counts, seed)),
        domains={
            name: _calibrate(
                DomainLoss(**dict(split(measured.take(name), group, seed))),
                _gap(watched, group, seed),
            )
            for name, group in domains.items()
            if measured.take(name).arm.passes.any() and group.passes.any()
        },
        depths={
            name: [state_rates(group, draws(group, seed), level + 1) for level in range(depth)]
            for name, group in {"all": counts, **domains}.items()
        },
        positions=_positions(sample, watched, depth, seed),
        temperatures=[
            _temperature_states(group, temperature, seed)
            for temperature, group in sorted(by_temperature.items())
        ],
        tree=TreeComparison(
            nodes=measured.nodes,
            own=float(expected_tau(rates.kept)[0]),
            best=best.tau,
            choices=[list(path) for path in best.choices],
        ),
    )
    return _calibrate(loss, _calibration(watched, counts, seed))


def _positions(
    sample: Sample, watched: Sequence[Watched], depth: int, seed: int
) -> list[PositionStates]:
    """The drafted tokens by their position in the answer; parts without any are left out."""
    found = []
    for first, end in POSITIONS:

        def inside(place: int, state: State, first: int = first, end: int = end) -> bool:
            return place >= first and (not end or place < end)

        counts = count(watched, sample.ids, sample.domains, depth, inside)
        if counts.tested.any():
            states = state_rates(counts, draws(counts, seed))
            part = PositionStates(first=first, end=end, **dict(states))
            found.append(_calibrate(part, _gap(watched, counts, seed)))
    return found


def _gap(watched: Sequence[Watched], counts: Counts, seed: int) -> CalibrationGap | None:
    """None where drafts have no confidence."""
    if not any(answer.estimate for answer in watched):
        return None
    return calibration_gap(counts, draws(counts, seed))


def _calibration(watched: Sequence[Watched], counts: Counts, seed: int) -> Calibration | None:
    """As `_gap`, with the bins and the source of the confidences."""
    estimate = next((answer.estimate for answer in watched if answer.estimate), "")
    if not estimate:
        return None
    gap, bins = calibration_gap(counts, draws(counts, seed)), calibration_bins(counts)
    return Calibration(estimate=estimate, **dict(gap), bins=bins)


def _calibrate(block: Part, calibration: CalibrationGap | Calibration | None) -> Part:
    """`block` with its calibration; the key is left out of report.json where there is none."""
    if calibration is None:
        return block
    return block.model_copy(update={"calibration": calibration})


def _temperature_states(counts: Counts, temperature: float, seed: int) -> TemperatureStates:
    """tau of the sample at a temperature, with the states of its drafted tokens."""
    weights = draws(counts, seed)
    tau, interval = rate_with_interval(counts.committed, counts.passes, weights)
    return TemperatureStates(
        temperature=float(temperature),
        tau=tau,
        tau_ci95=interval,
        **dict(calibration_gap(counts, weights)),
        **dict(state_rates(counts, weights)),
    )
