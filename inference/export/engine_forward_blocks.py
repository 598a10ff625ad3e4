"""The forward pass of block drafters as engines compute it (DFlash, DFlash 2, DSpark, Domino): see `engine_forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inference.export.engine_forward import (
    Context,
    Knobs,
    Layer,
    Weights,
    captured,
    embed,
    exact,
    flat,
    norm,
    ordered,
    pieces,
)
from inference.export.layouts.dflash import ENCODER, MASK_FILE
from inference.export.layouts.folder import Folder


def block(folder: Folder, context: Context, chain: Tensor, depth: int, knobs: Knobs) -> Tensor:
    """One pass over [root, mask, ...] at positions T, T+1, ..., every layer reading the context through its own projections."""
    plain = {theirs: ours for ours, theirs in ENCODER.items()}
    weights = {plain.get(name, name): value for name, value in exact(folder).items()}
    config = flat(folder)
    inner: Mapping[str, Any] = {**config, **(config.get("dflash_config") or {})}
    eps, length, size = float(config["rms_norm_eps"]), context.last.shape[0], int(inner["block_size"])
    anchored = bool(inner.get("sample_from_anchor", "markov_head.markov_w1.weight" in weights))
    ids = captured(config, context.states.shape[0] - 1, "vllm")
    features = torch.cat(ordered(pieces(context, config, knobs, ids), knobs), -1) @ weights["fc.weight"].T
    features = norm(features, weights["hidden_norm.weight"], eps)
    states = slots(folder, weights, context, int(inner["mask_token_id"]), size)
    places = length + torch.arange(size)
    positions = torch.cat([torch.arange(length), places])
    reach = places if sees_itself_only(config, inner) else places[-1:].expand(size)
    allowed = positions[None] <= reach[:, None]
    for index in range(int(config["num_hidden_layers"])):
        layer = Layer(weights, f"layers.{index}.", config, knobs)
        normed = norm(states, weights[f"{layer.prefix}input_layernorm.weight"], eps)
        normed, after = convolved(layer, "attention_conv", normed)
        key = torch.cat([layer.heads("k", features, positions[:length]), layer.heads("k", normed, places)])
        value = torch.cat([layer.values(part, key.shape[-1]) for part in (features, normed)])
        mixed = layer.attend(layer.heads("q", normed, places), key, value, allowed)
        states = states + convolve(layer, "attention_conv", mixed, after, 1)
        states = states + mlp(layer, states)
    first = 0 if anchored else 1
    out = norm(states, weights["norm.weight"], eps)[first : first + depth]
    return corrected(weights, inner, context, out, torch.cat([context.tokens[-1:], chain])[:depth])


def sees_itself_only(config: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    """Whether slots see earlier slots only, by vLLM's rules: said outright, or all layers slide."""
    for said in (config.get("is_causal"), (config.get("dflash_config") or {}).get("causal")):
        if said is not None:
            return bool(said)
    if "sliding_window_non_causal" in config:
        return not config["sliding_window_non_causal"]
    kinds = inner.get("layer_types") or []
    return bool(kinds) and set(kinds) == {"sliding_attention"}


def slots(folder: Folder, weights: Weights, context: Context, mask: int, size: int) -> Tensor:
    """The block's inputs [b, H]: the root's embedding and the mask's, which may have a file of its own."""
    tokens = torch.cat([context.tokens[-1:], torch.full((size - 1,), mask)])
    found = embed(weights, context, tokens)
    file = folder.path / MASK_FILE
    if file.is_file():
        state = torch.load(file, map_location="cpu", weights_only=True)
        found[tokens == mask] = state["embedding"].float().reshape(-1)
    return found


def kernels(layer: Layer, name: str, states: Tensor) -> Tensor:
    """The dynamic part of a convolution's kernels [b, side, tap, group] for the sublayer's input."""
    groups = states @ layer.weights[f"{layer.prefix}{name}.kernel_projection.weight"].T
    return groups.unflatten(-1, (2, 2, -1))


def convolved(layer: Layer, name: str, states: Tensor) -> tuple[Tensor, Tensor | None]:
    """A sublayer's convolved input and the kernels of its output; both as they are where the layer has no convolution."""
    if layer.get(f"{name}.base_kernel") is None:
        return states, None
    found = kernels(layer, name, states)
    return convolve(layer, name, states, found, 0), found


def convolve(layer: Layer, name: str, states: Tensor, found: Tensor | None, side: int) -> Tensor:
    """out[i, c] = sum over taps t of (base[t, c] + delta[i, t, group of c]) x[i - t, c], with nothing before the first slot."""
    if found is None:
        return states
    base = layer.weights[f"{layer.prefix}{name}.base_kernel"][side]
    out = torch.zeros_like(states)
    width = states.shape[1] // found.shape[-1]
    for slot in range(states.shape[0]):
        for tap in range(min(slot + 1, 2)):
            coefficient = base[tap] + found[slot, side, tap].repeat_interleave(width)
            out[slot] += coefficient * states[slot - tap]
    return out


def mlp(layer: Layer, states: Tensor) -> Tensor:
    """The MLP sublayer with its norm, convolved on both sides where the layer has such kernels."""
    if layer.get("mlp_conv.base_kernel") is None:
        return layer.mlp(states)
    normed = norm(states, layer.weights[f"{layer.prefix}post_attention_layernorm.weight"], layer.eps)
    normed, found = convolved(layer, "mlp_conv", normed)
    gate = torch.nn.functional.silu(layer.linear("mlp.gate_proj", normed))
    return convolve(
        layer, "mlp_conv", layer.linear("mlp.down_proj", gate * layer.linear("mlp.up_proj", normed)), found, 1
    )


def corrected(
    weights: Weights, inner: Mapping[str, Any], context: Context, out: Tensor, parents: Tensor
) -> Tensor:
    """Base logits of the slots [K, V] and what the flavour adds for the tokens before them [K]."""
    base = context.logits(out)
    if "markov_head.markov_w1.weight" in weights:
        return base + markov(weights, out, parents)
    if "prefix_gru.weight_ih_l0" in weights:
        return domino(weights, context, base, out, parents)
    if "candidate_selector.predecessor_codebook" in weights:
        tables = "candidate_selector."
        best = base.topk(int(inner["selector_top_k"]), -1).indices
        hidden = out @ weights[tables + "hidden_projection.weight"].T
        predecessor = weights[tables + "predecessor_codebook"][parents] * hidden
        edges = torch.einsum("kr,kcr->kc", predecessor, weights[tables + "successor_codebook"][best])
        chosen = torch.full_like(base, float("-inf"))
        return chosen.scatter(1, best, base.gather(1, best) + edges)
    return base


def markov(weights: Weights, out: Tensor, parents: Tensor) -> Tensor:
    """DSpark's table of which token follows which: vanilla, gated by the slot's state, or with a recurrent state."""
    name = "markov_head."
    words, table = weights[name + "markov_w1.weight"][parents], weights[name + "markov_w2.weight"]
    if name + "gate_proj.weight" in weights:
        both = torch.cat([out, words], -1)
        words = (
            both @ weights[name + "gate_proj.weight"].T + weights[name + "gate_proj.bias"]
        ).sigmoid() * words
    if name + "joint_proj.weight" not in weights:
        return words @ table.T
    memory, found = torch.zeros(words.shape[1]), []
    for word, state in zip(words, out, strict=True):
        joint = (
            torch.cat([memory, word, state]) @ weights[name + "joint_proj.weight"].T
            + weights[name + "joint_proj.bias"]
        )
        gate, fresh, said = joint.chunk(3)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * fresh.tanh()
        found.append(said.tanh())
    return torch.stack(found) @ table.T


def domino(weights: Weights, context: Context, base: Tensor, out: Tensor, parents: Tensor) -> Tensor:
    """Domino: a GRU over the tokens before a slot corrects its logits, from the second drafted token on."""
    cell = torch.nn.GRU(out.shape[1], weights["prefix_gru.weight_hh_l0"].shape[1], bias=False)
    cell.load_state_dict(
        {f"weight_{part}_l0": weights[f"prefix_gru.weight_{part}_l0"] for part in ("ih", "hh")}
    )
    with torch.no_grad():
        prefix = cell(context.embedding[parents].float())[0]
    inner = torch.cat([out, prefix], -1) @ weights["embed_proj.0.weight"].T
    delta = torch.nn.functional.silu(inner) @ weights["embed_proj.2.weight"].T
    delta[0] = 0
    return base + delta
