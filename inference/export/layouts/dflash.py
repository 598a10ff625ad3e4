"""Block drafters: DFlash, DFlash 2, DSpark and Domino, as z-lab, DeepSpec and the engines lay them out.

All are a stack of Qwen3 layers under the same names, with tensors of their own behind it. Layers of the target are numbered from 0:
L is the state after L + 1 layers. A learned mask vector is the embedding of one token that text does not hold: beside DFlash in a
file of its own (`mask_embedding.pt`, which vLLM reads), in DSpark as that token's row in a copy of the target's embedding.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import build_config
from heads.api.errors import UserError
from heads.nn.blocks import LayerShape
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
    followed_rope,
    layer_rows,
    read_shape,
    require_fit,
    sizes_config,
    with_qk_norm,
)

MASK_FILE = "mask_embedding.pt"
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "domino": "DFlashDraftModel",
}
MARKOV = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
"""Our dependencies that are DSpark's, and what it calls them."""
TEMPERATURES = "confidence_head.temperatures"


def flavour(config: Any) -> str:
    """Which of the four a configuration of ours is, or what no engine has: dflare (a mixture of taps per layer), treeflash (states
    conditioned on the parent), or mixed (parts of several).
    """
    if config.layer_fusion:
        return "dflare"
    if config.dependency == "parent":
        return "treeflash"
    if config.dependency in MARKOV:
        return "mixed" if config.convolution else "dspark"
    if config.dependency == "gru":
        return "mixed" if config.convolution or config.confidence else "domino"
    if (config.dependency == "selector") != config.convolution or config.confidence:
        return "mixed"
    return "dflash2" if config.convolution else "dflash"


def rows(config: Any, shape: LayerShape, layers: int, taps: int, vocabulary: int) -> list[Row]:
    """The tensors of a block drafter of our configuration, without mask vector and temperatures."""
    hidden, rank = shape.hidden_size, config.dependency_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.dependency in MARKOV:
        shapes |= {
            "markov_head.markov_w1.weight": (vocabulary, rank),
            "markov_head.markov_w2.weight": (vocabulary, rank),
        }
    if config.dependency == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (rank, hidden + rank),
            "markov_head.gate_proj.bias": (rank,),
        }
    if config.dependency == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config.confidence:
        wide = hidden + (rank if config.dependency in MARKOV else 0)
        shapes |= {"confidence_head.proj.weight": (1, wide), "confidence_head.proj.bias": (1,)}
    if config.dependency == "gru":
        shapes |= {"prefix_gru.weight_ih_l0": (3 * rank, hidden), "prefix_gru.weight_hh_l0": (3 * rank, rank)}
        shapes |= {"embed_proj.0.weight": (rank, hidden + rank), "embed_proj.2.weight": (vocabulary, rank)}
    if config.dependency == "selector":
        shapes |= {
            f"candidate_selector.{name}_codebook": (vocabulary, rank) for name in ("predecessor", "successor")
        }
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    found = [Row(name, name, dims) for name, dims in shapes.items()]
    for index in range(layers):
        prefix = f"layers.{index}."
        found += layer_rows(prefix, prefix, shape)
        for part in ("attention_conv", "mlp_conv") if config.convolution else ():
            groups = 4 * (hidden // config.conv_group_size)
            found.append(Row(f"{prefix}{part}.base_kernel", f"{prefix}{part}.base_kernel", (2, 2, hidden)))
            name = f"{prefix}{part}.kernel_projection.weight"
            found.append(Row(name, name, (groups, hidden)))
    return found


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """The folder for `engine`; raises `UserError` for what it cannot express."""
    config, info = checkpoint.config, checkpoint.info
    drafter: Any = checkpoint.drafter
    kind = flavour(config)
    require_expressible(checkpoint, kind, engine)
    shape: LayerShape = drafter.shape
    taps, layers = drafter.needs.taps, len(drafter.layers)
    ours = checkpoint.tensors
    left = ("mask_embedding", TEMPERATURES)
    tensors = give(rows(config, with_qk_norm(shape), layers, len(taps), info.vocab_size), ours, left)
    token = config.mask_token_id if config.mask_token_id >= 0 else target.unused_token(options.mask_token_id)
    described: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "qwen3",
        **block_config(shape, info, layers, followed_rope(target, shape.head_dim, info.rope_theta)),
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "draft_vocab_size": info.vocab_size,
        "block_size": config.block_size,
        "num_target_layers": info.num_layers,
    }
    block = {"mask_token_id": token, "target_layer_ids": [tap - 1 for tap in taps], "causal": drafter.causal}
    described |= own_keys(config, kind, block)
    depth = config.block_size - (0 if config.sample_from_anchor else 1)
    tokens = draft_length(options.tokens, depth, drafter.causal)
    written = Written(
        described,
        tensors,
        {"method": "dspark" if kind == "dspark" else "dflash", "num_speculative_tokens": tokens},
    )
    if TEMPERATURES in ours and not bool((ours[TEMPERATURES] == 1).all()):
        written.kept["confidence_temperatures"] = ours[TEMPERATURES].double().tolist()
        written.notes.append(
            "the temperatures that calibrate the confidence per depth have no place in the layout"
        )
    if config.mask_token_id < 0:
        place_mask(written, ours["mask_embedding"], token, kind, target)
    return written


def own_keys(config: Any, kind: str, block: dict[str, Any]) -> dict[str, Any]:
    """config.json's keys of each flavour. DSpark's stand at the top level, the others' inside `dflash_config`."""
    if kind == "dspark":
        return {
            "mask_token_id": block["mask_token_id"],
            "target_layer_ids": block["target_layer_ids"],
            "is_causal": block["causal"],
            "sample_from_anchor": config.sample_from_anchor,
            "dspark_bonus_anchor": not config.sample_from_anchor,
            "markov_rank": config.dependency_rank,
            "markov_head_type": MARKOV[config.dependency],
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence,
        }
    if kind == "dflash2":
        block |= {
            "conv_kernel_size": 2,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.dependency_rank,
            "selector_top_k": config.selector_top_k,
        }
    if kind == "domino":
        rank = config.dependency_rank
        block |= {
            "projector_type": "domino", "emb_dim": rank, "gru_hidden_dim": rank, "pure_draft_prefix_len": 1, "shift_label": False,
        }  # fmt: skip
        return {"dflash_config": block, "emb_dim": rank}
    return {"dflash_config": block | {"sample_from_anchor": False}}


def draft_length(asked: int, depth: int, causal: bool) -> int:
    """Drafts per step: all of the block's, since slots that see each other are trained together; fewer where they do not."""
    if not asked or asked == depth:
        return depth
    if asked > depth or not causal:
        why = "" if causal else ", no fewer because its slots see each other"
        raise UserError(f"export.tokens: this block drafts {depth} tokens per step{why}; given {asked}.")
    return asked


def require_expressible(checkpoint: Checkpoint, kind: str, engine: str) -> None:
    """Raise `UserError`, naming the option to train with instead, for what an engine lacks."""
    config, name = checkpoint.config, {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    if kind == "dflare":
        raise refuse(
            "no engine mixes the taps per layer (head.layer_fusion)",
            name,
            "Train with head.layer_fusion=false.",
        )
    if kind == "treeflash":
        raise refuse(
            "no engine conditions a slot's state on its parent (head.dependency=parent)", name,
            "Train with head.dependency=markov, gru, selector or none.",
        )  # fmt: skip
    if kind == "mixed":
        raise refuse(
            "it mixes parts of several methods (dependency, convolution, confidence) that engines know in fixed sets only", name,
            "Train one of head=dflash, dflash2, dspark, domino.",
        )  # fmt: skip
    if config.sample_from_anchor and kind != "dspark":
        raise refuse(
            "it drafts from the root's own slot on (head.sample_from_anchor=true), which only DSpark does there", name,
            "Train with head.sample_from_anchor=false, or head=dspark.",
        )  # fmt: skip
    if checkpoint.drafter.needs.taps[0] == 0:
        raise refuse(
            "it reads the embeddings (tap 0), which have no layer id",
            name,
            "Train with head.taps of 1 and more.",
        )
    if engine == "vllm" and kind == "domino":
        raise refuse("it has no Domino", name, "Serve it with SGLang.")
    if engine == "vllm" and config.dependency in ("gated", "rnn"):
        raise refuse(
            f"its DSpark has no '{config.dependency}' table", name,
            "Train with head.dependency=markov, or serve it with SGLang.",
        )  # fmt: skip
    if engine == "sglang" and config.mask_token_id < 0:
        raise refuse(
            "it always embeds the mask with the target's table, and this drafter learned a vector of its own", name,
            "Train with head.mask_token_id=<an unused token of the target>.",
        )  # fmt: skip


def place_mask(written: Written, mask: Tensor, token: int, kind: str, target: Target) -> None:
    """Put a learned mask vector [H] where vLLM looks for it."""
    written.notes.append(
        f"token {token} stands for the slots of a block; where it is the root itself, the drafter misreads it"
    )
    if kind == "dspark":
        embedding = target.weights.embedding.to(mask.dtype).clone()
        embedding[token] = mask
        written.tensors["embed_tokens.weight"] = embedding
        return
    buffer = io.BytesIO()
    torch.save({"mask_token_id": token, "embedding": mask.contiguous().clone()}, buffer)
    written.files[MASK_FILE] = buffer.getvalue()


# --- reading ----------------------------------------------------------------------------------------------------------


def matches(folder: Folder) -> bool:
    """Whether a folder is a block drafter: a stack of layers with normed heads behind a projection of features."""
    names = set(folder.tensors)
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
    kinds = config.get("layer_types") or []
    causal = config.get("is_causal", inner.get("causal"))
    sliding = "sliding_attention" in kinds or inner.get("use_swa")
    return build(
        folder, config, receiver, tuple(int(layer) + 1 for layer in ids), int(token),
        causal=bool(causal) if causal is not None else False, sliding=bool(sliding), extra=inner,
    )  # fmt: skip


def build(
    folder: Folder, config: Mapping[str, Any], receiver: Receiver, taps: tuple[int, ...], token: int, *, causal: bool,
    sliding: bool, extra: Mapping[str, Any],
) -> Imported:  # fmt: skip
    """Our checkpoint, once the dialect is settled. extra: where the keys of a flavour stand."""
    where, info = str(folder.path), receiver.info
    if sliding:
        raise UserError(
            f"'{where}' has sliding windows in its layers; our block drafters see the whole context."
        )
    shape = read_shape(config, where)
    require_fit(shape, config, info, where, scaled=True)
    if taps[0] < 0 or taps[-1] > info.num_layers or list(taps) != sorted(set(taps)):
        raise UserError(
            f"'{where}' reads layers {list(taps)}, the target has {info.num_layers}. It was made for another target."
        )
    theirs = dict(folder.tensors)
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
