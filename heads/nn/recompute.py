"""Activation checkpointing: parts of a network whose inner values are computed again in the backward pass instead of being kept.

A part is a function or method marked with `recomputed`: a decoder layer, an unrolled step. Marked parts run as they are unless
`recomputing` switches it on (engine.activation_checkpointing does, in training). Values and gradients are the same to the last bit:
the same operations run twice. A marked part must not change anything outside of itself, nor draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Given = ParamSpec("Given")
Result = TypeVar("Result")
_ON: ContextVar[bool] = ContextVar("headstart_recompute", default=False)


@contextmanager
def recomputing(on: bool = True) -> Iterator[None]:
    """Inside the block, marked parts keep their inputs only."""
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


def recomputed(part: Callable[Given, Result]) -> Callable[Given, Result]:
    """Mark a part. Parts within a marked part are not marked once more: each is computed at most twice."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        with recomputing(False):
            return part(*args, **kwargs)

    @wraps(part)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not _ON.get() or not torch.is_grad_enabled():
            return part(*args, **kwargs)
        once = partial(alone, **kwargs)
        out: Result = checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False)
        return out

    return run
