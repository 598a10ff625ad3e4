"""Answers as a drafter of depth 4 might leave them: prompts that suit it more and less, passes that depend on one another."""

from __future__ import annotations

import numpy as np

DEPTH, TOKENS = 4, 64


def draw(rng: np.random.Generator, chance: float, count: int, spread: float = 0.12) -> list[tuple[int, int]]:
    """(accepted, passes) of `count` answers whose drafted tokens are kept with about `chance`, differing from prompt to prompt."""
    found = []
    for own in np.clip(rng.normal(chance, spread, count), 0.02, 0.98):
        length = TOKENS if rng.random() < 0.7 else int(rng.integers(8, TOKENS))
        accepted = passes = 0
        while True:
            kept = min(DEPTH, int(rng.geometric(1.0 - own)) - 1)
            if accepted + passes + kept + 1 > length:
                break
            accepted, passes = accepted + kept, passes + 1
        found.append((accepted, passes))
    return found


def acceptance(answers: list[tuple[int, int]]) -> float:
    """Accepted drafted tokens per pass."""
    return sum(a for a, _ in answers) / sum(n for _, n in answers)
