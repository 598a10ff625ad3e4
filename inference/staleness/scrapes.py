"""Turns counters of a server into observations for the sequential test. They come from saved
scrapes, or from a running server that is scraped repeatedly.

The test's unit is a window: a stretch of decoding between two scrapes, of `watch.window` verify
passes or more. Passes inside a window are not independent: requests share a prompt, a client, a
domain, an hour. A test that treated their sum as one of independent answers would report drift for
such runs. So a window counts as one observation, its accepted drafted tokens per pass, whatever its
spread (`evidence.Bets`). The error rate holds as long as a window's acceptance equals the
reference's on average. Fewer windows than `LEAST_WINDOWS` are treated as one sum, whose spread is
the larger of the reference's and the windows' own (`evidence.Sums`).

If counters fall, the server was restarted. Its counts since the restart are kept; its work between
the last scrape and the restart is lost. A server that goes on to answer without counters of
speculation was restarted without it, and cannot be watched any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.samples import Sample

from heads.api.errors import UserError
from heads.api.reading import read_text
from inference.engines.client import Endpoint, PassingError, parts_of
from inference.engines.counters import (
    TENSORRT,
    VLLM,
    EngineCounters,
    Look,
    ResetError,
    acceptance,
    identify,
    known_engines,
    read_domains,
)
from inference.engines.models import same_model
from inference.engines.scrape import read_samples
from inference.staleness.config import WatchConfig

logger = logging.getLogger(__name__)

LEAST_WINDOWS = 30
"""Fewest windows of a domain in saved scrapes that count as separate observations."""
LEAST_SPREAD = 5
"""Fewest windows from which a spread is estimated."""
NORMAL_MEDIAN = 0.6745
"""Median of a standard normal's absolute value."""
FAILURES = 5
"""Failed scrapes after which a server that has not shown its counters yet counts as gone."""
SILENT = 5
"""Scrapes with more answers but no counters of speculation after which a server counts as one
without."""
COUNTING_DEPTH = (VLLM, TENSORRT)
"""Engines that have a counter for every position that they draft."""
GAUGE_REMARK = (
    "This version of SGLang shows only the mean acceptance of its last log interval "
    "(sglang:spec_accept_length) and not that of each window. Therefore neither the alarm rate nor "
    "the intervals are guaranteed. Versions with sglang:spec_verify_calls have what is needed."
)
DEPTH_REMARK = (
    "Depth unknown: the counters of {engine} do not show how many tokens the server drafts. "
    "Another draft than the reference's, {depth} deep, looks like drift or hides it."
)
ADVICE = "Give what a server shows at /metrics, as text (format 0.0.4)."
RUNNING_ADVICE = (
    "Give the address of its metrics as watch.metrics (http://127.0.0.1:8000/metrics), or files "
    "with saved output of it."
)
TOKENIZER_ADVICE = (
    "serve the target that the drafter was trained for or a version of it, or set target.path to "
    "what is served"
)
Looks = dict[str, Look]
"""By domain."""


@dataclass
class Observation:
    """Accepted drafted tokens and passes of one domain between two scrapes; reached: passes that
    accepted each position, empty if it is not counted."""

    accepted: float = 0.0
    passes: float = 0.0
    reached: list[float] = field(default_factory=list)

    def add(self, accepted: float, passes: float, reached: Sequence[float]) -> None:
        self.accepted += accepted
        self.passes += passes
        width = max(len(self.reached), len(reached))
        pairs = [[*counts, *[0.0] * width][:width] for counts in (self.reached, reached)]
        self.reached = [one + other for one, other in zip(*pairs, strict=True)]


@dataclass
class Windows:
    """Turns scrapes into windows. least: passes of a window; depth: drafted tokens of the
    reference; whole: finished windows by domain; rest: counts that do not fill a window yet."""

    least: int
    depth: int
    whole: dict[str, list[Observation]] = field(default_factory=dict)
    rest: dict[str, Observation] = field(default_factory=dict)
    before: Looks = field(default_factory=dict)
    engine: EngineCounters | None = None
    restarts: int = 0
    silent: int = 0
    """Scrapes with more answers since the last one with counters of speculation."""
    gauged: bool = False
    """Counts come from the gauge of an engine that does not count its passes."""
    deep: bool = False
    """The server drafts as deep as the reference, as its counters show."""

    def take(self, samples: Sequence[Sample], where: str, *, first: bool = False) -> list[str]:
        """Count one scrape; returns the domains of which a window was finished. where: for
        messages. first: the first scrape of a server that was already running, which only starts
        the count.

        Raises `UserError` for metrics of an unknown engine, or of one that does not speculate (any
        more).
        """
        engine = require_engine(samples, where)
        now = read_domains(samples, engine)
        self._require_speculation(engine, now, where)
        self.engine = engine
        changes = now if not first else {}
        if self.before:
            try:
                changes = {
                    name: look.since(self.before.get(name, Look())) for name, look in now.items()
                }
                if missing := set(self.before) - set(now):
                    raise ResetError(min(missing))
            except ResetError:
                self.restarts += 1
                changes = now
        self.before = now
        return [name for name, change in changes.items() if self._count(name, change, where)]

    def _require_speculation(self, engine: EngineCounters, now: Looks, where: str) -> None:
        """Raise `UserError` for a server without speculation. One that was restarted may have
        counted nothing yet."""
        if any(acceptance(look, 0, 0) for look in now.values()):
            self.silent = 0
            return
        counters = ", ".join(sorted(engine.speculation))
        if not self.before:
            raise UserError(
                f"watch.metrics: {where} has no {counters}, so this server ({engine.name}) serves "
                f"without speculation or has not answered yet. {ADVICE}"
            )
        self.silent += answered(now) > answered(self.before)
        if self.silent == SILENT:
            raise UserError(
                f"watch.metrics: {where} counts new answers but has no {counters} any more, so "
                f"this server ({engine.name}) was started again without speculation. Start it with "
                "its drafter and watch it again."
            )

    def _count(self, domain: str, change: Look, where: str) -> bool:
        found = acceptance(change, 0, 0)
        if found is None or found.passes <= 0:
            return False
        assert self.engine is not None, "set by `take`"
        positions = max(len(found.by_position), len(change.drafted_by_position))
        self.gauged |= bool(self.engine.length)
        self.deep |= positions == self.depth
        if positions > self.depth or (self.engine in COUNTING_DEPTH and positions != self.depth):
            raise UserError(
                f"watch.metrics: {where} counts drafts of {positions} tokens, but the reference "
                f"was measured with drafts {self.depth} deep. Make a reference of that draft with "
                "watch.learn=true, or serve with the reference's."
            )
        rest = self.rest.setdefault(domain, Observation())
        # the end of an answer may cut a pass that counts as accepted in full, and the reverse
        accepted = min(found.accepted, self.depth * found.passes)
        rest.add(accepted, found.passes, found.by_position)
        if rest.passes < self.least:
            return False
        self.whole.setdefault(domain, []).append(self.rest.pop(domain))
        return True

    @property
    def remarks(self) -> list[str]:
        """What the counters do not tell."""
        found = [GAUGE_REMARK] if self.gauged else []
        if self.engine is not None and not self.deep:
            found.append(DEPTH_REMARK.format(engine=self.engine.name, depth=self.depth))
        return found

    def totals(self) -> dict[str, Observation]:
        """All counts, by domain."""
        found: dict[str, Observation] = {}
        parts = [(name, one) for name, several in self.whole.items() for one in several]
        for name, one in [*parts, *self.rest.items()]:
            found.setdefault(name, Observation()).add(one.accepted, one.passes, one.reached)
        return found


def require_engine(samples: Sequence[Sample], where: str) -> EngineCounters:
    """The engine that shows these metrics; raises `UserError` for none that is known."""
    engine = identify(samples)
    if engine is None:
        raise UserError(
            f"watch.metrics: {where} has no counters of a known engine ({known_engines()}). "
            f"{ADVICE}"
        )
    return engine


def answered(looks: Looks) -> float:
    """A number that rises with every answer."""
    return sum((look.requests or 0.0) + (look.tokens or 0.0) for look in looks.values())


def spread_of(windows: Sequence[Observation]) -> float:
    """Variance of a sum of (accepted - r passes) per pass in it, estimated from neighbouring
    windows; 0 for fewer than `LEAST_SPREAD` windows.

    Between two windows of n and m passes, the acceptance differs with variance v (1/n + 1/m). The
    median of these differences is used, so that one change of level, which the test looks for, does
    not count as spread.
    """
    if len(windows) < LEAST_SPREAD:
        return 0.0
    accepted, passes = np.array([(one.accepted, one.passes) for one in windows]).T
    scale = np.sqrt(1.0 / passes[1:] + 1.0 / passes[:-1])
    return float((np.median(np.abs(np.diff(accepted / passes)) / scale) / NORMAL_MEDIAN) ** 2)


# Saved scrapes


def read_files(paths: Iterable[Path]) -> Iterator[tuple[str, list[Sample]]]:
    """(file, samples) of each saved scrape, the oldest one first.

    paths: files with the content of /metrics, or folders of such files. Samples with a timestamp
    are scrapes of that time, also if one file has several. Files without timestamps are read in the
    given order, those of a folder in the order of their names. Raises `UserError` for a file that
    cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise UserError(f"watch.metrics: there are no files in {', '.join(map(str, paths))}.")
    found: list[tuple[float | None, str, list[Sample]]] = []
    for file in files:
        found += [(at, f"'{file}'", part) for at, part in _by_time(_read(file))]
    if all(at is not None for at, _, _ in found):
        found.sort(key=lambda item: item[0] or 0.0)
    yield from ((name, samples) for _, name, samples in found)


def _read(file: Path) -> list[Sample]:
    try:
        return list(read_samples(read_text(file, "Give what the server shows at /metrics.")))
    except UserError as error:
        raise UserError(f"watch.metrics: {error}") from error
    except ValueError as error:
        raise UserError(f"watch.metrics: '{file}', {error}. {ADVICE}") from error


def _by_time(samples: Sequence[Sample]) -> list[tuple[float | None, list[Sample]]]:
    """The samples of each time, or all together if one has no timestamp."""
    times = {None if one.timestamp is None else float(one.timestamp) for one in samples}
    if None in times or not times:
        return [(None, list(samples))]
    found: Mapping[float, list[Sample]] = {at: [] for at in sorted(filter(None, times))}
    for one in samples:
        found[float(one.timestamp or 0.0)].append(one)
    return list(found.items())


# A running server


def places_of(address: str) -> tuple[str, str]:
    """The server and, if the address names them, its metrics; otherwise an empty text. Raises
    `UserError` for an invalid address."""
    url = parts_of(address, "watch.metrics")
    path, named, _ = url.path.partition("/metrics")
    return f"{url.scheme}://{url.netloc}{path}", address if named else ""


def _endpoint(config: WatchConfig, address: str) -> Endpoint:
    base, metrics = places_of(address)
    given = (config.key_variable, config.timeout, metrics, RUNNING_ADVICE)
    return Endpoint(base, "watch.metrics", *given)


def served_model(config: WatchConfig, address: str, known: str, tokenizer: Any = None) -> str:
    """What the server serves, by its own words; empty if it does not say one thing (an address of
    metrics alone, a server that does not answer yet, several models).

    known: the model of the reference, by its Hub id or path. A warning says that another one is
    served, which may be meant: a version of it by another name. Raises `UserError` if the server
    reads text differently than `tokenizer`, because then it serves another model.
    """
    return asyncio.run(_served_model(config, address, known, tokenizer))


async def _served_model(config: WatchConfig, address: str, known: str, tokenizer: Any) -> str:
    endpoint = _endpoint(config, address)
    try:
        try:
            found = await endpoint.models()
        except (PassingError, UserError):  # `follow` says what is wrong with the server
            return ""
        if known and found and not any(same_model(one, known) for one in found):
            names = ", ".join(sorted({one.root or one.name for one in found})[:5])
            logger.warning(
                "watch.metrics: %s serves %s, but the reference is of %s. If that is no version of "
                "it, give the reference of what is served as watch.reference",
                *(endpoint.base, names, known),
            )
        roots = {one.root or one.name for one in found}
        if tokenizer is not None and len(roots) == 1:
            endpoint.served = found[0]
            try:
                await endpoint.require_tokenizer(tokenizer, TOKENIZER_ADVICE)
            except PassingError as error:
                logger.warning("watch.metrics: the tokenizer is not compared: %s", error)
        return roots.pop() if len(roots) == 1 else ""
    finally:
        await endpoint.close()


def follow(config: WatchConfig, address: str, windows: Windows) -> Iterator[list[str]]:
    """Scrape a server's metrics every `watch.every` seconds for `watch.seconds`; yields the domains
    of which a window was finished. Raises `UserError` for a server whose metrics cannot be read at
    first, or not for `watch.patience` later: a server that restarts, and the proxy before it, may
    show anything meanwhile."""
    with asyncio.Runner() as runner:
        endpoint = _endpoint(config, address)
        clock = runner.get_loop().time
        end, failures = clock() + config.seconds, 0
        seen: float | None = None
        try:
            while True:
                begun = clock()
                try:
                    samples = runner.run(_metrics(endpoint, address))
                except (PassingError, UserError) as error:
                    failures += 1
                    why = str(error).removeprefix("watch.metrics: ").rstrip(".")
                    if seen is None and isinstance(error, UserError):
                        raise
                    if seen is None and failures == FAILURES:
                        raise UserError(
                            f"watch.metrics: {FAILURES} looks in a row failed: {why}."
                        ) from error
                    if seen is not None and clock() - seen > config.patience:
                        raise UserError(
                            f"watch.metrics: {address} has shown no counters for "
                            f"{clock() - seen:.0f} seconds (watch.patience={config.patience:g}): "
                            f"{why}."
                        ) from error
                    logger.warning("watch.metrics: %s; again in %g s", why, config.every)
                else:
                    yield windows.take(samples, address, first=seen is None)
                    seen, failures = clock(), 0
                if clock() + config.every > end:
                    return
                runner.run(asyncio.sleep(max(0.0, begun + config.every - clock())))
        finally:
            runner.run(endpoint.close())


async def _metrics(endpoint: Endpoint, address: str) -> list[Sample]:
    """A server's metrics. Raises `PassingError`, and `UserError` if they are not of a known
    engine."""
    samples = await endpoint.look()
    if samples is None:
        raise UserError(f"watch.metrics: {address} shows no metrics. {ADVICE}")
    require_engine(samples, address)
    return samples
