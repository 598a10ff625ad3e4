"""Counts the cost of a computation: operations, bytes alive at once, the largest tensor.

A dispatch mode sees every operation below autograd, including backward passes and recomputations,
on real tensors and on fake ones (`torch._subclasses.fake_tensor`), so that a step of any size can
be counted (`train.planning.dry_run`). It does not see the kernels' own memory, or products inside
kernels for which torch has no formula.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def _attention(query: Tensor, key: Tensor, value: Tensor, products: int) -> int:
    """FLOPs of `products` products of [Q, D] with [S, D]; query [B, h, Q, D], key [B, h, S, D]."""
    batch, heads, queries, size = query.shape
    return products * 2 * batch * heads * queries * key.shape[2] * (size + value.shape[3]) // 2


def _own_formulas() -> dict[Any, Any]:
    """Formulas that torch's own table lacks: attention and packed products on the CPU."""
    aten = torch.ops.aten
    found: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, value, *_, **__: _attention(query, key, value, 2)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda _grad, query, key, value, *_, **__: _attention(query, key, value, 5)
        ),
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = lambda states, *_, out_val, **__: (
            2 * out_val.numel() * states.shape[-1]
        )
    return found


class FlopCount(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and attention as they are computed.
    torch's own `FlopCounterMode` keeps tensors alive in cycles, which would change the memory
    measured at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._own = _own_formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = self._own.get(packet) or flop_registry.get(packet)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


class Footprint(FlopCount):
    """Also tracks the memory of tensors created inside. `peak`: most bytes alive at once;
    `largest`: bytes of the largest one, of shape `largest_shape`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.largest_shape: tuple[int, ...] = ()
        self._inside: set[int] = set()
        self._outside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self._meet(value)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self._add(value)
        return out

    def _meet(self, value: Tensor) -> None:
        """Record an argument's storage as older than the count, unless it was created inside."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._inside and key not in self._outside:
            self._outside.add(key)
            weakref.finalize(storage, self._outside.discard, key)

    def _add(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._inside or key in self._outside:
            return
        size = storage.nbytes()
        self._inside.add(key)
        weakref.finalize(storage, self._drop, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if size > self.largest:
            self.largest, self.largest_shape = size, tuple(value.shape)

    def _drop(self, key: int, size: int) -> None:
        self._inside.discard(key)
        self.live -= size
