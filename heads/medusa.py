"""Medusa: K independent heads on the target's last hidden state, one pass for a proposal.

Head i (0-based) reads the post-final-norm state at position t and predicts token t+2+i; the
target's own LM head predicts t+1. Each head is a stack of residual blocks h + SiLU(U h + b),
followed by the target's frozen LM head or an own one (2401.10774), which may be reduced to the most
frequent tokens. The blocks start at zero, so training begins at the target's own prediction. Loss:
sum over heads of decay^k times cross entropy.

Legend: B rows, T positions, M selected positions, K heads, H hidden, V' draft vocabulary, D depth
of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, Fraction, Size, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.kernels.reference.row_losses import CROSS_ENTROPY, ROW_LOSSES, SOFT_CROSS_ENTROPY
from heads.nn import blocks, init
from heads.nn.drafting.growth import fill
from heads.nn.drafting.state import Rooted, last_valid
from heads.nn.feature.base import next_tokens, require_heads, unrolled_loss
from heads.nn.feature.reduced import ReducedDrafter
from heads.nn.matrices import set_matrix, set_vectors


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of Medusa heads."""

    num_heads: Depth = 4
    """Number of heads K, which is also the deepest token that can be drafted (>= 1; 3 to 5 in the
    paper)."""
    num_layers: Depth = 1
    """Residual blocks per head, each with its own weights (>= 1)."""
    own_lm_head: bool = False
    """Give every head a separate LM head that starts as the target's (V' * H weights each);
    otherwise all heads share one."""
    draft_vocab_size: Size = 0
    """Size of the draft vocabulary, the most frequent tokens of the training data; 0: all tokens.
    The LM head that all heads share is the target's frozen one if they draft all tokens, otherwise
    a trained one."""
    decay: Fraction = 0.8
    """Head k (1-based) has the weight decay^k in the loss (0 < decay <= 1)."""
    soft_labels: bool = False
    """Train on the target's distribution instead of the token that it sampled."""


@dataclass
class State(Rooted):
    """hidden [B, H]: the target's state at the last seen position."""

    hidden: Tensor


class Drafter(ReducedDrafter):
    """K residual heads over the target's last hidden state."""

    kind: ClassVar[str] = "medusa"
    one_pass: ClassVar[bool] = True
    # the decoder may replace it by a kernel
    residual_blocks = staticmethod(blocks.residual_blocks)

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(last_hidden=True, logits=config.soft_labels)
        heads, layers, hidden = config.num_heads, config.num_layers, info.hidden_size
        # All heads of a layer in one tensor: both training and drafting multiply them as one batch.
        self.residual_weight = nn.Parameter(torch.empty(layers, heads, hidden, hidden))
        set_matrix(self.residual_weight, True)
        self.residual_bias = nn.Parameter(torch.empty(layers, heads, hidden))
        set_vectors(self.residual_bias)
        self.columns_drafted = self.reduce_to(config.draft_vocab_size)
        # [K, V', H], or [1, V', H] for all heads
        self.lm_heads: nn.Parameter | None = None
        if config.own_lm_head or self.reduced:
            own = torch.empty(heads if config.own_lm_head else 1, self.columns_drafted, hidden)
            self.lm_heads = nn.Parameter(own)
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Zero residual blocks: every head starts as the target's own next-token prediction."""
        init.constant(self.residual_weight, 0.0)
        init.constant(self.residual_bias, 0.0)
        if self.lm_heads is not None:
            init.copy(self.lm_heads, self.lm_head_rows(weights).expand_as(self.lm_heads))

    def _outputs(self, hidden: Tensor, heads: int) -> Tensor:
        """States [M, H] -> what the LM heads of the first `heads` heads read [heads, M, H]."""
        states = hidden.to(self.residual_weight.dtype).expand(heads, *hidden.shape)
        for weight, bias in zip(self.residual_weight, self.residual_bias, strict=True):
            states = self.residual_blocks(states, weight[:heads], bias[:heads])
        return states

    def _logits(self, outputs: Tensor) -> Tensor:
        """Outputs [heads, M, H] -> logits [heads, M, V']."""
        if self.lm_heads is None:
            return self.target.project(outputs)
        if self.lm_heads.shape[0] == 1:
            return F.linear(outputs, self.lm_heads[0])
        return blocks.head_products(outputs, self.lm_heads[: outputs.shape[0]])

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over heads k of decay^k times the cross entropy of supervised tokens t+k+1.

        Positions whose token, or whose likeliest token with `soft_labels`, cannot be drafted carry
        no loss; a token that cannot be drafted counts as wrong.
        """
        assert batch.last_hidden is not None, "medusa needs the target's last hidden state"
        count = self.config.num_heads
        outputs = self._outputs(batch.last_hidden.flatten(0, 1), count)
        by_head = list(outputs.unflatten(1, batch.tokens.shape))
        weights = self.config.decay ** torch.arange(1, count + 1, device=batch.tokens.device)
        taught = self.info.vocab_size if self.config.soft_labels else 0
        judge = partial(self._judge, batch)
        frozen, columns = self.lm_heads is None, self.columns_drafted
        return unrolled_loss(batch, by_head, columns, weights, judge, taught, frozen=frozen)

    def _judge(
        self, batch: TrainBatch, outputs: Tensor, states_at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross entropy [K, M] of outputs [K, M, H] against the next tokens, or the target."""
        columns, said = self.columns_of(next_tokens(batch, states_at))
        name, wanted, known = CROSS_ENTROPY, None, said
        if self.config.soft_labels:
            name = SOFT_CROSS_ENTROPY
            wanted, known = self.teach(batch, states_at)
        found = ROW_LOSSES(self._logits(outputs), wanted, columns, (name,))
        return found[name], known, (found.best == columns) & said

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V'] of heads 1..depth; see the contract."""
        assert batch.last_hidden is not None, "medusa needs the target's last hidden state"
        heads = self.config.num_heads
        assert depth <= heads, f"{depth} depths asked of {heads} heads"
        shape = batch.tokens.shape
        outputs = self._outputs(batch.last_hidden.flatten(0, 1), depth)
        return list(self._logits(outputs).unflatten(1, shape))

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; raises `UserError` when the tree is deeper than there are heads."""
        require_heads(self, tree)
        self.set_columns()
        rows, last, root, root_position = last_valid(seen)
        assert seen.last_hidden is not None, "medusa needs the target's last hidden state"
        return State(root, root_position, self.plans.of(tree), seen.last_hidden[rows, last])

    def propose(self, state: State, noise: Noise) -> Proposal:
        """One pass of all heads; a node's token depends on its depth and rank alone."""
        outputs = self._outputs(state.hidden, state.plan.max_depth)
        logits = self._logits(outputs).transpose(0, 1)  # [B, D, V']
        return fill(state, logits, noise, self.columns)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Move to the last accepted token's true state; see the protocol."""
        assert accepted.last_hidden is not None, "medusa needs the target's last hidden state"
        state.hidden.copy_(accepted.last_hidden[state.advance(accepted)].squeeze(1))
        return state
