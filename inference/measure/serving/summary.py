"""Computes a report's numbers from windows: tau, acceptance by position, tokens/s, time to first
token, time per token, and their intervals.

Every mean is a ratio of sums. Intervals are 95% bootstrap percentiles over units. The units are
prompts if each response, or the times of its pieces, gives the acceptance. They are windows if the
server's counters give it, and for tokens/s. The turns of a conversation, and the lengths of a
prompt, depend on one another: they are one unit, and windows that share one are one unit too.
Repeats of a unit are summed. Times to the first token are those of the first repeat, because later
ones may use a prefix cache.

Legend: U units, R resamples, K drafted positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from inference.engines.client import Answer, steps_of
from inference.engines.counters import Acceptance
from inference.measure.metrics import Floats, divide, interval95, middle95, ratios, resample_weights
from inference.measure.serving.windows import CHUNKS, COUNTERS, RESPONSES, Side, Window, told
from inference.report.model import ServerCell

MILLI = 1000.0
LEAST_UNITS = 2
"""Fewest units with an interval: one unit, drawn again and again, would have one of zero width."""


@dataclass(frozen=True)
class Sums:
    """Sums per unit [U] of `top` and `bottom`; their ratio of sums is what is reported."""

    top: Floats
    bottom: Floats

    @property
    def ratio(self) -> float:
        return divide(self.top.sum(), self.bottom.sum())

    def interval(self, seed: int) -> tuple[float, float] | None:
        """95% interval of the ratio over resampled units; None for fewer than `LEAST_UNITS`, or if
        nothing was counted."""
        if len(self.top) < LEAST_UNITS or not self.bottom.any():
            return None
        weights = resample_weights(len(self.top), seed)
        return interval95(weights @ self.top, weights @ self.bottom)


def collect(pairs: Sequence[tuple[Hashable, float, float]]) -> Sums:
    """Sums by unit, in order of first appearance."""
    found: dict[Hashable, list[float]] = {}
    for unit, top, bottom in pairs:
        both = found.setdefault(unit, [0.0, 0.0])
        both[0] += top
        both[1] += bottom
    sums = np.array(list(found.values()), dtype=np.float64).reshape(-1, 2)
    return Sums(sums[:, 0], sums[:, 1])


def place_of(window: Window) -> Hashable:
    """A key that windows of the same prompts share, at either server and in every repeat."""
    group = window.group
    return group.domain, group.first, group.end, window.concurrency, window.number


def units_of(windows: Sequence[Window]) -> dict[Hashable, str]:
    """Place -> unit; places with prompts of one unit are one, also by way of others."""
    joined: dict[str, str] = {}
    for one in windows:
        found = {joined.setdefault(unit, unit) for unit in one.units}
        first = min(found)
        joined |= {unit: first for unit, name in joined.items() if name in found}
    return {place_of(one): joined[one.units[0]] for one in windows}


def accepted_by(side: Side, windows: Sequence[Window]) -> list[tuple[Hashable, Acceptance]]:
    """The accepted tokens by unit."""
    if side.source == COUNTERS:
        units = units_of(windows)
        return [(units[place_of(one)], one.counted) for one in windows if one.counted is not None]
    if side.source not in (RESPONSES, CHUNKS):
        return []
    found: list[tuple[Hashable, Acceptance]] = []
    for window in windows:
        for unit, answer in zip(window.units, window.answers, strict=True):
            counted = estimate(answer) if side.source == CHUNKS else told(answer)
            if counted is not None:
                found.append((unit, counted))
    return found


def estimate(answer: Answer) -> Acceptance | None:
    """Estimates acceptance from the times of a stream's events; the first step gives the first
    token."""
    passes = steps_of(answer.arrivals) - 1
    committed = answer.tokens - 1
    if passes < 1 or committed < passes:
        return None
    return Acceptance(float(passes), float(committed), float(committed - passes))


def cells(side: Side, baseline: Side | None, seed: int, compared: bool) -> list[ServerCell]:
    """For every concurrency: all prompts, each domain, each range of prompt tokens, and their
    combinations if there are several of both. baseline: the server without speculation; compared:
    whether texts must agree."""
    return [
        _cell(side, baseline, seed, compared, *part)
        for part in parts(side.windows)
        if any(part[-1](window) for window in side.windows)
    ]


Choice = Callable[[Window], bool]
Part = tuple[int, str, int, int, Choice]


def parts(windows: Sequence[Window]) -> Iterator[Part]:
    """(concurrency, domain, first, end, whether a window belongs to it); "" and (0, 0): all."""
    domains = sorted({one.group.domain for one in windows})
    spans = sorted({(one.group.first, one.group.end) for one in windows})
    one_domain, one_span = len(domains) == 1, len(spans) == 1
    shown: list[tuple[str, tuple[int, int]]] = [("", (0, 0))]
    shown += [(domain, (0, 0)) for domain in domains]
    shown += [("", span) for span in spans]
    if not one_domain and not one_span:
        shown += list(product(domains, spans))
    for rows in sorted({one.concurrency for one in windows}):
        for domain, (first, end) in shown:

            def chosen(
                one: Window, rows: int = rows, domain: str = domain, span: Any = (first, end)
            ) -> bool:
                fits = not span[1] or (one.group.first, one.group.end) == span
                return one.concurrency == rows and domain in ("", one.group.domain) and fits

            yield rows, domain, first, end, chosen


def _cell(
    side: Side,
    baseline: Side | None,
    seed: int,
    compared: bool,
    rows: int,
    domain: str,
    first: int,
    end: int,
    chosen: Choice,
) -> ServerCell:
    windows = [one for one in side.windows if chosen(one)]
    answers = [answer for one in windows for answer in one.answers]
    speed = speed_of(windows)
    fresh = [one for one in windows if one.repeat == 0]
    firsts = np.array([MILLI * answer.first_token for one in fresh for answer in one.answers])
    asked = [unit for one in fresh for unit in one.units]
    each = per_token(windows)
    content: dict[str, Any] = {
        "concurrency": rows,
        "domain": domain,
        "first": first,
        "end": end,
        "requests": len(answers),
        "windows": len({place_of(one) for one in windows}),
        "prompt_tokens": divide(sum(answer.prompt_tokens for answer in answers), len(answers)),
        "tokens": sum(answer.tokens for answer in answers),
        "seconds": float(speed.bottom.sum()),
        "running": divide(sum(one.end - one.begin for one in answers), speed.bottom.sum()),
        "tokens_per_second": speed.ratio,
        "tokens_per_second_ci95": speed.interval(seed),
        "first_token_ms": float(np.median(firsts)),
        "first_token_ms_ci95": median_interval(firsts, asked, seed),
        "first_token_ms_p99": float(np.percentile(firsts, 99)),
        "token_ms": each.ratio,
        "token_ms_ci95": each.interval(seed),
        "gap_ms_p99": largest_gap(answers),
        **_accepted(side, windows, seed),
    }
    if baseline is not None:
        plain = [one for one in baseline.windows if chosen(one)]
        content |= _against(windows, plain, seed, compared)
    return ServerCell(**content)


def speed_of(windows: Sequence[Window]) -> Sums:
    """Tokens and seconds by unit."""
    units = units_of(windows)
    pairs = [
        (units[place_of(one)], float(sum(answer.tokens for answer in one.answers)), one.seconds)
        for one in windows
    ]
    return collect(pairs)


def per_token(windows: Sequence[Window]) -> Sums:
    """Milliseconds after the first token, and tokens after it, by unit."""
    pairs = [
        (unit, MILLI * answer.decoding, answer.tokens - 1.0)
        for one in windows
        for unit, answer in zip(one.units, one.answers, strict=True)
    ]
    return collect(pairs)


def median_interval(values: Floats, units: Sequence[str], seed: int) -> tuple[float, float] | None:
    """95% interval of the median of values over resampled units, those of the values; None for
    fewer than `LEAST_UNITS`."""
    names, places = np.unique(np.array(units), return_inverse=True)
    if len(names) < LEAST_UNITS:
        return None
    weights = resample_weights(len(names), seed).astype(int)[:, places]
    return middle95(np.array([np.median(np.repeat(values, times)) for times in weights]))


def largest_gap(answers: Sequence[Answer]) -> float:
    """Milliseconds: 99th percentile of the gaps between streamed pieces."""
    gaps = [np.diff(answer.arrivals) for answer in answers if len(answer.arrivals) > 1]
    return MILLI * float(np.percentile(np.concatenate(gaps), 99)) if gaps else 0.0


def _accepted(side: Side, windows: Sequence[Window], seed: int) -> dict[str, Any]:
    """The numbers about speculation; empty if nothing is known."""
    found = accepted_by(side, windows)
    if not found or not sum(counts.passes for _, counts in found):
        return {}
    taus = collect([(unit, counts.committed, counts.passes) for unit, counts in found])
    passes = float(taus.bottom.sum())
    drafted = [counts.drafted for _, counts in found]
    accepted = sum(counts.accepted for _, counts in found)
    content: dict[str, Any] = {
        "tau": taus.ratio,
        "tau_ci95": taus.interval(seed),
        "units": len(taus.top),
        "passes": round(passes),
        "accepted": round(accepted),
    }
    if None not in drafted:
        total = sum(count for count in drafted if count is not None)
        content |= {"drafted": round(total), "accepted_share": divide(accepted, total)}
    deepest = max(len(counts.by_position) for _, counts in found)
    if deepest:
        reached = [
            collect(
                [
                    (unit, (*counts.by_position, *[0.0] * deepest)[place], counts.passes)
                    for unit, counts in found
                ]
            )
            for place in range(deepest)
        ]
        content["acceptance"] = [sums.ratio for sums in reached]
        if len(taus.top) >= LEAST_UNITS:
            content["acceptance_ci95"] = [sums.interval(seed) for sums in reached]
    return content


def _against(
    windows: Sequence[Window], plain: Sequence[Window], seed: int, compared: bool
) -> dict[str, Any]:
    """The gain of speculation: tokens/s and texts of the same windows at both servers."""
    ours, theirs = speed_of(windows), speed_of(plain)
    # both were measured in the same order of places
    assert len(ours.top) == len(theirs.top)
    weights = resample_weights(len(ours.top), seed)
    fast = (weights @ ours.top) * (weights @ theirs.bottom)
    slow = (weights @ theirs.top) * (weights @ ours.bottom)
    content: dict[str, Any] = {
        "baseline_tokens_per_second": theirs.ratio,
        "speedup": divide(ours.ratio, theirs.ratio),
    }
    if len(ours.top) >= LEAST_UNITS:
        content["speedup_ci95"] = middle95(ratios(fast, slow))
    if compared:
        texts = {(place_of(one), one.repeat): [a.text for a in one.answers] for one in plain}
        content["identical"] = sum(
            answer.text == text
            for one in windows
            for answer, text in zip(one.answers, texts[place_of(one), one.repeat], strict=True)
        )
    return content
