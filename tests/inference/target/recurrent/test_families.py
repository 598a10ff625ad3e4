"""Every family with recurrent layers: nodes of trees and committed states against decoding one
token at a time, and against the library's own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.target.recurrent.states as states_module
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.target.loading import RECURRENT
from inference.target.recurrent.cache import RecurrentCache
from inference.target.recurrent.passes import PromptPass
from inference.target.recurrent.states import Kind, inputs_along_paths
from tests.fakes import AlwaysRight, SometimesRight
from tests.inference.decoding.test_lossless import SHAPES, decode, requests, whole
from tests.inference.target.ragged_rows import (
    NEEDS,
    TREES,
    Rows,
    chain,
    compared,
    random_tree,
    states_of,
)
from tests.models import RECURRENT_FAMILIES, VOCAB, plain_texts, random_model, random_target

OWN, LIBRARY = 1e-6, 2e-4
"""Largest gap relative to the largest logit or state. The library's norms and gates round to
float32 inside, its scans compute in it."""


OWN_CODE = ("minimax", "recurrent_gemma", "zaya")
"""Families whose mixers are code of their own, which is replaced class by class."""


def rows_of(family: str, chunk: int = 0, library: bool = True) -> Rows:
    model = random_model(family, recurrent=True) if library else None
    return Rows(random_target(family, recurrent=True), model, chunk)


def test_every_family_that_is_allowed_is_tested() -> None:
    assert set(RECURRENT_FAMILIES) >= RECURRENT


@pytest.mark.rotated
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_nodes_and_committed_states_are_those_of_single_steps(family: str, shape: str) -> None:
    gaps = compared(rows_of(family), shape).found
    assert max(gaps["own"], gaps["state"], gaps["prefill"]) < OWN, gaps
    assert gaps["library"] < LIBRARY, gaps


@pytest.mark.parametrize(
    "family", ["qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2", *OWN_CODE]
)
def test_prompts_read_in_chunks_leave_the_same_states(family: str) -> None:
    gaps = compared(rows_of(family, chunk=4), "static").found
    # the library's scans round to float32 where a chunk ends
    assert max(gaps["own"], gaps["state"], gaps["prefill"]) < 10 * OWN, gaps


# Planted faults


@contextmanager
def everything_committed() -> Iterator[None]:
    """Refused nodes stay in the states, as if nothing had been taken back."""
    of = states_module._End.of

    def all_nodes(tree: TokenTree, node: Tensor) -> Any:
        return of(tree, torch.full_like(node, tree.num_nodes - 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states_module._End, "of", all_nodes)
        yield


@contextmanager
def window_one_place_off() -> Iterator[None]:
    def shifted(tree: TokenTree, width: int) -> Tensor:
        return (inputs_along_paths(tree, width) - 1).clamp(min=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states_module, "inputs_along_paths", shifted)
        yield


@contextmanager
def padding_that_counts() -> Iterator[None]:
    initialised = PromptPass.__post_init__

    def all_valid(self: PromptPass) -> None:
        self.valid = torch.ones_like(self.valid)
        initialised(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptPass, "__post_init__", all_valid)
        yield


@pytest.mark.parametrize(
    ("fault", "families"),
    [
        (
            everything_committed,
            ("qwen3_5_text", "kimi_linear", "mamba2", "jamba", "lfm2", *OWN_CODE),
        ),
        (window_one_place_off, ("qwen3_5_text", "lfm2", "recurrent_gemma", "zaya")),
        (
            padding_that_counts,
            ("qwen3_5_text", "kimi_linear", "mamba2", "mamba", "lfm2", *OWN_CODE),
        ),
    ],
)
def test_a_planted_fault_shows(fault: Any, families: tuple[str, ...]) -> None:
    for family in families:
        with fault():
            gaps = compared(rows_of(family, library=False), "static").found
        assert max(gaps["own"], gaps["state"]) > 100 * OWN, (family, gaps)


# Text


@pytest.mark.rotated
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_text_with_drafts_is_the_plain_text(family: str, shape: str) -> None:
    """Four requests in three rows: one row is used twice."""
    target, items = random_target(family, recurrent=True), requests(4, new=16)
    plain = plain_texts(items, family, recurrent=True)
    for fake in (AlwaysRight, SometimesRight):
        config = DecodeConfig(batch_size=3, **SHAPES[shape])  # type: ignore[arg-type]
        found = decode(target, fake(whole(items, plain), VOCAB), config, items)
        assert {i: c.tokens for i, c in found.items()} == plain
    passes = sum(len(c.passes) for c in found.values())
    assert passes < sum(len(tokens) - 1 for tokens in plain.values())


# What a cache holds


@pytest.mark.rotated
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_sizes_are_what_is_allocated(family: str) -> None:
    target = random_target(family, recurrent=True)
    sizes = target.cache_sizes()
    cache = target.new_cache(3, 20)
    target.prefill(cache, torch.arange(3), torch.full((3, 4), 5), torch.full((3,), 4), NEEDS)
    assert cache.bytes() == 3 * (20 * sizes.slot + sizes.row)
    tree = random_tree(3)(torch.Generator().manual_seed(2))
    target.verify(cache, torch.full((3, 14), 7), tree, torch.full((3,), 4), 4, NEEDS)
    assert isinstance(cache, RecurrentCache)
    added = cache.states._added
    windows = {key for key, shape in cache.states.shapes().items() if shape.kind == Kind.WINDOW}
    held = sum(part.nbytes for key in added.keys() - windows for part in added[key])
    # of a window's inputs only the nodes' are new
    held += sum(
        inputs.nbytes - cache.states.state(key, cache.states.shapes()[key]).nbytes
        for key in windows
        for inputs in added[key]
    )
    assert held == 3 * 14 * sizes.node


def test_rows_move_and_narrow_with_their_states() -> None:
    rows = rows_of("qwen3_5_text", library=False)
    before = [state.clone() for state in states_of(rows.cache)]
    narrow = rows.cache.first_rows(2)
    assert all(
        part.data_ptr() == state.data_ptr()
        for part, state in zip(states_of(narrow), states_of(rows.cache), strict=True)
    )
    rows.cache.move_row(2, 0)
    for state, old in zip(states_of(rows.cache), before, strict=True):
        assert torch.equal(state[0], old[2]) and torch.equal(state[1], old[1])


def test_states_lie_where_they_lay_after_a_commit() -> None:
    rows = rows_of("qwen3_5_text", library=False)
    places = [state.data_ptr() for state in states_of(rows.cache)]
    rows.verify(chain(rows.generator), (2, 1, 0))
    assert places == [state.data_ptr() for state in states_of(rows.cache)]
