"""The gradient of losses on an LM head's logits, computed while the logits are in memory.

A loss per row needs the logits [M, V] again for its gradient. They are too large to keep, and
computing them again costs the LM head's product, the target's logits and the loss a second time.
This can be avoided if no weight after the states is trained, as with the target's own LM head. A
row's loss then depends on that row's state alone, so the gradient of the sum of all losses holds
every row's own gradient [M, H], whatever factor the row's loss gets later. This gradient is kept,
and scaled in the backward pass: three products of the LM head's size in place of five (Liger Kernel
also computes gradients in the forward pass, 2410.10989).

Legend: M rows, K steps, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Judged = tuple[Tensor, ...]
"""Losses [K, M] of states [K, M, H], and further results, without gradient."""


def with_gradient(judge: Callable[[Tensor], Judged], states: Tensor) -> Judged:
    """`judge(states)`, which keeps only the gradient of `states` for the backward pass.

    `judge` must not use a trained weight, and every loss must depend only on its own row of states.
    """
    if not (torch.is_grad_enabled() and states.requires_grad):
        return judge(states)
    return cast(Judged, _GradientNow.apply(states, judge))


class _GradientNow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, judge: Callable[[Tensor], Judged]) -> Judged:
        with torch.enable_grad():
            rows = states.detach().requires_grad_()
            # a view: hooks of modules, such as torch's counter of FLOPs, do not take leaves here
            values, *rest = judge(rows.view_as(rows))
            others = [leaf for leaf in _leaves(values) if leaf is not rows]
            assert not others, "a weight that is trained would get no gradient"
            (slope,) = torch.autograd.grad(values.sum(), rows)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(*rest)
        return values.detach(), *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        scale = grad[..., None]
        # a row that does not count may hold anything
        return torch.where(scale == 0, 0.0, slope * scale).to(slope.dtype), None


def _leaves(values: Tensor) -> list[Tensor]:
    """The tensors that gradients of `values` would reach."""
    found, seen, waiting = [], set(), [values.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        found += [] if variable is None else [variable]
        waiting += [before for before, _ in node.next_functions]
    return found
