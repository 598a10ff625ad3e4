"""An exported folder read as its engine reads it, without the engine: what it would look for, ignore, capture and map.

Every fault begins with a name: architecture, tensor, shape, dtype, vocabulary, d2t, layer ids, rope, norm eps, positions, anchor,
drafts, path, files. Faults that no file shows (chunks in another order, heads shifted) are found by `forward_check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import build_config
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import vocab
from inference.export.engine_folder import require_plain_path
from inference.export.engine_forward import captured, flat
from inference.export.layouts import causal, dflash, eagle, eagle3, medusa, mtp
from inference.export.layouts.base import Row, Written
from inference.export.layouts.dflash_reading import flavour_values
from inference.export.layouts.folder import Folder
from inference.export.layouts.llama import read_rope, read_shape, with_qk_norm
from inference.manifest import file_sha256

ARCHITECTURES = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "Eagle3DraftModel",
    ),
    "peagle": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "PEagleDraftModel",
    ),
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
    "domino": ("DFlashDraftModel",),
    "dflash-assistant": ("MuseGlimmerAssistantModel",),
    "mtp-mimo": ("MiMoForCausalLM",),
    "medusa": ("MedusaModel",),
    "causal": tuple(causal.FAMILIES.values()),
}
"""Layout -> the class names under which the engine finds its model. vLLM puts "Eagle3" before any other name of an EAGLE-3 head."""


def plain(layout: str) -> str:
    """A layout's name without the library it is wrapped in."""
    return layout.removeprefix("speculators-")


def check_files(
    folder: Folder, layout: str, info: TargetInfo, engine: str, rope: Mapping[str, Any]
) -> list[str]:
    """All faults of a folder for a target. rope: the rotary parameters that the drafter must have; empty: unknown."""
    config, name = flat(folder), plain(layout)
    faults = architecture(folder, name)
    try:
        table, spare = expected(folder, name, info)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        return [*faults, f"config: config.json does not describe a {name} drafter ({error})"]
    faults += names_and_shapes(folder, table, spare, name)
    faults += dtypes(folder.tensors)
    faults += vocabulary(folder, config, info, name)
    if name in ("eagle3", "peagle", "dflash", "dflash2", "dspark", "domino", "dflash-assistant"):
        faults += layer_ids(folder, config, info, engine)
    if name != "medusa":
        faults += rotary(config, rope, info, name)
    if name in ("dflash", "dflash2", "dspark", "domino", "dflash-assistant"):
        faults += blocks(folder, config, name)
    return faults + drafts(folder, config, name) + path_word(folder, engine) + changed(folder)


def architecture(folder: Folder, layout: str) -> list[str]:
    """The class name."""
    known = ARCHITECTURES[layout]
    if folder.architecture in known:
        return []
    return [
        f"architecture: '{folder.architecture}' is none that the engine finds for {layout}; allowed: {', '.join(known)}"
    ]


def expected(folder: Folder, layout: str, info: TargetInfo) -> tuple[list[Row], dict[str, tuple[int, ...]]]:
    """The tensors that the engine looks for, and those that may be there besides, by its own config.json."""
    config, theirs, where = flat(folder), folder.tensors, str(folder.path)
    hidden, size = info.hidden_size, info.vocab_size
    shared: dict[str, tuple[int, ...]] = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (size, hidden))
    if layout == "medusa":
        own = not config.get("original_lm_head", False)
        table = medusa.rows(int(config["num_heads"]), int(config["num_hidden_layers"]), hidden, size, own)
        if not config.get("medusa_fc_bias", False):
            table = [row for row in table if not row.theirs.endswith(".bias")]
        head = [] if own else [Row(medusa.SHARED_HEAD, medusa.SHARED_HEAD, (size, hidden))]
        return table + head, {}
    shape = read_shape(config, where)
    if layout == "eagle":
        sglang = folder.architecture == eagle.ARCHITECTURES["sglang"]
        return eagle.rows(shape, sglang), {"embed_tokens.weight": (size, hidden)}
    if layout == "mtp-mimo":
        table = mtp.rows(read_shape({**config, "attention_bias": False}, where))
        table += [Row(name, name, (count,)) for name, count in mtp.biases(shape).items()]
        return table, {}
    if layout in ("eagle3", "peagle"):
        if config.get("model_type") == "qwen3":
            shape = with_qk_norm(shape)
        count = int(config.get("num_aux_hidden_states") or len(config.get(eagle3.IDS) or (1, 2, 3)))
        columns = int(config.get("draft_vocab_size") or size)
        table = eagle3.rows(
            shape, count, columns, size, tap_norm=bool(config.get("fc_norm")),
            joined_norm=bool(config.get("norm_before_fc")), layers=int(config["num_hidden_layers"]),
            parallel=layout == "peagle", first="midlayer." if "midlayer.hidden_norm.weight" in theirs else "layers.0.",
        )  # fmt: skip
        loose = {row.theirs: row.shape for row in table if row.theirs == "t2d"}
        if columns == size:
            loose["lm_head.weight"] = (size, hidden)
        embedding = {"embed_tokens.weight": (size, hidden)}
        table = [row for row in table if row.theirs not in loose]
        if layout == "peagle":
            table.append(Row("embed_tokens.weight", "embed_tokens.weight", (size, hidden)))
        return table, loose | embedding
    if layout == "causal":
        return language_model(config, where), {}
    inner = {**config, **(config.get("dflash_config") or {})}
    values = {"block_size": int(inner["block_size"]), **flavour_values(config, inner, theirs)}
    count = len(captured(config, info.num_layers, "vllm"))
    table = dflash.rows(
        build_config("dflash", values),
        with_qk_norm(shape),
        int(config["num_hidden_layers"]),
        count,
        info.vocab_size,
    )
    renamed = dflash.ENCODER if layout == "dflash-assistant" else {}
    table = [Row(row.ours, renamed.get(row.theirs, row.theirs), row.shape) for row in table]
    return table, shared if layout == "dspark" else {"embed_tokens.weight": (size, hidden)}


def language_model(config: Mapping[str, Any], where: str) -> list[Row]:
    """The tensors of a causal language model."""
    from dataclasses import replace

    family, shape = config["model_type"], read_shape(config, where)
    bias = family == "qwen2" or shape.attention_bias
    shape = replace(shape, qk_norm=family == "qwen3", attention_bias=bias)
    layers = int(config["num_hidden_layers"])
    tied = bool(config.get("tie_word_embeddings"))
    table = causal.rows(shape, layers, int(config["vocab_size"]), embedding=True, head=not tied)
    if family == "qwen3" and bias:
        names = [f"model.layers.{index}.self_attn.o_proj.bias" for index in range(layers)]
        table += [Row(name, name, (shape.hidden_size,)) for name in names]
    return table


def names_and_shapes(
    folder: Folder, table: list[Row], spare: Mapping[str, tuple[int, ...]], layout: str
) -> list[str]:
    """Missing, unknown and misshapen tensors, and what the engine does about them."""
    wanted, faults = {row.theirs: row.shape for row in table}, []
    silent = layout in ("medusa", "mtp-mimo")
    for name in sorted(set(wanted) - set(folder.tensors)):
        if name == "d2t":
            faults.append(
                f"d2t: missing; the engine takes draft token i for the target's token i: nearly all of the {wanted[name][0]} "
                "drafted tokens are wrong"
            )
        else:
            left = "it keeps what was in memory" if silent else "it does not load"
            faults.append(f"tensor: '{name}' is missing ({left})")
    for name in sorted(set(folder.tensors) - set(wanted) - set(spare)):
        does = "it is ignored without a word" if silent else "the engine does not know it"
        faults.append(f"tensor: '{name}' is none of this layout ({does})")
    for name, value in folder.tensors.items():
        shape = wanted.get(name, spare.get(name))
        if (
            shape is not None
            and tuple(value.shape) != shape
            and not (name == "mask_hidden" and value.numel() == shape[-1])
        ):
            what = (
                "vocabulary"
                if shape[0] != value.shape[0] and name.split(".")[0] in ("lm_head", "embed_tokens")
                else "shape"
            )
            faults.append(f"{what}: '{name}' is {list(value.shape)}, the engine needs {list(shape)}")
    return faults


def dtypes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Number formats: one for all floating-point tensors, whole numbers for the maps; nothing that is not finite."""
    faults = []
    floats = {
        value.dtype
        for name, value in tensors.items()
        if value.is_floating_point() and not name.startswith("confidence_head")
    }
    if len(floats) > 1:
        faults.append(f"dtype: the tensors mix {', '.join(sorted(str(each) for each in floats))}")
    if torch.float64 in floats:
        faults.append("dtype: float64 is none that engines serve")
    for name, value in tensors.items():
        if name in ("d2t", "t2d"):
            if value.is_floating_point():
                faults.append(f"dtype: '{name}' is {value.dtype}; token ids are whole numbers")
        elif not value.is_floating_point():
            faults.append(f"dtype: '{name}' is {value.dtype}; a weight is a floating-point number")
        elif not bool(torch.isfinite(value).all()):
            faults.append(f"tensor: '{name}' holds values that are not finite")
    return faults


def vocabulary(folder: Folder, config: Mapping[str, Any], info: TargetInfo, layout: str) -> list[str]:
    """Sizes of the vocabularies and the map between them."""
    faults, size = [], int(config.get("vocab_size", info.vocab_size))
    if size != info.vocab_size:
        faults.append(f"vocabulary: config.json says {size} tokens, the target has {info.vocab_size}")
    token = (config.get("dflash_config") or {}).get(
        "mask_token_id", config.get("mask_token_id", config.get("pard_token"))
    )
    if token is not None and not 0 <= int(token) < info.vocab_size:
        faults.append(f"vocabulary: the mask token {token} is none of the target's {info.vocab_size}")
    offsets = folder.tensors.get("d2t")
    if offsets is None or offsets.is_floating_point():
        return faults
    ids = vocab.to_target_ids(offsets.long())
    reduced = offsets.shape[0] < info.vocab_size
    if reduced and not bool(offsets.any()):
        faults.append(
            "d2t: all zero, so that the draft vocabulary is the target's first tokens; it was never chosen or lost"
        )
    elif int(ids.max()) >= info.vocab_size or int(ids.min()) < 0:
        faults.append(
            "d2t: leads beyond the target's vocabulary; it must hold offsets (target id minus draft id), not ids"
        )
    elif bool((ids.diff() <= 0).any()):
        faults.append("d2t: its token ids do not ascend")
    known = folder.tensors.get("t2d")
    if (
        known is not None
        and reduced
        and not faults
        and not torch.equal(known.bool(), vocab.to_maps(ids, info.vocab_size)[1])
    ):
        faults.append("d2t: t2d marks other tokens")
    return faults


def layer_ids(folder: Folder, config: Mapping[str, Any], info: TargetInfo, engine: str) -> list[str]:
    """The layers that each engine would capture, against each other and against what the drafter was trained on."""
    found = captured(config, info.num_layers, engine)
    faults = []
    if min(found) < 0 or max(found) > info.num_layers:
        faults.append(
            f"layer ids: the engine captures the states after {list(found)} layers; the target has {info.num_layers}"
        )
    if list(found) != sorted(set(found)):
        faults.append(
            f"layer ids: {list(found)} do not ascend; the engine sorts them and reads fc.weight in another order"
        )
    trained = folder.export.get("taps")
    if trained and list(found) != list(trained):
        faults.append(
            f"layer ids: the engine captures the states after {list(found)} layers, the drafter was trained on {trained}"
        )
    nested = (config.get("eagle_config") or {}).get(eagle3.IDS)
    if config.get(eagle3.IDS) and nested and [layer + 1 for layer in nested] != list(config[eagle3.IDS]):
        faults.append(
            f"layer ids: vLLM reads {config[eagle3.IDS]} (states after so many layers), SGLang reads {nested} (one more)"
        )
    return faults


def rotary(config: Mapping[str, Any], rope: Mapping[str, Any], info: TargetInfo, layout: str) -> list[str]:
    """Rotary base and scaling, epsilon of the norms, and how far positions go."""
    found, faults = read_rope(config), []
    for name, value in rope.items():
        theirs = found.get(name)
        same = theirs == value or (
            isinstance(value, (int, float))
            and isinstance(theirs, (int, float))
            and float(theirs) == float(value)
        )
        if not same:
            faults.append(f"rope: {name} is {theirs}, the drafter was trained with {value}")
    if layout != "causal" and abs(float(config.get("rms_norm_eps", 1e-6)) - info.rms_norm_eps) > 1e-12:
        faults.append(
            f"norm eps: rms_norm_eps is {config.get('rms_norm_eps')}, the drafter was trained with {info.rms_norm_eps}"
        )
    longest = int(config.get("max_position_embeddings", 2048))
    if longest < info.max_position_embeddings:
        faults.append(f"positions: they end at {longest}, the target's at {info.max_position_embeddings}")
    return faults


def blocks(folder: Folder, config: Mapping[str, Any], layout: str) -> list[str]:
    """Which slot gives which token, and what slots see."""
    inner, faults = {**config, **(config.get("dflash_config") or {})}, []
    anchored = inner.get("sample_from_anchor")
    if layout == "dspark" and anchored is None:
        faults.append("anchor: sample_from_anchor is not said; engines differ in what they then assume")
    if layout != "dspark" and anchored:
        faults.append("anchor: sample_from_anchor is true, which engines refuse for DFlash")
    trained = folder.export.get("config", {})
    if (
        trained
        and anchored is not None
        and bool(anchored) != bool(trained.get("sample_from_anchor", anchored))
    ):
        faults.append(
            f"anchor: sample_from_anchor is {anchored}, the drafter was trained with {trained['sample_from_anchor']}"
        )
    if trained and int(inner["block_size"]) != int(trained["block_size"]):
        faults.append(
            f"anchor: block_size is {inner['block_size']}, the drafter was trained with {trained['block_size']}"
        )
    return faults


def drafts(folder: Folder, config: Mapping[str, Any], layout: str) -> list[str]:
    """Whether the engine is told to draft as many tokens as there are."""
    told = folder.export.get("speculative_config", {})
    count = told.get("num_speculative_tokens")
    if count is None:
        return []
    if layout == "medusa" and count > int(config["num_heads"]):
        return [f"drafts: {count} tokens are asked of {config['num_heads']} heads"]
    if layout in ("dflash", "dflash2", "domino"):
        most = int({**config, **(config.get("dflash_config") or {})}["block_size"]) - 1
        if count > most:
            return [f"drafts: {count} tokens are asked of blocks that give {most}"]
    if layout == "peagle" and not told.get("parallel_drafting"):
        return [
            "drafts: P-EAGLE needs parallel_drafting=true, or vLLM drops mask_hidden and drafts token by token"
        ]
    return []


def path_word(folder: Folder, engine: str) -> list[str]:
    """A path from which vLLM would conclude another method."""
    told = folder.export.get("speculative_config")
    if not told:
        return []
    try:
        require_plain_path(Written({}, {}, told), engine, folder.path)
    except UserError as error:
        return [f"path: {error}"]
    return []


def changed(folder: Folder) -> list[str]:
    """Files that are not what was exported."""
    faults = []
    for name, digest in folder.export.get("files", {}).items():
        path = folder.path / Path(name).name
        if not path.is_file():
            faults.append(f"files: '{name}' was exported and is not there")
        elif file_sha256(path) != digest:
            faults.append(f"files: '{name}' has changed since the export")
    return faults
