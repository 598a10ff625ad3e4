"""Chooses how to draft with one drafter on this machine, for every configured batch size and
temperature.

1. Survey: how much of every draft is accepted, from the target's own answers to tuning prompts
   (`survey`).
2. Costs: the seconds of drafting, verifying and committing, as curves, corrected by short decoding
   runs (`costs`).
3. Prediction: tokens per second of every draft = tokens of the blocks / sum of their steps'
   seconds.
4. Check: the drafts with the best predictions answer all blocks, taking turns with plain decoding;
   those close to the fastest run more often. The draft that is fastest by prediction and
   measurement together is chosen, or none if plain decoding is as fast.

Legend: B rows decoded together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from inference.decoding.arm import Arm
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import Bench, Call, StepKey, measure_grid
from inference.decoding.decode_file import Tuning
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine
from inference.engines.settings import STOPPABLE
from inference.kernels.packed_linear import packed_linears
from inference.measure import metrics
from inference.measure.metrics import Outcome, Totals, divide
from inference.measure.profile import Turn, prompt_totals, take_turns
from inference.measure.prompts import Prompt
from inference.target.model import TargetModel
from inference.tune.confidence import best_threshold, method_of
from inference.tune.config import TuneConfig
from inference.tune.costs import StepCosts, TimedRun
from inference.tune.survey import Survey, Task, survey
from inference.tune.workload import Answered, Steps, batch_steps

Say = Callable[[str], None]
CALIBRATION_TURNS, CALIBRATION_TOKENS = 16, 24
"""Cost curves are corrected by short answers in many turns, so that changes of the machine's speed,
which occur within seconds, affect all drafts alike."""
TIE = 0.02
"""Drafts whose speeds differ by less than this share count as equally fast: a check of minutes
cannot distinguish them."""
CLOSE = 0.1
"""Drafts within this share of the fastest run longer: among equally fast drafts, chance would
decide a short run."""
PREDICTION_ERROR = 0.06
"""Standard deviation of log(predicted / measured speedup) in a measurement before that of
docs/reports/tune.json."""


@dataclass(frozen=True)
class Prediction:
    """A draft's expected tokens per second, tau, and seconds per step by phase, at one batch
    size."""

    draft: Draft
    tokens_per_second: float
    tau: float
    phases: Mapping[str, float]

    def to_dict(self, speedup: float) -> dict[str, object]:
        """The prediction for JSON, with the draft's label and settings."""
        return {
            "label": self.draft.label,
            **self.draft.plain(),
            "tokens_per_second": self.tokens_per_second,
            "speedup": speedup,
            "tau": self.tau,
            "step_ms": {name: 1000.0 * seconds for name, seconds in self.phases.items()},
        }


@dataclass(frozen=True)
class DraftSpeed:
    """The measured speed of a draft that took turns with plain decoding."""

    draft: Draft
    turns: int
    tokens_per_second: float
    tokens_per_second_ci95: list[float]
    speedup: float
    """tokens_per_second / plain decoding's over the same blocks."""
    speedup_ci95: list[float]
    tau: float
    speedup_ci95_of_turns: list[float]
    """Of the speedup on these very prompts: it resamples turns, and repeats of a prompt count."""

    def to_dict(self) -> dict[str, object]:
        """The speed for JSON, with the draft's label."""
        return {**vars(self), "draft": self.draft.label}


class TuneRow(Tuning):
    """The draft chosen for one batch size and temperature, all predictions, and the finalists."""

    label: str
    turns: int
    tokens_per_second_ci95: list[float]
    predictions: list[dict[str, object]]
    measured: list[dict[str, object]]


@dataclass
class Tuner:
    """One drafter's tuning. say: receives progress messages."""

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
        """Choose the prompts. decode: sampling settings, rule and seed; the tuner sets draft, batch
        and lengths."""
        decode = NONE.on(replace(decode, max_new_tokens=config.max_new_tokens))
        return cls(config, target, drafter, Task.of(config, target, prompts, decode), decode, say)

    def at(self, temperature: float) -> DecodeConfig:
        """The decode settings at a temperature."""
        return replace(self.decode, temperature=temperature)

    # Acceptance and costs

    def survey(self, temperature: float) -> Survey:
        """Acceptance at a temperature, measured once."""
        if temperature not in self.surveys:
            count = len(self.task.requests)
            self.say(f"acceptance at temperature {temperature:g} on {count} prompts")
            found = survey(self.config, self.target, self.drafter, self.task, self.at(temperature))
            self.surveys[temperature] = found
        return self.surveys[temperature]

    def step_costs(self) -> StepCosts:
        """Costs of all drafts of all temperatures at all batch sizes, measured once."""
        if self.costs is None:
            config, target, decode = self.config, self.target, self.decode
            known = (self.survey(temperature).drafts for temperature in config.temperatures)
            drafts = list(dict.fromkeys(draft for drafts in known for draft in drafts))
            batches = ", ".join(map(str, config.batches))
            self.say(f"cost curves of {len(drafts)} drafts at batch sizes {batches}")
            # Drafting a chain that stops early costs as much as drafting the whole chain.
            whole = {draft.unstopped.label: draft.unstopped for draft in drafts if draft != NONE}
            stopped = max((draft.size for draft in drafts if draft.family == "adaptive"), default=1)
            sizes = sorted({*range(1, 1 + stopped), *(draft.size for draft in drafts)})
            widest = max(sizes) + max((draft.depth for draft in drafts), default=0)

            def steps(bench: Bench) -> dict[StepKey, Call]:
                calls: dict[StepKey, Call] = {}
                for label, draft in whole.items():
                    arm = Arm(label, self.drafter, draft.on(decode))
                    step = bench.step(arm, draft.tree(decode, target.device))
                    calls[label, "draft", draft.size], calls[label, "commit", draft.size] = step
                return calls

            curves = measure_grid(
                target,
                sizes,
                sorted(set(config.batches)),
                sorted({self.task.mean_prompt, self.task.longest}),
                widest,
                [token for request in self.task.requests for token in request.tokens],
                [self.drafter],
                steps,
                config.repeats,
                2,
                config.seed,
            )
            self.costs = StepCosts(curves)
        return self.costs

    def calibrate(self, batch: int) -> StepCosts:
        """The costs, corrected at a batch size.

        They are corrected on first use, right before the finalists of the batch size run, because a
        machine's speed drifts from minute to minute.
        """
        costs = self.step_costs()
        if (NONE.family, batch) not in costs.calibrations:
            self._calibrate(costs, batch)
        return costs

    def _calibrate(self, costs: StepCosts, batch: int) -> None:
        """Correct the curves at a batch size by short decoding runs. They use the draft with the
        best prediction of every family, and another chain."""
        temperature, count = self.config.temperatures[0], len(self.task.requests)
        self.say(f"fixed time of a step at batch size {batch}")
        predicted = self.predictions(temperature, batch, costs)
        drafts = representatives([item.draft for item in predicted])
        turn_rows = [range(turn * batch, (turn + 1) * batch) for turn in range(CALIBRATION_TURNS)]
        blocks = [[row % count for row in rows] for rows in turn_rows]
        runs: dict[str, list[TimedRun]] = {}
        done = self.run(drafts, temperature, batch, blocks, CALIBRATION_TOKENS)
        for draft, turns in done.items():
            steps = sum((batch_steps(answers_of(turn), batch) for turn in turns), Steps())
            run = TimedRun(draft, steps.mean_length, self.nodes(draft, steps), _sum_clocks(turns))
            runs.setdefault(draft.family, []).append(run)
        for family, found in runs.items():
            costs.calibrate(family, batch, found)

    # Predicting and running

    def predictions(self, temperature: float, batch: int, costs: StepCosts) -> list[Prediction]:
        """The predictions of all drafts, the fastest first."""
        found, blocks = self.survey(temperature), self.task.blocks(batch, self.config.rounds)
        rows = []
        for draft in found.drafts:
            steps = found.steps(draft, blocks, batch)
            phases = costs.phases(draft, batch, steps.mean_length, self.nodes(draft, steps))
            speed = divide(steps.tokens, steps.steps * sum(phases.values()))
            tau = found.estimate(draft, self.config.seed).tau
            rows.append(Prediction(draft, speed, tau, phases))
        return sorted(rows, key=lambda item: -item.tokens_per_second)

    def nodes(self, draft: Draft, steps: Steps) -> float:
        """Mean nodes verified per row and step; 0 means the draft's size."""
        return steps.mean_nodes if draft.family == "adaptive" else 0.0

    def least_probability(self, chain: Draft, temperature: float, batch: int) -> float | None:
        """The least probability of a drafted token with which an engine that ends chains there is
        estimated to be fastest (`inference.tune.confidence`), all rows drafting alike; None if the
        survey has no confidences of this draft."""
        found = self.survey(temperature)
        texts = [records for records in found.everywhere.get(chain, []) if records]
        if not texts:
            return None
        length = found.steps(chain, self.task.blocks(batch, self.config.rounds), batch).mean_length
        stepwise = STOPPABLE[method_of(self.drafter)]
        return best_threshold(texts, self.step_costs().by_drafted(chain, stepwise, batch, length))

    def compare(
        self, drafts: Sequence[Draft], temperature: float, batch: int
    ) -> dict[Draft, list[Turn]]:
        """Let drafts answer all prompts `rounds` times, taking turns with plain decoding. Those
        close to the fastest, and plain decoding, do so `close_rounds` more times."""
        blocks = self.task.blocks(batch, self.config.rounds + self.config.close_rounds)
        first = len(self.task.blocks(batch, self.config.rounds))
        turns = self.run([NONE, *drafts], temperature, batch, blocks[:first])
        speeds = self.speeds(turns)
        least = (1.0 - CLOSE) * speeds[0].tokens_per_second
        close = [item.draft for item in speeds if item.tokens_per_second >= least]
        if len(close) > 1 and blocks[first:]:
            labels = ", ".join(draft.label for draft in close)
            self.say(f"cannot be told apart yet: {labels}")
            again = self.run([NONE, *close], temperature, batch, blocks, skip=first)
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
        """Decode blocks with each of these drafts, taking turns. most: most tokens of an answer; 0:
        as the task says. skip: number of first blocks that were decoded before; they still count
        for the seeds of repeated prompts.
        """
        requests = self.task.block_requests(blocks)[skip:]
        if most:
            requests = [
                [replace(item, max_new_tokens=min(most, item.max_new_tokens)) for item in block]
                for block in requests
            ]
        decode = replace(self.at(temperature), batch_size=batch)
        room = self.task.longest + max(draft.size for draft in drafts) + 1
        engines = {}
        for draft in dict.fromkeys(drafts):
            drafter = None if draft == NONE else self.drafter
            engines[draft] = Engine(self.target, drafter, draft.on(decode), capacity=room)
        with packed_linears(self.drafter):  # once for all runs, as the target's weights are
            return take_turns(engines, requests, batch)

    def speeds(self, turns: Mapping[Draft, Sequence[Turn]]) -> list[DraftSpeed]:
        """Speeds of drafts that took turns, with intervals over prompts; the fastest first.

        Plain decoding is one of them and took at least as many turns as any draft. Each draft is
        compared with it over the draft's own blocks.
        """
        found = []
        for draft, taken in turns.items():
            seed, beside = self.config.seed, turns[NONE][: len(taken)]
            total, plain = prompt_totals(taken, draft.depth), prompt_totals(beside, NONE.depth)
            ratio, interval = metrics.speedup(total, plain, seed)
            by_turn = metrics.speedup(by_turns(draft, taken), by_turns(NONE, beside), seed)[1]
            found.append(
                DraftSpeed(
                    draft,
                    len(taken),
                    metrics.tokens_per_second(total),
                    list(metrics.tokens_per_second_ci95(total, seed)),
                    ratio,
                    list(interval),
                    metrics.tau_estimate(total, seed).tau,
                    list(by_turn),
                )
            )
        return sorted(found, key=lambda item: -item.tokens_per_second)

    # Tuning

    def tune(self) -> list[TuneRow]:
        """One row per batch size and temperature."""
        config = self.config
        return [self.row(heat, batch) for heat in config.temperatures for batch in config.batches]

    def row(self, temperature: float, batch: int) -> TuneRow:
        """Predict, run the best few, and choose among them, at one batch size and temperature."""
        predicted = self.predictions(temperature, batch, self.calibrate(batch))
        finalists = [item.draft for item in predicted if item.draft != NONE]
        finalists = finalists[: self.config.finalists]
        labels = ", ".join(draft.label for draft in finalists)
        self.say(f"batch size {batch}, temperature {temperature:g}: running {labels}")
        measured = self.speeds(self.compare(finalists, temperature, batch))
        speeds = {item.draft: item.tokens_per_second for item in predicted}
        speedups = {draft: divide(speed, speeds[NONE]) for draft, speed in speeds.items()}
        best = choose(measured, speedups)
        plain = next(item for item in measured if item.draft == NONE)
        chain = best_chain(best.draft, predicted)
        row = {
            "batch_size": batch,
            "temperature": temperature,
            **vars(best),
            "draft": best.draft.plain(),
            "chain": chain.plain(),
            "least_probability": self.least_probability(chain, temperature, batch),
            "rule": best.draft.on(self.at(temperature)).acceptance,
            "label": best.draft.label,
            "predicted_tokens_per_second": speeds[best.draft],
            "baseline_tokens_per_second": plain.tokens_per_second,
            "predictions": [item.to_dict(speedups[item.draft]) for item in predicted],
            "measured": [item.to_dict() for item in measured],
        }
        return cast(TuneRow, row)

    def facts(self) -> dict[str, object]:
        """The data behind the rows: acceptance per temperature, cost curves, and their
        corrections."""
        costs = self.step_costs()
        survival = [
            {"temperature": temperature, **asdict(found.ranks), "refused": dict(found.refused)}
            for temperature, found in self.surveys.items()
        ]
        calibrations = [
            {
                "family": family,
                "rows": rows,
                "ratios": dict(item.ratios),
                "other_ms": 1000.0 * item.other,
            }
            for (family, rows), item in sorted(costs.calibrations.items())
        ]
        return {
            "prompts": len(self.task.requests),
            "config": asdict(self.config),
            "survival": survival,
            "costs": costs.curves.to_dict(),
            "calibrations": calibrations,
        }


def best_chain(chosen: Draft, predicted: Sequence[Prediction]) -> Draft:
    """The chain for engines that verify only chains: the chosen one, without early stopping; if
    another shape was chosen, the one with the highest predicted speed, or none if that is not above
    plain decoding's."""
    if chosen.shape in ("none", "chain"):
        return chosen.as_chain
    fitting = [item for item in predicted if item.draft == item.draft.as_chain]
    return max(fitting, key=lambda item: item.tokens_per_second).draft


def choose(measured: Sequence[DraftSpeed], predicted: Mapping[Draft, float]) -> DraftSpeed:
    """The draft to use. measured: drafts that took turns, including plain decoding. predicted:
    speedups.

    A prediction and a measurement are two estimates of one speedup (`combine`). A draft is used
    only if both the combined and the measured speedup are above 1. Of drafts within `TIE` of the
    best, the one with the fewest nodes is chosen: their difference is not measurable, and the
    smallest loses least if other prompts accept less, or if more rows run.
    """
    means = {
        # predicted and measured on the same prompts, so only what differs by turn separates them
        item.draft: combine(predicted[item.draft], item.speedup, item.speedup_ci95_of_turns)
        for item in measured
    }
    paying = [
        item
        for item in measured
        if item.draft != NONE and min(item.speedup, means[item.draft]) > 1.0
    ]
    plain = next(item for item in measured if item.draft == NONE)
    best = max((means[item.draft] for item in paying), default=0.0)
    tied = [item for item in paying if means[item.draft] >= best * (1.0 - TIE)]
    return min(tied, key=lambda item: (item.draft.size, -means[item.draft]), default=plain)


def combine(predicted: float, measured: float, interval: Sequence[float]) -> float:
    """Geometric mean of a predicted and a measured speedup, weighted by inverse log variance.
    interval: the measurement's 95% interval. The longer the measurement, the less the prediction
    counts."""
    low, high = interval
    if min(predicted, measured, low) <= 0.0:
        return measured
    variance = ((math.log(high) - math.log(low)) / (2 * 1.96)) ** 2
    share = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + variance)
    return math.exp(share * math.log(measured) + (1.0 - share) * math.log(predicted))


def by_turns(draft: Draft, turns: Sequence[Turn]) -> Totals:
    """Sums over each turn of a draft."""
    outcomes = []
    for number, turn in enumerate(turns):
        passes = [record for done in turn.completions for record in done.passes]
        outcomes.append(Outcome(f"turn-{number}", "", passes, turn.seconds))
    return Totals.collect(outcomes, draft.depth)


def representatives(ordered: Sequence[Draft]) -> list[Draft]:
    """The first draft of every family, and the first chain that is at least twice as long, or at
    most half as long, as the first chain. One level alone may cost almost nothing, if its token is
    known from the commit before.
    """
    found = list({draft.family: draft for draft in reversed(ordered)}.values())
    depths = [draft.depth for draft in ordered if draft.family == "chain"]
    far = [depth for depth in depths[1:] if depth >= 2 * depths[0] or 2 * depth <= depths[0]]
    return [*found, *(Draft("chain", depth) for depth in far[:1])]


def answers_of(turn: Turn) -> list[Answered]:
    """The answers of a turn, in the order of its requests."""
    return [Answered(len(done.request.tokens), done.passes) for done in turn.completions]


def _sum_clocks(turns: Sequence[Turn]) -> StepClock:
    clock = StepClock(torch.device("cpu"))
    for turn in turns:
        clock.passes += turn.steps
        for phase, seconds in turn.seconds.items():
            clock.seconds[phase] += seconds
    return clock
