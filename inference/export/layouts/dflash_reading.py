"""Block drafters of z-lab, DeepSpec, the engines and ourselves, read from the table of `dflash.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import build_config
from heads.api.errors import UserError
from inference.export.layouts.base import Imported, take
from inference.export.layouts.dflash import ENCODER, MARKOV, MASK_FILE, TEMPERATURES, rows
from inference.export.layouts.folder import Folder, Receiver
from inference.export.layouts.llama import read_shape, require_fit, sizes_config, windows, with_qk_norm


def matches(folder: Folder) -> bool:
    """Whether a folder is a block drafter: a stack of layers with normed heads behind a projection of features."""
    names = {
        name.removeprefix("encoder.").replace("output_norm_enc", "hidden_norm") for name in folder.tensors
    }
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names and (
        "layers.0.hidden_norm.weight" not in names
    )


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from z-lab's, DeepSpec's or an engine's layout."""
    config, where = folder.config, str(folder.path)
    inner: Mapping[str, Any] = config.get("dflash_config") or {}
    ids = inner.get("target_layer_ids", config.get("target_layer_ids"))
    token = inner.get("mask_token_id", config.get("mask_token_id"))
    if ids is None or token is None or config.get("block_size") is None:
        raise UserError(f"'{where}': config.json lacks target_layer_ids, mask_token_id or block_size.")
    sees = windows(swa(config, inner), receiver.info.max_position_embeddings, where)
    causal = config.get("is_causal", inner.get("causal"))
    if causal is None and len(sees) > 1:
        raise UserError(
            f"'{where}' mixes sliding and full layers, which see their block differently; ours see it alike."
        )
    causal = (
        bool(causal) if causal is not None else sees == {"sliding_attention"} and not inner.get("use_swa")
    )
    taps = tuple(int(layer) + 1 for layer in ids)
    return build(folder, config, receiver, taps, int(token), causal=causal, extra=inner)


def swa(config: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with z-lab's way of saying "all layers slide" in the usual words."""
    if not inner.get("use_swa"):
        return config
    window = inner.get("swa_window_size", config.get("sliding_window"))
    return {**config, "layer_types": ["sliding_attention"], "sliding_window": window}


def build(
    folder: Folder, config: Mapping[str, Any], receiver: Receiver, taps: tuple[int, ...], token: int, *, causal: bool,
    extra: Mapping[str, Any],
) -> Imported:  # fmt: skip
    """Our checkpoint, once the dialect is settled. extra: where the keys of a flavour stand."""
    where, info = str(folder.path), receiver.info
    shape = read_shape(config, where)
    require_fit(shape, config, info, where, scaled=True)
    if taps[0] < 0 or taps[-1] > info.num_layers or list(taps) != sorted(set(taps)):
        raise UserError(
            f"'{where}' reads layers {list(taps)}, the target has {info.num_layers}. It was made for another target."
        )
    plain = {theirs_: ours for ours, theirs_ in ENCODER.items()}
    theirs = {plain.get(name, name): value for name, value in folder.tensors.items()}
    notes: list[str] = []
    values: dict[str, Any] = {
        "block_size": int(config["block_size"]),
        "in_block": "causal" if causal else "bidirectional",
        "num_layers": int(config["num_hidden_layers"]),
        "taps": list(taps),
        "start_from": "random",
        "carry_root": False,
        **sizes_config(shape, info),
        **flavour_values(config, extra, theirs),
    }
    mask = mask_vector(folder, theirs, receiver, token, notes)
    values["mask_token_id"] = token if mask is None else -1
    for name in ("lm_head.weight", "d2t", "t2d"):
        drop_shared(folder, theirs, receiver, name, notes)
    table = rows(
        build_config("dflash", values), with_qk_norm(shape), values["num_layers"], len(taps), info.vocab_size
    )
    found = take(table, theirs, where)
    if mask is not None:
        found["mask_embedding"] = mask
    if values.get("confidence"):
        depth = values["block_size"] - (0 if values.get("sample_from_anchor") else 1)
        kept = folder.export.get("kept", {}).get("confidence_temperatures", [1.0] * depth)
        found[TEMPERATURES] = torch.tensor(kept, dtype=found["confidence_head.proj.weight"].dtype)
    return Imported("dflash", values, found, notes)


def flavour_values(
    config: Mapping[str, Any], extra: Mapping[str, Any], theirs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What a folder's extra tensors and keys say of the method, in values of our configuration."""
    anchored = bool(
        config.get(
            "sample_from_anchor", extra.get("sample_from_anchor", "markov_head.markov_w1.weight" in theirs)
        )
    )
    values: dict[str, Any] = {"sample_from_anchor": anchored}
    if "markov_head.markov_w1.weight" in theirs:
        named = {theirs_: ours for ours, theirs_ in MARKOV.items()}
        kind = str(config.get("markov_head_type", "vanilla"))
        if kind not in named:
            raise UserError(f"a DSpark drafter with markov_head_type '{kind}' is none of {', '.join(named)}.")
        values |= {
            "dependency": named[kind],
            "dependency_rank": int(theirs["markov_head.markov_w1.weight"].shape[1]),
        }
    if "prefix_gru.weight_ih_l0" in theirs:
        if extra.get("shift_label") or int(extra.get("pure_draft_prefix_len", 1)) != 1:
            raise UserError(
                "a Domino drafter with shift_label or pure_draft_prefix_len other than 1 is not ours."
            )
        values |= {"dependency": "gru", "dependency_rank": int(theirs["prefix_gru.weight_hh_l0"].shape[1])}
    if "candidate_selector.predecessor_codebook" in theirs:
        values |= {
            "dependency": "selector",
            "dependency_rank": int(theirs["candidate_selector.predecessor_codebook"].shape[1]),
            "selector_top_k": int(extra.get("selector_top_k", config.get("selector_top_k", 16))),
            "convolution": True,
            "conv_group_size": int(extra.get("conv_group_size", config.get("conv_group_size", 16))),
        }
    if "confidence_head.proj.weight" in theirs:
        wide = theirs["confidence_head.proj.weight"].shape[1] - theirs["norm.weight"].shape[0]
        if wide != values.get("dependency_rank", 0):
            raise UserError("a confidence head that does not read the Markov table is not ours.")
        values["confidence"] = True
    return values


def mask_vector(
    folder: Folder, theirs: dict[str, Tensor], receiver: Receiver, token: int, notes: list[str]
) -> Tensor | None:
    """The mask's own vector [H], or None where it is the target's embedding of `token`."""
    embedding, own = theirs.pop("embed_tokens.weight", None), receiver.weights.embedding
    file = folder.path / MASK_FILE
    if file.is_file():
        state = torch.load(file, map_location="cpu", weights_only=True)
        vector = state["embedding"] if isinstance(state, dict) else state
        return vector.reshape(-1).clone()
    if embedding is None or receiver.is_shared("embed_tokens.weight", embedding):
        if embedding is not None:
            notes.append("embed_tokens.weight: a copy of the target's, left out")
        return None
    rest = torch.arange(own.shape[0]) != token
    if embedding.shape != own.shape or not torch.equal(own.to(embedding.dtype)[rest], embedding[rest]):
        raise UserError(
            f"'{folder.path}' has an embedding of its own; our block drafters share the target's (all rows but the mask "
            "token's must be equal). Was it made for this target?"
        )
    return embedding[token].clone()


def drop_shared(
    folder: Folder, theirs: dict[str, Tensor], receiver: Receiver, name: str, notes: list[str]
) -> None:
    """Take out a copy of the target's LM head and the maps of a vocabulary that is not reduced."""
    value = theirs.pop(name, None)
    if value is None:
        return
    if name == "lm_head.weight" and not receiver.is_shared(name, value):
        raise UserError(
            f"'{folder.path}' has an LM head of its own, which our block drafters share with the target."
        )
    if name == "d2t" and bool(value.any()):
        raise UserError(f"'{folder.path}' drafts from a reduced vocabulary, which our block drafters do not.")
    notes.append(f"{name}: a copy of what the target has, left out")
