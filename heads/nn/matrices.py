"""The weights that are matrices in the sense of optimisers such as Muon: maps between states, whose
singular values are meaningful. Tables over the vocabulary are not, because each of their rows is
learned from one token alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def set_matrix(parameter: Tensor, is_matrix: bool) -> None:
    """Set whether a weight [..., rows, columns] is a matrix (or a stack of them). By default, only
    the weights of `nn.Linear` are."""
    vars(parameter)["is_matrix"] = is_matrix


def matrices(module: nn.Module) -> Iterator[Tensor]:
    """The module's weights that are matrices."""
    linear = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    for parameter in module.parameters():
        if vars(parameter).get("is_matrix", id(parameter) in linear):
            yield parameter
