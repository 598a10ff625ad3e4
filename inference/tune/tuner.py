"""Chooses how to draft with one drafter on this machine, for every batch size and temperature asked for.

1. Survey: how much of every draft is accepted, from the target's own answers to tuning prompts (`survey`).
2. Costs: what drafting, verifying and committing take, as curves, corrected by short decodings (`costs`).
3. Prediction: tokens per second of every draft = tokens of the blocks / sum of their steps' seconds.
4. Check: the drafts with the best predictions answer all blocks, taking turns with plain decoding, those close to the fastest more
   often; the one that prediction and measurement together say is the fastest is chosen, or none when plain decoding is as fast.

Legend: B rows decoded together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine
from inference.kernels.packed_linear import packed_linears
from inference.measure import metrics
from inference.measure.metrics import Totals, divide
from inference.measure.profile import Turn, take_turns
from inference.measure.prompts import Prompt
from inference.target.model import TargetModel
from inference.tune.config import TuneConfig
from inference.tune.costs import StepCosts, TimedRun, measure_curves
from inference.tune.drafts import described
from inference.tune.survey import Survey, Task, survey
from inference.tune.workload import Answered, Steps, batch_steps

Say = Callable[[str], None]
CALIBRATION_TURNS, CALIBRATION_TOKENS = 16, 24
"""Cost curves are corrected by short answers in many turns: a machine's speed changes within seconds, and all take their share."""
TIE = 0.02
"""Drafts whose speeds differ by less than this share are equally fast: a check of minutes measures no finer."""
CLOSE = 0.1
"""Drafts within this share of the fastest run longer: of several that are equally fast the luckiest of a short run would win."""
PREDICTION_ERROR = 0.06
"""Standard deviation of log(predicted / measured speedup) in a measurement before that of docs/reports/tune.json."""


@dataclass(frozen=True)
class Prediction:
    """What a draft is expected to do at one batch size: tokens per second, tau, seconds per step by phase."""

    draft: Draft
    tokens_per_second: float
    tau: float
    phases: Mapping[str, float]


@dataclass
class Tuner:
    """One drafter's tuning: what is known so far. say: is told what is being done."""

    config: TuneConfig
    target: TargetModel
    drafter: Any
    task: Task
    decode: DecodeConfig
    say: Say
    surveys: dict[float, Survey] = field(default_factory=dict)
    costs: StepCosts | None = None

    @classmethod
    def prepare(
        cls,
        config: TuneConfig,
        target: TargetModel,
        drafter: Any,
        prompts: Sequence[Prompt],
        decode: DecodeConfig,
        say: Say = lambda _: None,
    ) -> Tuner:
        """Choose the prompts. decode: sampling settings and seed; its draft, batch and lengths are the tuner's business."""
        decode = replace(
            decode, max_new_tokens=config.max_new_tokens, rule="match", shape="none", choices=(), adaptive="none",
            adaptive_lengths=(), adaptive_costs=(),
        )  # fmt: skip
        return cls(config, target, drafter, Task.of(config, target, prompts, decode), decode, say)

    def at(self, temperature: float) -> DecodeConfig:
        """The decode settings at a temperature."""
        return replace(self.decode, temperature=temperature)

    # ---- what is known -------------------------------------------------------------------------------------------------------

    def survey(self, temperature: float) -> Survey:
        """Acceptance at a temperature, measured once."""
        if temperature not in self.surveys:
            self.say(f"acceptance at temperature {temperature:g} on {len(self.task.requests)} prompts")
            found = survey(self.config, self.target, self.drafter, self.task, self.at(temperature))
            self.surveys[temperature] = found
        return self.surveys[temperature]

    def step_costs(self) -> StepCosts:
        """Costs of all drafts of all temperatures at all batch sizes, measured once."""
        if self.costs is None:
            drafts = list(dict.fromkeys(draft for t in self.config.temperatures for draft in self.survey(t).drafts))
            batches = self.config.batches
            self.say(f"cost curves of {len(drafts)} drafts at batch sizes {', '.join(map(str, batches))}")
            lengths = sorted({self.task.mean_prompt, self.task.longest})
            text = [token for request in self.task.requests for token in request.tokens]
            curves = measure_curves(
                self.target, self.drafter, drafts, self.decode, batches, lengths, text, self.config.repeats, self.config.seed
            )  # fmt: skip
            self.costs = StepCosts(curves)
        return self.costs

    def calibrated(self, batch: int) -> StepCosts:
        """The costs, corrected at a batch size; corrected when first asked for, that is right before its finalists run, since a
        machine's speed drifts from minute to minute.
        """
        costs = self.step_costs()
        if (NONE.family, batch) not in costs.calibrations:
            self.calibrate(costs, batch)
        return costs

    def calibrate(self, costs: StepCosts, batch: int) -> None:
        """Correct the curves at a batch size by decoding with the seemingly best draft of every family, and with another chain."""
        temperature = self.config.temperatures[0]
        self.say(f"fixed time of a step at batch size {batch}")
        drafts = representatives([item.draft for item in self.predictions(temperature, batch, costs)])
        count = len(self.task.requests)
        blocks = [[(turn * batch + place) % count for place in range(batch)] for turn in range(CALIBRATION_TURNS)]
        runs: dict[str, list[TimedRun]] = {}
        for draft, turns in self.run(drafts, temperature, batch, blocks, CALIBRATION_TOKENS).items():
            done = [batch_steps(answered(turn), batch) for turn in turns]
            steps = sum(done[1:], done[0])
            run = TimedRun(draft, steps.mean_length, self.nodes(draft, steps), _booked(turns))
            runs.setdefault(draft.family, []).append(run)
        for family, found in runs.items():
            costs.calibrate(family, batch, found)

    # ---- predicting and running ----------------------------------------------------------------------------------------------

    def predictions(self, temperature: float, batch: int, costs: StepCosts) -> list[Prediction]:
        """Every draft's, the fastest first."""
        found = self.survey(temperature)
        blocks = self.task.blocks(batch, self.config.rounds)
        rows = [self.predict(draft, found.steps(draft, blocks, batch), found, batch, costs) for draft in found.drafts]
        return sorted(rows, key=lambda item: -item.tokens_per_second)

    def predict(self, draft: Draft, steps: Steps, found: Survey, batch: int, costs: StepCosts) -> Prediction:
        """One draft's, for steps that are known."""
        phases = costs.phases(draft, batch, steps.mean_length, self.nodes(draft, steps))
        speed = divide(steps.tokens, steps.steps * sum(phases.values()))
        return Prediction(draft, speed, found.estimate(draft, self.config.seed).tau, phases)

    def nodes(self, draft: Draft, steps: Steps) -> float:
        """Nodes verified per row and step on average; 0 where the draft's size says so."""
        return steps.mean_nodes if draft.family == "adaptive" else 0.0

    def compared(self, drafts: Sequence[Draft], temperature: float, batch: int) -> dict[Draft, list[Turn]]:
        """Drafts answer all prompts `rounds` times, taking turns with plain decoding, and those close to the fastest
        `close_rounds` times on top; plain decoding always does.
        """
        blocks = self.task.blocks(batch, self.config.rounds + self.config.close_rounds)
        first = len(self.task.blocks(batch, self.config.rounds))
        turns = self.run(list(dict.fromkeys([NONE, *drafts])), temperature, batch, blocks[:first])
        rows = self.measured(turns)
        least = (1.0 - CLOSE) * rows[0]["tokens_per_second"]
        close = [row["draft"] for row in rows if row["tokens_per_second"] >= least]
        if len(close) > 1 and blocks[first:]:
            self.say(f"cannot be told apart yet: {', '.join(draft.label for draft in close)}")
            again = self.run(list(dict.fromkeys([NONE, *close])), temperature, batch, blocks, skip=first)
            turns = {draft: [*taken, *again.get(draft, [])] for draft, taken in turns.items()}
        return turns

    def run(
        self,
        drafts: Sequence[Draft],
        temperature: float,
        batch: int,
        blocks: Sequence[Sequence[int]],
        most: int = 0,
        skip: int = 0,
    ) -> dict[Draft, list[Turn]]:
        """Decode blocks with each of these drafts, taking turns. most: tokens of an answer; 0: as the task says. skip: the first
        blocks, which were decoded before: a prompt that comes again samples with another seed.
        """
        requests = self.task.block_requests(blocks)[skip:]
        if most:
            requests = [[replace(item, max_new_tokens=min(most, item.max_new_tokens)) for item in block] for block in requests]
        decode = replace(self.at(temperature), batch_size=batch)
        room = self.task.longest + max(draft.size for draft in drafts) + 1
        engines = {
            draft: Engine(
                self.target, None if draft == NONE else self.drafter, draft.on(decode), capacity=room
            )
            for draft in drafts
        }
        with ExitStack() as stack:  # once for all runs, as the target's weights are
            stack.enter_context(packed_linears(self.drafter))
            return take_turns(engines, requests, batch)

    def measured(self, turns: Mapping[Draft, Sequence[Turn]]) -> list[dict[str, Any]]:
        """Speeds of drafts that took turns, with intervals over blocks; the fastest first. Plain decoding is among them, and took
        no fewer turns than any: each draft is compared with it over the draft's own blocks.
        """
        rows = []
        for draft, taken in turns.items():
            total, seed = summed(draft, taken), self.config.seed
            ratio, interval = metrics.speedup(total, summed(NONE, turns[NONE][: len(taken)]), seed)
            rows.append(
                {
                    "draft": draft,
                    "turns": len(taken),
                    "tokens_per_second": metrics.tokens_per_second(total),
                    "tokens_per_second_ci95": list(metrics.tokens_per_second_ci95(total, seed)),
                    "speedup": ratio,
                    "speedup_ci95": list(interval),
                    "tau": metrics.tau_estimate(total, seed).tau,
                }
            )
        return sorted(rows, key=lambda row: -float(row["tokens_per_second"]))

    # ---- the whole -----------------------------------------------------------------------------------------------------------

    def tune(self) -> list[dict[str, Any]]:
        """One row per batch size and temperature: the draft chosen, all predictions, and what was measured of the finalists."""
        return [self.row(temperature, batch) for temperature in self.config.temperatures for batch in self.config.batches]

    def row(self, temperature: float, batch: int) -> dict[str, Any]:
        """Predict, run the best few, and choose among them, at one batch size and temperature."""
        predicted = self.predictions(temperature, batch, self.calibrated(batch))
        finalists = [item.draft for item in predicted if item.draft != NONE][: self.config.finalists]
        self.say(f"batch size {batch}, temperature {temperature:g}: running {', '.join(d.label for d in finalists)}")
        measured = self.measured(self.compared(finalists, temperature, batch))
        expected = {item.draft: item for item in predicted}
        plain = expected[NONE].tokens_per_second
        chosen = choose(measured, {draft: divide(item.tokens_per_second, plain) for draft, item in expected.items()})
        return {
            "batch_size": batch,
            "temperature": temperature,
            "draft": chosen["draft"].plain(),
            "label": chosen["draft"].label,
            "predicted_tokens_per_second": expected[chosen["draft"]].tokens_per_second,
            **{key: value for key, value in chosen.items() if key != "draft"},
            "baseline_tokens_per_second": next(row["tokens_per_second"] for row in measured if row["draft"] == NONE),
            "predictions": [
                {
                    **described(item.draft),
                    "tokens_per_second": item.tokens_per_second,
                    "speedup": divide(item.tokens_per_second, plain),
                    "tau": item.tau,
                    "step_ms": {phase: 1000.0 * seconds for phase, seconds in item.phases.items()},
                }
                for item in predicted
            ],
            "measured": [{**row, "draft": row["draft"].label} for row in measured],
        }

    def facts(self) -> dict[str, Any]:
        """What the rows rest on: acceptance by depth and rank, drafts left out, cost curves and their corrections."""
        costs = self.step_costs()
        return {
            "prompts": len(self.task.requests),
            "config": asdict(self.config),
            "survival": [
                {
                    "temperature": temperature,
                    "tested": found.ranks.tested,
                    "hits": found.ranks.hits,
                    "refused": dict(found.refused),
                }
                for temperature, found in self.surveys.items()
            ],
            "costs": costs.curves.to_dict(),
            "calibrations": [
                {"family": family, "rows": rows, "ratios": dict(item.ratios), "other_ms": 1000.0 * item.other}
                for (family, rows), item in sorted(costs.calibrations.items())
            ],
        }


def choose(measured: Sequence[dict[str, Any]], predicted: Mapping[Draft, float]) -> dict[str, Any]:
    """The row of the draft to use. measured: rows of drafts that took turns, plain decoding among them; predicted: speedups.

    A prediction and a measurement are two estimates of one speedup (`weighed`). To speculate it must lie above 1, and so must what
    was measured. Of drafts within `TIE` of the best the one with the fewest nodes is taken: they cannot be told apart, and it loses
    the least where other prompts accept less or more rows run.
    """
    means = {row["draft"]: weighed(predicted[row["draft"]], row["speedup"], row["speedup_ci95"]) for row in measured}
    paying = [row for row in measured if row["draft"] != NONE and min(row["speedup"], means[row["draft"]]) > 1.0]
    plain = next(row for row in measured if row["draft"] == NONE)
    best = max((means[row["draft"]] for row in paying), default=0.0)
    tied = [row for row in paying if means[row["draft"]] >= best * (1.0 - TIE)]
    return min(tied, key=lambda row: (row["draft"].size, -means[row["draft"]]), default=plain)


def weighed(predicted: float, measured: float, interval: Sequence[float]) -> float:
    """Geometric mean of a speedup's prediction and its measurement, each weighed by the inverse of its variance in logarithms: the
    longer the measurement, the less a prediction says. interval: the measurement's, 95%.
    """
    low, high = interval
    if min(predicted, measured, low) <= 0.0:
        return measured
    variance = ((math.log(high) - math.log(low)) / (2 * 1.96)) ** 2
    share = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + variance)
    return math.exp(share * math.log(measured) + (1.0 - share) * math.log(predicted))


def summed(draft: Draft, turns: Sequence[Turn]) -> Totals:
    """Sums over the turns of a draft, which intervals resample."""
    return Totals.collect([turn.outcome(number) for number, turn in enumerate(turns)], draft.depth)


def representatives(ordered: Sequence[Draft]) -> list[Draft]:
    """The first draft of every family, and the first chain that is at least twice as long, or at most half as long, as that of
    its family: one level may cost next to nothing, where its token is known from the commit before.
    """
    found = list({draft.family: draft for draft in reversed(ordered)}.values())
    chains = [draft for draft in ordered if draft.family == "chain"]
    far = [item for item in chains[1:] if item.depth >= 2 * chains[0].depth or 2 * item.depth <= chains[0].depth]
    return [*found, *far[:1]]


def answered(turn: Turn) -> list[Answered]:
    """What was answered in a turn, in the order of its requests."""
    return [Answered(len(done.request.tokens), done.passes) for done in turn.completions]


def _booked(turns: Sequence[Turn]) -> StepClock:
    """One clock with what all turns booked."""
    import torch

    clock = StepClock(torch.device("cpu"))
    for turn in turns:
        clock.passes += turn.steps
        for phase, seconds in turn.seconds.items():
            clock.seconds[phase] += seconds
    return clock
