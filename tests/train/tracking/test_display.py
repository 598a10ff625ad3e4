"""What a person sees of a training where there is no terminal: plain lines, seldom, with everything
in them."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from train.tracking.display import PLAIN_SECONDS, Display

COSTS = {"drafter": 3.0, "target": 1.0, "mfu": 0.25, "peak_memory": 3 * 2**30}


def lines_of(out: StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_off_a_terminal_a_line_comes_first_last_and_every_half_minute() -> None:
    out, clock = StringIO(), iter([100.0, 110.0, 100.0 + PLAIN_SECONDS, 131.0, 140.0])
    with Display("t", 20, 3, Console(file=out), now=lambda: next(clock)) as display:
        for step in (4, 5, 6, 7):
            display.step(step, 2.5, 1234.4, COSTS)
        display.show_tau(7, 1.5, (1.25, 1.75), True)
        display.step(20, 1.25, 2000.0, COSTS)
    found = lines_of(out)
    figures = "1,234 tokens/s  target 25% drafter 75% update 0% mfu 25%  memory 3.00 GiB"
    assert found == [
        f"step 4/20: loss 2.500  {figures}",
        f"step 6/20: loss 2.500  {figures}  left 0:03:30",  # 14 steps at 15 s each
        "step 7/20: tau 1.500 [1.250, 1.750]  best so far",
        f"step 20/20: loss 1.250  tau 1.50  {figures.replace('1,234', '2,000')}",
    ]


def test_a_terminal_shows_the_moving_line_instead() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=200, _environ={"TERM": "xterm"})
    with Display("t", 2, 0, console) as display:
        display.step(1, 2.5, 1234.4, COSTS)
        display.step(2, 2.5, 1234.4, COSTS)
    assert "1,234 tokens/s" in out.getvalue()
    assert not any(line.startswith("step ") for line in lines_of(out))


def test_other_processes_say_nothing() -> None:
    out = StringIO()
    with Display("t", 2, 0, Console(file=out, quiet=True), active=False) as display:
        display.step(1, 2.5, 1234.4, COSTS)
    assert out.getvalue() == ""
