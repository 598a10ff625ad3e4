"""Every family whose attention chooses keys by an indexer: nodes of trees against decoding one token
at a time and against the library's own forward pass, with ties among the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target import indexed
from inference.target.indexed import IndexedCache
from inference.target.loading import INDEXED, TargetConfig
from inference.target.model import TargetModel
from tests.fakes import AlwaysRight, SometimesRight
from tests.heads.recipes import RECIPES
from tests.inference.decoding.test_captured import record, replayed
from tests.inference.decoding.test_lossless import SHAPES, decode, requests, whole
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.decoding.test_no_sync import ALL_SHAPES
from tests.inference.steps import NoHost, step_on_device, under_way
from tests.inference.target.ragged_rows import NEEDS, TREES, Rows, compared
from tests.inference.target.recurrent.test_steps import NEEDS_ATTENTION
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import (
    INDEXED_FAMILIES,
    VOCAB,
    plain_texts,
    random_model,
    random_target,
    save_random_target,
    texts_of,
)

OWN, LIBRARY = 3e-6, 1e-5
"""Largest gap relative to the largest logit: scores are float32 in every dtype."""
MANY_HEADS = 32
"""Heads of an indexer with which no two scores tie at 0, whose order is the library's too."""


def test_every_family_that_is_allowed_is_tested() -> None:
    assert set(INDEXED_FAMILIES) == INDEXED


@pytest.mark.rotated
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_nodes_are_those_of_single_steps(family: str, shape: str) -> None:
    gaps = compared(Rows(random_target(family)), shape).found
    assert max(gaps["own"], gaps["prefill"]) < OWN, gaps


@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_nodes_are_the_librarys_where_scores_do_not_tie(family: str) -> None:
    more: dict[str, Any] = {"index_n_heads": MANY_HEADS}
    rows = Rows(random_target(family, **more), random_model(family, **more))
    gaps = compared(rows, "dynamic").found
    assert gaps["library"] < LIBRARY, gaps


def test_the_index_decides_what_is_seen() -> None:
    """With room for all keys the logits are others."""
    narrow, wide = (random_target("deepseek_v32", index_topk=count) for count in (6, 64))
    tokens = torch.arange(3, 23)[None]
    first, second = (logits_of(target, tokens) for target in (narrow, wide))
    # each of the first six tokens has as many keys at most
    torch.testing.assert_close(first[:, :6], second[:, :6], rtol=0, atol=1e-9)
    assert float((first - second)[:, 6:].abs().max()) > 0.1


def logits_of(target: TargetModel, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1])[None]
    segments = torch.zeros_like(tokens, dtype=torch.int32)
    needs = FeatureSpec(last_hidden=True)
    _, hidden = target.features(tokens, positions, segments, needs)
    assert hidden is not None
    return target.weights.logits(hidden)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "dots3_note_text"])
def test_prompts_read_in_chunks_are_the_same(family: str) -> None:
    gaps = compared(Rows(random_target(family), chunk=4), "static").found
    assert max(gaps["own"], gaps["prefill"]) < OWN, gaps


@pytest.mark.rotated
@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    target = random_target(family)
    one, other = torch.arange(3, 15)[None], torch.arange(40, 57)[None]
    both = torch.cat([one, other], 1)
    positions = torch.cat([torch.arange(12), torch.arange(17)])[None]
    segments = torch.tensor([[0] * 12 + [1] * 17], dtype=torch.int32)
    _, packed = target.features(both, positions, segments, FeatureSpec(last_hidden=True))
    assert packed is not None
    alone = torch.cat([logits_of(target, one), logits_of(target, other)], 1)
    torch.testing.assert_close(target.weights.logits(packed), alone, rtol=0, atol=1e-4)


# Planted faults


def test_ties_by_slot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "LATER", 0.0)
    gaps = compared(Rows(random_target("deepseek_v32")), "static").found
    assert gaps["own"] > 100 * OWN, gaps


def test_indexer_keys_that_stay_behind_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that moves keys and values, and not the indexer's keys."""

    def of_keys_alone(self: IndexedCache, *step: Tensor) -> None:
        before = [part.keys.clone() for part in self.storages.all if part.values.shape[-1] == 0]
        compact(self, *step)
        kept = [part for part in self.storages.all if part.values.shape[-1] == 0]
        for part, keys in zip(kept, before, strict=True):
            part.keys.copy_(keys)

    compact = IndexedCache.compact
    monkeypatch.setattr(IndexedCache, "compact", of_keys_alone)
    gaps = compared(Rows(random_target("glm_moe_dsa")), "static").found
    assert gaps["own"] > 100 * OWN, gaps


def test_a_mask_without_the_tree_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose indexer takes refused branches for text."""
    masks = indexed.masks

    def causal(plan: indexed.AttentionPlan) -> Any:
        found = masks(plan)
        scores = found[indexed.LAYER_TYPE]
        assert scores is not None
        return {**found, indexed.LAYER_TYPE: torch.where(scores.isinf(), 0.0, scores)}

    monkeypatch.setattr("inference.target.model.masks", causal)
    gaps = compared(Rows(random_target("deepseek_v32")), "static").found
    assert gaps["own"] > 100 * OWN, gaps


# Text


@pytest.mark.rotated
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_text_with_drafts_is_the_plain_text(family: str, shape: str) -> None:
    """Four requests in three rows: one row is used twice."""
    target, items = random_target(family), requests(4, new=16)
    plain = plain_texts(items, family)
    for fake in (AlwaysRight, SometimesRight):
        config = DecodeConfig(batch_size=3, **SHAPES[shape])  # type: ignore[arg-type]
        found = decode(target, fake(whole(items, plain), VOCAB), config, items)
        assert {i: c.tokens for i, c in found.items()} == plain


DENSE: dict[str, Any] = {"mlp_layer_types": ["dense"] * 4}
"""No experts: they look at values in the library itself, for every target."""


@pytest.mark.rotated
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_a_recorded_step_asks_for_nothing_and_decodes_other_prompts(shape: str) -> None:
    target = random_target("glm_moe_dsa", **DENSE)
    drafter, items = drafter_of("eagle3", target), requests(5, new=14)
    config = DecodeConfig(temperature=1.0, batch_size=2, **ALL_SHAPES[shape])
    engine = Engine(target, drafter, config, capacity=96)
    engine._kept.lanes = lanes = under_way(target, drafter, config, count=2)
    with NoHost():
        step_on_device(lanes)
    replayed(engine, record(lambda: step_on_device(lanes)))
    found = texts_of(engine, items)
    plain = Engine(random_target("glm_moe_dsa", **DENSE), None, DecodeConfig(temperature=1.0))
    assert found == texts_of(plain, items)


@pytest.mark.slow
def test_a_compiled_step_writes_the_same_text() -> None:
    target, items = random_target("deepseek_v32", **DENSE), requests(4, new=14)
    plain = decode(random_target("deepseek_v32", **DENSE), None, DecodeConfig(batch_size=2), items)
    config = DecodeConfig(batch_size=2, compile=True, **ALL_SHAPES["tree"])
    found = decode(target, drafter_of("eagle3", target), config, items)
    assert {i: c.tokens for i, c in found.items()} == {i: c.tokens for i, c in plain.items()}


@pytest.mark.rotated
@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_drafts_for_an_indexed_target(name: str) -> None:
    """Or says that it needs layers of another sort."""
    target, items = random_target("deepseek_v32"), requests(4, new=10)
    if name in NEEDS_ATTENTION:
        with pytest.raises(UserError, match="layer"):
            drafter_of(name, target)
        return
    config = DecodeConfig(batch_size=3, **ALL_SHAPES["dynamic"])
    found = decode(target, drafter_of(name, target), config, items)
    assert {i: c.tokens for i, c in found.items()} == plain_texts(items, "deepseek_v32")


@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_an_indexed_target_loads(family: str, tmp_path: Path) -> None:
    folder = save_random_target(tmp_path / "target", tiny_tokenizer("chatml"), family)
    target = TargetModel.load(TargetConfig(path=str(folder), device="cpu"))
    assert target.indexed and target.cache_sizes().row == 0


# What a cache holds


@pytest.mark.parametrize("family", INDEXED_FAMILIES)
def test_sizes_are_what_is_allocated(family: str) -> None:
    target = random_target(family)
    sizes, cache = target.cache_sizes(), target.new_cache(3, 20)
    target.prefill(cache, torch.arange(3), torch.full((3, 4), 5), torch.full((3,), 4), NEEDS)
    assert cache.bytes() == 3 * 20 * sizes.slot
    keys = [shape for shape in cache.shapes() if shape is not None and shape.value_size == 0]
    config = target.model.config
    shared = getattr(config, "indexer_types", ["full"] * 4).count("shared")
    assert len(keys) == config.layer_types.count("indexed_attention") - shared
    assert {shape.key_size for shape in keys} == {8}


def test_rows_move_and_narrow_with_the_indexers_keys() -> None:
    rows = Rows(random_target("deepseek_v32"))
    narrow = rows.cache.first_rows(2)
    assert isinstance(narrow, IndexedCache)
    tree, two = TokenTree.chain(2), torch.tensor([[5, 6, 7]] * 2)
    lengths = rows.lengths[:2]
    wanted, _, _ = rows.target.verify(rows.cache, two[[0, 1, 1]], tree, rows.lengths, 13, NEEDS)
    found, _, _ = rows.target.verify(narrow, two, tree, lengths, 9, NEEDS)
    torch.testing.assert_close(found, wanted[:2], rtol=0, atol=1e-5)
    rows.cache.move_row(0, 2)
    moved = torch.tensor([9, 4, 9])
    found, _, _ = rows.target.verify(rows.cache, two[[0, 1, 0]], tree, moved, 9, NEEDS)
    torch.testing.assert_close(found[2], wanted[0], rtol=0, atol=1e-5)


def test_states_between_layers_with_several_streams_are_refused() -> None:
    target = random_target("hy_v4")
    tokens, segments = torch.arange(3, 9)[None], torch.zeros(1, 6, dtype=torch.int32)
    with pytest.raises(UserError, match="several residual streams"):
        target.features(tokens, torch.arange(6)[None], segments, FeatureSpec(taps=(2,)))
