"""The progress of a loop and its remaining time.

The expected time of a step is a few seconds to start, plus its amount of work times the seconds per
unit of work. These rates are learnt: `<run.root>/loop_times.json` keeps those of the last loops, by
target and step. A step that was never run gets the rate of its stage. The finished steps of this
loop correct the expected times of the others by one common factor, since another machine or load
changes all of them. If nothing is known yet, no time is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import TypedDict

from heads.api.errors import UserError
from heads.api.reading import read_object, require_fit
from inference.manifest import write_json
from scripts.run.runner import is_complete
from scripts.stages.loop.steps import Step

TIMES_FILE = "loop_times.json"
USUAL_RATES = {"generate": 6e-4, "features": 0.02, "train": 0.1, "measure": 5e-3, "report": 1.0}
"""Seconds per unit of work (`work`) on two cores with the embedded target. They give the proportion
of the stages before any loop has been timed."""
START_SECONDS = 5.0
"""Seconds that every step takes besides its work."""
USUAL_ROWS, USUAL_DOMAINS = 1000, 6
"""Rows of prompts and domains of a measurement if the settings do not give them."""
BAR_WIDTH = 30


@dataclass
class Forecast:
    """The expected and the actual times of a loop's steps.

    expected: seconds per step, 0 for a step that is already complete. learnt: whether they come
    from an earlier loop.
    """

    steps: Sequence[Step]
    expected: list[float]
    learnt: bool
    times: dict[str, float] = field(default_factory=dict)
    """Step's title -> seconds per unit of work, as the file keeps them for this target."""
    spent: list[float] = field(default_factory=list)
    """Seconds of the finished steps."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Forecast:
        """The forecast before the first step."""
        times = read_times(steps[0])
        expected = [
            0.0 if is_complete(step.settings) else expect(step, steps, times) for step in steps
        ]
        return cls(steps, expected, bool(times), times)

    def finish(self, seconds: float) -> None:
        """Record the seconds of the next step, and keep its rate for later loops."""
        place = len(self.spent)
        self.spent.append(seconds)
        if not self.expected[place]:
            return  # it was skipped
        step = self.steps[place]
        self.times[step.title] = max(0.0, seconds - START_SECONDS) / work(step, self.steps)
        write_times(step, self.times)

    @property
    def factor(self) -> float | None:
        """The factor by which steps take longer than expected; None if nothing is known."""
        done = sum(self.expected[: len(self.spent)])
        if done:
            pairs = zip(self.spent, self.expected, strict=False)
            return sum(seconds for seconds, expected in pairs if expected) / done
        return 1.0 if self.learnt else None

    @property
    def left(self) -> float | None:
        """Seconds until the loop ends; None if nothing is known."""
        rest = sum(self.expected[len(self.spent) :])
        return None if self.factor is None else self.factor * rest

    @property
    def share(self) -> float:
        """The finished share of the whole, in [0, 1]."""
        done, rest = sum(self.spent), sum(self.expected[len(self.spent) :]) * (self.factor or 1.0)
        return done / (done + rest) if done + rest else 1.0

    def words(self) -> str:
        """ "1:10, about 5 min left"."""
        elapsed = clock(sum(self.spent))
        left = "time left: not known yet" if self.left is None else about(self.left)
        return f"{elapsed}, {left}"

    def show(self, title: str, console: Console) -> None:
        """Announce the next step: with a bar on a terminal, elsewhere as one plain line."""
        line = f"[{len(self.spent) + 1}/{len(self.steps)}] {title}"
        console.print()
        if not console.is_terminal:
            console.print(
                f"{line}  ({self.words()})", soft_wrap=True, markup=False, highlight=False
            )
            return
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=self.share, width=BAR_WIDTH)
        grid.add_row(line.replace("[", "\\["), bar, self.words())
        console.print(grid)


def expect(step: Step, steps: Sequence[Step], times: dict[str, float]) -> float:
    """Expected seconds of one of `steps`. times: rates of earlier loops."""
    return START_SECONDS + rate(step, times) * work(step, steps)


def work(step: Step, steps: Sequence[Step]) -> float:
    """The amount of work of one of `steps`. Units differ by stage: tokens of answers (generate,
    measure), rows that are trained on or read (train, features), measurements that are shown."""
    settings = step.settings
    if step.stage.name == "generate":
        return float(prompt_rows(step) * settings.sampling.max_new_tokens)
    if step.stage.name == "train":
        train, rows = settings.train, answered_rows(steps)
        return float(train.max_steps * train.global_batch or train.epochs * rows)
    if step.stage.name == "features":
        return float(answered_rows(steps))
    if step.stage.name == "measure":
        drafters = sum(one.stage.name == "train" for one in steps)
        bench, arms = settings.bench, 1 + drafters + len(settings.measure.kinds)
        prompts = bench.prompts_per_domain * (len(bench.domains) or USUAL_DOMAINS)
        return float(arms * prompts * bench.repeats * settings.decode.max_new_tokens)
    return 1.0


def prompt_rows(step: Step) -> int:
    """Prompts that a generate step answers; 0 for another step."""
    return (step.settings.data.limit or USUAL_ROWS) if step.stage.name == "generate" else 0


def answered_rows(steps: Sequence[Step]) -> int:
    """Prompts that a loop trains on; a usual number if it generates no answers itself."""
    return max(map(prompt_rows, steps)) or USUAL_ROWS


def rate(step: Step, times: dict[str, float]) -> float:
    """Seconds per unit of a step's work: its own rate, or the mean of its stage, or the default."""
    name = step.stage.name
    if step.title in times:
        return times[step.title]
    known = [seconds for title, seconds in times.items() if title.split()[0] == name]
    return sum(known) / len(known) if known else USUAL_RATES[name]


# Times of earlier loops


def times_file(step: Step) -> Path:
    return Path(step.settings.run.root) / TIMES_FILE


def target_name(step: Step) -> str:
    return str((step.settings.resolved.get("target") or {}).get("path"))


class Times(TypedDict):
    """The content of <root>/loop_times.json: target -> step -> seconds per unit."""

    format: Literal[1]
    targets: dict[str, dict[str, float]]


def stored_times(step: Step) -> Times:
    """The file's content; without targets if the file is missing or damaged."""
    try:
        return require_fit(Times, read_object(times_file(step)), TIMES_FILE)
    except UserError:
        return {"format": 1, "targets": {}}


def read_times(step: Step) -> dict[str, float]:
    """The rates of earlier loops with this step's target; none from a file that is damaged."""
    found = stored_times(step)["targets"].get(target_name(step), {})
    return found if all(seconds >= 0 for seconds in found.values()) else {}


def write_times(step: Step, times: dict[str, float]) -> None:
    """Store the rates of this step's target; those of other targets stay."""
    content = stored_times(step)
    content["targets"][target_name(step)] = times
    write_json(times_file(step), content)


# Words


def clock(seconds: float) -> str:
    """ "1:10"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def about(seconds: float) -> str:
    """A forecast, rounded to its precision."""
    if seconds < 20:
        return "some seconds left"
    if seconds < 100:
        return f"about {round(seconds / 10) * 10} s left"
    if seconds < 7000:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"
