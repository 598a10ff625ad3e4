"""Shared parts of the EAGLE-3 family: several of the target's layers fused into one feature, and an
LM head over a reduced vocabulary, with the target's rows unless it is trained.

Parameter names are those of serving engines (vLLM and SGLang): `fc_norm.{i}`, `fc`, `norm`,
`lm_head`.

Legend: B rows, T positions, M selected states, K steps, H hidden, V vocabulary, V' draft
vocabulary, n taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.batch import TrainBatch
from heads.api.config import Layers, Size, UnitInterval, Weight, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec, default_taps
from heads.api.target_info import TargetInfo, TargetWeights
from heads.kernels.reference.row_losses import (
    ACCEPTANCE_NLL,
    CROSS_ENTROPY,
    ROW_LOSSES,
    SOFT_CROSS_ENTROPY,
    TOTAL_VARIATION,
)
from heads.nn import init, losses
from heads.nn.blocks import FusingLayer, RMSNorm, initialise_blocks
from heads.nn.feature import base
from heads.nn.feature.reduced import ReducedDrafter
from heads.nn.feature.shortlist import Shortlist
from heads.nn.matrices import set_matrix


@config("head")
@dataclass(frozen=True)
class TapConfig(base.SizeConfig):
    """The taps and tokens of a drafter. Sizes of 0 are taken from the target."""

    taps: tuple[Layers, ...] = ()
    """Layers of the target to read, ascending; empty: 2, n//2 and n-3."""
    tap_norm: bool = True
    """Apply RMSNorm to each tap before fusion (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Apply RMSNorm to all taps as one vector before fusion, not to each (excludes `tap_norm`)."""
    norm_before_residual: bool = False
    """Start the layer's residual stream with the normalised feature (only vLLM supports this)."""
    qk_norm: bool = False
    """Apply RMSNorm to every query and key head, as in Qwen3."""
    draft_vocab_size: Size = 0
    """Size of the draft vocabulary, the most frequent tokens of the training data; 0: all
    tokens."""
    train_lm_head: bool = False
    """Train the LM head, which starts as the target's. Off: use the target's."""
    hard_label_weight: UnitInterval = 0.0
    """Share of the cross entropy that is taken on the sampled token instead of the target's
    distribution."""
    tv: Weight = 0.0
    """Weight of the total variation distance, which is half of the L1 distance, beside the cross
    entropy."""
    lk: Weight = 0.0
    """Weight of -log(acceptance rate), the LK loss (2602.23881), beside the cross entropy."""
    feature_weight: Weight = 0.0
    """Weight of SmoothL1 between the normalised output and the target's last hidden state, averaged
    over their H entries, beside the cross entropy (EAGLE's feature loss, 2401.15077)."""
    shortlist: Size = 0
    """Number of tokens whose logits are exact at a step, chosen by cheap scores of the whole draft
    vocabulary (SpecVocab); 0: all."""
    shortlist_rank: Size = 0
    """Rank of the scores of `shortlist`, at most the hidden size; 0: an eighth of that."""

    def __post_init__(self) -> None:
        if self.shortlist == 1:
            raise UserError("head.shortlist must be 0 (all tokens) or at least 2; given: 1.")
        if self.norm_before_fc and self.tap_norm:
            raise UserError(
                "head.norm_before_fc and head.tap_norm exclude each other: set head.tap_norm=false."
            )


class TapDrafter(ReducedDrafter):
    """Base of the kinds that fuse taps and draft through an LM head over a reduced vocabulary.

    A kind passes its own `layers` by name; they run between the fusion and the final norm.
    """

    additions: ClassVar[tuple[str, ...]] = ("shortlist.*",)

    def __init__(self, config: TapConfig, info: TargetInfo, layers: dict[str, nn.Module]) -> None:
        super().__init__(config, info)
        own = config.taps or default_taps(info.num_layers)
        self.needs = FeatureSpec(own, last_hidden=True, logits=True)
        self.needs.check(info.num_layers)
        hidden, taps = info.hidden_size, len(self.needs.taps)
        norms = [RMSNorm(hidden, info.rms_norm_eps) for _ in range(taps if config.tap_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        joined = RMSNorm(taps * hidden, info.rms_norm_eps) if config.norm_before_fc else None
        self.input_norm = joined
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.norm = RMSNorm(hidden, info.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, self.reduce_to(config.draft_vocab_size), bias=False)
        set_matrix(self.lm_head.weight, False)
        self.lm_head.requires_grad_(config.train_lm_head)
        self.shortlist = make_shortlist(config, hidden, self.lm_head.out_features)

    @classmethod
    def export_method(cls, config: TapConfig) -> str:
        """The kind's name, if no shortlist is configured."""
        return "specvocab" if config.shortlist else cls.kind

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Random layers and a random fusion; final norm and LM head start from the target's."""
        initialise_blocks(self, generator, self.config.initial_std)
        init.copy(self.lm_head.weight, self.lm_head_rows(weights))
        self.copy_final_norm(self.norm.weight, weights)
        if self.shortlist is not None:
            self.shortlist.initialise(self.lm_head.weight)

    @torch.no_grad()
    def follow(self, weights: TargetWeights) -> None:
        """See `TrainableDrafter`; an LM head that is not trained becomes the target's again."""
        super().follow(weights)
        if not self.config.train_lm_head:
            init.copy(self.lm_head.weight, self.lm_head_rows(weights))

    def logits(self, emitted: Tensor) -> Tensor:
        """Normalised outputs [..., H] -> logits [..., V'], as drafts are drawn from them."""
        if self.shortlist is None:
            return cast(Tensor, self.lm_head(emitted))
        return cast(Tensor, self.shortlist(emitted, self.lm_head))

    @property
    def judged_columns(self) -> int:
        """Elements that `judge` computes for one prediction: logits, and scores if there are."""
        return self.lm_head.out_features * (1 if self.shortlist is None else 2)

    @property
    def frozen_head(self) -> bool:
        """Whether `judge` uses no trained weight; low-rank updates (`train.refresh.lora_rank`) are
        trained weights too."""
        trained = any(weight.requires_grad for weight in self.lm_head.parameters())
        return not trained and self.shortlist is None

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [B, T, n, H] -> g [B, T, H]."""
        taps = taps.to(self.fc.weight.dtype)
        if self.fc_norm:
            # [n, H]: all norms at once. Read by attribute, because ZeRO-3 detects in this way which
            # weights it has to gather.
            scale = torch.stack([cast(RMSNorm, norm).weight for norm in self.fc_norm])
            taps = F.rms_norm(taps, taps.shape[-1:], None, self.info.rms_norm_eps) * scale
        joined = taps.flatten(2)
        return cast(Tensor, self.fc(joined if self.input_norm is None else self.input_norm(joined)))

    def residual(self, layer: nn.Module, states: Tensor) -> Tensor:
        """The residual stream after `layer`'s first norm: the states [B, T, H], normalised in a
        fusing layer if so configured."""
        if self.config.norm_before_residual and isinstance(layer, FusingLayer):
            return cast(Tensor, layer.hidden_norm(states))
        return states

    def judge(
        self, batch: TrainBatch, outputs: Tensor, states_at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss [K, M] of normalised outputs [K, M, H] against the target, of the whole LM head: the
        cross entropy, and `tv`, `lk` and `feature_weight` of the configuration.

        States whose best target token cannot be drafted carry no loss and count as wrong. The
        scores of a shortlist are trained with the same loss, which reaches no other weights; a
        right token that is not on the shortlist counts as wrong.
        """
        wanted, known = self.teach(batch, states_at)
        logits, share = self.lm_head(outputs), self.config.hard_label_weight  # [K, M, V']
        labels, said = self.columns_of(base.next_tokens(batch, states_at))
        hard = (CROSS_ENTROPY,) if share > 0 else ()
        added = {TOTAL_VARIATION: self.config.tv, ACCEPTANCE_NLL: self.config.lk}
        added = {name: weight for name, weight in added.items() if weight > 0}
        found = ROW_LOSSES(logits, wanted, labels, (SOFT_CROSS_ENTROPY, *hard, *added))
        values, best = found[SOFT_CROSS_ENTROPY], found.target_best
        if hard:
            values = torch.lerp(values, found[CROSS_ENTROPY].masked_fill(~said, 0.0), share)
        for name, weight in added.items():
            values = values + weight * found[name]
        if self.config.feature_weight > 0:
            assert batch.last_hidden is not None, "the teacher's logits come from it"
            # without gradient: in joint training the states have a graph
            true = batch.last_hidden.detach().flatten(0, 1)[states_at]
            distance = losses.feature_distance(outputs, true)
            values = values + self.config.feature_weight * distance
        right = (found.best == best) & known
        if self.shortlist is not None:
            scores = self.shortlist.scores(outputs.detach())
            found = ROW_LOSSES(scores, wanted, None, (SOFT_CROSS_ENTROPY,))
            values = values + found[SOFT_CROSS_ENTROPY]
            right = right & self.shortlist.holds(scores.detach(), best)
        return values, known, right


def make_shortlist(config: TapConfig, hidden: int, columns: int) -> Shortlist | None:
    """The configured shortlist of an LM head [V', H]; None if it would hold all columns."""
    if config.shortlist_rank > hidden:
        raise UserError(
            f"head.shortlist_rank must be at most the target's hidden size of {hidden}; given: "
            f"{config.shortlist_rank}."
        )
    if not 0 < config.shortlist < columns:
        return None
    return Shortlist(hidden, columns, config.shortlist, config.shortlist_rank or -(-hidden // 8))
