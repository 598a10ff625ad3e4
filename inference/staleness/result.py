"""The result of a watch: staleness.json, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import NotRequired, TypedDict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inference.decoding.draft import DraftSettings
from inference.manifest import write_json
from inference.staleness.evidence import interval
from inference.staleness.reference import DomainAnswers, Reference
from inference.staleness.sequential_test import ALARM, MISS, OVERALL, Change, DriftTest

STALENESS_FILE = "staleness.json"
FORMAT = 1
VERDICTS = {
    "alarm": "stale: refresh it",
    "fine": "still suits",
    "open": "no alarm; too little seen to rule a loss out",
}


class DomainChange(TypedDict):
    """A `Change` as JSON holds it; an unknown end of an interval is None."""

    answers: int
    reference: float
    reference_ci95: list[float | None] | None
    fresh: float
    fresh_ci95: list[float | None] | None
    change: float
    change_ci95: list[float | None] | None
    evidence: float
    needed: float
    verdict: str
    by_depth: NotRequired[list[float]]
    """Share of the passes that accepted each depth."""
    reference_by_depth: NotRequired[list[float]]


class UnknownDomain(TypedDict):
    """A domain that the reference does not have."""

    answers: int
    fresh: float
    fresh_ci95: list[float]


class ReferenceFacts(TypedDict):
    """What the fresh answers were compared with."""

    source: str
    target: dict[str, str]
    drafter: dict[str, str]


class TestSettings(TypedDict):
    """The settings of the test."""

    tolerance: float
    alarm_rate: float
    guarantee: str
    """"exact" for every distribution of answers, or "normal" where only totals are known."""
    tokens: int
    passes: int
    temperature: float
    draft: DraftSettings


class Staleness(TypedDict):
    """The content of staleness.json."""

    format: int
    verdict: str
    alarms: list[str]
    alarm_after: int | None
    target: dict[str, str]
    reference: ReferenceFacts
    fresh: str
    test: TestSettings
    domains: dict[str, DomainChange]
    unknown_domains: dict[str, UnknownDomain]


def content(
    test: DriftTest,
    reference: Reference,
    tallies: Mapping[str, DomainAnswers],
    target: Mapping[str, str],
    source: str,
) -> Staleness:
    """The content of staleness.json.

    tallies: the fresh answers by domain; empty where only totals are known. target: the fresh
    target's facts.
    """
    changes = test.changes()
    found = {name: domain_change(change) for name, change in changes.items()}
    depth, known = reference.depth, reference.tallies
    for name, tally in tallies.items():
        if name in found:
            found[name]["by_depth"] = tally.by_depth(depth)
            found[name]["reference_by_depth"] = known[name].by_depth(depth) if known else []
    unknown: dict[str, UnknownDomain] = {
        name: {
            "answers": bets.answers,
            "fresh": bets.accepted / max(1.0, bets.passes),
            "fresh_ci95": list(interval(bets, test.grid, MISS)),
        }
        for name, bets in test.unknown.items()
    }
    exact = all(part.exact for part in (*test.reference.values(), *test.fresh.values()))
    verdict = changes[OVERALL].verdict if changes else "open"
    return {
        "format": FORMAT,
        "verdict": ALARM if test.alarms else verdict,
        "alarms": test.alarms,
        "alarm_after": test.alarm_after,
        "target": dict(target),
        "reference": {
            "source": reference.source,
            "target": reference.target,
            "drafter": reference.drafter,
        },
        "fresh": source,
        "test": {
            "tolerance": test.tolerance,
            "alarm_rate": test.alarm_rate,
            "guarantee": "exact" if exact else "normal",
            "tokens": reference.tokens,
            "passes": test.most,
            "temperature": reference.temperature,
            "draft": reference.draft,
        },
        "domains": found,
        "unknown_domains": unknown,
    }


def domain_change(change: Change) -> DomainChange:
    """`change` as JSON holds it."""

    def finite(ends: tuple[float, float] | None) -> list[float | None] | None:
        return None if ends is None else [end if isfinite(end) else None for end in ends]

    return {
        "answers": change.answers,
        "reference": change.reference,
        "reference_ci95": finite(change.reference_ci95),
        "fresh": change.fresh,
        "fresh_ci95": finite(change.fresh_ci95),
        "change": change.change,
        "change_ci95": finite(change.change_ci95),
        "evidence": change.evidence,
        "needed": change.needed,
        "verdict": change.verdict,
    }


def write(found: Staleness, out: Path) -> Path:
    """Write staleness.json; returns its path."""
    write_json(out / STALENESS_FILE, found)
    return out / STALENESS_FILE


def show(found: Staleness, console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        title="accepted drafted tokens per verify pass",
    )
    for name in ("domain", "answers", "reference", "now", "change", "verdict"):
        table.add_column(
            name,
            justify="left" if name in ("domain", "verdict") else "right",
            no_wrap=name != "verdict",
        )
    for name, row in found["domains"].items():
        bounds = row["change_ci95"]
        span = (
            "domains moved differently"
            if bounds is None
            else f"[{_percent(bounds[0])}, {_percent(bounds[1])}]"
        )
        verdict = ALARM if name in found["alarms"] else row["verdict"]
        shown = "all together" if name == OVERALL else name
        numbers = (
            f"{row['reference']:.2f}",
            f"{row['fresh']:.2f}",
            f"{_percent(row['change'])} {span}",
        )
        table.add_row(shown, str(row["answers"] or "-"), *numbers, verdict)
    for name, unknown in found["unknown_domains"].items():
        counted, now = str(unknown["answers"] or "-"), f"{unknown['fresh']:.2f}"
        table.add_row(name, counted, "-", now, "not in the reference", "-")
    console.print(table)
    test = found["test"]
    how = (
        "whatever the answers' spread"
        if test["guarantee"] == "exact"
        else "taking sums as normal (only totals are known)"
    )
    console.print(
        f"{found['verdict']}: {VERDICTS[found['verdict']]}. False alarms: under "
        f"{test['alarm_rate']:.1%} over any number of looks, {how}; a loss of "
        f"{test['tolerance']:.0%} is tolerated. Intervals: 95%, for any number of looks.",
        soft_wrap=True,
    )


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:+.0f}%"
