"""Linear layers with weights packed for small batches, on CPUs.

Decoding multiplies a few rows (1 for plain decoding, the tree's nodes for verification) with every
weight. torch's default path can be slow for this: with a [2048, 2048] float32 weight read from
memory, one core of a Xeon multiplies 10 rows in 5.5 ms with `F.linear` and in 2.1 ms with a
oneDNN-packed weight. Packing copies the weight once. Reference: `F.linear`.

A packed product costs some 40 us more per call there. So on Intel CPUs, where the library behind
`F.linear` (MKL) has specialised kernels, small weights and one or two rows use `F.linear` ([512,
256], 1 row: 77 us against 115 us; [256, 256]: 38 us against 77 us). On AMD CPUs with AVX-512,
everything is packed: two cores of an EPYC multiply 5 rows with [864, 256] in 38 us with `F.linear`
and in 18 us packed. Without AVX-512, MKL is faster on AMD CPUs too for one row and for small
weights (one core of an EPYC, [2048, 2048]: 1 row 1.1 ms against 1.6 ms packed, 4 rows 2.6 ms
against 1.7 ms; [256, 256], 4 rows: 59 us against 79 us).

On other devices, in other dtypes, for more rows than decoding has, under autocast, when gradients
are recorded or while torch.compile traces, the plain path runs. A weight that was changed in place
is packed again at the next product (`TargetModel.follow`). Modules that train are packed only while
they decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.cpu import is_intel

MAX_ROWS = 64
"""Above this many rows the plain path is as fast."""


class Limits(NamedTuple):
    """Fewest rows and elements of the weight for which a float32 product is packed. Below these,
    MKL's kernels are faster (see the module)."""

    rows: int
    elements: int


EVERYTHING, INTEL, NO_AVX512 = Limits(1, 0), Limits(3, 1 << 19), Limits(2, 1 << 17)


def supported() -> bool:
    """Whether this build of torch has the packed operation for the CPU."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def limits() -> Limits:
    """The limits of this CPU."""
    if not torch.backends.mkl.is_available():
        return EVERYTHING
    if is_intel():
        return INTEL
    return NO_AVX512 if torch.backends.cpu.get_cpu_capability() == "AVX2" else EVERYTHING


def pack_linears(module: nn.Module) -> None:
    """Give every eligible `nn.Linear` a packed path; for weights that seldom change."""
    for linear in _eligible(module):
        linear.forward = _packed_forward(linear)  # type: ignore[method-assign]


@contextmanager
def packed_linears(module: Any) -> Iterator[None]:
    """Pack the linears of `module` within the block; a value that is not a module is ignored."""
    chosen = list(_eligible(module)) if isinstance(module, nn.Module) else []
    for linear in chosen:
        linear.forward = _packed_forward(linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in chosen:
            del linear.forward


@contextmanager
def unpacked_linears(module: Any) -> Iterator[None]:
    """Remove the packed paths of `module` within the block, for tracing."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    linears = [p for p in parts if type(p) is nn.Linear and "forward" in p.__dict__]
    packed = [(part, part.__dict__.pop("forward")) for part in linears]
    try:
        yield
    finally:
        for part, forward in packed:
            part.__dict__["forward"] = forward


def _eligible(module: nn.Module) -> Iterator[nn.Linear]:
    if not supported():
        return
    for part in module.modules():
        # subclasses may have a different forward
        if type(part) is not nn.Linear or "forward" in part.__dict__:
            continue
        if type(part.weight) is not nn.Parameter:
            continue  # quantised weights and slices of a split model have their own product
        if part.weight.shape != (part.out_features, part.in_features):
            continue  # divided among processes: the whole weight exists only while it runs
        if part.weight.dtype == torch.float32 and part.weight.numel() < limits().elements:
            continue
        if part.weight.device.type == "cpu" and packs(part.weight.dtype):
            yield part


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this CPU: bfloat16 needs AVX-512 or more."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _packed_forward(linear: nn.Linear) -> Any:
    """A replacement of `linear.forward`: x [..., in] -> [..., out]."""
    weight, bias = linear.weight, linear.bias
    packed, version = _packed(weight)
    in_features, dtype = linear.in_features, weight.dtype
    fewest = limits().rows if dtype == torch.float32 else 1

    def forward(x: Tensor) -> Tensor:
        nonlocal packed, version
        if torch.compiler.is_compiling():  # a graph has no packed weights and knows no versions
            return F.linear(x, weight, bias)
        fits = fewest <= x.numel() // in_features <= MAX_ROWS and x.dtype == dtype
        if not fits or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, weight, bias)
        if weight._version != version:
            packed, version = _packed(weight)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""))

    return forward


def _packed(weight: Tensor) -> tuple[Tensor, int]:
    """A copy in oneDNN's layout, and the version of the copied weight."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
    return cast(Tensor, packed), weight._version
