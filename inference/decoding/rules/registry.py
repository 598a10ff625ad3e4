"""The rules by name: rule `x` is module `x` of this package and has a function `make`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from heads.api.errors import UserError, suggest
from heads.api.tree import DraftShape
from inference.decoding.rules.base import Rule, RuleOptions
from inference.decoding.rules.names import CHAINS_ONLY, RULES


def get_rule(name: str, shape: DraftShape, **options: Any) -> Rule:
    """The rule `name` for drafts of `shape` (on the decoding device). options: see `RuleOptions`.

    Raises `UserError` for an unknown name, with a suggestion, and for a shape that the rule cannot
    judge.
    """
    check_shape(name, shape)
    module: Any = import_module(f"inference.decoding.rules.{name}")
    return module.make(shape, RuleOptions(**options))


def check_shape(name: str, shape: DraftShape) -> None:
    """Raise `UserError` unless rule `name` exists and can judge drafts of `shape`."""
    if name not in RULES:
        raise UserError(f"decode.rule '{name}' is unknown.{suggest(name, RULES)}")
    if name in CHAINS_ONLY and not shape.is_chain:
        raise UserError(
            f"decode.rule '{name}' weighs one draft after another and needs a chain; given: a "
            f"tree of {shape.num_nodes} nodes. Set decode.shape=chain, or verify the tree with "
            "match, specinfer, traversal or typical."
        )
