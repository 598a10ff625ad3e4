"""Parts of a network that training may run with less memory, or compiled.

A part is a function or method marked with `network_part`: a decoder layer, an unrolled step. Parts
run as written unless training sets otherwise. A part must not change anything outside itself, nor
draw random numbers.

* `recomputing` (engine.activation_checkpointing): only a part's inputs are kept; everything inside
  is computed again in the backward pass. Values and gradients are the same to the last bit, because
  the same operations run twice.
* `compiling` (engine.compile): torch.compile makes one program of a part, forward and backward.
  Sums are added in another order, so the last bits differ. Parts of equal shape share a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Given = ParamSpec("Given")
Result = TypeVar("Result")


class _Ways:
    """How parts run now. Plain attributes: the compiler sees no context variables."""

    recompute = False
    compile = False


@contextmanager
def _set(way: str, on: bool) -> Iterator[None]:
    before = getattr(_Ways, way)
    setattr(_Ways, way, on)
    try:
        yield
    finally:
        setattr(_Ways, way, before)


def recomputing(on: bool = True) -> AbstractContextManager[None]:
    """Inside the block, parts keep their inputs only."""
    return _set("recompute", on)


def compiling(on: bool = True) -> AbstractContextManager[None]:
    """Inside the block, parts are compiled, each at its first call with gradients."""
    return _set("compile", on)


def recomputed(function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)`, of which only the arguments are kept: it runs again in the backward pass.
    Parts inside it run there as they run now, although the blocks above have ended by then."""
    recompute, compiled = _Ways.recompute, _Ways.compile

    def run(*given: Any) -> Result:
        with recomputing(recompute), compiling(compiled):
            return function(*given)

    out: Result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    return out


def network_part(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Mark a part. Parts within a part run as they are."""
    compiled: list[Callable[..., Result]] = []

    def run(*args: Any, **kwargs: Any) -> Result:
        if not _Ways.compile:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        with compiling(False):
            return compiled[0](*args, **kwargs)

    def alone(compiles: bool, *args: Any, **kwargs: Any) -> Result:
        # the backward pass, which calls this again, comes after the blocks have ended
        with recomputing(False), compiling(compiles):
            return run(*args, **kwargs)

    @wraps(function)
    def chosen(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not (_Ways.recompute or _Ways.compile) or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not _Ways.recompute:
            return run(*args, **kwargs)
        out: Result = checkpoint(
            partial(alone, _Ways.compile, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return out

    return chosen
