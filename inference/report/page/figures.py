"""The charts of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from inference.report import claims
from inference.report.model import (
    Calibration,
    CostPoint,
    Costs,
    DrafterLoss,
    Profile,
    ServerMeasurement,
)
from inference.report.page.charts import (
    SERIES,
    Dot,
    Dots,
    Figure,
    Line,
    Lines,
    Reliability,
    Segment,
    Stack,
    Waterfall,
    ticks,
)
from inference.report.page.formats import number, percent
from inference.report.page.gather import Course, Page, Run

SPLITS = 6
"""Most drafters whose split is drawn; the tables contain all."""
OF_ALL = "Share of all verifications in which a draft of that depth was accepted."
OF_REACHED = "How well the drafter does once it has come so far."
ESTIMATES = {"head": "its own confidence", "probability": "the probability of its best candidate"}


def _series(place: int) -> int:
    return place if place < SERIES else -1


def _dots(
    title: str, rows: Mapping[str, Sequence[Dot]], unit: str, low: float | None = None
) -> list[Figure]:
    """A chart per row, all on one scale, which begins at `low`; None: at the lowest value."""
    bounds = [x for dots in rows.values() for dot in dots for x in dot.bounds]
    ends = (min(bounds, default=1.0) if low is None else low, max(bounds, default=1.0))
    charts = [Dots(f"{title}, {name}", dots, 1.0, unit, ends) for name, dots in rows.items()]
    return [Figure(chart.title, chart) for chart in charts]


def domains(run: Run) -> list[Figure]:
    """Speedup, then tau, by domain."""
    speedups, taus = {}, {}
    for name in run.report.domains:
        found = [(one, one.domains[name]) for one in run.drafters if name in one.domains]
        intervals = {one.name: run.report.domain_intervals(one.name).get(name) for one, _ in found}
        speedups[name] = [
            Dot(one.name, cell.speedup, intervals[one.name], one is run.best) for one, cell in found
        ]
        taus[name] = [
            Dot(one.name, cell.tau, cell.tau_ci95, one is run.best) for one, cell in found
        ]
    return [*_dots("Speedup", speedups, "×"), *_dots("Tokens per verification", taus, "", 1.0)]


def contexts(run: Run) -> list[Figure]:
    """tau, then speedup, by tokens of the prompt; nothing if all prompts are in one bin."""
    taus: dict[str, list[Dot]] = {label: [] for label in run.report.contexts}
    speedups: dict[str, list[Dot]] = {label: [] for label in run.report.contexts}
    for one in run.drafters if taus else ():
        for found in one.contexts:
            best = one is run.best
            taus[found.label].append(Dot(one.name, found.tau, found.tau_ci95, best))
            speed = Dot(one.name, found.speedup, found.speedup_ci95, best)
            speedups[found.label].append(speed)
    return [*_dots("Tokens per verification", taus, "", 1.0), *_dots("Speedup", speedups, "×")]


def depths(run: Run) -> list[Figure]:
    """Acceptance by depth, of all passes and given the depth before."""
    ranked = sorted(run.drafters, key=lambda drafter: -drafter.tau)
    figures = []
    for key, title, note in (
        ("unconditional", "Reached and accepted", OF_ALL),
        ("conditional", "Accepted, given the depth before", OF_REACHED),
    ):
        values = [getattr(drafter.acceptance, key) for drafter in ranked]
        series = [
            Line(drafter.name, list(enumerate(shares, start=1)), _series(place))
            for place, (drafter, shares) in enumerate(zip(ranked, values, strict=True))
        ]
        marks = range(1, max(map(len, values), default=0) + 1)
        label = "depth of the drafted token"
        chart = Lines(title, series[::-1], label, "accepted", marks, top=1.0, percent=True)
        figures.append(Figure(title, chart, note))
    return figures


def server(block: ServerMeasurement) -> list[Figure]:
    """A running server: tau by domain, and acceptance by position, for each number of clients."""
    rows = {
        f"{cell.concurrency} clients": [
            Dot(one.label, one.tau, one.tau_ci95, one is cell)
            for one in block.speculative.cells
            if one.tau is not None and one.concurrency == cell.concurrency
        ]
        for cell in block.speculative.overall()
    }
    figures = _dots("Tokens per verification", {k: v for k, v in rows.items() if v}, "", 1.0)
    shares = [(cell, cell.acceptance) for cell in block.speculative.overall() if cell.acceptance]
    if shares:
        series = [
            Line(f"{cell.concurrency} clients", list(enumerate(found, start=1)), _series(place))
            for place, (cell, found) in enumerate(shares)
        ]
        marks = range(1, max(len(found) for _, found in shares) + 1)
        title = "Accepted by position"
        chart = Lines(title, series, "drafted position", "accepted", marks, top=1.0, percent=True)
        figures.append(Figure(title, chart, OF_ALL))
    return figures


# Costs


def costs(run: Run) -> list[Figure]:
    """Time by phase; cost curves with the headline's draft marked, and speed by rows, if
    measured."""
    figures = [_phases(run)]
    if run.report.costs is not None:
        figures += [_verification(run, run.report.costs), _drafting(run, run.report.costs)]
    if run.report.profile is not None:
        figures += _speed_by_rows(run.report.profile)
    return figures


def _phases(run: Run) -> Figure:
    """Milliseconds per verification by phase, beside a step of plain decoding."""
    rows = []
    for drafter in run.drafters:
        times = [value for _, value in drafter.step_ms.items()]
        ends = np.cumsum(times).tolist()
        segments = [
            Segment(phase, end - time, end, place)
            for place, ((phase, time), end) in enumerate(
                zip(drafter.step_ms.items(), ends, strict=True)
            )
        ]
        rows.append((drafter.name, segments))
    plain = run.report.baseline.step_ms
    title = "Milliseconds per verification by phase"
    note = f"The dashed line is a step of plain decoding, {number(plain)} ms."
    return Figure("Time by phase", Stack(title, rows, plain, " ms"), note)


def _verification(run: Run, block: Costs) -> Figure:
    """Time by nodes, rows and cached tokens; the width of the headline's drafter is circled."""
    found: dict[tuple[int, int], list[CostPoint]] = {}
    for point in sorted(block.verify, key=lambda point: (point.rows, point.length, point.nodes)):
        found.setdefault((point.rows, point.length), []).append(point)
    series = [
        Line(
            f"{rows} × {length}",
            [(float(point.nodes), 1000 * point.seconds) for point in points],
            place,
            [(1000 * point.low, 1000 * point.high) for point in points],
        )
        for place, ((rows, length), points) in enumerate(list(found.items())[:SERIES])
    ]
    rings = []
    if run.best is not None and series:
        nodes = run.best.draft.nodes
        sizes, times = zip(*series[0].points, strict=True)
        if sizes[0] <= nodes <= sizes[-1]:  # the cost is interpolated linearly between timed sizes
            ms = float(np.interp(nodes, sizes, times))
            rings.append((float(nodes), ms, f"{run.best.name}, {nodes} nodes"))
    powers = sorted({point.nodes for point in block.verify if point.nodes.bit_count() == 1})
    chart = Lines(
        "Milliseconds of a verification by nodes",
        series,
        "nodes of a verification (logarithmic)",
        "milliseconds",
        powers,
        log=True,
        rings=rings,
    )
    note = (
        "Lines are named rows × cached tokens; whiskers are quartiles. The ring is the draft that "
        "the drafter of the headline was measured with."
    )
    return Figure("Verification, by nodes", chart, note)


def _drafting(run: Run, block: Costs) -> Figure:
    """Time of a drafted chain of every drafter, at the smallest batch and shortest cache."""
    found = {}
    for name, points in block.draft.items():
        here = min(((point.rows, point.length) for point in points), default=None)
        found[name] = sorted(
            (point.nodes - 1.0, 1000 * point.seconds)
            for point in points
            if (point.rows, point.length) == here
        )
    order = [drafter.name for drafter in run.drafters]
    names = [name for name in [*order, *sorted(found.keys() - set(order))] if found.get(name)]
    series = [Line(name, found[name], _series(i)) for i, name in enumerate(names)]
    marks = sorted({int(length) for one in series for length, _ in one.points})
    title = "Milliseconds of a draft by its length"
    chart = Lines(title, series, "drafted tokens of a chain", "milliseconds", marks)
    return Figure("Drafting, by length", chart, "One row, shortest cache measured.")


def _speed_by_rows(block: Profile) -> list[Figure]:
    """The best speedup by rows decoded together, per drafter."""
    found: dict[str, dict[int, float]] = {}
    for point in block.points:
        if point.sweep == "batch":
            here = found.setdefault(point.arm, {})
            here[point.batch] = max(here.get(point.batch, 0.0), point.speedup)
    if not found:
        return []
    series = [
        Line(name, [(float(rows), speed) for rows, speed in sorted(speeds.items())], _series(i))
        for i, (name, speeds) in enumerate(found.items())
    ]
    marks = sorted({rows for speeds in found.values() for rows in speeds})
    title = "Speedup by rows decoded together"
    chart = Lines(title, series, "rows (logarithmic)", "speedup", marks, log=True, top=1.0)
    return [Figure(title, chart, "The best draft of each; below 1 plain decoding is faster.")]


# Where the speed goes


def losses(run: Run) -> dict[str, DrafterLoss]:
    """The drafters with a split of their speed, the fastest first."""
    arms = run.report.lost.arms if run.report.lost else {}
    return {drafter.name: arms[drafter.name] for drafter in run.drafters if drafter.name in arms}


def splits(run: Run) -> list[Figure]:
    """The terms from the ceiling to the measured speedup."""
    arms = losses(run)
    levels = [
        arm.ceiling * float(np.cumprod([1.0, *(term.factor for term in arm.terms)]).max())
        for arm in arms.values()
    ]
    figures = []
    for name, arm in list(arms.items())[:SPLITS]:
        note = f"A step over all nodes costs {number(arm.widening)} plain ones."
        figures.append(Figure(name, Waterfall(name, arm, max(levels)), note))
    return figures


def overlaps(run: Run) -> list[Figure]:
    """1 - TV by depth and domain."""
    figures = []
    for name, arm in list(losses(run).items())[:SPLITS]:
        series: list[Line] = []
        for group, levels in arm.depths.items():
            if group != "all":
                tested = [(i, at) for i, at in enumerate(levels, start=1) if at.tested]
                points = [(float(i), at.overlap) for i, at in tested]
                intervals = [at.overlap_ci95 for _, at in tested]
                series.append(Line(group, points, len(series), intervals))
        chart = Lines(
            f"{name}: 1 minus TV by depth and domain",
            series,
            "depth of the drafted token",
            "1 − TV",
            range(1, len(arm.depths["all"]) + 1),
            top=1.0,
            percent=True,
            height=210.0,
        )
        figures.append(Figure(name, chart))
    return figures


def calibrations(run: Run) -> dict[str, Calibration]:
    """The calibration of the drafters that have a confidence, the fastest first."""
    return {name: arm.calibration for name, arm in losses(run).items() if arm.calibration}


def reliabilities(run: Run) -> list[Figure]:
    """Accepted share by confidence."""
    figures = []
    for name, found in list(calibrations(run).items())[:SPLITS]:
        source = ESTIMATES.get(found.estimate, found.estimate)
        note = f"ECE {percent(found.ece, 1)}"
        if found.ece_ci95 is not None:
            note += f" ({100 * found.ece_ci95[0]:.1f} to {100 * found.ece_ci95[1]:.1f})"
        figures.append(Figure(name, Reliability(name, found.bins), f"{note}, {source}."))
    return figures


# Charts of the whole page


def courses(page: Page, shown: Sequence[Course], unit: str) -> list[Figure]:
    """tau over trainings or rounds, on a scale that all charts of the page share."""
    top = max(point.high for one in (*page.trainings, *page.rounds) for point in one.points)
    figures = []
    for one in shown:
        best = max(one.points, key=lambda point: (point.best, point.tau))
        marks = [point.at for point in one.points]
        if len(marks) > 6:
            marks = [x for x in ticks(min(marks), max(marks)) if min(marks) <= x <= max(marks)]
        points = [(point.at, point.tau) for point in one.points]
        line = Line("", points, 0, [(point.low, point.high) for point in one.points])
        rings = [(best.at, best.tau, number(best.tau))]
        title = f"τ of {one.name} by {unit}"
        chart = Lines(title, [line], unit, "τ", marks, top=top, height=190.0, rings=rings)
        figures.append(Figure(one.name, chart))
    return figures


def comparison(page: Page, key: str, title: str, unit: str) -> list[Figure]:
    """Every drafter's speedup or tau in all measurements, on one scale."""
    rows = {}
    for run in page.runs:
        measured = {drafter.name: drafter for drafter in run.drafters}
        found = [measured[name] for name in page.names if name in measured]
        rows[run.title] = [
            Dot(one.name, getattr(one, key), getattr(one, f"{key}_ci95"), one is run.best)
            for one in found
        ]
    figures = _dots(title, rows, unit, None if key == "speedup" else 1.0)
    return [
        replace(figure, title=run.title, note=_conditions(run))
        for run, figure in zip(page.runs, figures, strict=True)
    ]


def _conditions(run: Run) -> str:
    """What distinguishes a measurement."""
    settings = run.report.settings
    drafts = sorted({drafter.draft.label for drafter in run.drafters})
    shapes = drafts[0] if len(drafts) == 1 else f"{len(drafts)} kinds of drafts"
    rule = "" if settings.rule == "match" else f"rule {settings.rule_text}, "
    count = claims.counted_prompts(run.report)
    line = f"Temperature {settings.temperature:g}, {rule}{shapes}, {count}."
    leaks = run.report.run.leak_line
    return f"{line} {leaks[:1].upper()}{leaks[1:]}." if leaks else line
