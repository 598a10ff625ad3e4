"""The simulated server: against one that goes step by step, and against what can be worked out by
hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from inference.traffic.arrivals import Arrival
from inference.traffic.simulate import (
    Costs,
    Served,
    SimulatedRequest,
    concurrency,
    draw_commits,
    simulate,
)


def slowly(jobs: Sequence[SimulatedRequest], costs: Costs) -> list[Served]:
    """The obvious simulator: one verification at a time, every row looked at."""
    first, end = {}, {}
    waiting: deque[int] = deque()
    rows: list[tuple[int, list[int], int]] = []  # job, verifications left, cached tokens
    now, coming = 0.0, 0
    while len(end) < len(jobs):
        while coming < len(jobs) and jobs[coming].arrival.time <= now:
            waiting.append(coming)
            coming += 1
        if waiting and len(rows) < costs.rows:
            chosen = []
            while waiting and len(rows) + len(chosen) < costs.rows:
                chosen.append(waiting.popleft())
            longest = max(jobs[job].arrival.prompt for job in chosen)
            now += costs.prefill + costs.prefill_token * len(chosen) * longest
            for job in chosen:
                first[job] = now
                if jobs[job].commits:
                    rows.append((job, list(jobs[job].commits), jobs[job].arrival.prompt))
                else:
                    end[job] = now
        elif rows:
            now += costs.fixed[len(rows) - 1] + costs.per_token[len(rows) - 1] * max(
                length for _, _, length in rows
            )
            rows = [(job, left[1:], length + left[0]) for job, left, length in rows]
            for job, left, _ in rows:
                if not left:
                    end[job] = now
            rows = [row for row in rows if row[1]]
        else:
            now = jobs[coming].arrival.time
    return [Served(first[job], end[job]) for job in range(len(jobs))]


def traffic(count: int, rate: float, seed: int) -> list[SimulatedRequest]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    jobs = []
    for time in times - times[0]:
        prompt, answer = int(rng.integers(5, 90)), int(rng.integers(1, 60))
        jobs.append(
            SimulatedRequest(
                Arrival(float(time), prompt, answer), draw_commits(answer, [1, 1, 2, 3, 4], rng)
            )
        )
    return jobs


FLAT = Costs((0.010, 0.012, 0.015, 0.02), (0.0,) * 4, 0.003, 1e-5)
GROWING = Costs((0.010, 0.012, 0.015, 0.02), (1e-5, 2e-5, 3e-5, 4e-5), 0.003, 1e-5)


@pytest.mark.parametrize("rate", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_leaping_is_stepping(rate: float, seed: int) -> None:
    jobs = traffic(120, rate, seed)
    quick, slow = simulate(jobs, FLAT), slowly(jobs, FLAT)
    assert [item.first for item in quick] == pytest.approx([item.first for item in slow])
    assert [item.end for item in quick] == pytest.approx([item.end for item in slow])
    # rows' lengths are averaged over a leap
    quick, slow = simulate(jobs, GROWING), slowly(jobs, GROWING)
    assert quick[-1].end == pytest.approx(slow[-1].end, rel=5e-3)
    means = [
        np.mean([item.end - job.arrival.time for job, item in zip(jobs, found, strict=True)])
        for found in (quick, slow)
    ]
    assert means[0] == pytest.approx(means[1], rel=0.02)


def test_one_request_alone_by_hand() -> None:
    (served,) = simulate(
        [SimulatedRequest(Arrival(0.0, 100, 6), (2, 3))], Costs((0.5,), (0.01,), 1.0, 0.001)
    )
    assert served.first == pytest.approx(1.0 + 0.001 * 100)
    assert served.end == pytest.approx(
        served.first + (0.5 + 0.01 * 100) + (0.5 + 0.01 * 102), rel=0.01
    )


def test_who_finds_no_row_waits_and_an_idle_server_stands_still() -> None:
    jobs = [
        SimulatedRequest(Arrival(0.0, 1, 3), (1, 1)),
        SimulatedRequest(Arrival(0.0, 1, 2), (1,)),
        SimulatedRequest(Arrival(100.0, 1, 1), ()),
    ]
    served = simulate(jobs, Costs((1.0,), (0.0,), 0.5, 0.0))
    assert [(item.first, item.end) for item in served] == [(0.5, 2.5), (3.0, 4.0), (100.5, 100.5)]
    # two from 0 to 2.5, one to 4.0, one for 0.5
    assert concurrency(jobs, served, [0.5, 0.95]) == [2, 2]
    assert concurrency(jobs, served, [0.6]) == [2] and concurrency(jobs, served, [0.4]) == [1]


def test_commits_add_up_to_the_answer_and_follow_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    assert draw_commits(1, [3], rng) == ()
    assert draw_commits(2, [3], rng) == (1,)
    assert draw_commits(8, [3], rng) == (3, 3, 1)
    long = draw_commits(20_001, [1, 2, 6], rng)
    assert sum(long) == 20_000
    assert np.mean(long) == pytest.approx(3.0, rel=0.03)
