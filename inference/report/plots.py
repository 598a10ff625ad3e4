"""The PNGs of reports: acceptance by depth, speedup by domain, time per step by phase; tau and
speedup by context if contexts differ, and speedup by batch size if that was measured. Each report
has one panel.

The plots are at most 10 inches wide, so that labels are readable at the 800 pixels of a model card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.manifest import write_bytes
from inference.measure.metrics import GAP, PHASES
from inference.report.model import ProfilePoint, Report

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#555555")
"""The palette of Okabe and Ito, which is safe for colour-blind readers."""
MARKERS = "osD^vPX*"
PHASE_COLOURS = dict(
    zip((*PHASES, GAP), ("#E69F00", "#0072B2", "#009E73", "#BBBBBB", "#CC79A7"), strict=True)
)
DARK = "#222222"
MOST_WIDTH = 8.5
"""Width of the panels in inches; a legend is to their right."""


# In names of drafters, domains and folders, text between two dollar signs is no formula.
@mpl.rc_context({"text.parse_math": False})
def plot_all(reports: Mapping[str, Report], out: Path) -> list[Path]:
    """Write the PNGs of `PLOTS` that the reports have numbers for.

    reports: by label. Returns the paths of what was written.
    """
    drafted = {label: report for label, report in reports.items() if report.drafters}
    binned = {label: report for label, report in reports.items() if report.contexts}
    profiled = {label: report for label, report in reports.items() if _batch_points(report)}
    served = {label: report for label, report in reports.items() if report.server is not None}
    known = (
        (drafted or {} if served else reports, acceptance, speedup, step_time),
        (binned, by_context),
        (profiled, speedup_by_batch),
        (served, server),
    )
    drawn = [draw(some) for some, *draws in known if some for draw in draws]
    names = [draw.__name__ for some, *draws in known if some for draw in draws]
    return [
        save_figure(figure, out / f"{name}.png") for figure, name in zip(drawn, names, strict=True)
    ]


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG and close the figure; returns the path."""
    content = BytesIO()
    figure.savefig(content, dpi=130, format="png", bbox_inches="tight", facecolor="white")
    plt.close(figure)
    write_bytes(path, content.getvalue())
    return path


def _styles(reports: Mapping[str, Report]) -> dict[str, tuple[str, str]]:
    """Drafter name -> colour and marker, the same in every panel."""
    names = [drafter.name for report in reports.values() for drafter in report.ranked]
    return {
        name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(dict.fromkeys(names))
    }


def tidy(axes: Axes, grid: Literal["y", "both"] = "y") -> None:
    """Draw a light grid behind the data, without the frame's upper and right sides."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _panels(
    reports: Mapping[str, Report],
    width: float,
    height: float,
    draw: Callable[[Axes, Report], None],
    x_label: str = "",
    y_label: str = "",
) -> Figure:
    """One panel per report, stacked vertically, with one legend."""
    size = (min(width, MOST_WIDTH), height * len(reports))
    figure, grid = plt.subplots(len(reports), 1, figsize=size, squeeze=False)
    for (axes,), (label, report) in zip(grid, reports.items(), strict=True):
        draw(axes, report)
        axes.set_ylabel(y_label)
        axes.set_title(_title(label, report))
    grid[-1][0].set_xlabel(x_label)
    figure.tight_layout()
    _add_legend(figure, grid[:, 0])
    return figure


def _title(label: str, report: Report) -> str:
    return f"Temperature {report.settings.temperature:g} ({label})"


def _mark_plain_speed(axes: Axes) -> None:
    axes.axhline(1.0, color=DARK, linewidth=1, linestyle="--")


def _add_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, to their right."""
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (0.99, 0.5)}
        figure.legend(handles.values(), handles.keys(), frameon=False, **place)


def acceptance(reports: Mapping[str, Report]) -> Figure:
    """Unconditional (above) and conditional (below) acceptance by depth."""
    styles = _styles(reports)
    size = (min(5.2 * len(reports), MOST_WIDTH), 6.6)
    figure, grid = plt.subplots(2, len(reports), figsize=size, sharey=True, squeeze=False)
    for column, (label, report) in enumerate(reports.items()):
        for row, which in enumerate(("unconditional", "conditional")):
            _draw_acceptance(grid[row][column], report, which, styles)
        grid[0][column].set_title(_title(label, report))
        grid[1][column].set_xlabel("drafted depth")
    grid[0][0].set_ylabel("accepted, share of passes")
    grid[1][0].set_ylabel("accepted, given the depth before")
    figure.tight_layout()
    _add_legend(figure, grid[0])
    return figure


def _draw_acceptance(
    axes: Axes, report: Report, which: str, styles: Mapping[str, tuple[str, str]]
) -> None:
    deepest = 0
    for drafter in report.drafters:
        beta = drafter.acceptance.unconditional
        values = getattr(drafter.acceptance, which)
        deepest = max(deepest, len(values))
        # the conditional share is undefined behind a depth that was never accepted
        shown = [
            i for i in range(len(values)) if which == "unconditional" or i == 0 or beta[i - 1] > 0
        ]
        colour, marker = styles[drafter.name]
        shares = [values[i] for i in shown]
        places = [i + 1 for i in shown]
        axes.plot(places, shares, color=colour, marker=marker, clip_on=False, label=drafter.name)
    tidy(axes)
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, deepest + 1))


def speedup(reports: Mapping[str, Report]) -> Figure:
    """Bars of speedup by domain with 95% intervals; the line at 1 is plain decoding."""
    styles = _styles(reports)
    bars = [len(report.drafters) * (len(report.domains) + 1) for report in reports.values()]

    def draw(axes: Axes, report: Report) -> None:
        groups, count = [*report.domains, "all"], max(1, len(report.drafters))
        bar = 0.8 / count
        for place, drafter in enumerate(report.ranked):
            name = drafter.name
            intervals = {**report.domain_intervals(name), "all": drafter.speedup_ci95}
            values = {domain: numbers.speedup for domain, numbers in drafter.domains.items()}
            values["all"] = drafter.speedup
            for group, domain in enumerate(groups):
                if domain not in values:
                    continue
                at = group + (place - (count - 1) / 2) * bar
                label = name if group == 0 else None
                axes.bar(at, values[domain], 0.9 * bar, color=styles[name][0], label=label)
                if domain in intervals:
                    axes.plot([at, at], intervals[domain], color=DARK, linewidth=1.2)
        _mark_plain_speed(axes)
        axes.set_xticks(range(len(groups)), groups)
        tidy(axes)

    width = max(5.5, 0.42 * max(bars, default=1))
    return _panels(reports, width, 3.4, draw, y_label="speedup over plain decoding")


def step_time(reports: Mapping[str, Report]) -> Figure:
    """Stacked bars: milliseconds per verify pass by phase, next to one pass of plain decoding."""

    def draw(axes: Axes, report: Report) -> None:
        names = [drafter.name for drafter in report.ranked]
        times = [dict(drafter.step_ms.items()) for drafter in report.ranked]
        left = [0.0] * len(names)
        for phase in report.phases:
            values = [one.get(phase, 0.0) for one in times]
            axes.barh(names, values, left=left, color=PHASE_COLOURS[phase], label=phase)
            left = [a + b for a, b in zip(left, values, strict=True)]
        if plain := report.baseline.step_ms:
            axes.axvline(plain, color=DARK, linewidth=1, linestyle="--", label="plain decoding")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)

    rows = max((len(report.drafters) for report in reports.values()), default=1)
    return _panels(reports, 7.0, 0.5 * rows + 1.2, draw, x_label="ms per verify pass")


def by_context(reports: Mapping[str, Report]) -> Figure:
    """tau (above) and speedup (below) by tokens of the prompt, with 95% intervals."""
    styles = _styles(reports)
    size = (min(5.2 * len(reports), MOST_WIDTH), 6.6)
    figure, grid = plt.subplots(2, len(reports), figsize=size, sharey="row", squeeze=False)
    for column, (label, report) in enumerate(reports.items()):
        for row, which in enumerate(("tau", "speedup")):
            _draw_contexts(grid[row][column], report, which, styles)
        grid[0][column].set_title(_title(label, report))
        grid[1][column].set_xlabel("tokens of the prompt")
    grid[0][0].set_ylabel("tau (committed tokens per verify pass)")
    grid[1][0].set_ylabel("speedup over plain decoding")
    figure.tight_layout()
    _add_legend(figure, grid[0])
    return figure


def _draw_contexts(
    axes: Axes, report: Report, which: str, styles: Mapping[str, tuple[str, str]]
) -> None:
    places = {label: place for place, label in enumerate(report.contexts)}
    for drafter in report.ranked:
        colour, marker = styles[drafter.name]
        at = [places[one.label] for one in drafter.contexts]
        values = [getattr(one, which) for one in drafter.contexts]
        axes.plot(at, values, color=colour, marker=marker, label=drafter.name)
        for place, one in zip(at, drafter.contexts, strict=True):
            axes.plot([place, place], getattr(one, f"{which}_ci95"), color=colour, linewidth=1.2)
    _mark_plain_speed(axes)
    axes.set_xticks(range(len(places)), list(places))
    tidy(axes)


def _batch_points(report: Report) -> list[ProfilePoint]:
    """The points of a report's profile that vary the batch size."""
    points = report.profile.points if report.profile else []
    return [point for point in points if point.sweep == "batch"]


def speedup_by_batch(reports: Mapping[str, Report]) -> Figure:
    """Speedup of each drafter's best draft over the batch size; numbers: tokens drafted."""
    styles = _styles(reports)

    def draw(axes: Axes, report: Report) -> None:
        points = _batch_points(report)
        for name in dict.fromkeys(point.arm for point in points):
            best: dict[int, ProfilePoint] = {}
            for point in (point for point in points if point.arm == name):
                if point.batch not in best or point.speedup > best[point.batch].speedup:
                    best[point.batch] = point
            sizes = sorted(best)
            colour, marker = styles.get(name, (COLOURS[-1], MARKERS[0]))
            speedups = [best[size].speedup for size in sizes]
            axes.plot(range(len(sizes)), speedups, color=colour, marker=marker, label=name)
            for place, size in enumerate(sizes):
                point = best[size]
                axes.plot([place, place], point.speedup_ci95, color=colour, linewidth=1.2)
                axes.annotate(
                    str(point.depth),
                    (place, point.speedup),
                    textcoords="offset points",
                    xytext=(6, 5),
                    color=colour,
                )
            axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        _mark_plain_speed(axes)
        tidy(axes)

    labels = ("rows decoded together", "speedup over plain decoding")
    return _panels(reports, 6.5, 3.8, draw, *labels)


def server(reports: Mapping[str, Report]) -> Figure:
    """Running servers: acceptance by position, and tokens/s by concurrent clients, with and without
    speculation."""
    size = (MOST_WIDTH, 3.4 * len(reports))
    figure, grid = plt.subplots(len(reports), 2, figsize=size, squeeze=False)
    for (left, right), (label, report) in zip(grid, reports.items(), strict=True):
        assert report.server is not None
        for place, cell in enumerate(report.server.speculative.overall()):
            shares = cell.acceptance or []
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            words = {"color": colour, "marker": marker, "label": f"{cell.concurrency} clients"}
            left.plot(range(1, len(shares) + 1), shares, clip_on=False, **words)
        left.set_ylim(0, 1.02)
        left.set_xlabel("drafted position")
        left.set_ylabel("accepted, share of passes")
        left.legend(frameon=False)
        sides = {"speculating": report.server.speculative, "without": report.server.baseline}
        for place, (name, side) in enumerate(sides.items()):
            cells = side.overall() if side is not None else []
            rows = [cell.concurrency for cell in cells]
            speeds = [cell.tokens_per_second for cell in cells]
            if cells:
                right.plot(rows, speeds, color=COLOURS[place], marker=MARKERS[place], label=name)
            for cell in cells:
                ends = cell.tokens_per_second_ci95 or [cell.tokens_per_second] * 2
                right.plot([cell.concurrency] * 2, ends, color=COLOURS[place], linewidth=1.2)
        right.set_xlabel("concurrent clients")
        right.set_ylabel("tokens/s")
        right.set_ylim(bottom=0)
        right.legend(frameon=False)
        left.set_title(_title(label, report), loc="left")
        for axes in (left, right):
            tidy(axes)
    figure.tight_layout()
    return figure
