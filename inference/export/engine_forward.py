"""What a serving engine computes from an exported folder, written out slowly from the formats' specification.

Nothing here is shared with our own drafters: only the folder's files, the target's hidden states, its embedding and its LM head
are read, in the way that vLLM and SGLang document (and their code does). Whole sequences are recomputed for every drafted token;
plain softmax attention; float64 where it costs nothing. `Knobs` change one rule at a time, to find out which rule a folder breaks.

Legend: T positions of the text that the target has seen, K drafted tokens, H hidden, V vocabulary, n layers read, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.api.errors import UserError
from inference.export.layouts.folder import Folder
from inference.export.layouts.llama import read_rope

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Context:
    """A text as the engine's target leaves it. tokens [T+1]: the text and the token drawn behind it, which is drafted from; states
    [n+1, T, H]: the residual stream after 0..n layers; last [T, H] after the final norm; embedding, lm_head [V, H]; logits: the LM
    head as the target applies it.
    """

    tokens: Tensor
    states: Tensor
    last: Tensor
    embedding: Tensor
    lm_head: Tensor
    logits: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Knobs:
    """Deviations from a folder's own word, to find what is wrong with it.

    shift: added to the layers read; order: of the chunks of `fc`, and of the norms before them too (norms); theta: base of the
    rotary positions; ids: how d2t is read (offset, absolute, zero); heads: Medusa's are shifted by so many; post_norm: the other
    recurrence; blank: whether MTP blanks the token at position 0.
    """

    shift: int = 0
    order: tuple[int, ...] = ()
    norms: bool = False
    theta: float = 0.0
    ids: str = "offset"
    heads: int = 0
    post_norm: bool | None = None
    blank: bool = True


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def frequencies(config: Mapping[str, Any], size: int, knobs: Knobs) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cosine and sine that a config.json asks for."""
    rope = read_rope(config)
    theta, kind = knobs.theta or float(rope["rope_theta"]), rope["rope_type"]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    plain = theta**-exponents
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        share = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return share * plain + (1 - share) * plain / factor, 1.0
    if kind == "yarn":

        def turn(rotations: float) -> float:
            return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(turn(float(rope.get("beta_fast") or 32))), 0)
        last = min(math.ceil(turn(float(rope.get("beta_slow") or 1))), size - 1)
        ramp = ((torch.arange(size // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
        scale = rope.get("attention_factor") or 0.1 * math.log(factor) + 1.0
        return ramp * plain / factor + (1 - ramp) * plain, float(scale)
    raise UserError(f"rotary positions of type '{kind}' are not among those that engines compute alike.")


@dataclass(frozen=True)
class Layer:
    """One decoder layer of a folder: its weights under `prefix`, the config's sizes."""

    weights: Weights
    prefix: str
    config: Mapping[str, Any]
    knobs: Knobs

    @property
    def eps(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))

    def get(self, name: str) -> Tensor | None:
        """A tensor of the layer, or None."""
        return self.weights.get(self.prefix + name)

    def linear(self, name: str, states: Tensor) -> Tensor:
        """states W^T + b."""
        bias = self.get(f"{name}.bias")
        out = states @ self.weights[f"{self.prefix}{name}.weight"].T
        return out if bias is None else out + bias

    def heads(self, name: str, states: Tensor, positions: Tensor) -> Tensor:
        """Query or key heads [T, h, D], normed where the layer has such norms, rotated to `positions` [T]."""
        size = int(
            self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        )
        split = self.linear(f"self_attn.{name}_proj", states).unflatten(-1, (-1, size))
        weight = self.get(f"self_attn.{name}_norm.weight")
        if weight is not None:
            split = norm(split, weight, self.eps)
        inverse, scale = frequencies(self.config, size, self.knobs)
        angles = positions.double()[:, None] * inverse
        cosine, sine = ((part * scale).to(split.dtype)[:, None] for part in (angles.cos(), angles.sin()))
        left, right = split.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    def values(self, states: Tensor, size: int) -> Tensor:
        """Value heads [T, g, D]."""
        return self.linear("self_attn.v_proj", states).unflatten(-1, (-1, size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Attention of queries [Q, h, D] over keys [S, g, D] where allowed [Q, S], through the output projection -> [Q, H]."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,shd->hqs", query, key) * query.shape[-1] ** -0.5
        shares = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqs,shd->qhd", shares, value).flatten(1)
        return self.linear("self_attn.o_proj", mixed)

    def mlp(self, states: Tensor) -> Tensor:
        """SwiGLU behind its norm."""
        normed = norm(states, self.weights[f"{self.prefix}post_attention_layernorm.weight"], self.eps)
        gate = torch.nn.functional.silu(self.linear("mlp.gate_proj", normed))
        return self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", normed))

    def causal(self, inputs: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
        """The whole layer over a sequence: attention of `inputs` [T, X], added to `residual` [T, H], then the MLP -> [T, H]."""
        query, key = (self.heads(name, inputs, positions) for name in "qk")
        value = self.values(inputs, query.shape[-1])
        allowed = positions[None] <= positions[:, None]
        states = residual + self.attend(query, key, value, allowed)
        return states + self.mlp(states)


def run(
    folder: Folder, layout: str, context: Context, chain: Tensor, depth: int, knobs: Knobs | None = None
) -> Tensor:
    """The engine's logits [K, V] at depths 1..`depth` behind `context`, its own drafts being `chain` [K-1 or more].

    Columns that the folder cannot draft are minus infinity. Raises `UserError` for a layout without a forward pass here, and
    whatever a broken folder makes torch raise.
    """
    from inference.export import engine_forward_blocks as blocks

    ways: dict[str, Callable[..., Tensor]] = {
        "eagle": eagle, "eagle3": eagle3, "peagle": eagle3, "mtp-mimo": mtp, "medusa": medusa, "causal": language_model,
        "dflash": blocks.block, "dflash2": blocks.block, "dspark": blocks.block, "domino": blocks.block,
        "dflash-assistant": blocks.block,
    }  # fmt: skip
    name = layout.removeprefix("speculators-")
    if name not in ways:
        raise UserError(f"layout '{layout}' has no forward pass here. Known: {', '.join(ways)}.")
    return ways[name](folder, context, chain, depth, knobs or Knobs())


def flat(folder: Folder) -> dict[str, Any]:
    """config.json with a decoder layer that stands inside it (speculators) laid open."""
    layer = folder.config.get("transformer_layer_config")
    return {**layer, **folder.config} if isinstance(layer, dict) else folder.config


def exact(folder: Folder) -> dict[str, Tensor]:
    """The folder's tensors, floating-point ones in float32 at least."""
    return {
        name: value.to(torch.promote_types(value.dtype, torch.float32))
        if value.is_floating_point()
        else value
        for name, value in folder.tensors.items()
    }


def embed(weights: Weights, context: Context, tokens: Tensor, name: str = "embed_tokens.weight") -> Tensor:
    """Embeddings [T, H]: the folder's own table where it has one, else the target's."""
    return weights.get(name, context.embedding)[tokens].float()


def pieces(context: Context, config: Mapping[str, Any], knobs: Knobs, ids: tuple[int, ...]) -> list[Tensor]:
    """The states of the layers that are read, in the order in which the engine joins them: ascending."""
    layers = [layer + knobs.shift for layer in sorted(ids)]
    if min(layers) < 0 or max(layers) >= context.states.shape[0]:
        raise UserError(f"layers {layers} do not exist: the target has {context.states.shape[0] - 1}.")
    return [context.states[layer].float() for layer in layers]


def ordered(parts: list[Tensor], knobs: Knobs) -> list[Tensor]:
    """The pieces in the order in which `fc` is supposed to read them."""
    return [parts[place] for place in knobs.order] if knobs.order else parts


def captured(config: Mapping[str, Any], layers: int, engine: str) -> tuple[int, ...]:
    """The layers whose states an engine captures for a config.json: L means the state after L layers."""
    key = "eagle_aux_hidden_state_layer_ids"
    top, nested = config.get(key), (config.get("eagle_config") or {}).get(key)
    inner = config.get("dflash_config") or {}
    if engine != "sglang" and top:
        return tuple(top)
    if config.get("aux_hidden_state_layer_ids"):
        return tuple(config["aux_hidden_state_layer_ids"])
    if inner.get("target_layer_ids") or config.get("target_layer_ids"):
        return tuple(layer + 1 for layer in inner.get("target_layer_ids") or config["target_layer_ids"])
    if nested:
        return tuple(layer + (1 if engine == "sglang" else 0) for layer in nested)
    return (2, layers // 2, layers - 3)


def to_target(logits: Tensor, weights: Weights, context: Context, knobs: Knobs) -> Tensor:
    """Draft logits [K, V'] over the target's vocabulary [K, V]."""
    size = context.embedding.shape[0]
    if logits.shape[1] == size:
        return logits
    draft = torch.arange(logits.shape[1])
    offsets = weights.get("d2t", torch.zeros_like(draft))
    ids = {"offset": draft + offsets, "absolute": offsets, "zero": draft}[knobs.ids].clamp(0, size - 1)
    wide = logits.new_full((logits.shape[0], size), float("-inf"))
    wide[:, ids] = logits
    return wide


# --- one layer, recursed ----------------------------------------------------------------------------------------------


def eagle(folder: Folder, context: Context, chain: Tensor, depth: int, knobs: Knobs) -> Tensor:
    """EAGLE-1: fc of (token s+1, state s) at position s, a layer without a first norm, the target's LM head."""
    weights, config = exact(folder), flat(folder)
    layer = Layer(weights, "layers.0.", config, knobs)
    tokens, states, found = context.tokens[1:], context.last.float(), []
    for step in range(depth):
        both = torch.cat([embed(weights, context, tokens), states], -1)
        joined = both @ weights["fc.weight"].T
        if "fc.bias" in weights:
            joined = joined + weights["fc.bias"]
        out = layer.causal(joined, joined, torch.arange(tokens.shape[0]))[-1:]
        found.append(context.logits(out))
        tokens, states = torch.cat([tokens, chain[step : step + 1]]), torch.cat([states, out])
    return torch.cat(found)


def mtp(folder: Folder, context: Context, chain: Tensor, depth: int, knobs: Knobs) -> Tensor:
    """MiMo's block: proj of (norm of state s, norm of token s+1), a layer, a norm; recursed, with the target's LM head."""
    weights, config = exact(folder), flat(folder)
    prefix, eps = "model.mtp_layers.0.", float(config["rms_norm_eps"])
    layer = Layer(weights, prefix, config, knobs)
    tokens, states, found = context.tokens[1:], context.last.float(), []
    for step in range(depth):
        embedded = embed(weights, context, tokens)
        if knobs.blank:
            embedded[0] = 0  # as both engines do
        token = norm(embedded, weights[prefix + "token_layernorm.weight"], eps)
        state = norm(states, weights[prefix + "hidden_layernorm.weight"], eps)
        joined = torch.cat([state, token], -1) @ weights[prefix + "input_proj.weight"].T
        normed = norm(joined, weights[prefix + "input_layernorm.weight"], eps)
        out = layer.causal(normed, joined, torch.arange(tokens.shape[0]))[-1:]
        out = norm(out, weights[prefix + "final_layernorm.weight"], eps)
        found.append(context.logits(out))
        tokens, states = torch.cat([tokens, chain[step : step + 1]]), torch.cat([states, out])
    return torch.cat(found)


def eagle3(folder: Folder, context: Context, chain: Tensor, depth: int, knobs: Knobs) -> Tensor:
    """EAGLE-3 token by token, or P-EAGLE in one pass with rows of unknown tokens behind the text."""
    config = flat(folder)
    weights = {name.replace("midlayer.", "layers.0."): value for name, value in exact(folder).items()}
    eps, parallel = float(config["rms_norm_eps"]), "mask_hidden" in weights
    ids = captured(config, context.states.shape[0] - 1, str(folder.export.get("engine", "vllm")))

    def fuse(parts: list[Tensor]) -> Tensor:
        if knobs.norms:
            parts = ordered(parts, knobs)
        if config.get("norm_before_fc"):
            parts = [norm(torch.cat(parts, -1), weights["input_norm.weight"], eps)]
        elif config.get("fc_norm"):
            parts = [norm(part, weights[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        if not knobs.norms:
            parts = ordered(parts, knobs)
        return torch.cat(parts, -1) @ weights["fc.weight"].T

    def layers(tokens: Tensor, states: Tensor) -> Tensor:
        """All layers over tokens [T] and states [T, H], before the last norm: [T, H]. The first one reads both."""
        positions = torch.arange(tokens.shape[0])
        for index in range(int(config["num_hidden_layers"])):
            layer = Layer(weights, f"layers.{index}.", config, knobs)
            residual, inputs = states, states
            if index == 0:
                embedded = norm(
                    embed(weights, context, tokens), weights["layers.0.input_layernorm.weight"], eps
                )
                normed = norm(states, weights["layers.0.hidden_norm.weight"], eps)
                residual = normed if config.get("norm_before_residual") else states
                inputs = torch.cat([embedded, normed], -1)
            else:
                inputs = norm(states, weights[f"layers.{index}.input_layernorm.weight"], eps)
            states = layer.causal(inputs, residual, positions)
        return states

    head = weights.get("lm_head.weight", context.lm_head).float()
    post = config.get("norm_output", False) if knobs.post_norm is None else knobs.post_norm
    tokens, states, found = context.tokens[1:], fuse(pieces(context, config, knobs, ids)), []
    if parallel:
        mask = weights["mask_hidden"].flatten().chunk(len(ids))
        tokens = torch.cat(
            [tokens, torch.full((depth - 1,), int(config.get("pard_token", config.get("mask_token_id", 0))))]
        )
        states = torch.cat([states, fuse([part[None] for part in mask]).expand(depth - 1, -1)])
        out = norm(layers(tokens, states)[-depth:], weights["norm.weight"], eps)
        return to_target(out @ head.T, weights, context, knobs)
    for step in range(depth):
        out = layers(tokens, states)[-1:]
        normed = norm(out, weights["norm.weight"], eps)
        found.append(normed @ head.T)
        tokens, states = (
            torch.cat([tokens, chain[step : step + 1]]),
            torch.cat([states, normed if post else out]),
        )
    return to_target(torch.cat(found), weights, context, knobs)


# --- without the target's layers ----------------------------------------------------------------------------------------


def medusa(folder: Folder, context: Context, chain: Tensor, depth: int, knobs: Knobs) -> Tensor:
    """Head i on the last state gives token T+1+i; every block adds SiLU of a linear map."""
    weights, config = exact(folder), folder.config
    count, found = int(config["num_heads"]), []
    for place in range(depth):
        head = (place + knobs.heads) % count
        states = context.last[-1:].float()
        for layer in range(int(config["num_hidden_layers"])):
            name = f"blocks.{head}.layers.{layer}"
            inner = states @ weights[f"{name}.weight"].T
            if config.get("medusa_fc_bias"):
                inner = inner + weights[f"{name}.bias"]
            states = states + torch.nn.functional.silu(inner)
        shared = config.get("original_lm_head")
        found.append(states @ weights["lm_head.weight" if shared else f"lm_heads.{head}.weight"].T)
    return torch.cat(found)


def language_model(folder: Folder, context: Context, chain: Tensor, depth: int, knobs: Knobs) -> Tensor:
    """A causal language model over the text and its own drafts; PARD: over the text and mask tokens, in one pass."""
    weights, config = exact(folder), flat(folder)
    eps, token = float(config["rms_norm_eps"]), config.get("pard_token")
    drafts = chain[: depth - 1] if token is None else torch.full((depth - 1,), int(token))
    tokens = torch.cat([context.tokens, drafts])
    states, positions = weights["model.embed_tokens.weight"][tokens], torch.arange(tokens.shape[0])
    for index in range(int(config["num_hidden_layers"])):
        layer = Layer(weights, f"model.layers.{index}.", config, knobs)
        states = layer.causal(
            norm(states, weights[f"{layer.prefix}input_layernorm.weight"], eps), states, positions
        )
    out = norm(states[-depth:], weights["model.norm.weight"], eps)
    tied = config.get("tie_word_embeddings")
    return out @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T
