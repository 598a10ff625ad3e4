"""What a serving engine computes from an exported folder, written out slowly from its format.

Nothing here is shared with our own drafters: only the folder's files, the target's hidden states,
its embedding and its LM head are read, in the way that vLLM and SGLang document (and their code
does). Whole sequences are recomputed for every drafted token; plain softmax attention; float32 at
least. One known difference is left out: MTP's engines blank the token at position 0.

Legend: T positions of the text that the target has seen, K drafted tokens, b slots of a block, H
hidden, V vocabulary, n layers read, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inference.export.layouts.base import captured_layers
from inference.export.layouts.dflash import ENCODER, MASK_FILE
from inference.export.layouts.folder import Folder
from inference.export.layouts.llama import read_rope

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Context:
    """A text as the engine's target leaves it.

    tokens [T+1]: the text and the token drawn after it, the root of the draft; states [n+1, T, H]:
    the residual stream after 0..n layers; last [T, H]: after the final norm; embedding [V, H];
    lm_head [V, H]; logits: the LM head as the target applies it.
    """

    tokens: Tensor
    states: Tensor
    last: Tensor
    embedding: Tensor
    lm_head: Tensor
    logits: Callable[[Tensor], Tensor]


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def frequencies(config: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2], and the factor on cosine and sine, by a config.json."""
    rope = read_rope(config)
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    longest = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    original = float(longest)
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        share = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return share * plain + (1 - share) * plain / factor, 1.0
    assert kind == "yarn", f"no engine computes rotary positions of type '{kind}'"

    def turn(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(turn(float(rope.get("beta_fast") or 32))), 0)
    last = min(math.ceil(turn(float(rope.get("beta_slow") or 1))), size - 1)
    index = torch.arange(size // 2, dtype=torch.float64)
    ramp = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    scale = rope.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return ramp * plain / factor + (1 - ramp) * plain, float(scale)


@dataclass(frozen=True)
class Layer:
    """One decoder layer of a folder: its weights under `prefix`, and the config's sizes."""

    weights: Weights
    prefix: str
    config: Mapping[str, Any]

    @property
    def eps(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))

    def get(self, name: str) -> Tensor | None:
        """A tensor of the layer, or None."""
        return self.weights.get(self.prefix + name)

    def norm(self, name: str, states: Tensor) -> Tensor:
        """One of the layer's norms."""
        return norm(states, self.weights[f"{self.prefix}{name}.weight"], self.eps)

    def linear(self, name: str, states: Tensor) -> Tensor:
        """states W^T + b."""
        bias = self.get(f"{name}.bias")
        out = states @ self.weights[f"{self.prefix}{name}.weight"].T
        return out if bias is None else out + bias

    def heads(self, name: str, states: Tensor, positions: Tensor) -> Tensor:
        """Query or key heads [T, h, D], normed if there are norms, rotated to `positions`."""
        config = self.config
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        split = self.linear(f"self_attn.{name}_proj", states).unflatten(-1, (-1, int(size)))
        if self.get(f"self_attn.{name}_norm.weight") is not None:
            split = self.norm(f"self_attn.{name}_norm", split)
        inverse, scale = frequencies(config, int(size))
        angles = positions.double()[:, None] * inverse
        cosine, sine = ((p * scale).to(split.dtype)[:, None] for p in (angles.cos(), angles.sin()))
        left, right = split.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    def values(self, states: Tensor, size: int) -> Tensor:
        """Value heads [T, g, D]."""
        return self.linear("self_attn.v_proj", states).unflatten(-1, (-1, size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Attention of queries [Q, h, D] over keys [S, g, D] where allowed [Q, S] -> [Q, H]."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,shd->hqs", query, key) * query.shape[-1] ** -0.5
        shares = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqs,shd->qhd", shares, value).flatten(1)
        return self.linear("self_attn.o_proj", mixed)

    def swiglu(self, normed: Tensor) -> Tensor:
        """The MLP without its norm."""
        gate = F.silu(self.linear("mlp.gate_proj", normed))
        return self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", normed))

    def causal(self, inputs: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
        """The layer over a sequence: attention of `inputs` added to `residual` [T, H], MLP."""
        query, key = (self.heads(name, inputs, positions) for name in "qk")
        value = self.values(inputs, query.shape[-1])
        allowed = positions[None] <= positions[:, None]
        states = residual + self.attend(query, key, value, allowed)
        return states + self.swiglu(self.norm("post_attention_layernorm", states))


@torch.no_grad()
def run(folder: Folder, layout: str, context: Context, chain: Tensor, depth: int) -> Tensor:
    """The engine's logits [K, V] at depths 1..`depth` after `context`, if it drafts `chain`.

    chain [K-1 or more]. Columns that the folder cannot draft are minus infinity.
    """
    name = layout.removeprefix("speculators-")
    return WAYS[name](folder, context, chain, depth)


def exact(folder: Folder) -> dict[str, Tensor]:
    """The folder's tensors, floating-point ones in float32 at least."""
    return {
        name: value.to(torch.promote_types(value.dtype, torch.float32))
        if value.is_floating_point()
        else value
        for name, value in folder.tensors.items()
    }


def embed(weights: Weights, context: Context, tokens: Tensor) -> Tensor:
    """Embeddings [T, H]: the folder's own table if it has one, else the target's."""
    return weights.get("embed_tokens.weight", context.embedding)[tokens].float()


def pieces(context: Context, ids: tuple[int, ...]) -> list[Tensor]:
    """The states of the captured layers, in the order in which the engine joins them: ascending."""
    assert min(ids) >= 0 and max(ids) < context.states.shape[0], f"no such layers: {ids}"
    return [context.states[layer].float() for layer in sorted(ids)]


def to_target(logits: Tensor, weights: Weights, context: Context) -> Tensor:
    """Draft logits [K, V'] over the target's vocabulary [K, V]: d2t holds offsets."""
    size = context.embedding.shape[0]
    if logits.shape[1] == size:
        return logits
    draft = torch.arange(logits.shape[1])
    wide = logits.new_full((logits.shape[0], size), float("-inf"))
    wide[:, (draft + weights.get("d2t", 0)).clamp(0, size - 1)] = logits
    return wide


# One layer, recursed


def eagle(folder: Folder, context: Context, chain: Tensor, depth: int) -> Tensor:
    """EAGLE-1: fc of (token s+1, state s) at position s, a layer without a first norm."""
    weights, found = exact(folder), []
    layer = Layer(weights, "layers.0.", folder.flat)
    tokens, states = context.tokens[1:], context.last.float()
    for step in range(depth):
        both = torch.cat([embed(weights, context, tokens), states], -1)
        joined = both @ weights["fc.weight"].T + weights.get("fc.bias", 0.0)
        out = layer.causal(joined, joined, torch.arange(tokens.shape[0]))[-1:]
        found.append(context.logits(out))
        tokens, states = torch.cat([tokens, chain[step : step + 1]]), torch.cat([states, out])
    return torch.cat(found)


def mtp(folder: Folder, context: Context, chain: Tensor, depth: int) -> Tensor:
    """MiMo's block: proj of (norm of state s, norm of token s+1), a layer, a norm; recursed."""
    weights, found = exact(folder), []
    layer = Layer(weights, "model.mtp_layers.0.", folder.flat)
    tokens, states = context.tokens[1:], context.last.float()
    for step in range(depth):
        token = layer.norm("token_layernorm", embed(weights, context, tokens))
        state = layer.norm("hidden_layernorm", states)
        joined = layer.linear("input_proj", torch.cat([state, token], -1))
        normed = layer.norm("input_layernorm", joined)
        out = layer.causal(normed, joined, torch.arange(tokens.shape[0]))[-1:]
        out = layer.norm("final_layernorm", out)
        found.append(context.logits(out))
        tokens, states = torch.cat([tokens, chain[step : step + 1]]), torch.cat([states, out])
    return torch.cat(found)


def eagle3(folder: Folder, context: Context, chain: Tensor, depth: int) -> Tensor:
    """EAGLE-3 token by token, or P-EAGLE in one pass with rows of unknown tokens after the text."""
    config = folder.flat
    weights = {name.replace("midlayer.", "layers.0."): v for name, v in exact(folder).items()}
    eps = float(config["rms_norm_eps"])
    ids = captured_layers(config, context.states.shape[0] - 1, folder.export.engine)

    def fuse(parts: list[Tensor]) -> Tensor:
        if config.get("norm_before_fc"):
            parts = [norm(torch.cat(parts, -1), weights["input_norm.weight"], eps)]
        elif config.get("fc_norm"):
            parts = [norm(p, weights[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)]
        return torch.cat(parts, -1) @ weights["fc.weight"].T

    def layers(tokens: Tensor, states: Tensor) -> Tensor:
        """All layers over tokens [T] and states [T, H] -> [T, H]. The first one reads both."""
        positions = torch.arange(tokens.shape[0])
        for index in range(int(config["num_hidden_layers"])):
            layer = Layer(weights, f"layers.{index}.", config)
            residual = states
            if index == 0:
                embedded = layer.norm("input_layernorm", embed(weights, context, tokens))
                normed = layer.norm("hidden_norm", states)
                residual = normed if config.get("norm_before_residual") else states
                inputs = torch.cat([embedded, normed], -1)
            else:
                inputs = layer.norm("input_layernorm", states)
            states = layer.causal(inputs, residual, positions)
        return states

    head = weights.get("lm_head.weight", context.lm_head).float()
    tokens, states, found = context.tokens[1:], fuse(pieces(context, ids)), []
    if "mask_hidden" in weights:
        mask = fuse([part[None] for part in weights["mask_hidden"].flatten().chunk(len(ids))])
        unknown = int(config.get("pard_token", config.get("mask_token_id", 0)))
        tokens = torch.cat([tokens, torch.full((depth - 1,), unknown)])
        states = torch.cat([states, mask.expand(depth - 1, -1)])
        out = norm(layers(tokens, states)[-depth:], weights["norm.weight"], eps)
        return to_target(out @ head.T, weights, context)
    for step in range(depth):
        out = layers(tokens, states)[-1:]
        normed = norm(out, weights["norm.weight"], eps)
        found.append(normed @ head.T)
        tokens = torch.cat([tokens, chain[step : step + 1]])
        states = torch.cat([states, normed if config.get("norm_output") else out])
    return to_target(torch.cat(found), weights, context)


# Without the target's layers


def medusa(folder: Folder, context: Context, chain: Tensor, depth: int) -> Tensor:
    """Head i on the last state gives token T+1+i; every block adds SiLU of a linear map."""
    weights, config, found = exact(folder), folder.config, []
    for head in range(depth):
        states = context.last[-1:].float()
        for layer in range(int(config["num_hidden_layers"])):
            name = f"blocks.{head}.layers.{layer}"
            inner = states @ weights[f"{name}.weight"].T
            if config.get("medusa_fc_bias"):
                inner = inner + weights[f"{name}.bias"]
            states = states + F.silu(inner)
        shared = config.get("original_lm_head")
        found.append(states @ weights["lm_head.weight" if shared else f"lm_heads.{head}.weight"].T)
    logits = torch.cat(found)
    if "token_map" not in weights:
        return logits
    wide = logits.new_full((depth, context.embedding.shape[0]), float("-inf"))
    wide[:, weights["token_map"].long()] = logits
    return wide


def language_model(folder: Folder, context: Context, chain: Tensor, depth: int) -> Tensor:
    """A causal language model over the text and its drafts; PARD: over text and mask tokens."""
    weights, config = exact(folder), folder.flat
    token = config.get("pard_token")
    drafts = chain[: depth - 1] if token is None else torch.full((depth - 1,), int(token))
    tokens = torch.cat([context.tokens, drafts])
    embedding = weights["model.embed_tokens.weight"]
    states, positions = embedding[tokens], torch.arange(tokens.shape[0])
    for index in range(int(config["num_hidden_layers"])):
        layer = Layer(weights, f"model.layers.{index}.", config)
        states = layer.causal(layer.norm("input_layernorm", states), states, positions)
    out = norm(states[-depth:], weights["model.norm.weight"], float(config["rms_norm_eps"]))
    return out @ (embedding if config.get("tie_word_embeddings") else weights["lm_head.weight"]).T


# Blocks


def block(folder: Folder, context: Context, chain: Tensor, depth: int) -> Tensor:
    """One pass over [root, mask, ...] at positions T, T+1, ...; layers project the context too."""
    plain = {theirs: ours for ours, theirs in ENCODER.items()}
    weights = {plain.get(name, name): value for name, value in exact(folder).items()}
    config, inner = folder.flat, folder.block
    eps, length, size = float(config["rms_norm_eps"]), context.last.shape[0], inner["block_size"]
    anchored = bool(inner.get("sample_from_anchor", "markov_head.markov_w1.weight" in weights))
    ids = captured_layers(config, context.states.shape[0] - 1, "vllm")
    features = torch.cat(pieces(context, ids), -1) @ weights["fc.weight"].T
    features = norm(features, weights["hidden_norm.weight"], eps)
    states = slots(folder, weights, context, int(inner["mask_token_id"]), size)
    places = length + torch.arange(size)
    positions = torch.cat([torch.arange(length), places])
    reach = places if sees_earlier_only(folder) else places[-1:].expand(size)
    allowed = positions[None] <= reach[:, None]
    for index in range(int(config["num_hidden_layers"])):
        layer = Layer(weights, f"layers.{index}.", config)
        normed = layer.norm("input_layernorm", states)
        before, after = kernels(layer, "attention_conv", normed)
        normed = convolve(normed, before)
        key = torch.cat(
            [layer.heads("k", features, positions[:length]), layer.heads("k", normed, places)]
        )
        value = torch.cat([layer.values(part, key.shape[-1]) for part in (features, normed)])
        mixed = layer.attend(layer.heads("q", normed, places), key, value, allowed)
        states = states + convolve(mixed, after)
        normed = layer.norm("post_attention_layernorm", states)
        before, after = kernels(layer, "mlp_conv", normed)
        states = states + convolve(layer.swiglu(convolve(normed, before)), after)
    first = 0 if anchored else 1
    out = norm(states, weights["norm.weight"], eps)[first : first + depth]
    parents = torch.cat([context.tokens[-1:], chain])[:depth]
    if "lilicorr.rank_embedding" in weights:
        return correlated(weights, inner, context, out, parents, features[-1])
    return corrected(weights, inner, context, out, parents)


def sees_earlier_only(folder: Folder) -> bool:
    """Whether slots see earlier slots only, by vLLM's rules: a key for it, or all layers slide."""
    config = folder.flat
    for said in (config.get("is_causal"), (config.get("dflash_config") or {}).get("causal")):
        if said is not None:
            return bool(said)
    if "sliding_window_non_causal" in config:
        return not config["sliding_window_non_causal"]
    return set(folder.block.get("layer_types") or []) == {"sliding_attention"}


def slots(folder: Folder, weights: Weights, context: Context, mask: int, size: int) -> Tensor:
    """The block's inputs [b, H]: the embeddings of the root and of the mask."""
    tokens = torch.cat([context.tokens[-1:], torch.full((size - 1,), mask)])
    found = embed(weights, context, tokens)
    file = folder.path / MASK_FILE
    if file.is_file():
        state = torch.load(file, map_location="cpu", weights_only=True)
        found[tokens == mask] = state["embedding"].float().reshape(-1)
    return found


def kernels(layer: Layer, name: str, states: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The convolution kernels [b, 2 taps, H] of a sublayer's input and output, or None without one.

    kernel[i, t, c] = base[t, c] + delta[i, t, group of c], where delta is linear in the input.
    """
    base = layer.get(f"{name}.base_kernel")  # [2 sides, 2 taps, H]
    if base is None:
        return None, None
    delta = layer.linear(f"{name}.kernel_projection", states).unflatten(-1, (2, 2, -1))
    wide = base + delta.repeat_interleave(base.shape[-1] // delta.shape[-1], -1)
    return wide[:, 0], wide[:, 1]


def convolve(states: Tensor, kernel: Tensor | None) -> Tensor:
    """out[i, c] = sum over taps t of kernel[i, t, c] x[i - t, c]; zeros before the first slot."""
    if kernel is None:
        return states
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    return kernel[:, 0] * states + kernel[:, 1] * before


def corrected(
    weights: Weights, inner: Mapping[str, Any], context: Context, out: Tensor, parents: Tensor
) -> Tensor:
    """Base logits of the slots [K, V], and what the method adds for the tokens before them [K]."""
    base = context.logits(out)
    if "markov_head.markov_w1.weight" in weights:
        return base + markov(weights, out, parents)
    if "prefix_gru.weight_ih_l0" in weights:
        return base + domino(weights, context, out, parents)
    if "candidate_selector.predecessor_codebook" in weights:
        tables = "candidate_selector."
        best = base.topk(int(inner["selector_top_k"]), -1).indices
        hidden = out @ weights[tables + "hidden_projection.weight"].T
        predecessor = weights[tables + "predecessor_codebook"][parents] * hidden
        successor = weights[tables + "successor_codebook"][best]
        edges = torch.einsum("kr,kcr->kc", predecessor, successor)
        chosen = torch.full_like(base, float("-inf"))
        return chosen.scatter(1, best, base.gather(1, best) + edges)
    return base


def correlated(
    weights: Weights,
    inner: Mapping[str, Any],
    context: Context,
    out: Tensor,
    parents: Tensor,
    anchor: Tensor,
) -> Tensor:
    """LiLiCorr: scores of the slots' best tokens [K, V] behind each parent [K], -inf for all other
    tokens, and behind a parent that is no candidate itself."""
    name, count = "lilicorr.", int(inner["lilicorr_candidate_topk"])
    head = Layer(weights, name, {})
    eps, slots, size = (
        float(inner["rms_norm_eps"]),
        out.shape[0],
        weights[name + "same_slot_bias"].shape[0],
    )
    log_probs, best = context.logits(out).log_softmax(-1).topk(count, -1)

    def mlp(part: str, states: Tensor) -> Tensor:
        return head.linear(f"{part}.down_proj", F.silu(head.linear(f"{part}.up_proj", states)))

    rank = torch.arange(count).float()
    known = [log_probs, log_probs.exp(), log_probs - log_probs[:, :1]]
    known += [(rank / max(1, count - 1)).expand_as(log_probs), (rank == 0).float().expand_as(best)]
    described = F.layer_norm(
        torch.stack(known, -1),
        (len(known),),
        weights[name + "feature_norm.weight"],
        weights[name + "feature_norm.bias"],
    )
    words = context.embedding[best].float()
    if head.get("token_proj.weight") is not None:
        words = head.linear("token_proj", words)
    states = words + head.linear("pass_hidden_proj", out)[:, None] + mlp("feature_mlp", described)
    states = states + weights[name + "slot_embedding"][0, 0, :slots]
    states = (states + weights[name + "rank_embedding"][0, 0]).flatten(0, 1)
    places = torch.arange(slots).repeat_interleave(count)
    apart = places[:, None] - places
    bias = weights[name + "relative_slot_bias"][:, apart + int(inner["block_size"]) - 1]
    bias = bias + (apart == 0) * weights[name + "same_slot_bias"][:, None, None]
    for number in range(int(inner["lilicorr_num_layers"])):
        layer = f"layers.{number}"
        attention = torch.nn.MultiheadAttention(states.shape[1], size, batch_first=True)
        prefix = f"{name}{layer}.attn."
        mine = {key: value for key, value in weights.items() if key.startswith(prefix)}
        attention.load_state_dict({key.removeprefix(prefix): mine[key] for key in mine})
        normed = norm(states, weights[f"{name}{layer}.attn_norm.weight"], eps)[None]
        mixed = attention(normed, normed, normed, attn_mask=bias, need_weights=False)[0][0]
        states = states + mixed
        states = states + mlp(
            f"{layer}.mlp", norm(states, weights[f"{name}{layer}.mlp_norm.weight"], eps)
        )
    states = norm(states, weights[name + "output_norm.weight"], eps)
    near = norm(head.linear("context_proj", anchor), weights[name + "anchor_norm.weight"], eps)
    factors = torch.cat([states, near.expand_as(states), states * near], -1)
    factors = F.silu(head.linear("factor_input_proj", factors))
    short = float(inner["lilicorr_vector_eps"])
    leaving, arriving, first = (
        F.normalize(head.linear(part, given), dim=-1, eps=short)
        for part, given in (("out_head", factors), ("in_head", factors), ("anchor_out_head", near))
    )
    leaving, arriving = (x.unflatten(0, (slots, count)) for x in (leaving, arriving))
    found = torch.full((slots, context.embedding.shape[0]), float("-inf"))
    for slot in range(slots):
        before = first
        if slot > 0:
            at = (best[slot - 1] == parents[slot]).nonzero().flatten()
            if not at.numel():
                continue
            before = leaving[slot - 1, at[0]]
        scores = float(inner["lilicorr_logit_scale"]) * (arriving[slot] @ before)
        found[slot, best[slot]] = scores
    return found


def markov(weights: Weights, out: Tensor, parents: Tensor) -> Tensor:
    """DSpark's table of successors: vanilla, gated by the slot, or with a recurrent state."""
    layer = Layer(weights, "markov_head.", {})
    words = weights["markov_head.markov_w1.weight"][parents]
    if layer.get("gate_proj.weight") is not None:
        words = layer.linear("gate_proj", torch.cat([out, words], -1)).sigmoid() * words
    if layer.get("joint_proj.weight") is not None:
        memory, found = torch.zeros(words.shape[1]), []
        for word, state in zip(words, out, strict=True):
            joint = layer.linear("joint_proj", torch.cat([memory, word, state]))
            gate, fresh, said = joint.chunk(3)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * fresh.tanh()
            found.append(said.tanh())
        words = torch.stack(found)
    return words @ weights["markov_head.markov_w2.weight"].T


def domino(weights: Weights, context: Context, out: Tensor, parents: Tensor) -> Tensor:
    """Domino: a GRU over the tokens before a slot; it corrects from the second drafted token on."""
    cell = torch.nn.GRU(out.shape[1], weights["prefix_gru.weight_hh_l0"].shape[1], bias=False)
    parts = [f"weight_{part}_l0" for part in ("ih", "hh")]
    cell.load_state_dict({part: weights[f"prefix_gru.{part}"] for part in parts})
    prefix = cell(context.embedding[parents].float())[0]
    inner = torch.cat([out, prefix], -1) @ weights["embed_proj.0.weight"].T
    delta = F.silu(inner) @ weights["embed_proj.2.weight"].T
    delta[0] = 0
    return delta


WAYS: dict[str, Callable[[Folder, Context, Tensor, int], Tensor]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "peagle": eagle3,
    "mtp-mimo": mtp,
    "medusa": medusa,
    "causal": language_model,
    **dict.fromkeys(
        ("dflash", "dflash2", "dspark", "domino", "lilicorr", "dflash-assistant"), block
    ),
}
