"""How steps are run: operation by operation, or captured as a graph and replayed.

The host never waits for the step that it has just launched. Each step ends with one copy of its
result into a buffer of a ring; the host reads it one or two steps later, when the copy is usually
complete. Rows that ended in the meantime commit nothing, so superfluous steps change nothing.

Capturing. The first steps of a batch are launched one operation at a time (they are real steps, and
their results count). Then one step is captured and replayed from then on. Everything that a step
reads or writes is in `Lanes` and is updated in place. If capturing fails, steps are launched as
before, and a warning gives the reason. A graph reads the tensors that existed when it was captured,
so everything that a step reads must keep its memory for all prompts. On the CPU
`tests/inference/decoding/test_captured.py` replays a traced step instead of a graph, and
`test_clock.py` in the same folder runs steps on a device that lags behind.

Legend: B rows, D the tree's deepest level.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.execution.accelerator import (
    Accelerator,
    Pending,
    Ring,
    accelerator_of,
    capture_failure,
)
from inference.decoding.execution.compiled import CompiledStep
from inference.decoding.execution.layers import compile_layers, has_merged
from inference.decoding.step import Decoder, Rows
from inference.target.kv_cache import KVCache

WARM_UP_STEPS = 3
"""Steps that are launched before one is captured."""
logger = logging.getLogger(__name__)


class StepRunner:
    """Runs the steps of one `Lanes`.

    beside: a runner of the same lanes; both share its accelerator, and neither captures once a
    capture of one has failed. Raises `UserError` if steps cannot be compiled for the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: Rows,
        decode: DecodeConfig,
        beside: StepRunner | None = None,
    ) -> None:
        self.decoder, self.cache, self.rows = decoder, cache, rows
        device = rows.lengths.device
        self.accelerator: Accelerator | None = (
            accelerator_of(device) if beside is None else beside.accelerator
        )
        self.captures: _Captures = _captures(decoder, decode) if beside is None else beside.captures
        self.compiled = None
        if decode.compiles and self.accelerator is not None:
            widest = rows.lengths.shape[0], decoder.tree.num_nodes
            cache.writer.compiled = compile_layers(decoder.target, *widest)
        elif decode.compiles:
            if device.type != "cpu":
                raise UserError(
                    f"decode.compile is true, but the target is on '{device}': steps are compiled "
                    "for cpu and cuda alone. Use decode.compile=false; steps are then launched "
                    "operation by operation."
                )
            self.compiled = CompiledStep(decoder, cache, rows)
        self._merged = has_merged(decoder.target)
        self.slots = decode.steps_behind(device) + 2
        self.variants: dict[tuple[int | None, int, bool, tuple[bool, bool]], _Variant] = {}

    def step(
        self, state: Any, longest: int, exact: bool = True, length: int | None = None
    ) -> tuple[Pending, Any]:
        """Launch a step; returns its pending result and the drafter's state. See
        `Decoder.step`."""
        self.decoder.clock.passes += 1
        if self.compiled is not None:
            return Pending(self.compiled(state, longest)), state
        if self.accelerator is not None:
            return self._launch(self.accelerator, state, length)
        result, state = self.decoder.step(self.cache, self.rows, state, longest, exact, length)
        return Pending(result.packed()), state

    @property
    def captured(self) -> bool:
        """Whether any step was captured."""
        return any(variant.replay is not None for variant in self.variants.values())

    def _launch(
        self, accelerator: Accelerator, state: Any, length: int | None
    ) -> tuple[Pending, Any]:
        """Launch a step of `length`: capture it if that is due, replay it if it was captured."""
        constrained = self.decoder.constrained
        if self._merged != has_merged(self.decoder.target):
            self._drop_captured(accelerator)
        key = length, self.decoder.noise.mode, constrained, self.decoder.wishes.key
        if key not in self.variants:
            self.variants[key] = _Variant(accelerator.ring(self.slots))
        variant, clock = self.variants[key], self.decoder.clock
        ahead = clock if clock.times is not None else None
        if ahead is not None:
            ahead.launch()

        def step() -> tuple[Tensor, Any]:
            result, after = self.decoder.step(self.cache, self.rows, state, None, length=length)
            return result.packed(clock.times), after

        due = variant.replay is None and variant.launched == WARM_UP_STEPS
        if self.captures.wanted and due and not constrained:  # a graph cannot wait for the host
            variant.replay = self._capture(accelerator, step, state)
        if variant.replay is not None:
            packed = variant.replay()
        else:
            variant.launched += 1
            packed, state = accelerator.run(step)
        return variant.ring.send(packed, ahead), state

    def _drop_captured(self, accelerator: Accelerator) -> None:
        """Forget captured steps, since another engine has merged weights that they read."""
        accelerator.wait()  # steps under way use the graphs' memory
        self.variants.clear()
        self._merged = has_merged(self.decoder.target)

    def _capture(
        self, accelerator: Accelerator, step: Callable[[], tuple[Tensor, Any]], state: Any
    ) -> Callable[[], Any] | None:
        """The replay of a step; None, also for all later steps, if it cannot be captured."""

        def in_place() -> Tensor:
            packed, after = step()
            assert after is state, "a drafter must update its state in place to be captured"
            return packed

        accelerator.wait()  # steps under way are not part of the excused time
        begin = time.perf_counter()
        try:
            return accelerator.capture(in_place)
        except Exception as error:  # noqa: BLE001  a fault of the step shows when it is launched
            self.captures.wanted = False
            logger.warning(
                "a decoding step cannot be captured as a graph (%s); steps are launched operation "
                "by operation, which is slower. decode.graph=off asks for that.",
                capture_failure(error),
            )
            return None
        finally:
            self.decoder.clock.excuse(time.perf_counter() - begin)


@dataclass
class _Captures:
    """Whether the runners of the same lanes capture steps; False after a failure."""

    wanted: bool


def _captures(decoder: Decoder, decode: DecodeConfig) -> _Captures:
    wanted = decode.graph == "auto" and getattr(decoder.drafter, "capturable", True)
    wanted = wanted and decoder.clock.times is not None and decoder.target.capturable
    return _Captures(wanted)


@dataclass
class _Variant:
    """Steps of one draft length and mode of the noise: how many were launched operation by
    operation, and the function that replays one."""

    ring: Ring
    launched: int = 0
    replay: Callable[[], Any] | None = None
