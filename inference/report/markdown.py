"""Reports as text: report.md with its tables and plots, and the table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from heads.api.errors import UserError
from inference.manifest import write_bytes
from inference.report import claims
from inference.report import model as schema
from inference.report.claims import ratio_text, speedup_text, with_interval
from inference.report.model import REPORT_FILE, Report, read_report
from inference.report.quoting import code, escape
from inference.terminal import make_table

HEADLINE = "# Measured by Headstart"
DEFINITIONS = (
    "**tau**: committed tokens / verify passes (bonus included, cut at end-of-text, prefill's "
    "token excluded). **TAR**: accepted drafted tokens / (accepted + the rejection that ended a "
    "pass, if any). **speedup**: tokens/s over the same loop without a drafter (N = 1), same "
    "engine, same run, ratio of sums, prefill excluded. **ideal**: tau / (1 + draft time per pass "
    "/ baseline time per pass). **efficiency**: speedup / ideal. **lossless**: measured sequences "
    "identical to the baseline's; a near tie is a difference within the measured numerical gap of "
    "the number format, a mismatch is not. Brackets: 95% bootstrap interval over prompts; where "
    "that of a speedup holds 1, **no difference shown**."
)
NO_REPORT = "no report was given. Name at least one report.json, or a folder that holds one."
TABLE_WIDTH = 120
"""Columns of a table that is written to a file or a pipe."""
MAIN_HEADER = "drafter draft tau TAR tokens/s speedup ideal efficiency lossless".split()
CONTEXTS = "By tokens of the prompt: tau [interval], TAR, speedup [interval]"
LOSS_ROWS = {"sample": "sample (rest)", "clock": "clock (rest)"}


def render(reports: Sequence[Path], out: Path) -> Path:
    """Write `out`/report.md and its PNGs from report.json files (or folders that hold one).

    Returns the path of report.md. Raises `UserError` if a report is missing, broken or incomplete.
    """
    from inference.report.plots import plot_all  # matplotlib takes a second to import

    if not reports:
        raise UserError(NO_REPORT)
    loaded = dict(zip(labels(reports), map(read_report, reports), strict=True))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.md"
    # written first: it marks the other files as ours if this is interrupted
    write_bytes(path, markdown(loaded, []).encode())
    images = plot_all(loaded, out)
    write_bytes(path, markdown(loaded, [image.name for image in images]).encode())
    return path


def labels(paths: Sequence[Path]) -> list[str]:
    """A short, unique name per report: its folder's name, or the file's own name if that is not
    report.json."""
    folders = [(path if path.is_dir() else path.parent).resolve() for path in paths]
    names = [
        path.stem if path.is_file() and path.name != REPORT_FILE else folder.name
        for path, folder in zip(paths, folders, strict=True)
    ]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def markdown(reports: Mapping[str, Report], images: Sequence[str]) -> str:
    """The text of report.md: a comparison when there are several reports, then each in full.

    reports: by label. images: file names of the plots.
    """
    lines = [HEADLINE, "", DEFINITIONS, ""]
    if len(reports) > 1:
        lines += ["## Side by side", "", *_comparison(reports), ""]
    for image in images:
        lines += [f"![{Path(image).stem.replace('_', ' ')}]({image})", ""]
    for label, report in reports.items():
        lines += [
            f"## {escape(claims.title(label, report))}",
            "",
            *headline(report),
            *(["", *main_table(report)] if report.drafters else []),
            "",
        ]
        lines += [*facts(report), ""]
        captioned = [
            *(
                (one.caption, markdown_table(one.header, one.rows, one.texts))
                for one in server_sheets(report)
            ),
            *(_drafter_tables(report) if report.drafters else []),
            *_optional_tables(report),
        ]
        for caption, table in captioned:
            lines += [caption, "", *table, ""]
    return "\n".join(lines).rstrip() + "\n"


def _drafter_tables(report: Report) -> list[tuple[str, list[str]]]:
    """(caption, table) of the tables that every measurement of drafters has besides the main
    table."""
    return [
        ("Per domain: tau [interval], TAR, speedup", domain_table(report)),
        *([(CONTEXTS, context_table(report))] if report.contexts else []),
        (
            "Acceptance by depth: share of passes in which the depth was accepted (given the depth "
            "before)",
            depth_table(report),
        ),
        ("Milliseconds per verify pass, memory in MB", _step_table(report)),
    ]


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1
) -> list[str]:
    """A markdown table; the first columns (`texts`) are text, the others are numbers."""
    line = "|".join([*["---"] * texts, *["---:"] * (len(header) - texts)])
    first, *others = (f"| {' | '.join(map(escape, row))} |" for row in (header, *rows))
    return [first, f"|{line}|", *others]


# Tables of every report


def headline(report: Report) -> list[str]:
    """The statements of `claims.summary` as markdown list items."""
    quoted = [(escape(one.subject), escape(one.text)) for one in claims.summary(report)]
    return [f"- **{about}**{text}" if about else f"- **{text}**" for about, text in quoted]


def facts(report: Report) -> list[str]:
    """Target, device, settings, repeats, command and omissions, as markdown list items."""
    if report.server is not None:
        return [f"- {escape(line)}" for line in server_facts(report, report.server)]
    found = list_conditions(report.target, report.device, report.settings, report.command)
    if report.repeats is not None:
        found.insert(3, f"- repeats: {claims.repeats_text(report.repeats)}")
    return [*found, *([f"- {escape(line)}"] if (line := report.run.leak_line) else [])]


def list_conditions(
    target: schema.TargetFacts,
    device: schema.DeviceFacts,
    settings: schema.ReportSettings,
    command: str | None,
) -> list[str]:
    """The same from parts of a report."""
    rule = f"{code(settings.rule)}{escape(settings.rule_text.removeprefix(settings.rule))}"
    return [
        f"- target: {code(target.id)} ({target.parameters:,} parameters, {escape(target.numbers)}, "
        f"revision {code(target.revision)})",
        f"- device: {escape(device.name)} ({escape(device.kind)}, {device.threads} threads)",
        f"- settings: temperature {settings.temperature}, up to {settings.max_new_tokens} new "
        f"tokens, batch size {settings.batch_size}, rule {rule}, {settings.prompts} "
        f"prompts, seed {settings.seed}{', compiled steps' if settings.compile else ''}",
        *([f"- command: {code(command)}"] if command else []),
    ]


def _main_rows(report: Report, separator: str = ", ") -> list[list[str]]:
    """The cells of the main table. separator: between a speedup and the verdict on it."""
    rows = []
    for drafter in report.ranked:
        cells = [
            drafter.name,
            drafter.draft.label,
            with_interval(drafter.tau, drafter.tau_ci95),
            f"{drafter.tar:.2f}",
            f"{drafter.tokens_per_second:.1f}",
            speedup_text(report, drafter, separator),
            f"{drafter.ideal_speedup:.2f}",
            f"{100 * drafter.efficiency:.0f}%",
            drafter.lossless.describe(report.settings.promise),
        ]
        rows.append(cells)
    plain = f"{report.baseline.tokens_per_second:.1f}"
    return [*rows, ["no drafter", "", "1.00", "", plain, "1.00", "", "", "baseline"]]


def main_table(report: Report) -> list[str]:
    """The drafters of a report, trained ones first, and its baseline as a markdown table."""
    return markdown_table(MAIN_HEADER, _main_rows(report), texts=2)


def _comparison(reports: Mapping[str, Report]) -> list[str]:
    """Rows: drafters of all reports; columns: tau and speedup of each report."""
    measured = [{drafter.name: drafter for drafter in one.ranked} for one in reports.values()]
    header = ["drafter", *(f"{label}: {what}" for label in reports for what in ("tau", "speedup"))]
    settings = [one.settings for one in reports.values() for _ in ("tau", "speedup")]
    rows = [["temperature", *(str(one.temperature) for one in settings)]]
    if any(one.rule != "match" for one in settings):
        rows.append(["rule", *(one.rule_text for one in settings)])
    for name in dict.fromkeys(name for drafters in measured for name in drafters):
        cells = []
        for report, drafters in zip(reports.values(), measured, strict=True):
            one = drafters.get(name)
            cells += [with_interval(one.tau, one.tau_ci95) if one else "-"]
            cells += [speedup_text(report, one) if one else "-"]
        rows.append([name, *cells])
    return markdown_table(header, rows)


def domain_table(report: Report) -> list[str]:
    """tau, TAR and speedup per drafter and domain, as a markdown table."""
    rows = []
    for drafter in report.ranked:
        cells = dict.fromkeys(report.domains, "-")
        for name, found in drafter.domains.items():
            tau = with_interval(found.tau, found.tau_ci95)
            cells[name] = f"{tau}, {found.tar:.2f}, {found.speedup:.2f}x"
            interval = report.domain_intervals(drafter.name).get(name)
            if interval is not None and (words := claims.verdict(interval)):
                cells[name] += f" ({words})"
        rows.append([drafter.name, *cells.values()])
    return markdown_table(["drafter", *report.domains], rows)


def context_table(report: Report) -> list[str]:
    """tau, TAR and speedup per drafter and bin of contexts, as a markdown table."""
    rows = []
    for drafter in report.ranked:
        cells = dict.fromkeys(report.contexts, "-")
        for found in drafter.contexts:
            tau, speedup = with_interval(found.tau, found.tau_ci95), found.speedup
            ratio = ratio_text(speedup, found.speedup_ci95)
            cells[found.label] = f"{tau}, {found.tar:.2f}, {ratio}"
        rows.append([drafter.name, *cells.values()])
    return markdown_table(["drafter", *report.contexts], rows)


def depth_table(report: Report) -> list[str]:
    """Acceptance by depth, unconditional (conditional), as a markdown table."""
    rows = []
    for drafter in report.ranked:
        found = drafter.acceptance
        pairs = zip(found.unconditional, found.conditional, strict=True)
        rows.append([drafter.name, *(f"{beta:.2f} ({alpha:.2f})" for beta, alpha in pairs)])
    return _by_depth(["drafter"], rows)


def _by_depth(header: Sequence[str], rows: Sequence[list[str]]) -> list[str]:
    """A table with a column per depth behind `header`; short rows are filled with "-"."""
    width = max(map(len, rows), default=len(header))
    depths = [f"depth {i + 1}" for i in range(width - len(header))]
    return markdown_table([*header, *depths], [row + ["-"] * (width - len(row)) for row in rows])


def _step_table(report: Report) -> list[str]:
    rows = []
    for drafter in report.ranked:
        times, memory = dict(drafter.step_ms.items()), drafter.memory_bytes
        cells = [f"{times.get(phase, 0.0):.2f}" for phase in report.phases]
        cells += [f"{size / 1e6:.1f}" for size in (memory.target, memory.drafter, memory.kv)]
        rows.append([drafter.name, *cells])
    header = ["drafter", *report.phases, "target MB", "drafter MB", "KV MB"]
    if any(drafter.ahead for drafter in report.ranked):
        header += ["hidden", "kept ahead"]
        for row, drafter in zip(rows, report.ranked, strict=True):
            ahead = drafter.ahead
            row += [f"{ahead.hidden_ms:.2f}", f"{100 * ahead.kept:.0f}%"] if ahead else ["", ""]
    return markdown_table(header, rows)


# A running server


SERVER_HEADER = [
    *("server", "clients", "running", "prompts", "tau", "accepted / drafted", "tokens/s"),
    *("first token ms", "ms per token", "speedup", "same text"),
]


def server_facts(report: Report, server: schema.ServerMeasurement) -> list[str]:
    """How a running server was measured, one line each."""
    settings, lines = report.settings, []
    for name, side in _sides(server).items():
        engine = f"{side.engine} at " if side.engine else ""
        lines.append(f"{name}: {engine}{side.url}, model {side.model}")
        if side.definition:
            lines.append(f"tau: {side.definition} (from {side.source})")
        if side.repeated or side.restarts:
            lines.append(
                f"{side.repeated} windows failed and were measured again; started again: "
                f"{side.restarts}"
            )
    lines += [
        f"settings: temperature {settings.temperature}, up to {settings.max_new_tokens} new "
        f"tokens, {settings.prompts} prompts, seed {settings.seed}; endpoint: {server.api}; "
        f"lengths of prompts by the {server.lengths}",
        *([f"command: {report.command}"] if report.command else []),
    ]
    return lines


def _sides(server: schema.ServerMeasurement) -> dict[str, schema.ServerSide]:
    found = {"speculating": server.speculative}
    return found if server.baseline is None else {**found, "without": server.baseline}


class Sheet(NamedTuple):
    """A table; the first `texts` columns are text."""

    caption: str
    header: list[str]
    texts: int
    rows: list[list[str]]


def server_sheets(report: Report) -> list[Sheet]:
    """The tables of a running server; none for other reports."""
    if report.server is None:
        return []
    rows = [
        _server_row(name, cell)
        for name, side in _sides(report.server).items()
        for cell in side.cells
    ]
    caption = (
        "By concurrent clients and prompts: mean number of requests in progress (running), tau, "
        "accepted share of the drafted tokens, tokens/s of all clients, median time to the first "
        "token, inter-token latency. A number of a single unit (prompt or window) has no interval"
    )
    sheets = [Sheet(caption, SERVER_HEADER, 4, rows)]
    known = [cell for cell in report.server.speculative.cells if cell.acceptance]
    width = max((len(cell.acceptance or []) for cell in known), default=0)
    places = []
    for cell in known:
        pairs = zip_longest(cell.acceptance or [], cell.acceptance_ci95 or [])
        shares = [with_interval(share, interval) for share, interval in pairs]
        places.append([str(cell.concurrency), cell.label, *shares, *["-"] * width][: width + 2])
    if places:
        header = ["clients", "prompts", *(f"position {place + 1}" for place in range(width))]
        caption = "Share of passes that accepted each position"
        sheets.append(Sheet(caption, header, 2, places))
    return sheets


def _server_row(name: str, cell: schema.ServerCell) -> list[str]:
    def spread(value: float | None, interval: schema.Interval | None) -> str:
        return "-" if value is None else with_interval(value, interval)

    gain = "-"
    if cell.speedup is not None:
        gain = ratio_text(cell.speedup, cell.speedup_ci95)
    return [
        name,
        str(cell.concurrency),
        f"{cell.running:.1f}",
        cell.label,
        spread(cell.tau, cell.tau_ci95),
        "-" if cell.accepted_share is None else f"{cell.accepted_share:.2f}",
        spread(cell.tokens_per_second, cell.tokens_per_second_ci95),
        spread(cell.first_token_ms, cell.first_token_ms_ci95),
        spread(cell.token_ms, cell.token_ms_ci95),
        gain,
        "-" if cell.identical is None else f"{cell.identical}/{cell.requests}",
    ]


# Tables of optional blocks


def _optional_tables(report: Report) -> list[tuple[str, list[str]]]:
    """(caption, table) of every optional block that the report has."""
    known: list[tuple[Any, Callable[[Any], list[str]], str]] = [
        (
            report.lost,
            _loss_tables,
            "Where the speed goes: from the ceiling (every draft accepted, at the cost of a plain "
            "step) to the measured speedup, factor by factor. Their product is exact; what no "
            "term explains stands in the rows marked rest",
        ),
        (
            report.baselines,
            _baselines_table,
            "Loops beside ours: tokens/s of decoding and its ratio to ours without a drafter; the "
            "same with prefill",
        ),
        (
            report.profile,
            _profile_table,
            "Speed by rows decoded together, context and temperature; the best draft of each "
            "setting is bold, and none is where plain decoding is faster",
        ),
        (
            report.costs,
            _costs_table,
            "Milliseconds per call, medians: n nodes of a verification or draft, or committed "
            "tokens",
        ),
        (
            report.roofline,
            _roofline_table,
            "Bytes that a step must move, and the share of the probed bandwidth that it reached",
        ),
    ]
    return [(caption, table(block)) for block, table, caption in known if block is not None]


def _loss_tables(block: schema.Losses) -> list[str]:
    """Every term of every drafter; then 1 - TV by depth and domain."""
    arms = block.arms
    rows = [["ceiling", *(f"{arm.ceiling:.2f}" for arm in arms.values())]]
    for terms in zip(*(arm.terms for arm in arms.values()), strict=True):
        cells = [with_interval(term.factor, term.ci95) for term in terms]
        rows.append([LOSS_ROWS.get(terms[0].name, terms[0].name), *cells])
    rows.append(["speedup", *(f"**{arm.speedup:.2f}**" for arm in arms.values())])
    overlaps = []
    for name, arm in arms.items():
        for group, levels in arm.depths.items():
            cells = [
                f"{at.overlap:.2f} ({at.own_overlap:.2f})" if at.tested else "-" for at in levels
            ]
            overlaps.append([name, group, *cells])
    caption = "1 - TV of both models' distributions as decoding uses them (of their own), by depth"
    shares = _by_depth(["drafter", "domain"], overlaps)
    return [*markdown_table(["factor", *arms], rows), "", caption, "", *shares]


def _baselines_table(loops: Mapping[str, schema.LoopResult]) -> list[str]:
    """Every other loop, and ours without a drafter."""
    rows = [
        [
            name if loop.interleaved else f"{name} (not interleaved)",
            f"{loop.tokens_per_second:.1f}",
            ratio_text(loop.ratio, loop.ratio_ci95),
            f"{loop.end_to_end_tokens_per_second:.1f}",
            f"{loop.end_to_end_ratio:.2f}",
            f"{loop.tau:.2f}",
            f"{loop.identical}/{loop.sequences}",
        ]
        for name, loop in loops.items()
    ]
    header = ["loop", "tokens/s", "ratio", "tokens/s with prefill", "ratio", "tau", "same text"]
    return markdown_table(header, rows)


def _profile_table(block: schema.Profile) -> list[str]:
    """Every point; the best draft of each setting is bold."""
    best = {draft.key for draft in block.best}
    header = "drafter rows context temperature draft tau tokens/s without speedup".split()
    rows = []
    for point in block.points:
        mark = "**" if point.key in best else ""
        cells = [
            point.arm,
            str(point.batch),
            str(point.context),
            f"{point.temperature:g}",
            f"{mark}{point.shape} {point.depth}{mark}",
            f"{point.tau:.2f}",
            f"{point.tokens_per_second:.1f}",
            f"{point.baseline_tokens_per_second:.1f}",
            ratio_text(point.speedup, point.speedup_ci95),
        ]
        rows.append(cells)
    return markdown_table(header, rows)


def _costs_table(block: schema.Costs) -> list[str]:
    """Milliseconds of every measured call: nodes from left to right."""
    rows = []
    for curve in block.rows():
        cells = [f"{curve.ms[nodes]:.2f}" if nodes in curve.ms else "" for nodes in block.sizes]
        rows.append([curve.name, str(curve.rows), str(curve.length), *cells])
    return markdown_table(["call", "rows", "cached", *(f"n={n}" for n in block.sizes)], rows)


def _roofline_table(block: schema.Roofline) -> list[str]:
    """Bytes per step against the probed bandwidth."""
    rows = [["no drafter", *_step_cells(block.baseline), "", ""]]
    for name, arm in block.arms.items():
        split = ", ".join(f"{phase} {100 * share:.0f}%" for phase, share in arm.split.items())
        rows.append([name, *_step_cells(arm), f"{100 * arm.efficiency:.0f}%", split])
    bandwidth = f"of {block.bandwidth.used_bytes_per_second / 1e9:.1f} GB/s"
    header = ["drafter", "MB per step", "step ms", bandwidth, "efficiency", "split"]
    return markdown_table(header, rows)


def _step_cells(step: schema.RooflineStep | schema.RooflineDraft) -> list[str]:
    return [f"{step.bytes_per_step / 1e6:.1f}", f"{step.step_ms:.2f}", f"{100 * step.share:.0f}%"]


# On the terminal


def _server_table(title: str, server: schema.ServerMeasurement) -> Table:
    """The cells of all prompts and of the domains, for both servers."""
    table = make_table(title)
    for column, name in enumerate(SERVER_HEADER):
        table.add_column(name, justify="left" if column in (0, 3) else "right", overflow="fold")
    for name, side in _sides(server).items():
        for cell in side.cells:
            if not cell.end:
                table.add_row(*map(Text, _server_row(name, cell)))
    return table


def print_table(report: Report, console: Console | None = None) -> None:
    """Print the measured numbers of a report and the conclusions from them. A file or pipe is given
    120 columns."""
    if console is None:
        console = Console() if Console().is_terminal else Console(width=TABLE_WIDTH)
    settings = report.settings
    title = (
        f"{report.target.label} on {report.device.name}, temperature {settings.temperature:g}, "
        f"{claims.counted_prompts(report)}"
    )
    if settings.rule != "match":
        title += f", rule {settings.rule_text}"
    table = make_table(title)
    shown = [i for i, name in enumerate(MAIN_HEADER) if name not in ("ideal", "efficiency")]
    for column, name in enumerate(MAIN_HEADER[place] for place in shown):
        justify: Literal["left", "right"] = "left" if column < 2 else "right"
        number = name in ("tau", "TAR", "tokens/s", "speedup")
        unbroken = number and console.width >= TABLE_WIDTH
        table.add_column(name, justify=justify, overflow="fold", no_wrap=unbroken)
    for row in _main_rows(report, "\n"):
        table.add_row(*(Text(row[place]) for place in shown))  # names are not markup
    if report.server is None:
        console.print(table)
    else:
        console.print(_server_table(title, report.server))
    for sentence in claims.summary(report):
        unbroken = not console.is_terminal  # so that lines of a log can be searched
        console.print(str(sentence), soft_wrap=unbroken, highlight=False, markup=False)
