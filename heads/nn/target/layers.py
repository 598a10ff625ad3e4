"""The target's own decoder layers as parts of a drafter, without a copy of any weight.

Layers of Llama, Mistral, Qwen2 (biases) and Qwen3 (norms of queries and keys) are read from the
target's named tensors and computed as Hugging Face computes them, so a layer gives the same result
here as in the target. A layer may be kept without its attention or without its MLP; the missing
part then leaves the residual stream as it is.

Products with a weight are a `Product`, which the caller makes from (weight, bias): the plain one
refers to the target's memory, a quantised one (`heads.nn.quantized`) holds packed numbers.

Legend: B rows, T positions, H hidden, h query heads, g key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn.rope import Rotation, rotate
from heads.nn.target.llama import FAMILIES

Product = Callable[[Tensor], Tensor]
"""States [..., in] -> [..., out]: a linear map."""
MakeProduct = Callable[[Tensor, Tensor | None], Product]
"""(weight [out, in], bias [out] or None) -> the linear map."""


def shared_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """The linear map with the target's own tensors."""
    return partial(F.linear, weight=weight, bias=bias)


@dataclass(frozen=True)
class KeptLayer:
    """A layer of the target (0-based) that a drafter runs, and which parts of it are run."""

    layer: int
    attention: bool = True
    mlp: bool = True


def require_ascending(layers: Sequence[int], every: int, setting: str, given: object) -> None:
    """Raise `UserError`, which shows the `given` value of the setting, unless `layers` ascend and
    exist in a target of `every` layers."""
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < every:
        raise UserError(
            f"{setting} must name layers of the target in ascending order: it has {every} layers, "
            f"numbered from 0; given {given}."
        )


class DraftLayer(Protocol):
    """A residual layer in a drafter's stack: one of the target's, or one of the drafter's own.

    attends: whether it has attention, and so keys and values; window: how many latest positions it
    sees, 0 for all. cache_shape: (g, D) of its keys and values, in `dtype`.
    """

    @property
    def attends(self) -> bool: ...
    @property
    def window(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def cache_shape(self) -> tuple[int, int]: ...

    def key_value(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, g, D] of committed tokens from true inputs [B, T, H]."""
        ...

    def project(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, h, D], keys and values [B, T, g, D] of drafted tokens from inputs."""
        ...

    def finish(self, states: Tensor, attended: Tensor | None) -> Tensor:
        """Output [B, T, H] from the input and the attention's result [B, T, h * D], if any."""
        ...


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, rounded before the weight: bit for bit the same as the target's norms."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


@dataclass(frozen=True)
class AttentionPart:
    """A target layer's attention: norm, products, norms of queries and keys if any.

    true_key and true_value refer to the target's own weights, whatever the others do, so that
    committed tokens have the target's keys.
    """

    norm: Tensor
    true_key: Product
    true_value: Product
    query: Product
    key: Product
    value: Product
    output: Product
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True)
class MLPPart:
    """A target layer's SwiGLU MLP with its norm."""

    norm: Tensor
    gate: Product
    up: Product
    down: Product


@dataclass(frozen=True)
class TargetLayer:
    """One of the target's layers, or the kept parts of it; a `DraftLayer`."""

    attention: AttentionPart | None
    mlp: MLPPart | None
    cache_shape: tuple[int, int]
    dtype: torch.dtype
    eps: float
    window: int

    @property
    def attends(self) -> bool:
        return self.attention is not None

    def key_value(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        part = self.attention
        assert part is not None
        normed = rms_norm(states.to(self.dtype), part.norm, self.eps)
        return self._cached(part, part.true_key(normed), part.true_value(normed), rotation)

    def project(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        part = self.attention
        assert part is not None
        normed = rms_norm(states, part.norm, self.eps)
        query = self._heads(part.query(normed), part.query_norm)
        key_value = self._cached(part, part.key(normed), part.value(normed), rotation)
        return rotate(query, rotation), *key_value

    def finish(self, states: Tensor, attended: Tensor | None) -> Tensor:
        if self.attention is not None:
            assert attended is not None
            states = states + self.attention.output(attended)
        if self.mlp is not None:
            normed = rms_norm(states, self.mlp.norm, self.eps)
            states = states + self.mlp.down(F.silu(self.mlp.gate(normed)) * self.mlp.up(normed))
        return states

    def _cached(
        self, part: AttentionPart, key: Tensor, value: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Projected keys and values as the cache holds them."""
        return rotate(self._heads(key, part.key_norm), rotation), self._heads(value, None)

    def _heads(self, states: Tensor, norm: Tensor | None) -> Tensor:
        states = states.unflatten(-1, (-1, self.cache_shape[1]))
        return states if norm is None else rms_norm(states, norm, self.eps)


def require_family(kind: str, info: TargetInfo) -> None:
    """Raise `UserError` unless the target's layers are of a family that is computed here."""
    if info.model_type not in FAMILIES:
        raise UserError(
            f"kind '{kind}' runs the target's own layers and knows those of "
            f"{', '.join(FAMILIES)}; target '{info.id}' is a {info.model_type} model. Choose "
            "another kind with head=, for instance eagle3 or medusa."
        )


def read_layers(
    kind: str,
    info: TargetInfo,
    weights: TargetWeights,
    kept: Sequence[KeptLayer],
    make: MakeProduct = shared_linear,
) -> list[TargetLayer]:
    """The kept layers of the target, as aliases of its tensors where `make` does not convert them.

    Raises `UserError` for layers that have other tensors than a Llama-like layer (an unknown
    variant, packed weights).
    """
    windows = weights.windows or (0,) * info.num_layers
    return [_read_layer(kind, info, weights, item, make, windows[item.layer]) for item in kept]


def _read_layer(
    kind: str,
    info: TargetInfo,
    weights: TargetWeights,
    kept: KeptLayer,
    make: MakeProduct,
    window: int,
) -> TargetLayer:
    prefix = f"model.layers.{kept.layer}."
    own = {name.removeprefix(prefix): name for name in weights.state if name.startswith(prefix)}
    reader = _Reader(weights.state, own, make)
    sizes = weight_sizes(info)
    wrong = [name for name, shape in sizes.items() if not reader.fits(f"{name}.weight", shape)]
    known = {f"{name}.{end}" for name in sizes for end in ("weight", "bias")}
    known |= {f"self_attn.{name}_norm.weight" for name in "qk"}
    wrong += sorted(set(own) - known)
    if wrong:
        raise UserError(
            f"kind '{kind}' cannot run layer {kept.layer} of target '{info.id}' "
            f"({info.model_type}): {wrong[:3]} {'is' if len(wrong) == 1 else 'are'} missing, "
            f"packed or of another kind than in {', '.join(FAMILIES)}. Choose another kind with "
            "head=, or load the target with target.quantization=none."
        )
    attention = mlp = None
    if kept.attention:
        query, key, value, output = (reader.product(f"self_attn.{name}_proj") for name in "qkvo")
        query_norm, key_norm = (reader.optional(f"self_attn.{name}_norm.weight") for name in "qk")
        norm, norms = reader.tensor("input_layernorm.weight"), (query_norm, key_norm)
        true = [shared_linear(*reader.linear(f"self_attn.{name}_proj")) for name in "kv"]
        attention = AttentionPart(norm, true[0], true[1], query, key, value, output, *norms)
    if kept.mlp:
        gate, up, down = (reader.product(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        mlp = MLPPart(reader.tensor("post_attention_layernorm.weight"), gate, up, down)
    shape = (info.num_key_value_heads, info.head_dim)
    return TargetLayer(attention, mlp, shape, weights.embedding.dtype, info.rms_norm_eps, window)


def weight_sizes(info: TargetInfo) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights by name."""
    hidden, wide = info.hidden_size, info.intermediate_size
    queries, keys = (
        heads * info.head_dim for heads in (info.num_attention_heads, info.num_key_value_heads)
    )
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }


@dataclass(frozen=True)
class _Reader:
    """One layer's tensors by their names within the layer."""

    state: Mapping[str, Tensor]
    own: dict[str, str]
    make: MakeProduct

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        value = self.optional(name)
        return value is not None and value.is_floating_point() and tuple(value.shape) == shape

    def optional(self, name: str) -> Tensor | None:
        return self.state[self.own[name]].detach() if name in self.own else None

    def tensor(self, name: str) -> Tensor:
        value = self.optional(name)
        assert value is not None, name
        return value

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.tensor(f"{name}.weight"), self.optional(f"{name}.bias")

    def product(self, name: str) -> Product:
        return self.make(*self.linear(name))
