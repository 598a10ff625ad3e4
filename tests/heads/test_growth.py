"""Growing dynamic trees: against EAGLE-2's pseudo-code written plainly, and against best-first
enumeration with a heap.

The drafter here is a table: logits drawn at random for every path, so that what it says depends on
all ancestors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import DynamicShape, Ranking, TokenTree
from heads.nn.drafting.growth import fill, grow
from heads.nn.drafting.places import CachePlace, GrowingFrame, Memory
from heads.nn.drafting.plan import DynamicPlan, Plan, TreePlan
from heads.nn.drafting.state import Rooted
from heads.nn.rope import Rope
from tests.heads.micro import PlainNoise

VOCAB, DEPTH = 11, 5
Path = tuple[int, ...]


class SharedGumbel(PlainNoise):
    """Noise that is the same for all nodes at one position, and logits kept for rules that want
    them."""

    keeps_logits = True
    separate = False

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(3, 64, VOCAB, generator=generator, dtype=torch.float64)
        self.noise = scale * -torch.log(-torch.log(uniform)).float()

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        rows = torch.arange(logits.shape[0])[:, None]
        noise = self.noise[rows, positions]
        return logits.float().log_softmax(-1) + (
            noise if token_ids is None else noise[..., token_ids]
        )

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return self.scores(logits, positions, token_ids).argmax(-1)

    def tempered(self, logits: Tensor) -> Tensor:
        return logits.float()


class TableDrafter:
    """Logits [V'] for every path of a row; its carry is the path, as numbers padded with -1."""

    def __init__(self, seed: int, columns: int = VOCAB, spread: float = 2.0) -> None:
        self.seed, self.columns, self.spread = seed, columns, spread
        self.known: dict[tuple[int, Path], Tensor] = {}

    def logits(self, row: int, path: Path) -> Tensor:
        if (row, path) not in self.known:
            number = hash((self.seed, row, path)) % 10007
            wave = torch.sin(
                12.9898 * torch.arange(self.columns, dtype=torch.float64) + 78.233 * number
            )
            self.known[row, path] = self.spread * 4 * ((43758.5453 * wave) % 1.0 - 0.5)
        return self.known[row, path]

    def grow(
        self, plan: Plan, batch: int, noise: PlainNoise, token_ids: Tensor | None = None
    ) -> Proposal:
        def rows_of(paths: list[list[Path]]) -> tuple[Tensor, Tensor]:
            logits = [[self.logits(row, path) for path in found] for row, found in enumerate(paths)]
            carry = torch.tensor(
                [[[*path, *[-1] * (DEPTH - len(path))] for path in found] for found in paths]
            )
            return torch.stack([torch.stack(row) for row in logits]), carry

        def step(place: CachePlace, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            paths = [
                [
                    (*(t for t in path if t >= 0), token)
                    for path, token in zip(above, new, strict=True)
                ]
                for above, new in zip(carry.tolist(), tokens.tolist(), strict=True)
            ]
            return rows_of(paths)

        root = torch.full((batch,), 7)
        logits, carry = rows_of([[()] for _ in range(batch)])
        state = Rooted(root, 10 + torch.arange(batch), plan)
        return grow(state, logits, carry, step, noise, token_ids)


def gains_of(
    logits: Tensor,
    row: int,
    position: int,
    noise: PlainNoise,
    ranking: Ranking,
    width: int,
    ids: Tensor | None = None,
) -> list[tuple[int, float]]:
    """The best children of one node: (token, gain), by falling score."""
    batch = torch.zeros(3, 1, logits.shape[-1], dtype=logits.dtype)
    batch[row, 0] = logits
    scores = noise.scores(batch, torch.full((3, 1), position), ids)[row, 0].double()
    order = scores.argsort(descending=True).tolist()[:width]
    if ranking is Ranking.PERTURBED:
        gains = scores - scores.exp().sum().log()
    elif ranking is Ranking.GAP:
        gains = scores - scores.max()
    else:
        gains = logits.log_softmax(-1)
    return [(column if ids is None else int(ids[column]), float(gains[column])) for column in order]


def slow_eagle2(
    children: Callable[[Path], list[tuple[int, float]]], shape: DynamicShape
) -> dict[Path, float]:
    """EAGLE-2 (2406.16858, section 4): expand the k best nodes of the last level, then keep the
    best of all."""
    value: dict[Path, float] = {(): 0.0}
    level: list[Path] = [()]
    for _ in range(shape.max_depth):
        expanded = heapq.nlargest(shape.width, level, key=value.__getitem__)
        level = []
        for node in expanded:
            for token, gain in children(node):
                value[(*node, token)] = value[node] + gain
                level.append((*node, token))
    best = heapq.nlargest(shape.nodes, value, key=value.__getitem__)
    return {path: value[path] for path in best}


def slow_best_first(
    children: Callable[[Path], list[tuple[int, float]]], shape: DynamicShape
) -> dict[Path, float]:
    """Always take the best candidate that is left; its children become candidates."""
    heap: list[tuple[float, Path]] = [(0.0, ())]
    found: dict[Path, float] = {}
    while len(found) < shape.nodes:
        cost, path = heapq.heappop(heap)
        found[path] = -cost
        if len(path) < shape.max_depth:
            for token, gain in children(path):
                heapq.heappush(heap, (cost - gain, (*path, token)))
    return found


def paths_of(proposal: Proposal, row: int) -> list[Path]:
    """The tokens on the way to every node."""
    tokens, parents = (
        proposal.tokens[row].tolist(),
        proposal.tree.parents.expand(len(proposal.tokens), -1)[row].tolist(),
    )
    paths: list[Path] = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


def check_tree(tree: TokenTree, batch: int, shape: DynamicShape) -> None:
    """Parents before children, depth and ancestors as the parents say, nothing deeper than
    asked."""
    assert tree.parents.shape == (batch, shape.nodes)
    assert tree.max_depth == shape.max_depth
    for row in range(batch):
        parents = tree.parents[row].tolist()
        assert parents[0] == 0
        for node in range(1, shape.nodes):
            assert parents[node] < node
            lineage = {node}
            while min(lineage) > 0:
                lineage.add(parents[min(lineage)])
            assert set(tree.ancestors[row, node].nonzero()[:, 0].tolist()) == lineage
            assert int(tree.depth[row, node]) == len(lineage) - 1 <= shape.max_depth


SHAPES = st.builds(
    lambda depth, width, share: DynamicShape(
        2 + int(share * (width + (depth - 1) * width**2 - 1)), depth, width, Ranking.PERTURBED
    ),
    st.integers(1, DEPTH),
    st.integers(1, 4),
    st.floats(0, 1),
)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from(list(Ranking)), st.integers(0, 10**6), st.booleans())
def test_growth_is_eagle2(shape: DynamicShape, ranking: Ranking, seed: int, noisy: bool) -> None:
    shape = DynamicShape(shape.nodes, shape.max_depth, shape.width, ranking)
    drafter, noise = TableDrafter(seed), SharedGumbel(seed, scale=1.0 if noisy else 0.0)
    proposal = drafter.grow(DynamicPlan(shape), 3, noise)
    check_tree(proposal.tree, 3, shape)
    for row in range(3):
        expected = slow_eagle2(
            lambda path, row=row: gains_of(
                drafter.logits(row, path), row, 11 + row + len(path), noise, ranking, shape.width
            ),
            shape,
        )
        found = paths_of(proposal, row)
        if (
            ranking is Ranking.GAP
        ):  # best siblings cost nothing: equal scores, which the pseudo-code leaves open
            assert len(set(found)) == shape.nodes
            assert set(found) <= set(drafter_candidates(drafter, row, noise, shape))
        else:
            assert set(found) == set(expected)


def drafter_candidates(
    drafter: TableDrafter, row: int, noise: PlainNoise, shape: DynamicShape
) -> set[Path]:
    """Every path whose tokens are among the `width` best at each of its nodes."""
    found: set[Path] = {()}
    level: list[Path] = [()]
    for _ in range(shape.max_depth):
        level = [
            (*path, token)
            for path in level
            for token, _ in gains_of(
                drafter.logits(row, path),
                row,
                11 + row + len(path),
                noise,
                Ranking.PROBABILITY,
                shape.width,
            )
        ]
        found |= set(level)
    return found


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from([Ranking.PERTURBED, Ranking.PROBABILITY]), st.integers(0, 10**6))
def test_independent_depths_give_exactly_the_best_paths(
    shape: DynamicShape, ranking: Ranking, seed: int
) -> None:
    shape = DynamicShape(shape.nodes, shape.max_depth, shape.width, ranking)
    noise = SharedGumbel(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, shape.max_depth, VOCAB, generator=generator, dtype=torch.float64)
    root, positions = torch.tensor([1, 2, 3]), torch.tensor([10, 11, 12])
    proposal = fill(Rooted(root, positions, DynamicPlan(shape)), logits, noise)
    check_tree(proposal.tree, 3, shape)
    assert proposal.tokens[:, 0].tolist() == [1, 2, 3]
    assert proposal.logits is not None
    for row in range(3):
        expected = slow_best_first(
            lambda path, row=row: gains_of(
                logits[row, len(path)], row, 11 + row + len(path), noise, ranking, shape.width
            ),
            shape,
        )
        assert set(paths_of(proposal, row)) == set(expected)
        for node, depth in enumerate(proposal.tree.depth[row].tolist()):
            if depth < shape.max_depth:
                assert torch.equal(proposal.logits[row, node], logits[row, depth])


def test_equal_scores_still_make_a_tree() -> None:
    """A certain drafter: children score exactly what their parents score, and parents must win."""
    sure = torch.full((2, 3, VOCAB), -1e9)
    sure[:, :, 4] = 0.0
    noise = PlainNoise()
    for nodes in range(2, 8):
        shape = DynamicShape(nodes, 3, 2)
        zeros = torch.zeros(2, dtype=torch.int64)
        proposal = fill(Rooted(zeros, zeros, DynamicPlan(shape)), sure, noise)
        check_tree(proposal.tree, 2, shape)
        deepest = min(nodes - 1, 3)
        assert (4,) * deepest in paths_of(proposal, 0)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_kept_logits_are_those_that_children_were_drawn_from(dynamic: bool, reduced: bool) -> None:
    ids = torch.tensor([0, 2, 3, 5, 8, 10]) if reduced else None
    drafter, noise = TableDrafter(3, 6 if reduced else VOCAB), SharedGumbel(3)
    choices = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [2, 0, 1]]
    tree = TokenTree.from_choices(choices)
    plan: Plan = DynamicPlan(DynamicShape(14, 4, 3)) if dynamic else TreePlan.of(tree)
    proposal = drafter.grow(plan, 3, noise, ids)
    assert proposal.logits is not None
    assert (proposal.token_ids is ids) and proposal.logits.shape[:2] == proposal.tokens.shape
    parents = proposal.tree.parents.expand(3, -1)
    for row in range(3):
        paths = paths_of(proposal, row)
        ranks: dict[int, int] = {}
        for node in range(1, len(paths)):
            parent = int(parents[row, node])
            assert torch.equal(proposal.logits[row, parent], drafter.logits(row, paths[parent]))
            siblings = gains_of(
                proposal.logits[row, parent],
                row,
                11 + row + len(paths[parent]),
                noise,
                Ranking.PROBABILITY,
                3,
                ids,
            )
            rank = ranks.get(parent, 0)  # siblings stand in rank order, without gaps
            ranks[parent] = rank + 1
            assert paths[node][-1] == siblings[rank][0]
    assert bool(proposal.logits.isfinite().all())
    quiet = PlainNoise()
    assert drafter.grow(plan, 3, quiet, ids).logits is None


def test_chain_keeps_its_logits_too() -> None:
    drafter, noise = TableDrafter(5), SharedGumbel(5)
    for depth in (0, 1, 4):
        proposal = drafter.grow(TreePlan.of(TokenTree.chain(depth)), 2, noise)
        assert proposal.logits is not None and proposal.logits.shape == (2, depth + 1, VOCAB)
        for node, path in enumerate(paths_of_chain(proposal, 1)[:-1]):
            assert torch.equal(proposal.logits[1, node], drafter.logits(1, path))


def paths_of_chain(proposal: Proposal, row: int) -> list[Path]:
    tokens = proposal.tokens[row, 1:].tolist()
    return [tuple(tokens[:end]) for end in range(len(tokens) + 1)]


def test_run_rows_see_the_past_and_their_own_ancestors() -> None:
    table = Rope(8, 10000.0).table(20, torch.device("cpu"), torch.float64)
    base = torch.tensor([3, 5])
    frame = GrowingFrame(Memory(base, table), width=3, levels=3)
    lineages: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(2)]
    for level, above in enumerate(
        [[[0, 0, 0], [0, 0, 0]], [[0, 0, 2], [1, 2, 1]], [[2, 0, 1], [2, 2, 2]]]
    ):
        place = frame.next(torch.tensor(above))
        grown = [
            [[*lineages[b][a], 3 * level + j] for j, a in enumerate(above[b])] for b in range(2)
        ]
        lineages = grown
        for b, first in enumerate(base.tolist()):
            for j in range(3):
                expected = [*range(first), *(first + run for run in lineages[b][j])]
                mask = place.sight.mask(20, torch.float64)
                assert mask[b, j].isfinite().nonzero()[:, 0].tolist() == expected
                assert int(place.slots[b, j]) == first + 3 * level + j
                assert torch.equal(place.rotation[0][b, j, 0], table[first + level, 0])


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"has 3 candidates at most; decode\.nodes must be 4 or less; given 5"
    ):
        DynamicShape(5, 1, 3)
    with pytest.raises(UserError, match="needs nodes >= 2, depth >= 1 and width >= 1"):
        DynamicShape(1, 1, 1)


@pytest.mark.parametrize(
    "shape",
    [
        DynamicShape(20, 3, VOCAB + 1),
        TokenTree.from_choices([(rank,) for rank in range(VOCAB + 1)]),
    ],
    ids=["dynamic", "static"],
)
def test_more_candidates_than_the_vocabulary_has_are_refused(
    shape: DynamicShape | TokenTree,
) -> None:
    plan: Plan = DynamicPlan(shape) if isinstance(shape, DynamicShape) else TreePlan.of(shape)
    root = torch.zeros(1, dtype=torch.int64)
    state, logits = Rooted(root, root, plan), torch.zeros(1, 3, VOCAB)
    with pytest.raises(
        UserError, match=r"12 candidates .* vocabulary has 11 tokens.*decode\.width"
    ):
        fill(state, logits[:, : shape.max_depth], SharedGumbel(0))
