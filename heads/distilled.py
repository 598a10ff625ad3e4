"""A small language model distilled from the target: a Llama of its own, or a few of the target's own layers.

It sees tokens only; nothing of the target's inner states is needed to draft. It is trained against the
target's full distribution with forward KL, reverse KL, JSD, TV, plain cross entropy on the target's answers,
or any mix of them (methods.md, 4). Parameter names are Hugging Face's for Llama, so that an export is an
ordinary checkpoint.

Legend: B rows, T positions, M selected positions, H hidden of the drafter, V vocabulary, L layers, S cache
slots, W width of a run, P nodes run at one level, g key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.drafter import Noise, Proposal, TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import init, losses
from heads.nn.attention import (
    Memory,
    Place,
    additive,
    cache_attention,
    packed_mask,
    sequence_attention,
    write_cache,
)
from heads.nn.blocks import DecoderLayer, LayerShape, RMSNorm, initialise_blocks
from heads.nn.drafting import Plan, PlanCache, last_valid
from heads.nn.growth import grow
from heads.nn.rope import Rope, Rotation, look_up

OBJECTIVES = ("forward_kl", "reverse_kl", "jsd", "tv", "ce")


@dataclass(frozen=True)
class Config:
    """Configuration of a distilled drafter. Sizes of 0 follow the target."""

    num_layers: int = 2
    """Decoder layers; ignored when `from_target_layers` is given."""
    hidden_size: int = 0
    """Width of the residual stream."""
    num_attention_heads: int = 0
    """Query heads; 0: as many as heads of the target's size fit into hidden_size."""
    num_key_value_heads: int = 0
    """Key/value heads; 0: the target's number if it divides the query heads, else as many as query heads."""
    head_dim: int = 0
    """Size of a head (even)."""
    intermediate_size: int = 0
    """Width of the MLP; 0: in proportion to hidden_size as in the target."""
    from_target_layers: tuple[int, ...] = ()
    """Start from these layers of the target (ascending, 0-based) with its embedding, final norm and LM head;
    all sizes are then the target's.
    """
    share_embeddings: bool = False
    """Use the target's frozen embedding and LM head instead of own ones (needs the target's hidden_size)."""
    tie_embeddings: bool = False
    """Let the own embedding serve as LM head as well."""
    forward_kl: float = 1.0
    """Weight of KL(target || drafter)."""
    reverse_kl: float = 0.0
    """Weight of KL(drafter || target)."""
    jsd: float = 0.0
    """Weight of the generalised Jensen-Shannon divergence."""
    jsd_beta: float = 0.5
    """Its mixture weight of the target's distribution (0 < beta < 1)."""
    tv: float = 0.0
    """Weight of the total variation distance."""
    ce: float = 0.0
    """Weight of the cross entropy against the answer's tokens."""
    temperature: float = 1.0
    """Both distributions of the soft objectives are taken at this temperature (> 0)."""

    def __post_init__(self) -> None:
        weights = [getattr(self, name) for name in OBJECTIVES]
        if min(weights) < 0 or max(weights) == 0:
            raise UserError(
                "a distilled drafter needs an objective: give a positive weight to one or more of "
                f"head.{', head.'.join(OBJECTIVES)}, and none below 0; given {weights}."
            )
        if not 0.0 < self.jsd_beta < 1.0 or self.temperature <= 0.0:
            raise UserError(
                "head.jsd_beta must lie in (0, 1) and head.temperature above 0; "
                f"given {self.jsd_beta} and {self.temperature}."
            )
        if self.share_embeddings and self.tie_embeddings:
            raise UserError(
                "head.share_embeddings and head.tie_embeddings exclude each other: what is shared is not own."
            )
        if self.from_target_layers and list(self.from_target_layers) != sorted(set(self.from_target_layers)):
            raise UserError(
                f"head.from_target_layers must ascend without repetition; given {self.from_target_layers}."
            )
        if self.num_layers < 1:
            raise UserError(f"head.num_layers must be at least 1; given {self.num_layers}.")

    @property
    def soft(self) -> bool:
        """Whether any objective compares with the target's distribution."""
        return any(getattr(self, name) > 0 for name in OBJECTIVES if name != "ce")


@dataclass
class State:
    """keys, values: per layer [B, S, g, D], slot = position, the root included, behind it room for drafted
    nodes. output [B, 1, H]: the normalised state at the root, which predicts its children. root,
    root_position [B] int64.
    """

    keys: list[Tensor]
    values: list[Tensor]
    output: Tensor
    root: Tensor
    root_position: Tensor
    plan: Plan


class Backbone(nn.Module):
    """Embedding, decoder layers and final norm, under Hugging Face's names."""

    def __init__(self, layers: int, shape: LayerShape, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size) if vocab_size else None
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Drafter(TrainableDrafter):
    """A small Llama that drafts for the target."""

    kind: ClassVar[str] = "distilled"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(last_hidden=config.soft, logits=config.soft)
        self.shape = _shape(config, info)
        if config.share_embeddings and self.shape.hidden_size != info.hidden_size:
            raise UserError(
                f"head.share_embeddings needs the target's hidden_size {info.hidden_size}; "
                f"given {self.shape.hidden_size}."
            )
        layers = len(config.from_target_layers) or config.num_layers
        self.model = Backbone(layers, self.shape, 0 if config.share_embeddings else info.vocab_size)
        own_head = not config.share_embeddings and not config.tie_embeddings
        self.lm_head = nn.Linear(self.shape.hidden_size, info.vocab_size, bias=False) if own_head else None
        self._rope = Rope(self.shape.head_dim, info.rope_theta)
        self._target: TargetWeights | None = None
        self._plans = PlanCache()
        unset_parameters(self)

    def bind(self, weights: TargetWeights) -> None:
        """Remember the target's embedding and LM head."""
        self._target = weights

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """A random Llama, or the chosen layers of the target; raises `UserError` when the target has no such
        weights.
        """
        if self.config.from_target_layers:
            self._copy_layers(weights)
            return
        initialise_blocks(self, generator)
        if self.model.embed_tokens is not None:
            init.normal(self.model.embed_tokens.weight, 1.0 if self.lm_head is not None else 0.02, generator)

    def _copy_layers(self, weights: TargetWeights) -> None:
        """Every parameter from the target's weight of the same Hugging Face name."""
        layers = self.config.from_target_layers
        state = dict(weights.state)
        state["lm_head.weight"], state["model.embed_tokens.weight"] = weights.lm_head, weights.embedding
        wanted = {}
        for name, parameter in self.named_parameters():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(layers[int(parts[2])])
            wanted[".".join(parts)] = parameter
        prefixes = tuple(f"model.layers.{layer}." for layer in layers)
        missing = sorted(name for name in wanted if name not in state)
        extra = sorted(name for name in state if name.startswith(prefixes) and name not in wanted)
        odd = missing or extra or [n for n, p in wanted.items() if p.shape != state[n].shape]
        if odd:
            raise UserError(
                f"layers {list(layers)} of target '{self.info.id}' ({self.info.model_type}, "
                f"{self.info.num_layers} layers) cannot start a Llama drafter: weights {odd[:3]}"
                f"{' and more' if len(odd) > 3 else ''} are missing or of another kind. "
                "Use head.from_target_layers=[] for a fresh drafter."
            )
        for name, parameter in wanted.items():
            init.copy(parameter, state[name])

    # --- the network ----------------------------------------------------------------------------------------

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.model.embed_tokens is not None:
            out: Tensor = self.model.embed_tokens(tokens)
            return out
        assert self._target is not None, "bind was not called"
        return F.embedding(tokens, self._target.embedding).to(self.model.norm.weight.dtype)

    def _logits(self, states: Tensor) -> Tensor:
        """Normalised states [..., H] -> logits [..., V]."""
        if self.lm_head is not None:
            out: Tensor = self.lm_head(states)
            return out
        if self.model.embed_tokens is not None:
            return F.linear(states, self.model.embed_tokens.weight)
        assert self._target is not None, "bind was not called"
        return self._target.logits(states.to(self._target.lm_head.dtype))

    def _sequence(self, batch: TrainBatch) -> Tensor:
        """Normalised states [B, T, H] of packed sequences; the one at t predicts token t+1."""
        mask = packed_mask(batch.segments)
        states = self._embed(batch.tokens)
        rotation = self._rope.at(batch.positions, states.dtype)
        for layer in self.model.layers:
            states = layer(states, rotation, lambda q, k, v: sequence_attention(q, k, v, mask))
        out: Tensor = self.model.norm(states)
        return out

    # --- training -------------------------------------------------------------------------------------------

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The weighted objectives at every position whose next token is supervised."""
        states = self._sequence(batch).flatten(0, 1)  # [B*T, H]
        tokens = batch.tokens.flatten()

        def part(rows: Tensor) -> losses.Sums:
            logits = self._logits(states.index_select(0, rows))  # [M, V]
            labels = tokens[(rows + 1).clamp(max=tokens.shape[0] - 1)]
            target_logits = self._target_word(batch, rows)
            values = self._objective(logits, target_logits, labels)
            best = labels if target_logits is None else target_logits.argmax(-1)
            return values.sum(0, keepdim=True), (losses.best_column(logits) == best).sum(0, keepdim=True)

        rows = batch.supervised(1).flatten().nonzero().squeeze(1)
        total, correct = losses.sum_over_rows(part, rows, self.info.vocab_size)
        count = torch.full_like(correct, rows.shape[0])
        return LossOutput(total.sum(), losses.depth_metrics(total, correct, count))

    @torch.no_grad()
    def _target_word(self, batch: TrainBatch, rows: Tensor) -> Tensor | None:
        """The target's logits [M, V] at flat positions [M]; None when no objective asks for them."""
        if not self.config.soft:
            return None
        assert batch.last_hidden is not None, "soft objectives need the target's last hidden state"
        assert batch.target_logits is not None, "soft objectives need the target's logits"
        return batch.target_logits(batch.last_hidden.flatten(0, 1)[rows])

    def _objective(self, logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> Tensor:
        """Weighted sum of the objectives per position [M]."""
        config: Config = self.config
        values = [config.ce * losses.cross_entropy(logits, labels)] if config.ce > 0 else []
        if target_logits is not None:
            drafted, wanted = logits / config.temperature, target_logits / config.temperature
            if config.forward_kl > 0:
                values.append(config.forward_kl * losses.forward_kl(drafted, wanted))
            if config.reverse_kl > 0:
                values.append(config.reverse_kl * losses.reverse_kl(drafted, wanted))
            if config.jsd > 0:
                values.append(config.jsd * losses.jensen_shannon(drafted, wanted, config.jsd_beta))
            if config.tv > 0:
                values.append(config.tv * losses.total_variation(drafted, wanted))
        return torch.stack(values).sum(0)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Depth k at t is the prediction from token t+k [B, T, V]; entries past the end mean nothing."""
        logits = self._logits(self._sequence(batch))
        return [logits.roll(-k, 1) for k in range(1, depth + 1)]

    # --- drafting -------------------------------------------------------------------------------------------

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        batch, width = seen.tokens.shape
        weight, shape, plan = self.model.norm.weight, self.shape, self._plans.of(tree)
        slots = max(capacity, width) + plan.room + 2
        cache = (batch, slots, shape.num_key_value_heads, shape.head_dim)
        state = State(
            keys=[weight.new_zeros(cache) for _ in self.model.layers],
            values=[weight.new_zeros(cache) for _ in self.model.layers],
            output=weight.new_zeros(batch, 1, shape.hidden_size),
            root=seen.tokens.new_zeros(batch),
            root_position=seen.tokens.new_zeros(batch),
            plan=plan,
        )
        tokens = torch.cat([seen.tokens[:, :1], seen.next_tokens], 1)
        return self._absorb(state, seen, tokens, seen.positions[:, :1])

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Read the newly committed tokens; the last one is the new root and its output predicts the root's
        children.
        """
        return self._absorb(state, accepted, accepted.next_tokens, accepted.positions[:, :1] + 1)

    def _absorb(self, state: State, run: TargetStates, tokens: Tensor, first: Tensor) -> State:
        """Run `tokens` [B, W] at positions first [B, 1] and on through the model, as far as the new root's
        output needs it.

        Padded tokens are written behind the root, where later ones overwrite them before anything sees them.
        """
        rows, _, root, root_position = last_valid(run)
        slots = first + torch.arange(tokens.shape[1], device=tokens.device)
        rotation = look_up(self._table(state), slots)
        places = torch.arange(state.keys[0].shape[1], device=tokens.device)
        states = self._embed(tokens)
        if len(self.model.layers) > 1:
            mask = additive(places <= slots[..., None], states.dtype)  # [B, W, S]
            for index in range(len(self.model.layers) - 1):
                states = self._layer(state, index, states, rotation, rows[:, None], slots, mask)
        last = (rows[:, None], root_position[:, None] - first)
        mask = additive(places <= root_position[:, None], states.dtype)[:, None]
        states = self._layer(state, -1, states, rotation, rows[:, None], slots, mask, last)
        state.output.copy_(self.model.norm(states))
        state.root.copy_(root)
        state.root_position.copy_(root_position)
        return state

    def _layer(
        self,
        state: State,
        index: int,
        states: Tensor,
        rotation: Rotation,
        rows: Tensor,
        slots: Tensor,
        mask: Tensor,
        only: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One layer over the cache: keys and values of all W states, the rest for all of them or for the one
        `only` names.
        """
        layer = cast(DecoderLayer, self.model.layers[index])
        normed = layer.input_layernorm(states)
        key, value = layer.self_attn.key_value(normed, rotation)
        write_cache(state.keys[index], rows, slots, key)
        write_cache(state.values[index], rows, slots, value)
        if only is not None:
            states, normed, rotation = states[only], normed[only], (rotation[0][only], rotation[1][only])
        attended = cache_attention(
            layer.self_attn.query(normed, rotation), state.keys[index], state.values[index], mask
        )
        return layer.finish(states, attended)

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Grow the tree level by level from the root's output; see the protocol."""
        rows = torch.arange(state.root.shape[0], device=state.root.device)[:, None]
        memory = Memory(state.root_position + 1, self._table(state), state.keys[0].shape[1])

        def step(place: Place, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            states = self._embed(tokens)
            for index in range(len(self.model.layers)):
                states = self._layer(state, index, states, place.rotation, rows, place.slots, place.mask)
            states = self.model.norm(states)
            return self._logits(states), states

        logits = self._logits(state.output)
        return grow(
            state.plan, state.root, state.root_position, logits, state.output, step, noise, memory=memory
        )

    def _table(self, state: State) -> Tensor:
        return self._rope.table(state.keys[0].shape[1], state.keys[0].device, state.keys[0].dtype)


def _shape(config: Config, info: TargetInfo) -> LayerShape:
    """Sizes of the drafter's layers; what is not given follows the target."""
    if config.from_target_layers:
        sizes = (
            info.hidden_size,
            info.num_attention_heads,
            info.num_key_value_heads,
            info.head_dim,
            info.intermediate_size,
        )
        return LayerShape(*sizes, rms_norm_eps=info.rms_norm_eps)
    hidden = config.hidden_size or info.hidden_size
    head_dim = config.head_dim or info.head_dim
    heads = config.num_attention_heads or max(1, hidden // head_dim)
    kv_heads = config.num_key_value_heads
    if not kv_heads:
        kv_heads = info.num_key_value_heads if heads % info.num_key_value_heads == 0 else heads
    intermediate = config.intermediate_size or max(
        1, round(hidden * info.intermediate_size / info.hidden_size)
    )
    return LayerShape(hidden, heads, kv_heads, head_dim, intermediate, info.rms_norm_eps)
