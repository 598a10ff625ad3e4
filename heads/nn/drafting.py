"""Filling a static token tree: the host-side plan of a tree, and the level-by-level growth that
autoregressive drafters share.

A plan is made once per tree; everything a drafting step needs from it is a small constant tensor, so that no
step asks the device.

Legend: B rows, N nodes, P nodes that are run through the drafter at one level, V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Noise, TargetStates
from heads.api.tree import Level, TokenTree


@dataclass(frozen=True, eq=False)
class LevelPlan:
    """One depth of a static tree, as constant tensors. "Run rows" are the nodes of the level above that have
    children.

    depth: 1 for the children of the root. max_rank: best sibling rank wanted. pick [nodes] int64: which of
    the P * (max_rank + 1) candidates becomes each node; None when that is all of them in order. rows [P]
    int64: the run rows as places in the level above, None when that is all of them in order. carry [P] int64:
    the run row, one level up, whose output each run row continues; None when that is all in order. span: this
    level's run rows among `TreePlan.run_nodes`.
    """

    depth: int
    max_rank: int
    pick: Tensor | None
    rows: Tensor | None
    carry: Tensor | None
    span: slice


@dataclass(frozen=True, eq=False)
class TreePlan:
    """A static tree with everything drafters look up in it. Shared between the rows of a batch."""

    tree: TokenTree
    levels: tuple[LevelPlan, ...]
    node_depth: Tensor  # [N] int64
    depths: Tensor  # [max_depth] int64: 1, 2, ...
    max_rank: int
    by_depth_and_rank: (
        Tensor  # [N - 1] int64: (depth - 1) * (max_rank + 1) + sibling rank of each drafted node
    )
    best_path: Tensor  # [N] bool: the root and its rank-0 descendants
    run_nodes: Tensor  # [R] int64: the drafted nodes that have children, level by level
    run_depth: Tensor  # [R] int64: their depths
    run_visible: (
        Tensor  # [R, N] bool: column i says that they attend to node i+1; the last one is always False
    )
    shared_between_rows: ClassVar[bool] = True

    @classmethod
    def of(cls, tree: TokenTree) -> TreePlan:
        """Plan for a static `tree` (leading size 1), on the tree's device. Reads the tree on the host."""
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
        never = torch.zeros(len(run_nodes), 1, dtype=torch.bool, device=device)
        return cls(
            tree=tree,
            levels=tuple(plans),
            node_depth=tree.depth[0],
            depths=torch.arange(1, tree.max_depth + 1, device=device),
            max_rank=max(ranks),
            by_depth_and_rank=(tree.depth[0][1:] - 1) * (max(ranks) + 1)
            + torch.tensor(ranks[1:], dtype=torch.int64, device=device),
            best_path=torch.tensor(best, device=device),
            run_nodes=run,
            run_depth=tree.depth[0][run],
            run_visible=torch.cat([tree.ancestors[0][run, 1:], never], 1),
        )


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


class PlanCache:
    """Remembers the plan of the last tree, since every refilled row starts with the same one."""

    def __init__(self) -> None:
        self._plan: TreePlan | None = None

    def of(self, tree: TokenTree) -> TreePlan:
        if self._plan is None or self._plan.tree is not tree:
            self._plan = TreePlan.of(tree)
        return self._plan


def choose(
    logits: Tensor, positions: Tensor, max_rank: int, noise: Noise, token_ids: Tensor | None = None
) -> Tensor:
    """Columns of the best max_rank + 1 candidates [B, M, max_rank + 1] int64 for logits [B, M, V'] at
    `positions` [B, M].
    """
    if max_rank == 0:
        return noise.pick(logits, positions, token_ids)[..., None]
    return torch.topk(noise.scores(logits, positions, token_ids), max_rank + 1, dim=-1).indices


Step = Callable[[LevelPlan, Tensor, Tensor], tuple[Tensor, Tensor]]


def grow(
    plan: TreePlan,
    root: Tensor,
    root_position: Tensor,
    logits: Tensor,
    carry: Tensor,
    step: Step,
    noise: Noise,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Draft the tree behind `root` [B] (at `root_position` [B]) and return its tokens [B, N] int64, the root
    first.

    logits [B, 1, V'] and carry [B, 1, H] are the drafter's output for the root's children; step(level, tokens
    [B, P], carry [B, P, H]) runs the nodes that have children at `level` and returns the same two for their
    children. token_ids [V'] maps columns to target ids when the draft vocabulary is reduced.
    """
    batch = root.shape[0]
    tokens, drafted = [root[:, None]], root[:, None]
    for level in plan.levels:
        if level.depth > 1:
            drafted = drafted if level.rows is None else drafted[:, level.rows]
            carry = carry if level.carry is None else carry[:, level.carry]
            logits, carry = step(level, drafted, carry)
        positions = (root_position + level.depth)[:, None].expand(batch, logits.shape[1])
        columns = choose(logits, positions, level.max_rank, noise, token_ids).reshape(batch, -1)
        columns = columns if level.pick is None else columns[:, level.pick]
        drafted = columns if token_ids is None else token_ids[columns]
        tokens.append(drafted)
    return torch.cat(tokens, dim=1)


def last_valid(states: TargetStates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What follows from a run of states: (rows [B], last [B], root token [B], root position [B]).

    `values[rows, last]` reads each row's last valid entry.
    """
    last = states.lengths - 1
    rows = torch.arange(last.shape[0], device=last.device)
    return rows, last, states.next_tokens[rows, last], states.positions[rows, last] + 1
