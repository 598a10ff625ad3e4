"""The PNGs of a report: acceptance by depth, speedup by domain, where a step's time goes, and speedup over
the batch size where that was measured. One panel per report.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.measure.metrics import GAP, PHASES, baseline_step_ms
from inference.report_schema import arm_name

Report = Mapping[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#555555")
"""Okabe and Ito's palette: told apart by colour-blind readers too."""
MARKERS = "osD^vPX*"
PHASE_COLOURS = dict(
    zip((*PHASES, GAP), ("#E69F00", "#0072B2", "#009E73", "#BBBBBB", "#CC79A7"), strict=True)
)


def plot_all(reports: Mapping[str, Report], out: Path) -> list[Path]:
    """Write acceptance.png, speedup.png, step_time.png and, with a profile, speedup_by_batch.png to `out`.

    reports: label -> checked report.json content.
    """
    written = [
        _save(acceptance(reports), out / "acceptance.png"),
        _save(speedup(reports), out / "speedup.png"),
        _save(step_time(reports), out / "step_time.png"),
    ]
    profiled = {label: report for label, report in reports.items() if _batches(report)}
    if profiled:
        written.append(_save(speedup_by_batch(profiled), out / "speedup_by_batch.png"))
    return written


def _save(figure: Figure, path: Path) -> Path:
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=130, format="png", bbox_inches="tight", facecolor="white")
    plt.close(figure)
    os.replace(partial, path)
    return path


def _styles(reports: Mapping[str, Report]) -> dict[str, tuple[str, str]]:
    """Drafter name -> colour and marker, the same in every panel."""
    names = dict.fromkeys(arm_name(entry) for report in reports.values() for entry in report["drafters"])
    return {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _title(label: str, report: Report) -> str:
    return f"{label}, temperature {report['settings']['temperature']:g}"


def acceptance(reports: Mapping[str, Report]) -> Figure:
    """Unconditional (above) and conditional (below) acceptance by depth."""
    styles = _styles(reports)
    figure, grid = plt.subplots(
        2, len(reports), figsize=(5.2 * len(reports) + 1.4, 6.6), sharey=True, squeeze=False
    )
    for column, (label, report) in enumerate(reports.items()):
        for row, which in enumerate(("unconditional", "conditional")):
            axes = grid[row][column]
            for entry in report["drafters"]:
                beta, values = entry["acceptance"]["unconditional"], entry["acceptance"][which]
                # the conditional share means nothing behind a depth that was never accepted
                shown = [
                    i for i in range(len(values)) if which == "unconditional" or i == 0 or beta[i - 1] > 0
                ]
                colour, marker = styles[arm_name(entry)]
                axes.plot(
                    [i + 1 for i in shown],
                    [values[i] for i in shown],
                    color=colour,
                    marker=marker,
                    clip_on=False,
                    label=arm_name(entry),
                )
            _tidy(axes)
            axes.set_ylim(0, 1.02)
            deepest = max((len(entry["acceptance"][which]) for entry in report["drafters"]), default=1)
            axes.set_xticks(range(1, deepest + 1))
            if row == 0:
                axes.set_title(_title(label, report))
            else:
                axes.set_xlabel("drafted depth")
        grid[0][0].set_ylabel("accepted, share of passes")
        grid[1][0].set_ylabel("accepted, given the depth before")
    _legend_beside(figure, grid[0])
    return figure


def _legend_beside(figure: Figure, panels: Any) -> None:
    """One legend for all panels, to their right."""
    handles = {
        label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(0.93, 0.5), frameon=False
        )


def speedup(reports: Mapping[str, Report]) -> Figure:
    """Bars of speedup by domain with 95% intervals; the line at 1 is plain decoding."""
    styles = _styles(reports)
    width = max(
        (len(report["drafters"]) * (len(_domains(report)) + 1) for report in reports.values()), default=1
    )
    size = (max(4.5, 0.42 * width) * len(reports) + 1.4, 4.2)
    figure, grid = plt.subplots(1, len(reports), figsize=size, sharey=True, squeeze=False)
    for axes, (label, report) in zip(grid[0], reports.items(), strict=True):
        _speedup_panel(axes, report, styles)
        axes.set_title(_title(label, report))
    grid[0][0].set_ylabel("speedup over plain decoding")
    _legend_beside(figure, grid[0])
    return figure


def _domains(report: Report) -> list[str]:
    return sorted({name for entry in report["drafters"] for name in entry["domains"]})


def _speedup_panel(axes: Axes, report: Report, styles: Mapping[str, tuple[str, str]]) -> None:
    domains, count = _domains(report), max(1, len(report["drafters"]))
    bar = 0.8 / count
    for place, entry in enumerate(report["drafters"]):
        name = arm_name(entry)
        arms = report.get("run", {}).get("arms", {})
        intervals = {**arms.get(name, {}).get("speedup_ci95_by_domain", {}), "all": entry["speedup_ci95"]}
        values = {
            **{domain: numbers["speedup"] for domain, numbers in entry["domains"].items()},
            "all": entry["speedup"],
        }
        for group, domain in enumerate([*domains, "all"]):
            if domain not in values:
                continue
            at = group + (place - (count - 1) / 2) * bar
            axes.bar(at, values[domain], 0.9 * bar, color=styles[name][0], label=name if group == 0 else None)
            if domain in intervals:
                low, high = intervals[domain]
                axes.plot([at, at], [low, high], color="#222222", linewidth=1.2)
    axes.axhline(1.0, color="#222222", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(domains) + 1), [*domains, "all"])
    _tidy(axes)


def step_time(reports: Mapping[str, Report]) -> Figure:
    """Stacked bars: milliseconds per verify pass by phase; the dashed line is one pass of plain decoding."""
    rows = max((len(report["drafters"]) for report in reports.values()), default=1)
    size = (5.6 * len(reports) + 1.2, 0.5 * rows + 1.8)
    figure, grid = plt.subplots(1, len(reports), figsize=size, squeeze=False)
    for axes, (label, report) in zip(grid[0], reports.items(), strict=True):
        names = [arm_name(entry) for entry in report["drafters"]]
        left = [0.0] * len(names)
        gaps = any(GAP in entry["step_ms"] for entry in report["drafters"])
        for phase in (*PHASES, GAP) if gaps else PHASES:
            values = [entry["step_ms"].get(phase, 0.0) for entry in report["drafters"]]
            axes.barh(names, values, left=left, color=PHASE_COLOURS[phase], label=phase)
            left = [a + b for a, b in zip(left, values, strict=True)]
        if plain := baseline_step_ms(report):
            axes.axvline(plain, color="#222222", linewidth=1, linestyle="--", label="plain decoding")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("ms per verify pass")
        axes.set_title(_title(label, report))
    figure.subplots_adjust(wspace=0.45)
    _legend_beside(figure, grid[0])
    return figure


def _batches(report: Report) -> list[Report]:
    """The points of a report's profile that vary the batch size."""
    return [point for point in report.get("profile", {}).get("points", []) if point["sweep"] == "batch"]


def speedup_by_batch(reports: Mapping[str, Report]) -> Figure:
    """Speedup of each drafter's best draft over the batch size, with its interval; numbers: tokens drafted."""
    styles = _styles(reports)
    size = (5.2 * len(reports) + 1.4, 4.2)
    figure, grid = plt.subplots(1, len(reports), figsize=size, sharey=True, squeeze=False)
    for axes, (label, report) in zip(grid[0], reports.items(), strict=True):
        points = _batches(report)
        for name in dict.fromkeys(point["arm"] for point in points):
            mine = [point for point in points if point["arm"] == name]
            sizes = sorted({point["batch"] for point in mine})
            best = [
                max((p for p in mine if p["batch"] == batch), key=lambda p: float(p["speedup"]))
                for batch in sizes
            ]
            colour, marker = styles.get(name, (COLOURS[-1], MARKERS[0]))
            places = range(len(sizes))
            axes.plot(places, [p["speedup"] for p in best], color=colour, marker=marker, label=name)
            for place, point in zip(places, best, strict=True):
                low, high = point["speedup_ci95"]
                axes.plot([place, place], [low, high], color=colour, linewidth=1.2)
                axes.annotate(
                    str(point["depth"]),
                    (place, point["speedup"]),
                    textcoords="offset points",
                    xytext=(6, 5),
                    color=colour,
                )
            axes.set_xticks(places, [str(batch) for batch in sizes])
        axes.axhline(1.0, color="#222222", linewidth=1, linestyle="--")
        axes.set_xlabel("rows decoded together")
        axes.set_title(_title(label, report))
        _tidy(axes)
    grid[0][0].set_ylabel("speedup over plain decoding")
    _legend_beside(figure, grid[0])
    return figure


def families(rows: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """One PNG: for every drafter (row) a dot per measurement; tau left, speedup right.

    rows: name -> measurement's title -> tau, and "speedup"; drawn from top to bottom in the order given.
    """
    names = list(rows)
    titles = [title for title in next(iter(rows.values())) if title != "speedup"]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.32 * len(names) + 1.6), sharey=True, width_ratios=(3, 1)
    )
    places = range(len(names), 0, -1)
    for index, title in enumerate(titles):
        left.plot(
            [rows[name][title] for name in names],
            places,
            linestyle="none",
            marker=MARKERS[index],
            color=COLOURS[index],
            label=title,
        )
    right.barh(places, [rows[name]["speedup"] for name in names], color=COLOURS[5], height=0.7)
    right.axvline(1.0, color="#555555", linewidth=1.0)
    left.set_yticks(list(places), names)
    left.set_xlabel("tau (committed tokens per verify pass)")
    right.set_xlabel("speedup, chain, T=0")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
    left.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    return _save(figure, path)
