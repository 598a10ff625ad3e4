"""Drafters that may draft from a part of the target's vocabulary: the maps between both numberings,
and what the target's distribution and its tokens are in the smaller one.

Parameter names are those of serving engines (vLLM and SGLang): `d2t`, `t2d`.

Legend: M selected states, H hidden, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from heads.api.target_info import TargetWeights
from heads.nn import losses, vocab
from heads.nn.feature.base import FeatureDrafter, probabilities_of, teacher_logits


class ReducedDrafter(FeatureDrafter):
    """Base of the kinds with `head.draft_vocab_size`."""

    d2t: Tensor
    t2d: Tensor
    reduced: bool
    """Whether the draft vocabulary is smaller than the target's."""
    columns: Tensor | None
    """Target ids [V'] of the draft columns while drafting with a reduced vocabulary."""

    def reduce_to(self, size: int) -> int:
        """Make room for the maps of a draft vocabulary of `size` tokens (0: all); return V'."""
        whole = self.info.vocab_size
        self.columns = None
        self.reduced = 0 < size < whole
        if not self.reduced:
            return whole
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(whole, dtype=torch.bool))
        return size

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Fix a reduced draft vocabulary by token counts [V].

        Called once, before `initialise`.
        """
        if self.reduced:
            ids = vocab.most_frequent(counts.to(self.d2t.device), self.d2t.shape[0])
            self.d2t, self.t2d = vocab.to_maps(ids, self.info.vocab_size)

    def lm_head_rows(self, weights: TargetWeights) -> Tensor:
        """The target's LM head on the draft vocabulary [V', H]; raises `UserError` when that was
        not chosen."""
        if not self.reduced:
            return weights.lm_head
        if not bool(self.t2d.any()):
            raise UserError(
                "the draft vocabulary was not chosen: head.draft_vocab_size needs token "
                "counts of the training data. Train through `headstart train`, or call "
                "choose_vocabulary(counts) first."
            )
        return weights.lm_head[vocab.to_target_ids(self.d2t)]

    def set_columns(self) -> None:
        """Remember the target ids of the draft columns; called by `start`."""
        self.columns = vocab.to_target_ids(self.d2t) if self.reduced else None

    @torch.no_grad()
    def teach(self, batch: TrainBatch, states_at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target's word at flat states [M]: probabilities [M, V'] renormalised on the draft
        vocabulary, the best draft column [M], and whether the target's own best token is in the
        draft vocabulary [M]."""
        logits = teacher_logits(batch, states_at)
        known = torch.ones_like(states_at, dtype=torch.bool)
        if self.reduced:
            known = self.t2d[logits.argmax(-1)]
            logits = logits[:, vocab.to_target_ids(self.d2t)]
        return probabilities_of(logits), logits.argmax(-1), known

    def hard_loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Cross entropy [K, M] of logits [K, M, V'] against tokens [M]; 0 where the draft
        vocabulary lacks them."""
        columns, known = self.columns_of(tokens)
        values = losses.cross_entropy(logits.flatten(0, 1), columns.repeat(logits.shape[0]))
        return torch.where(known, values.view(logits.shape[:2]), values.new_zeros(()))

    def columns_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The draft columns of target tokens [...], and whether they have one; those that have none
        get column 0."""
        if not self.reduced:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        known = self.t2d[tokens]
        return ((self.t2d.cumsum(0) - 1)[tokens]).where(known, torch.zeros_like(tokens)), known
