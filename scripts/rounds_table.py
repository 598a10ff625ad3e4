"""loop.json for people: a line per round, what was turned off, why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from scripts.report import console
from scripts.rounds_facts import answers_of

ENDS = {
    "rounds": "all rounds were played",
    "tau": "tau no longer rises: the interval of the last gain reaches below 0",
}


def show(content: Mapping[str, Any]) -> None:
    """Print the table, and, once that is known, how the loop ended."""
    out = console()
    out.print(table(content))
    for name, reason in content["off"].items():
        out.print(f"{name} is off: {reason}", soft_wrap=True)
    if not content["ended_by"]:
        return
    if "open_loop" in content:
        out.print(compared(content["open_loop"]), soft_wrap=True)
    best, spent = content["best"], content["spent"]
    out.print(
        f"best: round {best['round']}, tau {best['tau']:.2f}; {best['checkpoint']}\n"
        f"ended: {ENDS.get(content['ended_by'], content['ended_by'] + ' is spent')}; {spent['tokens']:,.0f} tokens trained on, "
        f"{spent['seconds']:,.0f} s",
        soft_wrap=True,
    )


def table(content: Mapping[str, Any]) -> Table:
    """A line per round."""
    found = Table(title=f"rounds of {content['kind']}")
    for name in ("round", "answers", "generation", "training tokens", "tau", "gain", "speedup", "learns from"):
        found.add_column(name, justify="left" if name == "learns from" else "right")
    for entry in content["rounds"]:
        found.add_row(*line(entry))
    if "open_loop" in content:
        found.add_row(*line({"round": "open loop", "switches": [], **content["open_loop"], "gain": None}))
    return found


def compared(entry: Mapping[str, Any]) -> str:
    """What the best round gained over the open loop."""
    gain = entry["gain"]
    low, high = gain["accepted_ci95"]
    return (
        f"best round against one open-loop training of {entry['training']['tokens']:,.0f} tokens: accepted drafts per pass "
        f"{gain['accepted']:+.1%} [{low:+.1%}, {high:+.1%}]"
    )


def line(entry: Mapping[str, Any]) -> list[str]:
    """The cells of a round."""
    measured, gain, speed = entry["measured"], entry.get("gain"), entry.get("generation")
    low, high = measured["tau_ci95"]
    fast = "plain"
    if speed:
        same, total = speed["lossless"]["identical"] + speed["lossless"]["near_ties"], speed["lossless"]["sequences"]
        fast = f"x {speed['speedup']:.2f}, {same}/{total} as plain"
    gained = "-"
    if gain:
        gained = f"{gain['tau']:+.2f} [{gain['tau_ci95'][0]:+.2f}, {gain['tau_ci95'][1]:+.2f}]"
    return [
        str(entry["round"]),
        f"{answers_of(entry):,}",
        fast,
        f"{entry['spent']['tokens']:,.0f}",
        f"{measured['tau']:.2f} [{low:.2f}, {high:.2f}]",
        gained,
        f"{measured['speedup']:.2f}",
        ", ".join(entry["switches"]) or "answers",
    ]
