"""What the tuner tries, on which prompts, and how thoroughly it checks what it has predicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from heads.api.errors import UserError
from inference.measure.datasets import DatasetConfig


@dataclass(frozen=True)
class TuneConfig:
    """The grid of drafts, the conditions they are chosen for, and the prompts that acceptance is measured on."""

    drafter: str = ""
    """Checkpoint folder, or the name of a drafter of this run; empty: the run's only one."""
    batches: tuple[int, ...] = (1, 4, 16)
    """Rows decoded together: a draft is chosen for each."""
    temperatures: tuple[float, ...] = (0.0,)
    """A draft is chosen for each."""
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    """Draft lengths of chains; those that the drafter cannot draft are left out."""
    nodes: tuple[int, ...] = (6, 10, 16, 26)
    """Nodes of trees, the root included: of static trees searched from measured ranks, and of dynamic ones. Empty: chains alone."""
    tree_depth: int = 6
    """Deepest level of trees."""
    width: int = 8
    """Dynamic trees: nodes expanded per level, and children considered per node."""
    thresholds: tuple[float, ...] = (0.2, 0.4, 0.6)
    """Chains of the longest length that stop where the estimated chance of being reached and kept falls below this."""
    prompts: str = "assets/prompts/training/validation.jsonl"
    """What acceptance is measured on: as bench.prompts. Not the prompts of the measurement that follows."""
    domains: tuple[str, ...] = ()
    """Domains to use; empty: all."""
    prompts_per_domain: int = 8
    """Prompts of each domain, at most."""
    max_new_tokens: int = 64
    """Length of the answers that acceptance and speed are measured on, at most."""
    repeats: int = 9
    """Timed calls per point of the cost curves; the median counts."""
    finalists: int = 4
    """Drafts with the best predictions that are run."""
    rounds: int = 2
    """How often the finalists answer all prompts, taking turns with plain decoding."""
    close_rounds: int = 4
    """How often on top those finalists do that the first rounds cannot tell from the fastest; 0: not at all."""
    seed: int = 0
    """Chooses the prompts, and draws the bootstrap samples."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """As bench.dataset, for prompts that are no prompt file."""

    def __post_init__(self) -> None:
        for name in ("batches", "depths", "nodes"):
            values, least = getattr(self, name), 2 if name == "nodes" else 1
            if any(value < least for value in values):
                raise UserError(f"tune.{name} must list whole numbers of at least {least}; given: {list(values)}.")
        for name in ("batches", "temperatures", "depths"):
            if not getattr(self, name):
                raise UserError(f"tune.{name} is empty. Give at least one value.")
        if min(self.temperatures) < 0:
            raise UserError(f"tune.temperatures must not be negative; given: {list(self.temperatures)}.")
        if any(not 0 < value < 1 for value in self.thresholds):
            raise UserError(f"tune.thresholds must lie between 0 and 1; given: {list(self.thresholds)}.")
        for name in ("tree_depth", "width", "prompts_per_domain", "repeats", "finalists", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"tune.{name} must be at least 1; given: {getattr(self, name)}.")
        if self.close_rounds < 0:
            raise UserError(f"tune.close_rounds must not be negative; given: {self.close_rounds}.")
        if self.max_new_tokens < 2:
            raise UserError(f"tune.max_new_tokens must be at least 2; given: {self.max_new_tokens}.")
