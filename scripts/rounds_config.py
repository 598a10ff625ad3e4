"""What `headstart loop` is told about rounds: how each one goes, when they end, what may be spent."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError, suggest

PROMPTS = ("share", "all")


@dataclass(frozen=True)
class BudgetConfig:
    """What all rounds together may cost. The first round always begins; a later one if it fits, judged by the dearest so far."""

    seconds: float = 0.0
    """Seconds of all stages of the rounds; 0: no limit."""
    tokens: int = 0
    """Tokens trained on (padding does not count), trials of switches included; 0: no limit."""
    gpu_hours: float = 0.0
    """Hours of all stages times the processes that each ran in; 0: no limit."""

    def __post_init__(self) -> None:
        for name in ("seconds", "tokens", "gpu_hours"):
            if getattr(self, name) < 0:
                raise UserError(f"loop.budget.{name} must not be negative; given: {getattr(self, name)}.")


@dataclass(frozen=True)
class RoundConfig:
    """How a round goes."""

    prompts: str = "share"
    """share: every round answers a part of the prompts that no other round has. all: every round answers all of them, with seeds of
    its own, which is of use above temperature 0 only."""
    memory: int = 1
    """Rounds whose answers a training reads, its own and the ones before it; 0: all so far."""
    one_schedule: bool = True
    """The learning rate goes once through its schedule over all rounds; false: once in every round."""
    overrides: tuple[tuple[str, ...], ...] = ()
    """What single rounds set besides, the first round's first; the last entry stands for all later rounds. Such as
    [[], [sampling.temperature=0.7, train.max_steps=60]]: fresh samples of the same prompts from the second round on."""
    judge: tuple[str, ...] = ()
    """Overrides of the measurement that judges a round, such as [bench.prompts_per_domain=32]. It is on the prompts of
    train.prompts unless they say otherwise, so that the prompts of the final measurement decide nothing."""
    patience: int = 1
    """End after so many rounds in a row without a rise of tau; 0: never for that reason."""
    trial_steps: int = 0
    """In the first round that learns from records every switch is tried alone: trainings of so many steps from the same start,
    with it and without any. A switch whose trial has no higher tau is off from then on. 0: no trials."""
    open_loop: bool = False
    """After the rounds train once more, without feedback and on the answers to all prompts, with as many tokens as all rounds had,
    and compare: what the rounds are worth. The budget does not count it."""
    checked_answers: int = 16
    """Answers of a round that are decoded plainly as well, to see what the drafter gains there and that it changes nothing; 0:
    none."""

    def __post_init__(self) -> None:
        if self.prompts not in PROMPTS:
            raise UserError(f"loop.round.prompts '{self.prompts}' is unknown.{suggest(self.prompts, PROMPTS)}")
        for name in ("memory", "patience", "trial_steps", "checked_answers"):
            if getattr(self, name) < 0:
                raise UserError(f"loop.round.{name} must not be negative; given: {getattr(self, name)}.")

    def own_overrides(self, number: int) -> tuple[str, ...]:
        """What round `number` (from 0) sets besides."""
        return self.overrides[min(number, len(self.overrides) - 1)] if self.overrides else ()
