"""`headstart verify-export`: checks an exported folder by the loading rules of its engine, without
the engine.

The check covers what the engine looks for, ignores, captures and maps. Every fault begins with a
name: architecture, config, tensor, shape, dtype, vocabulary, d2t, token_map, layer ids, rope, norm
eps, positions, anchor, drafts, path, files. Some faults leave no trace in the files (chunks of `fc`
in another order, shifted heads); they appear only when an engine drafts: see `live`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heads.api.checkpoint import CONFIG_FILE, weights_file
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn import vocab
from inference.export.check.config import VerifyConfig
from inference.export.check.gguf import check_gguf
from inference.export.engine_folder import require_plain_path
from inference.export.importing import read_folder, recognise
from inference.export.layouts import base, dflash, eagle3, native
from inference.export.layouts.base import IDS, Layout, Shapes, TensorRow
from inference.export.layouts.folder import ExportNotes, Folder, Json
from inference.export.layouts.gguf import ENGINE, FILE
from inference.export.layouts.llama import read_rope
from inference.export.layouts.registry import LAYOUTS
from inference.export.quantised import open_weights, unequal_scales
from inference.folders import plain_files
from inference.manifest import file_sha256
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

WRAPPED = "speculators-"
"""Prefix of the layouts of the library speculators, which wrap those of engines."""


@dataclass
class Verdict:
    """The check of a folder. layout: its name; faults: see the module."""

    layout: str
    engine: str
    faults: list[str]
    notes: list[str]


def verify(config: VerifyConfig, given: TargetConfig, target: TargetModel | None = None) -> Verdict:
    """Check the folder of `config` against a target. target: the target of `given`, if it is
    loaded. Raises `UserError` for a folder that is not a drafter's."""
    plain_files(Path(config.dir))  # a link may lead out of the folder
    if (Path(config.dir) / FILE).is_file():
        own = ExportNotes.read(Path(config.dir))
        found = check_gguf(Path(config.dir), own, target or TargetModel.load(given))
        return Verdict(own.layout or "gguf", ENGINE, found, own.notes)
    stored = read_folder(Path(config.dir))
    folder, damaged = open_weights(stored)
    damaged += unequal_scales(stored.tensors)
    target = TargetModel.load(given) if target is None else target
    name = folder.export.layout or find_layout(folder)
    layout = LAYOUTS.get(name.removeprefix(WRAPPED))
    if layout is None:
        raise UserError(f"'{folder.path}' is of an unknown layout '{name}': export it again.")
    source, why = find_source(folder, config.source)
    notes = [] if source else [f"not compared with a checkpoint: {why}"]
    faults = check_files(folder, layout, target.info, find_rope(folder, layout, source, given))
    return Verdict(name, folder.export.engine, damaged + faults, notes + folder.export.notes)


def find_layout(folder: Folder) -> str:
    """The layout of a folder without an export's notes; raises `UserError` for an unknown
    layout."""
    name = recognise(folder)
    if name == "speculators":
        return f"{WRAPPED}{folder.config['speculators_model_type']}"
    if name == "eagle3" and eagle3.MASK in folder.tensors:
        return "peagle"
    if name == "dflash":
        marks = (found for tensor, found in dflash.MARKS.items() if tensor in folder.tensors)
        return next(marks, name)
    return {"mtp": "mtp-mimo", native.KIND: native.LAYOUT.name}.get(name, name)


def find_rope(folder: Folder, layout: Layout, source: Path | None, given: TargetConfig) -> Json:
    """The rotary parameters that the folder must have, from its checkpoint or its notes. Empty if
    unknown."""
    if source is not None and layout.rope is not None:
        try:
            return layout.rope(base.read_checkpoint(source), base.Target(given))
        except UserError:
            return {}
    theta = folder.export.target.get("rope_theta")
    return base.plain_rope(theta) if theta and layout.rope is base.own_rope else {}


def find_source(folder: Folder, given: str) -> tuple[Path | None, str]:
    """The checkpoint that a folder was made from; if it is None, also the reason. given: a
    checkpoint folder to use instead of the one in the notes. Raises `UserError` if it is not a
    checkpoint."""
    source = folder.export.source
    path = Path(given) if given else folder.path / source.get("checkpoint", "")
    if not given and not source:
        return None, "the folder does not say which checkpoint it was made of"
    if not (path / CONFIG_FILE).is_file() or not weights_file(path).is_file():
        if given:
            raise UserError(f"verify.source: '{path}' is not a drafter checkpoint.")
        return None, f"the checkpoint '{path}' does not exist any more"
    if source.get("sha256") and file_sha256(weights_file(path)) != source["sha256"]:
        return None, f"the weights of '{path}' have changed since the export"
    return path, ""


def check_files(folder: Folder, layout: Layout, info: TargetInfo, rope: Json) -> list[str]:
    """All faults of a folder for a target. rope: the rotary parameters that the drafter must have;
    empty if they are unknown."""
    faults = []
    if folder.architecture not in layout.architectures:
        faults.append(
            f"architecture: '{folder.architecture}' is none that the engine finds for "
            f"{layout.name}; allowed: {', '.join(layout.architectures)}"
        )
    try:
        table, spare = layout.tensors(folder, info)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"config.json does not describe a {layout.name} drafter ({error})"
        return [*faults, f"config: {what}"]
    faults += check_names(folder, table, spare, layout.silent)
    faults += check_shapes(folder, table, spare)
    faults += check_dtypes(folder.tensors)
    faults += check_vocabulary(folder, info)
    if layout.taps:
        faults += check_taps(folder, info)
    if layout.rope is not None:
        faults += check_positions(folder.flat, rope, info, layout.eps)
    if layout.block:
        faults += check_anchor(folder, layout)
    faults += check_drafts(folder, layout)
    faults += check_origin(folder)
    return faults


def check_names(
    folder: Folder, table: list[TensorRow], spare: Shapes, silent: bool
) -> Iterator[str]:
    """Missing and unknown tensors, and how the engine reacts to them."""
    wanted = {row.theirs: row.shape for row in table}
    for name in sorted(set(wanted) - set(folder.tensors)):
        if name == "d2t":
            yield (
                "d2t: missing; the engine takes draft token i for the target's token i: nearly all "
                f"of the {wanted[name][0]} drafted tokens are wrong"
            )
        else:
            left = "it keeps what was in memory" if silent else "it does not load"
            yield f"tensor: '{name}' is missing ({left})"
    does = "it is ignored without a word" if silent else "the engine does not know it"
    for name in sorted(set(folder.tensors) - set(wanted) - set(spare)):
        yield f"tensor: '{name}' is none of this layout ({does})"


def check_shapes(folder: Folder, table: list[TensorRow], spare: Shapes) -> Iterator[str]:
    """Misshapen tensors."""
    wanted = spare | {row.theirs: row.shape for row in table}
    for name, value in folder.tensors.items():
        shape = wanted.get(name, tuple(value.shape))
        flat = name == "mask_hidden" and value.numel() == shape[-1]
        if tuple(value.shape) != shape and not flat:
            rows = shape[0] != value.shape[0] and name.split(".")[0] in ("lm_head", "embed_tokens")
            what = "vocabulary" if rows else "shape"
            yield f"{what}: '{name}' is {list(value.shape)}, the engine needs {list(shape)}"


def check_dtypes(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Check that all weights have one number format, maps are whole numbers, and all values are
    finite."""
    floats = {
        value.dtype
        for name, value in tensors.items()
        if value.is_floating_point() and not name.startswith("confidence_head")
    }
    if len(floats) > 1:
        yield f"dtype: the tensors mix {', '.join(sorted(map(str, floats)))}"
    if torch.float64 in floats:
        yield "dtype: float64 is none that engines serve"
    for name, value in tensors.items():
        if name in ("d2t", "t2d", "token_map"):
            if value.is_floating_point():
                yield f"dtype: '{name}' is {value.dtype}; token ids are whole numbers"
        elif not value.is_floating_point():
            yield f"dtype: '{name}' is {value.dtype}; a weight is a floating-point number"
        elif not bool(torch.isfinite(value).all()):
            yield f"tensor: '{name}' holds values that are not finite"


def check_vocabulary(folder: Folder, info: TargetInfo) -> Iterator[str]:
    """Sizes of the vocabularies, the mask token, and the map of a reduced vocabulary."""
    config, size = folder.flat, info.vocab_size
    named = int(config.get("vocab_size", size))
    if named != size:
        yield f"vocabulary: config.json says {named} tokens, the target has {size}"
    token = folder.block.get("mask_token_id", config.get("pard_token"))
    if token is not None and not 0 <= int(token) < size:
        yield f"vocabulary: the mask token {token} is none of the target's {size}"
    listed = folder.tensors.get("token_map")
    if listed is not None and listed.numel() and not listed.is_floating_point():
        if int(listed.max()) >= size or int(listed.min()) < 0:
            yield "token_map: leads beyond the target's vocabulary; it holds target ids"
        elif len(listed.unique()) < len(listed):
            yield "token_map: names a token twice"
    offsets = folder.tensors.get("d2t")
    if offsets is None or offsets.is_floating_point():
        return
    ids, known = vocab.to_target_ids(offsets.long()), folder.tensors.get("t2d")
    reduced = offsets.shape[0] < size
    if reduced and not bool(offsets.any()):
        yield (
            "d2t: all zero, so that the draft vocabulary is the target's first tokens; it was "
            "never chosen or lost"
        )
    elif int(ids.max()) >= size or int(ids.min()) < 0:
        yield (
            "d2t: leads beyond the target's vocabulary; it must hold offsets (target id minus "
            "draft id), not ids"
        )
    elif len(ids.unique()) < len(ids):  # in any order: engines put a logit where d2t says
        yield "d2t: names a token twice"
    elif reduced and known is not None and not known.bool().equal(vocab.to_maps(ids, size)[1]):
        yield "d2t: t2d marks other tokens"


def check_taps(folder: Folder, info: TargetInfo) -> Iterator[str]:
    """The layers that the engine captures, compared with those of the training and of the other
    engine."""
    config, trained, engine = folder.flat, folder.export.taps, folder.export.engine
    found = list(base.captured_layers(config, info.num_layers, engine))
    captures = f"layer ids: the engine captures the states after {found} layers"
    if min(found) < 0 or max(found) > info.num_layers:
        yield f"{captures}; the target has {info.num_layers}"
    if engine and (reason := base.without_last(found, info.num_layers, engine)):
        yield f"layer ids: {reason}"
    if found != sorted(set(found)):
        yield (
            f"layer ids: {found} do not ascend; the engine sorts them and reads fc.weight in "
            "another order"
        )
    if trained and found != trained:
        yield f"{captures}, the drafter was trained on {trained}"
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    if top and nested and [layer + 1 for layer in nested] != list(top):
        yield (
            f"layer ids: vLLM reads {top} (states after so many layers), SGLang reads {nested} "
            "(one more)"
        )


def check_positions(config: Json, rope: Json, info: TargetInfo, eps: bool) -> Iterator[str]:
    """Rotary base and scaling, the norms' epsilon (if `eps`), and the number of positions."""
    found = read_rope(config)
    for name, value in rope.items():
        if found.get(name) != value:
            yield f"rope: {name} is {found.get(name)}, the drafter was trained with {value}"
    own = config.get("rms_norm_eps")
    if eps and abs(float(1e-6 if own is None else own) - info.rms_norm_eps) > 1e-12:
        yield f"norm eps: rms_norm_eps is {own}, the drafter was trained with {info.rms_norm_eps}"
    longest = int(config.get("max_position_embeddings", 2048))
    if longest < info.max_position_embeddings:
        yield f"positions: they end at {longest}, the target's at {info.max_position_embeddings}"


def check_anchor(folder: Folder, layout: Layout) -> Iterator[str]:
    """Which slot of a block drafts which token, and how many slots there are."""
    inner, trained, dspark = folder.block, folder.export.config, layout.name == "dspark"
    anchored = inner.get("sample_from_anchor")
    if dspark and anchored is None:
        yield "anchor: sample_from_anchor is not set; engines differ in what they then assume"
    if not dspark and anchored:
        yield "anchor: sample_from_anchor is true, which engines refuse for DFlash"
    own = trained.get("sample_from_anchor", anchored)
    if anchored is not None and trained and bool(anchored) != bool(own):
        yield f"anchor: sample_from_anchor is {anchored}, the drafter was trained with {own}"
    size = int(trained.get("block_size") or inner["block_size"])
    if int(inner["block_size"]) != size:
        yield f"anchor: block_size is {inner['block_size']}, the drafter was trained with {size}"


def check_drafts(folder: Folder, layout: Layout) -> Iterator[str]:
    """Whether the serve command asks for as many drafts as the drafter gives."""
    speculative = folder.export.speculative_config
    count = speculative.get("num_speculative_tokens")
    if count is None:
        return
    if layout.draftable is not None:
        most, what = layout.draftable(folder.flat)
        if count > most:
            yield f"drafts: {count} tokens are asked of {what}"
    if layout.name == "peagle" and not speculative.get("parallel_drafting"):
        yield (
            "drafts: P-EAGLE needs parallel_drafting=true, or vLLM drops mask_hidden and drafts "
            "token by token"
        )


def check_origin(folder: Folder) -> Iterator[str]:
    """A path from which vLLM would infer another method; files that differ from the exported
    ones."""
    try:
        if folder.export.speculative_config:
            require_plain_path(folder.export.speculative_config, folder.export.engine, folder.path)
    except UserError as error:
        yield f"path: {error}"
    for name, digest in folder.export.files.items():
        path = folder.path / Path(name).name
        if not path.is_file():
            yield f"files: '{name}' was exported and is not there"
        elif file_sha256(path) != digest:
            yield f"files: '{name}' has changed since the export"
