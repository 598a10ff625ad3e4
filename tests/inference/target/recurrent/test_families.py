"""Every family with recurrent layers: nodes of trees and committed states against decoding one
token at a time, and against the library's own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.target.recurrent.states as states_module
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.target.loading import RECURRENT
from inference.target.recurrent.cache import RecurrentCache
from inference.target.recurrent.passes import PromptPass
from inference.target.recurrent.states import Kind, inputs_along_paths
from tests.fakes import AlwaysRight, SometimesRight
from tests.inference.decoding.test_lossless import SHAPES, decode, requests, whole
from tests.inference.target.test_families import path_to
from tests.models import RECURRENT_FAMILIES, VOCAB, plain_texts, random_model, random_target

LENGTHS = (9, 4, 13)
NEEDS = FeatureSpec()
OWN, LIBRARY = 1e-6, 2e-4
"""Largest gap relative to the largest logit or state. The library's norms and gates round to
float32 inside, its scans compute in it."""


def chain(_: torch.Generator) -> TokenTree:
    return TokenTree.chain(5)


def random_tree(rows: int) -> Callable[[torch.Generator], TokenTree]:
    """Trees of 14 nodes, each behind one of the five before it."""

    def make(generator: torch.Generator) -> TokenTree:
        def parents() -> list[int]:
            later = range(2, 14)
            return [
                *(0, 0),
                *(int(torch.randint(max(n - 5, 0), n, (1,), generator=generator)) for n in later),
            ]

        return TokenTree.from_parents(torch.tensor([parents() for _ in range(rows)]), 13)

    return make


TREES = {"chain": chain, "static": random_tree(1), "dynamic": random_tree(len(LENGTHS))}


@dataclass
class Gaps:
    """The largest difference of each sort, relative to the largest value."""

    found: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, one: Tensor, other: Tensor) -> None:
        scale = float(other.abs().max().clamp(min=1e-9))
        gap = float((one - other).abs().max()) / scale
        self.found[name] = max(self.found.get(name, 0.0), gap)

    @property
    def tell_a_fault(self) -> bool:
        return max(self.found["own"], self.found["state"]) > 100 * OWN


class Rows:
    """Three ragged rows that are verified as trees, and again one token at a time."""

    def __init__(self, family: str, chunk: int = 0, library: bool = True) -> None:
        self.target = random_target(family, recurrent=True)
        self.model = random_model(family, recurrent=True) if library else None
        self.generator = torch.Generator().manual_seed(1)
        self.texts = [self.tokens(length + 1) for length in LENGTHS]  # the last one is the root
        self.lengths, self.gaps = torch.tensor(LENGTHS), Gaps()
        padded = torch.full((3, max(LENGTHS)), 7)
        for row, text in enumerate(self.texts):
            padded[row, : len(text) - 1] = torch.tensor(text[:-1])
        self.cache, self.slow = (self.target.new_cache(3, 64) for _ in range(2))
        rows = torch.arange(3)
        first, _ = self.target.prefill(self.cache, rows, padded, self.lengths, NEEDS, chunk)
        for row in range(3):  # each alone
            own = padded[row : row + 1, : LENGTHS[row]]
            alone, _ = self.target.prefill(
                self.slow, rows[row : row + 1], own, self.lengths[row : row + 1], NEEDS
            )
            self.gaps.add("prefill", first[row], alone[0])
            if self.model is not None:
                self.gaps.add("library", first[row], self.library_logits(self.texts[row][:-1]))

    def tokens(self, count: int) -> list[int]:
        return [int(n) for n in torch.randint(3, VOCAB, (count,), generator=self.generator)]

    @torch.no_grad()
    def library_logits(self, text: list[int]) -> Tensor:
        assert self.model is not None
        found: Tensor = self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        return found

    def verify(self, tree: TokenTree, counts: tuple[int, ...]) -> None:
        """One verification, of which `counts` nodes of the longest path are committed, at most."""
        drafts = torch.tensor([self.tokens(tree.num_nodes) for _ in range(3)])
        drafts[:, 0] = torch.tensor([text[-1] for text in self.texts])
        logits, _, _ = self.target.verify(
            self.cache, drafts, tree, self.lengths, int(self.lengths.max()), NEEDS
        )
        parents = tree.parents.expand(3, -1).tolist()
        depth = tree.depth.expand(3, -1)
        path = torch.zeros(3, tree.max_depth + 1, dtype=torch.int64)
        count = torch.zeros(3, dtype=torch.int64)
        for row in range(3):
            for node in range(0, tree.num_nodes, 3) if self.model is not None else ():
                behind = [int(drafts[row, n]) for n in path_to(node, parents[row])[1:]]
                wanted = self.library_logits([*self.texts[row], *behind])
                self.gaps.add("library", logits[row, node], wanted)
            route = path_to(int(depth[row].argmax()), parents[row])
            path[row, : len(route)] = torch.tensor(route)
            count[row] = min(counts[row], len(route))
        accepted = (count - 1).clamp(min=0)
        self.cache.commit(tree, self.lengths, path, accepted, count)
        self._one_by_one(drafts, path, count, logits)
        for row in range(3):
            kept = [int(drafts[row, node]) for node in path[row, : int(count[row])]]
            if kept:
                self.texts[row] = [*self.texts[row][:-1], *kept, *self.tokens(1)]
        self.lengths = self.lengths + count

    def _one_by_one(self, drafts: Tensor, path: Tensor, count: Tensor, logits: Tensor) -> None:
        """The committed tokens again, in single steps of the other cache; then the states of
        both."""
        one, root = TokenTree.chain(0), torch.zeros(3, 1, dtype=torch.int64)
        for step in range(int(count.max())):
            runs = step < count
            node = path[:, step]
            lengths = self.lengths + torch.minimum(torch.tensor(step), count)
            token = drafts.gather(1, node[:, None])
            alone, _, _ = self.target.verify(
                self.slow, token, one, lengths, int(lengths.max()), NEEDS
            )
            for row in runs.nonzero()[:, 0].tolist():
                self.gaps.add("own", logits[row, node[row]], alone[row, 0])
            self.slow.commit(one, lengths, root, root[:, 0], runs.long())
        for found, wanted in zip(states_of(self.cache), states_of(self.slow), strict=True):
            self.gaps.add("state", found, wanted)


def states_of(cache: Any) -> list[Tensor]:
    assert isinstance(cache, RecurrentCache)
    shapes = cache.states.shapes()
    return [cache.states.state(key, shapes[key]) for key in sorted(shapes)]


def compared(family: str, shape: str, chunk: int = 0, library: bool = True) -> Gaps:
    """Three verifications in a row; 0: a row that is not running."""
    rows = Rows(family, chunk, library)
    for counts in ((3, 1, 0), (1, 2, 2), (2, 3, 1)):
        rows.verify(TREES[shape](rows.generator), counts)
    return rows.gaps


def test_every_family_that_is_allowed_is_tested() -> None:
    assert set(RECURRENT_FAMILIES) >= RECURRENT


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_nodes_and_committed_states_are_those_of_single_steps(family: str, shape: str) -> None:
    gaps = compared(family, shape).found
    assert max(gaps["own"], gaps["state"], gaps["prefill"]) < OWN, gaps
    assert gaps["library"] < LIBRARY, gaps


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2"])
def test_prompts_read_in_chunks_leave_the_same_states(family: str) -> None:
    gaps = compared(family, "static", chunk=4).found
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
        (everything_committed, ("qwen3_5_text", "kimi_linear", "mamba2", "jamba", "lfm2")),
        (window_one_place_off, ("qwen3_5_text", "lfm2")),
        (padding_that_counts, ("qwen3_5_text", "kimi_linear", "mamba2", "mamba", "lfm2")),
    ],
)
def test_a_planted_fault_shows(fault: Any, families: tuple[str, ...]) -> None:
    for family in families:
        with fault():
            gaps = compared(family, "static", library=False)
        assert gaps.tell_a_fault, (family, gaps.found)


# Text


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


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "mamba", "lfm2"])
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
    rows = Rows("qwen3_5_text", library=False)
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
    rows = Rows("qwen3_5_text", library=False)
    places = [state.data_ptr() for state in states_of(rows.cache)]
    rows.verify(chain(rows.generator), (2, 1, 0))
    assert places == [state.data_ptr() for state in states_of(rows.cache)]
