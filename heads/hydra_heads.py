"""Hydra: heads like Medusa's that also read the tokens drafted before them (2402.05109).

Head k (1-based) reads the target's post-final-norm state at position t and the embeddings of tokens
t+1 to t+k, and predicts token t+k+1; the target's own LM head predicts t+1. Its first block maps
these k+1 vectors to one: a linear map plus SiLU of a second linear map. Residual blocks as in
Medusa may follow, and then comes the target's frozen LM head or an own one. All blocks start so
that every head begins at the target's own prediction. Hydra++ is a set of options: several blocks,
the target's distribution as label, and a decoder layer (`prefix_layer`) over the target's true
states, so that the heads read the whole text and not one position alone (2402.05109). Loss:
sum over heads of decay^k times cross entropy.

Legend: B rows, T positions, M selected positions, K heads, H hidden, V vocabulary, W width of a
committed run, P nodes run at one level, S cache slots, g key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, Fraction, Size, UnitInterval, Weight, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import init, losses
from heads.nn.attention import sequence_attention
from heads.nn.blocks import Attend, DecoderLayer, RMSNorm, initialise_blocks
from heads.nn.drafting.growth import grow
from heads.nn.drafting.places import CachePlace
from heads.nn.drafting.state import Cached as State
from heads.nn.drafting.state import run_slots
from heads.nn.feature.base import FeatureDrafter, add_noise, label_loss, layer_shape, require_heads
from heads.nn.feature.chain import attend_last
from heads.nn.matrices import set_matrix
from heads.nn.packing import Packing
from heads.nn.rope import Rope


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of Hydra heads. Sizes of 0 are taken from the target."""

    num_heads: Depth = 4
    """Number of heads K, which is also the deepest token that can be drafted (>= 1)."""
    num_layers: Depth = 1
    """Blocks per head (>= 1; 4 in Hydra++). The first block reads k+1 vectors, the others one."""
    own_lm_head: bool = False
    """Give every head a separate LM head that starts as the target's (V * H weights each, as in the
    paper's code); otherwise all heads share the frozen one."""
    embedding_norm: bool = True
    """Apply RMSNorm to the embeddings that the heads read. They are often a hundred times smaller
    than the state beside them."""
    prefix_layer: bool = False
    """Pass the target's states through an additional decoder layer first (Hydra++)."""
    num_attention_heads: Size = 0
    """Query heads of the prefix layer."""
    num_key_value_heads: Size = 0
    """Key/value heads of the prefix layer; must divide the query heads."""
    head_dim: Size = 0
    """Size of a head of the prefix layer (even)."""
    intermediate_size: Size = 0
    """Width of the prefix layer's MLP."""
    decay: Fraction = 0.8
    """Head k (1-based) has the weight decay^k in the loss (0 < decay <= 1)."""
    hard_label_weight: UnitInterval = 1.0
    """Share of the loss that is taken on the answer's token; the rest is on the target's
    distribution (0 to 1; Hydra++: 0)."""
    noise: Weight = 0.0
    """In training, add noise from U(-noise, noise) to the states that are read (>= 0)."""


class FirstBlock(nn.Module):
    """The state and k embeddings to one state: R x + SiLU(U x + b), [..., (k+1)H] -> [..., H]."""

    def __init__(self, hidden: int, tokens: int) -> None:
        super().__init__()
        self.residual = nn.Linear((tokens + 1) * hidden, hidden, bias=False)
        self.linear = nn.Linear((tokens + 1) * hidden, hidden)

    def initialise(self) -> None:
        """Pass the state on and ignore the tokens."""
        for weight in (self.residual.weight, self.linear.weight, self.linear.bias):
            init.constant(weight, 0.0)
        hidden = self.residual.out_features
        with torch.no_grad():
            self.residual.weight[:, :hidden].fill_diagonal_(1.0)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.residual(states) + F.silu(self.linear(states)))


class ResidualBlock(nn.Module):
    """Medusa's block: x + SiLU(U x + b), [..., H] -> [..., H]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def initialise(self) -> None:
        """Pass everything on."""
        init.constant(self.linear.weight, 0.0)
        init.constant(self.linear.bias, 0.0)

    def forward(self, states: Tensor) -> Tensor:
        return states + F.silu(self.linear(states))


class Head(nn.Module):
    """Head k: one `FirstBlock` of k tokens, then plain blocks, then its LM head if it has one."""

    def __init__(self, hidden: int, tokens: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.first = FirstBlock(hidden, tokens)
        self.deeper = nn.ModuleList(ResidualBlock(hidden) for _ in range(layers - 1))
        self.lm_head = nn.Linear(hidden, vocab, bias=False) if vocab else None
        if self.lm_head is not None:
            set_matrix(self.lm_head.weight, False)

    def initialise(self, lm_head: Tensor) -> None:
        """Pass the state on to the target's LM head [V, H]."""
        self.first.initialise()
        for block in self.deeper:
            assert isinstance(block, ResidualBlock)
            block.initialise()
        if self.lm_head is not None:
            init.copy(self.lm_head.weight, lm_head)

    def forward(self, read: Tensor) -> Tensor:
        """State and k embeddings side by side [..., (k+1)H] -> what the LM head reads [..., H]."""
        states: Tensor = self.first(read)
        for block in self.deeper:
            states = block(states)
        return states


class Drafter(FeatureDrafter):
    """K heads over the target's last hidden state, each fed with the tokens before its own."""

    kind: ClassVar[str] = "hydra_heads"
    label_weight: ClassVar[str] = "hard_label_weight"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(last_hidden=True, logits=config.hard_label_weight < 1.0)
        hidden, vocab = info.hidden_size, info.vocab_size if config.own_lm_head else 0
        self.heads = nn.ModuleList(
            Head(hidden, k, config.num_layers, vocab) for k in range(1, config.num_heads + 1)
        )
        self.embedding_norm = RMSNorm(hidden, info.rms_norm_eps) if config.embedding_norm else None
        shape = layer_shape(config, info)
        self.prefix_layer = DecoderLayer(shape) if config.prefix_layer else None
        self.rope = Rope(shape.head_dim, info.rope_theta)
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Every head starts at the target's own prediction, the prefix layer at zero."""
        for k in range(1, self.config.num_heads + 1):
            self._head(k).initialise(weights.lm_head)
        if self.embedding_norm is not None:
            init.constant(self.embedding_norm.weight, 1.0)
        if self.prefix_layer is not None:
            initialise_blocks(self.prefix_layer, generator)
            for output in (self.prefix_layer.self_attn.o_proj, self.prefix_layer.mlp.down_proj):
                init.constant(output.weight, 0.0)

    # The network

    def _head(self, k: int) -> Head:
        """Head k, counted from 1."""
        head = self.heads[k - 1]
        assert isinstance(head, Head)
        return head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the drafter's own weights."""
        return self._head(1).first.linear.weight.dtype

    def _tokens(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> the vectors [..., H] that the heads read for them."""
        embedded = self.embed(tokens, self.dtype)
        return embedded if self.embedding_norm is None else self.embedding_norm(embedded)

    def _head_logits(self, read: Tensor) -> Tensor:
        """State and k embeddings side by side [..., (k+1)H] -> logits [..., V] of head k."""
        head = self._head(read.shape[-1] // self.info.hidden_size - 1)
        states = head(read)
        project = self.target.project if head.lm_head is None else head.lm_head
        return cast(Tensor, project(states))

    def _read_sequence(self, batch: TrainBatch, noisy: bool) -> Tensor:
        """What the heads read of the target's states [B, T, H]."""
        assert batch.last_hidden is not None, "hydra_heads needs the target's last hidden state"
        hidden = batch.last_hidden.to(self.dtype)
        if noisy:
            hidden = add_noise(hidden, batch, self.config.noise)
        if self.prefix_layer is None:
            return hidden
        rotation = self.rope.at(batch.positions, hidden.dtype)
        attend: Attend = partial(sequence_attention, packing=Packing.of(batch))
        return cast(Tensor, self.prefix_layer(hidden, rotation, attend))

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over heads k of decay^k times the cross entropy of supervised tokens t+k+1."""
        count, tokens = self.config.num_heads, batch.tokens.flatten()
        hard = self.config.hard_label_weight
        hidden = self._read_sequence(batch, noisy=True).flatten(0, 1)  # [B*T, H]
        wanted = batch.supervised_ahead(count)
        ahead = torch.arange(1, count + 1, device=tokens.device)

        def part(rows: Tensor) -> losses.Sums:
            """The loss of all heads at rows [M] int64 of the flat batch."""
            mask = wanted[rows].T  # [K, M]
            # Rows near the end of the batch wrap to the last token; the mask excludes them.
            places = (rows[:, None] + ahead).clamp(max=tokens.shape[0] - 1)  # [M, K]
            # [M, (K+1)H]
            read = torch.cat([hidden[rows], self._tokens(tokens[places]).flatten(1)], -1)
            ends = range(2 * hidden.shape[-1], read.shape[-1] + 1, hidden.shape[-1])
            logits = torch.stack([self._head_logits(read[:, :end]) for end in ends])
            labels = tokens[(places + 1).clamp(max=tokens.shape[0] - 1)].T  # [K, M]
            # Token t+k+1 is drawn from the target's distribution at state t+k.
            values, right = label_loss(batch, logits, labels, places.T, hard)
            values = batch.weighed(values, places.T, ahead[:, None])
            hits = (right & mask).sum(1)
            return losses.masked_sum(values.T, mask.T), hits, mask.sum(1)

        rows = wanted.any(1).nonzero().squeeze(1)
        sums = losses.sum_over_rows(part, rows, count * self.info.vocab_size)
        return losses.weighted_output(self.config.decay ** ahead.to(sums[0].dtype), *sums)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V] of heads 1..depth, without noise; see the contract."""
        heads = self.config.num_heads
        assert depth <= heads, f"{depth} depths asked of {heads} heads"
        read, found = self._read_sequence(batch, noisy=False), []
        for k in range(1, depth + 1):
            # The last rows have no token this far ahead; what they read is meaningless.
            read = torch.cat([read, self._tokens(batch.tokens.roll(-k, 1))], -1)
            found.append(self._head_logits(read))
        return found

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; raises `UserError` when the tree is deeper than there are heads."""
        require_heads(self, tree)
        (batch, width), plan = seen.tokens.shape, self.plans.of(tree)
        output = self._head(1).first.linear.weight.new_zeros(batch, self.info.hidden_size)
        slots, layer = max(capacity, width) + plan.room + 1, self.prefix_layer
        caches = [] if layer is None else [layer.self_attn.new_cache(batch, slots)]
        return self.commit(State.empty(seen, plan, output, caches), seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Move to the last accepted token's true state; see the protocol. The prefix layer keeps
        keys and values of the whole run, and gives the output of its last row.

        Padded entries are written after the run and overwritten before anything reads them.
        """
        assert accepted.last_hidden is not None, "hydra_heads needs the target's last hidden state"
        at, layer = state.advance(accepted), self.prefix_layer
        hidden = accepted.last_hidden.to(self.dtype)
        last = hidden[at]
        if layer is not None:
            normed, slots = layer.input_layernorm(hidden), run_slots(accepted)
            attended = attend_last(layer.self_attn, state, normed, slots, at, self.rope)
            last = layer.finish(last, attended)
        state.output.copy_(last.squeeze(1))
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Grow level by level; a node passes on everything that its own head read."""

        def step(place: CachePlace, tokens: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
            read = torch.cat([read, self._tokens(tokens)], -1)  # [B, P, (k+1)H]
            return self._head_logits(read), read

        nowhere = CachePlace.nowhere(state.root.device)
        logits, read = step(nowhere, state.root[:, None], state.output[:, None])
        return grow(state, logits, read, step, noise)
