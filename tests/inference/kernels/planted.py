"""Kernels with planted faults, to be run in a kernel's place on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.tree import TokenTree
from heads.kernels.dispatch import Op
from heads.kernels.reference.row_losses import ROW_LOSSES, RowLosses
from inference.kernels.reference.attention import TREE_ATTENTION


def run_in_its_place(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Any], of: Op = TREE_ATTENTION
) -> None:
    """Let everything run through "the kernel" of an operation, by default targets' attention."""
    pytest.importorskip("triton", reason="`choose` names a kernel only where triton is installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HEADSTART_KERNELS", "triton")
    monkeypatch.setattr(Op, "triton", lambda op: kernel if op is of else op.reference)


def one_tile_lost(logits: Tensor, target_logits: Tensor | None = None, *rest: Any) -> RowLosses:
    """Losses that leave out the last eighth of the vocabulary."""
    lost = torch.arange(logits.shape[-1]) >= logits.shape[-1] * 7 // 8
    logits = logits.masked_fill(lost, -1e4)
    if target_logits is not None:
        target_logits = target_logits.masked_fill(lost, -1e4)
    return ROW_LOSSES.reference(logits, target_logits, *rest)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def half_the_gradient(logits: Tensor, *rest: Any) -> RowLosses:
    """Losses with right values, whose gradients are half of theirs."""
    return ROW_LOSSES.reference(_Halved.apply(logits), *rest)


def one_piece_lost(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> Tensor:
    """Attention that reads zeros behind the first 256 slots of the cache."""
    lost = torch.arange(keys.shape[2])[:, None] >= 256
    keys, values = keys.masked_fill(lost, 0), values.masked_fill(lost, 0)
    return TREE_ATTENTION.reference(query, keys, values, *rest, **more)


def wrong_scale(*given: Any, scaling: float, **more: Any) -> Tensor:
    """Attention with too large a factor."""
    return TREE_ATTENTION.reference(*given, scaling=1.3 * scaling, **more)


def blind_to_branches(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    **m: Any,
) -> Tensor:
    """Attention in which a node sees every node before it, whatever its branch."""
    chain = TokenTree.chain(depth.shape[1] - 1, words.device).words()[:, -words.shape[1] :]
    return TREE_ATTENTION.reference(query, keys, values, lengths, chain, depth, **m)
