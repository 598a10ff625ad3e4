"""The configuration of the tuner: what it tries, on which prompts, and how thoroughly it checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from heads.api.config import (
    Count,
    Depth,
    NonEmpty,
    OpenFraction,
    PositiveInt,
    Repeats,
    Rows,
    RowsFromTwo,
    Seed,
    Temperature,
    TokensFromTwo,
    Weight,
    config,
)
from inference.measure.datasets import DatasetConfig


@config("tune")
@dataclass(frozen=True)
class TuneConfig:
    """The grid of drafts, the conditions they are chosen for, and the prompts that acceptance is
    measured on."""

    drafter: str = ""
    """Checkpoint folder, or the name of a drafter of this run; empty: the run's only one."""
    batches: NonEmpty[Rows] = (1, 4, 16)
    """Rows decoded together: a draft is chosen for each."""
    temperatures: NonEmpty[Temperature] = (0.0,)
    """A draft is chosen for each."""
    depths: NonEmpty[Depth] = (1, 2, 3, 4, 5, 6, 8)
    """Draft lengths of chains; those that the drafter cannot draft are left out."""
    nodes: tuple[RowsFromTwo, ...] = (6, 10, 16, 26)
    """Nodes of trees, the root included: of static trees searched from measured ranks, of dynamic
    ones, and of dartrees (drafters whose one pass gives all depths). Empty: chains alone."""
    tree_depth: Depth = 6
    """Deepest level of trees."""
    width: Rows = 8
    """Dynamic trees: nodes expanded per level, and children considered per node. Dartrees: nodes
    kept per level."""
    candidates: Rows = 64
    """Dartrees: tokens considered at each depth."""
    depth_penalties: tuple[Weight, ...] = (0.0, 0.2)
    """Dartrees: penalties per level to try (decode.depth_penalty). Empty: no dartrees."""
    thresholds: tuple[OpenFraction, ...] = (0.2, 0.4, 0.6)
    """Chains of the longest length that stop where the estimated chance of being reached and kept
    falls below this."""
    prompts: str = ""
    """What acceptance is measured on: as bench.prompts. Not the prompts of the measurement that
    follows. Empty: the validation prompts that were held out of the run's data."""
    domains: tuple[str, ...] = ()
    """Domains to use; empty: all."""
    prompts_per_domain: PositiveInt = 8
    """Prompts of each domain, at most."""
    max_new_tokens: TokensFromTwo = 64
    """Length of the answers that acceptance and speed are measured on, at most."""
    repeats: Repeats = 9
    """Timed calls per point of the cost curves; the median counts."""
    finalists: Repeats = 4
    """Drafts with the best predictions that are run."""
    rounds: Repeats = 2
    """How often the finalists answer all prompts, taking turns with plain decoding."""
    close_rounds: Count = 4
    """How often on top those finalists do that the first rounds cannot tell from the fastest; 0:
    not at all."""
    seed: Seed = 0
    """Chooses the prompts, and draws the bootstrap samples."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """As bench.dataset, for prompts that are no prompt file."""
