"""The rules by name."""

from __future__ import annotations

from heads.api.errors import UserError, suggest
from heads.api.tree import DraftShape
from inference.decoding.rules.base import Rule
from inference.decoding.rules.block import BlockVerification
from inference.decoding.rules.match import Match
from inference.decoding.rules.names import CHAINS_ONLY, RULES
from inference.decoding.rules.rejection import Rejection
from inference.decoding.rules.specinfer import SpecInfer
from inference.decoding.rules.typical import Typical

__all__ = ["CHAINS_ONLY", "RULES", "check_shape", "get_rule"]


def get_rule(
    name: str,
    shape: DraftShape,
    *,
    share_noise: bool = True,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Rule:
    """The rule `name` for drafts of `shape` (on the decoding device).

    share_noise: `match` alone, see `Match`. epsilon, delta: `typical` alone, see `Typical`. Raises
    `UserError` for an unknown name, with a suggestion, and for a shape that the rule cannot judge.
    """
    check_shape(name, shape)
    if name == "match":
        return Match(share_noise)
    if name == "rejection":
        return Rejection()
    if name == "block":
        return BlockVerification()
    if name == "specinfer":
        return SpecInfer(shape)
    return Typical(epsilon, delta)


def check_shape(name: str, shape: DraftShape) -> None:
    """Raise `UserError` unless rule `name` exists and can judge drafts of `shape`."""
    if name not in RULES:
        raise UserError(f"decode.rule '{name}' is unknown.{suggest(name, RULES)}")
    if name in CHAINS_ONLY and not shape.is_chain:
        raise UserError(
            f"decode.rule '{name}' weighs one draft after another and needs a chain; given: a "
            f"tree of {shape.num_nodes} nodes. Set decode.shape=chain, or verify the tree with "
            "match, specinfer or typical."
        )
