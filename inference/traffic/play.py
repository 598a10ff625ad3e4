"""Plays traffic through the real decoder in real time, to check the simulator."""

from __future__ import annotations

import time
from collections.abc import Sequence

from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.decoding.session import Session
from inference.traffic.arrivals import Arrival
from inference.traffic.simulate import Served


def play(
    engine: Engine, requests: Sequence[Request], times: Sequence[float], capacity: int
) -> tuple[list[Served], list[Arrival]]:
    """Submit every request at its time (seconds since the start, ascending) and decode. Returns
    when each was served, and the actual arrivals with the lengths of their answers.
    `requests[i].index` is i."""
    first, end = [0.0] * len(requests), [0.0] * len(requests)
    lengths = [0] * len(requests)
    start = 0.0

    def shown(request: Request, tokens: list[int], record: PassRecord | None) -> None:
        if record is None:
            first[request.index] = time.perf_counter() - start

    with Session(engine, capacity, shown) as session:
        _settle(session, requests[0])
        start, coming = time.perf_counter(), 0
        while coming < len(requests) or session.unfinished:
            now = time.perf_counter() - start
            while coming < len(requests) and times[coming] <= now:
                session.add(requests[coming])
                coming += 1
            if not session.unfinished:
                time.sleep(max(0.0, times[coming] - now))
                continue
            for done in session.step():
                end[done.request.index] = time.perf_counter() - start
                lengths[done.request.index] = len(done.tokens)
    arrivals = [
        Arrival(when, len(request.tokens), length)
        for when, request, length in zip(times, requests, lengths, strict=True)
    ]
    return [Served(*moments) for moments in zip(first, end, strict=True)], arrivals


def _settle(session: Session, request: Request) -> None:
    """Answer a request that does not count, so that buffers and thread pools are created."""
    session.add(request)
    while session.unfinished:
        session.step()
