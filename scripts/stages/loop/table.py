"""loop.json for people: a line per round, what was turned off, why it ended."""

from __future__ import annotations

from rich.table import Table

from inference.measure.metrics import Gain
from scripts.run.process import console
from scripts.stages.loop.record import LoopRecord, Measured, OpenLoopRecord, RoundRecord

ENDS = {
    "rounds": "all rounds were played",
    "tau": "tau no longer rises: the interval of the last gain reaches below 0",
}
COLUMNS = (
    "round",
    "answers",
    "generation",
    "training tokens",
    "tau",
    "gain",
    "speedup",
    "learns from",
)


def show(record: LoopRecord) -> None:
    """Print the table, and, once that is known, how the loop ended."""
    out = console()
    out.print(table(record))
    for name, reason in record.off.items():
        out.print(f"{name} is off: {reason}", soft_wrap=True)
    if not record.ended_by:
        return
    if record.open_loop:
        out.print(compare(record.open_loop), soft_wrap=True)
    best, spent = record.best, record.spent
    out.print(
        f"best: round {best.round}, tau {best.tau:.2f}; {best.checkpoint}\n"
        f"ended: {ENDS.get(record.ended_by, record.ended_by + ' is spent')}; "
        f"{spent.tokens:,.0f} tokens trained on, {spent.seconds:,.0f} s",
        soft_wrap=True,
    )


def table(record: LoopRecord) -> Table:
    """A line per round."""
    found = Table(title=f"rounds of {record.kind}")
    for name in COLUMNS:
        found.add_column(name, justify="left" if name == COLUMNS[-1] else "right")
    for entry in record.rounds:
        found.add_row(*line(entry))
    if record.open_loop:
        found.add_row(*open_loop_line(record.open_loop))
    return found


def compare(entry: OpenLoopRecord) -> str:
    """What the best round gained over the open loop."""
    low, high = entry.gain.accepted_ci95
    return (
        f"best round against one open-loop training of {entry.training.tokens:,.0f} tokens: "
        "accepted drafts "
        f"per pass {entry.gain.accepted:+.1%} [{low:+.1%}, {high:+.1%}]"
    )


def line(entry: RoundRecord) -> list[str]:
    """The cells of a round."""
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
        gain(entry.gain),
        f"{entry.measured.speedup:.2f}",
        ", ".join(entry.switches) or "answers",
    ]


def open_loop_line(entry: OpenLoopRecord) -> list[str]:
    """The cells of the training that the rounds are compared with."""
    tokens, speedup = f"{entry.spent.tokens:,.0f}", f"{entry.measured.speedup:.2f}"
    answers = f"{entry.generated.answers:,}"
    return ["open loop", answers, "plain", tokens, tau(entry.measured), "-", speedup, "answers"]


def tau(measured: Measured) -> str:
    """tau with its interval."""
    low, high = measured.tau_ci95
    return f"{measured.tau:.2f} [{low:.2f}, {high:.2f}]"


def gain(found: Gain | None) -> str:
    """A gain of tau with its interval."""
    if found is None:
        return "-"
    low, high = found.tau_ci95
    return f"{found.tau:+.2f} [{low:+.2f}, {high:+.2f}]"
