"""Trees that grow from one pass (DARTree): against the same growth written plainly, against the best
of all trees by enumeration, and for every dependency against forced chains.

The unit tests' dependency is a table: what a path adds to the logits follows from all its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import product
from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.api.drafter import Noise, Proposal
from heads.api.errors import UserError
from heads.api.one_pass import one_pass_kinds
from heads.api.tree import DartreeShape, DraftShape, DynamicShape, TokenTree
from heads.dflash import Drafter
from heads.nn.cascade.join import smaller
from heads.nn.drafting.dartree import grow_from_pass
from heads.nn.drafting.growth import fill
from heads.nn.drafting.plan import DartreePlan
from heads.nn.drafting.state import Rooted
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.tune.tree_search import search_tree
from tests.heads.explicit import DOCUMENTS
from tests.heads.micro import ForcedNoise, MicroTarget, PlainNoise, seen_states
from tests.heads.recipes import RECIPES, build
from tests.heads.test_dflash import DEPENDENT, make
from tests.heads.test_growth import Path, check_tree, paths_of

VOCAB, ROWS, DEPTH = 11, 2, 4
Children = Callable[[Path], list[tuple[int, float]]]
"""A path -> the tokens that may follow it, and the log-probability of each."""


def slow_dartree(children: Children, shape: DartreeShape) -> set[Path]:
    """The growth as its definition says: keep the best children of each level, then the best of
    all."""
    score: dict[Path, float] = {(): 0.0}
    level: list[Path] = [()]
    for _ in range(shape.max_depth):
        offered = {
            (*path, token): score[path] + gain for path in level for token, gain in children(path)
        }
        level = heapq.nlargest(shape.width, offered, key=offered.__getitem__)
        score |= {path: offered[path] for path in level}
    drafted = [path for path in score if path]
    ranked = heapq.nlargest(
        shape.nodes - 1, drafted, key=lambda path: score[path] - shape.depth_penalty * len(path)
    )
    return {(), *ranked}


def noise_at(temperature: float, vocab: int = VOCAB, rows: int = ROWS) -> SharedNoise:
    seeds = torch.arange(5, 5 + rows)
    return SharedNoise(SamplingSettings(temperature), seeds, vocab, Stream.TARGET)


def pick_row(noise: Noise, row: int, rows: int, logits: Tensor, position: int, ids: Any) -> Tensor:
    """The scores [V'] of one row's logits [V']."""
    batch = logits.expand(rows, 1, -1)
    return noise.scores(batch, torch.full((rows, 1), position), ids)[row, 0].double()


class TableDependency:
    """Logits [B, D, V'] of the slots, and what every path adds to those of the next slot."""

    def __init__(self, seed: int, columns: int = VOCAB, depth: int = DEPTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.base = 2 * torch.randn(ROWS, depth, columns, generator=generator, dtype=torch.float64)
        self.seed = seed

    def adds(self, row: int, path: Path) -> Tensor:
        """[V'], the same for a path every time it is asked for."""
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**31)
        wave = torch.randn(self.base.shape[-1], generator=generator, dtype=torch.float64)
        return 1.5 * wave

    def grow(self, shape: DartreeShape, noise: Noise, token_ids: Tensor | None = None) -> Proposal:
        def along(
            depth: int, columns: Tensor, tokens: Tensor, carry: Tensor
        ) -> tuple[Tensor, Tensor]:
            paths = [
                [(*(t for t in path if t >= 0), token) for path, token in zip(*pair, strict=True)]
                for pair in zip(carry.tolist(), tokens.tolist(), strict=True)
            ]
            added = [
                [self.adds(row, path[1:])[columns[row]] for path in found]
                for row, found in enumerate(paths)
            ]
            width = carry.shape[-1]
            padded = [[[*path, *[-1] * (width - len(path))] for path in found] for found in paths]
            return torch.stack([torch.stack(row) for row in added]), torch.tensor(padded)

        nothing = torch.full((ROWS, 1, DEPTH + 1), -1)
        return grow_from_pass(
            shape, rooted(shape), self.base[:, : shape.max_depth], noise, token_ids, along, nothing
        )

    def children(
        self,
        shape: DartreeShape,
        row: int,
        noise: Noise,
        token_ids: Tensor | None = None,
        depends: bool = True,
    ) -> Children:
        """What `slow_dartree` asks for: whole conditional distributions, cut to the candidates."""

        def found(path: Path) -> list[tuple[int, float]]:
            base, position = self.base[row, len(path)], 11 + row + len(path)
            slot = pick_row(noise, row, ROWS, base, position, token_ids)
            best = slot.argsort(descending=True)[: shape.candidates]
            if depends:
                whole = base + self.adds(row, path)
                scores = pick_row(noise, row, ROWS, whole, position, token_ids)
                gains = scores[best].log_softmax(-1)
            else:
                gains = slot.log_softmax(-1)[best]
            tokens = best if token_ids is None else token_ids[best]
            return list(zip(tokens.tolist(), gains.tolist(), strict=True))

        return found


def rooted(shape: DartreeShape) -> Rooted:
    return Rooted(torch.full((ROWS,), 7), 10 + torch.arange(ROWS), DartreePlan(shape))


def shape_of(depth: int, width: int, candidates: int, share: float, penalty: float) -> DartreeShape:
    room = sum(DartreeShape(2, depth, width, candidates).level_sizes())
    return DartreeShape(2 + int(share * (room - 1)), depth, width, candidates, penalty)


SHAPES = st.builds(
    shape_of,
    st.integers(1, DEPTH),
    st.integers(1, 6),
    st.integers(1, VOCAB),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.2, 1.5]),
)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 10**6))
def test_growth_along_paths_is_the_definition(
    shape: DartreeShape, temperature: float, seed: int
) -> None:
    table, noise = TableDependency(seed), noise_at(temperature)
    proposal = table.grow(shape, noise)
    check_tree(proposal.tree, ROWS, DynamicShape(shape.nodes, shape.max_depth, 99))
    assert proposal.logits is None and proposal.tokens[:, 0].tolist() == [7] * ROWS
    for row in range(ROWS):
        found = paths_of(proposal, row)
        assert len(set(found)) == shape.nodes
        assert set(found) == slow_dartree(table.children(shape, row, noise), shape)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([0.0, 0.7]), st.integers(0, 10**6), st.booleans())
def test_growth_of_independent_slots_is_the_definition(
    shape: DartreeShape, temperature: float, seed: int, reduced: bool
) -> None:
    ids = torch.tensor([0, 2, 3, 5, 8, 9, 10]) if reduced else None
    table = TableDependency(seed, VOCAB if ids is None else len(ids))
    noise = noise_at(temperature)
    candidates = min(shape.candidates, table.base.shape[-1])
    shape = shape_of(shape.max_depth, shape.width, candidates, 0.8, shape.depth_penalty)
    proposal = fill(rooted(shape), table.base[:, : shape.max_depth], noise, ids)
    assert proposal.token_ids is ids
    check_tree(proposal.tree, ROWS, DynamicShape(shape.nodes, shape.max_depth, 99))
    for row in range(ROWS):
        children = table.children(shape, row, noise, ids, depends=False)
        assert set(paths_of(proposal, row)) == slow_dartree(children, shape)


def test_a_reduced_vocabulary_is_that_of_the_paths() -> None:
    """Dependencies read target ids, their logits have columns of the draft vocabulary."""
    ids = torch.tensor([10, 2, 3, 5, 8, 9, 0])
    table, noise, shape = TableDependency(4, len(ids)), noise_at(0.7), DartreeShape(9, 3, 4, 5, 0.1)
    proposal = table.grow(shape, noise, ids)
    for row in range(ROWS):
        children = table.children(shape, row, noise, ids)
        assert set(paths_of(proposal, row)) == slow_dartree(children, shape)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 30), st.integers(1, 3), st.integers(0, 10**6), st.booleans())
def test_a_wide_level_makes_the_tree_that_is_expected_to_accept_most(
    nodes: int, depth: int, seed: int, depends: bool
) -> None:
    """Of all paths over four tokens the N - 1 likeliest, so no tree of N nodes has a greater sum;
    a penalty may only lose."""
    table, noise, tokens = TableDependency(seed, 4), noise_at(0.0, 4), 4
    nodes = min(nodes, sum(tokens**d for d in range(1, depth + 1)))
    width = min(nodes - 1, tokens**depth)
    shape = shape_of(depth, width, tokens, 1.0, 0.0)
    shape = DartreeShape(min(nodes, shape.nodes), depth, width, tokens)
    grown = (
        table.grow(shape, noise) if depends else fill(rooted(shape), table.base[:, :depth], noise)
    )
    for row in range(ROWS):
        children = table.children(shape, row, noise, depends=depends)
        score: dict[Path, float] = {(): 0.0}
        for level in range(depth):
            for path in product(range(tokens), repeat=level):
                score |= {(*path, token): score[path] + gain for token, gain in children(path)}
        found = sum(exp(score[path]) for path in paths_of(grown, row)[1:])
        best = sum(
            sorted((exp(score[path]) for path in score if path), reverse=True)[: shape.nodes - 1]
        )
        assert found == pytest.approx(best, rel=1e-5)
        punished = DartreeShape(shape.nodes, depth, width, tokens, 0.7)
        other = table.grow(punished, noise) if depends else None
        if other is not None:
            assert sum(exp(score[path]) for path in paths_of(other, row)[1:]) <= found * (1 + 1e-5)


def test_a_penalty_makes_trees_shallower() -> None:
    table, noise = TableDependency(1), noise_at(0.0)
    depths = [
        float(table.grow(DartreeShape(12, 4, 6, 8, penalty), noise).tree.depth.float().mean())
        for penalty in (0.0, 1.0, 50.0)
    ]
    assert depths[0] > depths[1] > depths[2]
    # level by level, when depth alone decides
    levels = [1] * 6 + [2] * 5
    flat = table.grow(DartreeShape(12, 4, 6, 8, 50.0), noise)
    assert sorted(flat.tree.depth[0].tolist()) == [0, *levels]


def test_equal_scores_still_make_a_tree() -> None:
    """A certain drafter: children score exactly what their parents score, and parents must win."""
    sure = torch.full((ROWS, 3, VOCAB), -1e9)
    sure[:, :, 4] = 0.0
    for nodes in range(2, 8):
        shape = DartreeShape(nodes, 3, 3, 4)
        proposal = fill(rooted(shape), sure, PlainNoise())
        check_tree(proposal.tree, ROWS, DynamicShape(nodes, 3, 99))
        assert (4,) * min(nodes - 1, 3) in paths_of(proposal, 0)


# Block drafters


class Chains:
    """What a block drafter says behind any path, by drafting the path as a forced chain."""

    def __init__(self, target: MicroTarget, drafter: Drafter, ends: Sequence[int]) -> None:
        self.drafter, self.ends = drafter, ends
        self.seen = seen_states(
            target, drafter.needs, DOCUMENTS[: len(ends)], [(0, end) for end in ends]
        )
        self.known: dict[tuple[int, Path], Tensor] = {}

    def logits(self, row: int, path: Path) -> Tensor:
        """[V] of the token behind `path`."""
        if (row, path) not in self.known:
            forced = ForcedNoise(
                [
                    document[: end + 1] + list(path)
                    for document, end in zip(DOCUMENTS, self.ends, strict=False)
                ]
            )
            chain = TokenTree.chain(len(path) + 1)
            self.drafter.propose(self.drafter.start(self.seen, chain, 32), forced)
            for each, end in enumerate(self.ends):
                found = forced.logits[each, end + 1 + len(path)]
                self.known[each, path] = found
        return self.known[row, path]

    def draft(self, shape: DraftShape, noise: Noise) -> Proposal:
        return self.drafter.propose(self.drafter.start(self.seen, shape, 32), noise)

    def base(self) -> Tensor:
        """The slots' own logits [B, K, V]."""
        drafter = self.drafter
        state = drafter.start(self.seen, TokenTree.chain(drafter.depths), 32)
        raw = drafter._draft(state, drafter.depths)
        return drafter.target.project(drafter.norm(raw))

    def expected_length(self, proposal: Proposal, row: int) -> float:
        """The drafter's own expectation of the accepted drafts: the sum of its nodes' chances."""
        total = 0.0
        for path in paths_of(proposal, row)[1:]:
            steps = (
                self.logits(row, path[:at]).log_softmax(-1)[path[at]] for at in range(len(path))
            )
            total += exp(sum(float(step) for step in steps))
        return total


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", *DEPENDENT])
@torch.no_grad()
def test_every_dependency_grows_by_what_its_chains_say(
    target: MicroTarget, name: str, temperature: float
) -> None:
    drafter, ends = make(target, **DEPENDENT.get(name, {})), (8, 5)
    chains, noise = Chains(target, drafter, ends), noise_at(temperature, target.info.vocab_size)
    shape = DartreeShape(10, 3, 4, 6, 0.2)
    proposal, base = chains.draft(shape, noise), chains.base()
    for row, end in enumerate(ends):

        def children(path: Path, row: int = row, end: int = end) -> list[tuple[int, float]]:
            position = end + 1 + len(path)
            slot = base[row, len(path)]
            ranked = pick_row(noise, row, 2, slot, position, None)
            best = ranked.argsort(descending=True)[: shape.candidates]
            if name == "lilicorr":  # knows the pairs of its own candidates alone
                best = slot.topk(DEPENDENT[name]["selector_top_k"]).indices
            scores = pick_row(noise, row, 2, chains.logits(row, path), position, None)
            gains = scores[best].log_softmax(-1) if name != "none" else scores.log_softmax(-1)[best]
            return list(zip(best.tolist(), gains.tolist(), strict=True))

        assert set(paths_of(proposal, row)) == slow_dartree(children, shape)


@pytest.mark.parametrize("nodes", [16, 32])
@pytest.mark.parametrize("name", ["markov", "gru", "parent"])
@torch.no_grad()
def test_its_trees_are_expected_to_accept_more_than_dynamic_and_static_ones(
    target: MicroTarget, name: str, nodes: int
) -> None:
    """By the drafter's own probabilities, over three texts: grown wide enough it is the best tree
    for every one of them; static trees are searched for just these texts."""
    drafter, depth, ends = make(target, block_size=8, **DEPENDENT[name]), 5, (9, 6, 8)
    drafter.norm.weight.mul_(3.0)  # surer of its tokens than random weights are
    chains, vocab = Chains(target, drafter, ends), target.info.vocab_size
    along: list[Path] = [()] * len(ends)
    accuracy = []
    for _ in range(depth):
        ranked = [
            chains.logits(row, path).softmax(-1).sort(descending=True)
            for row, path in enumerate(along)
        ]
        accuracy.append(torch.stack([values for values, _ in ranked]).mean(0)[:10].tolist())
        along = [(*path, int(tokens[0])) for path, (_, tokens) in zip(along, ranked, strict=True)]
    shapes: dict[str, DraftShape] = {
        "dartree": DartreeShape(nodes, depth, nodes - 1, vocab),
        "narrow": DartreeShape(nodes, depth, 12, vocab),
        "dynamic": DynamicShape(nodes, depth, 8),
        "static": TokenTree.from_choices(search_tree(accuracy, nodes).choices),
    }
    lengths = {}
    for key, shape in shapes.items():
        proposal = chains.draft(shape, PlainNoise())
        assert proposal.tokens.shape[1] == nodes
        lengths[key] = [chains.expected_length(proposal, row) for row in range(len(ends))]
    for others in (lengths["narrow"], lengths["dynamic"], lengths["static"]):
        for ours, other in zip(lengths["dartree"], others, strict=True):
            assert ours >= other * (1 - 1e-6)
    assert sum(lengths["dartree"]) > sum(lengths["static"])
    # twelve nodes per level lose little
    assert sum(lengths["narrow"]) > 0.95 * sum(lengths["dartree"])
    assert sum(lengths["narrow"]) > sum(lengths["static"])


# What cannot be asked for


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"grows 6 nodes at most; decode\.nodes must be 7 or less"):
        DartreeShape(8, 2, 3, 5)
    assert DartreeShape(2, 4, 12, 3).level_sizes() == [3, 9, 12, 12]
    with pytest.raises(UserError, match="needs nodes >= 2, depth >= 1, width >= 1 and candidates"):
        DartreeShape(4, 2, 3, 0)
    with pytest.raises(UserError, match=r"decode\.depth_penalty must be 0 or more.*given -0\.1"):
        DartreeShape(4, 2, 3, 3, -0.1)


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_kinds_without_one_pass_are_refused_with_the_names_of_those_that_have_it(
    target: MicroTarget, name: str
) -> None:
    kinds = one_pass_kinds()
    assert {"dflash", "medusa", "pard", "peagle"} <= set(kinds)
    drafter, shape = build(name, target), DartreeShape(6, 3, 3, 8)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    if drafter.kind in kinds:
        proposal = drafter.propose(drafter.start(seen, shape, 32), PlainNoise())
        assert proposal.tokens.shape == (2, 6) and proposal.tree.max_depth == 3
        return
    with pytest.raises(
        UserError, match=rf"decode\.shape=dartree .*: {', '.join(kinds)}\. .*decode\.shape=dynamic"
    ):
        drafter.start(seen, shape, 32)


def test_a_share_of_the_nodes_keeps_the_rest_of_the_shape() -> None:
    """A cascade gives its first part fewer nodes."""
    shape = DartreeShape(12, 4, 6, 8, 0.3)
    assert smaller(shape, 7, torch.device("cpu")) == DartreeShape(8, 4, 6, 8, 0.3)
