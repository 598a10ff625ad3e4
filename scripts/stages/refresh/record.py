"""refresh.json: the changes and the cost of a refresh."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heads.api.config import build
from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.manifest import write_json
from inference.measure.metrics import TauEstimate

REFRESH_FILE = "refresh.json"
FORMAT = 1


@dataclass(frozen=True)
class RefreshedDrafter:
    """Folders of the old and the new checkpoint, and their kind."""

    old: str
    new: str
    kind: str


@dataclass(frozen=True)
class RefreshCost:
    """Answers of the new target, the training on them, and seconds by part over all sessions."""

    answers: int
    answer_tokens: int
    steps: int
    training_tokens: int
    training_seconds: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class RefreshRecord:
    """refresh.json. before, after: tau of the old and of the new drafter with the new target."""

    format: int
    drafter: RefreshedDrafter
    target: dict[str, dict[str, Any]]
    """`old`, the target that the drafter was trained for, and `new`, both from
    `TargetInfo.to_dict`."""
    settings: dict[str, int | float | str]
    """The group `refresh`, and the learning rate, draft, temperature and rule that were used."""
    before: TauEstimate
    after: TauEstimate
    goal: float
    """The tau at which training ends; 0: only the budget ends it."""
    ended_by: str
    cost: RefreshCost

    def write(self, folder: Path) -> None:
        write_json(folder / REFRESH_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RefreshRecord:
        """The record in a folder; raises `UserError` for a file of another format."""
        path = folder / REFRESH_FILE
        content = read_object(path, "Refresh again.")
        if content.get("format") != FORMAT:
            raise UserError(f"'{path}' is not a record of format {FORMAT}. Refresh again.")
        return build(cls, content, REFRESH_FILE)

    def summary(self) -> str:
        """Lines for the terminal about a finished refresh."""
        cost, old, new = self.cost, self.before, self.after
        goal = f", of {self.goal:.2f} asked for in training" if self.goal else ""
        seconds = ", ".join(f"{part} {value:.0f} s" for part, value in cost.seconds.items())
        return (
            "tau on held-out prompts: "
            f"{old.tau:.2f} [{old.ci95[0]:.2f}, {old.ci95[1]:.2f}] before, "
            f"{new.tau:.2f} [{new.ci95[0]:.2f}, {new.ci95[1]:.2f}] after{goal} (ended by: "
            f"{self.ended_by})\n"
            f"cost: {cost.answers} answers ({cost.answer_tokens} tokens), {cost.steps} steps over "
            f"{cost.training_tokens} tokens; {seconds}\n"
            f"{self.drafter.new}"
        )
