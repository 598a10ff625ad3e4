"""Renders one or several report.json: the table in the terminal, report.md and its plots. Divides nothing:
see metrics.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from heads.api.errors import UserError
from inference.decoding.rules.names import LOSSY, TEXT, promise, rule_text
from inference.measure.metrics import GAP, PHASES, efficiency
from inference.report_blocks import extra_tables, markdown_table
from inference.report_schema import arm_name, read_report, validate_report

DEFINITIONS = (
    "**tau**: committed tokens / verify passes (bonus included, cut at end-of-text, prefill's token "
    "excluded). **TAR**: accepted drafted tokens / (accepted + the refusal that ended a pass, if any). "
    "**speedup**: tokens/s over the same loop without a drafter (N = 1), same engine, same run, ratio of "
    "sums, prefill excluded. **ideal**: tau / (1 + draft time per pass / baseline time per pass). "
    "**efficiency**: speedup / ideal. **lossless**: measured sequences identical to the baseline's; a near "
    "tie is a difference within the measured numerical gap of the number format, a mismatch is not. "
    "Brackets: 95% bootstrap interval over prompts."
)

Report = Mapping[str, Any]
HEADLINE = "# Measured by Headstart"


def render(reports: Sequence[Path], out: Path) -> Path:
    """Write `out`/report.md and its PNGs from report.json files (or folders that hold one); returns
    report.md's path.

    Raises `UserError` when a report is missing, broken or incomplete.
    """
    if not reports:
        raise UserError("no report was given. Name at least one report.json, or a folder that holds one.")
    loaded = dict(zip(labels(reports), [read_report(path) for path in reports], strict=True))
    out.mkdir(parents=True, exist_ok=True)
    from inference.plots import plot_all  # matplotlib takes a second to import

    images = plot_all(loaded, out)
    path = out / "report.md"
    partial = path.with_name("report.md.partial")
    partial.write_text(markdown(loaded, [image.name for image in images]), encoding="utf-8")
    os.replace(partial, path)
    return path


def labels(paths: Sequence[Path]) -> list[str]:
    """A short, unique name per report: its folder's name, or the file's own when it is not called
    report.json.
    """
    names = [
        path.stem if path.is_file() and path.name != "report.json" else _folder(path).name for path in paths
    ]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _folder(path: Path) -> Path:
    return (path if path.is_dir() else path.parent).resolve()


def markdown(reports: Mapping[str, Report], images: Sequence[str]) -> str:
    """The text of report.md: a comparison when there are several reports, then each in full."""
    lines = [HEADLINE, "", DEFINITIONS, ""]
    if len(reports) > 1:
        lines += ["## Side by side", "", *_comparison(reports), ""]
    for image in images:
        lines += [f"![{Path(image).stem.replace('_', ' ')}]({image})", ""]
    for label, report in reports.items():
        lines += [f"## {label}", "", *facts(report), "", *main_table(report), ""]
        lines += ["Per domain: tau [interval], TAR, speedup", "", *domain_table(report), ""]
        lines += [
            "Acceptance by depth: share of passes in which the depth was accepted (given the depth before)",
            "",
        ]
        lines += [
            *depth_table(report),
            "",
            "Milliseconds per verify pass, memory in MB",
            "",
            *_cost_table(report),
            "",
            *extra_tables(report),
        ]
    return "\n".join(lines).rstrip() + "\n"


def facts(report: Report) -> list[str]:
    """Target, device, settings and command as markdown list items."""
    target, device, settings = report["target"], report["device"], report["settings"]
    rule_note = rule_text(settings["rule"], settings["temperature"]).removeprefix(settings["rule"])
    lines = [
        f"- target: `{target['id']}` ({target['parameters']:,} parameters, {target['dtype']}, "
        f"revision `{target['revision']}`)",
        f"- device: {device['name']} ({device['kind']}, {device['threads']} threads)",
        f"- settings: temperature {settings['temperature']}, up to {settings['max_new_tokens']} new tokens, "
        f"batch size {settings['batch_size']}, rule `{settings['rule']}`{rule_note}, {settings['prompts']} prompts, "
        f"seed {settings['seed']}",
    ]
    if report.get("command"):
        lines.append(f"- command: `{report['command']}`")
    return lines


def draft_text(entry: Report) -> str:
    """ "chain 4" or "tree 4 (12 nodes)", the number being the depth."""
    draft = entry["draft"]
    nodes = "" if draft["shape"] == "chain" else f" ({draft['nodes']} nodes)"
    return f"{draft['shape']} {draft['depth']}{nodes}"


def with_interval(value: float, interval: Sequence[float]) -> str:
    """ "2.31 [2.20, 2.43]"."""
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def lossless_text(lossless: Mapping[str, int], settings: Mapping[str, Any] | None = None) -> str:
    """ "64/64", "63/64, 1 near tie" or "60/64, 4 MISMATCHES".

    settings: of the report. A rule that does not promise the baseline's text is named instead: "LOSSY, 3/64 same
    text", or "distribution kept, 3/64 same text".
    """
    text = f"{lossless['identical']}/{lossless['sequences']}"
    kept = promise_of(settings) if settings else TEXT
    if kept != TEXT:
        return f"{'LOSSY' if kept == LOSSY else 'distribution kept'}, {text} same text"
    if lossless["near_ties"]:
        text += f", {lossless['near_ties']} near tie{'s' if lossless['near_ties'] > 1 else ''}"
    if lossless["mismatches"]:
        text += f", {lossless['mismatches']} MISMATCH{'ES' if lossless['mismatches'] > 1 else ''}"
    return text


def promise_of(settings: Mapping[str, Any]) -> str:
    """What the rule of a report keeps of the target's text; see `inference.rules.names`."""
    return promise(settings["rule"], settings["temperature"])


def _main_rows(report: Report) -> list[list[str]]:
    rows = [
        [
            "no drafter",
            "",
            "1.00",
            "",
            f"{report['baseline']['tokens_per_second']:.1f}",
            "1.00",
            "",
            "",
            "baseline",
        ]
    ]
    for entry in report["drafters"]:
        rows.append(
            [
                arm_name(entry),
                draft_text(entry),
                with_interval(entry["tau"], entry["tau_ci95"]),
                f"{entry['tar']:.2f}",
                f"{entry['tokens_per_second']:.1f}",
                with_interval(entry["speedup"], entry["speedup_ci95"]),
                f"{entry['ideal_speedup']:.2f}",
                f"{100 * efficiency(entry):.0f}%",
                lossless_text(entry["lossless"], report["settings"]),
            ]
        )
    return rows


TABLE_WIDTH = 120
MAIN_HEADER = ["drafter", "draft", "tau", "TAR", "tokens/s", "speedup", "ideal", "efficiency", "lossless"]


def main_table(report: Report) -> list[str]:
    """The drafters of a report and its baseline as a markdown table."""
    return markdown_table(MAIN_HEADER, _main_rows(report))


def _comparison(reports: Mapping[str, Report]) -> list[str]:
    """Rows: drafters of all reports; columns: tau and speedup of each report, "-" where it did not take
    part.
    """
    names = list(
        dict.fromkeys(arm_name(entry) for report in reports.values() for entry in report["drafters"])
    )
    header = ["drafter", *(f"{label}: {what}" for label in reports for what in ("tau", "speedup"))]
    rows = []
    for name in names:
        row = [name]
        for report in reports.values():
            found = [entry for entry in report["drafters"] if arm_name(entry) == name]
            row += [with_interval(e["tau"], e["tau_ci95"]) for e in found] or ["-"]
            row += [with_interval(e["speedup"], e["speedup_ci95"]) for e in found] or ["-"]
        rows.append(row)
    temperatures = [
        "temperature",
        *(str(report["settings"]["temperature"]) for report in reports.values() for _ in "ab"),
    ]
    if any(report["settings"]["rule"] != "match" for report in reports.values()):
        used = [rule_text(r["settings"]["rule"], r["settings"]["temperature"]) for r in reports.values()]
        rows = [["rule", *(rule for rule in used for _ in "ab")], *rows]
    return markdown_table(header, [temperatures, *rows])


def domain_table(report: Report) -> list[str]:
    """tau, TAR and speedup per drafter and domain as a markdown table."""
    domains = sorted({name for entry in report["drafters"] for name in entry["domains"]})
    rows = []
    for entry in report["drafters"]:
        cells = [entry["domains"].get(name) for name in domains]
        texts = [
            f"{with_interval(c['tau'], c['tau_ci95'])}, {c['tar']:.2f}, {c['speedup']:.2f}x" if c else "-"
            for c in cells
        ]
        rows.append([arm_name(entry), *texts])
    return markdown_table(["drafter", *domains], rows)


def depth_table(report: Report) -> list[str]:
    """Acceptance by depth, unconditional (conditional), as a markdown table."""
    deepest = max((len(entry["acceptance"]["unconditional"]) for entry in report["drafters"]), default=0)
    rows = []
    for entry in report["drafters"]:
        beta, alpha = entry["acceptance"]["unconditional"], entry["acceptance"]["conditional"]
        cells = [f"{b:.2f} ({a:.2f})" for b, a in zip(beta, alpha, strict=True)]
        rows.append([arm_name(entry), *cells, *["-"] * (deepest - len(cells))])
    return markdown_table(["drafter", *(f"depth {i + 1}" for i in range(deepest))], rows)


def _cost_table(report: Report) -> list[str]:
    rows = []
    gaps = any(GAP in entry["step_ms"] for entry in report["drafters"])
    phases = (*PHASES, GAP) if gaps else PHASES
    for entry in report["drafters"]:
        times = [f"{entry['step_ms'].get(phase, 0.0):.2f}" for phase in phases]
        rows.append(
            [
                arm_name(entry),
                *times,
                *(f"{entry['memory_bytes'][k] / 1e6:.1f}" for k in ("target", "drafter", "kv")),
            ]
        )
    return markdown_table(["drafter", *phases, "target MB", "drafter MB", "KV MB"], rows)


def print_table(report: Report, console: Console | None = None) -> None:
    """Print the measured numbers of one report to the terminal; a file or pipe is given 120 columns."""
    validate_report(report)
    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=TABLE_WIDTH)
    settings, device = report["settings"], report["device"]
    title = f"{report['target']['id']} on {device['name']}, temperature {settings['temperature']:g}, {settings['prompts']} prompts"
    if settings["rule"] != "match":
        title += f", rule {rule_text(settings['rule'], settings['temperature'])}"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    shown = [place for place, name in enumerate(MAIN_HEADER) if name not in ("ideal", "efficiency")]
    for column, place in enumerate(shown):
        whole = console.width >= TABLE_WIDTH and MAIN_HEADER[place] in ("tau", "TAR", "tokens/s", "speedup")
        justify: Literal["left", "right"] = "left" if column < 2 else "right"
        table.add_column(MAIN_HEADER[place], justify=justify, overflow="fold", no_wrap=whole)
    for row in _main_rows(report):
        table.add_row(*(row[place] for place in shown))
    console.print(table)
