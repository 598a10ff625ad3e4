"""Interruptions at random moments: kill -9, SIGTERM and Ctrl-C for every stage, of one process and
of several under torchrun and DeepSpeed.

A run is interrupted up to three times, each at a moment that is drawn from the time that it takes
in peace, and then brought to its end by the same command. Its result must be that of the calm run,
and nothing half-made may be left. All interruptions of a run count as failed when it does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.ground import Ended, UnsurvivedError, rank_of
from tests.chaos.rows import Areas, Row
from tests.chaos.stages import SUBJECTS, Site, Subject

PART = "interruptions"
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOST = 3
"""Interruptions of a run."""
PATIENCE = 4
"""Turns without a hit after which it is given up."""


def attack(seed: int, count: int, folder: Path) -> list[Row]:
    """At least `count` interruptions, in turn of all stages: a row for each."""
    order, site, rows = random.Random(seed), Site(folder), Areas(PART)
    missed, enough = 0, PATIENCE * len(SUBJECTS)
    for number, subject in enumerate(in_turn(order)):
        if sum(row.tried for row in rows.values()) >= count or missed == enough:
            break
        try:
            hits, wrong = interrupted(site, subject, f"{subject.stage}-{number}", order)
        except UnsurvivedError as error:
            hits, wrong = 1, str(error)
        missed = 0 if hits else missed + 1
        rows[subject.name].note(wrong, hits)
    return list(rows.values())


def in_turn(order: random.Random) -> Iterator[Subject]:
    """All subjects again and again, each time in another order."""
    while True:
        yield from order.sample(list(SUBJECTS.values()), len(SUBJECTS))


def interrupted(site: Site, subject: Subject, name: str, order: random.Random) -> tuple[int, str]:
    """Interrupt a run of a subject and bring it to its end: how often it was hit, and what is
    wrong."""
    calm = site.calm(subject)
    run, hits = site.run(subject, name), 0
    for _ in range(order.randint(1, MOST)):
        number, delay = order.choice(SIGNALS), order.uniform(0.0, calm.seconds)
        ended = interrupt(site, subject, run, number, delay, order)
        if ended is None:
            break
        hits += 1
        # a process that has only just begun is Python's
        if "Traceback" in ended.words and "/scripts/" in ended.words:
            return hits, f"{number.name} after {delay:.2f} s: {around(ended.words, '/scripts/')}"
    wrong = site.finished(subject, run, site.start(subject, run))
    return hits, f"{hits} times, the last by {number.name}: {wrong}" if wrong else ""


def around(words: str, found: str) -> str:
    """What stands before and behind the first `found` in what a stage said."""
    place = words.index(found)
    return " ".join(words[max(0, place - 600) : place + 800].split())


def interrupt(
    site: Site,
    subject: Subject,
    run: Path,
    number: signal.Signals,
    delay: float,
    order: random.Random,
) -> Ended | None:
    """Start a subject and send it a signal after so many seconds; None if it ended before. Of
    several ranks kill -9 hits one, or all with their launcher."""
    process = site.ground.start(site.command(subject, run), processes=subject.processes)
    until = time.monotonic() + delay
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    if process.poll() is not None:
        site.ground.end(process)
        return None
    victims = [process.pid]
    if subject.processes > 1 and number is signal.SIGKILL:
        ranks = list(running_ranks(process.pid, subject.processes))
        one = bool(ranks) and order.random() < 0.5
        victims = [order.choice(ranks)] if one else [process.pid, *ranks]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
    return site.ground.end(process)


def running_ranks(launcher: int, count: int) -> Iterator[int]:
    """The processes of a launch that are there by now."""
    for rank in range(count):
        with contextlib.suppress(UnsurvivedError):
            yield rank_of(launcher, rank)
