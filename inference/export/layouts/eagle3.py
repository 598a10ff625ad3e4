"""EAGLE-3, EAGLE-3.1 and P-EAGLE: the layout of vLLM, SGLang, SafeAILab and SpecForge.

One folder serves both engines: vLLM reads the layers at the top level of config.json (L is the
state after L layers), SGLang those inside `eagle_config` (L is the state after L + 1 layers). `d2t`
holds offsets. A P-EAGLE drafter's vector for unknown tokens is stored as the embedding of one token
that does not occur in text, in a copy of the target's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import vocab
from heads.nn.feature.base import layer_shape
from inference.export.config import ExportConfig
from inference.export.layouts import base, llama
from inference.export.layouts.base import IDS, Checkpoint, Imported, Target, Written
from inference.export.layouts.folder import EMBEDDING, HEAD, Folder, Json, Receiver

MASK = "mask_hidden"
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")
"""Keys of config.json that name P-EAGLE's mask token, as engines look for them."""
VLLM_ONLY = ("norm_before_residual", "norm_before_fc", "qk_norm")
"""Options that SGLang lacks."""


def rows(
    config: Json, info: TargetInfo, where: Path, *, parallel: bool, first: str
) -> list[base.TensorRow]:
    """The tensors of an EAGLE-3 (parallel: P-EAGLE) drafter by its config.json, without its
    embedding. first: the prefix of their fusing layer."""
    columns = int(config.get("draft_vocab_size") or info.vocab_size)
    count = int(config.get("num_aux_hidden_states") or len(config.get(IDS) or (1, 2, 3)))
    values = {
        "num_layers": int(config["num_hidden_layers"]),
        "taps": list(range(1, count + 1)),
        "tap_norm": bool(config.get("fc_norm")),
        "norm_before_fc": bool(config.get("norm_before_fc")),
        "qk_norm": config.get("model_type") == "qwen3",
        "draft_vocab_size": 0 if columns == info.vocab_size else columns,
        **llama.sizes_config(llama.read_shape(config, where), info),
    }
    own = "layers.0." if parallel else "midlayer."
    left = ("mask_embedding",) if parallel else ("mask_embedding", MASK)
    table = base.own_rows("peagle", values, info, left)
    return [
        base.TensorRow(
            row.ours.replace("layers.0.", own), row.ours.replace("layers.0.", first), row.shape
        )
        for row in table
    ]


def expect(folder: Folder, info: TargetInfo, *, parallel: bool) -> base.Expected:
    """See `Layout.tensors`."""
    config, first = folder.flat, first_layer(folder.tensors)
    table = rows(config, info, folder.path, parallel=parallel, first=first)
    embedding = (info.vocab_size, info.hidden_size)
    whole = config.get("draft_vocab_size") in (None, 0, info.vocab_size)
    optional = ("t2d", HEAD) if whole else ("t2d",)
    spare = {row.theirs: row.shape for row in table if row.theirs in optional}
    table = [row for row in table if row.theirs not in spare]
    if parallel:
        table += base.same_names({EMBEDDING: embedding})
    return table, spare | {EMBEDDING: embedding}


CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
"""vLLM puts "Eagle3" before any other name of an EAGLE-3 head."""
LAYOUTS = tuple(
    base.Layout(
        name,
        (*CLASSES, own),
        partial(expect, parallel=parallel),
        taps=True,
        linear=rf"fc|midlayer\.(self_attn|mlp)\.\w+_proj|{llama.LINEAR}",
    )
    for name, own, parallel in (
        ("eagle3", "Eagle3DraftModel", False),
        ("peagle", "PEagleDraftModel", True),
    )
)


def first_layer(theirs: Mapping[str, Tensor]) -> str:
    """The prefix of the fusing layer's tensors."""
    return "midlayer." if "midlayer.hidden_norm.weight" in theirs else "layers.0."


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder of an EAGLE-3 or P-EAGLE drafter."""
    config, info, drafter = checkpoint.config, checkpoint.info, checkpoint.drafter
    ours, taps = checkpoint.tensors, drafter.needs.taps
    parallel = MASK in ours
    shape, layers = layer_shape(config, info), len(getattr(drafter, "layers", [None]))
    odd = next((name for name in VLLM_ONLY if getattr(config, name)), "")
    if odd and options.engine == "sglang":
        instead = f"Train with head.{odd}=false, or serve it with vLLM."
        raise base.refuse(f"it lacks head.{odd}", "SGLang", instead)
    if taps[0] == 0:
        what = "it reads the embeddings (tap 0), which has no number among SGLang's layer ids"
        raise base.refuse(what, "an engine", "Train with head.taps of 1 and more.")
    if reason := base.without_last(taps, info.num_layers, options.engine):
        instead = f"Train with head.taps below {info.num_layers}, or serve it with vLLM."
        raise base.refuse(reason, "SGLang", instead)
    check_vocabulary(ours, info.vocab_size)
    described = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        **llama.block_config(shape, info, layers, base.own_rope(checkpoint, target)),
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
    table = rows(described, info, checkpoint.folder, parallel=parallel, first=first)
    tensors = base.give(table, ours, left=("mask_embedding", EMBEDDING) if parallel else ())
    tokens = options.tokens or (config.depths if parallel else max(base.CHAIN, config.ttt_steps))
    written = Written(described, tensors, {"method": "eagle3", "num_speculative_tokens": tokens})
    if parallel:
        written.speculative["parallel_drafting"] = True
        place_mask(written, ours, target, target.unused_token(options.mask_token_id))
    return written


def place_mask(written: Written, ours: Mapping[str, Tensor], target: Target, token: int) -> None:
    """Store P-EAGLE's vector of unknown tokens as the embedding of `token`."""
    mask, own = ours["mask_embedding"], ours.get(EMBEDDING)
    embedding = (target.weights.embedding.to(mask.dtype) if own is None else own).clone()
    if own is not None:
        written.kept["mask_row"] = own[token].double().tolist()
    embedding[token] = mask
    written.tensors[EMBEDDING] = embedding
    written.config |= {"pard_token": token, "mask_token_id": token}
    written.notes.append(
        f"token {token} stands for tokens that are not known yet; where text holds it, the drafter "
        "misreads it"
    )


def check_vocabulary(tensors: Mapping[str, Tensor], size: int) -> None:
    """Raise `UserError` unless `d2t` maps to ascending ids, and `t2d` marks the same tokens."""
    if "d2t" not in tensors:
        return
    ids, known = vocab.to_target_ids(tensors["d2t"]), tensors.get("t2d")
    fault = ""
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        fault = "d2t does not hold offsets to ascending token ids of the target"
    elif known is not None and not torch.equal(known.bool(), vocab.to_maps(ids, size)[1]):
        fault = "t2d and d2t name different tokens"
    if fault:
        raise UserError(f"{fault}: the draft vocabulary is damaged. Train it again.")


def matches(folder: Folder) -> bool:
    """Whether a folder is EAGLE-3 or P-EAGLE: its first layer normalises the feature."""
    return any(f"{name}hidden_norm.weight" in folder.tensors for name in ("midlayer.", "layers.0."))


def read_taps(config: Json, layers: int, where: Path) -> tuple[int, ...]:
    """The layers that a folder reads. Raises `UserError` where its two lists disagree. Where a
    folder names none, both engines read the same three layers."""
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    above = [layer + 1 for layer in nested or ()]
    if top and nested and above != list(top):
        raise UserError(
            f"'{where}': config.json names layers {top} at the top level (states after so many "
            f"layers) and {nested} inside eagle_config (one less), which is not the same. Correct "
            f"the wrong one; right pairs look like {top} and {[layer - 1 for layer in top]}."
        )
    found = tuple(top or above or sorted({2, layers // 2, layers - 3}))
    base.require_taps(found, layers, where)
    return found


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from a folder in an engine's layout (vLLM, SGLang, SafeAILab, SpecForge)."""
    config = folder.config
    taps = read_taps(config, receiver.info.num_layers, folder.path)
    parallel = MASK in folder.tensors
    token = next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)
    return build(folder, config, receiver, taps, parallel=parallel, token=token)


def build(
    folder: Folder,
    config: Json,
    receiver: Receiver,
    taps: tuple[int, ...],
    *,
    parallel: bool,
    token: int | None,
) -> Imported:
    """Our checkpoint, given the taps. config: has the layer's sizes and the norms at the top
    level."""
    where, info, theirs = folder.path, receiver.info, dict(folder.tensors)
    shape = llama.read_shape(config, where)
    llama.require_fit(shape, config, info, where)
    llama.layer_kinds(config, info.max_position_embeddings, where)
    layers = int(config.get("num_hidden_layers", 1))
    inner = config.get("eagle_config") or {}
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in theirs)
    if layers > 1 and not parallel:
        raise UserError(f"'{where}' has {layers} layers; our eagle3 has one.")
    columns = complete_vocabulary(theirs, receiver)
    values: Json = {
        "taps": list(taps),
        "tap_norm": bool(config.get("fc_norm", False)),
        "norm_before_fc": bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "qk_norm": qk_norm,
        **llama.sizes_config(shape, info),
    }
    if columns != info.vocab_size:
        values["draft_vocab_size"] = columns
        check_vocabulary(theirs, info.vocab_size)
    extra: dict[str, Tensor] = {}
    if parallel:
        extra = read_embeddings(folder, theirs, receiver, token)
        values |= {"own_embedding": EMBEDDING in extra, "num_layers": layers}
        theirs[MASK] = theirs[MASK].reshape(1, 1, -1)
    else:
        values["post_norm_recurrence"] = bool(config.get("norm_output", False))
        receiver.drop_shared(EMBEDDING, theirs, where)
    described = config | {
        "model_type": "qwen3" if qk_norm else "llama",
        "num_hidden_layers": layers,
        "draft_vocab_size": columns,
        "num_aux_hidden_states": len(taps),
        "norm_before_fc": values["norm_before_fc"],
    }
    table = rows(described, info, where, parallel=parallel, first=first_layer(theirs))
    tensors = base.take(table, theirs, where) | extra
    return Imported("peagle" if parallel else "eagle3", values, tensors)


def complete_vocabulary(theirs: dict[str, Tensor], receiver: Receiver) -> int:
    """Add the tensors that a file may leave out (LM head, `t2d`); returns the columns of the LM
    head."""
    size = receiver.info.vocab_size
    if HEAD not in theirs:
        theirs[HEAD] = receiver.weights.lm_head.to(theirs["fc.weight"].dtype)
        receiver.notes.append(f"{HEAD}: none in the folder, the target's is taken")
    columns = int(theirs[HEAD].shape[0])
    offsets, known = theirs.pop("d2t", None), theirs.pop("t2d", None)
    if offsets is not None and len(offsets) == columns:
        offsets = sort_vocabulary(offsets.long(), theirs, receiver)
    if columns == size:
        return columns
    if offsets is None:
        raise UserError(
            f"the folder drafts from {columns} tokens of {size} but has no d2t, which says which: "
            f"without it an engine takes the first {columns}, and nearly every draft is wrong."
        )
    theirs["d2t"] = offsets.long()
    check_vocabulary({"d2t": theirs["d2t"]}, size)  # before its tokens are marked
    marked = vocab.to_maps(vocab.to_target_ids(theirs["d2t"]), size)[1] if known is None else known
    theirs["t2d"] = marked.bool()
    return columns


def sort_vocabulary(offsets: Tensor, theirs: dict[str, Tensor], receiver: Receiver) -> Tensor:
    """A file's `d2t` in ascending order of token ids, which engines do not require, with the rows
    of the LM head in the same order."""
    ids = vocab.to_target_ids(offsets)
    if bool((ids.diff() >= 0).all()):
        return offsets
    order = ids.argsort()
    theirs[HEAD] = theirs[HEAD][order]
    receiver.notes.append(f"d2t: its token ids do not ascend; they and the rows of {HEAD} do now")
    return ids[order] - torch.arange(len(ids))


def read_embeddings(
    folder: Folder, theirs: dict[str, Tensor], receiver: Receiver, token: int | None
) -> dict[str, Tensor]:
    """P-EAGLE's vector for unknown tokens, which is the mask token's row of the embedding. The
    embedding is kept as well, unless its other rows are the target's."""
    embedding, own = theirs.pop(EMBEDDING, None), receiver.weights.embedding
    if token is None:
        raise UserError(
            f"'{folder.path}': config.json names no mask token ({', '.join(MASK_TOKENS)})."
        )
    token = base.require_token(token, receiver.info.vocab_size, folder.path)
    if embedding is None:
        receiver.notes.append(
            f"{EMBEDDING}: none in the folder, the target's row of the mask token is taken"
        )
        return {"mask_embedding": own[token].to(theirs["fc.weight"].dtype).clone()}
    if embedding.shape != own.shape:
        sizes = f"{list(embedding.shape)}, the target's {list(own.shape)}"
        raise UserError(f"'{folder.path}': {EMBEDDING} is {sizes}.")
    found = {"mask_embedding": embedding[token].clone()}
    if receiver.is_shared_but(token, embedding):
        return found
    kept = folder.export.kept.get("mask_row")
    if kept is not None:
        embedding = embedding.clone()
        embedding[token] = torch.tensor(kept, dtype=torch.float64).to(embedding.dtype)
    return found | {EMBEDDING: embedding}
