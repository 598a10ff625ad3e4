"""EAGLE-3(.1): one decoder layer that continues the target's own features, token by token.

Taps of the target at a low, a middle and a high layer are normalised (3.1), concatenated and fused
to g [H]. Row t of the drafter reads g_t and the embedding of token t+1, has position t and predicts
token t+2; for deeper tokens, the drafter's own output replaces g. Training unrolls the same steps
(training-time test): step k sees the true context of step 0 and its own chain of earlier steps, so
the drafter is trained on the inputs that it gets in serving. Loss: sum over steps of decay^k times
the cross entropy against the target's full distribution, restricted to the draft vocabulary
(EAGLE-3, 2503.01840; 3.1, 2605.09992). Parameter names are those of serving engines (vLLM and
SGLang).

Legend: B rows, T positions, K steps, H hidden, V' draft vocabulary, n taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, Fraction, Rows, config
from heads.api.drafter import TargetStates
from heads.api.starts import OtherKind, renamed
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn.blocks import Attention, FusingLayer
from heads.nn.drafting.state import Cached as State
from heads.nn.feature.base import LayerConfig, layer_shape, layer_weights, unrolled_loss
from heads.nn.feature.chain import Chain, ChainDrafter
from heads.nn.feature.parallel import AnchoredRows
from heads.nn.feature.taps import TapConfig, TapDrafter
from heads.nn.rope import Rope


@config("head")
@dataclass(frozen=True)
class Config(TapConfig, LayerConfig):
    """Configuration of EAGLE-3. Sizes of 0 are taken from the target."""

    post_norm_recurrence: bool = True
    """Feed the normalised output to the next step (EAGLE-3.1), not the residual stream."""
    ttt_steps: Depth = 3
    """Steps unrolled in training, which is the deepest drafted token that is trained (7 in EAGLE-3,
    4 in 3.1). Drafts may be deeper."""
    decay: Fraction = 1.0
    """Step k (1-based) has the weight decay^(k-1) in the loss (0 < decay <= 1)."""
    num_anchors: Rows | None = None
    """Positions per training row after which the second and later steps are trained, drawn again at
    every step (>= 1); null: all. The first step is trained at every position."""


def from_eagle(drafter: Drafter, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert EAGLE's layer. EAGLE reads F e + G f, where e is the token's embedding and f the last
    hidden state. This layer's attention reads both normalised and side by side, and its residual is
    the feature.

    The feature starts as f, from the highest tap alone: the tap's normalised state times the weight
    of the target's final norm. Query, key and value weights are EAGLE's times its fusion, times the
    sizes that the norms divide by: the root mean square of all embeddings and that of the final
    norm's weight, which is the size of a last hidden state. EAGLE's output already includes that
    norm's weight, so the norm after the layer starts as that size alone. The part of e in EAGLE's
    residual and a bias of its fusion are left out, because this layer has no place for them.
    """
    hidden, fused = drafter.info.hidden_size, given["fc.weight"].to(drafter.fc.weight.dtype)
    final_norm = drafter.norm.weight.detach().to(fused)
    state_size = final_norm.square().mean().sqrt()
    embedding_size = drafter.target.embedding.float().square().mean().sqrt().to(fused)
    sizes = torch.cat([embedding_size.expand(hidden), state_size.expand(hidden)])
    found = renamed(given, "layers.0.", "midlayer.")
    del found["fc.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        place = f"midlayer.self_attn.{name}.weight"
        found[place] = (found[place].to(fused) @ fused) * sizes
    passing = torch.zeros(drafter.fc.weight.shape).to(fused)
    passing[:, -hidden:] = final_norm.diag()
    return found | {"fc.weight": passing, "norm.weight": state_size.expand(hidden)}


def from_peagle(drafter: Drafter, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """P-EAGLE's first layer becomes the only one."""
    return renamed(given, "layers.0.", "midlayer.")


class Drafter(TapDrafter, ChainDrafter):
    """An EAGLE-3 draft head."""

    kind: ClassVar[str] = "eagle3"
    label_weight: ClassVar[str] = "hard_label_weight"
    starts_from: ClassVar[Mapping[str, OtherKind]] = {
        "eagle": OtherKind(
            from_eagle,
            (
                *("fc_norm.*", "input_norm.*", "lm_head.*", "d2t", "t2d", "fc.bias"),
                *("midlayer.input_layernorm.*", "midlayer.*_norm.*"),
            ),
        ),
        "peagle": OtherKind(from_peagle, ("layers.*", "mask_*", "embed_tokens.*")),
    }
    midlayer: FusingLayer

    def __init__(self, config: Config, info: TargetInfo) -> None:
        shape = layer_shape(config, info)
        super().__init__(config, info, {"midlayer": FusingLayer(shape)})
        self.chain = Chain(self, Rope(shape.head_dim, info.rope_theta))
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """See `TapDrafter`; with `from_target_layer`, the half of the attention that reads the
        feature, the MLP and their norms come from that layer of the target."""
        super().initialise(weights, generator)
        if self.config.from_target_layer >= 0:
            hidden, layer = self.info.hidden_size, self.midlayer
            wanted = layer_weights(layer, "self_attn", "mlp", "post_attention_layernorm")
            for name in ("q_proj", "k_proj", "v_proj"):
                wanted[f"self_attn.{name}"] = wanted[f"self_attn.{name}"][:, hidden:]
            wanted["input_layernorm"] = layer.hidden_norm.weight
            self.copy_layer(weights, self.config.from_target_layer, layer.self_attn, wanted)

    # The network, as `Chain` runs it

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """taps [B, T, n, H] -> g [B, T, H]."""
        assert taps is not None, "eagle3 needs the target's taps"
        return self.fuse(taps)

    def read(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and features [B, T, H] -> the attention's input [B, T, 2H] and the
        residual, the feature itself."""
        read = self.midlayer.read(self.embed(tokens, feature.dtype), feature)
        return read, self.residual(self.midlayer, feature)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.midlayer.finish(residual, attended)

    def emit(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised output for the LM head; the next step's input by configuration."""
        normed = self.norm(output)
        return normed, normed if self.config.post_norm_recurrence else output

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over steps k of decay^(k-1) times the cross entropy of supervised tokens t+k+1. With
        `num_anchors`, it and the metrics' sums and counts are unbiased estimates.

        Positions whose best target token cannot be drafted carry no loss and count as wrong.
        """
        config: Config = self.config
        steps, anchors = config.ttt_steps, None
        if config.num_anchors is not None and steps > 1:
            anchors = AnchoredRows.sampled(batch, steps, config.num_anchors)
        weights = config.decay ** torch.arange(steps, device=batch.tokens.device)
        unrolled = self.chain.unroll(batch, steps, anchors=anchors)
        columns, taught = self.judged_columns, self.info.vocab_size
        judge = partial(self.judge, batch)
        return unrolled_loss(
            batch, unrolled, columns, weights, judge, taught, anchors, self.frozen_head
        )

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        self.set_columns()
        return super().start(seen, tree, capacity)
