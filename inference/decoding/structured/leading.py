"""Drafts that follow the row's grammar: a drafter chooses among allowed tokens, as far as the host
knows them before the draft.

Before a step the host knows which tokens may follow the root and, where the grammar forces the text
that comes next (the keys and the punctuation of a JSON schema), which may follow along that text.
Until a draft leaves this path, its tokens are drawn from the drafter's logits with the forbidden
tokens at -inf, as the target's are. Without this, a drafter drafts what it would write without the
grammar, most of which is rejected. Only drafts change, so the text, or its distribution, stays the
target's.

Nodes of a tree have no path that could be followed while they are drawn. There, only the root's
children are led.

Legend: R rows, M positions of a call, D deepest level, W = ceil(V / 32) words of 32 tokens each, V
vocabulary, V' drafted part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.api.drafter import Noise, Proposal

NO_TOKEN, NOT_DRAWN = -1, -2


@dataclass
class Lead:
    """What the host knows of R rows before a step.

    tokens [R, D] int64: the path of forced tokens behind the root, `NO_TOKEN` after its end and in
    rows without a grammar; words [R, D, W] int32: the tokens that may follow the root, and those
    that may follow each token of the path. Words beyond allow everything.
    """

    tokens: Tensor
    words: Tensor

    @classmethod
    def empty(cls, rows: int, depth: int, words: int, device: torch.device) -> Lead:
        """Rows without a grammar."""
        tokens = torch.full((rows, depth), NO_TOKEN, dtype=torch.int64, device=device)
        return cls(tokens, tokens.new_full((rows, depth, words), -1, dtype=torch.int32))

    def first(self, rows: int) -> Lead:
        """The first rows, as views."""
        return Lead(self.tokens[:rows], self.words[:rows])


class LedNoise:
    """A drafter's `Noise` for one draft of rows with grammars. roots [R] int64: positions of their
    roots; chain: the draft is a chain."""

    def __init__(self, noise: Noise, lead: Lead, roots: Tensor, chain: bool) -> None:
        self.noise, self._lead, self._roots, self._chain = noise, lead, roots, chain
        self.keeps_logits, self.separate = noise.keeps_logits, noise.separate
        self.tempered = noise.tempered
        self._drawn = torch.full_like(lead.tokens, NOT_DRAWN)

    def moved(self, noise: Noise, move: Callable[[Tensor], Tensor]) -> LedNoise:
        """The same on another device. noise: the drafter's, there; move: copies a tensor there."""
        lead = Lead(move(self._lead.tokens), move(self._lead.words))
        return LedNoise(noise, lead, move(self._roots), self._chain)

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See `Noise`. The tokens of a chain are drawn one after another."""
        if not self._chain:
            led = self._first_level(logits, positions, token_ids)
            return self.noise.pick(led, positions, token_ids)
        found = []
        for place in range(positions.shape[1]):
            at = positions[:, place : place + 1]
            depth = at - self._roots[:, None]
            led = hide(logits[:, place : place + 1], self._allowed(depth, token_ids))
            column = self.noise.pick(led, at, token_ids)
            self._keep(column if token_ids is None else token_ids[column], depth)
            found.append(column)
        return torch.cat(found, 1)

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See `Noise`. The root's children are led."""
        led = self._first_level(logits, positions, token_ids)
        return self.noise.scores(led, positions, token_ids)

    def led(self, proposal: Proposal) -> Proposal:
        """The draft, with its logits as its tokens were drawn from them."""
        if proposal.logits is None:
            return proposal
        logits, size = proposal.logits, self._lead.tokens.shape[1]
        self._drawn.fill_(NOT_DRAWN)
        drawn = proposal.tokens[:, 1 : size + 1] if self._chain else proposal.tokens[:, :0]
        self._drawn[:, : drawn.shape[1]] = drawn
        nodes = min(size, logits.shape[1]) if self._chain else 1
        depth = torch.arange(1, nodes + 1, device=logits.device).expand(logits.shape[0], -1)
        above = hide(logits[:, :nodes], self._allowed(depth, proposal.token_ids))
        return replace(proposal, logits=torch.cat([above, logits[:, nodes:]], 1))

    def _first_level(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None) -> Tensor:
        first = (positions - self._roots[:, None] == 1)[..., None]
        allowed = self._allowed(torch.ones_like(self._roots)[:, None], token_ids)
        return hide(logits, allowed | ~first)

    def _allowed(self, depth: Tensor, token_ids: Tensor | None) -> Tensor:
        """Which columns [R, M, V'] may be drawn at levels `depth` [R, M]: all where the draft has
        left the path."""
        tokens, words = self._lead.tokens, self._lead.words
        size = tokens.shape[1]
        place = torch.arange(size, device=depth.device)
        above = place < depth[..., None] - 1  # [R, M, D]
        follows = ((self._drawn == tokens)[:, None] | ~above).all(-1) & (depth <= size)
        row = torch.arange(depth.shape[0], device=depth.device)[:, None]
        allowed = unpacked(words[row, (depth - 1).clamp(0, size - 1)], token_ids)
        return allowed | ~follows[..., None]

    def _keep(self, tokens: Tensor, depth: Tensor) -> None:
        """Note the tokens [R, 1] drawn at levels `depth` [R, 1]."""
        place = torch.arange(1, self._drawn.shape[1] + 1, device=depth.device)
        self._drawn = torch.where(place == depth, tokens, self._drawn)


def unpacked(words: Tensor, token_ids: Tensor | None) -> Tensor:
    """The bits of words [..., W] int32 as bools: [..., V'] of `token_ids` [V'], or [..., 32 W]."""
    if token_ids is not None:
        return (words[..., token_ids // 32] >> (token_ids % 32).to(torch.int32)) & 1 > 0
    place = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> place) & 1 > 0).flatten(-2)


def hide(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [R, M, V'] with -inf where `allowed` [R, M, >= V'] is off. Positions of which nothing
    would be left stay as they are: the draft vocabulary has no allowed token, or the draft is
    certain of another one (a pair's drafter without probabilities)."""
    allowed = allowed[..., : logits.shape[-1]]
    left = (allowed & (logits > float("-inf"))).any(-1, keepdim=True)
    return logits.masked_fill(~allowed & left, float("-inf"))
