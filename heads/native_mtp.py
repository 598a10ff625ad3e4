"""The multi-token prediction block of a target's checkpoint, built from the target's layer class.

    h' = W [norm(emb(x_{t+1})); norm(h_t)],  h = norm(Layer(h')),  token t+2 by the target's LM head

with h_t the target's last hidden state after its final norm, or this block's own output one step
before. DeepSeek-V3 (2412.19437) introduced the block. Qwen3-Next and Qwen3.5, GLM-4.5, MiMo and
others have one in their checkpoints, with a layer like their last one, including its gates, experts
and latent keys. `headstart import` reads it from there. `headstart train` trains it further in the
context in which it drafts, like `mtp` with a shared block (FastMTP, 2509.18362). Without an import,
training starts from random weights or a layer of the target.

Legend: B rows, T positions, H hidden, g key/value heads, D and E numbers per key and value.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from heads.api.checkpoint import unset_parameters
from heads.api.config import OptionalLayer, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import init
from heads.nn.blocks import Attend
from heads.nn.feature.depths import DepthConfig, DepthDrafter
from heads.nn.native.chain import LayerChain
from heads.nn.native.family import Family, FamilyRope, attending, layer_settings, sizes_of
from heads.nn.rope import Rotation


@config("head")
@dataclass(frozen=True)
class Config(DepthConfig):
    """Configuration of the MTP block that a target ships with."""

    layer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the layer in the form of the target's config.json: model_type, and the values
    that differ from the target's sizes and its family's defaults; empty: the target's whole
    config.json."""
    from_target_layer: OptionalLayer = -1
    """Without an import: start from this layer of the target (0-based; of the same type); -1:
    random."""


def fresh(norm: nn.Module) -> nn.Module:
    """A norm like this one, with tensors of its own without values. (`copy.deepcopy` alone reads
    the tensors, and the fake ones of a plan cannot be read.)"""
    made: dict[int, Any] = {id(buffer): torch.empty_like(buffer) for buffer in norm.buffers()}
    for own in norm.parameters():
        made[id(own)] = nn.Parameter(torch.empty_like(own), own.requires_grad)
    return copy.deepcopy(norm, made)


class Block(nn.Module):
    """Norms of both inputs, their projection, a layer of the target's family and a final norm."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, family = int(settings["hidden_size"]), Family.build(settings)
        self.pre_fc_norm_embedding = fresh(family.norm)
        self.pre_fc_norm_hidden = fresh(family.norm)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([family.layer])
        self.norm = family.norm
        self.rope = family.rope

    def forward(
        self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """Embeddings and states [B, T, H] -> normalised outputs [B, T, H]."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)], -1)
        with attending(attend):
            found = self.layers[0](
                hidden_states=self.fc(both),
                position_embeddings=FamilyRope.embeddings(rotation),
                attention_mask=None,
            )
        found = found[0] if isinstance(found, tuple) else found
        return cast(Tensor, self.norm(found))


class Drafter(DepthDrafter):
    """A target's own MTP block, applied repeatedly."""

    kind: ClassVar[str] = "native_mtp"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        layer = {**sizes_of(info), **config.layer} if config.layer else layer_settings(info)
        config = replace(config, layer=layer)
        super().__init__(config, info)
        if config.layer.get("hidden_size") != info.hidden_size:
            raise UserError(
                f"head.layer describes a layer of hidden size {config.layer.get('hidden_size')}; "
                f"target '{info.id}' has {info.hidden_size}."
            )
        self.needs = FeatureSpec(last_hidden=True, logits=config.soft_labels)
        self.mtp = Block(config.layer)
        self.chain = LayerChain(self, self.mtp.rope)
        self._sizes: tuple[torch.Size, torch.Size] | None = None
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """The family's own random layer or one of the target's. The joined input starts as the
        state plus a small random part of both inputs."""
        seed = int(torch.randint(2**31, (1,), generator=generator))
        fresh, block = Family.build(self.config.layer, seed), self.mtp
        for norm in (block.pre_fc_norm_embedding, block.pre_fc_norm_hidden, block.norm):
            norm.load_state_dict(fresh.norm.state_dict())
        block.layers[0].load_state_dict(fresh.layer.state_dict())
        init.normal(block.fc.weight, 0.3 * block.fc.in_features**-0.5, generator)
        with torch.no_grad():
            block.fc.weight[:, self.info.hidden_size :].diagonal().add_(1.0)
        if (final_norm := weights.state.get("model.norm.weight")) is not None:
            init.copy(cast(Tensor, block.norm.weight), final_norm)  # a norm of the same class
        if self.config.from_target_layer >= 0:
            # with its buffers: some families' routers hold the bias of their choice in one
            own: dict[str, Tensor] = block.layers[0].state_dict(keep_vars=True)
            self.copy_tensors(weights, self.config.from_target_layer, own)

    # As `LayerChain` runs it

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The target's last hidden states [B, T, H] after its final norm."""
        assert last_hidden is not None, "native_mtp needs the target's last hidden state"
        return last_hidden.to(self.mtp.fc.weight.dtype)

    def run(self, tokens: Tensor, feature: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """See `WholeLayer`."""
        return cast(Tensor, self.mtp(self.embed(tokens, feature.dtype), feature, rotation, attend))

    def new_caches(self, rows: int, slots: int) -> tuple[Tensor, Tensor]:
        """See `WholeLayer`; sizes are those of the layer's key and value for one token."""
        weight = self.mtp.fc.weight
        if self._sizes is None:
            first = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
            rotation = self.mtp.rope.at(first, weight.dtype)
            state = weight.new_zeros(1, 1, weight.shape[0])
            sizes: list[torch.Size] = []

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                sizes.extend((key.shape[2:], value.shape[2:]))
                return query.new_zeros(1, 1, query.shape[2] * value.shape[3])

            self.mtp(state, state, rotation, attend)
            self._sizes = sizes[0], sizes[1]
        key, value = self._sizes
        return weight.new_zeros(rows, slots, *key), weight.new_zeros(rows, slots, *value)
