"""Block drafters: DFlash, DFlash 2, DSpark and Domino, as z-lab, DeepSpec and the engines lay them out.

All are a stack of Qwen3 layers under the same names, with tensors of their own behind it. Layers of the target are numbered from 0:
L is the state after L + 1 layers. A learned mask vector is the embedding of one token that text does not hold: beside DFlash in a
file of its own (`mask_embedding.pt`, which vLLM reads), in DSpark as that token's row in a copy of the target's embedding.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.nn.blocks import LayerShape
from inference.export.layouts.base import (
    Checkpoint,
    Options,
    Row,
    Target,
    Written,
    give,
    refuse,
)
from inference.export.layouts.llama import (
    block_config,
    followed_rope,
    layer_rows,
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
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""What transformers' DFlash assistant calls these tensors."""


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
    if engine == "sglang" and config.in_block == "causal":
        raise refuse(
            "the slots of its blocks see each other in layers without a window",
            name,
            "Train with head.in_block=bidirectional, or serve it with vLLM.",
        )
    if engine == "sglang" and kind == "dspark" and not config.sample_from_anchor:
        raise refuse(
            "its DSpark drafts from the root's slot on", name, "Train with head.sample_from_anchor=true."
        )
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


def write_assistant(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """transformers' DFlash assistant, the one block drafter it has: plain, bidirectional, with the target's mask."""
    config = checkpoint.config
    if config.mask_token_id < 0:
        raise refuse(
            "it embeds the mask with the target's table, and this drafter learned a vector of its own",
            "transformers",
            "Train with head.mask_token_id=<an unused token of the target>.",
        )
    if config.in_block == "causal":
        raise refuse(
            "its assistant's blocks are bidirectional",
            "transformers",
            "Train with head.in_block=bidirectional.",
        )
    written = write(checkpoint, target, options, "vllm")
    inner = written.config.pop("dflash_config")
    written.tensors = {ENCODER.get(name, name): value for name, value in written.tensors.items()}
    described = target.described
    written.config |= {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "mask_token_id": inner["mask_token_id"],
        "target_layer_ids": inner["target_layer_ids"],
        "sliding_window": described.max_position_embeddings,
        **{
            f"{name}_token_id": getattr(described, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
        },
    }
    written.speculative |= {"method": "assistant_model", "speculation_type": "dflash"}
    return written
