"""A batch in the middle of decoding, and a watch over what a step does: for the tests that steps
can be captured."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference.decoding.buffers import Lanes
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import requests

ASKS_THE_DEVICE = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::nonzero_static",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
    "aten::isin",
}
"""Operations whose result lies on the host or has a shape that depends on values (isin: sorts and
uniques large inputs)."""
COPIES_FROM_HOST = {"aten::lift_fresh", "aten::lift_fresh_copy"}
"""What `torch.tensor(...)` of Python values dispatches: on a GPU a blocking copy, and a constant
that a graph would freeze."""
INDEXES = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}


class NoHost(TorchDispatchMode):
    """Raises as soon as an operation asks the device for a value, gives a data-dependent shape, or
    brings a constant over."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ASKS_THE_DEVICE or name in COPIES_FROM_HOST:
            raise AssertionError(f"{func} inside a step")
        if name in INDEXES and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise AssertionError(f"{func} with a mask inside a step: its shape depends on values")
        return func(*args, **(kwargs or {}))


def under_way(
    target: TargetModel,
    drafter: Any,
    decode: DecodeConfig,
    steps: int = 2,
    count: int = 3,
    first: int = 0,
    details: bool = False,
) -> Lanes:
    """The lanes of an engine after prefill and some steps: all rows active."""
    engine = Engine(target, drafter, decode, capacity=96, details=details)
    items = requests(first + count, new=60)[first:]
    run = engine.run(items, yield_steps=True)
    passes = 0
    while passes < steps + 1:
        next(run)
        passes = engine.clock.passes
    lanes = engine._kept.lanes
    assert lanes is not None
    run.close()
    lanes.rows.active.fill_(True)
    return lanes


def step_on_device(lanes: Lanes) -> torch.Tensor:
    """One step that is told nothing about lengths: its packed result."""
    result, state = lanes.runner.decoder.step(lanes.cache, lanes.rows, lanes.state, None)
    assert state is lanes.state, "the state must be updated in place"
    return result.packed()
