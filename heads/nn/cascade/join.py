"""Several drafters in one verification: their trees share one root.

Legend: B rows, N nodes of the joined tree, D deepest level.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DartreeShape, DraftShape, DynamicShape, TokenTree


def split_shape(
    shape: DraftShape, branches: tuple[int, ...], device: torch.device
) -> list[DraftShape]:
    """The shapes that the parts fill, which together stay within `shape`: the first part gets the
    same kind of shape with fewer nodes, the others chains of at most `branches` tokens each.

    The others get at most half of the drafted nodes, in order; a part for which nothing is left
    gets a chain of 0. A chain has only one branch, so the first part gets all of it.
    """
    drafted = shape.num_nodes - 1
    room = 0 if shape.is_chain else drafted // 2
    shares = []
    for wanted in branches:
        shares.append(min(wanted, shape.max_depth, room))
        room -= shares[-1]
    first = shape if not sum(shares) else smaller(shape, drafted - sum(shares), device)
    return [first, *(TokenTree.chain(share, device) for share in shares)]


def smaller(shape: DraftShape, drafted: int, device: torch.device) -> DraftShape:
    """`shape` with `drafted` nodes behind the root.

    A static tree keeps the nodes with the shortest paths, where every sibling rank on the way
    counts as two levels. So it keeps its depth along the best path rather than its width.
    """
    if isinstance(shape, (DynamicShape, DartreeShape)):
        return replace(shape, nodes=drafted + 1)
    paths = sorted(choices_of(shape), key=lambda path: (len(path) + 2 * sum(path), path))
    return TokenTree.from_choices(paths[:drafted], device)


def choices_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The paths of sibling ranks of a static tree's drafted nodes. Reads the tree on the host."""
    parents = tree.parents[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    children = [0] * len(parents)
    for node in range(1, len(parents)):
        above = parents[node]
        paths.append((*paths[above], children[above]))
        children[above] += 1
    return paths[1:]


def join(proposals: list[Proposal]) -> Proposal:
    """All drafted nodes behind one root. A token that several parts drafted appears several times,
    which the `match` rule handles correctly (of equal siblings, the one with the longer accepted
    path counts).

    There are no logits: weighing a draft by its q is not valid for drafts from several
    distributions beside each other. So the rules take the drafts as certain, which is `match` (see
    `inference.decoding.rules.weights`).
    """
    if len(proposals) == 1:
        return proposals[0]
    trees = [proposal.tree for proposal in proposals]
    rows = max(tree.parents.shape[0] for tree in trees)
    parents, depth, count = [], [], 1
    for number, tree in enumerate(trees):
        skip = int(number > 0)  # all but the first leave their root out
        own = tree.parents[:, skip:]
        shifted = torch.where(own > 0, own + (count - 1), 0) if skip else own
        parents.append(shifted.expand(rows, -1))
        depth.append(tree.depth[:, skip:].expand(rows, -1))
        count += own.shape[1] - (1 - skip)
    nodes = sum(tree.num_nodes - 1 for tree in trees) + 1
    assert count == nodes
    deepest, ancestors = max(tree.max_depth for tree in trees), _ancestors(trees, rows, nodes)
    tree = TokenTree(torch.cat(parents, 1), torch.cat(depth, 1), ancestors, deepest, is_chain=False)
    tokens = _behind_one_root([proposal.tokens for proposal in proposals])
    known = [each.confidence for each in proposals if each.confidence is not None]
    confidence = _behind_one_root(known) if len(known) == len(proposals) else None
    return Proposal(tokens, tree, confidence=confidence)


def _ancestors(trees: list[TokenTree], rows: int, nodes: int) -> Tensor:
    """[rows, N, N] bool: every part's own block, and the root for all."""
    device = trees[0].parents.device
    found = torch.zeros(rows, nodes, nodes, dtype=torch.bool, device=device)
    found[:, :, 0].fill_(True)
    first = 1
    for tree in trees:
        end = first + tree.num_nodes - 1
        found[:, first:end, first:end] = tree.ancestors[:, 1:, 1:]
        first = end
    return found


def _behind_one_root(values: list[Tensor]) -> Tensor:
    """Values of all parts' nodes, side by side; the root's are the first part's."""
    return torch.cat([values[0], *(value[:, 1:] for value in values[1:])], 1)
