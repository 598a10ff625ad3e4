"""Continuous batching of known answers: how many steps a batch takes, how full it is, and how long
its rows are.

A step advances every row by one verification, and rows that have ended are refilled at once, as in
`Engine.run`. So if each answer's passes are known, the steps follow without any timing.

Legend: B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from inference.decoding.requests import PassRecord
from inference.measure.metrics import divide


@dataclass(frozen=True)
class Answered:
    """A prompt of `prompt` tokens whose answer took these passes (the first token comes from
    prefill)."""

    prompt: int
    passes: Sequence[PassRecord]


@dataclass(frozen=True)
class Steps:
    """Sums over the steps of a workload. steps: their number; tokens: committed tokens; length:
    cached tokens of the longest row; nodes: nodes verified per row, set by the longest limit in the
    batch."""

    steps: int = 0
    tokens: int = 0
    length: int = 0
    nodes: int = 0

    def __add__(self, other: Steps) -> Steps:
        return Steps(*map(add, vars(self).values(), vars(other).values()))

    @property
    def mean_length(self) -> float:
        """Cached tokens of the longest row, per step."""
        return divide(self.length, self.steps)

    @property
    def mean_nodes(self) -> float:
        """Nodes verified per row and step."""
        return divide(self.nodes, self.steps)


def batch_steps(answers: Sequence[Answered], rows: int) -> Steps:
    """The steps of answering `answers` in this order in a batch of `rows` rows."""
    waiting = deque(answer for answer in answers if answer.passes)
    running: list[tuple[Answered, int, int]] = []  # answer, passes done, tokens in the cache
    total = Steps()
    while waiting or running:
        while waiting and len(running) < rows:
            answer = waiting.popleft()
            running.append((answer, 0, answer.prompt))
        records = [answer.passes[done] for answer, done, _ in running]
        total += Steps(
            1,
            sum(record.committed for record in records),
            max(length for _, _, length in running),
            1 + max(record.live for record in records),
        )
        running = [
            (answer, done + 1, length + record.committed)
            for (answer, done, length), record in zip(running, records, strict=True)
            if done + 1 < len(answer.passes)
        ]
    return total
