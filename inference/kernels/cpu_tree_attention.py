"""Tree attention inside compiled steps on CPUs: an operation that is one C++ function.

Reference: `inference.kernels.reference.attention.tree_attention`. torch's attention reads every
slot of its mask, so a compiled step, whose shapes are fixed, would read the whole cache even for
the shortest text. This operation reads the lengths and then only the committed slots, and needs no
mask. Only float32 is supported.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from inference.kernels.cpp_operations import call_in_cpp
from inference.kernels.reference import attention

SOURCE = Path(__file__).with_name("tree_attention.h")


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    at: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """`inference.kernels.reference.attention.tree_attention` as one operation of a trace.
    invariant: ignored, as it always computes query by query."""
    arguments = query, keys, values, lengths, words, depth, depth if at is None else at
    return _operation(*arguments, scaling, window or 0, softcap or 0.0, sinks)


@torch.library.custom_op("headstart::tree_attention", mutates_args=())
def _operation(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    at: Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    arguments = query, keys, values, lengths, words, depth
    limits = {"window": window or None, "softcap": softcap or None, "sinks": sinks, "at": at}
    return attention.tree_attention(*arguments, scaling=scaling, **limits)  # type: ignore[arg-type]


@_operation.register_fake
def _shape(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    batch, heads, queries, _size = query.shape
    return query.new_empty(batch, queries, heads, values.shape[3])


call_in_cpp(
    _operation,
    SOURCE,
    "AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, "
    "AtenTensorHandle lengths, AtenTensorHandle words, AtenTensorHandle depth, "
    "AtenTensorHandle at, double scaling, int64_t window, double softcap, AtenTensorHandle* sinks",
)
