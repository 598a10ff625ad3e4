"""Answers as a drafter of depth 4 might leave them: prompts that suit it more and less, passes that
depend on one another."""

from __future__ import annotations

import numpy as np

DEPTH, MOST = 4, 20


def draw(
    rng: np.random.Generator, chance: float, count: int, spread: float = 0.12
) -> list[tuple[int, int]]:
    """(accepted, passes) of `count` answers whose drafted tokens are kept with about `chance`,
    differing from prompt to prompt."""
    found = []
    for own in np.clip(rng.normal(chance, spread, count), 0.02, 0.98):
        passes = MOST if rng.random() < 0.7 else int(rng.integers(2, MOST))
        found.append((int(np.minimum(DEPTH, rng.geometric(1.0 - own, passes) - 1).sum()), passes))
    return found


def acceptance(answers: list[tuple[int, int]]) -> float:
    """Accepted drafted tokens per pass."""
    return sum(a for a, _ in answers) / sum(n for _, n in answers)
