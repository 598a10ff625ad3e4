"""EAGLE-3(.1): one decoder layer that continues the target's own features, token by token.

Taps of the target at a low, a middle and a high layer are normalised (3.1), concatenated and fused to g [H].
Row t of the drafter reads g_t and the embedding of token t+1, stands at position t and predicts token t+2;
deeper drafted tokens take the drafter's own output in the place of g. Training unrolls the same thing
(training-time test): step k sees the true context of step 0 and its own chain of earlier steps, so that the
drafter is trained on what it meets when it serves. Loss: sum over steps of decay^k times the cross entropy
against the target's full distribution, restricted to the draft vocabulary (methods.md, 2.6 and 2.7).
Parameter names are those of serving engines (serving-formats.md, 3.2).

Legend: B rows, T positions, M selected positions, K steps, H hidden, V vocabulary, V' draft vocabulary, n
taps, S cache slots, W width of a committed run, P nodes run at one level, g key/value heads, D head size.
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
from heads.api.features import FeatureSpec, default_taps
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import init, losses, vocab
from heads.nn.attention import (
    Memory,
    Place,
    additive,
    cache_attention,
    chained_attention,
    packed_mask,
    write_cache,
)
from heads.nn.blocks import FusingLayer, LayerShape, RMSNorm, initialise_blocks
from heads.nn.drafting import Plan, PlanCache, last_valid
from heads.nn.growth import grow
from heads.nn.rope import Rope, look_up


@dataclass(frozen=True)
class Config:
    """Configuration of EAGLE-3. Sizes of 0 are taken from the target."""

    taps: tuple[int, ...] = ()
    """Layers of the target that are read, ascending; empty: 2, n//2 and n-3."""
    tap_norm: bool = True
    """RMSNorm each tap before they are fused (EAGLE-3.1)."""
    post_norm_recurrence: bool = True
    """Feed the normalised output into the next drafted step (EAGLE-3.1); otherwise the residual stream."""
    num_attention_heads: int = 0
    """Query heads."""
    num_key_value_heads: int = 0
    """Key/value heads; must divide the query heads."""
    head_dim: int = 0
    """Size of a head (even)."""
    intermediate_size: int = 0
    """Width of the MLP."""
    from_target_layer: int = -1
    """Start the layer's matrices from this layer of the target (0-based); it must be Llama-like and of the
    same sizes. -1: random.
    """
    draft_vocab_size: int = 0
    """Tokens that can be drafted, the most frequent ones of the training data; 0: the whole vocabulary."""
    ttt_steps: int = 5
    """Steps unrolled in training, i.e. the deepest token that is trained for (7 in EAGLE-3, 4 in 3.1)."""
    decay: float = 0.8
    """Step k (1-based) weighs decay^(k-1) in the loss (0 < decay <= 1)."""
    hard_label_weight: float = 0.0
    """Share of the loss taken against the sampled token instead of the target's distribution (0 to 1)."""

    def __post_init__(self) -> None:
        if self.ttt_steps < 1:
            raise UserError(f"head.ttt_steps must be at least 1; given {self.ttt_steps}.")
        if not 0.0 < self.decay <= 1.0:
            raise UserError(f"head.decay must lie in (0, 1]; given {self.decay}.")
        if not 0.0 <= self.hard_label_weight <= 1.0:
            raise UserError(f"head.hard_label_weight must lie in [0, 1]; given {self.hard_label_weight}.")


@dataclass
class State:
    """keys, values [B, S, g, D]: row t in slot t, behind them room for drafted nodes. output [B, 1, H]: the
    layer's output at the last seen row, which predicts the root's children. root, root_position [B] int64.
    """

    keys: Tensor
    values: Tensor
    output: Tensor
    root: Tensor
    root_position: Tensor
    plan: Plan


class Drafter(TrainableDrafter):
    """An EAGLE-3 draft head."""

    kind: ClassVar[str] = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(config.taps or default_taps(info.num_layers), last_hidden=True, logits=True)
        self.needs.check(info.num_layers)
        hidden, taps = info.hidden_size, len(self.needs.taps)
        shape = LayerShape(
            hidden,
            config.num_attention_heads or info.num_attention_heads,
            config.num_key_value_heads or info.num_key_value_heads,
            config.head_dim or info.head_dim,
            config.intermediate_size or info.intermediate_size,
            info.rms_norm_eps,
        )
        norms = [RMSNorm(hidden, info.rms_norm_eps) for _ in range(taps if config.tap_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.midlayer = FusingLayer(shape)
        self.norm = RMSNorm(hidden, info.rms_norm_eps)
        self.reduced = 0 < config.draft_vocab_size < info.vocab_size
        columns = config.draft_vocab_size if self.reduced else info.vocab_size
        self.lm_head = nn.Linear(hidden, columns, bias=False)
        if self.reduced:
            self.register_buffer("d2t", torch.zeros(columns, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(info.vocab_size, dtype=torch.bool))
        self._rope = Rope(shape.head_dim, info.rope_theta)
        self._target: TargetWeights | None = None
        self._plans = PlanCache()
        self._columns: Tensor | None = None  # target ids [V'] while drafting with a reduced vocabulary
        unset_parameters(self)

    def bind(self, weights: TargetWeights) -> None:
        """Remember the target's embedding, which is shared and frozen."""
        self._target = weights

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Fix the draft vocabulary from the training data's token counts [V]; nothing to do for the full
        vocabulary.

        Called once, before `initialise`.
        """
        if self.reduced:
            ids = vocab.most_frequent(counts.to(self.d2t.device), self.config.draft_vocab_size)
            self.d2t, self.t2d = vocab.to_maps(ids, self.info.vocab_size)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Random or copied layer; final norm and LM head start from the target's, and the fused feature as
        the highest tap with a little of all of them, which is nearest to what that LM head reads.
        """
        initialise_blocks(self, generator)
        with torch.no_grad():
            self.fc.weight.mul_(0.3)[:, -self.info.hidden_size :].diagonal().add_(1.0)
        rows = weights.lm_head
        if self.reduced:
            if not bool(self.t2d.any()):
                raise UserError(
                    "the draft vocabulary was not chosen: head.draft_vocab_size needs token counts of the "
                    "training data. Train through `headstart train`, or call choose_vocabulary(counts) first."
                )
            rows = rows[vocab.to_target_ids(self.d2t)]
        init.copy(self.lm_head.weight, rows)
        final_norm = weights.state.get("model.norm.weight")
        if final_norm is not None:
            init.copy(self.norm.weight, final_norm)
        if self.config.from_target_layer >= 0:
            self._copy_layer(weights)

    def _copy_layer(self, weights: TargetWeights) -> None:
        """Attention (its half that reads the feature), MLP and their norms from one layer of the target."""
        hidden, prefix = self.info.hidden_size, f"model.layers.{self.config.from_target_layer}."
        layer, attention = self.midlayer, self.midlayer.self_attn
        wanted = {
            f"self_attn.{name}_proj": getattr(attention, f"{name}_proj").weight[:, hidden:] for name in "qkv"
        }
        wanted |= {"self_attn.o_proj": attention.o_proj.weight, "input_layernorm": layer.hidden_norm.weight}
        wanted |= {
            f"mlp.{name}_proj": getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")
        }
        wanted["post_attention_layernorm"] = layer.post_attention_layernorm.weight
        for name, parameter in wanted.items():
            value = weights.state.get(f"{prefix}{name}.weight")
            if value is None or value.shape != parameter.shape:
                raise UserError(
                    f"head.from_target_layer={self.config.from_target_layer} does not fit target "
                    f"'{self.info.id}' ({self.info.model_type}, {self.info.num_layers} layers): no "
                    f"{prefix}{name}.weight of shape {list(parameter.shape)}. "
                    "Use -1, or leave the head's sizes at 0."
                )
            init.copy(parameter, value)

    # --- the network ----------------------------------------------------------------------------------------

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self._target is not None, "bind was not called"
        return F.embedding(tokens, self._target.embedding).to(self.fc.weight.dtype)

    def _fuse(self, taps: Tensor) -> Tensor:
        """taps [B, T, n, H] -> g [B, T, H]."""
        taps = taps.to(self.fc.weight.dtype)
        if self.fc_norm:
            # [n, H]: all norms at once. Read by attribute: that is how ZeRO-3 notices a weight it has to
            # gather.
            scale = torch.stack([cast(RMSNorm, norm).weight for norm in self.fc_norm])
            taps = F.rms_norm(taps, taps.shape[-1:], None, self.info.rms_norm_eps) * scale
        out: Tensor = self.fc(taps.flatten(2))
        return out

    def _recur(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed if self.config.post_norm_recurrence else output

    # --- training -------------------------------------------------------------------------------------------

    def _unroll(self, batch: TrainBatch, steps: int) -> list[Tensor]:
        """Normalised outputs [B, T, H] of steps 1..`steps`; step k at row t predicts token t+k+1."""
        assert batch.taps is not None, "eagle3 needs the target's taps"
        layer, mask = self.midlayer, packed_mask(batch.segments)
        feature = self._fuse(batch.taps)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            # The last rows have no token this far ahead; whatever they read is supervised by nobody and seen
            # by nobody.
            tokens = batch.tokens.roll(-(step + 1), 1)
            rotation = self._rope.at(batch.positions + step, feature.dtype)
            states = layer.read(self._embed(tokens), feature)
            key, value = layer.self_attn.key_value(states, rotation)
            keys.append(key)
            values.append(value)
            attended = chained_attention(layer.self_attn.query(states, rotation), keys, values, mask)
            output = layer.finish(feature, attended)
            normed = self.norm(output)
            outputs.append(normed)
            feature = self._recur(output, normed)
        return outputs

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over steps k of decay^(k-1) times the cross entropy of token t+k+1, over supervised tokens.

        Positions whose most likely target token lies outside the draft vocabulary carry no loss and count as
        wrong.
        """
        config: Config = self.config
        steps = config.ttt_steps
        outputs = torch.cat([output.flatten(0, 1) for output in self._unroll(batch, steps)])  # [K*B*T, H]
        wanted = losses.supervised_states(
            batch, steps
        )  # [B*T, K]: by the state that the target predicts from
        behind = torch.arange(1, steps + 1, device=wanted.device)[:, None]
        first_of_step = (behind - 1) * wanted.shape[0]

        def part(states_at: Tensor) -> losses.Sums:
            mask = wanted[states_at].T  # [K, M]
            rows = first_of_step + (states_at - behind).clamp(
                min=0
            )  # [K, M]: step k predicts from k rows earlier
            logits = self.lm_head(outputs.index_select(0, rows.flatten())).unflatten(
                0, mask.shape
            )  # [K, M, V']
            probabilities, best, known = self._teach(batch, states_at)
            values = losses.soft_cross_entropy(logits, probabilities)  # [K, M]
            if config.hard_label_weight > 0:
                values = torch.lerp(
                    values, self._hard_loss(logits, batch, states_at), config.hard_label_weight
                )
            hits = (losses.best_column(logits) == best) & known & mask
            return losses.masked_sum(values.T, (mask & known).T), hits.sum(1), mask.sum(1)

        rows = wanted.any(1).nonzero().squeeze(1)
        per_step, correct, counts = losses.sum_over_rows(part, rows, steps * self.lm_head.out_features)
        weights = config.decay ** torch.arange(steps, device=per_step.device, dtype=per_step.dtype)
        return LossOutput((weights * per_step).sum(), losses.depth_metrics(per_step, correct, counts))

    @torch.no_grad()
    def _teach(self, batch: TrainBatch, states_at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target's word at flat states [M]: probabilities [M, V'] renormalised on the draft vocabulary,
        the best draft column [M], and whether the target's own best token is in the draft vocabulary [M].
        """
        assert batch.last_hidden is not None, "eagle3 trains against the target's distribution"
        assert batch.target_logits is not None, "eagle3 trains against the target's distribution"
        logits = batch.target_logits(batch.last_hidden.flatten(0, 1)[states_at])
        known = torch.ones_like(states_at, dtype=torch.bool)
        if self.reduced:
            known = self.t2d[logits.argmax(-1)]
            logits = logits[:, vocab.to_target_ids(self.d2t)]
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return probabilities, logits.argmax(-1), known

    def _hard_loss(self, logits: Tensor, batch: TrainBatch, states_at: Tensor) -> Tensor:
        """Cross entropy [K, M] against the token that follows each state; 0 where the draft vocabulary lacks
        it.
        """
        tokens = batch.tokens.flatten()
        labels = tokens[(states_at + 1).clamp(max=tokens.shape[0] - 1)]
        known = torch.ones_like(labels, dtype=torch.bool)
        if self.reduced:
            known, labels = self.t2d[labels], (self.t2d.cumsum(0) - 1).clamp(min=0)[labels]
        values = losses.cross_entropy(logits.flatten(0, 1), labels.repeat(logits.shape[0])).view(
            logits.shape[:2]
        )
        return torch.where(known, values, values.new_zeros(()))

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V'] of unrolled steps 1..depth; see the contract."""
        return [self.lm_head(output) for output in self._unroll(batch, depth)]

    # --- drafting -------------------------------------------------------------------------------------------

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        batch, width = seen.tokens.shape
        weight, attention, plan = self.fc.weight, self.midlayer.self_attn, self._plans.of(tree)
        slots = max(capacity, width) + plan.room + 1
        kv_heads = attention.k_proj.out_features // attention.head_dim
        cache = (batch, slots, kv_heads, attention.head_dim)
        self._columns = vocab.to_target_ids(self.d2t) if self.reduced else None
        state = State(
            keys=weight.new_zeros(cache),
            values=weight.new_zeros(cache),
            output=weight.new_zeros(batch, 1, self.info.hidden_size),
            root=seen.tokens.new_zeros(batch),
            root_position=seen.tokens.new_zeros(batch),
            plan=plan,
        )
        return self.commit(state, seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Keys and values of the whole run, attention and MLP of its last row only: that one predicts the
        root's children.

        Padded entries are written behind the run, where the next one overwrites them before anything sees
        them.
        """
        assert accepted.taps is not None, "eagle3 needs the target's taps"
        layer = self.midlayer
        rows, last, root, root_position = last_valid(accepted)
        feature = self._fuse(accepted.taps)
        states = layer.read(self._embed(accepted.next_tokens), feature)  # [B, W, 2H]
        slots = accepted.positions[:, :1] + torch.arange(states.shape[1], device=states.device)
        rotation = look_up(self._table(state), slots)
        key, value = layer.self_attn.key_value(states, rotation)
        row_index = rows[:, None]
        write_cache(state.keys, row_index, slots, key)
        write_cache(state.values, row_index, slots, value)
        place = last[:, None]
        own_rotation = (rotation[0][row_index, place], rotation[1][row_index, place])
        query = layer.self_attn.query(states[row_index, place], own_rotation)
        seen = torch.arange(state.keys.shape[1], device=slots.device) < root_position[:, None, None]
        attended = cache_attention(query, state.keys, state.values, additive(seen, query.dtype))
        state.output.copy_(layer.finish(feature[row_index, place], attended))
        state.root.copy_(root)
        state.root_position.copy_(root_position)
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Grow the tree level by level from the last committed row's output; see the protocol."""
        rows = torch.arange(state.root.shape[0], device=state.root.device)[:, None]
        # A node at depth d stands one position before its own token, at root_position + d - 1.
        memory = Memory(state.root_position, self._table(state), state.keys.shape[1])

        def step(place: Place, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            return self._advance(state, place, rows, tokens, feature)

        normed = self.norm(state.output)
        logits, first = self.lm_head(normed), self._recur(state.output, normed)
        return grow(
            state.plan, state.root, state.root_position, logits, first, step, noise, self._columns, memory
        )

    def _advance(
        self, state: State, place: Place, rows: Tensor, tokens: Tensor, feature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run nodes [B, P] (tokens, and features [B, P, H] of their parents) -> their children's logits and
        features."""
        layer = self.midlayer
        states = layer.read(self._embed(tokens), feature)
        key, value = layer.self_attn.key_value(states, place.rotation)
        write_cache(state.keys, rows, place.slots, key)
        write_cache(state.values, rows, place.slots, value)
        query = layer.self_attn.query(states, place.rotation)
        attended = cache_attention(query, state.keys, state.values, place.mask)
        output = layer.finish(feature, attended)
        normed = self.norm(output)
        return self.lm_head(normed), self._recur(output, normed)

    def _table(self, state: State) -> Tensor:
        return self._rope.table(state.keys.shape[1], state.keys.device, state.keys.dtype)
