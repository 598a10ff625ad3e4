"""Tree attention inside compiled steps on CPUs: an operation that inductor calls as a C++ function.

Meaning: `inference.kernels.reference.attention.tree_attention`. torch's own attention reads every
slot that its mask speaks of, so a compiled step, whose shapes are fixed, would read the whole cache
for the shortest text. This one reads the lengths and then only what is committed, and needs no
mask.

The operation exists for tracing, where it runs the reference; `in_cpp` lets inductor put
tree_attention.h into the code that it generates, and call it. float32 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from inference.kernels.reference import attention

SOURCE = Path(__file__).with_name("tree_attention.h")
_ARGUMENTS = """AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values,
    AtenTensorHandle lengths, AtenTensorHandle words, AtenTensorHandle depth, double scaling,
    int64_t window, double softcap, AtenTensorHandle* sinks, AtenTensorHandle* out"""
# The name is inductor's for the operation on a CPU. It puts `extern` before and a semicolon behind,
# and all of it between the braces of an `extern "C"`.
_FUNCTION = f"""AOTITorchError aoti_torch_cpu_tree_attention({_ARGUMENTS});
}}
%s
extern "C" {{
__attribute__((visibility("hidden")))
AOTITorchError aoti_torch_cpu_tree_attention({_ARGUMENTS}) {{
  *out = headstart::tree_attention(query, keys, values, lengths, words, depth, scaling, window,
                                   softcap, sinks);
  return AOTI_TORCH_SUCCESS;
}}
"""


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
) -> Tensor:
    """As `inference.kernels.reference.attention.tree_attention`, as one operation of a trace."""
    arguments = query, keys, values, lengths, words, depth
    return _operation(*arguments, scaling, window or 0, softcap or 0.0, sinks)


@torch.library.custom_op("headstart::tree_attention", mutates_args=())
def _operation(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    arguments = query, keys, values, lengths, words, depth
    limits = {"window": window or None, "softcap": softcap or None, "sinks": sinks}
    return attention.tree_attention(*arguments, scaling=scaling, **limits)  # type: ignore[arg-type]


@_operation.register_fake
def _shape(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    batch, heads, nodes, _size = query.shape
    return query.new_empty(batch, nodes, heads, values.shape[3])


@contextmanager
def in_cpp() -> Iterator[None]:
    """Let what inductor compiles within the block call the C++ function."""
    import torch._inductor.config as inductor_config  # seconds to import

    known = inductor_config.aot_inductor.custom_ops_to_c_shims
    operation = torch.ops.headstart.tree_attention.default
    with inductor_config.patch(
        {"aot_inductor.custom_ops_to_c_shims": {**known, operation: [_source()]}}
    ):
        yield


@cache
def _source() -> str:
    return _FUNCTION % SOURCE.read_text()
