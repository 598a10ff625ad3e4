"""Simulates a server with continuous batching from known costs: which requests wait, which are
decoded together, and when answers end.

It follows `inference.decoding.session`: as soon as a row is free and a request waits, prompts are
read into all free rows at once; otherwise a step advances every row in use by one verification. The
tokens that a verification commits are drawn beforehand, so a request is a number of passes. The
simulator can then skip all steps in which no request arrives, ends or is admitted.

Legend: b rows in use, L cached tokens of the longest row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from inference.measure.metrics import divide
from inference.traffic.arrivals import Arrival


@dataclass(frozen=True)
class Costs:
    """Seconds of a server's operations. A step of b rows: fixed[b - 1] + per_token[b - 1] * L. A
    prefill of R prompts, padded to the longest of T tokens: prefill + prefill_token * R * T."""

    fixed: tuple[float, ...]
    per_token: tuple[float, ...]
    prefill: float
    prefill_token: float

    @property
    def rows(self) -> int:
        return len(self.fixed)

    def step(self, rows: int, length: float) -> float:
        return self.fixed[rows - 1] + self.per_token[rows - 1] * length

    def read(self, lengths: Sequence[int]) -> float:
        return self.prefill + self.prefill_token * len(lengths) * max(lengths)


@dataclass(frozen=True)
class SimulatedRequest:
    """A request and how it will be decoded. commits: tokens of each of its verifications; the first
    token comes from prefill."""

    arrival: Arrival
    commits: tuple[int, ...]


@dataclass(frozen=True)
class Served:
    """The times of a request's first token and of its answer's end, in seconds since the first
    arrival."""

    first: float
    end: float


@dataclass
class _Row:
    """A request being decoded: its place among the jobs, verifications done, tokens in the
    cache."""

    job: int
    done: int
    length: int


def simulate(jobs: Sequence[SimulatedRequest], costs: Costs) -> list[Served]:
    """When every request was served. jobs: in order of arrival."""
    first, end = [0.0] * len(jobs), [0.0] * len(jobs)
    cumulated = [np.concatenate([[0], np.cumsum(job.commits)]) for job in jobs]
    waiting: deque[int] = deque()
    running: list[_Row] = []
    now, coming = 0.0, 0
    while coming < len(jobs) or waiting or running:
        while coming < len(jobs) and jobs[coming].arrival.time <= now:
            waiting.append(coming)
            coming += 1
        if waiting and len(running) < costs.rows:
            taken = [waiting.popleft() for _ in range(min(len(waiting), costs.rows - len(running)))]
            now += costs.read([jobs[job].arrival.prompt for job in taken])
            for job in taken:
                first[job] = end[job] = now
                if jobs[job].commits:
                    running.append(_Row(job, 0, jobs[job].arrival.prompt))
        elif running:
            steps = min(len(jobs[row.job].commits) - row.done for row in running)
            step = costs.step(len(running), max(row.length for row in running))
            if coming < len(jobs) and len(running) < costs.rows:
                steps = min(steps, max(1, ceil(divide(jobs[coming].arrival.time - now, step))))
            before = max(row.length for row in running)
            for row in running:
                commits = cumulated[row.job]
                row.length += int(commits[row.done + steps] - commits[row.done])
                row.done += steps
            # the mean length over the skipped steps, as rows grow about evenly
            last = max(row.length for row in running)
            middle = before + (last - before) * divide(steps - 1, 2 * steps)
            now += steps * costs.step(len(running), middle)
            for row in running:
                if row.done == len(jobs[row.job].commits):
                    end[row.job] = now
            running = [row for row in running if row.done < len(jobs[row.job].commits)]
        else:
            now = max(now, jobs[coming].arrival.time)
    return [Served(*times) for times in zip(first, end, strict=True)]


def draw_commits(answer: int, commits: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """Tokens of each verification, drawn from the measured `commits`, until there are `answer`
    tokens; the first token needs no verification."""
    left, drawn = answer - 1, list[int]()
    while left > 0:
        for count in rng.choice(np.asarray(commits), size=max(1, left)).tolist():
            drawn.append(min(count, left))
            left -= drawn[-1]
            if left == 0:
                break
    return tuple(drawn)


def concurrency(
    jobs: Sequence[SimulatedRequest], served: Sequence[Served], shares: Sequence[float]
) -> list[int]:
    """Requests in the server at quantiles of the time in which it had any."""
    changes = sorted([(job.arrival.time, 1) for job in jobs] + [(item.end, -1) for item in served])
    spent: dict[int, float] = {}
    count, since = 0, 0.0
    for moment, change in changes:
        if count:
            spent[count] = spent.get(count, 0.0) + moment - since
        count, since = count + change, moment
    total, levels = sum(spent.values()), sorted(spent)
    passed = np.cumsum([spent[level] for level in levels])
    return [levels[place] for place in np.searchsorted(passed, np.array(shares) * total)]
