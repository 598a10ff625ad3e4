"""The result of a watch: staleness.json, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TypedDict

from rich.console import Console

from inference.decoding.draft import DraftSettings
from inference.manifest import write_json
from inference.staleness.evidence import interval
from inference.staleness.reference import DomainAnswers, Reference
from inference.staleness.sequential_test import ALARM, MISS, OVERALL, Change, DriftTest
from inference.terminal import make_table

STALENESS_FILE = "staleness.json"
FORMAT = 1
VERDICTS = {
    "alarm": "stale: refresh it",
    "fine": "still suits",
    "open": "no alarm; too little seen to rule a loss out",
}


class UnknownDomain(TypedDict):
    """A domain that the reference does not have."""

    answers: int
    fresh: float
    fresh_ci95: tuple[float, float]


class ReferenceFacts(TypedDict):
    """The reference that the fresh answers were compared with."""

    source: str
    target: dict[str, str]
    drafter: dict[str, str]


class TestSettings(TypedDict):
    """The settings of the test."""

    tolerance: float
    alarm_rate: float
    guarantee: str
    """ "exact" for every distribution of answers, "normal" where only totals are known, or "none"
    where counters are not of what was observed."""
    unit: str
    """What was observed one by one: "answers", "windows" of a server's counters, or "totals"."""
    tokens: int
    passes: int
    temperature: float
    draft: DraftSettings


@dataclass(frozen=True)
class Staleness:
    """The content of staleness.json."""

    format: int
    verdict: str
    alarms: list[str]
    alarm_after: int | None
    target: dict[str, str]
    reference: ReferenceFacts
    fresh: str
    test: TestSettings
    domains: dict[str, Change]
    unknown_domains: dict[str, UnknownDomain]
    remarks: list[str]

    def write(self, out: Path) -> Path:
        """Write staleness.json into `out`; returns its path. An unknown end of an interval is None.
        Acceptance by depth is left out if only totals are known."""
        content = asdict(self)
        for domain in content["domains"].values():
            for name, value in list(domain.items()):
                if isinstance(value, tuple):
                    domain[name] = [end if isfinite(end) else None for end in value]
                elif name.endswith("by_depth") and value is None:
                    del domain[name]
        write_json(out / STALENESS_FILE, content)
        return out / STALENESS_FILE


def summarise(
    test: DriftTest,
    reference: Reference,
    tallies: Mapping[str, DomainAnswers],
    target: Mapping[str, str],
    source: str,
    reached: Mapping[str, list[float]],
    unit: str,
    remarks: Sequence[str],
    guaranteed: bool,
) -> Staleness:
    """The findings of a watch. tallies: the fresh answers by domain; empty for counters, whose
    acceptance by depth is `reached`. target: the fresh target's facts; unit: see `TestSettings`;
    remarks: what limits the result; guaranteed: the counters are of what was observed."""
    changes, depth, known = test.changes(), reference.depth, reference.tallies
    for name in set(reached) & set(changes):
        changes[name].by_depth = reached[name]
        changes[name].reference_by_depth = known[name].by_depth(depth) if known else []
    for name, tally in tallies.items():
        if name in changes:
            changes[name].by_depth = tally.by_depth(depth)
            changes[name].reference_by_depth = known[name].by_depth(depth) if known else []
    unknown: dict[str, UnknownDomain] = {
        name: {
            "answers": bets.answers,
            "fresh": bets.accepted / max(1.0, bets.passes),
            "fresh_ci95": interval(bets, test.grid, MISS),
        }
        for name, bets in test.unknown.items()
    }
    exact = all(part.exact for part in (*test.reference.values(), *test.fresh.values()))
    verdict = changes[OVERALL].verdict if changes else "open"
    return Staleness(
        format=FORMAT,
        verdict=ALARM if test.alarms else verdict,
        alarms=test.alarms,
        alarm_after=test.alarm_after,
        target=dict(target),
        reference={
            "source": reference.source,
            "target": reference.target,
            "drafter": reference.drafter,
        },
        fresh=source,
        test={
            "tolerance": test.tolerance,
            "alarm_rate": test.alarm_rate,
            "guarantee": ("exact" if exact else "normal") if guaranteed else "none",
            "unit": unit,
            "tokens": reference.tokens,
            "passes": test.most,
            "temperature": reference.temperature,
            "draft": reference.draft,
        },
        domains=changes,
        unknown_domains=unknown,
        remarks=list(remarks),
    )


def show(found: Staleness, console: Console) -> None:
    """Print the table and the verdict."""
    title = "accepted drafted tokens per verify pass"
    table = make_table(title)
    table.add_column("domain", no_wrap=True)
    for name in (found.test["unit"], "reference", "now", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for name, row in found.domains.items():
        span = "domains moved differently"
        if row.change_ci95 is not None:
            span = "[{}, {}]".format(*map(_percent, row.change_ci95))
        table.add_row(
            "all together" if name == OVERALL else name,
            str(row.answers or "-"),
            f"{row.reference:.2f}",
            f"{row.fresh:.2f}",
            f"{_percent(row.change)} {span}",
            ALARM if name in found.alarms else row.verdict,
        )
    for name, unknown in found.unknown_domains.items():
        counted, now = str(unknown["answers"] or "-"), f"{unknown['fresh']:.2f}"
        table.add_row(name, counted, "-", now, "not in the reference", "-")
    console.print(table)
    test = found.test
    how = {
        "exact": f"whatever the {test['unit']}' spread",
        "normal": "taking sums as normal (only totals are known)",
        "none": "if the counters were those of each window, which they are not",
    }
    console.print(
        f"{found.verdict}: {VERDICTS[found.verdict]}. False alarms: under "
        f"{test['alarm_rate']:.1%} over any number of looks, {how[test['guarantee']]}; a loss of "
        f"{test['tolerance']:.0%} is tolerated. Intervals: 95%, for any number of looks.",
        *found.remarks,
        sep="\n",
        markup=False,
        soft_wrap=True,
    )


def _percent(value: float) -> str:
    return f"{100 * value:+.0f}%" if isfinite(value) else "?"
