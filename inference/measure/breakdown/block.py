"""Makes the report's block `lost`: decodes the sample with every arm, measures the cost of wider
verifications, and splits the speed."""

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
from inference.measure.config import BASELINE, BenchConfig, LostConfig
from inference.measure.metrics import Totals, divide
from inference.measure.prompts import Prompt, Requests, select_prompts
from inference.report import model as schema
from inference.target.model import TargetModel

POSITIONS = ((1, 17), (17, 33), (33, 65), (65, 129), (129, 257), (257, 0))
"""Parts of an answer: positions [first, end), the last part without an end. Position 0 is the token
of prefill."""


def lost_block(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    requests: Requests,
    totals: Mapping[str, Totals],
    lengths: Mapping[str, float],
    costs: schema.Costs | None,
    out: Path,
) -> schema.Losses:
    """The block `lost` of report.json; writes `out`/transcripts.json next to it.

    totals, lengths: for the baseline and every arm, the sums over their answers and the mean number
    of cached tokens in their steps. costs: the report's cost curves, if it has any.
    """
    lost, baseline = config.lost, totals[BASELINE]
    chosen = select_prompts(prompts, lost.prompts_per_domain)
    asked = [requests[prompt.id] for prompt in chosen]
    sample = _Sample(lost, target, chosen, asked, config.seed)
    # measured for all arms before anything is decoded again
    widening = {arm.name: sample.widening(arm, lengths[arm.name], costs) for arm in arms}
    shown = select_prompts(chosen, lost.transcripts) if lost.transcripts else []
    losses, transcripts = {}, []
    for arm in arms:
        temperature, nodes = arm.decode.temperature, arm.decode.tree().num_nodes
        watched = sample.watch(arm, temperature, lost.candidates if shown else 0)
        arm_totals = totals[arm.name].like(baseline)
        measured = Measured(arm_totals, baseline, config.repeats, nodes, widening[arm.name])
        losses[arm.name] = sample.loss(arm, watched, measured)
        transcripts += [
            transcript(arm.name, prompt, answer, target.tokenizer, temperature)
            for prompt, answer in zip(chosen, watched, strict=True)
            if prompt in shown
        ]
    if transcripts:
        write_transcripts(out, target.info.id, lost.candidates, transcripts)
    return schema.Losses(prompts=len(chosen), arms=losses)


@dataclass(frozen=True)
class _Sample:
    """The prompts that are decoded once more, and their settings."""

    config: LostConfig
    target: TargetModel
    prompts: list[Prompt]
    requests: list[Request]
    seed: int

    def widening(self, arm: Arm, length: float, costs: schema.Costs | None) -> float:
        """verify(n) / verify(1) for the arm's draft at the mean length of its steps."""
        nodes, cached = arm.decode.tree().num_nodes, max(1, round(length))
        if costs is not None:
            curves = CostCurves.from_dict(costs.model_dump())
        else:
            text = [token for request in self.requests for token in request.tokens]
            cached = min(cached, self.target.info.max_position_embeddings - nodes - 1)
            repeats = self.config.repeats
            grid = CostConfig(nodes=(1, nodes), lengths=(cached,), repeats=repeats)
            curves = measure_costs(grid, self.target, [], text, self.seed)
        return divide(curves.verify(nodes, 1, cached), curves.verify(1, 1, cached))

    def watch(self, arm: Arm, temperature: float, candidates: int = 0) -> list[Watched]:
        """The answers of an arm, which does not keep them."""
        decode = replace(arm.decode, temperature=temperature)
        forget(arm.drafter)
        try:
            return watch(self.target, arm.drafter, decode, self.requests, candidates)
        finally:
            forget(arm.drafter)

    def count(self, answers: Sequence[Watched], depth: int, first: int = 0, end: int = 0) -> Counts:
        """See `Counts.of`."""
        return Counts.of(answers, self.prompts, depth, first, end)

    def loss(self, arm: Arm, watched: Sequence[Watched], measured: Measured) -> schema.DrafterLoss:
        """The split of the speed that an arm lacks."""
        depth, seed = arm.decode.tree().max_depth, self.seed
        estimate = next((answer.estimate for answer in watched if answer.estimate), "")
        counts = self.count(watched, depth)
        domains = {name: counts.take(rows) for name, rows in counts.domain_rows().items()}
        rates = Rates.of(counts, counts.once)
        best = best_tree(rates.ranks[0], measured.nodes)
        by_temperature = {arm.decode.temperature: counts}
        for temperature in self.config.temperatures:
            if temperature not in by_temperature:
                by_temperature[temperature] = self.count(self.watch(arm, temperature), depth)

        def calibration(
            group: Counts, kind: type[schema.Block] = schema.CalibrationGap, **more: Any
        ) -> dict[str, Any]:
            """The key `calibration`, which is left out if drafts have no confidence."""
            gap = dict(group.calibration_gap(seed))
            return {"calibration": kind(**gap, **more)} if estimate else {}

        parts = {(first, end): self.count(watched, depth, first, end) for first, end in POSITIONS}
        bins = counts.calibration_bins()
        return schema.DrafterLoss(
            widening=measured.widening,
            **dict(split(measured, counts, seed)),
            domains={
                name: schema.DomainLoss(
                    **dict(split(measured.take(name), group, seed)), **calibration(group)
                )
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
