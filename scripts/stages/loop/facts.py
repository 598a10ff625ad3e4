"""loop.json: what every round generated, trained, measured and cost, read from the rounds' folders,
and the decisions.

Only these folders determine how a loop continues, so a loop that was killed and repeated comes to
the same end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from heads.api.config import build
from heads.api.errors import UserError
from heads.api.reading import read_as, read_object, require_fit
from inference.decoding.requests import PassRecord
from inference.manifest import checkpoint_hash, write_json
from inference.measure.answers import FINAL_FILE, read_records
from inference.measure.metrics import Gain, Outcome, Totals, gain
from inference.report.model import REPORT_FILE, read_report
from scripts.config.stage_configs import BudgetConfig, RoundConfig
from scripts.run.folder import read_record
from scripts.run.process import shown
from scripts.stages.loop.plan import MORE
from train.data.answers import read_answers
from train.feedback.config import FeedbackConfig
from train.manifest import read_training as read_manifest_of_training
from train.tracking.summary import SUMMARY_FILE

LOOP_FILE, MADE_FILE, SPEED_FILE = "loop.json", "made.json", "speed.json"
FORMAT = 1


class Costs(TypedDict):
    """The values read from a training's summary.json."""

    wall_seconds: float
    setup_seconds: NotRequired[float]
    tokens: float
    device_hours: float


@dataclass(frozen=True)
class Answered:
    """Facts of a generate folder: rows done, answer tokens, recorded verifications."""

    answers: int
    tokens: int
    verifications: int


@dataclass(frozen=True)
class Trained:
    """Facts of a train folder: steps, tokens, best step, the checkpoint and the hash of its
    weights."""

    steps: int
    tokens: int
    best_step: int
    checkpoint: str
    weights_sha256: str


@dataclass(frozen=True)
class Measured:
    """Facts of a measurement: one drafter's tau, acceptance by depth, speed and losslessness, as in
    report.json."""

    prompts: int
    tau: float
    tau_ci95: tuple[float, float]
    tar: float | None
    acceptance: dict[str, Any]
    speedup: float
    speedup_ci95: tuple[float, float]
    lossless: dict[str, int]


@dataclass(frozen=True)
class HelpedGeneration:
    """A sample of answers, decoded plainly and with the drafter that helped to generate them."""

    answers: int
    tokens: int
    plain_seconds: float
    drafted_seconds: float
    speedup: float
    """Seconds of plain decoding over seconds with the drafter."""
    tau: float
    lossless: dict[str, int]
    """As in report.json."""
    stored: int
    """Generated answers that equal plain decoding in this sample's batches."""


@dataclass(frozen=True)
class Spent:
    """The cost of stages."""

    seconds: float = 0.0
    tokens: float = 0.0
    """Tokens trained on."""
    gpu_hours: float = 0.0
    """Seconds times processes, in hours."""

    def __add__(self, other: Spent) -> Spent:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Spent(*(one + two for one, two in pairs))


@dataclass
class RoundRecord:
    """One round. Values that do not apply to it are None and not written."""

    round: int
    start: str = ""
    """Checkpoint from which the training continued; empty: as the recipe begins."""
    generated: Answered | None = None
    generation: HelpedGeneration | None = None
    variations: Answered | None = None
    branches: Answered | None = None
    trials: dict[str, Gain] | None = None
    """Switch -> gain of a short training with it over one without any switch."""
    switches: list[str] = field(default_factory=list)
    """The switches that were on in the training from records."""
    training: Trained | None = None
    measured: Measured | None = None
    spent: Spent = field(default_factory=Spent)
    over: int | None = None
    """The best earlier round, with which `gain` compares."""
    gain: Gain | None = None
    rises: bool | None = None
    """Whether the interval of the gain lies above 0."""

    @property
    def answers(self) -> int:
        parts = (self.generated, self.variations, self.branches)
        return sum(part.answers for part in parts if part is not None)


@dataclass(frozen=True)
class OpenLoopRecord:
    """The training with which rounds are compared."""

    generated: Answered
    training: Trained
    measured: Measured
    gain: Gain
    """The gain of the best round over it."""
    spent: Spent


@dataclass(frozen=True)
class LoopSettings:
    """The settings that determine the rounds."""

    rounds: int
    round: RoundConfig
    budget: BudgetConfig
    feedback: FeedbackConfig
    on_policy: float


@dataclass(frozen=True)
class BestRound:
    """The round whose drafter becomes the run's."""

    round: int
    checkpoint: str
    tau: float


@dataclass(frozen=True)
class LoopRecord:
    """loop.json."""

    kind: str
    settings: LoopSettings
    rounds: list[RoundRecord]
    best: BestRound
    off: dict[str, str]
    """Switch that was turned off -> the reason."""
    ended_by: str
    """rounds, tau, or budget (and which limit); empty while the loop runs."""
    spent: Spent
    open_loop: OpenLoopRecord | None = None
    format: int = FORMAT
    stage: str = "loop"
    state: str = "complete"

    def write(self, run: Path) -> None:
        first = {"format": self.format, "stage": self.stage, "state": self.state}
        write_json(run / LOOP_FILE, first | as_json(self))

    @classmethod
    def read(cls, run: Path) -> LoopRecord:
        """The record of a run; raises `UserError` for a file that is not of this format."""
        return read_as(cls, run / LOOP_FILE, "Run the loop again: it takes what is complete.")


def as_json(value: Any) -> Any:
    """A record as JSON values; fields that are None by default and still None are left out."""
    if is_dataclass(value):
        found = {item: getattr(value, item.name) for item in fields(value)}
        return {
            item.name: as_json(content)
            for item, content in found.items()
            if content is not None or item.default is not None
        }
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


# From the rounds' folders


def read_generation(folder: Path) -> Answered:
    manifest = read_answers(folder)
    counts, records = manifest["counts"], manifest.get("records", {})
    return Answered(counts["done"], counts["tokens"], records.get("verifications", 0))


def read_training(folder: Path) -> Trained:
    manifest = read_manifest_of_training(folder)
    checkpoint = folder / manifest["checkpoint"]
    return Trained(
        manifest["steps"],
        manifest["tokens"],
        manifest["best"]["step"],
        shown(checkpoint),
        checkpoint_hash(checkpoint),
    )


def read_measurement(folder: Path, name: str) -> Measured:
    report = read_report(folder / REPORT_FILE)
    entry = next(item for item in report.drafters if item.name == name).to_dict()
    known = {key: entry[key] for key in Measured.__dataclass_fields__ if key in entry}
    return build(Measured, {**known, "prompts": report.settings.prompts}, str(folder))


def totals(folder: Path, name: str) -> Totals:
    outcomes = [
        Outcome(record.prompt, "", [PassRecord(*counts) for counts in record.passes])
        for record in read_records(folder / FINAL_FILE)
        if record.arm == name
    ]
    deepest = max((p.accepted for outcome in outcomes for p in outcome.passes), default=0)
    return Totals.collect(outcomes, deepest)


def compare(new: tuple[Path, str], old: tuple[Path, str]) -> Gain:
    """The gain of one drafter over another, each given by its measurement's folder and name, on the
    prompts of both measurements. Raises `UserError` if they have none in common."""
    one, other = totals(*new), totals(*old)
    both = [prompt for prompt in one.prompts if prompt in other.prompts]
    if not both:
        raise UserError(
            f"'{new[0]}' and '{old[0]}' have measured no prompt in common, so the rounds cannot be "
            "compared. Leave bench.* out of loop.round.overrides, or start again with "
            "run.overwrite=true."
        )
    return gain(one.only(both), other.only(both))


def other_seconds(folder: Path) -> float:
    """Seconds outside of the stages: writing prompts, and decoding a sample in both ways."""
    files = [*(folder / name / MADE_FILE for name in MORE), folder / SPEED_FILE]
    found = [read_object(path) for path in files if path.is_file()]
    names = ("seconds", "plain_seconds", "drafted_seconds")
    values = [content.get(name, 0.0) for content in found for name in names]
    return float(sum(value for value in values if isinstance(value, (int, float))))


def spent(stages: Sequence[Path], other: float = 0.0) -> Spent:
    """The cost of stages, from their folders, plus `other` seconds of one process outside of them.
    Seconds of a training are those of all its sessions, including setup. Seconds of another stage
    are those of the session that completed it."""
    return sum(map(spent_by, stages), Spent(other, 0.0, other / 3600))


def spent_by(folder: Path) -> Spent:
    summary = folder / SUMMARY_FILE
    if summary.is_file():
        content = require_fit(Costs, read_object(summary), f"'{summary}'")
        seconds = content["wall_seconds"] + content.get("setup_seconds", 0.0)
        return Spent(seconds, content["tokens"], content["device_hours"])
    record = read_record(folder)
    if record is None or not record.finished:
        return Spent()
    last, ended = record.sessions[-1], datetime.fromisoformat(record.finished)
    seconds = (ended - datetime.fromisoformat(last.started)).total_seconds()
    return Spent(seconds, 0.0, seconds * last.processes / 3600)
