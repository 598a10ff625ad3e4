"""The section on what a step costs: cost curves with the fastest draft marked, speed by rows, the split of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inference.page.charts import SHAPES, Axes, Line, lines
from inference.page.data import Run
from inference.page.markup import Content, Html, folded, number, table
from inference.page.sections import DRAWN, figure, grid, section
from inference.report_schema import arm_name


def costs(run: Run, place: int) -> Html:
    """Cost curves with the fastest draft marked; the split of a step; speed by rows, where that was measured."""
    block, figures = run.report.get("costs"), []
    if block is not None:
        figures += [_verify_curve(run, block), _draft_curve(run, block)]
    if "profile" in run.report:
        figures += _profile(run.report["profile"])
    lead = "What a step costs on this machine, and where its time goes."
    parts: list[Content] = [grid(*figures, wide=True)] if figures else []
    if block is not None:
        parts.append(_costs_table(block))
    parts.append(_step_table(run))
    return section("costs", place, "Cost of a step", parts, lead=lead)


def _places(points: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    return sorted({(point["rows"], point["length"]) for point in points})


def _verify_curve(run: Run, block: Mapping[str, Any]) -> Html:
    """verify(n) for every number of rows and cached tokens that was measured; the fastest drafter's width is ringed."""
    places = _places(block["verify"])[:SHAPES]
    series = []
    for place, (rows, length) in enumerate(places):
        found = sorted(
            (p["nodes"], p["seconds"], p["low"], p["high"])
            for p in block["verify"]
            if (p["rows"], p["length"]) == (rows, length)
        )
        name = f"{rows} × {length}"
        points = [(float(n), 1000 * seconds) for n, seconds, _, _ in found]
        series.append(Line(name, points, place, [(1000 * low, 1000 * high) for _, _, low, high in found]))
    rings = []
    if run.best is not None and series:
        nodes = run.best["draft"]["nodes"]
        sizes, times = zip(*series[0].points, strict=True)
        if sizes[0] <= nodes <= sizes[-1]:  # between the sizes that were timed the cost is taken as linear
            rings.append((float(nodes), float(np.interp(nodes, sizes, times)), f"{arm_name(run.best)}, {nodes} nodes"))
    marks = sorted({point["nodes"] for point in block["verify"]})
    shown = [n for n in marks if n & (n - 1) == 0]
    axes = Axes(
        "nodes of a verification (logarithmic)", "milliseconds", shown, log=True, rings=rings, height=250.0
    )
    note = "Lines are named rows × cached tokens; whiskers are quartiles. The ring is the draft that was chosen: "
    "the one that the fastest drafter was measured with."
    return figure(
        "Verification, by nodes", lines("Milliseconds of a verification by nodes", series, axes), note
    )


def _draft_curve(run: Run, block: Mapping[str, Any]) -> Html:
    """draft(n) of every arm, one row, shortest cache."""
    order = [arm_name(entry) for entry in run.drafters]
    series = []
    for name, points in block["draft"].items():
        if not points:
            continue
        here = _places(points)[0]
        found = sorted(
            (p["nodes"] - 1, 1000 * p["seconds"]) for p in points if (p["rows"], p["length"]) == here
        )
        series.append((order.index(name) if name in order else len(order), name, found))
    drawn = [
        Line(name, [(float(n), ms) for n, ms in found], i if i < DRAWN else -1)
        for i, (_, name, found) in enumerate(sorted(series))
    ]
    marks = sorted({int(n) for one in drawn for n, _ in one.points})
    axes = Axes("drafted tokens of a chain", "milliseconds", marks, height=250.0)
    return figure(
        "Drafting, by length",
        lines("Milliseconds of a draft by its length", drawn, axes),
        "One row, shortest cache measured.",
    )


def _profile(block: Mapping[str, Any]) -> list[Html]:
    """The best speedup by rows decoded together, per arm."""
    found: dict[str, dict[int, float]] = {}
    for point in block["points"]:
        if point["sweep"] == "batch":
            here = found.setdefault(point["arm"], {})
            here[point["batch"]] = max(here.get(point["batch"], 0.0), point["speedup"])
    if not found:
        return []
    series = [
        Line(name, [(float(n), speed) for n, speed in sorted(values.items())], i if i < DRAWN else -1)
        for i, (name, values) in enumerate(found.items())
    ]
    marks = sorted({batch for values in found.values() for batch in values})
    title = "Speedup by rows decoded together"
    axes = Axes("rows (logarithmic)", "speedup", marks, log=True, top=1.0, height=250.0)
    return [
        figure(title, lines(title, series, axes), "The best draft of each; below 1 plain decoding is faster.")
    ]


def _costs_table(block: Mapping[str, Any]) -> Html:
    curves = {"verification": block["verify"]}
    for what in ("draft", "commit"):
        curves |= {f"{what}: {name}": points for name, points in block[what].items()}
    nodes = sorted({point["nodes"] for points in curves.values() for point in points})
    rows = []
    for name, points in curves.items():
        for place in _places(points):
            here = {p["nodes"]: p["seconds"] for p in points if (p["rows"], p["length"]) == place}
            rows.append([name, *place, *(number(1000 * here[n]) if n in here else "" for n in nodes)])
    caption = "Milliseconds per call, medians, by nodes"
    return folded(f"Table: {caption}", table(["Call", "Rows", "Cached", *nodes], rows, caption))


def _step_table(run: Run) -> Html:
    phases = ["draft", "verify", "commit", "other"]
    if any("gap" in entry["step_ms"] for entry in run.drafters):
        phases.append("gap")
    rows = []
    for entry in run.drafters:
        memory = entry["memory_bytes"]
        rows.append(
            [
                arm_name(entry),
                *(number(entry["step_ms"].get(phase, 0.0)) for phase in phases),
                *(number(memory[what] / 1e6, 1) for what in ("target", "drafter", "kv")),
            ]
        )
    caption = "Milliseconds per verification by phase, and megabytes"
    return folded(
        f"Table: {caption}", table(["Drafter", *phases, "target MB", "drafter MB", "KV MB"], rows, caption)
    )
