"""What `headstart audit` examines, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError, suggest
from inference.decoding.rules.names import LOSSLESS
from inference.folders import require_folder_name
from inference.target.loading import DTYPES

CHECKS = ("invariance", "processors", "distribution")
SHAPES = ("chain", "tree", "dynamic")


@dataclass(frozen=True)
class AuditConfig:
    """What is audited, and how thoroughly."""

    name: str = "audit"
    """Folder of this audit below <root>/<name>/."""
    drafters: tuple[str, ...] = ()
    """Drafters of this run or checkpoint folders; empty: all that the run has trained, or else a fresh one of
    head=.
    """
    kinds: tuple[str, ...] = ("ngram",)
    """Kinds without weights that are audited beside them."""
    checks: tuple[str, ...] = CHECKS
    """Which of invariance, processors and distribution to run."""
    precisions: tuple[str, ...] = ("float64", "float32", "bfloat16")
    """Formats the target is loaded in, one after another. Processors are checked in the first; float64 must
    be identical.
    """
    shapes: tuple[str, ...] = SHAPES
    """Draft shapes: chain (decode.depth), tree (decode.choices, else audit.choices), dynamic."""
    choices: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))
    """The tree, where decode.choices does not give one."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Temperatures of the invariance check."""
    batch_size: int = 3
    """Rows of the ragged batch; everything is also decoded one row at a time."""
    prompts: int = 4
    """Prompts, spread over the domains."""
    max_new_tokens: int = 48
    """Tokens per answer."""
    rules: tuple[str, ...] = LOSSLESS
    """Acceptance rules of the distribution check: match, rejection, block, specinfer. The others promise nothing that could be
    audited."""
    seeds: int = 1000
    """Answers sampled per distribution."""
    support: int = 4
    """Tokens kept at each position of the distribution check (top-k)."""
    significance: float = 1e-6
    """A distribution less likely than this is a mismatch."""

    def __post_init__(self) -> None:
        require_folder_name("audit.name", self.name)
        allowed = {"checks": CHECKS, "precisions": tuple(DTYPES), "shapes": SHAPES, "rules": LOSSLESS}
        for name, options in allowed.items():
            given = getattr(self, name)
            for item in given:
                if item not in options:
                    raise UserError(f"audit.{name}: '{item}' is unknown.{suggest(item, options)}")
            if not given and name != "rules":
                raise UserError(f"audit.{name} is empty. Allowed: {', '.join(options)}.")
        for name, least in (
            ("prompts", 1),
            ("max_new_tokens", 2),
            ("batch_size", 1),
            ("seeds", 100),
            ("support", 2),
        ):
            if getattr(self, name) < least:
                raise UserError(f"audit.{name} must be at least {least}; given: {getattr(self, name)}.")
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(
                f"audit.temperatures must be numbers of 0 or more; given: {list(self.temperatures)}."
            )
        if not 0 < self.significance < 0.1:
            raise UserError(f"audit.significance must be between 0 and 0.1; given: {self.significance}.")
