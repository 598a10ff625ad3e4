"""Suffix lookup: drafts what most often followed the longest earlier occurrence of the newest
tokens, in the row's own text and in answers to earlier requests.

After SuffixDecoding (Oliaro et al., 2411.04975) and SAM-Decoding (Hu et al., 2411.10666), which
walk suffix trees and automata. Here the same counts come from comparing the newest tokens with
every position of the texts at once (`heads.nn.lookup.counts`), in tensors of fixed shapes. The
longest match wins, wherever it is found. Among its occurrences the most frequent continuation is
drafted; a tree takes the most frequent ones. A draft ends where its path becomes too rare: deeper
nodes are dead (`Proposal.limit`). The drafter has no weights and reads no states of the target.

Answers are stored as they are committed, in rings that belong to the drafter and not to a batch
(`heads.nn.lookup.archive`), so repeated traffic (agents, templates, the same question again) is
drafted from earlier answers. A measurement that answers the same prompts twice with one drafter
measures this effect; `Drafter.forget` empties the rings.

Legend: B rows, N nodes, S slots of a row's text, R rings, A slots of a ring, K occurrences, D
depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.config import Rows, Size, UnitInterval, Weight, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from heads.api.tree import DraftShape
from heads.nn.drafting.plan import Plan, PlanCache
from heads.nn.lookup.archive import Archive, Writing
from heads.nn.lookup.counts import Counted, fill_counted
from heads.nn.lookup.history import History, require_lengths


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of suffix lookup."""

    min_n: Size = 1
    """Shortest run of tokens that counts as a match (>= 1)."""
    max_n: Size = 24
    """Longest run of tokens compared (>= min_n)."""
    history_tokens: Size = 8192
    """Tokens of earlier answers that each row of the batch keeps; the oldest are dropped first. 0:
    none. At every step, each row searches the tokens that all rows keep."""
    context: Size = 8
    """Tokens before an answer that are kept too, so that the beginning of the answer can be
    found."""
    occurrences: Rows = 64
    """Most occurrences of the longest match that count: the row's own first, then the newest."""
    min_probability: UnitInterval = 0.1
    """Smallest share of the occurrences that continue along a drafted path (0 to 1)."""
    per_match: Weight = 0.0
    """Longest draft per matched token (>= 0): 2.0 drafts 4 tokens after a match of 2; 0: no
    limit."""
    backoff: UnitInterval = 0.0
    """Factor on an occurrence's weight per token less than the longest match; 0: only the longest
    counts."""

    def __post_init__(self) -> None:
        require_lengths("suffix", self.min_n, self.max_n)


@dataclass
class State:
    """history: the row's text; writing: its answer's place in the archive, if one is kept."""

    history: History
    writing: Writing
    archive: Archive | None
    plan: Plan


class Drafter:
    """Suffix lookup over each row's own text and over earlier answers."""

    kind: ClassVar[str] = "suffix"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        self.config = config
        self.info = info
        self.needs = FeatureSpec()
        self._plans = PlanCache()
        self._archive: Archive | None = None

    def forget(self) -> None:
        """Forget all earlier answers, in place: batches that are under way lose them too."""
        if self._archive is not None:
            self._archive.forget()

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill. For a batch wider than any before, new rings take over the stored
        answers."""
        history = History.start(seen, tree.max_depth, capacity)
        least, given = 2 * (self.config.context + tree.max_depth + 3), self.config.history_tokens
        if 0 < given < least:
            raise UserError(
                f"head.history_tokens={given} is too small: one step of a draft {tree.max_depth} "
                f"deep with head.context={self.config.context} needs {least}. Give more, or 0 to "
                "keep no history."
            )
        rows, device, archive = seen.tokens.shape[0], seen.tokens.device, self._archive
        if given and (archive is None or archive.rings < rows or archive.cursor.device != device):
            self._archive = Archive.of(rows, given, device, archive)
        return State(history, Writing.start(history), self._archive, self._plans.of(tree))

    def propose(self, state: State, noise: Noise) -> Proposal:
        """The most frequent continuations of the longest match, with their shares as confidence."""
        tokens, weights, longest = self._occurrences(state)
        deepest = torch.full_like(longest, state.plan.max_depth)
        if self.config.per_match:
            deepest = torch.minimum(deepest, (longest * self.config.per_match).long())
        counted = Counted.of(tokens, weights, self.config.min_probability, deepest)
        return fill_counted(state.plan, state.history.root[:, 0], counted)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Remember the accepted run in the row's text and in its ring; see the protocol."""
        if state.archive is not None:
            state.writing.append(state.archive, state.history, accepted, self.config.context)
        state.history.append(accepted)
        return state

    # Searching

    def _occurrences(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The best K occurrences: the longest matches first, then own ones, then recent ones.

        Returns what followed them [B, K, D] int64, weights [B, K] float32, the longest match [B].
        """
        newest = state.history.newest(self.config.max_n).flip(1)  # [B, max_n], the root first
        matched, places = self._own(state, newest), state.history.tokens.shape[1]
        if state.archive is not None:
            archived = self._archived(state, state.archive, newest)
            matched = torch.cat([matched, archived.flatten(1)], 1)
        matched = torch.where(matched >= self.config.min_n, matched, 0)
        # Unique for every place, so that the order does not depend on how a device breaks ties.
        recency = torch.arange(places, device=newest.device)
        if state.archive is not None:
            rings, slots = state.archive.rings, state.archive.slots
            ring = torch.arange(rings, device=newest.device)[:, None]
            newness = (slots - 1 - state.archive.age()) * rings + ring
            recency = torch.cat([recency + slots * rings, newness.flatten()])
        score, place = (matched * matched.shape[1] + recency).topk(
            min(self.config.occurrences, matched.shape[1]), 1
        )
        lengths = score // matched.shape[1]
        longest = lengths[:, :1]
        weights = torch.pow(self.config.backoff, (longest - lengths).float())  # 0 ** 0 is 1
        tokens = self._continuations(state, place)
        return tokens, torch.where(lengths > 0, weights, 0.0), longest[:, 0]

    def _own(self, state: State, newest: Tensor) -> Tensor:
        """How many tokens up to each slot of the row's text [B, S] equal the newest; 0 at the
        root."""
        tokens = state.history.tokens
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        same, matched = slots < state.history.last, torch.zeros_like(tokens)
        for back in range(min(self.config.max_n, tokens.shape[1])):
            equal = tokens[:, : tokens.shape[1] - back] == newest[:, back : back + 1]
            same = same & F.pad(equal, (back, 0))
            matched = matched + same
        return matched

    def _archived(self, state: State, archive: Archive, newest: Tensor) -> Tensor:
        """The same for every ring [B, R, A], without the answer that the row itself is writing."""
        ring, rows = archive.ring, newest.shape[0]
        written = F.pad(state.writing.written, (0, archive.rings - rows))
        present = archive.age() < written[:, None]  # [R, A]
        numbers = torch.arange(archive.rings, device=newest.device)
        own = (numbers[:rows, None] == numbers)[..., None] & present
        same = ~own & (ring.roll(-1, 1) >= 0)
        matched = torch.zeros_like(same, dtype=torch.int64)
        for back in range(min(self.config.max_n, archive.slots)):
            same = same & (ring.roll(back, 1) == newest[:, back, None, None])
            matched = matched + same
        return matched

    def _continuations(self, state: State, place: Tensor) -> Tensor:
        """What followed places [B, K] of texts and rings [B, K, D]; -1 after an answer's end.

        The row's own text starts over after its newest token, which continues a repetition.
        """
        history, archive = state.history, state.archive
        own = history.tokens.shape[1]
        steps = torch.arange(state.plan.max_depth, device=place.device)
        end = place.clamp(max=own - 1)[..., None]
        wanted = end + 1 + steps % (history.last[..., None] - end).clamp(min=1)
        tokens = history.tokens.gather(1, wanted.clamp(max=own - 1).flatten(1)).view(*wanted.shape)
        if archive is None:
            return tokens
        behind = (place - own).clamp(min=0)
        ring, slot = behind // archive.slots, behind % archive.slots
        follows = archive.tokens[ring[..., None], (slot[..., None] + 1 + steps) % archive.slots]
        ended = (follows < 0).to(torch.uint8).cummax(-1).values.bool()
        return torch.where((place < own)[..., None], tokens, torch.where(ended, -1, follows))
