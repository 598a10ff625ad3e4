"""The cache: storages shared by equal layers, the ways of writing it, and the move that commits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.target.kv_cache import KVCache, LayerShape
from tests.inference.steps import NoHost
from tests.models import random_target

Sizes = tuple[int, int, int]  # heads, key size, value size
ALIKE: list[Sizes | None] = [(2, 4, 4)] * 3
MIXED: list[Sizes | None] = [
    (2, 4, 4),
    (1, 8, 8),
    None,
    (2, 4, 4),
    (2, 4, 6),
    (1, 8, 8),
]  # None: a layer without keys
ROWS, CAPACITY = 3, 12


def states(sizes: Sizes, rows: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Fresh keys and values [R, h, T, C], [R, h, T, E] as a model's layer gives them."""
    torch.manual_seed(seed)
    heads, key, value = sizes
    return torch.randn(rows, heads, tokens, key), torch.randn(rows, heads, tokens, value)


def run(cache: KVCache, layers: list[Sizes | None], rows: int, tokens: int, seed: int) -> list[Any]:
    """One forward pass: what every layer with keys is given to attend to."""
    return [
        cache.layers[i].update(*states(sizes, rows, tokens, seed + i))
        for i, sizes in enumerate(layers)
        if sizes is not None
    ]


def prefilled(layers: list[Sizes | None], shapes: Any = None) -> KVCache:
    """A cache whose rows have 6 committed slots."""
    cache = KVCache(len(layers), ROWS, CAPACITY, shapes)
    cache.writer.rows = torch.arange(ROWS)
    run(cache, layers, ROWS, 6, seed=0)
    return cache


def contents(cache: KVCache) -> list[Tensor]:
    return [t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)]


# Storages


@pytest.mark.parametrize(("layers", "groups"), [(ALIKE, [3]), (MIXED, [2, 2, 1])])
def test_told_shapes_put_equal_layers_into_one_storage(
    layers: list[Sizes | None], groups: list[int]
) -> None:
    first = prefilled(layers)
    shown = [sizes for sizes in layers if sizes is not None]
    assert [s.keys.shape[0] for s in first.storages.all] == [1] * len(shown)
    told = prefilled(layers, first.shapes())
    assert sorted(s.keys.shape[0] for s in told.storages.all) == sorted(groups)
    assert told.shapes() == first.shapes()
    assert [shape is None for shape in told.shapes()] == [sizes is None for sizes in layers]
    exact = sum(heads * (key + value) for heads, key, value in shown) * ROWS * CAPACITY * 4
    assert first.bytes() == told.bytes() == exact
    for one, other in zip(contents(first), contents(told), strict=True):
        assert torch.equal(one, other) and one.any()
    # no two layers lie in the same place, and every layer lies in a storage
    starts = {t.data_ptr() for t in contents(told)}
    assert len(starts) == 2 * len(shown)
    ends = [
        (s.data_ptr(), s.data_ptr() + s.numel() * 4)
        for group in told.storages.all
        for s in (group.keys, group.values)
    ]
    assert all(any(low <= start < high for low, high in ends) for start in starts)


def test_layers_that_differ_from_what_was_told_get_their_own_storage() -> None:
    """Another dtype, and heads that tensor parallelism took away."""
    told = prefilled(ALIKE).shapes()
    cache = KVCache(3, ROWS, CAPACITY, told)
    cache.writer.rows = torch.arange(ROWS)
    cache.layers[0].update(*states((2, 4, 4), ROWS, 6, 0))
    cache.layers[1].update(*states((1, 4, 4), ROWS, 6, 1))
    cache.layers[2].update(*(t.double() for t in states((2, 4, 4), ROWS, 6, 2)))
    assert [tuple(s.keys.shape[:3]) for s in cache.storages.all] == [
        (3, ROWS, 2),
        (1, ROWS, 1),
        (1, ROWS, 2),
    ]
    assert cache.shapes()[1] == LayerShape(1, 4, 4, torch.float32, torch.device("cpu"))
    assert cache.layers[2].keys.dtype == torch.float64


def test_nothing_is_allocated_before_keys_are_seen_and_all_is_freed_at_once() -> None:
    cache = KVCache(3, ROWS, CAPACITY)
    assert cache.bytes() == 0 and cache.shapes() == (None, None, None)
    cache = prefilled(ALIKE, prefilled(ALIKE).shapes())
    storage = weakref.ref(cache.storages.all[0].keys)
    gc.disable()
    try:
        del cache
        assert storage() is None, (
            "a reference cycle would keep a GPU's memory until the next collection"
        )
    finally:
        gc.enable()


# Writing


def test_prefill_in_chunks_leaves_what_one_pass_leaves() -> None:
    whole, parts = KVCache(2, ROWS, CAPACITY), KVCache(2, ROWS, CAPACITY)
    rows = torch.tensor([2, 0])
    keys, values = states((2, 4, 6), 2, 9, seed=5)
    whole.writer.rows = parts.writer.rows = rows
    returned = whole.layers[1].update(keys, values)
    assert returned[0] is keys and returned[1] is values
    for first, stop in ((0, 4), (4, 8), (8, 9)):
        parts.writer.offset = first
        got = parts.layers[1].update(keys[:, :, first:stop], values[:, :, first:stop])
        assert torch.equal(got[0], keys[:, :, :stop]) and torch.equal(got[1], values[:, :, :stop])
    assert torch.equal(whole.layers[1].keys, parts.layers[1].keys)
    assert torch.equal(whole.layers[1].values, parts.layers[1].values)
    assert not parts.layers[1].keys[1].any(), "the other row is untouched"


def test_slots_known_to_the_device_alone_are_written_like_those_known_to_the_host() -> None:
    host, device = KVCache(1, 1, CAPACITY), KVCache(1, 1, CAPACITY)
    for cache in (host, device):
        cache.writer.rows = torch.arange(1)
        cache.layers[0].update(*states((2, 4, 4), 1, 6, 0))
        cache.writer.mode, cache.writer.bound = "verify", 10
    host.writer.start = 6
    device.writer.slots = torch.arange(6, 10)[None]
    fresh = states((2, 4, 4), 1, 4, 9)
    expected = host.layers[0].update(*fresh)
    with NoHost():
        found = device.layers[0].update(*fresh)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(found[0][:, :, 6:], fresh[0]) and found[0].shape[2] == 10


# Committing


@pytest.mark.parametrize("layers", [ALIKE, MIXED])
@pytest.mark.parametrize("counted", [True, False])
def test_a_move_is_the_same_however_layers_are_stored(
    layers: list[Sizes | None], counted: bool
) -> None:
    apart = prefilled(layers)
    together = prefilled(layers, apart.shapes())
    lengths, path = torch.tensor([2, 0, 1]), torch.tensor([[0, 2, 3], [0, 1, 4], [0, 3, 4]])
    accepted = torch.tensor([2, 1, 0]) if counted else None
    before = [t.clone() for t in contents(together)]
    for cache in (apart, together):
        with NoHost():
            cache.compact(lengths, path, accepted)
    for found, other, old in zip(contents(together), contents(apart), before, strict=True):
        assert torch.equal(found, other)
        expected = old.clone()
        for row in range(ROWS):
            for place in range((int(accepted[row]) if accepted is not None else 2) + 1):
                expected[row, :, int(lengths[row]) + place] = old[
                    row, :, int(lengths[row]) + int(path[row, place])
                ]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_decodes_the_same_from_shared_storages(family: str) -> None:
    """Prefill, a tree, its move, and another tree: logits of both caches are equal."""
    target = random_target(family)
    tree = TokenTree.from_choices([[0], [1], [1, 0], [1, 1], [1, 1, 0]])
    prompt, lengths = torch.randint(3, 90, (2, 7)), torch.tensor([7, 5])
    drafts = [torch.randint(3, 90, (2, tree.num_nodes)) for _ in range(2)]
    path, accepted = torch.tensor([[0, 2, 4, 5], [0, 2, 0, 0]]), torch.tensor([3, 1])

    def decode(cache: KVCache) -> list[Tensor]:
        needs = FeatureSpec()
        logits = [target.prefill(cache, torch.arange(2), prompt, lengths, needs)[0]]
        logits.append(target.verify(cache, drafts[0], tree, lengths, 7, needs)[0])
        cache.compact(lengths, path, accepted)
        logits.append(target.verify(cache, drafts[1], tree, lengths + accepted + 1, 11, needs)[0])
        return logits

    apart = KVCache(target.info.num_layers, 2, 24)
    expected = decode(apart)
    together = KVCache(target.info.num_layers, 2, 24, apart.shapes())
    assert all(torch.equal(a, b) for a, b in zip(decode(together), expected, strict=True))
    assert len(together.storages.all) == 1 and len(apart.storages.all) == target.info.num_layers
    assert together.bytes() == apart.bytes()
