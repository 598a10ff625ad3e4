"""Filling a draft's shape with tokens: level by level for autoregressive drafters, at once for
drafters that predict every depth independently, in static trees and in dynamic ones.

A dynamic tree is chosen while it is drafted. Every candidate has a score, the sum of its path's
gains (`Ranking`), none of which is above 0. So a node never scores above its parent, and the N - 1
best of all candidates form a tree. Autoregressive drafters consider the children of the `width`
best nodes of every level (EAGLE-2, 2406.16858). Independent ones keep enough nodes per level that
the result is exactly the N - 1 best paths of all (best first, as in DDTree and JetSpec). Shapes are
fixed and nothing synchronises with the device. Trees that grow from one pass:
`heads.nn.drafting.dartree`.

Legend: B rows, N nodes, D deepest level, P nodes that are run or extended at one level, k width, C
candidates of all levels (the root included), V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.drafter import Noise, Proposal
from heads.api.errors import UserError
from heads.api.tree import DynamicShape, Ranking, TokenTree
from heads.nn.drafting.dartree import grow_from_pass
from heads.nn.drafting.places import CachePlace, GrowingFrame, Memory, static_places
from heads.nn.drafting.plan import DartreePlan, DynamicPlan, TreePlan
from heads.nn.drafting.selection import keep_best
from heads.nn.drafting.state import Rooted

Step = Callable[[CachePlace, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Runs drafted nodes: (place, tokens [B, P], carry [B, P, H] of their parents) -> their children's
logits [B, P, V'] and carry."""

Offer = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Children of a level's best nodes: (depth of the children, places of those nodes among the
candidates of the level above [B, P], their tokens [B, P]) -> gains [B, P, k] float32 and tokens [B,
P, k], siblings by falling rank."""


def grow(
    state: Rooted,
    logits: Tensor,
    carry: Tensor,
    step: Step,
    noise: Noise,
    token_ids: Tensor | None = None,
    memory: Memory | None = None,
) -> Proposal:
    """Draft behind the rows' roots with an autoregressive drafter, in the shape of `state.plan`.

    logits [B, 1, V'] and carry [B, 1, H] are the drafter's output for the root's children; `step`
    gives the same two for deeper ones. token_ids [V'] maps columns to target ids when the draft
    vocabulary is reduced. memory: the drafter's cache, for drafters whose rows attend to each
    other.
    """
    plan, root = state.plan, state.root[:, None]
    if isinstance(plan, DynamicPlan):
        return _grow_dynamic(plan.shape, state, logits, carry, step, noise, token_ids, memory)
    assert isinstance(plan, TreePlan)
    places = None if memory is None else static_places(plan, memory)
    tokens, drafted, drawn = [root], root, [logits]
    for level in plan.levels:
        if level.depth > 1:
            drafted = drafted if level.rows is None else drafted[:, level.rows]
            carry = carry if level.carry is None else carry[:, level.carry]
            place = CachePlace.nowhere(root.device) if places is None else places.at(level)
            logits, carry = step(place, drafted, carry)
            drawn.append(logits)
        positions = (state.root_position + level.depth)[:, None].expand(-1, logits.shape[1])
        columns = choose(logits, positions, level.max_rank, noise, token_ids).flatten(1)
        columns = columns if level.pick is None else columns[:, level.pick]
        drafted = columns if token_ids is None else token_ids[columns]
        tokens.append(drafted)
    kept = torch.cat(drawn, 1)[:, plan.drawn_from] if noise.keeps_logits else None
    return Proposal(torch.cat(tokens, dim=1), plan.tree, kept, token_ids)


def choose(
    logits: Tensor, positions: Tensor, max_rank: int, noise: Noise, token_ids: Tensor | None = None
) -> Tensor:
    """Best columns [B, M, max_rank + 1] int64 for logits [B, M, V'] at `positions` [B, M]."""
    if max_rank == 0:
        return noise.pick(logits, positions, token_ids)[..., None]
    return best_of(noise.scores(logits, positions, token_ids), max_rank + 1)[1]


def best_of(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of scores [..., V'] and their columns [..., count]; raises `UserError` if a
    reduced draft vocabulary has fewer tokens."""
    if count > scores.shape[-1]:
        raise UserError(
            f"the draft has {count} candidates behind one node, and the drafter's vocabulary has "
            f"{scores.shape[-1]} tokens. Give a decode.width, or decode.choices with ranks, of at "
            "most that number, or train with a larger head.draft_vocab_size."
        )
    best, columns = scores.topk(count, dim=-1)
    return best, columns


def fill(state: Rooted, logits: Tensor, noise: Noise, token_ids: Tensor | None = None) -> Proposal:
    """Draft behind the rows' roots with logits [B, D, V'] of every depth 1..D that do not depend on
    the tokens before; D is the plan's depth, at least 1. A node's token depends only on its depth
    and rank, unless rules need nodes that draw independently (`Noise.separate`)."""
    plan, root = state.plan, state.root[:, None]
    positions = state.root_position[:, None]
    positions = positions + torch.arange(1, logits.shape[1] + 1, device=root.device)
    if isinstance(plan, DynamicPlan):
        return _fill_dynamic(plan.shape, state.root, positions, logits, noise, token_ids)
    if isinstance(plan, DartreePlan):
        return grow_from_pass(plan.shape, state, logits, noise, token_ids)
    if noise.separate and not plan.tree.is_chain:
        columns = _each_node(plan, positions, logits, noise, token_ids)
    else:
        # [B, D * (max_rank + 1)]
        columns = choose(logits, positions, plan.max_rank, noise, token_ids).flatten(1)
        if not plan.tree.is_chain:
            columns = columns[:, plan.by_depth_and_rank]
    drafted = torch.cat([root, columns if token_ids is None else token_ids[columns]], 1)
    return Proposal(drafted, plan.tree, _by_depth(logits, plan.tree, noise), token_ids)


def _each_node(
    plan: TreePlan, positions: Tensor, logits: Tensor, noise: Noise, token_ids: Tensor | None
) -> Tensor:
    """Columns [B, N-1] of the drafted nodes, chosen separately for each node's children, from
    logits [B, D, V'] of every depth at `positions` [B, D]."""
    found = []
    for level in plan.levels:
        at = slice(level.depth - 1, level.depth)
        nodes = max(1, level.span.stop - level.span.start)
        of_each = logits[:, at].expand(-1, nodes, -1), positions[:, at].expand(-1, nodes)
        columns = choose(*of_each, level.max_rank, noise, token_ids).flatten(1)
        found.append(columns if level.pick is None else columns[:, level.pick])
    return torch.cat(found, 1)


def _by_depth(logits: Tensor, tree: TokenTree, noise: Noise) -> Tensor | None:
    """The logits [B, N, V'] from which each node's children were drawn, of [B, D, V'], if
    needed."""
    if not noise.keeps_logits:
        return None
    depth = tree.depth.clamp(max=logits.shape[1] - 1).expand(logits.shape[0], -1)
    return logits[torch.arange(logits.shape[0], device=logits.device)[:, None], depth]


# Dynamic trees


@dataclass(frozen=True)
class ChosenTree:
    """A tree that a search chose: tokens [B, N], tree, kept [B, N] int64: the nodes' numbers among
    all candidates, ascending; extended [B, E] int64: the candidates whose children were considered,
    level by level, the root first; candidates: C."""

    tokens: Tensor
    tree: TokenTree
    kept: Tensor
    extended: Tensor
    candidates: int


def best_first(root: Tensor, shape: DynamicShape, beam: int, offer: Offer) -> ChosenTree:
    """The best nodes behind `root` [B] among those that `offer` gives; `beam` are extended per
    level.

    Candidates are numbered level by level, then by parent, then by rank, the root being 0. Of equal
    scores the lower number is kept, so that parents and better siblings come first.
    """
    drafted = root[:, None]
    # of the nodes to extend [B, P]: their scores, places in their level, numbers among all
    total = torch.zeros(root.shape[0], 1, device=root.device)
    places = number = torch.zeros_like(drafted)
    scores, tokens, parents, extended, count = [total + torch.inf], [drafted], [number], [number], 1
    for depth in range(1, shape.max_depth + 1):
        gains, offered = offer(depth, places, drafted)
        level, offered = (total[..., None] + gains).flatten(1), offered.flatten(1)
        scores.append(level)
        tokens.append(offered)
        parents.append(number[..., None].expand_as(gains).flatten(1))
        if depth < shape.max_depth:
            total, places = level.topk(min(beam, level.shape[1]), dim=1)
            drafted, number = offered.gather(1, places), count + places
            extended.append(number)
        count += level.shape[1]
    ranked, chosen, above = (torch.cat(parts, 1) for parts in (scores, tokens, parents))
    chosen, tree, kept = keep_best(ranked, chosen, above, shape.nodes, shape.max_depth)
    return ChosenTree(chosen, tree, kept, torch.cat(extended, 1), count)


def candidates(
    logits: Tensor, positions: Tensor, shape: DynamicShape, noise: Noise, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The best `width` continuations for logits [B, P, V'] at `positions` [B, P]: gains and target
    ids [B, P, k], by falling score of the noise."""
    scores = noise.scores(logits, positions, token_ids)
    best, columns = best_of(scores, shape.width)
    if shape.ranking is Ranking.PERTURBED:
        gains = best - scores.logsumexp(-1, keepdim=True)
    elif shape.ranking is Ranking.GAP:
        gains = best - best[..., :1]
    else:
        gains = logits.float().log_softmax(-1).gather(-1, columns)
    return gains.clamp(max=0.0), columns if token_ids is None else token_ids[columns]


def _grow_dynamic(
    shape: DynamicShape,
    state: Rooted,
    logits: Tensor,
    carry: Tensor,
    step: Step,
    noise: Noise,
    token_ids: Tensor | None,
    memory: Memory | None,
) -> Proposal:
    root = state.root
    rows = torch.arange(root.shape[0], device=root.device)[:, None]
    levels = shape.max_depth - 1
    frame = None if memory is None else GrowingFrame(memory, shape.width, levels)
    drawn = [logits]

    def offer(depth: int, places: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal logits, carry
        if depth > 1:
            # the run row, one level up, that each node was drawn from
            above = places // shape.width
            place = CachePlace.nowhere(root.device) if frame is None else frame.next(above)
            logits, carry = step(place, tokens, carry[rows, above])
            drawn.append(logits)
        positions = (state.root_position + depth)[:, None].expand(-1, logits.shape[1])
        return candidates(logits, positions, shape, noise, token_ids)

    found = best_first(root, shape, shape.width, offer)
    kept = None
    if noise.keeps_logits:
        run = torch.arange(found.extended.shape[1], device=root.device).expand_as(found.extended)
        run_of = found.extended.new_zeros(root.shape[0], found.candidates)
        run_of.scatter_(1, found.extended, run)
        kept = torch.cat(drawn, 1)[rows, run_of.gather(1, found.kept)]
    return Proposal(found.tokens, found.tree, kept, token_ids)


def _fill_dynamic(
    shape: DynamicShape,
    root: Tensor,
    positions: Tensor,
    logits: Tensor,
    noise: Noise,
    token_ids: Tensor | None,
) -> Proposal:
    choices = candidates(logits, positions, shape, noise, token_ids)  # [B, D, k] each

    def offer(depth: int, places: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        parents = places.shape[1]
        gains, tokens = (each[:, depth - 1 : depth].expand(-1, parents, -1) for each in choices)
        return gains, tokens

    # No node below the N - 1 best of its own level can be among the N - 1 best of all.
    found = best_first(root, shape, shape.nodes - 1, offer)
    return Proposal(found.tokens, found.tree, _by_depth(logits, found.tree, noise), token_ids)
