"""The costs of verifications and drafts on this machine, as curves over nodes, rows and cached
tokens.

`measure_costs` times real calls of the target (`verify`) and of drafters (`propose`, `commit`). The
calls are warmed up, repeated, and interleaved in a shuffled order, so that a busy machine slows all
points alike. `CostCurves` keeps the medians and interpolates between them; the choice of a draft's
shape for a machine starts from it. On CUDA the calls are captured as graphs, as the engine runs
them, and timed with events.

Legend: n nodes of a verification (the root included), b rows, L cached tokens per row.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.api.config import Count, NonEmpty, Repeats, Rows, Tokens, config
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import DraftShape, TokenTree
from heads.kernels.dispatch import on_device
from inference.decoding.arm import Arm
from inference.decoding.execution.accelerator import CudaAccelerator, capture_failure
from inference.decoding.sampling.noise import SharedNoise
from inference.kernels.drafter_attention import drafter_kernel
from inference.kernels.packed_linear import packed_linears
from inference.target.model import TargetModel
from inference.target.taps import Seen

logger = logging.getLogger(__name__)
Call = Callable[[], Any]
StepKey = tuple[str, str, int]
"""(drafter or draft; "verify", "draft" or "commit"; nodes) of a timed call."""


@config("bench.costs")
@dataclass(frozen=True)
class CostConfig:
    """The points of the cost curves: every combination of nodes, batches and lengths."""

    nodes: tuple[Rows, ...] = ()
    """Numbers of nodes of a verification, for instance [1,2,4,8,16,32,64]. Empty: no cost
    curves."""
    batches: NonEmpty[Rows] = (1,)
    """Rows decoded together."""
    lengths: NonEmpty[Tokens] = (128, 512)
    """Cached tokens per row."""
    repeats: Repeats = 15
    """Timed calls per point; the median counts."""
    warmup: Count = 3
    """Untimed calls per point before the timed ones."""


@dataclass(frozen=True)
class CostPoint:
    """One measured point: median seconds of a call, with the quartiles of its repeats."""

    nodes: int
    rows: int
    length: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class CostCurves:
    """Measured costs of one target and its drafters on one device.

    verify_points: the target's pass over n nodes, LM head included. draft_points, commit_points:
    arm's name -> points, where n counts the drafted chain's nodes (root included) or the committed
    tokens. launch: "eager", or "graph" where each call was captured and replayed.
    """

    target: str
    device: str
    dtype: str
    launch: str
    repeats: int
    verify_points: tuple[CostPoint, ...]
    draft_points: Mapping[str, tuple[CostPoint, ...]] = field(default_factory=dict)
    commit_points: Mapping[str, tuple[CostPoint, ...]] = field(default_factory=dict)

    def verify(self, n: float, b: float, length: float) -> float:
        """Seconds of one verification of n nodes in b rows with L cached tokens each.

        Linear between measured points, continued with the outermost slopes, never below 0.
        """
        return interpolate(self.verify_points, n, b, length)

    def draft(self, name: str, n: float, b: float, length: float = 0) -> float:
        """Seconds that an arm takes to draft a chain of n nodes, the root included: 0 for n = 1, as
        nothing is drafted. length: cached tokens; 0 takes the shortest that was measured. Raises
        `UserError` for an unknown name."""
        return 0.0 if n <= 1 else interpolate(self._of(self.draft_points, name), n, b, length)

    def commit(self, name: str, n: float, b: float, length: float = 0) -> float:
        """Seconds that an arm takes to commit n tokens per row; otherwise like `draft`."""
        return interpolate(self._of(self.commit_points, name), n, b, length)

    def _of(self, curves: Mapping[str, tuple[CostPoint, ...]], name: str) -> tuple[CostPoint, ...]:
        if name not in curves:
            known = ", ".join(sorted(curves)) or "none"
            raise UserError(f"there is no cost curve of a drafter '{name}'. Measured: {known}.")
        return curves[name]

    def to_dict(self) -> dict[str, Any]:
        """The curves as JSON: the `costs` block of report.json."""
        content = json.loads(json.dumps(asdict(self)))
        return {k.removesuffix("_points"): v for k, v in content.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostCurves:
        """Read the result of `to_dict`; raises `UserError` for anything else."""

        def points(items: Sequence[Mapping[str, Any]]) -> tuple[CostPoint, ...]:
            return tuple(CostPoint(**item) for item in items)

        try:
            facts = {k: values[k] for k in ("target", "device", "dtype", "launch", "repeats")}
            draft, commit = (
                {name: points(items) for name, items in values[what].items()}
                for what in ("draft", "commit")
            )
            verify = points(values["verify"])
            return cls(**facts, verify_points=verify, draft_points=draft, commit_points=commit)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"these are no cost curves ({error!r}). Measure them: `headstart measure "
                "bench.costs.nodes=[1,2,4,8]`."
            ) from error


def interpolate(points: Sequence[CostPoint], n: float, b: float, length: float) -> float:
    """Seconds at (n, b, L) from a full grid of points, linear in each (see `CostCurves`).

    length 0 means the shortest measured one.
    """
    grid: dict[tuple[int, ...], float] = {
        (point.rows, point.length, point.nodes): point.seconds for point in points
    }
    assert grid, "a curve without points"
    shortest = min(key[1] for key in grid)
    return max(0.0, _along(grid, (b, length or shortest, n)))


def _along(grid: Mapping[tuple[int, ...], float], place: tuple[float, ...]) -> float:
    """The value at `place`, dimension by dimension."""
    if not place:
        return grid[()]
    places = sorted({key[0] for key in grid})
    values = [_along({k[1:]: v for k, v in grid.items() if k[0] == x}, place[1:]) for x in places]
    if len(places) == 1:
        return values[0]
    spans = list(pairwise(range(len(places))))
    left, right = next((span for span in spans if place[0] <= places[span[1]]), spans[-1])
    share = (place[0] - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])


# Measuring


def stopwatch(device: torch.device) -> Callable[[Call], float]:
    """A function that runs a call and returns its seconds, by events of `device` if that is a
    GPU."""

    def events(call: Call) -> float:
        with on_device(device):  # events belong to the device on which they are recorded
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000.0

    def wall(call: Call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return events if device.type == "cuda" else wall


def interleave(
    calls: Mapping[Any, Call], device: torch.device, repeats: int, warmup: int, seed: int = 0
) -> dict[Any, list[float]]:
    """Seconds of every call, `repeats` times each, in rounds of all calls in a shuffled order."""
    order, timer, rng = list(calls), stopwatch(device), random.Random(seed)
    for _ in range(warmup):
        for key in order:
            calls[key]()
    found: dict[Any, list[float]] = {key: [] for key in order}
    for _ in range(repeats):
        rng.shuffle(order)
        for key in order:
            found[key].append(timer(calls[key]))
    return found


class NotCapturedError(RuntimeError):
    """A call cannot be captured as a graph."""


def capture(call: Call, accelerator: CudaAccelerator) -> Call:
    """`call` as a CUDA graph: the host does not launch every operation. Raises `NotCapturedError`
    if the capture fails."""
    for _ in range(2):  # lazy allocations and library handles must exist before the capture
        accelerator.run(call)
    try:
        return accelerator.capture(call)
    except Exception as error:
        raise NotCapturedError(capture_failure(error)) from error


@torch.no_grad()
def measure_costs(
    config: CostConfig, target: TargetModel, arms: Sequence[Arm], text: Sequence[int], seed: int = 0
) -> CostCurves:
    """Measure all points of `config`. text: token ids of real prompts, repeated as needed.

    Raises `UserError` when a length and its nodes exceed the target's positions.
    """
    widest = max((*config.nodes, *(arm.decode.tree().max_depth + 1 for arm in arms)))
    most, limit = max(config.lengths) + widest + 1, target.info.max_position_embeddings
    if most > limit:
        raise UserError(
            f"bench.costs.lengths {list(config.lengths)} with up to {widest} nodes need {most} "
            f"positions, but target '{target.info.id}' has {limit}. Lower bench.costs.lengths."
        )

    def steps(bench: Bench) -> dict[StepKey, Call]:
        return {key: call for arm in arms for key, call in bench.drafting(arm).items()}

    grid = sorted(set(config.nodes)), config.batches, config.lengths, widest, text
    drafters, often = [arm.drafter for arm in arms], (config.repeats, config.warmup, seed)
    return measure_grid(target, *grid, drafters, steps, *often)


@torch.no_grad()
def measure_grid(
    target: TargetModel,
    nodes: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    widest: int,
    text: Sequence[int],
    drafters: Sequence[Any],
    steps: Callable[[Bench], Mapping[StepKey, Call]],
    repeats: int,
    warmup: int,
    seed: int = 0,
) -> CostCurves:
    """Time verifications of `nodes` nodes, and the calls of `steps`, for all batches and lengths.

    widest: most nodes of a verification, or tokens of a draft. steps: maps the rows of one point to
    calls, as (name, "draft" or "commit", nodes) -> call; the curves have these names. On CUDA all
    calls are captured, or none if one cannot be.
    """

    def measured(launch: str) -> dict[tuple[str, str], list[CostPoint]]:
        """The points by (name, call), times in seconds; launch: graph or eager. Raises
        `NotCapturedError`."""
        points: dict[tuple[str, str], list[CostPoint]] = {}
        for rows, length in product(batches, lengths):
            bench = Bench(target, rows, length, widest, text)
            calls: dict[StepKey, Call] = {("", "verify", n): bench.verification(n) for n in nodes}
            with ExitStack() as stack:
                stack.enter_context(drafter_kernel())
                for drafter in drafters:
                    stack.enter_context(packed_linears(drafter))
                calls |= steps(bench)
                if launch == "graph":
                    accelerator = CudaAccelerator(target.device)
                    calls = {key: capture(call, accelerator) for key, call in calls.items()}
                timed = interleave(calls, target.device, repeats, warmup, seed)
            for (name, what, count), seconds in timed.items():
                low, middle, high = np.percentile(seconds, [25, 50, 75]).tolist()
                point = CostPoint(count, rows, length, middle, low, high)
                points.setdefault((name, what), []).append(point)
        return points

    launch = "graph" if target.device.type == "cuda" else "eager"
    found: dict[tuple[str, str], list[CostPoint]] = {}
    if launch == "graph":
        try:
            found = measured(launch)
        except NotCapturedError as error:
            launch = "eager"
            logger.warning(
                "a call of the cost curves cannot be captured as a graph (%s); all calls are timed "
                "launched operation by operation, which is slower than captured steps.",
                error,
            )
    found = found or measured(launch)

    def curves(wanted: str) -> dict[str, tuple[CostPoint, ...]]:
        return {name: tuple(points) for (name, what), points in found.items() if what == wanted}

    dtype, verify = str(target.dtype).removeprefix("torch."), curves("verify")[""]
    facts = target.info.id, target.device.type, dtype, launch, repeats
    return CostCurves(*facts, verify, curves("draft"), curves("commit"))


class Bench:
    """`rows` rows that hold `length` tokens of text each, and the calls to time on them.

    widest: most nodes of a verification. text: token ids, repeated as needed.
    """

    def __init__(
        self, target: TargetModel, rows: int, length: int, widest: int, text: Sequence[int]
    ) -> None:
        self.target, self.rows, self.length, self.widest = target, rows, length, widest
        assert text, "no text to fill the cache with"
        device, needed = target.device, length + widest
        repeated = list(text) * (needed // len(text) + 1)
        self.text = torch.tensor(repeated, device=device)[:needed]
        self.cache = target.new_cache(rows, length + widest + 1)
        self.lengths = torch.full((rows,), length, dtype=torch.int64, device=device)
        # the host knows the length if calls run eagerly; a captured graph reads it on the device
        self.longest = None if target.lengths_on_device else length
        self._seen: dict[FeatureSpec, Seen] = {}

    def fill(self, needs: FeatureSpec) -> Seen:
        """Read the text into every row, once per set of needs; returns a row's features
        [1, L, ...]."""
        if needs not in self._seen:
            prompt, one = self.text[None, : self.length], self.lengths[:1]
            rows = [torch.tensor([row], device=one.device) for row in range(self.rows)]
            filled = [self.target.prefill(self.cache, row, prompt, one, needs)[1] for row in rows]
            self._seen[needs] = filled[0]
        return self._seen[needs]

    def verification(self, nodes: int) -> Call:
        """One verification of a chain of `nodes` nodes in every row."""
        needs = FeatureSpec()
        self.fill(needs)
        tree = TokenTree.chain(nodes - 1, self.target.device)
        tokens = self.text[self.length : self.length + nodes].expand(self.rows, -1).contiguous()
        given = self.cache, tokens, tree, self.lengths, self.longest, needs
        return lambda: self.target.verify(*given)

    def drafting(self, arm: Arm) -> dict[StepKey, Call]:
        """Drafts of chains from 2 nodes up to the arm's depth, and commits of as many tokens."""
        calls: dict[StepKey, Call] = {}
        for nodes in range(2, arm.decode.tree().max_depth + 2):
            shape = TokenTree.chain(nodes - 1, self.target.device)
            draft, commit = self.step(arm, shape)
            calls |= {(arm.name, "draft", nodes): draft, (arm.name, "commit", nodes): commit}
        return calls

    def step(self, arm: Arm, shape: DraftShape) -> tuple[Call, Call]:
        """The arm's draft of a shape, and its commit of a path and bonus."""
        seen = self.fill(arm.drafter.needs)
        prompt = self._states(seen, 0, self.length)
        state = arm.drafter.start(prompt, shape, self.length + self.widest + 1)
        seeds, vocabulary = torch.zeros_like(self.lengths), self.target.info.vocab_size
        noise = SharedNoise(arm.decode.sampling(), seeds, vocabulary)
        run = self._states(seen, self.length, self.length + shape.max_depth + 1)
        return partial(arm.drafter.propose, state, noise), partial(arm.drafter.commit, state, run)

    def _states(self, seen: Seen, first: int, end: int) -> TargetStates:
        """The text's tokens [first, end) as a run of every row; late features repeat early ones."""
        places = torch.arange(end - first, device=self.text.device)
        following = self.text[(first + 1 + places).clamp(max=len(self.text) - 1)]
        taps, hidden = seen.taps, seen.last_hidden

        def rows(value: Tensor) -> Tensor:
            return value.expand(self.rows, *value.shape[1:]).contiguous()

        return TargetStates(
            tokens=rows(self.text[None, first:end]),
            next_tokens=rows(following[None]),
            positions=rows((first + places)[None]),
            valid=rows(torch.ones_like(places, dtype=torch.bool)[None]),
            taps=None if taps is None else rows(taps[:, places % taps.shape[1]]),
            last_hidden=rows(hidden[:, places % hidden.shape[1]]),
        )
