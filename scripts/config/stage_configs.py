"""Configuration of the stages themselves: the folder of a run, and the settings of measure, report,
chat, refresh and loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from heads.api.config import (
    Count,
    Fraction,
    Layers,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Rate,
    Seconds,
    Seed,
    Size,
    TokenTotal,
    config,
)
from heads.api.errors import UserError, suggest
from inference.folders import require_folder_name, require_measurement_name
from inference.verifications import RecordsConfig
from scripts.config.compose import parse
from scripts.config.stages import GROUPS, OPTION_GROUPS


def require_settings(key: str, overrides: Iterable[str]) -> None:
    """Raise `UserError`, which names the setting `key`, unless every text is a setting
    (`group.key=value` or `group=option`) of a group that exists."""
    known = {*GROUPS, *OPTION_GROUPS}
    for text in overrides:
        try:
            groups = [item.key_or_group.split(".")[0] for item in parse([text])]
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        for group in groups:
            if group not in known:
                raise UserError(
                    f"{key}: '{text}': there is no group '{group}'.{suggest(group, known)}"
                )


@config("run")
@dataclass(frozen=True)
class RunConfig:
    """The folder of a run, and the inputs that it starts from."""

    name: str = "default"
    """Name of the run: all stages of one loop share <root>/<name>/."""
    root: str = "outputs"
    """Folder of all runs."""
    drafter: str = ""
    """Name of the drafter's folder below <root>/<name>/train/; empty: the chosen head's name."""
    answers: str = ""
    """Folder of generated answers to train on; empty: <root>/<name>/generate."""
    seed: Seed = 0
    """Seed of all random choices. The other groups' seeds follow it unless they are set."""
    threads: Layers = 0
    """CPU threads for torch; 0: torch's default."""
    overwrite: bool = False
    """Delete this stage's folder first and start again."""
    accept_changes: bool = False
    """Continue in a folder even if its settings or inputs have changed."""

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
    """The drafters to measure, and the name of the measurement."""

    name: str = "measure"
    """Folder of this measurement below <root>/<name>/. The main one is called measure."""
    drafters: tuple[str, ...] = ()
    """Names of drafters of this run, checkpoint folders, or names on the Hub (user/name); empty:
    all that the run has trained; of a sweep's row, the best one."""
    kinds: tuple[str, ...] = ("ngram",)
    """Drafters without training to measure as well: head configs (conf/head/), or names of
    `heads`."""
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Definitions of names in `kinds` that are not head configs: name -> recipe (a head config) or
    kind, and changed keys, such as {exit2: {recipe: early_exit, exit_layer: 2}}."""
    draft: dict[str, Any] = field(default_factory=dict)
    """One draft for all drafters in place of their own: shape, depth, choices, nodes, width,
    candidates, depth_penalty; such as {shape: dynamic, nodes: 26}."""
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Drafts other than the ones that drafters were trained for: name -> the keys of measure.draft,
    such as {ngram: {depth: 8}}."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """Write to <measurement>/records/<drafter>/ what is drafted and where it fails, in a separate
    decoding that is not timed."""

    def __post_init__(self) -> None:
        require_measurement_name("measure.name", self.name)


@config("report")
@dataclass(frozen=True)
class ReportConfig:
    """The measurements to show, and the folder of the report."""

    reports: tuple[str, ...] = ()
    """report.json files or folders that hold one; empty: every measurement of this run, the main
    one first."""
    out: str = ""
    """Folder for report.md, report.html and the plots; empty: the run's folder."""


@config("chat")
@dataclass(frozen=True)
class ChatConfig:
    """The drafter and the system message of a chat."""

    drafter: str = ""
    """Name of a drafter of this run, checkpoint folder, name on the Hub (user/name), kind without
    weights, or none; empty: the drafter of the run that was measured to be the fastest."""
    system: str = ""
    """System message put before the conversation; empty: none."""


@config("refresh")
@dataclass(frozen=True)
class RefreshStageConfig:
    """The drafter to refresh, the amount of data, and the condition that ends it."""

    drafter: str = ""
    """The old drafter: its checkpoint folder, or its name in this run."""
    prompts: PositiveInt = 256
    """Number of rows of `data` that the new target answers."""
    old_target: str = ""
    """Folder or Hub id of the target that the drafter was trained for. If given, the changes of the
    target since then are added to the drafter before the training. Use it for drafters that begin
    as copies of the target's layers (distilled, eagle3 and others with head.from_target_layer)."""
    lora_rank: Size = 0
    """Rank of low-rank updates, which are then the only weights trained; 0: train all weights."""
    until: Literal["restored", "budget"] = "restored"
    """restored: end once tau is restored; budget: read the answers train.epochs times, whatever tau
    is."""
    restore: Fraction = 0.95
    """Share of the old tau that counts as restored. The old tau is the last one that the drafter's
    own training measured."""
    tau: NonNegativeFloat = 0.0
    """Tau to reach instead, for a drafter whose training is not available or for prompts other than
    those it was measured on; 0: follow `restore`."""


@config("loop.sweep.<row>")
@dataclass(frozen=True)
class SweepRow:
    """A drafter of a comparison, trained once per learning rate."""

    rates: NonEmpty[Rate]
    """Learning rates; the training with the best tau on the validation prompts represents the
    row."""
    head: str = ""
    """Head config (a name of conf/head/); empty: the row's name."""
    overrides: tuple[str, ...] = ()
    """Further settings of this row, such as [head.num_layers=2]; settings on the loop's own command
    line take precedence."""

    def __post_init__(self) -> None:
        require_settings("loop.sweep.<row>.overrides", self.overrides)


@config("loop.budget")
@dataclass(frozen=True)
class BudgetConfig:
    """The limits on all rounds together. The first round always begins; a later one only if it
    fits, judged by the most expensive one so far."""

    seconds: Seconds = 0.0
    """Seconds of all stages of the rounds; 0: no limit."""
    tokens: TokenTotal = 0
    """Tokens trained on, without padding but with the trials of switches; 0: no limit."""
    gpu_hours: NonNegativeFloat = 0.0
    """Hours of all stages, each times its number of processes; 0: no limit."""


@config("loop.round")
@dataclass(frozen=True)
class RoundConfig:
    """The settings of a round."""

    prompts: Literal["share", "all"] = "share"
    """share: every round answers a part of the prompts that no other round answers. all: every
    round answers all of them with different seeds, which is useful only above temperature 0."""
    memory: Count = 1
    """Number of rounds whose answers a training reads, the current one included; 0: all so far."""
    one_schedule: bool = True
    """The learning rate goes through its schedule once over all rounds; false: once in every
    round."""
    overrides: tuple[tuple[str, ...], ...] = ()
    """Further settings of single rounds, one list per round; the last list applies to all later
    rounds. For example, [[], [sampling.temperature=0.7, train.max_steps=60]] draws fresh samples of
    the same prompts from the second round on."""
    judge: tuple[str, ...] = ()
    """Overrides of the measurement that judges a round, such as [bench.prompts_per_domain=32]. It
    uses the prompts of train.prompts unless they say otherwise, so that the prompts of the final
    measurement decide nothing."""
    patience: Count = 1
    """End after this many rounds in a row without a rise of tau; 0: never for that reason."""
    trial_steps: NonNegativeInt = 0
    """Steps of the trials of switches; 0: no trials. In the first round that learns from records,
    every switch is tried alone: one training with it and one without any switch, from the same
    start. A switch whose trial does not reach a higher tau stays off from then on."""
    open_loop: bool = False
    """After the rounds, train once more without feedback, on the answers to all prompts and with as
    many tokens as all rounds together, and compare the result with the rounds. The budget does not
    count this training."""
    checked_answers: NonNegativeInt = 16
    """Number of a round's answers that are decoded plainly as well, to measure the drafter's gain
    and to check that it changes nothing; 0: none."""

    def __post_init__(self) -> None:
        for number, overrides in enumerate(self.overrides):
            require_settings(f"loop.round.overrides[{number}]", overrides)
        require_settings("loop.round.judge", self.judge)

    def own_overrides(self, number: int) -> tuple[str, ...]:
        """What round `number` (from 0) sets besides."""
        return self.overrides[min(number, len(self.overrides) - 1)] if self.overrides else ()


@config("loop")
@dataclass(frozen=True)
class LoopConfig:
    """The drafters, measurements and rounds of a loop."""

    recipes: tuple[str, ...] = ()
    """Experiments (conf/experiment/) that train one drafter each; empty: the drafter that the other
    groups describe."""
    sweep: dict[str, SweepRow] = field(default_factory=dict)
    """Drafters to compare, by name: each is trained at several learning rates and measured once, at
    its best one."""
    only: tuple[str, ...] = ()
    """Rows of `sweep` to train and measure; empty: all."""
    measures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Measurements besides the main one: folder name -> overrides, for instance
    {sampled: [decode.temperature=1]}."""
    store_features: bool = False
    """Write the target's features for all recipes once (`headstart features`), and train on them:
    the target then runs over the answers once instead of in every training."""
    launch: str = ""
    """Command put before `headstart` for generate and train, for instance
    "torchrun --nproc-per-node 8 --no-python"; empty: this process."""
    rounds: Count = 0
    """Rounds of generate, feedback, train and measure, each from the drafter of the previous round;
    0: one turn without feedback."""
    round: RoundConfig = field(default_factory=RoundConfig)
    """The settings of a round."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """The limits on the rounds."""

    def __post_init__(self) -> None:
        for name in self.sweep:
            require_folder_name("loop.sweep", name)
        for name in self.only:
            if name not in self.sweep:
                raise UserError(
                    f"loop.only: '{name}' is no row of loop.sweep.{suggest(name, self.sweep)}"
                )
        for name in self.measures:
            require_measurement_name("loop.measures", name)
        for name, overrides in self.measures.items():
            require_settings(f"loop.measures.{name}", overrides)
        if self.rounds and self.store_features:
            raise UserError(
                "loop.store_features writes features once for several trainings, but every round "
                "has answers of its own. Leave out loop.store_features or loop.rounds."
            )
        if self.rounds and (self.sweep or len(self.recipes) > 1):
            trained = [*self.recipes, *self.sweep]
            raise UserError(
                f"loop.rounds={self.rounds} trains one drafter in rounds, but this loop trains "
                f"{trained}. Choose one with loop.recipes=[<recipe>], or leave the recipes out and "
                "choose head=<name>."
            )

    @property
    def rows(self) -> dict[str, SweepRow]:
        """The rows of `sweep` that are trained and measured."""
        return {name: row for name, row in self.sweep.items() if not self.only or name in self.only}
