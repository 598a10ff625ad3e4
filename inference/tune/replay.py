"""Computes which drafts would have been accepted along texts that the target has written, without
the target's passes.

The match rule never changes the text. So the target decodes every prompt once and computes its
states once, and any shape of any drafter is then walked along the known text. The result is exactly
the accepted length of decoding, pass by pass.

Legend: B prompts, N nodes, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.api.tree import DraftShape
from inference.decoding.adaptive.lengths import Limits
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion, PassRecord
from inference.decoding.rules.accept import walk
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.measure.metrics import Outcome
from inference.target.model import TargetModel
from inference.tune.confidence import confidences


@dataclass
class Replay:
    """Walks a drafter along texts that the target has written (one completion per prompt), with the
    target's states."""

    target: TargetModel
    drafter: Any
    texts: list[Completion]
    temperature: float

    def __post_init__(self) -> None:
        rows = [list(item.request.tokens) + item.tokens for item in self.texts]
        device = self.target.device
        self.prompt = torch.tensor([len(item.request.tokens) for item in self.texts], device=device)
        self.length = torch.tensor([len(row) for row in rows], device=device)
        self.tokens = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row, device=device) for row in rows], batch_first=True
        )
        positions = torch.arange(self.tokens.shape[1], device=device).expand_as(self.tokens)
        segments = (positions < self.length[:, None]).int()
        self.taps, self.last_hidden = self.target.features(
            self.tokens, positions, segments, self.drafter.needs
        )
        settings = DecodeConfig(temperature=self.temperature).sampling()
        seeds = torch.tensor([item.request.seed for item in self.texts], device=device)
        self.noise = SharedNoise(settings, seeds, self.target.info.vocab_size, Stream.TARGET)

    def outcomes(self, shape: DraftShape) -> list[Outcome]:
        """The passes for measuring tau, by the prompts' numbers."""
        return [Outcome(str(row), "", records) for row, records in enumerate(self.passes(shape))]

    @torch.no_grad()
    def passes(
        self, shape: DraftShape, limits: Limits | None = None, everywhere: bool = False
    ) -> list[list[PassRecord]]:
        """The passes that decoding would have needed, per prompt. limits: stops chains early;
        `PassRecord.live` then has the drafted levels that counted. everywhere: a pass at every
        position of the texts instead, with `PassRecord.confidence`, for greedy chains."""
        passes: list[list[PassRecord]] = [[] for _ in self.texts]
        self.noise.keeps_logits = everywhere or (limits is not None and limits.wants_logits)
        root = self.prompt.clone()  # [B]: position of the last committed token
        capacity = self.tokens.shape[1] + shape.num_nodes
        state = self.drafter.start(self._states(torch.zeros_like(root), root), shape, capacity)
        while bool((root < self.length - 1).any()):
            proposal = self.drafter.propose(state, self.noise)
            picks = self._at(root[:, None] + 1 + proposal.tree.depth)
            walked = walk(proposal.tokens, picks, proposal.tree)
            left = self.length - 1 - root
            limit = None if limits is None else limits.limit(proposal, left > 0)
            live = torch.full_like(walked.accepted, shape.max_depth) if limit is None else limit
            accepted = torch.minimum(walked.accepted, live)
            refused = walked.has_children & (walked.accepted < live)
            committed = torch.minimum(accepted + 1, left)
            refused = refused & (accepted < committed)  # not cut by the end of the text
            found = torch.stack([accepted, committed, live, refused.long()]).T.tolist()
            sure = confidences(proposal) if everywhere else None
            known = [()] * len(found) if sure is None else map(tuple, sure.tolist())
            for row, ((kept, count, deepest, no), each) in enumerate(
                zip(found, known, strict=True)
            ):
                if count > 0:
                    record = PassRecord(min(kept, count), count, bool(no), live=deepest)
                    passes[row].append(replace(record, confidence=each))
            if everywhere:
                committed = torch.ones_like(committed)
            end = torch.where(left > 0, root + committed, root + 1).clamp(
                max=int(self.length.max())
            )
            first = torch.where(left > 0, root, (end - 1).clamp(min=0))
            state = self.drafter.commit(state, self._states(first, end))
            root = torch.where(left > 0, root + committed, root)
        return passes

    def _at(self, positions: Tensor) -> Tensor:
        """The text's tokens at positions [B, N]; -1 after its end."""
        inside = positions < self.length[:, None]
        return torch.where(
            inside, self.tokens.gather(1, positions.clamp(max=self.tokens.shape[1] - 1)), -1
        )

    def _states(self, first: Tensor, end: Tensor) -> TargetStates:
        """The target's states at first..end-1 of every row."""
        width = int((end - first).max())
        positions = first[:, None] + torch.arange(width, device=first.device)
        valid = positions < end[:, None]
        at = torch.where(valid, positions, first[:, None]).clamp(max=self.tokens.shape[1] - 1)
        rows = torch.arange(at.shape[0], device=first.device)[:, None]
        following = self.tokens[rows, (at + 1).clamp(max=self.tokens.shape[1] - 1)]
        taps = None if self.taps is None else self.taps[rows, at]
        hidden = None if self.last_hidden is None else self.last_hidden[rows, at]
        return TargetStates(self.tokens[rows, at], following, positions, valid, taps, hidden)
