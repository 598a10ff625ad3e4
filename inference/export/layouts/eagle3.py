"""EAGLE-3, EAGLE-3.1 and P-EAGLE: the layout of vLLM, SGLang, SafeAILab and SpecForge.

One folder serves both engines: vLLM reads the layers at the top level of config.json (L is the
state after L layers), SGLang those inside `eagle_config` (L is the state after L + 1 layers). `d2t`
holds offsets. A P-EAGLE drafter's vector for unknown tokens is the embedding of one token that text
does not hold, in a copy of the target's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import vocab
from heads.nn.feature.base import layer_shape
from inference.export.layouts.base import (
    Checkpoint,
    Imported,
    Json,
    Options,
    Shapes,
    Target,
    TensorRow,
    Written,
    give,
    refuse,
    same_names,
    take,
)
from inference.export.layouts.folder import EMBEDDING, HEAD, Folder, Receiver
from inference.export.layouts.layout import IDS, Layout, require_taps
from inference.export.layouts.llama import (
    block_config,
    layer_kinds,
    layer_rows,
    plain_rope,
    read_shape,
    require_fit,
    sizes_config,
    with_qk_norm,
)

FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
MASK = "mask_hidden"
VLLM_ONLY = ("norm_before_residual", "norm_before_fc", "qk_norm")
"""Options that SGLang lacks."""


def rows(
    config: Json, info: TargetInfo, where: str, *, parallel: bool, first: str
) -> list[TensorRow]:
    """The tensors of an EAGLE-3 (parallel: P-EAGLE) drafter by its config.json.

    first: the prefix of their fusing layer. Its embedding is left out.
    """
    shape, size = read_shape(config, where), info.vocab_size
    if config.get("model_type") == "qwen3":
        shape = with_qk_norm(shape)
    hidden, columns = shape.hidden_size, int(config.get("draft_vocab_size") or size)
    taps = int(config.get("num_aux_hidden_states") or len(config.get(IDS) or (1, 2, 3)))
    shapes: Shapes = {
        "fc.weight": (hidden, taps * hidden),
        "norm.weight": (hidden,),
        HEAD: (columns, hidden),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(taps)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * hidden,)
    if columns != size:
        shapes |= {"d2t": (columns,), "t2d": (size,)}
    if parallel:
        shapes[MASK] = (1, 1, taps * hidden)
    ours = "layers.0." if parallel else "midlayer."
    found = same_names(shapes) + layer_rows(ours, first, shape, 2 * hidden, FIRST_NORMS)
    for index in range(1, int(config["num_hidden_layers"])):
        found += layer_rows(f"layers.{index}.", f"layers.{index}.", shape)
    return found


def expect(folder: Folder, info: TargetInfo, parallel: bool) -> tuple[list[TensorRow], Shapes]:
    """See `Layout.tensors`."""
    config, first = folder.flat, first_layer(folder.tensors)
    table = rows(config, info, str(folder.path), parallel=parallel, first=first)
    embedding = (info.vocab_size, info.hidden_size)
    optional = ["t2d"] + (
        [HEAD] if config.get("draft_vocab_size") in (None, 0, embedding[0]) else []
    )
    spare = {row.theirs: row.shape for row in table if row.theirs in optional}
    table = [row for row in table if row.theirs not in spare]
    if parallel:
        table += same_names({EMBEDDING: embedding})
    return table, spare | {EMBEDDING: embedding}


ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
"""vLLM puts "Eagle3" before any other name of an EAGLE-3 head."""
LAYOUTS = (
    Layout(
        "eagle3",
        (*ARCHITECTURES, "Eagle3DraftModel"),
        lambda folder, info: expect(folder, info, parallel=False),
        taps=True,
    ),
    Layout(
        "peagle",
        (*ARCHITECTURES, "PEagleDraftModel"),
        lambda folder, info: expect(folder, info, parallel=True),
        taps=True,
    ),
)


def first_layer(theirs: Mapping[str, Tensor]) -> str:
    """The prefix of the fusing layer's tensors."""
    return "midlayer." if "midlayer.hidden_norm.weight" in theirs else "layers.0."


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """The folder of an EAGLE-3 or P-EAGLE drafter."""
    config, info, drafter = checkpoint.config, checkpoint.info, checkpoint.drafter
    ours, taps = checkpoint.tensors, drafter.needs.taps
    parallel = MASK in ours
    shape, layers = layer_shape(config, info), len(getattr(drafter, "layers", [None]))
    odd = next((name for name in VLLM_ONLY if getattr(config, name)), "")
    if odd and engine == "sglang":
        raise refuse(
            f"it lacks head.{odd}", "SGLang", f"Train with head.{odd}=false, or serve it with vLLM."
        )
    if taps[0] == 0:
        raise refuse(
            "it reads the embeddings (tap 0), which has no number among SGLang's layer ids",
            "an engine",
            "Train with head.taps of 1 and more.",
        )
    check_vocabulary(ours, info.vocab_size)
    described = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        **block_config(shape, info, layers, plain_rope(info.rope_theta)),
        "target_hidden_size": info.hidden_size,
        "draft_vocab_size": ours[HEAD].shape[0],
        "num_aux_hidden_states": len(taps),
        IDS: list(taps),
        "eagle_config": {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in taps]},
        "fc_norm": bool(config.tap_norm),
        "norm_before_fc": bool(config.norm_before_fc),
        "norm_before_residual": bool(config.norm_before_residual),
        "norm_output": bool(getattr(config, "post_norm_recurrence", False)),
    }
    first = "layers.0." if parallel else "midlayer."
    table = rows(described, info, str(checkpoint.folder), parallel=parallel, first=first)
    tensors = give(table, ours, left=("mask_embedding", EMBEDDING) if parallel else ())
    tokens = options.tokens or (config.depths if parallel else config.ttt_steps)
    written = Written(described, tensors, {"method": "eagle3", "num_speculative_tokens": tokens})
    if parallel:
        written.speculative["parallel_drafting"] = True
        place_mask(written, checkpoint, target, target.unused_token(options.mask_token_id))
    return written


def place_mask(written: Written, checkpoint: Checkpoint, target: Target, token: int) -> None:
    """Store P-EAGLE's vector of unknown tokens as the embedding of `token`."""
    ours = checkpoint.tensors
    mask, own = ours["mask_embedding"], ours.get(EMBEDDING)
    if own is None:
        embedding = target.weights.embedding.to(mask.dtype).clone()
    else:
        embedding = own.clone()
        written.kept["mask_row"] = embedding[token].double().tolist()
    embedding[token] = mask
    written.tensors[EMBEDDING] = embedding
    written.config |= {"pard_token": token, "mask_token_id": token}
    written.notes.append(
        f"token {token} stands for tokens that are not known yet; where text holds it, the drafter "
        "misreads it"
    )


def check_vocabulary(tensors: Mapping[str, Tensor], size: int) -> None:
    """Raise `UserError` unless `d2t` maps to ascending ids, and `t2d` marks the same tokens."""
    offsets = tensors.get("d2t")
    if offsets is None:
        return
    ids = vocab.to_target_ids(offsets)
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise UserError(
            "d2t does not hold offsets to ascending token ids of the target: the draft vocabulary "
            "is damaged. Train it again."
        )
    known = tensors.get("t2d")
    if known is not None and not torch.equal(known.bool(), vocab.to_maps(ids, size)[1]):
        raise UserError(
            "t2d and d2t name different tokens: the draft vocabulary is damaged. Train it again."
        )


def matches(folder: Folder) -> bool:
    """Whether a folder is EAGLE-3 or P-EAGLE: its first layer has a norm of the feature."""
    return any(f"{name}hidden_norm.weight" in folder.tensors for name in ("midlayer.", "layers.0."))


def default_ids(layers: int) -> tuple[int, ...]:
    """The layers that both engines read where a folder names none."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def read_taps(config: Json, layers: int, where: str) -> tuple[int, ...]:
    """The layers that a folder reads; raises `UserError` where its two lists disagree."""
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    if top and nested and [layer + 1 for layer in nested] != list(top):
        raise UserError(
            f"'{where}': config.json names layers {top} at the top level (states after so many "
            f"layers) and {nested} inside eagle_config (one less), which is not the same. Correct "
            f"the wrong one; right pairs look like {top} and {[layer - 1 for layer in top]}."
        )
    found = tuple(top or ()) or tuple(layer + 1 for layer in nested or ()) or default_ids(layers)
    require_taps(found, layers, where)
    return found


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from a folder in an engine's layout (vLLM, SGLang, SafeAILab, SpecForge)."""
    config = folder.config
    taps = read_taps(config, receiver.info.num_layers, str(folder.path))
    parallel = MASK in folder.tensors
    return build(folder, config, receiver, taps, parallel=parallel, token=config.get("pard_token"))


def build(
    folder: Folder,
    config: Json,
    receiver: Receiver,
    taps: tuple[int, ...],
    *,
    parallel: bool,
    token: int | None,
) -> Imported:
    """Our checkpoint, given the taps.

    Config: with the layer's sizes and the norms at the top level.
    """
    where, info, theirs = str(folder.path), receiver.info, dict(folder.tensors)
    shape = read_shape(config, where)
    require_fit(shape, config, info, where)
    layer_kinds(config, info.max_position_embeddings, where)
    layers = int(config.get("num_hidden_layers", 1))
    inner = config.get("eagle_config") or {}
    if any(name.endswith("self_attn.q_norm.weight") for name in theirs):
        shape = with_qk_norm(shape)
    if layers > 1 and not parallel:
        raise UserError(f"'{where}' has {layers} layers; our eagle3 has one.")
    notes: list[str] = []
    columns = complete_vocabulary(theirs, receiver, notes)
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
    extra: dict[str, Tensor] = {}
    if parallel:
        extra = read_embeddings(folder, theirs, receiver, token, notes)
        values |= {"own_embedding": EMBEDDING in extra, "num_layers": layers}
        theirs[MASK] = theirs[MASK].reshape(1, 1, -1)
    else:
        values["post_norm_recurrence"] = bool(config.get("norm_output", False))
        receiver.drop_shared(EMBEDDING, theirs, where, notes)
    described = {
        **config,
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": layers,
        "draft_vocab_size": columns,
        "num_aux_hidden_states": len(taps),
        "norm_before_fc": values["norm_before_fc"],
    }
    table = rows(described, info, where, parallel=parallel, first=first_layer(theirs))
    tensors = take(table, theirs, where) | extra
    return Imported("peagle" if parallel else "eagle3", values, tensors, notes)


def complete_vocabulary(theirs: dict[str, Tensor], receiver: Receiver, notes: list[str]) -> int:
    """Add what a file may leave out (the target's LM head, `t2d`).

    Returns the LM head's columns.
    """
    size = receiver.info.vocab_size
    if HEAD not in theirs:
        theirs[HEAD] = receiver.weights.lm_head.to(theirs["fc.weight"].dtype)
        notes.append(f"{HEAD}: none in the folder, the target's is taken")
    columns = int(theirs[HEAD].shape[0])
    if columns == size:
        for name in ("d2t", "t2d"):
            theirs.pop(name, None)
        return columns
    if "d2t" not in theirs:
        raise UserError(
            f"the folder drafts from {columns} tokens of {size} but has no d2t, which says which: "
            f"without it an engine takes the first {columns}, and nearly every draft is wrong."
        )
    theirs["d2t"] = theirs["d2t"].long()
    if "t2d" in theirs:
        theirs["t2d"] = theirs["t2d"].bool()
    else:
        theirs["t2d"] = vocab.to_maps(vocab.to_target_ids(theirs["d2t"]), size)[1]
    return columns


def read_embeddings(
    folder: Folder,
    theirs: dict[str, Tensor],
    receiver: Receiver,
    token: int | None,
    notes: list[str],
) -> dict[str, Tensor]:
    """P-EAGLE's vector of unknown tokens, which is the mask token's row of the embedding.

    The embedding itself is kept too, unless its other rows are the target's.
    """
    embedding = theirs.pop(EMBEDDING, None)
    if token is None:
        raise UserError(
            f"'{folder.path}': config.json names no mask token (pard_token or mask_token_id)."
        )
    own = receiver.weights.embedding
    if embedding is None:
        notes.append(
            f"{EMBEDDING}: none in the folder, the target's row of the mask token is taken"
        )
        return {"mask_embedding": own[token].to(theirs["fc.weight"].dtype).clone()}
    if embedding.shape != own.shape:
        raise UserError(
            f"'{folder.path}': {EMBEDDING} is {list(embedding.shape)}, "
            f"the target's {list(own.shape)}."
        )
    vector, rest = embedding[token].clone(), torch.arange(own.shape[0]) != token
    if torch.equal(own.to(embedding.dtype)[rest], embedding[rest]):
        return {"mask_embedding": vector}
    kept = folder.export.kept.get("mask_row")
    if kept is not None:
        embedding = embedding.clone()
        embedding[token] = torch.tensor(kept, dtype=torch.float64).to(embedding.dtype)
    return {"mask_embedding": vector, EMBEDDING: embedding}
