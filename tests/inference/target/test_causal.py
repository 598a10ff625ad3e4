"""Causal attention in blocks against one softmax over a whole mask, and what it holds in memory."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.api.features import FeatureSpec
from heads.nn.packing import documents
from inference.target import causal
from inference.target.attention import _written_out
from inference.target.causal import Sight, causal_attention, packed_attention
from tests.models import random_target

HEADS, GROUPS, SIZE = 2, 3, 8
SIGHTS = [Sight(), Sight(window=5), Sight(chunk=6), Sight(window=4, chunk=6), Sight(window=100)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slow(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, begin: int, softcap: Any, sinks: Any
) -> Tensor:
    """Query by query and head by head, over the keys that it sees."""
    batch, heads, nodes, size = query.shape
    behind = key.shape[2] - nodes
    out = torch.empty(batch, nodes, heads, value.shape[-1], dtype=query.dtype)
    for row in range(batch):
        for head in range(heads):
            for node in range(nodes):
                own = begin + behind + node
                sees = [
                    place
                    for place in range(behind + node + 1)
                    if (sight.window is None or begin + place > own - sight.window)
                    and (
                        sight.chunk is None or (begin + place) // sight.chunk == own // sight.chunk
                    )
                ]
                keys = key[row, head // GROUPS, sees]
                scores = keys @ query[row, head, node] * size**-0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                weights = scores.softmax(0)[: len(sees)]
                out[row, node, head] = weights @ value[row, head // GROUPS, sees]
    return out


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(
    ("nodes", "keys", "begin"), [(17, 17, 0), (17, 17, 3), (7, 20, 0), (1, 9, 2)]
)
def test_blocks_are_one_softmax(
    monkeypatch: pytest.MonkeyPatch, nodes: int, keys: int, begin: int, sight: Sight, shaped: bool
) -> None:
    monkeypatch.setattr(causal, "BLOCK", 4)
    query, key = draw(2, HEADS * GROUPS, nodes, SIZE), draw(2, HEADS, keys, SIZE, seed=1)
    value, sinks = draw(2, HEADS, keys, 5, seed=2), draw(HEADS * GROUPS, seed=3)
    softcap, given = (3.0, sinks) if shaped else (None, None)
    attend = None
    if shaped:
        attend = partial(_written_out, scaling=None, softcap=3.0, sinks=sinks, groups=GROUPS)
    found = causal_attention(query, key, value, sight, attend, begin)
    torch.testing.assert_close(found, slow(query, key, value, sight, begin, softcap, given))


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("nodes", "keys"), [(17, 17), (7, 20), (1, 9)])
def test_a_gpu_reads_the_later_part_of_a_prompt_without_a_mask(
    monkeypatch: pytest.MonkeyPatch, nodes: int, keys: int, sight: Sight, shaped: bool
) -> None:
    """Where every earlier position is seen and flash attention runs, which is pretended here; a CPU
    computes its causal bias by a mask. Keys and values are given once, not once per query head."""
    asked: list[tuple[Any, bool, int]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        kind = type(more.get("attn_mask"))
        asked.append((kind, more.get("is_causal", False), key.shape[1]))
        return attention(query, key, value, **more)

    monkeypatch.setattr(causal, "BLOCK", 4)
    monkeypatch.setattr(causal, "_is_fused", lambda *_: True)
    monkeypatch.setattr(causal, "scaled_dot_product_attention", noted)
    query, key = draw(2, HEADS * GROUPS, nodes, SIZE), draw(2, HEADS, keys, SIZE, seed=1)
    value = draw(2, HEADS, keys, SIZE, seed=2)
    attend = None
    if shaped:
        attend = partial(_written_out, scaling=None, softcap=3.0, sinks=None, groups=GROUPS)
    found = causal_attention(query, key, value, sight, attend)
    torch.testing.assert_close(
        found, slow(query, key, value, sight, 0, 3.0 if shaped else None, None)
    )
    plain = sight == Sight() or sight.window == 100 or keys <= (sight.window or sight.chunk or 0)
    if shaped:
        assert not asked
    elif plain:
        kind = type(None) if nodes == keys else CausalBias
        assert asked == [(kind, nodes == keys, HEADS)]
    else:
        assert asked == [(Tensor, False, HEADS)] * -(-nodes // 4)


def test_only_flash_attention_on_a_gpu_goes_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(given: Any) -> bool:
        asked.append(given)
        return len(asked) > 1

    monkeypatch.setattr(causal, "SDPAParams", lambda *given: given)
    monkeypatch.setattr(causal, "can_use_flash_attention", answer)
    query, key = (
        SimpleNamespace(device=torch.device("cuda"), shape=(1, heads, 4, 8)) for heads in (6, 2)
    )
    assert [causal._is_fused(query, key, key), causal._is_fused(query, query, query)] == [0, 1]  # type: ignore[arg-type]
    assert [given[3:] for given in asked] == [
        (None, 0.0, False, shared) for shared in (True, False)
    ]
    cpu = torch.zeros(1, 2, 4, 8)
    assert not causal._is_fused(cpu, cpu, cpu) and len(asked) == 2


@pytest.mark.parametrize("sight", [Sight(), Sight(window=3), Sight(chunk=4)])
def test_documents_of_packed_rows_do_not_see_each_other(
    monkeypatch: pytest.MonkeyPatch, sight: Sight
) -> None:
    monkeypatch.setattr(causal, "BLOCK", 4)
    segments = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 3, 0, 0], [4, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 2, 3, 0, 0, 1], [7, *range(9)]])
    lying = documents(segments, positions)
    query, key = draw(2, HEADS * GROUPS, 10, SIZE), draw(2, HEADS, 10, SIZE, seed=1)
    value = draw(2, HEADS, 10, 5, seed=2)
    found = packed_attention(query, key, value, sight, None, lying)
    for one in lying:
        at = slice(one.row, one.row + 1), slice(None), slice(one.first, one.end)
        alone = slow(query[at], key[at], value[at], sight, one.begin, None, None)
        torch.testing.assert_close(found[at[0], at[2]], alone)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(out) if isinstance(value, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_memory_of_packed_rows_grows_with_their_length(family: str) -> None:
    """Twice as long rows of documents of the same length hold twice as much; a mask over a row
    would hold four times as much."""
    target = random_target(family, max_position_embeddings=4096, num_hidden_layers=2)
    needs, largest = FeatureSpec(last_hidden=True), []
    for length in (1024, 2048):
        places = torch.arange(length)[None]
        segments, positions = (places // 300 + 1).int(), places % 300
        with Largest() as seen:
            target.features(places % 90, positions, segments, needs)
        largest.append(seen.elements)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] < 2048 * 2048 / 4
