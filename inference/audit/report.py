"""Tables of an audit for the terminal and for audit.md.

The tables group comparisons by number format and drafter; audit.json has every comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from inference.audit.findings import Audit, AuditRow
from inference.manifest import write_bytes
from inference.report.markdown import markdown_table
from inference.report.model import LosslessCounts
from inference.terminal import make_console, make_table

PAGE_FILE = "audit.md"
MOST_FAILURES = 12
DEFINITIONS = (
    "**identical**: answers that are, token by token, those of plain decoding with the same seed. "
    "**near tie**: the first difference, and every later one, lies within the numerical gap "
    "measured at that position. **captured**: comparisons in which steps were captured and "
    "replayed; launched steps must give the same answers, in every format. **flip**: a token that "
    "plain decoding would not have picked after the same text. **target alone**: flips per 1,000 "
    "tokens of the target without a drafter, when it reads its own answers as many tokens at a "
    "time as the widest draft has. **tokens/pass**: tokens committed per verification, from the "
    "worst to the best comparison; above 1 drafts were accepted. **changed**: answers that the "
    "setting changes, of all that were compared."
)

Lines = list[dict[str, str]]
"""A table: rows of cells by the name of their column."""


def verdict_text(audit: Audit) -> str:
    """The verdict as one sentence."""
    verdict, tests = audit.verdict, len(audit.distributions)
    done = f"{verdict.compared} comparisons and {tests} distribution tests"
    if verdict.lossless:
        return f"LOSSLESS: {done} show no difference that rounding does not explain."
    return f"NOT LOSSLESS: {verdict.failed} of {done} show a mismatch."


def drafter_rows(audit: Audit) -> Lines:
    """A line per precision and drafter of the invariance check."""
    return [
        {
            "precision": precision,
            "drafter": drafter,
            "comparisons": str(len(part)),
            "identical": _sums(part).describe(),
            "captured": f"{sum(row.captured for row in part)}/{len(part)}",
            "flips / 1,000": f"{_rate(part):.2f}",
            "tokens/pass": _per_pass(part),
        }
        for (precision, drafter), part in _parts(audit, "invariance", "precision", "drafter")
    ]


def setting_rows(audit: Audit) -> Lines:
    """A line per setting of the processors check."""
    return [
        {
            "setting": case,
            "comparisons": str(len(part)),
            "identical": _sums(part).describe(),
            "changed": f"{part[0].changed}/{part[0].sequences}",
            "tokens/pass": _per_pass(part),
        }
        for (case,), part in _parts(audit, "processors", "case")
    ]


def _parts(audit: Audit, check: str, *columns: str) -> Iterable[tuple[Any, list[AuditRow]]]:
    """The comparisons of a check by their values in `columns`."""
    parts: dict[Any, list[AuditRow]] = {}
    for row in audit.comparisons:
        if row.check == check:
            parts.setdefault(tuple(getattr(row, name) for name in columns), []).append(row)
    return parts.items()


def distribution_rows(audit: Audit) -> Lines:
    """A line per chi-square test."""
    return [
        {
            "rule": row.rule,
            "drafter": row.drafter,
            "shape": row.shape,
            "seeds": str(row.seeds),
            "classes": str(row.cells),
            "chi-square": f"{row.statistic:.1f} / {row.degrees}",
            "p": f"{row.p_value:.2g}",
            "tokens/pass": f"{row.tokens_per_pass:.2f}",
            "": "" if row.passed else "MISMATCH",
        }
        for row in audit.distributions
    ]


def histogram_rows(audit: Audit) -> Lines:
    """A line per precision: flips by |margin| / tolerance."""
    rows = []
    for item in audit.flips:
        alone = item.alone_per_thousand
        edges = [f"to {edge:g}" if edge is not None else "more" for edge in item.bins[1:]]
        rows.append(
            {
                "precision": item.precision,
                "tokens": f"{item.tokens:,}",
                "flips / 1,000": f"{item.per_thousand:.2f}",
                "target alone": "" if alone is None else f"{alone:.2f}",
                "places": str(item.places),
                **dict(zip(edges, map(str, item.histogram), strict=True)),
                "at a filter": str(item.filtered),
                "largest gap": f"{item.largest_gap:.2g}",
            }
        )
    return rows


def failures(audit: Audit) -> list[str]:
    """A line for each of the first failed comparisons, with the position of the failure."""
    lines = []
    for row in audit.comparisons:
        if row.passed:
            continue
        what = f"{row.check} {row.case}".strip()
        line = (
            f"{row.precision}, {what}, {row.drafter}, {row.shape}, {row.batch_size} rows, "
            f"temperature {row.temperature:g}: {row.describe()}"
        )
        if row.changed_by_capture:
            line += f"; {row.changed_by_capture} answers that launched steps decode otherwise"
        for first in row.divergences[:1]:
            line += (
                f"; prompt {first.prompt}, token {first.place}: {first.found} instead of "
                f"{first.expected}, {first.reason}"
            )
        lines.append(line)
    for test in audit.distributions:
        if not test.passed:
            lines.append(
                f"distribution, rule {test.rule}, {test.drafter}, {test.shape}: p = "
                f"{test.p_value:.2g}, {test.impossible} samples of probability 0"
            )
    more = len(lines) - MOST_FAILURES
    return [*lines[:MOST_FAILURES], *([f"and {more} more, in audit.json"] if more > 0 else [])]


def sections(audit: Audit) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, header, rows) of the tables that have rows."""
    for title, lines in (
        ("Drafters, shapes and batches against plain decoding", drafter_rows(audit)),
        ("Flips by |margin| / tolerance: up to 1 is a near tie", histogram_rows(audit)),
        ("Processors and filters against plain decoding", setting_rows(audit)),
        ("Sampled answers against the exact distribution", distribution_rows(audit)),
    ):
        if lines:
            yield title, list(lines[0]), [list(line.values()) for line in lines]


def print_summary(audit: Audit, console: Console | None = None) -> None:
    """Print the page to the terminal."""
    console = console or make_console()
    for title, header, rows in sections(audit):
        table = make_table(title)
        for place, name in enumerate(header):
            table.add_column(name, justify="left" if place < 2 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, "")
    for item in audit.skipped:
        console.print(f"not offered: {item.drafter}, {item.shape}: {item.reason}", markup=False)
    for line in failures(audit):
        console.print(line, style="red", markup=False)
    good = audit.verdict.lossless
    console.print(verdict_text(audit), style="bold green" if good else "bold red", markup=False)


def write_markdown(audit: Audit, folder: Path) -> Path:
    """Write audit.md into `folder`; returns its path."""
    target, device = audit.target, audit.device
    lines = [
        "# Audit",
        "",
        f"**{verdict_text(audit)}**",
        "",
        f"- target: `{target.id}` (revision `{target.revision}`, {target.parameters:,} parameters)",
        f"- device: {device.name} ({device.kind}, {device.threads} threads)",
        f"- command: `{audit.command}`",
        "",
        DEFINITIONS,
        "",
    ]
    for title, header, rows in sections(audit):
        lines += [f"## {title}", "", *markdown_table(header, rows, texts=2), ""]
    if audit.skipped:
        lines += ["## Not offered", ""]
        lines += [*(f"- {item.drafter}, {item.shape}: {item.reason}" for item in audit.skipped), ""]
    if not audit.verdict.lossless:
        lines += ["## Mismatches", "", *(f"- {line}" for line in failures(audit)), ""]
    path = folder / PAGE_FILE
    write_bytes(path, ("\n".join(lines).rstrip() + "\n").encode())
    return path


def _sums(rows: Sequence[AuditRow]) -> LosslessCounts:
    names = LosslessCounts.model_fields
    return LosslessCounts(**{name: sum(getattr(row, name) for row in rows) for name in names})


def _rate(rows: Sequence[AuditRow]) -> float:
    tokens = sum(row.tokens for row in rows)
    return 1000 * sum(row.flips for row in rows) / tokens if tokens else 0.0


def _per_pass(rows: Sequence[AuditRow]) -> str:
    values = [row.tokens_per_pass for row in rows]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
