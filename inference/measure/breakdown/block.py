"""Makes the report's block `lost`: decodes the sample with every arm, measures what wider
verifications cost, splits the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.api.drafter import forget
from inference.decoding.arm import Arm
from inference.decoding.costs import CostConfig, CostCurves, measure_costs
from inference.decoding.requests import Request
from inference.measure.breakdown.counts import Counts, Rates, expected_tau, rate_with_interval
from inference.measure.breakdown.observe import Watched, watch
from inference.measure.breakdown.split import Measured, best_tree, split
from inference.measure.breakdown.transcripts import transcript, write_transcripts
from inference.measure.config import BenchConfig, LostConfig
from inference.measure.metrics import Totals, divide
from inference.measure.prompts import Prompt, select_prompts
from inference.report import model as schema
from inference.target.model import TargetModel

POSITIONS = ((1, 17), (17, 33), (33, 65), (65, 129), (129, 257), (257, 0))
"""Parts of an answer: positions [first, end), the last part without an end. Position 0 is the token
of prefill."""


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
        chosen = select_prompts(prompts, config.prompts_per_domain)
        by_id = dict(zip((prompt.id for prompt in prompts), requests, strict=True))
        return cls(chosen, [by_id[prompt.id] for prompt in chosen])

    def count(self, answers: Sequence[Watched], depth: int, first: int = 0, end: int = 0) -> Counts:
        """See `Counts.of`."""
        names, domains = zip(*((prompt.id, prompt.domain) for prompt in self.prompts), strict=True)
        return Counts.of(answers, names, domains, depth, first, end)


def lost_block(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    sample: Sample,
    totals: Mapping[str, Totals],
    baseline: Totals,
    lengths: Mapping[str, float],
    costs: schema.Costs | None,
    out: Path,
) -> schema.Losses:
    """The block `lost` of report.json; writes `out`/transcripts.json beside it.

    totals: of every arm by its name. lengths: mean number of cached tokens in the steps of an arm.
    costs: the report's cost curves, if it has any.
    """
    lost, seed = config.lost, config.seed
    widening = {  # measured for all arms before anything else is decoded
        arm.name: _widening(lost, target, arm, sample, lengths[arm.name], costs, seed)
        for arm in arms
    }
    shown = select_prompts(sample.prompts, lost.transcripts) if lost.transcripts else []
    losses, transcripts = {}, []
    for arm in arms:
        temperature, nodes = arm.decode.temperature, arm.decode.tree().num_nodes
        watched = _watch_arm(target, arm, temperature, sample, lost.candidates if shown else 0)
        arm_totals = totals[arm.name].like(baseline)
        measured = Measured(arm_totals, baseline, config.repeats, nodes, widening[arm.name])
        losses[arm.name] = _drafter_loss(lost, target, arm, sample, watched, measured, seed)
        transcripts += [
            transcript(arm.name, prompt, answer, target.tokenizer, temperature)
            for prompt, answer in zip(sample.prompts, watched, strict=True)
            if prompt in shown
        ]
    if transcripts:
        write_transcripts(out, target.info.id, lost.candidates, transcripts)
    return schema.Losses(prompts=len(sample.prompts), arms=losses)


def _widening(
    config: LostConfig,
    target: TargetModel,
    arm: Arm,
    sample: Sample,
    length: float,
    costs: schema.Costs | None,
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
) -> schema.DrafterLoss:
    depth = arm.decode.tree().max_depth
    estimate = next((answer.estimate for answer in watched if answer.estimate), "")
    counts = sample.count(watched, depth)
    domains = {name: counts.take(rows) for name, rows in counts.domain_rows().items()}
    rates = Rates.of(counts, counts.once)
    best = best_tree(rates.ranks[0], measured.nodes)
    by_temperature = {arm.decode.temperature: counts}
    for temperature in config.temperatures:
        if temperature not in by_temperature:
            answers = _watch_arm(target, arm, temperature, sample, 0)
            by_temperature[temperature] = sample.count(answers, depth)

    def calibration(
        group: Counts, kind: type[schema.Block] = schema.CalibrationGap, **more: Any
    ) -> dict[str, Any]:
        """The key `calibration`, which is left out where drafts have no confidence."""
        gap = dict(group.calibration_gap(seed))
        return {"calibration": kind(**gap, **more)} if estimate else {}

    def domain_loss(name: str) -> schema.DomainLoss:
        group = domains[name]
        terms = dict(split(measured.take(name), group, seed))
        return schema.DomainLoss(**terms, **calibration(group))

    parts = {(first, end): sample.count(watched, depth, first, end) for first, end in POSITIONS}
    bins = counts.calibration_bins()
    return schema.DrafterLoss(
        widening=measured.widening,
        **dict(split(measured, counts, seed)),
        domains={
            name: domain_loss(name)
            for name, group in domains.items()
            if measured.take(name).arm.passes.any() and group.passes.any()
        },
        depths={
            name: [group.states(seed, level + 1) for level in range(depth)]
            for name, group in {"all": counts, **domains}.items()
        },
        positions=[
            schema.PositionStates(
                first=first, end=end, **dict(part.states(seed)), **calibration(part)
            )
            for (first, end), part in parts.items()
            if part.tested.any()
        ],
        temperatures=[
            _temperature_states(group, temperature, seed)
            for temperature, group in sorted(by_temperature.items())
        ],
        tree=schema.TreeComparison(
            nodes=measured.nodes,
            own=float(expected_tau(rates.kept)[0]),
            best=best.tau,
            choices=[list(path) for path in best.choices],
        ),
        **calibration(counts, schema.Calibration, estimate=estimate, bins=bins),
    )


def _temperature_states(counts: Counts, temperature: float, seed: int) -> schema.TemperatureStates:
    """tau of the sample at a temperature, with the states of its drafted tokens."""
    tau, interval = rate_with_interval(counts.committed, counts.passes, counts.draws(seed))
    return schema.TemperatureStates(
        temperature=float(temperature),
        tau=tau,
        tau_ci95=interval,
        **dict(counts.calibration_gap(seed)),
        **dict(counts.states(seed)),
    )
