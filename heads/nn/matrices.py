"""The roles of weights for optimisers: matrices, tables over the vocabulary, and vectors.

Matrices in the sense of optimisers such as Muon are maps between states, whose singular values are
meaningful. Tables over the vocabulary are not, because each of their rows is learned from one token
alone. Vectors (norms, biases) may be stacked in one weight.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def set_matrix(parameter: Tensor, is_matrix: bool) -> None:
    """Set whether a weight [..., rows, columns] is a matrix (or a stack of them). By default, only
    the weights of `nn.Linear` are."""
    vars(parameter)["is_matrix"] = is_matrix


def is_table(parameter: Tensor) -> bool:
    """Whether `set_matrix` has said that a weight is no matrix."""
    return vars(parameter).get("is_matrix") is False


def set_vectors(parameter: Tensor) -> None:
    """Say that a weight of several dimensions is a stack of vectors."""
    vars(parameter)["holds_vectors"] = True


def holds_vectors(parameter: Tensor) -> bool:
    """Whether a weight is a vector or a stack of vectors."""
    return parameter.ndim < 2 or vars(parameter).get("holds_vectors", False)


def matrices(module: nn.Module) -> Iterator[Tensor]:
    """The module's weights that are matrices."""
    linear = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    for parameter in module.parameters():
        if vars(parameter).get("is_matrix", id(parameter) in linear):
            yield parameter
