"""The plan of a draft's shape: everything that drafting steps look up, computed once on the host.

A plan is made once per shape. Everything a step needs from it is a small constant tensor or a plain
number, so no step synchronises with the device. `heads.nn.drafting.growth` fills plans with tokens.

Legend: B rows, N nodes, P nodes that are run through the drafter at one level, R at all levels, W
words of 32 bits, V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from heads.api.one_pass import refuse_dartree
from heads.api.tree import DartreeShape, DraftShape, DynamicShape, Level, TokenTree, ancestor_words

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class LevelPlan:
    """One depth of a static tree. "Run rows" are the nodes above it that have children.

    depth: 1 for the children of the root. max_rank: best sibling rank wanted. pick [nodes] int64:
    which of the P * (max_rank + 1) candidates becomes each node; None when that is all of them in
    order. rows [P] int64: the run rows as places in the level above, None when that is all of them
    in order. carry [P] int64: the run row, one level up, whose output each run row continues; None
    when that is all in order. span: this level's run rows among the run rows of all levels.
    """

    depth: int
    max_rank: int
    pick: Tensor | None
    rows: Tensor | None
    carry: Tensor | None
    span: slice


@dataclass(frozen=True, eq=False)
class TreePlan:
    """A static tree with all its look-up tensors. Shared between the rows of a batch."""

    tree: TokenTree
    levels: tuple[LevelPlan, ...]
    node_depth: Tensor  # [N] int64
    max_rank: int
    # [N - 1] int64: (depth - 1) * (max_rank + 1) + sibling rank of each drafted node
    by_depth_and_rank: Tensor
    best_path: Tensor  # [N] bool: the root and its rank-0 descendants
    # run rows: the drafted nodes that have children, level by level
    run_depth: Tensor  # [R] int64: their depths
    run_visible: Tensor  # [1, R, R] bool: which of each other they attend to
    run_words: Tensor  # [1, R, W] int32: the same in bits
    drawn_from: Tensor  # [N] int64: place of each node among the root and run rows; 0 for leaves
    shared_between_rows: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        return self.tree.max_depth

    @property
    def room(self) -> int:
        """Cache slots that drafted nodes take after the committed ones."""
        return self.tree.num_nodes

    @classmethod
    def of(cls, tree: TokenTree) -> TreePlan:
        """Plan for a static `tree` (leading size 1). Reads it on the host."""
        assert tree.parents.shape[0] == 1, "a drafter is given a static tree"
        device, nodes = tree.parents.device, tree.num_nodes
        levels = tree.levels()
        ranks, best = [0] * nodes, [True] + [False] * (nodes - 1)
        parents = tree.parents[0].tolist()
        for level in levels:
            for node, rank in zip(level.nodes, level.ranks, strict=True):
                ranks[node] = rank
                best[node] = rank == 0 and best[parents[node]]
        plans, run_nodes = _plan_levels(levels, device)
        run = torch.tensor(run_nodes, dtype=torch.int64, device=device)
        visible = tree.ancestors[:, run][:, :, run]
        drawn_from = torch.zeros(nodes, dtype=torch.int64, device=device)
        drawn_from[run] = torch.arange(1, len(run_nodes) + 1, device=device)
        return cls(
            tree=tree,
            levels=tuple(plans),
            node_depth=tree.depth[0],
            max_rank=max(ranks),
            by_depth_and_rank=(tree.depth[0][1:] - 1) * (max(ranks) + 1)
            + torch.tensor(ranks[1:], dtype=torch.int64, device=device),
            best_path=torch.tensor(best, device=device),
            run_depth=tree.depth[0][run],
            run_visible=visible,
            run_words=ancestor_words(visible),
            drawn_from=drawn_from,
        )


@dataclass(frozen=True, eq=False)
class DynamicPlan:
    """The sizes of a tree that is chosen while drafting. Shared between the rows of a batch."""

    shape: DynamicShape
    shared_between_rows: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    @property
    def room(self) -> int:
        """Cache slots after the committed ones: for drafted nodes, or a run of accepted ones."""
        return max((self.max_depth - 1) * self.shape.width, self.max_depth + 1)


@dataclass(frozen=True, eq=False)
class DartreePlan:
    """The sizes of a tree that grows from one pass. Shared between the rows of a batch."""

    shape: DartreeShape
    shared_between_rows: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    @property
    def room(self) -> int:
        """Cache slots after the committed ones, for a run of accepted nodes."""
        return self.max_depth + 1


Plan = TreePlan | DynamicPlan | DartreePlan


def make_plan(shape: DraftShape) -> Plan:
    """The plan of a static tree, of a dynamic shape or of one that grows from one pass."""
    if isinstance(shape, DynamicShape):
        return DynamicPlan(shape)
    return DartreePlan(shape) if isinstance(shape, DartreeShape) else TreePlan.of(shape)


def _plan_levels(levels: list[Level], device: torch.device) -> tuple[list[LevelPlan], list[int]]:
    """The levels' plans and all drafted nodes that are run, level by level."""

    def places(values: list[int], out_of: int) -> Tensor | None:
        return None if values == list(range(out_of)) else torch.tensor(values, device=device)

    plans: list[LevelPlan] = []
    all_run: list[int] = []
    above, above_run = [0], [0]  # nodes one level up; those of them that were run
    above_parent_run = [0]  # per node one level up: place of the run row it was drafted from
    for number, level in enumerate(levels):
        run = sorted({above[place] for place in level.parent_places})
        width = level.max_rank + 1
        drafted_from = [run.index(above[place]) for place in level.parent_places]
        pick = [place * width + rank for place, rank in zip(drafted_from, level.ranks, strict=True)]
        all_run += run if number else []  # the root was run when it was committed
        plans.append(
            LevelPlan(
                depth=number + 1,
                max_rank=level.max_rank,
                pick=places(pick, len(run) * width),
                rows=places([above.index(node) for node in run], len(above)),
                carry=places([above_parent_run[above.index(node)] for node in run], len(above_run)),
                span=slice(len(all_run) - len(run), len(all_run)) if number else slice(0, 0),
            )
        )
        above, above_run, above_parent_run = level.nodes, run, drafted_from
    return plans, all_run


class LastShape(Generic[Value]):
    """Caches what is made of the last shape, since every refilled row starts with the same one."""

    def __init__(self) -> None:
        self._known: tuple[DraftShape, Value] | None = None

    def get(self, shape: DraftShape, make: Callable[[], Value]) -> Value:
        """The value of `shape`: the cached one, or that of `make`."""
        if self._known is None or self._known[0] is not shape:
            self._known = shape, make()
        return self._known[1]


class PlanCache:
    """Makes and caches plans.

    one_pass: whether shapes that grow from one pass can be filled (`TrainableDrafter.one_pass`).
    """

    def __init__(self, one_pass: bool = False) -> None:
        self.one_pass = one_pass
        self._last: LastShape[Plan] = LastShape()

    def of(self, shape: DraftShape) -> Plan:
        """The plan; raises `UserError` for a shape that the drafter cannot fill."""
        if not self.one_pass:
            refuse_dartree(shape)
        return self._last.get(shape, lambda: make_plan(shape))


@dataclass(frozen=True, eq=False)
class Fixed:
    """A tree that does not change while a batch is decoded. Shared between the rows of a batch."""

    tree: TokenTree
    shared_between_rows: ClassVar[bool] = True


class ChainCache:
    """Makes and caches the longest chain within a shape, for drafters with one continuation."""

    def __init__(self) -> None:
        self._last: LastShape[Fixed] = LastShape()

    def of(self, shape: DraftShape, device: torch.device) -> Fixed:
        """The chain; raises `UserError` for a shape that grows from one pass."""
        refuse_dartree(shape)
        if isinstance(shape, TokenTree) and shape.is_chain:
            return self._last.get(shape, lambda: Fixed(shape))
        depth = min(shape.max_depth, shape.num_nodes - 1)
        return self._last.get(shape, lambda: Fixed(TokenTree.chain(depth, device)))
