"""Lookahead decoding: n-grams from Jacobi trajectories are collected in a pool and verified when
their first token comes up.

After Fu et al. (2402.02057). Two branches share every verification, as parts of one tree:

* The window: W columns of n - 1 levels. Level 0 is a chain of guesses for the next W positions; the
  node of level l and column i follows (l - 1, i), so it sees level 0 up to its column, then its own
  column, and has depth i + 1 + l. A pass returns the target's pick after every column. Column and
  pick form an n-gram that goes into the pool, and the levels move down by one, which is one Jacobi
  iteration. After a accepted tokens the columns move by a, so that each stays at its position.
* The verification branch: the newest G n-grams of the pool that start with the root, as chains
  behind it.

The nodes of both are ordinary nodes of the tree: window nodes that happen to be right are accepted
too. The window's picks use the noise of their positions, so trajectories are as good above
temperature 0 as at temperature 0. The drafter has no weights and reads no states of the target.

A tree or a dynamic shape only sets the number of nodes and the depth; the tree is lookahead's own
and stays within both: W + n - 2 <= depth and 1 + (W + G)(n - 1) <= nodes. Sizes left at 0 take what
fits: half of the columns for the window, as far as the depth allows, and the rest for n-grams. A
chain has no room for a window: it is filled with the newest n-gram that starts with the root, then
with the newest that starts with that one's last token, and so on. Its picks, right or wrong, are
the trajectory that n-grams are collected from.

Legend: B rows, N nodes, W columns, L = n - 1 levels, G n-grams verified, D depth, T positions, C
n-grams collected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.config import DepthFromTwo, Layers, Size, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.one_pass import refuse_dartree
from heads.api.target_info import TargetInfo
from heads.api.tree import DraftShape, TokenTree
from heads.nn.drafting.plan import LastShape
from heads.nn.lookup.history import History
from heads.nn.lookup.pool import NgramPool

PROMPT_CHUNK = 64
"""N-grams of a prompt collected at once."""


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of lookahead decoding."""

    ngram: DepthFromTwo = 4
    """Tokens of an n-gram (>= 2); a pass accepts up to ngram - 1 of them."""
    window: Layers = 0
    """Columns of the window; 0: as many as fit into the draft's shape."""
    guesses: Layers = 0
    """N-grams verified per pass; 0: as many as fit into the draft's shape."""
    pool: Size = 1024
    """Number of n-grams kept per row; the oldest are dropped first."""
    from_text: bool = True
    """Add the n-grams of the text to the pool, besides those of the trajectories."""

    def __post_init__(self) -> None:
        if self.pool < PROMPT_CHUNK:
            raise UserError(f"head.pool must be at least {PROMPT_CHUNK}; given: {self.pool}.")


@dataclass(frozen=True, eq=False)
class Layout:
    """The tree and its sizes, for all rows; a chain has neither columns nor n-grams."""

    tree: TokenTree
    columns: int
    guesses: int
    shared_between_rows: ClassVar[bool] = True


@dataclass
class State:
    """history: the row's text; pool: its n-grams; window [B, L, W] int64 (W = 0 for a chain)."""

    history: History
    pool: NgramPool
    window: Tensor
    layout: Layout


class Drafter:
    """Lookahead decoding with a pool per row."""

    kind: ClassVar[str] = "lookahead"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        self.config = config
        self.info = info
        self.needs = FeatureSpec(verified=True)
        self._layouts: LastShape[Layout] = LastShape()

    @property
    def levels(self) -> int:
        return self.config.ngram - 1

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill: the window is filled from the prompt, the pool with its n-grams."""
        rows, device = seen.tokens.shape[0], seen.tokens.device
        layout = self._layouts.get(tree, lambda: lay_out(self.config, tree, device))
        history = History.start(seen, tree.max_depth, capacity)
        pool = NgramPool.empty(rows, self.config.pool, self.config.ngram, device)
        window = seen.tokens.new_zeros(rows, self.levels, layout.columns)
        state = State(history, pool, window, layout)
        state.window.copy_(self._drawn(state))
        if self.config.from_text:
            ages = torch.arange(min(seen.tokens.shape[1], self.config.pool), device=device).flip(0)
            for age in ages.split(PROMPT_CHUNK):
                places = history.last - age
                self._collect_text(state, places, places >= 0)
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Window and verification branch, or a chain of n-grams; all drafts are certain."""
        root, layout = state.history.root, state.layout
        if layout.tree.is_chain:
            return Proposal(torch.cat([root, self._joined(state)], 1), layout.tree)
        grams, found = state.pool.starting_with(root[:, 0], layout.guesses)
        grams = torch.where(found[..., None], grams, root[..., None])
        tokens = torch.cat([root, state.window.flatten(1), grams.flatten(1)], 1)
        return Proposal(tokens, layout.tree)

    def _joined(self, state: State) -> Tensor:
        """A chain [B, D] of n-grams, each starting with the last one's last token (or repeating
        it)."""
        last, drafted = state.history.root[:, 0], []
        for _ in range(-(-state.layout.tree.max_depth // self.levels)):
            gram, found = state.pool.starting_with(last, 1)
            gram = torch.where(found, gram[:, 0], last[:, None])
            drafted.append(gram)
            last = gram[:, -1]
        return torch.cat(drafted, 1)[:, : state.layout.tree.max_depth]

    # After a verification

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Collect n-grams of trajectories and text, and move the window on; see the protocol."""
        verified, columns = accepted.verified, state.layout.columns
        picks = None
        if verified is not None and verified.tree is state.layout.tree:
            picks = verified.picks
            if state.layout.tree.is_chain:
                self._collect_chain(state, verified.tokens, picks)
            else:
                picks = picks[:, 1 + (self.levels - 1) * columns :][:, :columns]  # [B, W]
                grams = torch.cat([state.window.transpose(1, 2), picks[..., None]], 2)  # [B, W, n]
                state.pool.add(grams, torch.ones_like(picks, dtype=torch.bool))
        state.history.append(accepted)
        if self.config.from_text:
            self._collect_text(state, accepted.positions + 1, accepted.valid)
        if not state.layout.tree.is_chain:
            self._move(state, accepted.lengths - 1, picks)
        return state

    def _collect_chain(self, state: State, tokens: Tensor, picks: Tensor) -> None:
        """Collect n-grams that end with a pick; tokens, picks [B, D + 1] of the nodes.

        The deepest come first, because they have the most wrong guesses before them: the others
        then count as newer.
        """
        before = state.history.newest(self.levels)[:, :-1]
        text = torch.cat([before, tokens], 1).unfold(1, self.levels, 1)  # [B, D + 1, n - 1]
        grams = torch.cat([text, picks[..., None]], 2).flip(1)
        state.pool.add(grams, (grams >= 0).all(-1))

    def _collect_text(self, state: State, places: Tensor, valid: Tensor) -> None:
        """Collect the n-grams of the text that end at `places` [B, C], where `valid` [B, C]."""
        # [B, C, n]
        slots = places[..., None] + torch.arange(1 - self.config.ngram, 1, device=places.device)
        grams = state.history.tokens.gather(1, slots.clamp(min=0).flatten(1)).view(*slots.shape)
        state.pool.add(grams, valid & (slots[..., 0] >= 0))

    def _move(self, state: State, accepted: Tensor, picks: Tensor | None) -> None:
        """The next window, in place: every level takes the one above it, the last the picks [B, W],
        and columns move by `accepted` [B]. New columns on the right are drawn from the text."""
        fresh = self._drawn(state)
        last = fresh[:, -1] if picks is None else picks
        above = torch.cat([state.window[:, 1:], last[:, None]], 1)
        column = accepted[:, None] + torch.arange(state.layout.columns, device=last.device)
        inside = (column < state.layout.columns)[:, None]
        column = column.clamp(max=state.layout.columns - 1)[:, None]
        moved = above.gather(2, column.expand_as(above))
        state.window.copy_(torch.where(inside, moved, fresh))

    def _drawn(self, state: State) -> Tensor:
        """Tokens of the text for a whole window [B, L, W], chosen pseudo-randomly."""
        _, levels, columns = state.window.shape
        numbers = torch.arange(levels * columns, device=state.window.device)
        drawn = state.history.drawn((state.history.last + 1) * levels * columns + numbers)
        return drawn.view(state.window.shape)


def lay_out(config: Config, shape: DraftShape, device: torch.device) -> Layout:
    """The tree for a shape, see the module. Raises `UserError` when the parts do not fit."""
    refuse_dartree(shape)
    if config.pool < shape.num_nodes:
        raise UserError(
            f"head.pool={config.pool} cannot take the n-grams of a draft of {shape.num_nodes} "
            "nodes: give at least as many."
        )
    if shape.is_chain:
        assert isinstance(shape, TokenTree)
        return Layout(shape, 0, 0)
    levels = config.ngram - 1
    both, deepest = (shape.num_nodes - 1) // levels, shape.max_depth - levels + 1
    columns = config.window or max(1, min(deepest, both - (config.guesses or both // 2)))
    guesses = config.guesses or max(1, both - columns)
    if columns > deepest or columns + guesses > both:
        raise UserError(
            f"lookahead with head.ngram={config.ngram}, {columns} columns "
            f"(head.window={config.window}) and {guesses} n-grams (head.guesses={config.guesses}) "
            f"needs a draft of depth {columns + levels - 1} and "
            f"{1 + (columns + guesses) * levels} nodes; decode.depth and decode.nodes (or "
            f"decode.choices) give {shape.max_depth} and {shape.num_nodes}. Ask for a larger "
            "draft, or for less of these three (0 takes what fits)."
        )
    first = [0, *range(1, columns)]  # level 0 is a chain
    window = first + [1 + place for place in range((levels - 1) * columns)]
    begin = 1 + levels * columns
    branch = [begin + g * levels + i - 1 if i else 0 for g in range(guesses) for i in range(levels)]
    parents = torch.tensor([[0, *window, *branch]], device=device)
    return Layout(TokenTree.from_parents(parents, columns + levels - 1), columns, guesses)
