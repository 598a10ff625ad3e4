"""The training loop: steps, figures, evaluations, saves, and the reasons to stop.

It uses an engine, features, a loader and a function that measures tau. Targets, kinds and the files
of drafters are handled in `train.setup`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.errors import UserError
from train.averaging import WeightAverage
from train.config import TrainConfig
from train.data.loader import PackedBatch, StepLoader
from train.distributed import World
from train.engines.base import TrainEngine
from train.features.base import Features
from train.manifest import RunFacts
from train.on_policy import OnPolicyFeatures
from train.optim import ScheduleConfig
from train.state import StateStore
from train.stopping import Interrupted, Stopped, StopRequest
from train.tracking.display import Display
from train.tracking.meter import Meter
from train.tracking.services.base import Transcript
from train.tracking.tracker import Tracker


@dataclass(frozen=True)
class Evaluation:
    """A measured tau with its interval, further figures for the log, and some of the answers."""

    tau: float
    ci95: tuple[float, float]
    figures: dict[str, float] = field(default_factory=dict)
    transcripts: tuple[Transcript, ...] = ()


Evaluate = Callable[[dict[str, Tensor]], Evaluation]
"""Measures the drafter with these weights (float32, CPU). Called in the main process only."""
KeepBest = Callable[[dict[str, Tensor]], str]
"""Writes these weights as the best checkpoint and returns its hash. Called in the main process
only."""


@dataclass
class Progress:
    """The state of a run besides weights and random generators. tau, tau_ci95, best_step: of the
    best evaluation (tau is None before the first); best_sha256: of the weights that it kept; stale:
    evaluations since then; log_bytes: length of log.jsonl; spent: time by part and other costs up
    to the last saved state (see `train.tracking.meter`); averaged: how often weights entered the
    running mean."""

    step: int = 0
    tau: float | None = None
    tau_ci95: tuple[float, float] = (0.0, 0.0)
    best_step: int = 0
    best_sha256: str = ""
    evaluated_step: int = 0
    stale: int = 0
    seconds: float = 0.0
    tokens: int = 0
    log_bytes: int = 0
    averaged: int = 0
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Progress:
        known = {item.name for item in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        return cls(**{**values, "tau_ci95": tuple(values.get("tau_ci95", (0.0, 0.0)))})


@dataclass
class StepFigures:
    """Sums of one step: loss over supervised tokens, tokens read, the mean of every metric."""

    loss: float
    tokens: float
    stop: float
    metrics: dict[str, float]


@dataclass
class Trainer:
    """One run in one process. schedule: its begin and end say which part of a whole training this
    one is; rate: step (0-based) -> learning rate; evaluate: None trains without measuring;
    run_facts: stored with every state; main_alone: the context for work that only the main process
    does with the target; breakable: whether a signal may interrupt a measurement (not where other
    processes serve it)."""

    engine: TrainEngine
    features: Features
    loader: StepLoader
    rate: Callable[[int], float]
    evaluate: Evaluate | None
    keep_best: KeepBest
    store: StateStore
    tracker: Tracker
    display: Display
    world: World
    config: TrainConfig
    schedule: ScheduleConfig
    steps: int
    run_facts: RunFacts
    progress: Progress
    meter: Meter
    average: WeightAverage = field(default_factory=WeightAverage)
    main_alone: Callable[[], AbstractContextManager[None]] = nullcontext
    breakable: bool = True

    def __post_init__(self) -> None:
        self.saved_step = self.progress.step
        self.request = StopRequest()
        self.clock = self.meter.clock
        # The loop waits for features from elsewhere; those of a local target are computed.
        self.arrived = getattr(getattr(self.features, "plain", self.features), "arrived", None)
        self.feature_part = "data" if self.arrived else "target"

    def run(self) -> str:
        """Train to the end and return the reason: "steps", "patience", "goal" or "seconds". A
        signal raises `Stopped` after the state is saved; a loss or gradient that is not finite
        raises `UserError`."""
        config, progress = self.config, self.progress
        # Wait first, so that a signal saves in every process or in none: the main process may still
        # be comparing training with decoding.
        self.world.wait()
        with StopRequest() as request:
            self.request = request
            measured = progress.evaluated_step == progress.step
            if progress.step and self.due(config.eval_every) and not measured:
                self.measure()  # interrupted when the state was saved
            reason = self.stop_reason()
            for index, batches in self.rows(self.steps if not reason else progress.step):
                if not self.wait_for_features(index, batches):
                    self.leave(request)
                stop = self.step(index, batches, request)
                if self.due(config.eval_every):
                    self.measure()
                if self.due(config.save_every):
                    self.save()
                if stop:
                    self.leave(request)
                reason = self.stop_reason()
                if reason:
                    break
            unmeasured = progress.tau is None or progress.evaluated_step != progress.step
            if self.evaluate is not None and unmeasured:
                self.measure()
            self.save()
            self.add_energy()
            if self.any_process(bool(request.number)):  # came during the last measurement or save
                self.leave(request)
        return reason or "steps"

    def rows(self, stop: int) -> Iterator[tuple[int, list[PackedBatch]]]:
        """Yield (index, micro-batches) of the steps before `stop`; waiting counts as `data`."""
        dealt = self.loader.iterate(self.progress.step, stop)
        while True:
            with self.clock.part("data"):
                item = next(dealt, None)
            if item is None:
                return
            yield item

    def due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def stop_reason(self) -> str:
        """The reason why the run ends; empty while it continues. All processes decide alike."""
        config, progress = self.config, self.progress
        if progress.step >= self.steps:
            return "steps"
        if config.patience and progress.stale >= config.patience:
            return "patience"
        if config.goal and progress.tau is not None and progress.tau >= config.goal:
            return "goal"
        if config.max_seconds and progress.seconds >= config.max_seconds:
            return "seconds"
        return ""

    def wait_for_features(self, index: int, batches: list[PackedBatch]) -> bool:
        """Wait for a step's features from elsewhere; returns False if a signal comes first. All
        processes decide alike, so none begins a step that another one does not join."""
        if self.arrived is None:
            return True
        with self.clock.part(self.feature_part):
            arrived = self.arrived(batches, index, lambda: bool(self.request.number))
            return not self.any_process(not arrived)

    def any_process(self, said: bool) -> bool:
        """Whether `said` is true in any process. Collective."""
        return bool(self.world.add(torch.tensor(float(said), device=self.world.device)))

    def step(self, index: int, batches: list[PackedBatch], request: StopRequest) -> bool:
        """Update the weights once and log the figures of all processes; returns whether to stop."""
        begun = time.perf_counter()
        with self.meter.counting(index):
            outputs, supervised = self.forward_backward(index, batches)
        tokens = sum(int((packed.segments > 0).sum()) for packed in batches)
        figures = self.add_up(outputs, tokens, bool(request.number))
        if not math.isfinite(figures.loss):
            raise self.failure(index, f"the loss is {figures.loss}")
        rate = self.rate(index)
        with self.clock.part("update"):
            norm = self.engine.step(rate)
            if not math.isfinite(norm):
                raise self.failure(index, f"the gradient's norm is {norm}")
            self.average.follow(index + 1, self.engine)
        seconds = self.world.from_main([time.perf_counter() - begun])[0]
        progress = self.progress
        progress.step, progress.seconds = index + 1, progress.seconds + seconds
        progress.tokens += int(figures.tokens)
        positions = sum(packed.tokens.numel() for packed in batches)
        line = {"loss": figures.loss / max(1, supervised), "lr": rate, "grad_norm": norm}
        self.note({**line, **figures.metrics}, figures.tokens, seconds, positions)
        return figures.stop > 0

    def forward_backward(
        self, index: int, batches: list[PackedBatch]
    ) -> tuple[list[LossOutput], int]:
        """Compute features, losses and gradients of this process's micro-batches. Returns the
        losses, and the supervised tokens of the whole step, by which they are divided."""
        outputs, supervised = [], self.loader.supervised(index)
        made: Iterable[TrainBatch] = (self.with_features(packed, index) for packed in batches)
        if isinstance(self.features, OnPolicyFeatures):
            made = list(made)  # how much is supervised is known once all rows are rewritten
            supervised += self.gained(batches, made)
        for place, batch in enumerate(made):
            share = index / max(1, self.steps)
            begin, end = self.schedule.begin, self.schedule.end
            batch.progress = begin + (end - begin) * share
            if batch.target_logits is not None:
                batch.target_logits = self.clock.within("target", batch.target_logits)
            last = place == len(batches) - 1
            with self.clock.part("drafter"):
                outputs.append(self.engine.forward_backward(batch, max(1, supervised), last))
        return outputs, supervised

    def with_features(self, packed: PackedBatch, index: int) -> TrainBatch:
        with self.clock.part(self.feature_part):
            return self.features.batch(packed, index)

    def gained(self, batches: Sequence[PackedBatch], made: Sequence[TrainBatch]) -> int:
        """How many more tokens are supervised in the rewritten micro-batches of all processes;
        below 0 if fewer are. Collective."""
        more = sum(int(batch.loss_mask.sum()) for batch in made)
        more -= sum(int(packed.loss_mask.sum()) for packed in batches)
        return int(self.world.add(torch.tensor(float(more), device=self.world.device)))

    def note(self, line: dict[str, float], tokens: float, seconds: float, positions: int) -> None:
        """Log and show a finished step. positions: of this process's rows, padding included."""
        progress, speed, costs = self.progress, tokens / seconds, self.meter.step()
        figures = {
            **line,
            "tokens": progress.tokens,
            "padding": 1.0 - tokens / (positions * self.world.size),
            "tokens_per_second": speed,
            "seconds": seconds,
            "cost": costs,
        }
        self.tracker.write(progress.step, figures)
        self.display.step(progress.step, line["loss"], speed, costs)

    def add_up(self, outputs: list[LossOutput], tokens: int, stop: bool) -> StepFigures:
        """The step's sums over micro-batches and processes, with one all-reduce and one wait."""
        names = sorted({name for output in outputs for name in output.metrics})
        device = outputs[0].loss_sum.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = [torch.stack([output.loss_sum.double() for output in outputs]).sum()]
        for name in names:
            pairs = [output.metrics[name] for output in outputs if name in output.metrics]
            for place in (0, 1):
                sums.append(sum((pair[place].to(device, torch.float64) for pair in pairs), zero))
        own = [*self.meter.own_energy(), tokens, stop]
        host = torch.tensor(own, dtype=torch.float64, device=device)
        loss, *values = self.world.add(torch.cat([torch.stack(sums), host])).tolist()
        means = zip(names, values[0::2], values[1::2], strict=False)
        metrics = {name: total / count for name, total, count in means if count > 0}
        self.meter.add_energy(*values[-4:-2])
        return StepFigures(loss, values[-2], values[-1], metrics)

    def failure(self, index: int, what: str) -> UserError:
        step = self.saved_step
        kept = f"The state of step {step} is kept" if step else "No state was saved yet"
        return UserError(
            f"{what} at step {index + 1}, so training cannot go on. {kept}; running the same "
            "command again continues there. If it ends at the same step again, it is no fault of "
            "the machine: lower optim.lr, raise schedule.warmup or lower optim.clip, and start "
            "in another folder."
        )

    def measure(self) -> None:
        """Measure tau, and keep the weights if it is the best so far. A signal raises `Stopped`
        after the state is saved; the training then continues with this measurement."""
        with self.clock.part("evaluation"):
            measured = self.evaluate_and_keep()
        if not measured:
            self.leave(self.request)

    def evaluate_unless_stopped(self, weights: dict[str, Tensor]) -> Evaluation | None:
        assert self.evaluate is not None, "measure without a way to"
        breaking = self.request.interrupting() if self.breakable else nullcontext()
        try:
            with self.display.measuring(), breaking:
                return self.evaluate(weights)
        except Interrupted:
            return None

    def evaluate_and_keep(self) -> bool:
        """See `measure`; returns whether the measurement was completed."""
        progress = self.progress
        weights = self.average.weights(self.engine)
        numbers = [0.0, 0.0, 0.0]
        found: Evaluation | None = None
        with self.main_alone():
            if self.world.is_main:
                found = self.evaluate_unless_stopped(weights)
                numbers = [math.nan] * 3 if found is None else [found.tau, *found.ci95]
        tau, low, high = self.world.from_main(numbers)
        if math.isnan(tau):
            return False
        progress.evaluated_step = progress.step
        rose = progress.tau is None or tau > progress.tau
        if rose:
            progress.tau, progress.tau_ci95 = tau, (low, high)
            progress.best_step, progress.stale = progress.step, 0
            with self.clock.part("saving"), self.main_alone():
                if self.world.is_main:
                    progress.best_sha256 = self.keep_best(weights)
        else:
            progress.stale += 1
        if found is not None:
            figures = {"tau": tau, "tau_ci95": [low, high], "best": rose, **found.figures}
            self.tracker.write(progress.step, figures)
            if rose:
                self.tracker.show(progress.step, found.transcripts)
            self.display.show_tau(progress.step, tau, (low, high), rose)
        return True

    def save(self) -> None:
        """Save the state, unless this step's state is saved already."""
        progress = self.progress
        if self.saved_step == progress.step:
            return
        with self.clock.part("saving"):
            progress.log_bytes = self.tracker.flush()
            self.add_energy()
            progress.averaged, mean = self.average.taken, self.average.mean
            self.store.save(progress.step, self.engine, asdict(progress), self.run_facts, mean)
        self.saved_step = progress.step

    def add_energy(self) -> None:
        """Read the clocks and record what all processes used since the last step. Collective."""
        self.meter.take()
        own = torch.tensor(self.meter.own_energy(), dtype=torch.float64, device=self.world.device)
        self.meter.add_energy(*self.world.add(own).tolist())

    def leave(self, request: StopRequest) -> None:
        """Save and raise `Stopped`, also in processes that got no signal themselves."""
        self.save()
        self.add_energy()
        name = request.name or "SIGTERM"
        self.display.say(
            f"{name}: state of step {self.progress.step} saved; the same command continues there."
        )
        self.world.wait()
        raise Stopped(name, self.progress.step)
