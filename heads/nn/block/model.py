"""The network of block drafters: fused taps, layers that read them, slots, dependency and
confidence, without training and drafting.

Legend: B rows, T positions, M blocks, b slots per block, H hidden, V vocabulary, n taps, C carry of
a dependency, g key/value heads, D head size.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heads.api.checkpoint import unset_parameters
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import init
from heads.nn.block.attention import KeyValue
from heads.nn.block.carry import start_carrying
from heads.nn.block.confidence import ConfidenceHead
from heads.nn.block.config import Config
from heads.nn.block.dependency import build_dependency
from heads.nn.block.lattice import candidate_logits
from heads.nn.block.layers import BlockLayer, LayerFusion, spread, start_layers
from heads.nn.blocks import Attend, RMSNorm, initialise_blocks
from heads.nn.feature.base import FeatureDrafter, layer_shape
from heads.nn.rope import Rope, Rotation


class BlockModel(FeatureDrafter):
    """The network of a block drafter."""

    additions: ClassVar[tuple[str, ...]] = (
        *("markov_head.*", "prefix_gru.*", "embed_proj.*", "candidate_selector.*"),
        *("parent_mixer.*", "lilicorr.*", "confidence_head.*", "layers.*_conv.*"),
    )

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        size, layers = info.num_layers, number_of_layers(config, info)
        taps = config.taps or spread(5, 2 if size >= 6 else 1, max(size - 2, min(size - 1, 2)))
        soft = config.objective().soft or config.confidence or config.distractor > 0
        self.needs = FeatureSpec(taps, last_hidden=soft, logits=soft)
        self.needs.check(size)
        if config.mask_token_id >= info.vocab_size:
            raise UserError(
                f"head.mask_token_id must lie below the vocabulary of {info.vocab_size}; given "
                f"{config.mask_token_id}."
            )
        self.depths = config.block_size - (0 if config.sample_from_anchor else 1)
        self.causal = config.in_block == "causal"
        self.shape = layer_shape(config, info)
        hidden, eps, fused = info.hidden_size, info.rms_norm_eps, config.layer_fusion
        self.fc = None if fused else nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.hidden_norm = None if fused else RMSNorm(hidden, eps)
        self.layer_fusion = LayerFusion(layers, len(taps), hidden, eps) if fused else None
        group = config.conv_group_size if config.convolution else 0
        self.layers = nn.ModuleList([BlockLayer(self.shape, fused, group) for _ in range(layers)])
        self.norm = RMSNorm(hidden, eps)
        learned = config.mask_token_id < 0
        self.mask_embedding = nn.Parameter(torch.empty(hidden)) if learned else None
        self.dependency = build_dependency(
            config.dependency,
            config.dependency_rank,
            config.selector_top_k,
            info,
            self.depths,
            config.correlator,
        )
        for name, part in self.dependency.modules.items():
            self.add_module(name, part)
        hint = config.dependency_rank if config.dependency in ("markov", "gated", "rnn") else 0
        width = hidden + hint
        self.confidence_head = ConfidenceHead(width, self.depths) if config.confidence else None
        self._rope = Rope(self.shape.head_dim, info.rope_theta)
        unset_parameters(self)

    def bind(self, weights: TargetWeights) -> None:
        """See `TrainableDrafter`; rotates as the target does if heads are of its size."""
        super().bind(weights)
        rotary = weights.rotary
        if rotary is not None and rotary.inverse_frequencies.shape == (self.shape.head_dim // 2,):
            self._rope.follow(rotary)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Layers from the target's (`start_from`), and dependencies that change nothing at
        first."""
        config, info = self.config, self.info
        initialise_blocks(self, generator, config.initial_std)
        layers = [cast(BlockLayer, layer) for layer in self.layers]
        copied = layers[1:] if config.carry_root else layers
        chosen = config.from_target_layers or default_start(len(copied), info.num_layers)
        if config.start_from == "random" and config.from_target_layers:
            raise UserError(
                "head.from_target_layers names the layers to start from, and "
                "head.start_from=random starts from none. Leave one of them out."
            )
        if config.start_from != "random":
            required = config.start_from == "target" or bool(config.from_target_layers)
            start_layers(copied, chosen, info, weights, required)
        if self.fc is not None:
            first = len(self.needs.taps) // 2 * info.hidden_size
            with torch.no_grad():
                weight = self.fc.weight.mul_(0.1)
                weight[:, first : first + info.hidden_size].diagonal().add_(1.0)
        if self.layer_fusion is not None:
            taps = self.needs.taps
            nearest = [min(range(len(taps)), key=lambda i: abs(taps[i] - at)) for at in chosen]
            self.layer_fusion.initialise(nearest, first=len(layers) - len(copied))
        for layer in layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                if conv is not None:
                    conv.initialise()
        self.copy_final_norm(self.norm.weight, weights)
        if self.mask_embedding is not None:
            spread_of = float(weights.embedding.float().std())
            init.normal(self.mask_embedding, spread_of, generator)
        if config.carry_root:
            start_carrying(layers[0], self.mask_embedding, weights.embedding, self._rope)
        self.dependency.initialise(weights, generator)
        if self.confidence_head is not None:
            self.confidence_head.initialise(generator)

    def require_start(self, config: Config) -> None:
        """See `TrainableDrafter`. The slot of every depth must be the same: without
        `sample_from_anchor` the root's slot has learned nothing and each other one the token before
        the one that this drafter would read from it, and the other way round."""
        theirs, mine = (str(c.sample_from_anchor).lower() for c in (config, self.config))
        if theirs == mine:
            return
        size = self.depths if config.sample_from_anchor else self.depths + 1
        raise UserError(
            f"its slots were trained with head.sample_from_anchor={theirs}. With "
            f"head.sample_from_anchor={mine}, every slot would give the token of another depth, so "
            "training would start with wrong tokens at all depths. Add "
            f"head.sample_from_anchor={theirs} head.block_size={size}, which also drafts "
            f"{self.depths} tokens, or leave train.refresh.init_from out to train a new drafter."
        )

    # The network

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens, self.norm.weight.dtype)

    def _project_given(self, states: Tensor) -> Tensor:
        """States [..., H] as the dependency gets them -> the target's logits [..., V]."""
        return self.target.project(self.norm(states) if self.dependency.raw else states)

    def _fused(self, taps: Tensor) -> list[Tensor]:
        """Taps [B, T, n, H] -> the fused features [B, T, H] that every layer reads."""
        taps = taps.to(self.norm.weight.dtype)
        if self.layer_fusion is not None:
            return self.layer_fusion(taps)
        assert self.fc is not None and self.hidden_norm is not None
        return [self.hidden_norm(self.fc(taps.flatten(2)))] * len(self.layers)

    def _contexts(self, features: list[Tensor], rotation: Rotation) -> list[KeyValue]:
        """Features [B, T, H] of every layer -> its keys and values [B, T, g, D]."""
        return [
            cast(BlockLayer, layer).self_attn.context(feature, rotation)
            for layer, feature in zip(self.layers, features, strict=True)
        ]

    def _slots(self, roots: Tensor, slots: int) -> Tensor:
        """Roots [M] -> the blocks' inputs [M, b, H]."""
        first = self._embed(roots)[:, None]
        own = self.mask_embedding
        mask = self._embed(roots.new_full((), self.config.mask_token_id)) if own is None else own
        return torch.cat([first, mask.expand(first.shape[0], slots - 1, -1)], 1)

    def _depths(self, states: Tensor, depth: int) -> Tensor:
        """Slots [M, b, H] -> those that predict the tokens at depths 1..depth [M, depth, H]."""
        first = 0 if self.config.sample_from_anchor else 1
        return states[:, first : first + depth]

    def _dependent(
        self,
        base: Tensor | None,
        given: Tensor,
        carry: Tensor,
        depth: Tensor | int,
        among: Tensor | None,
    ) -> Tensor:
        """Logits [..., V] at `depth` [...], including the effect of the drafted prefix; among: the
        candidates there [..., k], for dependencies with a lattice."""
        rule = self.dependency
        if among is not None:
            assert base is not None
            return candidate_logits(base, among, carry, self.config.correlator.scale)
        logits = rule.logits(base, given, carry, self._project_given)
        if rule.first == 1:
            return logits
        assert base is not None
        if isinstance(depth, int):
            return base if depth < rule.first else logits
        return torch.where((depth < rule.first)[..., None], base, logits)

    def _run(self, states: Tensor, rotation: Rotation, attends: list[Attend]) -> Tensor:
        """Slots [M, b, H] through all layers -> [M, b, H]; attends[i]: what layer i's slots see."""
        for layer, attend in zip(self.layers, attends, strict=True):
            states = layer(states, rotation, attend)
        return states


def number_of_layers(config: Config, info: TargetInfo) -> int:
    """The number of draft layers: as configured, or half of the target's; and the carrying one."""
    extra = int(config.carry_root)
    named = len(config.from_target_layers)
    if named and config.num_layers not in (0, named + extra):
        raise UserError(
            f"head.num_layers={config.num_layers} does not fit the {named} layers of "
            f"head.from_target_layers{' and the one of head.carry_root' if extra else ''}; leave "
            "head.num_layers out."
        )
    if config.num_layers and config.num_layers <= extra:
        raise UserError("head.num_layers must be at least 2 with head.carry_root=true; given 1.")
    return named + extra if named else config.num_layers or max(3, min(5, info.num_layers // 2 + 1))


def default_start(count: int, num_layers: int) -> tuple[int, ...]:
    """The target's layers that `count` draft layers start from: the first, the last and evenly
    spread ones between them; some twice if the target has fewer layers."""
    return tuple(round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))
