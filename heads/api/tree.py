"""Token trees: the parents of the drafted tokens of one verification.

A chain is a tree whose node i follows node i-1; plain decoding uses the tree of one node. Node 0 is
the root: the last committed token, not yet in the target's cache. Parents come before their
children.

Legend: B rows, N nodes, D deepest level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from heads.api.errors import UserError


@dataclass(frozen=True)
class TokenTree:
    """The topology of drafted nodes. A static tree has leading size 1 and broadcasts over rows; a
    dynamic one has size B.

    parents [1|B, N] int64 (the root is its own parent), depth [1|B, N] int64, ancestors [1|B, N, N]
    bool where `ancestors[b, i, j]` says that node j lies on the path from the root to node i (i
    itself included). `max_depth` and `is_chain` are known on the host, so that no step has to
    synchronise with the device.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    max_depth: int
    is_chain: bool

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    def words(self) -> Tensor:
        """The ancestors as bits [1|B, N, W] int32: see `ancestor_words`."""
        return ancestor_words(self.ancestors)

    @classmethod
    def from_parents(cls, parents: Tensor, max_depth: int) -> TokenTree:
        """Build from parents [1|B, N] without a host synchronisation; `max_depth` bounds it."""
        numbers = torch.arange(parents.shape[1], device=parents.device)
        ancestors = (numbers[:, None] == numbers).expand(parents.shape[0], -1, -1).clone()
        jump = parents
        for _ in range(max_depth):
            ancestors |= jump[..., None] == numbers
            jump = torch.gather(parents, 1, jump)
        depth = ancestors.sum(-1) - 1
        return cls(parents, depth, ancestors, max_depth, is_chain=False)

    @classmethod
    def chain(cls, depth: int, device: torch.device | str = "cpu") -> TokenTree:
        """A chain of `depth` drafted tokens behind the root (depth 0: plain decoding)."""
        nodes = torch.arange(depth + 1, device=device)
        parents, ancestors = (nodes - 1).clamp(min=0), nodes[:, None] >= nodes
        return cls(parents[None], nodes[None], ancestors[None], depth, is_chain=True)

    @classmethod
    def from_choices(
        cls, choices: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> TokenTree:
        """A static tree from paths of sibling ranks: [[0], [1], [0, 0]] is the two best first
        tokens and one second token.

        Every prefix of a path must be listed as well. Raises `UserError` otherwise, and for an
        empty path.
        """
        if any(len(path) == 0 for path in choices):
            raise UserError(
                "decode.choices has an empty path, which stands for no drafted token (the root is "
                "always there): leave it out. Paths are sibling ranks, such as [[0], [1], [0, 0]]."
            )
        paths = sorted({tuple(path) for path in choices}, key=lambda path: (len(path), path))
        index: dict[tuple[int, ...], int] = {(): 0}
        parents = [0]
        for path in paths:
            if path[:-1] not in index or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in index):
                raise UserError(
                    f"tree path {list(path)} stands without the path or the better sibling before "
                    "it; list every prefix and every better rank too."
                )
            index[path] = len(parents)
            parents.append(index[path[:-1]])
        max_depth = max((len(path) for path in paths), default=0)
        tree = cls.from_parents(torch.tensor([parents], device=device), max_depth)
        return replace(tree, is_chain=parents == [max(i - 1, 0) for i in range(len(parents))])

    def to(self, device: torch.device | str) -> TokenTree:
        parents, depth = self.parents.to(device), self.depth.to(device)
        return replace(self, parents=parents, depth=depth, ancestors=self.ancestors.to(device))

    def levels(self) -> list[Level]:
        """A static tree level by level. Reads the tree on the host; call once."""
        parents, depth = self.parents[0].tolist(), self.depth[0].tolist()
        found = []
        for level in range(1, self.max_depth + 1):
            nodes = [i for i, d in enumerate(depth) if d == level]
            if nodes != list(range(nodes[0], nodes[0] + len(nodes))):
                raise UserError("the nodes of a static tree must be numbered level by level.")
            above = [i for i, d in enumerate(depth) if d == level - 1]
            seen: dict[int, int] = {}
            ranks = []
            for node in nodes:
                ranks.append(seen.get(parents[node], 0))
                seen[parents[node]] = ranks[-1] + 1
            found.append(Level(nodes, [above.index(parents[node]) for node in nodes], ranks))
        return found


class Ranking(StrEnum):
    """The score by which nodes of a dynamic tree are compared; it is summed along a path.

    With q the draft distribution at a node, g the noise it shares with the target (0 at temperature
    0) and s = log q + g: PROBABILITY log q; PERTURBED log softmax(s) over the vocabulary; GAP s
    minus the best sibling's s.
    """

    PROBABILITY = "probability"
    PERTURBED = "perturbed"
    GAP = "gap"


@dataclass(frozen=True)
class DynamicShape:
    """A tree whose topology is chosen separately for every row and step, within fixed sizes.

    nodes: the root included. max_depth: deepest level. width: nodes expanded per level, and
    children considered per node. ranking: how nodes are compared.
    """

    nodes: int
    max_depth: int
    width: int
    ranking: Ranking = Ranking.PERTURBED

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.max_depth < 1 or self.width < 1:
            raise UserError(
                f"a dynamic tree needs nodes >= 2, depth >= 1 and width >= 1; given {self.nodes}, "
                f"{self.max_depth}, {self.width}."
            )
        most = self.width + (self.max_depth - 1) * self.width**2
        if self.nodes - 1 > most:
            raise UserError(
                f"a dynamic tree of depth {self.max_depth} and width {self.width} has {most} "
                f"candidates at most; decode.nodes must be {most + 1} or less; given {self.nodes}."
            )

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def is_chain(self) -> bool:
        return False


@dataclass(frozen=True)
class DartreeShape:
    """A tree that grows from the distributions of one drafting pass (DARTree, 2608.13524; see
    `heads.nn.drafting.dartree`), separately for every row and step.

    nodes: the root included. max_depth: deepest level. width: nodes kept per level while it grows.
    candidates: tokens considered at each depth. depth_penalty: nats that are subtracted from a
    node's score per level when the nodes to verify are chosen.
    """

    nodes: int
    max_depth: int
    width: int
    candidates: int
    depth_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 2 or min(self.max_depth, self.width, self.candidates) < 1:
            raise UserError(
                "a dartree needs nodes >= 2, depth >= 1, width >= 1 and candidates >= 1; given "
                f"{self.nodes}, {self.max_depth}, {self.width}, {self.candidates}."
            )
        if self.depth_penalty < 0:
            raise UserError(
                "decode.depth_penalty must be 0 or more, so that no node scores above its parent; "
                f"given {self.depth_penalty:g}."
            )
        most = sum(self.level_sizes())
        if self.nodes - 1 > most:
            raise UserError(
                f"a dartree of depth {self.max_depth}, width {self.width} and {self.candidates} "
                f"candidates grows {most} nodes at most; decode.nodes must be {most + 1} or less; "
                f"given {self.nodes}. Or raise decode.width."
            )

    def level_sizes(self) -> list[int]:
        """Nodes that each level has while the tree grows."""
        sizes = [min(self.width, self.candidates)]
        for _ in range(1, self.max_depth):
            sizes.append(min(self.width, sizes[-1] * self.candidates))
        return sizes

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def is_chain(self) -> bool:
        return False


DraftShape = TokenTree | DynamicShape | DartreeShape
"""The shape that a drafter fills: a static tree, or the sizes of a tree that it chooses itself."""


def one_path(shape: DraftShape, device: torch.device) -> TokenTree:
    """The tree that a drafter with one continuation fills; for dynamic shapes, a chain that
    fits."""
    if isinstance(shape, TokenTree):
        return shape
    return TokenTree.chain(min(shape.max_depth, shape.nodes - 1), device)


def ancestor_words(ancestors: Tensor) -> Tensor:
    """Bits of `ancestors` [R, N, N] bool as [R, N, W] int32, W = ceil(N / 32): bit j % 32 of word j
    // 32 stands for node j.

    int32 carries the pattern of an unsigned word, because torch has few operations on uint32.
    """
    padded = torch.nn.functional.pad(ancestors, (0, -ancestors.shape[2] % 32))
    places = torch.arange(32, device=ancestors.device)
    packed = (padded.unflatten(2, (-1, 32)).long() << places).sum(-1)
    return torch.where(packed > 0x7FFFFFFF, packed - (1 << 32), packed).to(torch.int32)


@dataclass(frozen=True)
class Level:
    """One depth of a static tree: `nodes` (consecutive), the place of each one's parent in the
    level above, its sibling rank."""

    nodes: list[int]
    parent_places: list[int]
    ranks: list[int]

    @property
    def max_rank(self) -> int:
        return max(self.ranks)
