"""Which weights are matrices in the sense of optimisers such as Muon: maps between states, whose
singular values mean something. Tables over the vocabulary are none, because a row of theirs is
learned from a token alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def set_matrix(parameter: Tensor, is_matrix: bool) -> None:
    """Say whether a weight [..., rows, columns] is a matrix (or a stack of them), where its module
    does not tell: the weights of `nn.Linear` are by default, no other."""
    vars(parameter)["is_matrix"] = is_matrix


def matrices(module: nn.Module) -> Iterator[Tensor]:
    """The module's weights that are matrices."""
    linear = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    for parameter in module.parameters():
        if vars(parameter).get("is_matrix", id(parameter) in linear):
            yield parameter
