"""Tables of an audit for the terminal and for audit.md.

Rows are grouped: the page has a line per number format and drafter, audit.json has every
comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from inference.audit.findings import Audit, AuditRow
from inference.report.markdown import TABLE_WIDTH
from inference.report.model import LosslessCounts

PAGE_FILE = "audit.md"
MOST_FAILURES = 12
DEFINITIONS = (
    "**identical**: answers that are, token by token, those of plain decoding with the same "
    "seed. **near tie**: the first difference, and every later one, lies within the numerical "
    "gap measured at that place. **flip**: a token that plain decoding would not have picked "
    "after the same text. **tokens/pass**: tokens committed per verification, from the worst to "
    "the best comparison; above 1 drafts were accepted. **changed**: answers that the setting "
    "changes, of all that were compared."
)

Lines = list[list[str]]
DRAFTER_HEADER = (
    "precision",
    "drafter",
    "comparisons",
    "identical",
    "flips / 1,000",
    "tokens/pass",
)
SETTING_HEADER = ("setting", "comparisons", "identical", "changed", "tokens/pass")
DISTRIBUTION_HEADER = (
    "rule",
    "drafter",
    "shape",
    "seeds",
    "classes",
    "chi-square",
    "p",
    "tokens/pass",
    "",
)


def verdict_text(audit: Audit) -> str:
    """The verdict as one sentence."""
    verdict = audit.verdict
    tests = len(audit.distributions)
    done = f"{verdict.compared} comparisons and {tests} distribution tests"
    if verdict.lossless:
        return f"LOSSLESS: {done} show no difference that rounding does not explain."
    return f"NOT LOSSLESS: {verdict.failed} of {done} show a mismatch."


def drafter_rows(audit: Audit) -> Lines:
    """A line per precision and drafter of the invariance check."""
    rows = [row for row in audit.comparisons if row.check == "invariance"]
    return [
        [
            precision,
            drafter,
            str(len(part)),
            _sums(part).describe(),
            f"{_rate(part):.2f}",
            _per_pass(part),
        ]
        for (precision, drafter), part in _group(rows, lambda row: (row.precision, row.drafter))
    ]


def setting_rows(audit: Audit) -> Lines:
    """A line per setting of the processors check."""
    rows = [row for row in audit.comparisons if row.check == "processors"]
    return [
        [case, str(len(part)), _sums(part).describe(), _changed(part), _per_pass(part)]
        for (case,), part in _group(rows, lambda row: (row.case,))
    ]


def distribution_rows(audit: Audit) -> Lines:
    """A line per chi-square test."""
    return [
        [
            row.rule,
            row.drafter,
            row.shape,
            str(row.seeds),
            str(row.cells),
            f"{row.statistic:.1f} / {row.degrees}",
            f"{row.p_value:.2g}",
            f"{row.tokens_per_pass:.2f}",
            "" if row.passed else "MISMATCH",
        ]
        for row in audit.distributions
    ]


def histogram_rows(audit: Audit) -> tuple[list[str], Lines]:
    """Header and a line per precision: flips by |margin| / tolerance."""
    flips = audit.flips
    edges = flips[0].bins if flips else [0.0, None]
    bins = [f"to {edge:g}" if edge is not None else "more" for edge in edges[1:]]
    header = ["precision", "tokens", "flips / 1,000", "places", *bins, "at a filter", "largest gap"]
    rows = [
        [
            item.precision,
            f"{item.tokens:,}",
            f"{item.per_thousand:.2f}",
            str(item.places),
            *(str(count) for count in item.histogram),
            str(item.filtered),
            f"{item.largest_gap:.2g}",
        ]
        for item in flips
    ]
    return header, rows


def failures(audit: Audit) -> list[str]:
    """A line for each of the first comparisons that failed, with the place where it did."""
    lines = []
    for row in audit.comparisons:
        if row.passed:
            continue
        what = f"{row.check} {row.case}".strip()
        line = (
            f"{row.precision}, {what}, {row.drafter}, {row.shape}, {row.batch_size} rows, "
            f"temperature {row.temperature:g}: {_sums([row]).describe()}"
        )
        if row.divergences:
            first = row.divergences[0]
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


def sections(audit: Audit) -> Iterable[tuple[str, Sequence[str], Lines]]:
    """(title, header, rows) of the tables that have rows."""
    header, flips = histogram_rows(audit)
    for title, names, rows in (
        (
            "Drafters, shapes and batches against plain decoding",
            DRAFTER_HEADER,
            drafter_rows(audit),
        ),
        ("Flips by |margin| / tolerance: up to 1 is a near tie", header, flips),
        ("Processors and filters against plain decoding", SETTING_HEADER, setting_rows(audit)),
        (
            "Sampled answers against the exact distribution",
            DISTRIBUTION_HEADER,
            distribution_rows(audit),
        ),
    ):
        if rows:
            yield title, names, rows


def print_summary(audit: Audit, console: Console | None = None) -> None:
    """Print the page to the terminal."""
    console = console or Console(width=TABLE_WIDTH)
    for title, header, rows in sections(audit):
        table = Table(title=title, title_justify="left", pad_edge=False, box=None)
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
    """Write audit.md into `folder` atomically; returns its path."""
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
        line = "|".join(["---", "---", *["---:"] * (len(header) - 2)])
        lines += [f"## {title}", "", f"| {' | '.join(header)} |", f"|{line}|"]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    if audit.skipped:
        lines += ["## Not offered", ""]
        lines += [*(f"- {item.drafter}, {item.shape}: {item.reason}" for item in audit.skipped), ""]
    if not audit.verdict.lossless:
        lines += ["## Mismatches", "", *(f"- {line}" for line in failures(audit)), ""]
    path = folder / PAGE_FILE
    partial = path.with_name(PAGE_FILE + ".partial")
    partial.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def _group(
    rows: Iterable[AuditRow], key: Callable[[AuditRow], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[AuditRow]]]:
    found: dict[tuple[str, ...], list[AuditRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


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


def _changed(rows: Sequence[AuditRow]) -> str:
    return f"{rows[0].changed}/{rows[0].sequences}"
