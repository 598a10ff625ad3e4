"""EAGLE-3, EAGLE-3.1 and P-EAGLE: the layout that vLLM, SGLang, SafeAILab and SpecForge share, and its dialects.

The same folder serves both engines: vLLM reads the layers at the top level of config.json (L is the state after L layers), SGLang
those inside `eagle_config` (L is the state after L + 1 layers). `d2t` holds offsets. A P-EAGLE drafter's vector for unknown
tokens is the embedding of one token that text does not hold, in a copy of the target's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import vocab
from heads.nn.blocks import LayerShape
from heads.nn.feature.base import layer_shape
from inference.export.layouts.base import (
    Checkpoint,
    Imported,
    Options,
    Row,
    Target,
    Written,
    give,
    refuse,
    take,
)
from inference.export.layouts.folder import Folder, Receiver
from inference.export.layouts.llama import (
    block_config,
    layer_rows,
    plain_rope,
    read_shape,
    require_fit,
    sizes_config,
    windows,
    with_qk_norm,
)

FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"


def rows(
    shape: LayerShape, taps: int, columns: int, vocabulary: int, *, tap_norm: bool, joined_norm: bool = False, layers: int = 1,
    parallel: bool = False, first: str = "midlayer.",
) -> list[Row]:  # fmt: skip
    """The tensors of an EAGLE-3 drafter (parallel: P-EAGLE), but for its embedding. columns: of the LM head; first: their name of
    the fusing layer; tap_norm, joined_norm: a norm per tap, or one for all before they are fused.
    """
    hidden, reduced = shape.hidden_size, columns != vocabulary
    ours = "layers.0." if parallel else "midlayer."
    found = [
        Row(f"fc_norm.{i}.weight", f"fc_norm.{i}.weight", (hidden,)) for i in range(taps if tap_norm else 0)
    ]
    found += [
        Row("fc.weight", "fc.weight", (hidden, taps * hidden)),
        Row("norm.weight", "norm.weight", (hidden,)),
        Row("lm_head.weight", "lm_head.weight", (columns, hidden)),
        *layer_rows(ours, first, shape, 2 * hidden, FIRST_NORMS),
    ]
    for index in range(1, layers):
        found += layer_rows(f"layers.{index}.", f"layers.{index}.", shape)
    if joined_norm:
        found.append(Row("input_norm.weight", "input_norm.weight", (taps * hidden,)))
    if reduced:
        found += [Row("d2t", "d2t", (columns,)), Row("t2d", "t2d", (vocabulary,))]
    if parallel:
        found.append(Row("mask_hidden", "mask_hidden", (1, 1, taps * hidden)))
    return found


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """The folder of an EAGLE-3 or P-EAGLE drafter."""
    config, info, parallel = checkpoint.config, checkpoint.info, checkpoint.kind == "peagle"
    taps = checkpoint.drafter.needs.taps
    shape, layers = layer_shape(config, info), len(getattr(checkpoint.drafter, "layers", [None]))
    if parallel and engine == "sglang":
        raise refuse("it has no P-EAGLE", "SGLang", "Serve it with vLLM.")
    odd = [name for name in ("norm_before_residual", "norm_before_fc", "qk_norm") if getattr(config, name)]
    if odd and engine == "sglang":
        raise refuse(
            f"it lacks head.{odd[0]}", "SGLang", f"Train with head.{odd[0]}=false, or serve it with vLLM."
        )
    if taps[0] == 0:
        raise refuse(
            "it reads the embeddings (tap 0), which has no number among SGLang's layer ids", "an engine",
            "Train with head.taps of 1 and more.",
        )  # fmt: skip
    ours, columns = checkpoint.tensors, checkpoint.tensors["lm_head.weight"].shape[0]
    check_vocabulary(ours, info.vocab_size)
    table = rows(
        shape, len(taps), columns, info.vocab_size, tap_norm=config.tap_norm, joined_norm=config.norm_before_fc, layers=layers,
        parallel=parallel, first="layers.0." if parallel else "midlayer.",
    )  # fmt: skip
    tensors = give(table, ours, left=("mask_embedding", EMBEDDING) if parallel else ())
    described = described_as(shape, info, taps, layers, columns)
    described |= {
        "fc_norm": bool(config.tap_norm),
        "norm_before_fc": bool(config.norm_before_fc),
        "norm_before_residual": bool(config.norm_before_residual),
        "norm_output": bool(getattr(config, "post_norm_recurrence", False)),
    }
    if not parallel:
        tokens = options.tokens or config.ttt_steps
        return Written(
            described, tensors,
            {"method": "eagle3", "num_speculative_tokens": tokens},
        )  # fmt: skip
    token = target.unused_token(options.mask_token_id)
    mask = ours["mask_embedding"]
    embedding = (
        ours[EMBEDDING].clone() if config.own_embedding else target.weights.embedding.to(mask.dtype).clone()
    )
    kept = {"mask_row": embedding[token].double().tolist()} if config.own_embedding else {}
    embedding[token] = mask
    described |= {"pard_token": token, "mask_token_id": token}
    return Written(
        described, {**tensors, EMBEDDING: embedding}, kept=kept, speculative=
        {"method": "eagle3", "num_speculative_tokens": options.tokens or config.depths, "parallel_drafting": True},
        notes=[f"token {token} stands for tokens that are not known yet; where text holds it, the drafter misreads it"],
    )  # fmt: skip


def described_as(
    shape: LayerShape, info: TargetInfo, taps: tuple[int, ...], layers: int, columns: int
) -> dict[str, Any]:
    """config.json's keys that EAGLE-3 and P-EAGLE share, the layers in both engines' numbering."""
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        **block_config(shape, info, layers, plain_rope(info.rope_theta)),
        "target_hidden_size": info.hidden_size,
        "draft_vocab_size": columns,
        "num_aux_hidden_states": len(taps),
        IDS: list(taps),
        "eagle_config": {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in taps]},
    }


def check_vocabulary(tensors: Mapping[str, Tensor], size: int) -> None:
    """Raise `UserError` unless `d2t` holds offsets to ascending target ids, and `t2d` marks the same tokens."""
    offsets = tensors.get("d2t")
    if offsets is None:
        return
    ids = vocab.to_target_ids(offsets)
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise UserError(
            "d2t does not hold offsets to ascending token ids of the target: the draft vocabulary is damaged. Train it again."
        )
    known = tensors.get("t2d")
    if known is not None and not torch.equal(known.bool(), vocab.to_maps(ids, size)[1]):
        raise UserError("t2d and d2t name different tokens: the draft vocabulary is damaged. Train it again.")


def matches(folder: Folder) -> bool:
    """Whether a folder is EAGLE-3 or P-EAGLE in an engine's layout: a layer with a norm of the feature of its own."""
    return any(f"{name}hidden_norm.weight" in folder.tensors for name in ("midlayer.", "layers.0."))


def default_ids(layers: int) -> tuple[int, ...]:
    """What both engines read where a folder names no layers."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def read_taps(config: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """The layers that a folder reads, in our numbering; raises `UserError` where its two lists disagree."""
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    if top and nested and [layer + 1 for layer in nested] != list(top):
        raise UserError(
            f"'{where}': config.json names layers {top} at the top level (states after so many layers) and {nested} inside "
            f"eagle_config (one less), which is not the same. Correct the wrong one; right pairs look like {top} and "
            f"{[layer - 1 for layer in top]}."
        )
    found = tuple(top) if top else tuple(layer + 1 for layer in nested) if nested else default_ids(layers)
    if list(found) != sorted(set(found)) or found[0] < 0 or found[-1] > layers:
        raise UserError(
            f"'{where}' reads layers {list(found)}, the target has {layers}. It was made for another target."
        )
    return found


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from a folder in an engine's layout (vLLM, SGLang, SafeAILab, SpecForge, ours)."""
    config = folder.config
    taps = read_taps(config, receiver.info.num_layers, str(folder.path))
    return build(
        folder,
        config,
        receiver,
        taps,
        parallel="mask_hidden" in folder.tensors,
        token=config.get("pard_token"),
    )


def build(
    folder: Folder,
    config: Mapping[str, Any],
    receiver: Receiver,
    taps: tuple[int, ...],
    *,
    parallel: bool,
    token: int | None,
) -> Imported:
    """Our checkpoint, once the dialect is settled: `config` holds the layer's sizes and the norms' places."""
    where, info, theirs = str(folder.path), receiver.info, dict(folder.tensors)
    shape = read_shape(config, where)
    require_fit(shape, config, info, where)
    windows(config, info.max_position_embeddings, where)
    layers = int(config.get("num_hidden_layers", 1))
    inner: Mapping[str, Any] = config.get("eagle_config") or {}
    if any(name.endswith("self_attn.q_norm.weight") for name in theirs):
        shape = with_qk_norm(shape)
    if layers > 1 and not parallel:
        raise UserError(f"'{where}' has {layers} layers; our eagle3 has one.")
    notes: list[str] = []
    columns = complete(theirs, receiver, notes)
    values: dict[str, Any] = {
        "taps": list(taps),
        "tap_norm": bool(config.get("fc_norm", False)),
        "norm_before_fc": bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "qk_norm": shape.qk_norm,
        **sizes_config(shape, info),
    }
    if columns != info.vocab_size:
        values["draft_vocab_size"] = columns
        check_vocabulary(theirs, info.vocab_size)
    first = "midlayer." if "midlayer.hidden_norm.weight" in theirs else "layers.0."
    extra: dict[str, Tensor] = {}
    if parallel:
        extra |= embeddings(folder, theirs, receiver, token, notes)
        values["own_embedding"] = EMBEDDING in extra
        theirs["mask_hidden"] = theirs["mask_hidden"].reshape(1, 1, -1)
        values["num_layers"] = layers
    else:
        values["post_norm_recurrence"] = bool(config.get("norm_output", False))
        embedding = theirs.pop("embed_tokens.weight", None)
        if embedding is not None and not receiver.is_shared("embed_tokens.weight", embedding):
            raise UserError(
                f"'{where}' has an embedding of its own (embed_tokens.weight differs from the target's); our eagle3 shares the "
                "target's. Was it made for this target?"
            )
    table = rows(
        shape,
        len(taps),
        columns,
        info.vocab_size,
        tap_norm=values["tap_norm"],
        joined_norm=values["norm_before_fc"],
        layers=layers,
        parallel=parallel,
        first=first,
    )
    return Imported("peagle" if parallel else "eagle3", values, take(table, theirs, where) | extra, notes)


def complete(theirs: dict[str, Tensor], receiver: Receiver, notes: list[str]) -> int:
    """Put in what a file may leave out (the target's LM head, `t2d`) or names otherwise; returns the LM head's columns."""
    size = receiver.info.vocab_size
    if "lm_head.weight" not in theirs:
        theirs["lm_head.weight"] = receiver.weights.lm_head.to(theirs["fc.weight"].dtype)
        notes.append("lm_head.weight: none in the folder, the target's is taken")
    columns = int(theirs["lm_head.weight"].shape[0])
    if columns == size:
        for name in ("d2t", "t2d"):
            theirs.pop(name, None)
        return columns
    if "d2t" not in theirs:
        raise UserError(
            f"the folder drafts from {columns} tokens of {size} but has no d2t, which says which: without it an engine takes the "
            f"first {columns}, and nearly every draft is wrong."
        )
    theirs["d2t"] = theirs["d2t"].long()
    theirs["t2d"] = (
        vocab.to_maps(vocab.to_target_ids(theirs["d2t"]), size)[1]
        if "t2d" not in theirs
        else theirs["t2d"].bool()
    )
    return columns


def embeddings(
    folder: Folder, theirs: dict[str, Tensor], receiver: Receiver, token: int | None, notes: list[str]
) -> dict[str, Tensor]:
    """P-EAGLE's vector of unknown tokens, the mask token's row of the embedding; and that embedding, unless its other rows are
    the target's.
    """
    embedding = theirs.pop(EMBEDDING, None)
    if token is None:
        raise UserError(f"'{folder.path}': config.json names no mask token (pard_token or mask_token_id).")
    own = receiver.weights.embedding
    if embedding is None:
        notes.append(f"{EMBEDDING}: none in the folder, the target's row of the mask token is taken")
        return {"mask_embedding": own[token].to(theirs["fc.weight"].dtype).clone()}
    if embedding.shape != own.shape:
        raise UserError(
            f"'{folder.path}': {EMBEDDING} is {list(embedding.shape)}, the target's {list(own.shape)}."
        )
    vector, rest = embedding[token].clone(), torch.arange(own.shape[0]) != token
    if torch.equal(own.to(embedding.dtype)[rest], embedding[rest]):
        return {"mask_embedding": vector}
    kept = folder.export.get("kept", {}).get("mask_row")
    if kept is not None:
        embedding = embedding.clone()
        embedding[token] = torch.tensor(kept, dtype=torch.float64).to(embedding.dtype)
    return {"mask_embedding": vector, EMBEDDING: embedding}
