"""The configuration of block drafters: which published method one is, its sizes and its objective.

Legend: b slots per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heads.api.config import (
    DepthFromTwo,
    Layers,
    OptionalToken,
    Rows,
    Size,
    UnitInterval,
    Weight,
    config,
)
from heads.api.errors import UserError
from heads.kernels.reference.row_losses import CROSS_ENTROPY, TOTAL_VARIATION
from heads.nn.block.lattice import CorrelatorConfig
from heads.nn.block.losses import Objective, Weighting
from heads.nn.feature.base import SizeConfig

POSITIONS_PER_BLOCK = 4
"""Positions of a training row for each of its blocks, unless their number is given."""


@config("head")
@dataclass(frozen=True)
class Config(SizeConfig):
    """Configuration of a block drafter. Sizes of 0 are taken from the target."""

    initial_std: Weight = 0.02
    """Largest standard deviation of random initial weights, which otherwise is 1 / sqrt(inputs) of
    a matrix; 0: no limit."""
    block_size: DepthFromTwo = 8
    """Number of slots b of a block, including the root's (>= 2)."""
    sample_from_anchor: bool = False
    """Draft from the root's slot on: slot i gives the token at depth i + 1, b tokens in all
    (DSpark); otherwise slot i gives the token at its own position, b - 1 tokens in all (DFlash)."""
    in_block: Literal["bidirectional", "causal"] = "bidirectional"
    """Slots that a slot attends to within its block: all of them, or (causal; JetSpec) no later
    ones."""
    num_layers: Layers = 0
    """Draft layers; 0: half of the target's plus one, at least 3 and at most 5."""
    taps: tuple[Layers, ...] = ()
    """Layers of the target to read, ascending; empty: up to five, spread from 2 to n-2."""
    layer_fusion: bool = False
    """Give every draft layer a separate mixture of the taps and a separate projection of it
    (DFlare)."""
    start_from: Literal["auto", "target", "random"] = "auto"
    """Initial weights of the layers: target (those of its layers; an error if they do not fit),
    random, or auto (the target's if its layers are Llama-like and of the same sizes; with
    `from_target_layers` the same as target)."""
    from_target_layers: tuple[Layers, ...] = ()
    """Layers of the target (0-based) that the draft layers start from, one for each draft layer
    except that of `carry_root`; empty: evenly spread from the first to the last."""
    carry_root: bool = True
    """Begin with a layer (one of `num_layers`) that carries the root's embedding to all slots."""
    mask_token_id: OptionalToken = -1
    """Token whose frozen embedding fills the slots after the root; -1: a learned vector."""
    dependency: str = "none"
    """How slots depend on the tokens drafted before them: none, markov, gated, rnn (DSpark), gru
    (Domino), selector (DFlash 2), parent (TreeFlash), lilicorr (LiLiCorr)."""
    dependency_rank: Size = 256
    """Size of the dependency: the rank of its tables, or the size of its recurrent state, its MLP
    or its vectors."""
    selector_top_k: Size = 16
    """Candidates per slot that selector and lilicorr rank."""
    correlator: CorrelatorConfig = field(default_factory=CorrelatorConfig)
    """The transformer over the candidates (lilicorr)."""
    convolution: bool = False
    """Two-tap convolution over the slots, before and after every attention and MLP (DFlash 2)."""
    conv_group_size: Size = 16
    """Channels that share a dynamic kernel; must divide the hidden size."""
    confidence: bool = False
    """Estimate for every draft the probability that it is accepted (DSpark)."""
    confidence_weight: Weight = 1.0
    """Weight of the loss of the confidence estimate."""
    num_anchors: Rows | None = None
    """Blocks per training row, drawn among all positions where a response continues; null: a
    quarter as many as a row has positions."""
    ce: Weight = 0.0
    """Weight of the cross entropy against the answer's tokens."""
    kl: Weight = 0.5
    """Weight of KL(target || drafter)."""
    tv: Weight = 0.9
    """Weight of the total variation distance, which is half of the L1 distance."""
    lk: Weight = 0.0
    """Weight of -log(acceptance rate), the LK loss."""
    annealed_lk: Weight = 0.0
    """Weight of the LK loss that changes from KL to total variation as the mean acceptance of a
    row's blocks at a depth rises."""
    base_share_start: UnitInterval = 0.0
    """Share of the loss on the logits before the dependency, at the start of training (0 to 1)."""
    base_share_end: UnitInterval = 0.0
    """The same share at the end of training; linear in between."""
    depth_weights: str = "exponential"
    """Weights of the depths in the loss: exponential (exp(-(k-1) / gamma)), uniform, or d_pace (by
    their contribution to the accepted length)."""
    gamma: Weight = 0.0
    """exponential: gamma of the weights, in depths; 0: (block_size + 5) / 3."""
    d_pace_smoothing: UnitInterval = 0.5
    """d_pace: how far the drafter's probabilities are moved towards 1 (0 to 1). At 1, a depth's
    weight depends only on the number of depths after it."""

    def __post_init__(self) -> None:
        self.objective()
        self.weighting()
        if self.dependency == "lilicorr" and self.layer_fusion:
            raise UserError(
                "head.dependency=lilicorr reads one fused feature per position, and "
                "head.layer_fusion=true has one for every layer; use one of the two."
            )

    @property
    def distractor(self) -> float:
        """Weight of the penalty on distractors: `correlator.distractor` if there is a
        correlator."""
        return self.correlator.distractor if self.dependency == "lilicorr" else 0.0

    def candidate_scores(self, slots: int) -> int:
        """Attention scores of the correlator over the candidates of a block, of all heads; 0
        without a correlator."""
        candidates = slots * self.selector_top_k
        return self.correlator.heads * candidates**2 if self.dependency == "lilicorr" else 0

    def blocks(self, length: int) -> int:
        """Blocks of a training row of `length` positions, if a response continues at as many."""
        return self.num_anchors or max(1, length // POSITIONS_PER_BLOCK)

    def objective(self) -> Objective:
        """The training objective of a slot."""
        return Objective(self.ce, self.kl, self.tv, self.lk, self.annealed_lk)

    def losses(self) -> tuple[str, ...]:
        """The losses of rows that training needs: the objective's, the cross entropy of right
        tokens for weights that depend on it, and the total variation for the confidence."""
        names = list(self.objective().names)
        names += [CROSS_ENTROPY] if self.weighting().by_probability else []
        names += [TOTAL_VARIATION] if self.confidence else []
        return tuple(dict.fromkeys(names))

    def weighting(self) -> Weighting:
        """The weights of the depths."""
        return Weighting(self.depth_weights, self.gamma, self.block_size, self.d_pace_smoothing)
