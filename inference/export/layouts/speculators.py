"""The layouts of vLLM's library `speculators`: config.json contains the decoder layer.

Folders are read in the way that the library trains: layers with full attention see their whole
block, whatever `sliding_window_non_causal` says. vLLM applies that key to such layers too; exported
folders set it so that both give the same result.
"""

from __future__ import annotations

from heads.api.errors import UserError
from inference.export.config import ExportConfig
from inference.export.layouts import base, dflash, eagle3, llama, mtp
from inference.export.layouts.base import IDS, Checkpoint, Imported, Target, Written
from inference.export.layouts.folder import Folder, Json, Receiver

VERSION = "0.9.0"
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
IN_LAYER = ("num_aux_hidden_states", "fc_norm", "norm_output")
"""Keys of an EAGLE-3 or P-EAGLE drafter that vLLM reads beside those of its layer: it takes them
over from the library's own only in part, and not for every kind."""
MARKOV = "markov_rank markov_head_type enable_confidence_head confidence_head_with_markov".split()
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
LOGITS = {"output_multiplier": "scale", "final_logit_softcapping": "cap"}
"""Keys of DFlash 2 about the target's logits that the library lacks, and what they give."""
BLOCK_IDS = "aux_hidden_state_layer_ids"
DRAFTER_KEYS = frozenset(
    (
        "architectures model_type draft_vocab_size target_hidden_size bias eagle_config "
        "num_aux_hidden_states pard_token mask_token_id dflash_config block_size num_target_layers "
        "target_layer_ids is_causal sample_from_anchor dspark_bonus_anchor"
    ).split()
) | {*NORMS, *MARKOV, IDS}
"""Keys of an engine's config.json that do not belong to the decoder layer."""


def write_eagle3(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The library's folder of an EAGLE-3 or P-EAGLE drafter, which vLLM serves too."""
    written = eagle3.write(checkpoint, target, options)
    parallel = eagle3.MASK in written.tensors
    written.tensors = {
        name.replace("midlayer.", "layers.0."): value for name, value in written.tensors.items()
    }
    named = (*NORMS, "draft_vocab_size", "target_hidden_size", IDS)
    own = {key: written.config[key] for key in named} | {"embed_requires_grad": parallel}
    if parallel:
        own["mask_token_id"] = written.config["mask_token_id"]
    engine = written.config
    wrapped = wrap(written, checkpoint.method, own, target)
    wrapped.config["transformer_layer_config"] |= {key: engine[key] for key in IN_LAYER}
    return wrapped


def write_block(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The library's folder of a block drafter, which vLLM serves too."""
    config = checkpoint.config
    written = dflash.write(checkpoint, target, options)
    if config.mask_token_id < 0:
        raise base.refuse(
            "its block drafters embed the mask with the target's table, and this one learned a "
            "vector of its own",
            "speculators",
            f"Train with {dflash.TRAIN_MASK}, or export for vllm.",
        )
    if config.in_block == "causal":
        what = "its full-attention layers are bidirectional inside a block"
        raise base.refuse(what, "speculators", "Export for vllm.")
    described = written.config
    inner = described.get("dflash_config", described)
    lost = [f"{what} ({inner[key]:g})" for key, what in LOGITS.items() if key in inner]
    if lost:
        written.notes.append(dflash.left_out(lost))
    own = {
        "draft_vocab_size": described["draft_vocab_size"],
        "block_size": config.block_size,
        BLOCK_IDS: [layer + 1 for layer in inner["target_layer_ids"]],
        "mask_token_id": inner["mask_token_id"],
        "sliding_window_non_causal": True,
        "sample_from_anchor": config.sample_from_anchor,
        "target_hidden_size": None,
        **{key: described[key] for key in MARKOV if key in described},
        **{key: inner[key] for key in SELECTOR if key in inner},
    }
    return wrap(written, checkpoint.method, own, target)


def wrap(written: Written, method: str, own: Json, target: Target) -> Written:
    """Convert an engine's config.json to the library's. own: the drafter's own keys."""
    engine = written.config
    layer = {key: value for key, value in engine.items() if key not in DRAFTER_KEYS}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": written.speculative["num_speculative_tokens"],
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {
        "name_or_path": target.config.path,
        "architectures": list(getattr(target.described, "architectures", None) or []),
    }
    written.config = {
        "speculators_model_type": method,
        "speculators_version": VERSION,
        "architectures": [CLASSES[method]],
        **own,
        "transformer_layer_config": {**layer, "model_type": engine["model_type"]},
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "tie_word_embeddings": False,
    }
    return written


def matches(folder: Folder) -> bool:
    """Whether the library wrote a folder."""
    return "speculators_model_type" in folder.config


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from a folder that the library saved."""
    theirs, where = folder.config, folder.path
    method, token = theirs["speculators_model_type"], theirs.get("mask_token_id")
    if method == "mtp":
        return mtp.read(folder, receiver)
    if method not in CLASSES:
        known = ", ".join((*CLASSES, "mtp"))
        raise UserError(f"'{where}' is a '{method}' drafter of speculators; we read {known}.")
    if not isinstance(theirs.get("transformer_layer_config"), dict):
        raise UserError(f"'{where}': config.json has no transformer_layer_config.")
    flat = {**folder.flat, "tie_word_embeddings": False}
    flat.pop("transformer_layer_config")
    kinds = llama.layer_kinds(flat, receiver.info.max_position_embeddings, where)
    block = method not in ("eagle3", "peagle")
    key = BLOCK_IDS if block else IDS
    if theirs.get(key):
        taps = tuple(int(number) for number in theirs[key])
    elif block:
        raise UserError(f"'{where}': config.json names no layers of the target ({key}).")
    else:
        taps = eagle3.read_taps({}, receiver.info.num_layers, where)
        receiver.notes.append(
            f"config.json names no layers of the target ({key}): {list(taps)} are taken, which "
            "engines read then"
        )
    if not block:
        parallel = method == "peagle"
        return eagle3.build(folder, flat, receiver, taps, parallel=parallel, token=token)
    if token is None:
        raise UserError(f"'{where}': config.json names no mask_token_id.")
    non_causal = theirs.get("sliding_window_non_causal", False)
    causal = kinds == {"sliding_attention"} and not non_causal
    dflash.require_one_kind(kinds, where)
    found = dflash.build(folder, flat, receiver, taps, int(token), causal=causal, extra=theirs)
    if not causal and not non_causal:
        receiver.notes.append(
            "sliding_window_non_causal is false: the library trained full layers bidirectionally "
            "all the same, and so they are imported; vLLM would run the original folder causally"
        )
    return found
