"""Configuration of the stages themselves: where a run lies, what is measured, shown, refreshed,
asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from heads.api.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, config
from inference.folders import require_folder_name
from inference.verifications import RecordsConfig


@config("run")
@dataclass(frozen=True)
class RunConfig:
    """Where a run writes and what it starts from."""

    name: str = "default"
    """The run: all stages of one loop share <root>/<name>/."""
    root: str = "outputs"
    """Folder of all runs."""
    drafter: str = ""
    """Name of the drafter's folder below <root>/<name>/train/; empty: the chosen head's name."""
    answers: str = ""
    """Folder of generated answers to train on; empty: <root>/<name>/generate."""
    seed: int = 0
    """Seed of everything random. The other groups' seeds follow it unless they are set themselves.
    """
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice."""
    overwrite: bool = False
    """Delete this stage's folder first and start again."""
    accept_changes: bool = False
    """Continue in a folder although its settings or inputs have changed since."""

    def __post_init__(self) -> None:
        require_folder_name("run.name", self.name)
        require_folder_name("run.drafter", self.drafter, empty=True)

    @property
    def directory(self) -> Path:
        """<root>/<name>, the parent of the stages' folders."""
        return Path(self.root) / self.name


@config("measure")
@dataclass(frozen=True)
class MeasureConfig:
    """Which drafters are measured, and under which name the measurement is kept."""

    name: str = "measure"
    """Folder of this measurement below <root>/<name>/. The main one is called measure."""
    drafters: tuple[str, ...] = ()
    """Names of drafters of this run, or checkpoint folders; empty: all that the run has trained, of
    a sweep's row the best."""
    kinds: tuple[str, ...] = ("ngram",)
    """Drafters without training that are measured beside them: recipes of conf/head/, or names of
    `heads`."""
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What such a name means where it is not a recipe as it stands: name -> recipe (or kind) and
    changed keys, such as {exit2: {recipe: early_exit, exit_layer: 2}}."""
    draft: dict[str, Any] = field(default_factory=dict)
    """One draft for all in place of their own: shape, depth, choices, nodes, width; such as
    {shape: dynamic, nodes: 26}."""
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other drafts than a drafter was trained for: name -> shape, depth, choices, nodes, width.
    Such as {ngram: {depth: 8}}."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """Write down in <measurement>/records/<drafter>/ what is drafted and where it fails, in a
    decoding beside the clock."""

    def __post_init__(self) -> None:
        require_folder_name("measure.name", self.name)


@config("report")
@dataclass(frozen=True)
class ReportConfig:
    """Which measurements are shown, and where the report goes."""

    reports: tuple[str, ...] = ()
    """report.json files or folders that hold one; empty: every measurement of this run, the main
    one first."""
    out: str = ""
    """Folder for report.md, report.html and the plots; empty: the run's own folder."""


@config("chat")
@dataclass(frozen=True)
class ChatConfig:
    """Who answers, and how the conversation starts."""

    drafter: str = ""
    """Name of a drafter of this run, checkpoint folder, kind without weights, or none; empty: the
    run's only or first one."""
    system: str = ""
    """System message put before the conversation; empty for none."""


@config("refresh")
@dataclass(frozen=True)
class RefreshStageConfig:
    """What is refreshed, with how much, and when it is enough."""

    drafter: str = ""
    """The old drafter: its checkpoint folder, or its name in this run."""
    prompts: PositiveInt = 256
    """Rows of `data` that the new target answers."""
    old_target: str = ""
    """Folder or Hub id of the target that the drafter was trained for. Given, what the target has
    changed by since is added to the drafter before the training: worth it where drafters begin as
    copies of the target's layers (distilled, eagle3 and others with head.from_target_layer)."""
    lora_rank: NonNegativeInt = 0
    """Rank of low-rank updates, which are then all that is trained; 0 trains all weights."""
    until: Literal["restored", "budget"] = "restored"
    """restored: end once tau is back; budget: read the answers train.epochs times whatever tau
    says."""
    restore: Fraction = 0.95
    """Share of the old tau that counts as back. The old tau is what the drafter's own training
    measured last."""
    tau: NonNegativeFloat = 0.0
    """The tau to reach, instead: for a drafter whose training is not at hand, or other prompts than
    it was measured on."""
