"""Multi-token prediction: one decoder block per further token, which joins the state before it with
the embedding of the next token.

    h' = W [RMSNorm(emb(x_{t+k})); RMSNorm(h^{k-1}_t)],  h^k = RMSNorm(Block(h')),  token t+k+1 from
                                                         the target's LM head

with h^0 the target's last hidden state (after its final norm, as engines pass it on). There are two
forms: DeepSeek-V3 (2412.19437) has a separate block per depth; FastMTP (2509.18362) applies one
block repeatedly. Here both are trained on a frozen target and share its embedding and LM head.
Loss: sum over depths of beta^(k-1), normalised to sum to one, times the cross entropy; beta = 1 is
DeepSeek's 1/D, beta = 0.6 is FastMTP's. The shared block is trained in the context in which it
drafts (`heads.nn.feature.chain`): a block that is trained for one step only collapses when it is
applied repeatedly. Parameter names of the shared form are those of engines (MiMo in vLLM and
SGLang); separate blocks carry their number after `mtp`.

Legend: B rows, T positions, M selected states, D depths, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from heads.api.batch import TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, config
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn.blocks import Attend, Attention, DecoderLayer, LayerShape, RMSNorm, initialise_blocks
from heads.nn.feature import base
from heads.nn.feature.chain import Chain
from heads.nn.feature.depths import DepthConfig, DepthDrafter
from heads.nn.feature.modules import Module, ModuleChain
from heads.nn.rope import Rope, Rotation


@config("head")
@dataclass(frozen=True)
class Config(base.LayerConfig, DepthConfig):
    """Configuration of multi-token prediction. Sizes of 0 are taken from the target."""

    shared: bool = False
    """Use one block for all depths (FastMTP) instead of one per depth (DeepSeek-V3)."""
    depths: Depth = 4
    """Number of trained depths (>= 1). With one block per depth, drafts are no deeper; a shared
    block can draft deeper."""


class MtpBlock(nn.Module):
    """Norms of both inputs, their projection, one decoder layer and a final norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = RMSNorm(hidden, eps)

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    @property
    def attention(self) -> Attention:
        return self.layer.self_attn

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Embeddings and states [B, T, H] -> the layer's input [B, T, H]."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)], -1)
        return cast(Tensor, self.fc(both))

    def run(self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Embeddings and states [B, T, H] -> normalised outputs [B, T, H]."""
        return cast(Tensor, self.norm(self.layer(self.join(embedded, state), rotation, attend)))


class Drafter(DepthDrafter):
    """Multi-token prediction with a block per depth or a shared one."""

    kind: ClassVar[str] = "mtp"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(last_hidden=True, logits=config.soft_labels)
        shape = base.layer_shape(config, info)
        rope = Rope(shape.head_dim, info.rope_theta)
        self.chain: Chain | ModuleChain
        if config.shared:
            self.mtp: nn.Module = MtpBlock(shape)
            self.chain = Chain(self, rope)
        else:
            self.mtp = nn.ModuleList([MtpBlock(shape) for _ in range(config.depths)])
            self.chain = ModuleChain(self, cast(list[Module], self.blocks), rope)
        unset_parameters(self)

    @property
    def blocks(self) -> list[MtpBlock]:
        """The blocks by depth; a shared one once."""
        return cast(list[MtpBlock], [self.mtp] if self.config.shared else list(self.mtp.children()))

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Random blocks or a target layer. The joined input starts as the state plus a small random
        part of both inputs."""
        initialise_blocks(self, generator, self.config.initial_std)
        for block in self.blocks:
            with torch.no_grad():
                block.fc.weight.mul_(0.3)[:, self.info.hidden_size :].diagonal().add_(1.0)
            self.copy_final_norm(block.norm.weight, weights)
            if self.config.from_target_layer >= 0:
                parts = "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"
                wanted = base.layer_weights(block.layer, *parts)
                number = self.config.from_target_layer
                self.copy_layer(weights, number, block.attention, wanted)

    # The shared block, as `Chain` runs it

    @property
    def attention(self) -> Attention:
        """The shared block's attention."""
        return self.blocks[0].attention

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The target's last hidden states [B, T, H] after its final norm."""
        assert last_hidden is not None, "mtp needs the target's last hidden state"
        return last_hidden.to(self.blocks[0].fc.weight.dtype)

    def read(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T], states [B, T, H] -> attention's input and residual stream [B, T, H]."""
        block = self.blocks[0]
        joined = block.join(self.embed(tokens, feature.dtype), feature)
        return block.layer.input_layernorm(joined), joined

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.blocks[0].layer.finish(residual, attended)

    def emit(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised output, both for the LM head and for the next step."""
        normed = self.blocks[0].norm(output)
        return normed, normed

    # Training

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V] of depths 1..depth; see the contract."""
        blocks = self.config.depths
        assert self.config.shared or depth <= blocks, f"{depth} asked of {blocks}"
        return super().train_logits(batch, depth)

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        """State after prefill; raises `UserError` for a tree deeper than there are blocks."""
        if not self.config.shared and tree.max_depth > self.config.depths:
            raise UserError(
                f"an mtp drafter of {self.config.depths} blocks cannot draft {tree.max_depth} "
                f"tokens. Set decode.depth to {self.config.depths} or less, or train with "
                f"head.depths={tree.max_depth} or head.shared=true."
            )
        return super().start(seen, tree, capacity)
