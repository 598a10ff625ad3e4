"""Configuration of `headstart loop`: what a turn trains and measures, its rounds, what they may
cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heads.api.config import NonEmpty, NonNegativeFloat, NonNegativeInt, PositiveFloat, config
from heads.api.errors import UserError
from inference.folders import require_folder_name


@config("loop.sweep.<row>")
@dataclass(frozen=True)
class SweepRow:
    """One drafter of a comparison, trained once per learning rate."""

    rates: NonEmpty[PositiveFloat]
    """Learning rates; the training with the best tau on the validation prompts stands for the row.
    """
    head: str = ""
    """Recipe of conf/head/; empty: the row's name."""
    overrides: tuple[str, ...] = ()
    """What this row sets besides, such as [head.num_layers=2]; values of the loop's own command
    line win."""


@config("loop.budget")
@dataclass(frozen=True)
class BudgetConfig:
    """What all rounds together may cost.

    The first round always begins; a later one if it fits, judged by the most expensive one so far.
    """

    seconds: NonNegativeFloat = 0.0
    """Seconds of all stages of the rounds; 0: no limit."""
    tokens: NonNegativeInt = 0
    """Tokens trained on (padding does not count), trials of switches included; 0: no limit."""
    gpu_hours: NonNegativeFloat = 0.0
    """Hours of all stages times the processes that each ran in; 0: no limit."""


@config("loop.round")
@dataclass(frozen=True)
class RoundConfig:
    """How a round goes."""

    prompts: Literal["share", "all"] = "share"
    """share: every round answers a part of the prompts that no other round has. all: every round
    answers all of them, with seeds of its own, which is of use above temperature 0 only."""
    memory: NonNegativeInt = 1
    """Rounds whose answers a training reads, its own and the ones before it; 0: all so far."""
    one_schedule: bool = True
    """The learning rate goes once through its schedule over all rounds; false: once in every round.
    """
    overrides: tuple[tuple[str, ...], ...] = ()
    """What single rounds set besides, the first round's first; the last entry stands for all later
    rounds. Such as [[], [sampling.temperature=0.7, train.max_steps=60]]: fresh samples of the same
    prompts from the second round on."""
    judge: tuple[str, ...] = ()
    """Overrides of the measurement that judges a round, such as [bench.prompts_per_domain=32]. It
    is on the prompts of train.prompts unless they say otherwise, so that the prompts of the final
    measurement decide nothing."""
    patience: NonNegativeInt = 1
    """End after so many rounds in a row without a rise of tau; 0: never for that reason."""
    trial_steps: NonNegativeInt = 0
    """In the first round that learns from records every switch is tried alone: trainings of so many
    steps from the same start, with it and without any. A switch whose trial has no higher tau is
    off from then on. 0: no trials."""
    open_loop: bool = False
    """After the rounds train once more, without feedback and on the answers to all prompts, with as
    many tokens as all rounds had, and compare: what the rounds are worth. The budget does not count
    it."""
    checked_answers: NonNegativeInt = 16
    """Answers of a round that are decoded plainly as well, to see what the drafter gains there and
    that it changes nothing; 0: none."""

    def own_overrides(self, number: int) -> tuple[str, ...]:
        """What round `number` (from 0) sets besides."""
        return self.overrides[min(number, len(self.overrides) - 1)] if self.overrides else ()


@config("loop")
@dataclass(frozen=True)
class LoopConfig:
    """What one turn of the loop consists of."""

    recipes: tuple[str, ...] = ()
    """Experiments (conf/experiment/) that train one drafter each; empty: the one drafter that the
    other groups describe."""
    sweep: dict[str, SweepRow] = field(default_factory=dict)
    """Drafters to compare, by name: each is trained at several learning rates and measured once, at
    its best one."""
    measures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Measurements beside the main one: folder name -> overrides, for instance
    {sampled: [decode.temperature=1]}."""
    launch: str = ""
    """Command put before `headstart` for generate and train, for instance
    "torchrun --nproc-per-node 8 --no-python"; empty: this process."""
    rounds: NonNegativeInt = 0
    """Rounds of generate, feedback, train and measure, each from the drafter of the one before it;
    0: one turn without feedback."""
    round: RoundConfig = field(default_factory=RoundConfig)
    """How a round goes."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """What the rounds may cost."""

    def __post_init__(self) -> None:
        for key in ("measures", "sweep"):
            for name in getattr(self, key):
                require_folder_name(f"loop.{key}", name)
        if self.rounds and (self.sweep or len(self.recipes) > 1):
            trained = [*self.recipes, *self.sweep]
            raise UserError(
                f"loop.rounds={self.rounds} trains one drafter in rounds, but this loop trains "
                f"{trained}. Choose one with loop.recipes=[<recipe>], or leave the recipes out and "
                "choose head=<name>."
            )
