"""Attention kernels with planted faults, to be run in the kernel's place on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.tree import TokenTree
from inference.kernels.dispatch import Op
from inference.kernels.reference.attention import TREE_ATTENTION


def run_in_its_place(monkeypatch: pytest.MonkeyPatch, attention: Callable[..., Tensor]) -> None:
    """Let targets decode through "the kernel", which is `attention`."""
    pytest.importorskip("triton", reason="`choose` names a kernel only where triton is installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HEADSTART_KERNELS", "triton")
    monkeypatch.setattr(
        Op, "triton", lambda op: attention if op is TREE_ATTENTION else op.reference
    )


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
