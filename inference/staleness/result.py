"""What came out of a watch: staleness.json, and the table for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inference.manifest import write_json
from inference.staleness.evidence import interval
from inference.staleness.reference import DomainAnswers, Reference
from inference.staleness.sequential_test import ALARM, MISS, OVERALL, Change, DriftTest

STALENESS_FILE = "staleness.json"
FORMAT = 1
SAYS = {
    "alarm": "stale: refresh it",
    "fine": "still suits",
    "open": "no alarm; too little seen to rule a loss out",
}


def content(
    test: DriftTest, reference: Reference, tallies: Mapping[str, DomainAnswers], target: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """The content of staleness.json. tallies: the fresh answers by domain, empty for totals; target: the fresh target's facts."""
    changes = test.changes()
    found = {name: plain(change) for name, change in changes.items()}
    for name, tally in tallies.items():
        if name in found:
            found[name]["by_depth"] = tally.by_depth(reference.depth)
            found[name]["reference_by_depth"] = reference.tallies[name].by_depth(reference.depth) if reference.tallies else []
    unknown = {
        name: {"answers": bets.answers, "fresh": bets.accepted / max(1.0, bets.passes),
               "fresh_ci95": list(interval(bets, test.grid, MISS))}
        for name, bets in test.unknown.items()
    }  # fmt: skip
    exact = all(part.exact for part in (*test.reference.values(), *test.fresh.values()))
    return {
        "format": FORMAT,
        "verdict": changes[OVERALL].verdict if not test.alarms and changes else ALARM if test.alarms else "open",
        "alarms": test.alarms,
        "alarm_after": test.alarm_after,
        "target": dict(target),
        "reference": {"source": reference.source, "target": reference.target, "drafter": reference.drafter},
        "fresh": source,
        "test": {
            "tolerance": test.tolerance, "alarm_rate": test.alarm_rate, "guarantee": "exact" if exact else "normal",
            "tokens": reference.tokens, "passes": test.most, "temperature": reference.temperature, "draft": reference.draft,
        },
        "domains": found,
        "unknown_domains": unknown,
    }  # fmt: skip


def plain(change: Change) -> dict[str, Any]:
    """JSON values; an end of an interval that is not known is None."""
    values = asdict(change)
    for key, value in values.items():
        if isinstance(value, tuple):
            values[key] = [end if isfinite(end) else None for end in value]
    return values


def write(found: Mapping[str, Any], out: Path) -> Path:
    """Write staleness.json; returns its path."""
    write_json(out / STALENESS_FILE, found)
    return out / STALENESS_FILE


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title_justify="left", title="accepted drafted tokens per verify pass")
    for name in ("domain", "answers", "reference", "now", "change", "verdict"):
        table.add_column(name, justify="left" if name in ("domain", "verdict") else "right", no_wrap=name != "verdict")
    for name, row in found["domains"].items():
        bounds = row["change_ci95"]
        span = "domains moved differently" if bounds is None else f"[{_percent(bounds[0])}, {_percent(bounds[1])}]"
        verdict = ALARM if name in found["alarms"] else row["verdict"]
        shown = "all together" if name == OVERALL else name
        numbers = (f"{row['reference']:.2f}", f"{row['fresh']:.2f}", f"{_percent(row['change'])} {span}")
        table.add_row(shown, str(row["answers"] or "-"), *numbers, verdict)
    for name, row in found["unknown_domains"].items():
        table.add_row(name, str(row["answers"] or "-"), "-", f"{row['fresh']:.2f}", "not in the reference", "-")
    console.print(table)
    test = found["test"]
    how = "whatever the answers' spread" if test["guarantee"] == "exact" else "taking sums as normal (only totals are known)"
    console.print(
        f"{found['verdict']}: {SAYS[found['verdict']]}. False alarms: under {test['alarm_rate']:.1%} over any number of looks, "
        f"{how}; a loss of {test['tolerance']:.0%} is tolerated. Intervals: 95%, for any number of looks.",
        soft_wrap=True,
    )


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:+.0f}%"
