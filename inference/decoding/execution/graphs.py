"""How steps are run: operation by operation, or captured as a CUDA graph and replayed.

The host never waits for the step it has just launched. Each step ends with one copy of its result
into a pinned buffer of a ring; the host reads it one or two steps later, when the copy is long
done. Rows that ended meanwhile commit nothing, so steps that turn out to be one too many change
nothing.

Capturing. The first steps of a batch run eagerly on the capture stream (they are real steps:
nothing is thrown away); then one step is captured and replayed from there on. Everything a step
reads or writes lives in `Lanes` and is updated in place. No GPU has run this file yet
(docs/decoder.md); `tests/inference/decoding/test_captured.py` replays a traced step on the CPU in
its place.

Legend: B rows, D the tree's deepest level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from inference.decoding.clock import PHASES
from inference.decoding.config import DecodeConfig
from inference.decoding.execution.compiled import CompiledStep
from inference.decoding.step import Decoder, Rows
from inference.target.kv_cache import KVCache
from inference.target.model import TargetModel
from inference.target.recurrent.install import is_mixer

WARM_UP_STEPS = 3
SPLIT_STEPS = 8
"""Steps that are timed by phase before capturing; later steps have the same shares."""


@dataclass
class Pending:
    """The result of a launched step on its way to the host: `packed` [B, D+6] int64
    (`StepResult.packed`) and the copy's event."""

    packed: Tensor
    event: Any = None

    def read(self) -> list[list[int]]:
        """Wait for the copy (normally long done) and give the rows as plain numbers."""
        if self.event is not None:
            self.event.synchronize()
        return cast(list[list[int]], self.packed.tolist())


class StepRunner:
    """Runs the steps of one `Lanes`."""

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows, decode: DecodeConfig) -> None:
        self.decoder, self.cache, self.rows = decoder, cache, rows
        device = rows.lengths.device
        self.on_cuda = device.type == "cuda"
        capturable = getattr(decoder.drafter, "capturable", True)
        self.captures = self.on_cuda and decode.graph == "auto" and capturable
        self.compiled = None
        if decode.compile and self.on_cuda:
            compile_layers(decoder.target)
        elif decode.compile:
            self.compiled = CompiledStep(decoder, cache, rows)
        self.slots = decode.steps_behind(device) + 2
        self.stream = torch.cuda.Stream(device) if self.on_cuda else None
        self.variants: dict[tuple[int | None, int], _Variant] = {}

    def step(
        self, state: Any, longest: int, exact: bool = True, length: int | None = None
    ) -> tuple[Pending, Any]:
        """Launch a step -> its pending result and the drafter's state; see `Decoder.step`."""
        if self.compiled is not None:
            return Pending(self.compiled(state, longest)), state
        if not self.on_cuda:
            result, state = self.decoder.step(self.cache, self.rows, state, longest, exact, length)
            return Pending(result.packed()), state
        key = length, self.decoder.noise.mode
        if key not in self.variants:
            self.variants[key] = _Variant(_PinnedRing(self.slots))
        variant = self.variants[key]
        if variant.graph is not None:
            variant.graph.replay()
            self.decoder.clock.running_free = True
            self.decoder.clock.passes += 1
            self.decoder.clock.share_out()
            assert variant.packed is not None
            return variant.ring.send(variant.packed), state
        if self.captures and variant.steps == WARM_UP_STEPS + SPLIT_STEPS:
            self._capture(state, length, variant)
            return self.step(state, longest, exact, length)
        return self._eager(state, length, variant)

    @property
    def graph(self) -> Any:
        """A captured step, if there is one."""
        return next((item.graph for item in self.variants.values() if item.graph is not None), None)

    def _eager(self, state: Any, length: int | None, variant: _Variant) -> tuple[Pending, Any]:
        """One launched step on the capture stream."""
        if variant.steps == WARM_UP_STEPS:
            variant.before_split = dict(self.decoder.clock.seconds)
        variant.steps += 1
        self.decoder.clock.running_free = False  # another length may run as a graph already
        assert self.stream is not None
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result, after = self.decoder.step(self.cache, self.rows, state, None, length=length)
            packed = result.packed()
        current.wait_stream(self.stream)
        return variant.ring.send(packed), after

    def _capture(self, state: Any, length: int | None, variant: _Variant) -> None:
        """Capture one step. Nothing is executed; the first replay is the next real step."""
        clock = self.decoder.clock
        before, phases = variant.before_split, [phase for phase in PHASES if phase != "prefill"]
        spent = {phase: clock.seconds[phase] - before[phase] for phase in phases}
        total = sum(spent.values())
        clock.split = {phase: value / total for phase, value in spent.items()} if total else None
        clock.running_free = True
        passes = clock.passes
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result, after = self.decoder.step(self.cache, self.rows, state, None, length=length)
            variant.packed = result.packed()
        assert after is state, "a drafter must update its state in place to be captured"
        clock.passes = passes
        variant.graph = graph
        clock.start()


def compile_layers(target: TargetModel) -> None:
    """Compile every decoder layer for verification, once; equal layers share a graph.

    Prefill keeps the plain layers: its shapes change with every prompt. Taps stay outside, their
    hooks belong to the layers' calls; so does attention, which follows a plan that is new in every
    pass: what is compiled is all that stands before and behind it.
    """
    for layer in target.taps.layers:
        # recurrent layers follow the running pass, as attention follows its plan
        recurrent = any(is_mixer(module) for module in layer.modules())
        if "forward" not in layer.__dict__ and not recurrent:
            layer.forward = _compiled_for_verification(layer.forward)


def _compiled_for_verification(forward: Any) -> Any:
    compiled = torch.compile(forward, dynamic=False)

    def choose_forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        verifying = cache is not None and cache.writer.mode == "verify"
        return (compiled if verifying else forward)(*args, **kwargs)

    return choose_forward


@dataclass
class _Variant:
    """Steps of one draft length and mode of the noise: how many were launched one by one, the clock
    before they were timed by phase, their graph."""

    ring: _PinnedRing
    steps: int = 0
    before_split: dict[str, float] = field(default_factory=dict)
    graph: Any = None
    packed: Tensor | None = None


class _PinnedRing:
    """Pinned host buffers that results are copied to in turn, each with an event."""

    def __init__(self, slots: int) -> None:
        self.slots: list[Pending | None] = [None] * slots
        self.next = 0

    def send(self, packed: Tensor) -> Pending:
        """Start the copy of `packed`; earlier results must have been read."""
        place, self.next = self.next, (self.next + 1) % len(self.slots)
        slot = self.slots[place]
        if slot is None:
            slot = Pending(torch.empty_like(packed, device="cpu").pin_memory(), torch.cuda.Event())
            self.slots[place] = slot
        slot.packed.copy_(packed, non_blocking=True)
        slot.event.record()
        return slot
