"""Tables of the blocks that a report has only when they were asked for: profile, cost curves, roofline,
others' loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table; the first column is text, the others are numbers."""
    line = "|".join(["---", *["---:"] * (len(header) - 1)])
    return [f"| {' | '.join(header)} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows)]


def extra_tables(report: Report) -> list[str]:
    """Markdown of every optional block that the report has; empty without any."""
    lines = []
    for name, (caption, table) in TABLES.items():
        if name in report:
            lines += [caption, "", *table(report[name]), ""]
    return lines


def _interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def baselines_table(block: Report) -> list[str]:
    """Every loop beside ours without a drafter."""
    rows = [
        [
            name if loop["interleaved"] else f"{name} (not interleaved)",
            f"{loop['tokens_per_second']:.1f}",
            _interval(loop["ratio"], loop["ratio_ci95"]),
            f"{loop['end_to_end_tokens_per_second']:.1f}",
            f"{loop['end_to_end_ratio']:.2f}",
            f"{loop['tau']:.2f}",
            f"{loop['identical']}/{loop['sequences']}",
        ]
        for name, loop in block.items()
    ]
    return markdown_table(
        ["loop", "tokens/s", "ratio", "tokens/s with prefill", "ratio", "tau", "same text"], rows
    )


def profile_table(block: Report) -> list[str]:
    """Every point; the best draft of each setting is bold."""
    keys = ("arm", "sweep", "batch", "context", "temperature")
    best = {(*(item[key] for key in keys), item["shape"], item["depth"]) for item in block["best"]}
    rows = []
    for point in block["points"]:
        chosen = (*(point[key] for key in keys), point["shape"], point["depth"]) in best
        draft = f"{point['shape']} {point['depth']}"
        rows.append(
            [
                point["arm"],
                str(point["batch"]),
                str(point["context"]),
                f"{point['temperature']:g}",
                f"**{draft}**" if chosen else draft,
                f"{point['tau']:.2f}",
                f"{point['tokens_per_second']:.1f}",
                f"{point['baseline_tokens_per_second']:.1f}",
                _interval(point["speedup"], point["speedup_ci95"]),
            ]
        )
    header = ["drafter", "rows", "context", "temperature", "draft", "tau", "tokens/s", "without", "speedup"]
    return markdown_table(header, rows)


def costs_table(block: Report) -> list[str]:
    """Milliseconds of every measured verification, draft and takeover: nodes from left to right."""
    curves = {"verify": block["verify"]}
    for what in ("draft", "commit"):
        curves |= {f"{what}: {name}": points for name, points in block[what].items()}
    nodes = sorted({point["nodes"] for points in curves.values() for point in points})
    rows = []
    for name, points in curves.items():
        for place in dict.fromkeys((point["rows"], point["length"]) for point in points):
            here = {p["nodes"]: p["seconds"] for p in points if (p["rows"], p["length"]) == place}
            cells = [f"{1000 * here[n]:.2f}" if n in here else "" for n in nodes]
            rows.append([name, str(place[0]), str(place[1]), *cells])
    return markdown_table(["call", "rows", "cached", *(f"n={n}" for n in nodes)], rows)


def roofline_table(block: Report) -> list[str]:
    """Bytes per step against the probed bandwidth."""
    plain, used = block["baseline"], block["bandwidth"]["used_bytes_per_second"]
    rows = [["no drafter", *_step_cells(plain), "", ""]]
    for name, arm in block["arms"].items():
        split = ", ".join(f"{phase} {100 * share:.0f}%" for phase, share in arm["split"].items())
        rows.append([name, *_step_cells(arm), f"{100 * arm['efficiency']:.0f}%", split])
    header = ["drafter", "MB per step", "step ms", f"of {used / 1e9:.1f} GB/s", "efficiency", "split"]
    return markdown_table(header, rows)


def _step_cells(step: Report) -> list[str]:
    return [f"{step['bytes_per_step'] / 1e6:.1f}", f"{step['step_ms']:.2f}", f"{100 * step['share']:.0f}%"]


LOST_ROUNDED = {"sample": "sample (rest)", "clock": "clock (rest)"}


def lost_table(block: Report) -> list[str]:
    """Every term of every arm: what is left of the ceiling behind it. Then 1 - TV by depth and domain."""
    arms = block["arms"]
    names = [term["name"] for arm in arms.values() for term in arm["terms"]]
    rows = [["ceiling", *(f"{arm['ceiling']:.2f}" for arm in arms.values())]]
    for place, name in enumerate(dict.fromkeys(names)):
        terms = [arm["terms"][place] for arm in arms.values()]
        cells = [_interval(term["factor"], term["ci95"]) for term in terms]
        rows.append([LOST_ROUNDED.get(name, name), *cells])
    rows.append(["speedup", *(f"**{arm['speedup']:.2f}**" for arm in arms.values())])
    lines = markdown_table(["factor", *arms], rows)
    lines += ["", "1 - TV of both models' distributions as decoding uses them (of their own), by depth", ""]
    groups = [(name, group, levels) for name, arm in arms.items() for group, levels in arm["depths"].items()]
    deepest = max(len(levels) for _, _, levels in groups)
    cells_of = [
        [f"{level['overlap']:.2f} ({level['own_overlap']:.2f})" if level["tested"] else "-" for level in levels]
        for _, _, levels in groups
    ]
    table = [
        [name, group, *cells, *["-"] * (deepest - len(cells))]
        for (name, group, _), cells in zip(groups, cells_of, strict=True)
    ]
    return lines + markdown_table(["drafter", "domain", *(f"depth {i + 1}" for i in range(deepest))], table)


TABLES = {
    "lost": (
        "Where the speed goes: from the ceiling (every draft kept, at the cost of a plain step) to the measured speedup, factor by "
        "factor. Their product is exact; what no term explains stands in the rows marked rest",
        lost_table,
    ),
    "baselines": (
        "Loops beside ours: tokens/s of decoding and its ratio to ours without a drafter; the same with prefill",
        baselines_table,
    ),
    "profile": (
        "Speed by rows decoded together, context and temperature; the best draft of each setting is bold, "
        "and none is where plain decoding is faster",
        profile_table,
    ),
    "costs": (
        "Milliseconds per call, medians: n nodes of a verification or draft, or committed tokens",
        costs_table,
    ),
    "roofline": (
        "Bytes that a step must move, and the share of the probed bandwidth that it reached",
        roofline_table,
    ),
}
