"""EAGLE: one decoder layer that predicts the target's next last hidden state.

The feature f_t is the target's last hidden state AFTER its final norm, as in the published code and
in serving engines: it is what the LM head reads, so the drafter has no norm and no head of its own.
Row t joins the embedding of token t+1 and f_t (2H to H). Its output predicts f_{t+1}, from which
token t+2 is drafted; deeper tokens continue from that output. EAGLE-2 uses the same weights with a
dynamic tree (`decode=dynamic`).

Loss (Li et al., 2401.15077): SmoothL1 between the output and the target's feature, plus a tenth of
the cross entropy against the target's distribution, with uniform noise on the features that are
read. The paper trains one step (`align_steps=1`). HASS (2408.15766) trains the same layer on the
inputs that it gets when it drafts: `align_steps` steps in its harmonised context, which is that of
`heads.nn.feature.chain`, and a top-K distillation loss. Parameter names are those of the published
checkpoints, which vLLM and SGLang load.

Legend: B rows, T positions, M selected states, K steps, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, Fraction, Rows, Weight, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.kernels.reference.row_losses import ROW_LOSSES, SOFT_CROSS_ENTROPY
from heads.nn import losses
from heads.nn.blocks import MLP, Attention, LayerShape, ResidualLayer, RMSNorm, initialise_blocks
from heads.nn.feature import base
from heads.nn.feature.chain import Chain, ChainDrafter
from heads.nn.rope import Rope


@config("head")
@dataclass(frozen=True)
class Config(base.LayerConfig):
    """Configuration of EAGLE. Sizes of 0 are taken from the target."""

    align_steps: Depth = 1
    """Steps trained in the drafter's own context: 1 is EAGLE, 3 or 4 is HASS (>= 1)."""
    step_decay: Fraction = 1.0
    """Step k (1-based) has the weight step_decay^(k-1) in the loss (0 < step_decay <= 1)."""
    feature_weight: Weight = 1.0
    """Weight of SmoothL1 between drafted and true features, averaged over their H entries (>=
    0)."""
    logit_weight: Weight = 0.1
    """Weight of the cross entropy against the target's distribution (>= 0)."""
    top_k_weight: Weight = 0.0
    """Weight of the cross entropy over the target's `top_k` likeliest tokens (>= 0; HASS: 1)."""
    top_k: Rows = 10
    """Number of tokens in the loss of `top_k_weight` (>= 1)."""
    fc_bias: bool = False
    """Add a bias to the projection of token and feature, as published (vLLM does not support
    it)."""
    noise: Weight = 0.1
    """In training, add noise from U(-noise, noise) to the features that are read (>= 0)."""

    def __post_init__(self) -> None:
        weights = (self.feature_weight, self.logit_weight, self.top_k_weight)
        if not any(weights):
            raise UserError(
                "head.feature_weight, head.logit_weight and head.top_k_weight must not be all 0; "
                f"given {', '.join(map(str, weights))}."
            )


class Layer(ResidualLayer):
    """The decoder layer without a norm before its attention, which reads the fused vector."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Drafter(ChainDrafter):
    """An EAGLE draft head."""

    kind: ClassVar[str] = "eagle"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(last_hidden=True, logits=True)
        shape = base.layer_shape(config, info)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Layer(shape)])
        self.chain = Chain(self, Rope(shape.head_dim, info.rope_theta))
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """A random layer, or one of the target's. The fused vector starts as the feature plus a
        small random part of both inputs. The embedding's part is scaled as if embeddings had root
        mean square 1, because they are many times smaller than features and no norm evens this out
        here."""
        initialise_blocks(self, generator, self.config.initial_std)
        hidden = self.info.hidden_size
        size = weights.embedding.float().square().mean().sqrt().clamp(min=1e-6)
        with torch.no_grad():
            self.fc.weight[:, :hidden].div_(size)
            self.fc.weight[:, hidden:].mul_(0.3).diagonal().add_(1.0)
        if self.config.from_target_layer >= 0:
            wanted = base.layer_weights(self._layer, "self_attn", "mlp", "post_attention_layernorm")
            self.copy_layer(weights, self.config.from_target_layer, self.attention, wanted)

    # The network, as `Chain` runs it

    @property
    def _layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    @property
    def attention(self) -> Attention:
        return self._layer.self_attn

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The target's last hidden states [B, T, H] after its final norm."""
        assert last_hidden is not None, "eagle needs the target's last hidden state"
        return last_hidden.to(self.fc.weight.dtype)

    def read(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and features [B, T, H] -> the fused vector [B, T, H], which is both
        attention's input and residual."""
        fused = self.fc(torch.cat([self.embed(tokens, feature.dtype), feature], -1))
        return fused, fused

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self._layer.finish(residual, attended)

    def emit(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The output is a feature, for the LM head and for the next step."""
        return output, output

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over steps k of step_decay^(k-1) times the weighted losses of feature and token
        t+k+1, over supervised tokens."""
        config: Config = self.config
        weights = config.step_decay ** torch.arange(config.align_steps, device=batch.tokens.device)
        noisy = base.add_noise(self.features(None, batch.last_hidden), batch, config.noise)
        unrolled = self.chain.unroll(batch, config.align_steps, noisy)
        judge = partial(self._judge, batch)
        columns = self.info.vocab_size
        return base.unrolled_loss(batch, unrolled, columns, weights, judge, frozen=True)

    def _judge(
        self, batch: TrainBatch, outputs: Tensor, states_at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and correctness [K, M] of drafted features [K, M, H] of states [M]; see `Judge`."""
        config: Config = self.config
        logits = self.logits(outputs)  # [K, M, V]
        wanted = base.teacher_logits(batch, states_at)
        names = (SOFT_CROSS_ENTROPY,) if config.logit_weight > 0 else ()
        found, parts = ROW_LOSSES(logits, wanted, None, names), []
        if config.feature_weight > 0:
            assert batch.last_hidden is not None
            # the teacher's, without gradient: in joint training the states have a graph
            true = batch.last_hidden.detach().flatten(0, 1)[states_at]
            parts.append(config.feature_weight * losses.feature_distance(outputs, true))
        if config.logit_weight > 0:
            parts.append(config.logit_weight * found[SOFT_CROSS_ENTROPY])
        if config.top_k_weight > 0:
            probabilities = losses.probabilities_of(wanted)
            narrowed = losses.top_k_cross_entropy(logits, probabilities, config.top_k)
            parts.append(config.top_k_weight * narrowed)
        counts = torch.ones_like(states_at, dtype=torch.bool)
        return torch.stack(parts).sum(0), counts, found.best == found.target_best
