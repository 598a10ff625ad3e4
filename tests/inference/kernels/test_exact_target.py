"""A whole target in exact mode through the kernels, under Triton's interpreter: the same bits for
every number of tokens and of rows of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from heads.kernels.dispatch import Op
from inference.target.model import TargetModel
from tests.heads.kernels.devices import ON_CPU
from tests.inference.kernels.interpreted import products_with_equal_rows
from tests.models import random_target

pytest.importorskip("triton")

PROMPT, NEW = 37, 4
SMALL = {"num_hidden_layers": 2, "intermediate_size": 300, "max_position_embeddings": 64}


def verified(target: TargetModel, width: int, rows: int) -> Tensor:
    """Logits [NEW, V] of tokens behind a prompt, from passes over `width` of them, in the last of
    some rows of different lengths. Only the device knows the lengths, as on a GPU."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 90, (1, PROMPT + NEW), generator=generator).expand(rows, -1)
    cache, needs = target.new_cache(rows, PROMPT + NEW + 1), FeatureSpec()
    lengths = PROMPT - 9 * torch.arange(rows - 1, -1, -1)
    found = []
    target.prefill(cache, torch.arange(rows), tokens[:, :PROMPT], lengths, needs)
    for first in range(PROMPT, PROMPT + NEW, width):
        tree = TokenTree.chain(width - 1)
        given = cache, tokens[:, first : first + width], tree, lengths, None, needs
        found.append(target.verify(*given)[0][-1])
        path, whole = torch.arange(width).expand(rows, -1), torch.full_like(lengths, width)
        cache.commit(tree, lengths, path, whole - 1, whole)
        lengths = lengths + width
    return torch.cat(found)


def watch(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, Any]]) -> None:
    """Note the name of every kernel that runs, and whether its launch is invariant."""
    triton = Op.triton

    def watched(op: Op) -> Callable[..., Any]:
        kernel = triton(op)

        def run(*given: Any, **more: Any) -> Any:
            calls.append((op.name, more.get("invariant")))
            return kernel(*given, **more)

        return run

    monkeypatch.setattr(Op, "triton", watched)


@ON_CPU
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("llama", torch.float16, marks=pytest.mark.slow),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gemma2", torch.float16, marks=pytest.mark.slow),
        pytest.param("gemma2", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_passes_of_any_width_and_batch_give_the_same_bits_through_kernels(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma2: with soft-capping and a window that is shorter than the text."""
    products_with_equal_rows(monkeypatch)
    target, calls = random_target(family, dtype=dtype, **SMALL), list[tuple[str, Any]]()
    monkeypatch.setenv("HEADSTART_KERNELS", "triton")
    watch(monkeypatch, calls)
    with target.computing(True):
        plain = verified(target, 1, 1)
        for width, rows in ((4, 1), (2, 3)):
            assert torch.equal(verified(target, width, rows), plain), (width, rows)
    assert {("row_linear", None), ("tree_attention", True)} <= set(calls)
    assert ("tree_attention", False) not in calls
