"""LiLiCorr (2608.20530): a small transformer that scores which candidates of neighbouring slots
follow each other.

A block drafter predicts how likely a token is at its slot, but not which tokens of two slots belong
together. Here every slot keeps its k best candidates. All candidates of a block attend to each
other, and each gets an `in` vector and an `out` vector. The score of candidate j at slot d after
candidate i at slot d - 1 is

    scale * cos(out(d - 1, i), in(d, j)),

and at the first slot scale * cos(out of the anchor, in(1, j)), where the anchor is the fused
feature of the last committed position. A block is drafted from the left: the scores of a slot are
those after the token that was drafted before it. One pass gives all scores, so every node of a tree
is conditioned on its parent at the cost of one lookup.

Parameter names are those of vLLM and SGLang, where they have the prefix `lilicorr.`.

Legend: M blocks, K slots that draft, k candidates per slot, P nodes of one level, H hidden, E size
of the correlator, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from heads.api.config import Epsilon, Size, Weight, config
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import init
from heads.nn.blocks import RMSNorm
from heads.nn.matrices import set_matrix, set_vectors

FEATURES = 5
"""Input features of a candidate: log-probability, probability, distance in log-probability to the
best of its slot, rank (0 to 1), and whether it is the best."""
OUTSIDE = 8.0
"""How far a token that is no candidate is put below the lowest possible score."""


@config("head.correlator")
@dataclass(frozen=True)
class CorrelatorConfig:
    """Sizes of the correlator, which are part of the checkpoint."""

    size: Size = 0
    """Width E; 0: the target's hidden size."""
    layers: Size = 2
    """Attention layers over the candidates."""
    heads: Size = 4
    """Attention heads; must divide `size`."""
    mlp_ratio: Annotated[float, Ge(0.01), Le(64)] = 2.0
    """Width of an MLP, in multiples of `size`."""
    scale: Annotated[float, Gt(0), Le(1e4)] = 10.0
    """Largest score, which limits how sharply candidates are told apart."""
    eps: Epsilon = 1e-6
    """Smallest length by which a vector is divided."""
    distractor: Weight = 1.0
    """Weight of the penalty for probability on candidates that the target considers less likely
    than the right token."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.heads < 1:
            raise UserError(
                "head.correlator needs layers and heads of at least 1; given "
                f"layers={self.layers}, heads={self.heads}."
            )


@dataclass
class Lattice:
    """The candidates of M blocks and their scores. tokens [M, K, k] int64, the best first;
    log_probs [M, K, k]: the block drafter's own; start [M, k]: scores at the first slot; pair [M,
    K-1, k, k]: scores of candidate j at the next slot after candidate i."""

    tokens: Tensor
    log_probs: Tensor
    start: Tensor
    pair: Tensor

    def follow(self, depth: int, parents: Tensor) -> Tensor:
        """Scores [M, P, k] of the candidates at `depth` (1-based) after tokens [M, P] one level up.
        After a token that is no candidate: the log-probabilities of the slot."""
        if depth == 1:
            return self.start[:, None].expand(-1, parents.shape[1], -1)
        same = self.tokens[:, depth - 2, None] == parents[..., None]
        rank = same.long().argmax(-1, keepdim=True)
        scores = self.pair[:, depth - 2]
        scores = scores.gather(1, rank.expand(-1, -1, scores.shape[-1]))
        return torch.where(same.any(-1, keepdim=True), scores, self.log_probs[:, depth - 1, None])

    def along(self, parents: Tensor) -> Tensor:
        """Scores [M, K, k] at all depths after given tokens [M, K], those before each depth."""
        depths = range(1, parents.shape[1] + 1)
        return torch.cat([self.follow(d, parents[:, d - 1 : d]) for d in depths], 1)

    def holds(self, path: Tensor) -> Tensor:
        """Whether [M, K] bool the lattice holds a path of tokens [M, K] up to each depth."""
        return (self.tokens == path[..., None]).any(-1).long().cumprod(1).bool()


class LatticeAttention(nn.Module):
    """Attention of all candidates to all, under the names of torch's MultiheadAttention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        set_matrix(self.in_proj_weight, True)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        """States [M, K * k, E], bias [heads, K * k, K * k] -> [M, K * k, E]."""
        parts = F.linear(states, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        query, key, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        return cast(Tensor, self.out_proj(found.transpose(1, 2).flatten(2)))


class Perceptron(nn.Module):
    """down(SiLU(up(x)))."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(inputs, width)
        self.down_proj = nn.Linear(width, outputs)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.up_proj(states))))


class LatticeLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, size: int, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(size, eps)
        self.attn = LatticeAttention(size, heads)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = Perceptron(size, width, size)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        states = states + self.attn(self.attn_norm(states), bias)
        return cast(Tensor, states + self.mlp(self.mlp_norm(states)))


class Correlator(nn.Module):
    """Scores of neighbouring candidates. slots: K; count: k; factors: length of the `in` and `out`
    vectors."""

    def __init__(
        self, config: CorrelatorConfig, info: TargetInfo, slots: int, count: int, factors: int
    ) -> None:
        super().__init__()
        hidden, eps = info.hidden_size, info.rms_norm_eps
        size = config.size or hidden
        if size % config.heads:
            raise UserError(f"head.correlator.heads={config.heads} must divide its size of {size}.")
        self.scale, self.eps, self.slots = config.scale, config.eps, slots
        self.token_proj = None if size == hidden else nn.Linear(hidden, size)
        self.pass_hidden_proj = nn.Linear(hidden, size)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = Perceptron(FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, count, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(config.heads, 2 * slots + 1))
        set_vectors(self.relative_slot_bias)
        self.same_slot_bias = nn.Parameter(torch.empty(config.heads))
        self.context_proj = nn.Linear(hidden, size)
        width = int(size * config.mlp_ratio)
        self.layers = nn.ModuleList(
            LatticeLayer(size, config.heads, width, eps) for _ in range(config.layers)
        )
        self.output_norm = RMSNorm(size, eps)
        self.anchor_norm = RMSNorm(size, eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head = nn.Linear(size, factors)
        self.in_head = nn.Linear(size, factors)
        self.anchor_out_head = nn.Linear(size, factors)

    def initialise(self, generator: torch.Generator) -> None:
        """Layers that change nothing, and zero weights for slots and ranks; the rest as
        `initialise_blocks` leaves it. Vectors must not be zero, or their gradient would be zero."""
        init.constant(self.feature_norm.weight, 1.0)
        init.constant(self.feature_norm.bias, 0.0)
        positions = self.slot_embedding, self.rank_embedding
        for parameter in (*positions, self.relative_slot_bias, self.same_slot_bias):
            init.constant(parameter, 0.0)
        for each in self.layers:
            layer = cast(LatticeLayer, each)
            weight = layer.attn.in_proj_weight
            init.normal(weight, weight.shape[1] ** -0.5, generator)
            init.constant(layer.attn.in_proj_bias, 0.0)
            init.constant(layer.attn.out_proj.weight, 0.0)
            init.constant(layer.mlp.down_proj.weight, 0.0)

    def forward(
        self, embedded: Tensor, log_probs: Tensor, states: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of the candidates [M, K, k, H], their log-probabilities [M, K, k], states
        [M, K, H] and anchors [M, H] -> `Lattice.start`, `Lattice.pair` in float32 (float64)."""
        tokens = embedded if self.token_proj is None else self.token_proj(embedded)
        known = describe(log_probs).to(tokens.dtype)
        found = tokens + self.pass_hidden_proj(states)[:, :, None]
        found = found + self.feature_mlp(self.feature_norm(known))
        found = found + self.slot_embedding[0] + self.rank_embedding[0]
        shape, bias = found.shape[1:3], self.attention_bias(log_probs.shape[-1])
        found = found.flatten(1, 2)
        for layer in self.layers:
            found = layer(found, bias)
        found = self.output_norm(found).unflatten(1, shape)
        near = self.anchor_norm(self.context_proj(anchor))
        beside = near[:, None, None].expand_as(found)
        mixed = F.silu(self.factor_input_proj(torch.cat([found, beside, found * beside], -1)))
        first = self.unit(self.anchor_out_head(near))
        out, into = self.unit(self.out_head(mixed)), self.unit(self.in_head(mixed))
        start = (first[:, None] * into[:, 0]).sum(-1)
        pair = out[:, :-1] @ into[:, 1:].transpose(-1, -2)
        wide = torch.promote_types(pair.dtype, torch.float32)
        return self.scale * start.to(wide), self.scale * pair.to(wide)

    def attention_bias(self, count: int) -> Tensor:
        """[heads, K * k, K * k]: by the distance of two slots, and for a slot's own candidates."""
        slot = torch.arange(self.slots, device=self.same_slot_bias.device)
        slot = slot.repeat_interleave(count)
        apart = slot[:, None] - slot
        own = (apart == 0).to(self.same_slot_bias.dtype)
        return (
            self.relative_slot_bias[:, apart + self.slots]
            + own * self.same_slot_bias[:, None, None]
        )

    def unit(self, vectors: Tensor) -> Tensor:
        """Vectors of length one."""
        return F.normalize(vectors, dim=-1, eps=self.eps)


def describe(log_probs: Tensor) -> Tensor:
    """log_probs [M, K, k], the best first -> `FEATURES` of every candidate [M, K, k, 5]."""
    count = log_probs.shape[-1]
    rank = torch.arange(count, device=log_probs.device)
    share = (rank / max(1, count - 1)).to(log_probs).expand_as(log_probs)
    best = (rank == 0).to(log_probs).expand_as(log_probs)
    gap = log_probs - log_probs[..., :1]
    return torch.stack([log_probs, log_probs.exp(), gap, share, best], -1)


def correlate(
    correlator: Correlator,
    base: Tensor,
    states: Tensor,
    anchor: Tensor,
    embed: Callable[[Tensor], Tensor],
    count: int,
) -> Lattice:
    """The lattice of M blocks from base logits [M, K, V], normed states [M, K, H] and anchors
    [M, H]; count: k. Gradients reach the base logits through the candidates' log-probabilities."""
    wide = torch.promote_types(base.dtype, torch.float32)
    best, tokens = base.topk(count, -1)
    log_probs = best.to(wide) - base.to(wide).logsumexp(-1, keepdim=True)
    start, pair = correlator(embed(tokens), log_probs, states, anchor)
    return Lattice(tokens, log_probs, start, pair)


def candidate_logits(base: Tensor, tokens: Tensor, scores: Tensor, scale: float) -> Tensor:
    """Logits [..., V]: the scores [..., k] of the candidates `tokens` [..., k], and below all of
    them the other tokens in the order of base logits [..., V], which get no gradient."""
    outside = base.detach().to(scores.dtype)
    outside = outside - outside.logsumexp(-1, keepdim=True) - (scale + OUTSIDE)
    return outside.expand(*scores.shape[:-1], -1).scatter(-1, tokens.expand_as(scores), scores)
