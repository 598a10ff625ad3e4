"""Medusa: K independent heads on the target's last hidden state, one pass for a proposal.

Head i (0-based) reads the post-final-norm state at position t and predicts token t+2+i; the
target's own LM head predicts t+1. Each head is a stack of residual blocks h + SiLU(U h + b), zero
at the start so that training begins at the target's own prediction, followed by the target's frozen
LM head or an own one (2401.10774). Loss: sum over heads of decay^k times cross entropy.

Legend: B rows, T positions, M selected positions, K heads, H hidden, V vocabulary, D depth of the
tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, Fraction, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import blocks, init, losses
from heads.nn.drafting.growth import fill
from heads.nn.drafting.state import Rooted, last_valid
from heads.nn.feature.base import FeatureDrafter, label_loss, require_heads
from heads.nn.matrices import set_matrix


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of Medusa heads."""

    num_heads: Depth = 4
    """Heads K, the deepest token that can be drafted (>= 1; 3 to 5 in the paper)."""
    num_layers: Depth = 1
    """Residual blocks per head, each with its own weights (>= 1)."""
    own_lm_head: bool = False
    """Give every head an LM head of its own, started from the target's (V * H weights each);
    otherwise share the frozen one."""
    decay: Fraction = 0.8
    """Head k (1-based) weighs decay^k in the loss (0 < decay <= 1)."""
    soft_labels: bool = False
    """Train on the target's distribution instead of the token it sampled."""


@dataclass
class State(Rooted):
    """hidden [B, H]: the target's state at the last seen position."""

    hidden: Tensor


class Drafter(FeatureDrafter):
    """K residual heads over the target's last hidden state."""

    kind: ClassVar[str] = "medusa"
    # the decoder may put a kernel in its place
    residual_blocks = staticmethod(blocks.residual_blocks)

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(last_hidden=True, logits=config.soft_labels)
        heads, layers, hidden = config.num_heads, config.num_layers, info.hidden_size
        # All heads of a layer in one tensor: both training and drafting multiply them as one batch.
        self.residual_weight = nn.Parameter(torch.empty(layers, heads, hidden, hidden))
        set_matrix(self.residual_weight, True)
        self.residual_bias = nn.Parameter(torch.empty(layers, heads, hidden))
        own = torch.empty(heads, info.vocab_size, hidden) if config.own_lm_head else None
        self.lm_heads = None if own is None else nn.Parameter(own)
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Zero residual blocks: every head starts as the target's own next-token prediction."""
        init.constant(self.residual_weight, 0.0)
        init.constant(self.residual_bias, 0.0)
        if self.lm_heads is not None:
            init.copy(self.lm_heads, weights.lm_head.expand_as(self.lm_heads))

    def _head_logits(self, hidden: Tensor, heads: int) -> Tensor:
        """States [M, H] -> logits [heads, M, V] of the first `heads` heads."""
        states = hidden.to(self.residual_weight.dtype).expand(heads, *hidden.shape)
        for weight, bias in zip(self.residual_weight, self.residual_bias, strict=True):
            states = self.residual_blocks(states, weight[:heads], bias[:heads])
        if self.lm_heads is not None:
            return torch.bmm(states, self.lm_heads[:heads].transpose(1, 2))
        return self.target.project(states)

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over heads k of decay^k times the cross entropy of supervised tokens t+k+1."""
        assert batch.last_hidden is not None, "medusa needs the target's last hidden state"
        count, tokens = self.config.num_heads, batch.tokens.flatten()
        hidden, wanted = batch.last_hidden.flatten(0, 1), batch.supervised_ahead(count)
        ahead = torch.arange(1, count + 1, device=tokens.device)

        def part(rows: Tensor) -> losses.Sums:
            mask = wanted[rows]  # [M, K]
            # Rows near the end of the batch wrap to the last token; the mask excludes them.
            states_at = (rows[:, None] + ahead).clamp(max=tokens.shape[0] - 1)
            labels = tokens[(states_at + 1).clamp(max=tokens.shape[0] - 1)]  # [M, K]
            logits = self._head_logits(hidden[rows], count).transpose(0, 1)  # [M, K, V]
            # Token t+k+1 is drawn from the target's distribution at state t+k.
            values, _ = label_loss(batch, logits, labels, states_at, not self.config.soft_labels)
            values = batch.weighed(values, states_at, ahead)
            correct = (losses.best_column(logits) == labels) & mask
            return losses.masked_sum(values, mask), correct.sum(0), mask.sum(0)

        rows = wanted.any(1).nonzero().squeeze(1)
        sums = losses.sum_over_rows(part, rows, count * self.info.vocab_size)
        return losses.weighted_output(self.config.decay ** ahead.to(sums[0].dtype), *sums)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V] of heads 1..depth; see the contract."""
        assert batch.last_hidden is not None, "medusa needs the target's last hidden state"
        heads = self.config.num_heads
        assert depth <= heads, f"{depth} depths asked of {heads} heads"
        shape = batch.tokens.shape
        return list(self._head_logits(batch.last_hidden.flatten(0, 1), depth).unflatten(1, shape))

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; raises `UserError` when the tree is deeper than there are heads."""
        require_heads(self, tree)
        rows, last, root, root_position = last_valid(seen)
        assert seen.last_hidden is not None, "medusa needs the target's last hidden state"
        return State(root, root_position, self.plans.of(tree), seen.last_hidden[rows, last])

    def propose(self, state: State, noise: Noise) -> Proposal:
        """One pass of all heads; a node's token depends on its depth and rank alone."""
        logits = self._head_logits(state.hidden, state.plan.max_depth).transpose(0, 1)  # [B, D, V]
        return fill(state, logits, noise)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Move to the last accepted token's true state; see the protocol."""
        assert accepted.last_hidden is not None, "medusa needs the target's last hidden state"
        state.hidden.copy_(accepted.last_hidden[state.advance(accepted)].squeeze(1))
        return state
