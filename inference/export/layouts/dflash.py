"""Block drafters (DFlash, DFlash 2, DSpark, Domino, LiLiCorr) of z-lab, DeepSpec and the engines.

All are a stack of Qwen3 layers under the same names, followed by tensors of the method. Layers of
the target are numbered from 0: L is the state after L + 1 layers. A learned mask vector is the
embedding of one token that does not occur in text. DFlash stores it in a separate file
(`mask_embedding.pt`, which vLLM reads); DSpark stores it as that token's row in a copy of the
target's embedding.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from heads.api.checkpoint import build_config
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.block.config import Config
from heads.nn.block.model import BlockModel
from inference.export.config import ExportConfig
from inference.export.layouts import base, llama
from inference.export.layouts.base import Checkpoint, Imported, Target, Written
from inference.export.layouts.folder import EMBEDDING, HEAD, Folder, Json, Receiver, load_plain
from inference.target.settings import logit_cap

MASK_FILE = "mask_embedding.pt"
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "domino": "DFlashDraftModel",
    "lilicorr": "LiLiCorrDraftModel",
}
MARKOV = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
"""Options of a dependency that DSpark has too, and its names for them."""
TEMPERATURES = "confidence_head.temperatures"
OWN = ("mask_embedding", TEMPERATURES)
"""Our tensors that the layouts store elsewhere or not at all."""
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""The names of these tensors in transformers' DFlash assistant."""
DECODER = {theirs: ours for ours, theirs in ENCODER.items()}
MARKS = {
    "markov_head.markov_w1.weight": "dspark",
    "prefix_gru.weight_ih_l0": "domino",
    "candidate_selector.predecessor_codebook": "dflash2",
    "lilicorr.rank_embedding": "lilicorr",
    "encoder.fc.weight": "dflash-assistant",
}
"""A tensor that identifies each layout except plain DFlash's."""
SEQUENTIAL = (
    ("feature_mlp.0.", "feature_norm."),
    ("feature_mlp.1.", "feature_mlp.up_proj."),
    ("feature_mlp.3.", "feature_mlp.down_proj."),
    (".mlp.0.", ".mlp.up_proj."),
    (".mlp.2.", ".mlp.down_proj."),
)
"""Names of a correlator's parts in older folders -> the current names."""
LINEAR = rf"fc|{llama.LINEAR}"
"""See `Layout.linear`."""
MOST_CANDIDATES = 16
"""The limit per slot in both engines, which also require a power of two."""


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    config, inner, theirs = folder.flat, folder.block, folder.tensors
    count = len(base.captured_layers(config, info.num_layers, "vllm"))
    values = {
        "block_size": int(inner["block_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "taps": list(range(1, count + 1)),
        "start_from": "random",
        **llama.sizes_config(llama.read_shape(config, folder.path), info),
        **method_values(config, inner, theirs),
    }
    table = base.own_rows("dflash", values, info, OWN)
    if "encoder.fc.weight" in theirs:
        table = [replace(row, theirs=ENCODER.get(row.theirs, row.theirs)) for row in table]
    spare = (EMBEDDING, HEAD) if values.get("dependency") in MARKOV else (EMBEDDING,)
    return table, dict.fromkeys(spare, (info.vocab_size, info.hidden_size))


def block_model(checkpoint: Checkpoint) -> BlockModel:
    drafter = checkpoint.drafter
    assert isinstance(drafter, BlockModel), f"kind '{checkpoint.kind}' is no block drafter"
    return drafter


def find_rope(checkpoint: Checkpoint, target: Target) -> Json:
    """The rotary parameters: the target's, which block drafters follow."""
    head_dim = block_model(checkpoint).shape.head_dim
    return llama.follow_rope(target, head_dim, checkpoint.info.rope_theta)


def draftable(config: Json) -> tuple[int, str]:
    """See `Layout.draftable`: a block drafts one token fewer than it has slots."""
    inner = {**config, **(config.get("dflash_config") or {})}
    size = int(inner["block_size"]) - 1
    return size, f"blocks that give {size}"


LAYOUTS = tuple(
    base.Layout(name, names, expect, find_rope, most, taps=True, block=True, linear=LINEAR)
    for name, names, most in (
        ("dflash", ("DFlashDraftModel",), draftable),
        ("dflash2", ("DFlash2DraftModel",), draftable),
        ("dspark", ("Qwen3DSparkModel", "DSparkDraftModel"), None),
        ("domino", ("DFlashDraftModel",), draftable),
        ("lilicorr", ("LiLiCorrDraftModel",), draftable),
        ("dflash-assistant", ("MuseGlimmerAssistantModel",), None),
    )
)


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder for `options.engine`; raises `UserError` for options that the engine cannot
    express."""
    config, info, drafter = checkpoint.config, checkpoint.info, block_model(checkpoint)
    require_expressible(checkpoint, options.engine)
    taps, layers, shape = drafter.needs.taps, len(drafter.layers), drafter.shape
    ours, method, learned = checkpoint.tensors, checkpoint.method, config.mask_token_id < 0
    token = target.unused_token(options.mask_token_id) if learned else config.mask_token_id
    block = {
        "mask_token_id": token,
        "target_layer_ids": [tap - 1 for tap in taps],
        "causal": drafter.causal,
    }
    described = {
        "architectures": [ARCHITECTURES[method]],
        "model_type": "qwen3",
        **llama.block_config(shape, info, layers, find_rope(checkpoint, target)),
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "draft_vocab_size": info.vocab_size,
        "block_size": config.block_size,
        "num_target_layers": info.num_layers,
        **own_keys(config, method, block),
    }
    # the candidates of all slots see each other, whatever the slots see
    fewer = drafter.causal and method != "lilicorr"
    speculative = {
        "method": "dspark" if method == "dspark" else "dflash",
        "num_speculative_tokens": draft_length(options.tokens, drafts(config), fewer),
    }
    tensors = {name: value for name, value in ours.items() if name not in OWN}
    written = Written(described, tensors, speculative)
    if TEMPERATURES in ours and not bool((ours[TEMPERATURES] == 1).all()):
        written.kept["confidence_temperatures"] = ours[TEMPERATURES].double().tolist()
        written.notes.append(
            "the temperatures that calibrate the confidence per depth have no place in the layout"
        )
    if config.dependency != "none":
        place_scale(written, target, method)
    if learned:
        place_mask(written, ours["mask_embedding"], token, method, target)
    return written


def place_scale(written: Written, target: Target, method: str) -> None:
    """Write the scale and the cap of the target's logits, to which a dependency's scores are added,
    or a note where the layout has no key for them."""
    scale, cap = base.logit_scale(target.described), logit_cap(target.described)
    lost = []
    if scale != 1.0 and method in ("dspark", "dflash2"):
        place, key = (
            (written.config, "logit_scale")
            if method == "dspark"
            else (written.config["dflash_config"], "output_multiplier")
        )
        place[key] = scale
    elif scale != 1.0:
        lost.append(f"scale ({scale:g})")
    if cap and method == "dflash2":
        written.config["dflash_config"]["final_logit_softcapping"] = cap
    elif cap:
        lost.append(f"cap ({cap:g})")
    if lost:
        written.notes.append(left_out(lost))


def left_out(lost: Sequence[str]) -> str:
    """The note on what an engine does not apply to the target's logits."""
    return (
        f"the engine leaves out the {' and the '.join(lost)} of the target's logits, to which "
        "the drafter's own scores are added: fewer drafts are accepted than measured here"
    )


def own_keys(config: Config, method: str, block: Json) -> Json:
    """Each method's keys: DSpark's at the top level, the others' in `dflash_config`."""
    rank = config.dependency_rank
    if method == "dspark":
        return {
            "mask_token_id": block["mask_token_id"],
            "target_layer_ids": block["target_layer_ids"],
            "is_causal": block["causal"],
            "sample_from_anchor": config.sample_from_anchor,
            "dspark_bonus_anchor": not config.sample_from_anchor,
            "markov_rank": rank,
            "markov_head_type": MARKOV[config.dependency],
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence,
        }
    if method == "domino":
        own = {"projector_type": "domino", "emb_dim": rank, "gru_hidden_dim": rank}
        own |= {"pure_draft_prefix_len": 1, "shift_label": False}
        return {"dflash_config": block | own, "emb_dim": rank}
    if config.convolution:
        block |= {"conv_kernel_size": 2, "conv_group_size": config.conv_group_size}
    if method == "dflash2":
        block |= {"selector_rank": rank, "selector_top_k": config.selector_top_k}
    if method == "lilicorr":
        sizes = config.correlator
        block |= {
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": config.selector_top_k,
            "lilicorr_hidden_size": sizes.size,
            "lilicorr_num_layers": sizes.layers,
            "lilicorr_num_heads": sizes.heads,
            "lilicorr_mlp_ratio": sizes.mlp_ratio,
            "lilicorr_factor_dim": rank,
            "lilicorr_vector_eps": sizes.eps,
            "lilicorr_logit_scale": sizes.scale,
        }
    return {"dflash_config": block | {"sample_from_anchor": False}}


def drafts(config: Config) -> int:
    """The tokens that a block drafts."""
    return config.block_size - (0 if config.sample_from_anchor else 1)


def draft_length(asked: int, depth: int, causal: bool) -> int:
    """Drafts per step: the whole block, or fewer where slots see only earlier ones."""
    if asked and asked != depth and (asked > depth or not causal):
        why = "" if causal else ", no fewer because its slots see each other"
        raise UserError(
            f"export.tokens: this block drafts {depth} tokens per step{why}; given {asked}."
        )
    return asked or depth


NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
OWN_MASK = "embeds the mask with the target's table, and this drafter learned a vector of its own"
TRAIN_MASK = "head.mask_token_id=<an unused token of the target>"


def require_expressible(checkpoint: Checkpoint, engine: str) -> None:
    """Raise `UserError` for options that an engine lacks; the message names the option to train
    with instead."""
    config, dspark = checkpoint.config, checkpoint.method == "dspark"
    sglang, anchor = engine == "sglang", config.sample_from_anchor
    count, layers = config.selector_top_k, checkpoint.info.num_layers
    last = base.without_last(checkpoint.drafter.needs.taps, layers, engine)
    refusals = (
        (bool(last), last, f"head.taps below {layers}, or serve it with vLLM"),
        (
            checkpoint.method == "lilicorr" and (count > MOST_CANDIDATES or count & (count - 1)),
            f"it orders {count} candidates per slot, and the engine takes a power of two of at "
            f"most {MOST_CANDIDATES}",
            f"head.selector_top_k={MOST_CANDIDATES}",
        ),
        (
            anchor and not dspark,
            "it drafts from the root's own slot on (head.sample_from_anchor=true), which only "
            "DSpark does there",
            "head.sample_from_anchor=false, or head=dspark",
        ),
        (
            checkpoint.drafter.needs.taps[0] == 0,
            "it reads the embeddings (tap 0), which have no layer id",
            "head.taps of 1 and more",
        ),
        (
            not sglang and config.dependency in ("gated", "rnn"),
            f"its DSpark has no '{config.dependency}' table",
            "head.dependency=markov, or serve it with SGLang",
        ),
        (
            sglang and config.in_block == "causal",
            "the slots of its blocks see each other in layers without a window",
            "head.in_block=bidirectional, or serve it with vLLM",
        ),
        (
            sglang and dspark and not anchor,
            "its DSpark drafts from the root's slot on",
            "head.sample_from_anchor=true",
        ),
        (sglang and config.mask_token_id < 0, f"it always {OWN_MASK}", TRAIN_MASK),
    )
    for applies, what, instead in refusals:
        if applies:
            raise base.refuse(what, NAMES.get(engine, engine), f"Train with {instead}.")


def place_mask(written: Written, mask: Tensor, token: int, method: str, target: Target) -> None:
    """Store a learned mask vector [H] where vLLM looks for it."""
    written.notes.append(
        f"token {token} stands for the slots of a block; where it is the root itself, the drafter "
        "misreads it"
    )
    if method == "dspark":
        embedding = target.weights.embedding.to(mask.dtype).clone()
        embedding[token] = mask
        written.tensors[EMBEDDING] = embedding
        return
    buffer = io.BytesIO()
    torch.save({"mask_token_id": token, "embedding": mask.contiguous().clone()}, buffer)
    written.files[MASK_FILE] = buffer.getvalue()


def write_assistant(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """transformers' DFlash assistant: plain and bidirectional, with the embedding of a mask
    token."""
    config, described = checkpoint.config, target.described
    if config.mask_token_id < 0:
        raise base.refuse(f"it {OWN_MASK}", "transformers", f"Train with {TRAIN_MASK}.")
    if config.in_block == "causal":
        instead = "Train with head.in_block=bidirectional."
        raise base.refuse("its assistant's blocks are bidirectional", "transformers", instead)
    written = write(checkpoint, target, options)
    inner = written.config.pop("dflash_config")
    written.tensors = {ENCODER.get(name, name): value for name, value in written.tensors.items()}
    special = [f"{name}_token_id" for name in ("bos", "eos", "pad")]
    written.config |= {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "mask_token_id": inner["mask_token_id"],
        "target_layer_ids": inner["target_layer_ids"],
        "sliding_window": described.max_position_embeddings,
        **{name: getattr(described, name, None) for name in special},
    }
    written.speculative |= {"method": "assistant_model", "speculation_type": "dflash"}
    return written


# Reading


def matches(folder: Folder) -> bool:
    """Whether a folder is a block drafter: layers with normed heads after a projection."""
    names = {DECODER.get(name, name) for name in folder.tensors}
    needed = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"}
    return needed <= names and "layers.0.hidden_norm.weight" not in names


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from z-lab's, DeepSpec's or an engine's layout."""
    config, where = folder.config, folder.path
    inner = config.get("dflash_config") or {}
    ids = inner.get("target_layer_ids", config.get("target_layer_ids"))
    token = inner.get("mask_token_id", config.get("mask_token_id"))
    if ids is None or token is None or config.get("block_size") is None:
        raise UserError(
            f"'{where}': config.json lacks target_layer_ids, mask_token_id or block_size."
        )
    layers = config
    if inner.get("use_swa"):  # z-lab's way to declare that all layers slide
        window = inner.get("swa_window_size", config.get("sliding_window"))
        layers = {**config, "layer_types": ["sliding_attention"], "sliding_window": window}
    kinds = llama.layer_kinds(layers, receiver.info.max_position_embeddings, where)
    causal = config.get("is_causal", inner.get("causal"))
    if causal is None:
        require_one_kind(kinds, where)
        causal = kinds == {"sliding_attention"} and not inner.get("use_swa")
    taps = tuple(int(layer) + 1 for layer in ids)
    return build(folder, config, receiver, taps, int(token), causal=bool(causal), extra=inner)


def require_one_kind(kinds: set[str], where: Path) -> None:
    """Raise `UserError` for a mixture of sliding and full layers."""
    if len(kinds) > 1:
        raise UserError(
            f"'{where}' mixes sliding and full layers, which see their block differently; ours "
            "see it alike."
        )


def build(
    folder: Folder,
    config: Json,
    receiver: Receiver,
    taps: tuple[int, ...],
    token: int,
    *,
    causal: bool,
    extra: Json,
) -> Imported:
    """Our checkpoint, given taps, mask token and attention. extra: holds the keys of the method."""
    where, info = folder.path, receiver.info
    shape = llama.read_shape(config, where)
    llama.require_fit(shape, config, info, where, scaled=True)
    llama.require_same_rotations(shape, config, receiver.weights.rotary, where)
    base.require_taps(taps, info.num_layers, where)
    theirs = {named_today(name): value for name, value in folder.tensors.items()}
    values: Json = {
        "block_size": int(config["block_size"]),
        "in_block": "causal" if causal else "bidirectional",
        "num_layers": int(config["num_hidden_layers"]),
        "taps": list(taps),
        "start_from": "random",
        "carry_root": False,
        **llama.sizes_config(shape, info),
        **method_values(config, extra, theirs),
    }
    mask = take_mask(folder, theirs, receiver, token)
    values["mask_token_id"] = token if mask is None else -1
    receiver.drop_shared(HEAD, theirs, where)
    offsets = theirs.pop("d2t", None)
    theirs.pop("t2d", None)
    if offsets is not None and bool(offsets.any()):
        raise UserError(
            f"'{where}' drafts from a reduced vocabulary, which our block drafters do not."
        )
    own: Config = build_config("dflash", values)
    found = base.take(base.own_rows("dflash", values, info, OWN), theirs, where)
    if mask is not None:
        found["mask_embedding"] = mask
    if own.confidence:
        kept = folder.export.kept.get("confidence_temperatures", [1.0] * drafts(own))
        found[TEMPERATURES] = torch.tensor(kept, dtype=found["confidence_head.proj.weight"].dtype)
    return Imported("dflash", values, found)


def named_today(name: str) -> str:
    """The current name of a tensor that transformers or older folders name differently."""
    if name.startswith("lilicorr."):
        for old, new in SEQUENTIAL:
            name = name.replace(old, new)
    return DECODER.get(name, name)


def method_values(config: Json, extra: Json, theirs: Mapping[str, Tensor]) -> Json:
    """The values of our configuration that follow from a folder's extra tensors and keys."""
    markov = theirs.get("markov_head.markov_w1.weight")
    gru = theirs.get("prefix_gru.weight_hh_l0")
    codebook = theirs.get("candidate_selector.predecessor_codebook")
    anchored = extra.get("sample_from_anchor", markov is not None)
    values: Json = {"sample_from_anchor": bool(config.get("sample_from_anchor", anchored))}
    if markov is not None:
        named = {name: ours for ours, name in MARKOV.items()}
        kind = str(config.get("markov_head_type", "vanilla"))
        if kind not in named:
            raise UserError(
                f"a DSpark drafter with markov_head_type '{kind}' is none of {', '.join(named)}."
            )
        values |= {"dependency": named[kind], "dependency_rank": int(markov.shape[1])}
    if gru is not None:
        if extra.get("shift_label") or int(extra.get("pure_draft_prefix_len", 1)) != 1:
            raise UserError(
                "a Domino drafter with shift_label or pure_draft_prefix_len other than 1 is not "
                "ours."
            )
        values |= {"dependency": "gru", "dependency_rank": int(gru.shape[1])}
    both = {**config, **extra}
    if codebook is not None:
        values |= {
            "dependency": "selector",
            "dependency_rank": int(codebook.shape[1]),
            "selector_top_k": int(both.get("selector_top_k", 16)),
        }
    if "lilicorr.rank_embedding" in theirs:
        values |= correlator_values(both)
    if "layers.0.attention_conv.base_kernel" in theirs:
        group = int(both.get("conv_group_size", 16))
        values |= {"convolution": True, "conv_group_size": group}
    if "confidence_head.proj.weight" in theirs:
        wide = theirs["confidence_head.proj.weight"].shape[1] - theirs["norm.weight"].shape[0]
        if wide != values.get("dependency_rank", 0):
            raise UserError("a confidence head that does not read the Markov table is not ours.")
        values["confidence"] = True
    return values


def correlator_values(config: Json) -> Json:
    """A folder's keys of LiLiCorr as values of our configuration. Raises `UserError` where one is
    missing; two of them change no tensor's shape."""
    named = {
        "selector_top_k": "candidate_topk",
        "dependency_rank": "factor_dim",
        "size": "hidden_size",
        "layers": "num_layers",
        "heads": "num_heads",
        "mlp_ratio": "mlp_ratio",
        "scale": "logit_scale",
        "eps": "vector_eps",
    }
    missing = [f"lilicorr_{name}" for name in named.values() if f"lilicorr_{name}" not in config]
    if missing:
        raise UserError(f"a LiLiCorr drafter's dflash_config lacks {', '.join(missing)}.")
    found = {ours: config[f"lilicorr_{name}"] for ours, name in named.items()}
    outer = {name: found.pop(name) for name in ("selector_top_k", "dependency_rank")}
    return {"dependency": "lilicorr", **outer, "correlator": found}


def take_mask(
    folder: Folder, theirs: dict[str, Tensor], receiver: Receiver, token: int
) -> Tensor | None:
    """The mask's own vector [H], or None where it is the target's embedding of `token`."""
    embedding, file = theirs.pop(EMBEDDING, None), folder.path / MASK_FILE
    if file.is_file():
        state = load_plain(file)
        vector = state.get("embedding") if isinstance(state, dict) else state
        if not isinstance(vector, Tensor) or vector.numel() != receiver.info.hidden_size:
            raise UserError(f"'{file}' does not hold one embedding of the target's width.")
        return vector.reshape(-1).clone()
    token = base.require_token(token, receiver.info.vocab_size, folder.path)
    if embedding is None:
        return None
    if receiver.is_shared(EMBEDDING, embedding):
        receiver.notes.append(f"{EMBEDDING}: a copy of the target's, left out")
        return None
    if not receiver.is_shared_but(token, embedding):
        raise UserError(
            f"'{folder.path}' has an embedding of its own; our block drafters share the target's "
            "(all rows but the mask token's must be equal). Was it made for this target?"
        )
    return embedding[token].clone()
