"""Small language models: Hugging Face checkpoints with the target's vocabulary.

Llama, Qwen2 or Qwen3. Engines use them directly as `draft_model`, transformers as
`assistant_model`. A PARD drafter is one that names its mask token. Tensors that are shared with the
target are written out, because a separate language model has to be complete.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn.blocks import LayerShape
from heads.nn.small_lm.model import SmallLM
from inference.export.config import ExportConfig
from inference.export.layouts import base, llama
from inference.export.layouts.base import Checkpoint, Imported, Target, Written
from inference.export.layouts.folder import Folder, Json, Receiver
from inference.target.settings import logit_cap

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
READABLE = (*FAMILIES, "mistral")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTPUT_BIAS = "model.layers.{}.self_attn.o_proj.bias"
"""A bias that Llama's and Qwen3's layers have besides those of queries, keys and values. Our layers
do not have it."""
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
HEAD_SCALE = "head_scale"
"""The key in the export's notes of the factor on a copy of the target's LM head."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a folder with a tokenizer has one. Without any, transformers makes an empty
tokenizer for some families."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_sizes(folder: Folder) -> tuple[LayerShape, int]:
    """The layers' sizes, with the norms and biases of the model's family, and their number."""
    config = folder.flat
    shape, family = llama.read_shape(config, folder.path), config["model_type"]
    bias, layers = family == "qwen2" or shape.attention_bias, int(config["num_hidden_layers"])
    return replace(shape, qk_norm=family == "qwen3", attention_bias=bias), layers


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    config, (shape, layers) = folder.flat, read_sizes(folder)
    tied = bool(config.get("tie_word_embeddings"))
    values = {"num_layers": layers, **asdict(shape), "tie_embeddings": tied}
    info = replace(info, vocab_size=int(config["vocab_size"]))
    table = base.own_rows("distilled", values, info)
    if shape.attention_bias and config["model_type"] != "qwen2":
        names = map(OUTPUT_BIAS.format, range(layers))
        table += base.same_names(dict.fromkeys(names, (shape.hidden_size,)))
    return table, {}


def language_model(checkpoint: Checkpoint) -> SmallLM:
    drafter = checkpoint.drafter
    assert isinstance(drafter, SmallLM), f"kind '{checkpoint.kind}' is no language model"
    return drafter


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder of a `SmallLM`, a model that the engines and transformers load by itself."""
    drafter, info, ours = language_model(checkpoint), checkpoint.info, checkpoint.tensors
    config, shape, layers = drafter.config, drafter.shape, len(drafter.model.layers)
    own, tied = not config.share_embeddings, bool(config.tie_embeddings)
    tensors = {name: value for name, value in ours.items() if name != "pard_token"}
    written = Written({}, tensors, tokenizer=True)
    dtype = ours["model.norm.weight"].dtype
    if not own:
        put_copies(written, target, dtype)
        tied = HEAD not in tensors
    family = family_of(shape)
    if shape.attention_bias and family != "qwen2":
        for name in map(OUTPUT_BIAS.format, range(layers)):
            tensors[name] = torch.zeros(shape.hidden_size, dtype=dtype)
    special = {name: getattr(target.described, name, None) for name in SPECIAL}
    written.config = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        **llama.block_config(shape, info, layers, find_rope(checkpoint, target)),
        "tie_word_embeddings": tied,
        **{name: value for name, value in special.items() if value is not None},
    }
    if family != "llama":
        written.config["use_sliding_window"] = False
    pard = "pard_token" in ours
    tokens = options.tokens or (config.depth if pard else base.CHAIN)
    written.speculative = {"method": "draft_model", "num_speculative_tokens": tokens}
    if pard:
        written.config["pard_token"] = int(ours["pard_token"])
        written.speculative["parallel_drafting"] = True
    return written


def put_copies(written: Written, target: Target, dtype: torch.dtype) -> None:
    """Add the target's embedding and, unless it is the same tensor, its LM head, times the scale of
    the target's logits; and notes on them. Raises `UserError` for a head with a bias."""
    weights, scale = target.weights, base.logit_scale(target.described)
    cap, note = logit_cap(target.described), "embedding and LM head are copies of the target's"
    if target.has_head_bias:
        raise UserError(
            "the target's LM head has a bias, which a language model of these families cannot "
            "hold. Train with head.share_embeddings=false."
        )
    written.tensors[EMBEDDING] = weights.embedding.to(dtype)
    if scale != 1.0:
        written.tensors[HEAD] = scaled_head(weights, scale, dtype)
        written.kept[HEAD_SCALE] = scale
        note += f", the head times the scale of its logits ({scale:g})"
    elif weights.lm_head is not weights.embedding:
        written.tensors[HEAD] = weights.lm_head.to(dtype)
    written.notes.append(note)
    if cap:
        written.notes.append(
            f"the engine leaves out the soft cap ({cap:g}) of the target's logits: above "
            "temperature 0 fewer drafts are accepted than measured here"
        )


def scaled_head(weights: TargetWeights, scale: float, dtype: torch.dtype) -> Tensor:
    """The target's LM head [V, H] times a factor."""
    return (weights.lm_head.float() * scale).to(dtype)


def family_of(shape: LayerShape) -> str:
    """The family whose layers have the norms and biases of a shape. vLLM's Qwen2 derives the size
    of its attention heads from the hidden size; for another size, Llama's layers are left."""
    usual = shape.num_attention_heads * shape.head_dim == shape.hidden_size
    if shape.qk_norm:
        return "qwen3"
    return "qwen2" if shape.attention_bias and usual else "llama"


def find_rope(checkpoint: Checkpoint, target: Target) -> Json:
    """The rotary parameters: the target's if its layers were copied, else the drafter's own."""
    drafter = language_model(checkpoint)
    config = drafter.config
    theta = config.rope_theta or checkpoint.info.rope_theta
    if config.from_target_layers:
        return llama.follow_rope(target, drafter.shape.head_dim, theta)
    if not config.rope_scaling:
        return base.plain_rope(theta)
    scaling = dict(zip(SCALING, config.rope_scaling, strict=True))
    scaling[SCALING[-1]] = int(scaling[SCALING[-1]])
    return {"rope_type": "llama3", "rope_theta": theta, **scaling}


LAYOUT = base.Layout(
    "causal",
    tuple(FAMILIES.values()),
    expect,
    rope=find_rope,
    eps=False,
    linear=rf"model\.{llama.LINEAR}",
)


def matches(folder: Folder) -> bool:
    """Whether a folder is a language model of a family that can be a drafter."""
    return EMBEDDING in folder.tensors and folder.config.get("model_type") in READABLE


def read(folder: Folder, receiver: Receiver) -> Imported:
    """A distilled (or PARD) drafter from a causal language model with the target's vocabulary. The
    vocabulary is padded or trimmed to the target's."""
    config, where, size = folder.config, folder.path, receiver.info.vocab_size
    odd = [name for name in ("mlp_bias", "use_sliding_window") if config.get(name)]
    if config.get("model_type") == "mistral" and config.get("sliding_window"):
        odd.append("sliding_window")
    if odd or str(config.get("hidden_act", "silu")) != "silu":
        what = ", ".join(odd) or "another activation"
        raise UserError(f"'{where}' has {what}, which our drafters do not have.")
    theirs = {  # frequencies follow from config.json; older checkpoints store them all the same
        name: value
        for name, value in folder.tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    shape, layers = read_sizes(folder)
    extra = [theirs.pop(name, None) for name in map(OUTPUT_BIAS.format, range(layers))]
    if any(bias is not None and bool(bias.any()) for bias in extra):
        raise UserError(
            f"'{where}' has a bias on the output of its attention, which our drafters do not have."
        )
    compare_tokenizers(folder, receiver)
    restore_head(folder, theirs, receiver)
    tied = bool(config.get("tie_word_embeddings", False)) or HEAD not in theirs
    if tied:
        theirs.pop(HEAD, None)
    for name in (EMBEDDING, HEAD):
        count = theirs[name].shape[0] if name in theirs else size
        if count != size:
            done = "padded" if count < size else "trimmed"
            receiver.notes.append(f"{name}: {count} rows, {done} to {size}")
            theirs[name] = resize(theirs[name], size)
    values = network(config, shape, layers) | {"tie_embeddings": tied}
    found = base.take(base.own_rows("distilled", values, receiver.info), theirs, where)
    if config.get("pard_token") is None:
        return Imported("distilled", values, found)
    token = base.require_token(config["pard_token"], size, where)
    values["pard_token"] = token
    return Imported("pard", values, found | {"pard_token": torch.tensor(token)})


def compare_tokenizers(folder: Folder, receiver: Receiver) -> None:
    """Raise `UserError` for a folder with a tokenizer in which an id means another token than in
    the target's; note a folder without one.

    Hashes are not compared, unless an export noted one: transformers adds tokens and special tokens
    by the family in config.json, behind those of the files.
    """
    info, where = receiver.info, folder.path
    if folder.export.target.get("tokenizer_hash") == info.tokenizer_hash:
        return
    own: Any = None
    if any((where / name).is_file() for name in VOCABULARIES):
        with suppress(Exception):  # foreign files, for which the library raises any error
            own = AutoTokenizer.from_pretrained(
                str(where), local_files_only=True, trust_remote_code=False
            )
    if own is None or receiver.tokenizer is None:
        receiver.notes.append(
            "the folder has no tokenizer that can be read: whether its token ids mean the same as "
            "the target's is not known"
        )
        return
    named = {place: token for token, place in own.get_vocab().items()}
    ours = receiver.tokenizer.get_vocab()
    other = sorted(place for token, place in ours.items() if named.get(place, token) != token)
    if other:
        words = {place: token for token, place in ours.items()}
        raise UserError(
            f"'{where}' has another tokenizer than target '{info.id}': {len(other)} of "
            f"{len(ours)} token ids mean other tokens, such as {other[0]}, which is "
            f"{named[other[0]]!r} and for the target {words[other[0]]!r}. Import a model of the "
            "target's family; if you know that these tokens do not matter, remove the folder's "
            "tokenizer files."
        )


def restore_head(folder: Folder, theirs: dict[str, Tensor], receiver: Receiver) -> None:
    """Replace a scaled copy of the target's LM head, which `put_copies` wrote, by the head."""
    scale, copy = folder.export.kept.get(HEAD_SCALE), theirs.get(HEAD)
    if scale is None or copy is None:
        return
    weights = receiver.weights
    if torch.equal(scaled_head(weights, float(scale), copy.dtype).cpu(), copy.cpu()):
        theirs[HEAD] = weights.lm_head.to(copy.dtype)


def network(config: Json, shape: LayerShape, layers: int) -> Json:
    """The values of a `NetworkConfig`; raises `UserError` for rotary scalings that the kind
    lacks."""
    rope = llama.read_rope(config)
    if rope["rope_type"] not in ("default", "llama3") or llama.is_partial(rope):
        raise UserError(
            f"rotary positions of type '{rope['rope_type']}' cannot be a drafter's: allowed are "
            "default and llama3."
        )
    values = {"num_layers": layers, **asdict(shape), "rope_theta": float(rope["rope_theta"])}
    if rope["rope_type"] == "llama3":
        values["rope_scaling"] = [float(rope[name]) for name in SCALING]
    return values


def resize(table: Tensor, size: int) -> Tensor:
    """Rows [V', H] as [V, H]: padded with zeros or trimmed."""
    found = table.new_zeros(size, table.shape[1])
    found[: len(table)] = table[:size]
    return found
