"""The page of a learner: tau of a server's traffic over time, and the result of each cycle.

It is made from the lines of a learner's journal (docs/learning.md lists them), as plain values. It
shares the style, the charts and the rules of the report's page and runs no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from inference.manifest import write_bytes
from inference.measure.metrics import divide
from inference.report.page.charts import Figure, Line, Lines, ticks
from inference.report.page.formats import number, percent
from inference.report.page.render import asset, content_hash, environment

FILE = "learn.html"
MOST_POINTS = 150
"""Most points of a line; if there are more lines of traffic, neighbours are merged."""
Event = Mapping[str, Any]
COLUMNS = (
    "Cycle",
    "Result",
    "Answers' tokens",
    "Clients",
    "Largest client",
    "τ held out, before",
    "τ held out, after",
    "Pairs compared",
    "Accepted per pass, before",
    "Accepted per pass, after",
    "Training, s",
)


@dataclass(frozen=True)
class LearningPage:
    """The content for the template. cycles: a row for each, in the order of `COLUMNS`; reasons: for
    rejected candidates, by cycle; commands: that serve exports, by cycle; tau: of the latest
    traffic, None where no verification is known."""

    figure: Figure
    cycles: list[list[str]]
    reasons: dict[int, str]
    commands: dict[int, str]
    taken: int
    tau: float | None
    answers: int


def write_learning_page(events: Sequence[Event], folder: Path) -> Path:
    """Write `folder`/learn.html from a journal's lines; returns its path."""
    style = asset("style.css")
    template = environment().get_template("learning.html.j2")
    page = template.render(
        page=gather_learning(events),
        columns=COLUMNS,
        style=Markup(style),
        style_hash=content_hash(style),
    )
    write_bytes(folder / FILE, page.encode("utf-8"))
    return folder / FILE


def gather_learning(events: Sequence[Event]) -> LearningPage:
    """The figures of a journal's lines."""
    noted = [event for event in events if event["event"] == "traffic"]
    traffic = [event for event in noted if event["passes"]]  # an engine tells of none
    begin = float(events[0]["time"]) if events else 0.0
    span = float(events[-1]["time"]) - begin if events else 0.0
    unit, seconds = ("hours", 3600.0) if span > 3 * 3600 else ("minutes", 60.0)
    points = [((at - begin) / seconds, tau) for at, tau in tau_points(traffic)]
    swaps = [event for event in events if event["event"] == "swapped"]
    rings = [
        ((float(swap["time"]) - begin) / seconds, tau_at(traffic, float(swap["time"])), "swap")
        for swap in swaps
    ]
    chart = Lines(
        "tau of the traffic over time",
        [Line("", points)],
        f"{unit} since the first line of the journal",
        "τ",
        [mark for mark in ticks(0.0, span / seconds) if mark <= span / seconds],
        rings=rings,
    )
    numbers = sorted({event["cycle"] for event in events if event["event"] == "collected"})
    last = traffic[-10:]
    return LearningPage(
        figure=Figure("τ of the traffic", chart, "Ringed: a candidate became the drafter."),
        cycles=[cycle_row(n, [one for one in events if one["cycle"] == n]) for n in numbers],
        reasons={one["cycle"]: one["why"] for one in events if one["event"] == "rejected"},
        commands={one["cycle"]: one["command"] for one in swaps if one.get("command")},
        taken=len(swaps),
        tau=tau_of(last) if last else None,
        answers=sum(event["answers"] for event in noted),
    )


def tau_of(traffic: Sequence[Event]) -> float:
    """tau over several lines of traffic; 1.0 for none. The first token of an answer needs no
    verification."""
    committed = sum(event["tokens"] - event["answers"] for event in traffic)
    passes = sum(event["passes"] for event in traffic)
    return divide(committed, passes) if passes else 1.0


def tau_points(traffic: Sequence[Event]) -> list[tuple[float, float]]:
    """(time, tau) of at most `MOST_POINTS` groups of neighbouring lines."""
    size = max(1, -(-len(traffic) // MOST_POINTS))
    groups = [traffic[at : at + size] for at in range(0, len(traffic), size)]
    return [(float(group[-1]["time"]), tau_of(group)) for group in groups]


def tau_at(traffic: Sequence[Event], time: float) -> float:
    """tau of the last line of traffic before a given time."""
    before = [event for event in traffic if event["time"] <= time]
    return tau_of(before[-1:])


def cycle_row(cycle: int, events: Sequence[Event]) -> list[str]:
    """A cycle as the cells of `COLUMNS`; steps that it has not reached stay empty."""
    known = {event["event"]: event for event in events}
    begun, trained, measured = (known.get(n, {}) for n in ("collected", "trained", "measured"))
    compared = known.get("compared", {})
    result = next((name for name in ("swapped", "rejected") if name in known), "under way")

    def shown(value: float | None) -> str:
        return "" if value is None else number(value)

    before, after = (measured.get(name, {}).get("tau") for name in ("before", "after"))
    accepted = compared.get("acceptance", (None, None))
    return [
        str(cycle),
        {"swapped": "taken"}.get(result, result),
        str(begun["tokens"]),
        str(begun["clients"]),
        percent(begun["largest_client"]),
        shown(before),
        shown(after),
        str(compared.get("pairs", "")),
        shown(accepted[0]),
        shown(accepted[1]),
        shown(trained.get("seconds")),
    ]
