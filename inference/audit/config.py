"""The configuration of `headstart audit`: what it examines, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from heads.api.config import (
    NonEmpty,
    PositiveInt,
    Rank,
    Rows,
    RowsFromTwo,
    Temperature,
    TokensFromTwo,
    config,
    require_one_of,
)
from inference.decoding.config import Shape
from inference.decoding.rules.names import LOSSLESS
from inference.folders import require_folder_name
from inference.target.loading import DTYPES

CHECKS = ("invariance", "processors", "distribution")
SHAPES: tuple[Shape, ...] = ("chain", "tree", "dynamic")


@config("audit")
@dataclass(frozen=True)
class AuditConfig:
    """The drafters, checks and sizes of an audit."""

    name: str = "audit"
    """Folder of this audit below <root>/<name>/."""
    drafters: tuple[str, ...] = ()
    """Drafters of this run or checkpoint folders; empty: all trained drafters of the run, or an
    untrained one of head= if there are none."""
    kinds: tuple[str, ...] = ("ngram",)
    """Kinds without weights to audit as well."""
    checks: NonEmpty[str] = CHECKS
    """Checks to run: invariance, processors, distribution."""
    precisions: NonEmpty[str] = ("float64", "float32", "bfloat16")
    """Number formats of the target, one after the other; float64 must be identical. Processors:
    only in the first."""
    shapes: NonEmpty[Shape] = SHAPES
    """Draft shapes: chain (decode.depth), tree (decode.choices, else audit.choices), dynamic; also
    dartree, for the drafters that support it."""
    choices: tuple[tuple[Rank, ...], ...] = (
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 0, 0),
        (0, 1, 0),
    )
    """Paths of the tree if decode.choices gives none."""
    temperatures: NonEmpty[Temperature] = (0.0, 1.0)
    """Temperatures of the invariance check."""
    batch_size: Rows = 3
    """Rows of the ragged batch; everything is also decoded one row at a time."""
    prompts: PositiveInt = 4
    """Number of prompts, spread over the domains."""
    max_new_tokens: TokensFromTwo = 48
    """Tokens per answer."""
    rules: tuple[str, ...] = LOSSLESS
    """Acceptance rules of the distribution check; only lossless ones guarantee a distribution."""
    seeds: Annotated[int, Ge(100), Le(1_000_000_000)] = 1000
    """Answers sampled per distribution."""
    support: RowsFromTwo = 4
    """Tokens kept at each position of the distribution check (top-k)."""
    significance: Annotated[float, Gt(0), Lt(0.1)] = 1e-6
    """A distribution with a smaller p-value than this is a mismatch."""

    def __post_init__(self) -> None:
        require_folder_name("audit.name", self.name)
        allowed = {
            "checks": CHECKS,
            "precisions": tuple(DTYPES),
            "shapes": (*SHAPES, "dartree"),
            "rules": LOSSLESS,
        }
        for name, options in allowed.items():
            for item in getattr(self, name):
                require_one_of(f"audit.{name}:", item, options)
