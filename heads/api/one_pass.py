"""The kinds that can draft a tree that grows from one pass (`DartreeShape`), and the refusal for
all others."""

from __future__ import annotations

from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from heads.api.tree import DartreeShape, DraftShape


def one_pass_kinds() -> list[str]:
    """Names of the kinds whose one pass gives the distributions of all depths
    (`TrainableDrafter.one_pass`). Imports all kinds; those that cannot be imported are left out."""
    found = []
    for name in kind_names():
        try:
            kind = get_kind(name)
        except UserError:
            continue
        if getattr(kind.drafter_class, "one_pass", False):
            found.append(name)
    return found


def refuse_dartree(shape: DraftShape) -> None:
    """Raise `UserError` for a `DartreeShape`; for kinds that do not have the distributions of all
    depths before they draft."""
    if isinstance(shape, DartreeShape):
        raise UserError(
            "decode.shape=dartree grows a tree from the distributions of all depths, which one "
            f"pass of these kinds gives: {', '.join(one_pass_kinds())}. This drafter has none; set "
            "decode.shape=dynamic, tree or chain (for one drafter of a measurement: "
            "measure.drafts={NAME: {shape: dynamic}})."
        )
