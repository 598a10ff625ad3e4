"""Permutations that depend only on their seed: the same on every machine, in every process and with
every library version."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def stable_permutation(count: int, seed: int, stream: int = 0) -> NDArray[np.int64]:
    """A permutation of range(count) [count] int64 for (seed, stream): numbers in the order of their
    splitmix64 hash (Steele, Lea and Flood, 2014), which library generators do not promise to
    keep."""
    offset = _mix_int(_mix_int(seed & MASK) ^ (stream & MASK))
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(offset)
    return np.argsort(mix(state), kind="stable").astype(np.int64)


def unit_interval(seed: int, index: int) -> float:
    """A number in [0, 1) for (seed, index): multiples of the golden ratio. An interval of length w
    holds w n of any n successive ones, up to a deviation that grows like log n; for random numbers
    it grows like the root of n."""
    start = _mix_int(seed & MASK)
    return ((start + (index + 1) * GOLDEN) & MASK) / 2**64


def mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: spreads every bit of the values over all bits."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(mix(np.array([(value + GOLDEN) & MASK], dtype=np.uint64))[0])
