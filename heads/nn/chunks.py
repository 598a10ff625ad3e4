"""How often a loss runs its chunks where processes divide a drafter's weights (ZeRO-3).

Every call of a module then gathers its weights from all processes, again in the backward pass, and
so all of them must run equally many chunks, although their rows have different numbers of
supervised tokens. Those with fewer chunks add empty ones, whose sums are zero. Not yet run on
several GPUs.

Legend: M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_LARGEST: ContextVar[Callable[[int], int] | None] = ContextVar("largest", default=None)


@contextmanager
def agreeing(largest: Callable[[int], int]) -> Iterator[None]:
    """Inside the block, the processes agree on numbers of chunks. largest: gives all of them the
    largest of their numbers; collective."""
    token = _LARGEST.set(largest)
    try:
        yield
    finally:
        _LARGEST.reset(token)


def agreed(count: int) -> int:
    """The number of chunks to run: `count`, or more inside `agreeing`."""
    largest = _LARGEST.get()
    return count if largest is None else largest(count)


def split(rows: Tensor, size: int) -> list[Tensor]:
    """`rows` [M] in chunks of at most `size`, followed by empty ones up to the agreed number."""
    pieces = list(rows.split(size))
    return pieces + [rows[:0]] * (agreed(len(pieces)) - len(pieces))
