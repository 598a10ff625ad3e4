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
    """The grid of drafts, the conditions to choose them for, and the prompts for measuring
    acceptance."""

    drafter: str = ""
    """Checkpoint folder, or the name of a drafter of this run; empty: the run's only one."""
    batches: NonEmpty[Rows] = (1, 4, 16)
    """Numbers of rows decoded together; a draft is chosen for each."""
    temperatures: NonEmpty[Temperature] = (0.0,)
    """Temperatures; a draft is chosen for each. Without it, the command line's decode.temperature
    counts."""
    depths: NonEmpty[Depth] = (1, 2, 3, 4, 5, 6, 8)
    """Draft lengths of chains; those that the drafter cannot draft are left out."""
    nodes: tuple[RowsFromTwo, ...] = (6, 10, 16, 26)
    """Numbers of nodes of trees, including the root: of static trees searched from measured ranks,
    of dynamic ones, and of dartrees (drafters whose one pass gives all depths). Empty: only
    chains."""
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
    """Thresholds to try: chains of the longest length stop where the estimated probability of being
    reached and accepted falls below one."""
    prompts: str = ""
    """Prompts for measuring acceptance, as bench.prompts. Do not use the prompts of the measurement
    that follows. Empty: the validation prompts that were held out of the run's data."""
    domains: tuple[str, ...] = ()
    """Domains to use; empty: all."""
    prompts_per_domain: PositiveInt = 8
    """Maximum number of prompts of each domain."""
    max_new_tokens: TokensFromTwo = 64
    """Maximum length in tokens of the answers on which acceptance and speed are measured."""
    repeats: Repeats = 9
    """Timed calls per point of the cost curves; the median counts."""
    finalists: Repeats = 4
    """Number of drafts that are run, those with the best predictions."""
    rounds: Repeats = 2
    """How often the finalists answer all prompts, alternating with plain decoding."""
    close_rounds: Count = 4
    """Further rounds for the finalists that the first rounds cannot tell from the fastest; 0:
    none."""
    seed: Seed = 0
    """Seed that chooses the prompts and draws the bootstrap samples."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """As bench.dataset, for prompts that are not a prompt file."""
