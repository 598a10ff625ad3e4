"""The layouts of vLLM's library `speculators`: the engine's tensors, described by a config.json with the decoder layer inside.

Read as the library trains: layers with full attention see their whole block, whatever `sliding_window_non_causal` says (vLLM obeys
that key for such layers as well; what we write says it in a way that both read alike).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heads.api.errors import UserError
from inference.export.layouts import dflash, dflash_reading, eagle3, mtp
from inference.export.layouts.base import Checkpoint, Imported, Options, Target, Written, refuse
from inference.export.layouts.folder import Folder, Receiver
from inference.export.layouts.llama import windows

VERSION = "0.9.0"
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
MOVED = (
    "architectures",
    "model_type",
    "draft_vocab_size",
    "target_hidden_size",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "num_aux_hidden_states",
    "dflash_config",
    "block_size",
    "num_target_layers",
    "mask_token_id",
    "pard_token",
    "target_layer_ids",
    "is_causal",
    "sample_from_anchor",
    "dspark_bonus_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "bias",
)
"""Keys of an engine's config.json that are not the decoder layer's."""


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """The library's folder, which vLLM serves too."""
    kind = checkpoint.kind
    if kind == "dflash":
        written = dflash.write(checkpoint, target, options, "vllm")
        return block(checkpoint, written, dflash.flavour(checkpoint.config), target)
    written = eagle3.write(checkpoint, target, options, "vllm")
    layer, rest = divided(written.config)
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in written.tensors.items()}
    own = {
        key: rest[key]
        for key in (*NORMS, "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    }
    own["embed_requires_grad"] = kind == "peagle"
    if kind == "peagle":
        own["mask_token_id"] = rest["mask_token_id"]
    written.config, written.tensors = (
        wrapped(kind, {**layer, "model_type": written.config["model_type"]}, own, written, target),
        tensors,
    )
    return written


NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


def block(checkpoint: Checkpoint, written: Written, kind: str, target: Target) -> Written:
    """The folder of a block drafter."""
    config: Any = checkpoint.config
    if config.mask_token_id < 0:
        raise refuse(
            "its block drafters embed the mask with the target's table, and this one learned a vector of its own",
            "speculators",
            "Train with head.mask_token_id=<an unused token of the target>, or export for vllm.",
        )
    if config.in_block == "causal":
        raise refuse(
            "its full-attention layers are bidirectional inside a block", "speculators", "Export for vllm."
        )
    layer, rest = divided(written.config)
    inner: Mapping[str, Any] = rest.get("dflash_config", rest)
    own = {
        "draft_vocab_size": rest["draft_vocab_size"],
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in inner["target_layer_ids"]],
        "mask_token_id": inner["mask_token_id"],
        "sliding_window_non_causal": True,
        "sample_from_anchor": config.sample_from_anchor,
        "target_hidden_size": None,
    }
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        if key in rest:
            own[key] = rest[key]
    if kind == "dflash2":
        own |= {
            key: inner[key]
            for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        }
    written.config = wrapped(kind, {**layer, "model_type": "qwen3"}, own, written, target)
    return written


def divided(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An engine's config.json as the decoder layer's keys and the drafter's."""
    return {key: value for key, value in config.items() if key not in MOVED}, {
        key: config[key] for key in MOVED if key in config
    }


def wrapped(
    kind: str, layer: dict[str, Any], own: dict[str, Any], written: Written, target: Target
) -> dict[str, Any]:
    """config.json of the library."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": written.speculative["num_speculative_tokens"],
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {
        "name_or_path": target.config.path,
        "architectures": list(getattr(target.described, "architectures", None) or []),
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "architectures": [CLASSES[kind]],
        **own,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "tie_word_embeddings": False,
    }


# --- reading ----------------------------------------------------------------------------------------------------------


def matches(folder: Folder) -> bool:
    """Whether a folder is one of the library's."""
    return "speculators_model_type" in folder.config


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from a folder that the library saved."""
    theirs, where = folder.config, str(folder.path)
    kind, layer = theirs["speculators_model_type"], theirs.get("transformer_layer_config")
    if kind == "mtp":
        return mtp.read(folder, receiver)
    if kind not in CLASSES:
        raise UserError(
            f"'{where}' is a '{kind}' drafter of speculators; we read {', '.join((*CLASSES, 'mtp'))}."
        )
    if not isinstance(layer, dict):
        raise UserError(f"'{where}': config.json has no transformer_layer_config.")
    flat = {**layer, **{key: value for key, value in theirs.items() if key != "transformer_layer_config"}}
    flat["tie_word_embeddings"] = False
    sees = windows(flat, receiver.info.max_position_embeddings, where)
    ids = "eagle_aux_hidden_state_layer_ids" if kind in ("eagle3", "peagle") else "aux_hidden_state_layer_ids"
    if not theirs.get(ids):
        raise UserError(f"'{where}': config.json names no layers of the target ({ids}).")
    taps = tuple(int(number) for number in theirs[ids])
    if kind in ("eagle3", "peagle"):
        return eagle3.build(
            folder, flat, receiver, taps, parallel=kind == "peagle", token=theirs.get("mask_token_id")
        )
    if theirs.get("mask_token_id") is None:
        raise UserError(f"'{where}': config.json names no mask_token_id.")
    causal = sees == {"sliding_attention"} and not theirs.get("sliding_window_non_causal", False)
    if len(sees) > 1:
        raise UserError(
            f"'{where}' mixes sliding and full layers, which see their block differently; ours see it alike."
        )
    found = dflash_reading.build(
        folder, flat, receiver, taps, int(theirs["mask_token_id"]), causal=causal, extra=theirs
    )
    if not causal and not theirs.get("sliding_window_non_causal", False):
        found.notes.append(
            "sliding_window_non_causal is false: the library trained full layers bidirectionally all the same, and so they are "
            "imported; vLLM would run the original folder causally"
        )
    return found
