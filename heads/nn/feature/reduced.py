"""Drafters that may draft from a part of the target's vocabulary: the maps between both numberings,
and the target's distribution and tokens in the smaller one.

Parameter names are those of serving engines (vLLM and SGLang): `d2t`, `t2d`.

Legend: M selected states, H hidden, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from heads.api.target_info import TargetWeights
from heads.kernels.reference.row_losses import ROW_LOSSES
from heads.nn import vocab
from heads.nn.feature.base import FeatureDrafter, teacher_logits


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
        """The target's LM head on the draft vocabulary [V', H]; raises `UserError` if no vocabulary
        was chosen."""
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
        """Store the target ids of the draft columns; called by `start`. They stay in the same
        tensor, because captured steps read it."""
        if not self.reduced:
            return
        ids = vocab.to_target_ids(self.d2t)
        if self.columns is None or self.columns.device != ids.device:
            self.columns = ids
        else:
            self.columns.copy_(ids)

    @torch.no_grad()
    def teach(self, batch: TrainBatch, states_at: Tensor) -> tuple[Tensor, Tensor]:
        """The target's labels at flat states [M]: logits [M, V'] of the draft vocabulary, and
        whether the target's own best token is in it [M]."""
        logits = teacher_logits(batch, states_at)
        if not self.reduced:
            return logits, torch.ones_like(states_at, dtype=torch.bool)
        known = self.t2d[ROW_LOSSES(logits).best]
        return logits[:, vocab.to_target_ids(self.d2t)], known

    def columns_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The draft columns of target tokens [...], and whether they have one; tokens without one
        get column 0."""
        if not self.reduced:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        known = self.t2d[tokens]
        return ((self.t2d.cumsum(0) - 1)[tokens]).where(known, torch.zeros_like(tokens)), known
