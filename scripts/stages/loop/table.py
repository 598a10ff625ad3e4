"""loop.json as a table: a line per round, the switches that were turned off, and why the loop
ended."""

from __future__ import annotations

from rich.table import Table

from inference.measure.metrics import Gain
from inference.report.claims import verdict
from inference.terminal import make_table
from scripts.run.process import console
from scripts.stages.loop.facts import LoopRecord, Measured, OpenLoopRecord, RoundRecord

ENDS = {
    "rounds": "all rounds were played",
    "tau": "tau no longer rises: the interval of the last gain reaches below 0",
}
COLUMNS = ("round", "answers", "generation", "training tokens", "tau", "gain", "speedup")


def show(record: LoopRecord) -> None:
    """Print the table and, once it is known, how the loop ended."""
    out, best, spent = console(), record.best, record.spent
    out.print(table(record))
    lines = [f"{name} is off: {reason}" for name, reason in record.off.items()]
    if record.ended_by and record.open_loop:
        lines.append(compare(record.open_loop))
    if record.ended_by:
        ending = ENDS.get(record.ended_by, f"{record.ended_by} is spent")
        lines += [
            f"best: round {best.round}, tau {best.tau:.2f}; {best.checkpoint}",
            f"ended: {ending}; {spent.tokens:,.0f} tokens trained on, {spent.seconds:,.0f} s",
        ]
    for line in lines:
        out.print(line, soft_wrap=True)


def table(record: LoopRecord) -> Table:
    """A line per round, and one for the training with which they are compared."""
    found = make_table(f"rounds of {record.kind}")
    for name in COLUMNS:
        found.add_column(name, justify="right")
    found.add_column("learns from")
    for entry in record.rounds:
        found.add_row(*cells(entry))
    if record.open_loop:
        other, answers = record.open_loop, f"{record.open_loop.generated.answers:,}"
        tokens, speedup = f"{other.spent.tokens:,.0f}", speedup_text(other.measured)
        row = ("open loop", answers, "plain", tokens, tau(other.measured), "-", speedup, "answers")
        found.add_row(*row)
    return found


def compare(entry: OpenLoopRecord) -> str:
    """The gain of the best round over the open loop."""
    low, high = entry.gain.accepted_ci95
    return (
        f"best round against one open-loop training of {entry.training.tokens:,.0f} tokens: "
        f"accepted drafts per pass {entry.gain.accepted:+.1%} [{low:+.1%}, {high:+.1%}]"
    )


def cells(entry: RoundRecord) -> list[str]:
    """The row of a round."""
    assert entry.measured is not None, "only finished rounds are shown"
    fast, speed = "plain", entry.generation
    if speed:
        same = speed.lossless["identical"] + speed.lossless["near_ties"]
        fast = f"x {speed.speedup:.2f}, {same}/{speed.lossless['sequences']} as plain"
    return [
        str(entry.round),
        f"{entry.answers:,}",
        fast,
        f"{entry.spent.tokens:,.0f}",
        tau(entry.measured),
        "-" if entry.gain is None else change(entry.gain, 2),
        speedup_text(entry.measured),
        ", ".join(entry.switches) or "answers",
    ]


def tau(measured: Measured) -> str:
    """tau with its interval."""
    low, high = measured.tau_ci95
    return f"{measured.tau:.2f} [{low:.2f}, {high:.2f}]"


def speedup_text(measured: Measured) -> str:
    """The speedup, with a remark if it shows no difference."""
    words = verdict(measured.speedup_ci95)
    return f"{measured.speedup:.2f}{f', {words}' if words else ''}"


def change(gain: Gain, digits: int = 3) -> str:
    """A gain of tau with its interval."""
    low, high = gain.tau_ci95
    return f"{gain.tau:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
