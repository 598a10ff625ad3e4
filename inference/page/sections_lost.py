"""The section on what the speed is lost to: the way down from the ceiling, the drafter's error, its calibration, its tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.page.charts import Axes, Line, lines
from inference.page.data import Run
from inference.page.markup import Content, Html, folded, interval, number, table, tag
from inference.page.sections import figure, grid, section
from inference.page.waterfall import WORDS, reliability, waterfall
from inference.report_schema import arm_name

SHOWN = 6
"""Arms whose drawings are shown; the tables have all."""
EXPLAINED = {
    "ends": "the answer stops inside a draft",
    "vocabulary": "the target's mass outside the draft vocabulary",
    "drafter": "1 − TV of both models' distributions, as decoding uses them",
    "coupling": "how much of 1 − TV the shared noise gets; 1 at temperature 0",
    "candidates": "what the best tree of the same size makes of further candidates",
    "shape": "this draft against that tree",
    "sample": "what the sample's rates do not explain",
    "widening": "verify(n) / verify(1) of the cost curves",
    "drafting": "draft time per verification",
    "commit": "takeover of accepted tokens",
    "host": "time in no phase, and between steps, beyond plain decoding's",
    "clock": "verification time that the cost curves do not explain",
}


def lost(run: Run, place: int) -> Html:
    """Everything that `bench.lost` measured; what to ask for where it was not."""
    block = run.report.get("lost")
    title = "Where the speed goes"
    if block is None:
        how = tag(
            "p",
            "Not measured. Ask for it with ",
            tag("code", "headstart measure bench.lost.enabled=true"),
            ".",
            class_="note",
        )
        return section("lost", place, title, how)
    names = [arm_name(entry) for entry in run.drafters if arm_name(entry) in block["arms"]]
    arms = {name: block["arms"][name] for name in names}
    top = max((arm["ceiling"] * _peak(arm) for arm in arms.values()), default=1.0)
    falls = [
        figure(
            name,
            waterfall(name, arm, top),
            f"A step over all nodes costs {number(arm['widening'])} plain ones.",
        )
        for name, arm in list(arms.items())[:SHOWN]
    ]
    lead = (
        "The ceiling is a draft that is always kept whole, at the cost of a plain step. Each bar is a factor on the way down; "
        "all of them multiply to the measured speedup, and what no term explains is drawn dashed."
    )
    parts: list[Content] = [
        grid(*falls),
        _terms_table(arms),
        folded(
            "What the terms mean",
            tag("dl", [(tag("dt", WORDS[key]), tag("dd", words)) for key, words in EXPLAINED.items()]),
        ),
        tag("h3", "Drafter error"),
        grid(*(_overlap(name, arm) for name, arm in list(arms.items())[:SHOWN])),
        _depth_table(arms),
        _positions_table(arms),
        _temperature_table(arms),
        _trees_table(arms),
    ]
    calibrated = {name: arm for name, arm in arms.items() if "calibration" in arm}
    if calibrated:
        parts += [
            tag("h3", "Calibration"),
            tag(
                "p",
                "Of the drafts with confidence c a share c should be accepted: dots on the line. Their area is their number.",
                class_="note",
            ),
            grid(*(_reliability(name, arm) for name, arm in list(calibrated.items())[:SHOWN])),
            _calibration_groups(calibrated),
            _calibration_table(calibrated),
        ]
    return section("lost", place, title, parts, lead=lead)


def _peak(arm: Mapping[str, Any]) -> float:
    """The highest point of the way down, as a share of the ceiling."""
    level = peak = 1.0
    for term in arm["terms"]:
        level *= term["factor"]
        peak = max(peak, level)
    return peak


def _terms_table(arms: Mapping[str, Any]) -> Html:
    rows = []
    for name, arm in arms.items():
        for group, part in {"all": arm, **arm["domains"]}.items():
            cells = [f"{number(part['ceiling'])}"]
            for term in part["terms"]:
                cells.append(f"{number(term['factor'])} ({interval(*term['ci95'])})")
            rows.append([name, group, *cells, f"{number(part['speedup'])}×"])
    header = ["Drafter", "Domain", "ceiling", *WORDS.values(), "speedup"]
    caption = "Factors from the ceiling to the speedup, with 95% intervals"
    return folded(f"Table: {caption}", table(header, rows, caption, texts=2))


def _overlap(name: str, arm: Mapping[str, Any]) -> Html:
    """1 - TV by depth per domain."""
    series = []
    groups = [group for group in arm["depths"] if group != "all"]
    for place, group in enumerate(groups):
        levels = [(i, level) for i, level in enumerate(arm["depths"][group], start=1) if level["tested"]]
        points = [(float(i), level["overlap"]) for i, level in levels]
        series.append(Line(group, points, place, [tuple(level["overlap_ci95"]) for _, level in levels]))
    depth = len(arm["depths"]["all"])
    axes = Axes(
        "depth of the drafted token", "1 − TV", range(1, depth + 1), top=1.0, percent=True, height=210.0
    )
    return figure(name, lines(f"{name}: 1 minus TV by depth and domain", series, axes), level="h4")


def _states(row: Mapping[str, Any]) -> list[Content]:
    """The cells that all tables of states have."""
    cells: list[Content] = [row["tested"]]
    for key in ("accepted", "overlap", "own_overlap", "missed"):
        low, high = row[f"{key}_ci95"]
        cells.append(f"{100 * row[key]:.1f}% ({100 * low:.0f} to {100 * high:.0f})")
    return cells


STATES = ["Drafts tested", "Accepted", "1 − TV", "1 − TV, own distributions", "Outside the vocabulary"]


def _depth_table(arms: Mapping[str, Any]) -> Html:
    rows = [
        [name, group, depth, *_states(level)]
        for name, arm in arms.items()
        for group, levels in arm["depths"].items()
        for depth, level in enumerate(levels, start=1)
    ]
    caption = "Drafter error by domain and depth"
    return folded(f"Table: {caption}", table(["Drafter", "Domain", "Depth", *STATES], rows, caption, texts=2))


def _positions_table(arms: Mapping[str, Any]) -> Html:
    rows = [
        [
            name,
            f"{row['first']} to {row['end'] - 1}" if row["end"] else f"{row['first']} and on",
            *_states(row),
        ]
        for name, arm in arms.items()
        for row in arm["positions"]
    ]
    caption = "Drafter error by place in the answer"
    return folded(f"Table: {caption}", table(["Drafter", "Tokens", *STATES], rows, caption, texts=2))


def _temperature_table(arms: Mapping[str, Any]) -> Html:
    rows = [
        [
            name,
            f"{row['temperature']:g}",
            number(row["tau"]),
            interval(*row["tau_ci95"]),
            *_states(row),
            _ece(row),
        ]
        for name, arm in arms.items()
        for row in arm["temperatures"]
    ]
    caption = "The sample by temperature"
    header = ["Drafter", "Temperature", "τ", "95% interval", *STATES, "ECE"]
    return folded(f"Table: {caption}", table(header, rows, caption))


def _trees_table(arms: Mapping[str, Any]) -> Html:
    rows = []
    for name, arm in arms.items():
        tree = arm["tree"]
        paths = ", ".join("·".join(str(rank + 1) for rank in path) for path in tree["choices"])
        rows.append([name, tree["nodes"], number(tree["own"]), number(tree["best"]), paths])
    caption = (
        "This draft's τ and that of the best tree of the same size, under the sample's acceptance by rank"
    )
    header = ["Drafter", "Nodes", "This draft", "Best tree", "Its paths, by rank of the candidates"]
    return folded(f"Table: {caption}", table(header, rows, caption))


ESTIMATES = {"head": "its own confidence", "probability": "the probability of its best candidate"}


def _reliability(name: str, arm: Mapping[str, Any]) -> Html:
    found = arm["calibration"]
    low, high = found["ece_ci95"]
    source = ESTIMATES.get(found["estimate"], found["estimate"])
    note = f"ECE {100 * found['ece']:.1f}% ({100 * low:.1f} to {100 * high:.1f}), {source}."
    return figure(name, reliability(name, found["bins"]), note, level="h4")


def _ece(found: Mapping[str, Any] | None) -> str:
    """An ECE with its interval, as far as a report has them."""
    if not found:
        return "-"
    low, high = found.get("ece_ci95", (None, None))
    return f"{100 * found['ece']:.1f}%" + ("" if low is None else f" ({100 * low:.0f} to {100 * high:.0f})")


def _calibration_groups(arms: Mapping[str, Any]) -> Html:
    """ECE by domain and by place in the answer."""
    rows = []
    for name, arm in arms.items():
        places = {_place(row): row for row in arm["positions"]}
        for group, found in {"all": arm, **arm["domains"], **places}.items():
            rows.append([name, group, _ece(found.get("calibration"))])
    caption = "Calibration by domain and by place in the answer"
    return folded(f"Table: {caption}", table(["Drafter", "Drafts", "ECE"], rows, caption, texts=2))


def _place(row: Mapping[str, Any]) -> str:
    """The places in an answer that a row is of."""
    return f"tokens {row['first']} to {row['end'] - 1}" if row["end"] else f"tokens {row['first']} and on"


def _calibration_table(arms: Mapping[str, Any]) -> Html:
    rows = [
        [name, f"{100 * cell['confidence']:.0f}%", f"{100 * cell['accepted']:.0f}%", cell["count"]]
        for name, arm in arms.items()
        for cell in arm["calibration"]["bins"]
        if cell["count"]
    ]
    caption = "Accepted share by confidence"
    return folded(f"Table: {caption}", table(["Drafter", "Confidence", "Accepted", "Drafts"], rows, caption))
