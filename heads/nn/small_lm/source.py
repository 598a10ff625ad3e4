"""The sources that a small language model can start from: target layers, a smaller model, another
drafter.

Folders are read only with safetensors and json; nothing in them is executed. A folder decides the
sizes once, when the drafter is created: the drafter's checkpoint then holds them and no longer
needs the folder.

Legend: V the target's vocabulary, V' the source's, H hidden.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE, build_config, read_config
from heads.api.errors import UserError
from heads.api.reading import read_object, require_object
from heads.api.target_info import TargetInfo, TargetWeights, tokenizer_hash
from heads.api.tensors import read_tensors
from heads.nn import init
from heads.nn.small_lm.config import BIAS_FAMILIES, QK_NORM_FAMILIES, NetworkConfig, layer_shape
from heads.nn.target.llama import FAMILIES, unlike_llama

INDEX_FILE = "model.safetensors.index.json"
NETWORK = tuple(item.name for item in fields(NetworkConfig))
COPIED = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_theta", "max_position_embeddings"),
)
"""Facts of a target on which layers copied from it depend, besides the shapes of their weights. Of
its rotary positions, a checkpoint holds no more than these."""
SIZES = tuple(name for name in NETWORK if name not in ("from_model", "any_tokenizer"))
"""Fields that a folder decides and that must not be given together with it."""

C = TypeVar("C", bound=NetworkConfig)


@dataclass(frozen=True)
class StartingModel:
    """A folder to start from. sizes: the fields of `NetworkConfig` that it decides. tokenizer_hash:
    of the drafter's target, if the folder is a drafter's checkpoint; None for a model, whose own
    tokenizer is compared."""

    folder: Path
    sizes: Mapping[str, Any]
    tokenizer_hash: str | None
    any_tokenizer: bool


def resolve(config: C, info: TargetInfo) -> tuple[StartingModel | None, C]:
    """The folder of `from_model`, and the configuration with the fields that it decides."""
    if not config.from_model:
        return None, config
    given = [name for name in SIZES if getattr(config, name) != getattr(NetworkConfig(), name)]
    if given:
        raise UserError(
            f"head.from_model decides the drafter's sizes, but head.{', head.'.join(given)} "
            f"{'was' if len(given) == 1 else 'were'} given too. Leave out the one or the other."
        )
    source = read_source(Path(config.from_model), info, config.any_tokenizer)
    return source, replace(config, from_model="", any_tokenizer=False, **source.sizes)


def read_source(folder: Path, info: TargetInfo, any_tokenizer: bool) -> StartingModel:
    """Describe a model's or drafter's folder; raises `UserError` if no drafter for the target
    `info` can start from it."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"head.from_model: '{folder}' has no {CONFIG_FILE}. Give a local folder: a model in "
            "Hugging Face's format (fetch it with `hf download`), or the checkpoint of a "
            "small-model drafter."
        )
    try:
        values = read_object(path, "Fetch or train it again.")
    except UserError as error:
        raise UserError(f"head.from_model: {error}") from error
    if "kind" in values:
        return _drafter_source(folder, info, any_tokenizer)
    return StartingModel(folder, _model_sizes(folder, values), None, any_tokenizer)


def _drafter_source(folder: Path, info: TargetInfo, any_tokenizer: bool) -> StartingModel:
    content = read_config(folder)
    config = build_config(content["kind"], content["config"])
    if not isinstance(config, NetworkConfig):
        raise UserError(
            f"head.from_model: '{folder}' is a drafter of kind '{content['kind']}', which is not "
            "a small language model. Give one of kind distilled or pard."
        )
    theirs = TargetInfo.from_dict(content["target"])
    sizes = {name: getattr(config, name) for name in SIZES}
    odd = [name for name in COPIED if getattr(theirs, name) != getattr(info, name)]
    if not config.from_target_layers:
        # what followed the source's target must not follow another one now
        sizes |= vars(layer_shape(config, theirs))
        sizes["rope_theta"] = config.rope_theta or theirs.rope_theta
    elif odd:
        raise UserError(
            f"head.from_model: the drafter in '{folder}' is made of layers of target "
            f"'{theirs.id}', which differs from '{info.id}' in {', '.join(odd)}: its layers would "
            "compute something else here. Use a drafter that was made of no target's layers, "
            "head.from_target_layers, or a fresh drafter."
        )
    return StartingModel(folder, sizes, theirs.tokenizer_hash, any_tokenizer)


def _model_sizes(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `NetworkConfig` from a config.json of Hugging Face's."""
    family = values.get("model_type")
    flags = "attention_bias", "mlp_bias", "use_sliding_window"
    odd = [name for name in flags if values.get(name)]
    odd += ["sliding_window"] if family == "mistral" and values.get("sliding_window") else []
    odd += ["hidden_act"] if values.get("hidden_act", "silu") != "silu" else []
    if family not in FAMILIES or odd:
        raise UserError(
            f"head.from_model: '{folder}' is a {family} "
            f"model{' with ' + ', '.join(odd) if odd else ''}; a drafter can start from "
            f"{', '.join(FAMILIES)} with plain attention. Use head.from_target_layers or a fresh "
            "drafter instead."
        )
    try:
        heads = int(values["num_attention_heads"])
        return {
            "num_layers": int(values["num_hidden_layers"]),
            "hidden_size": int(values["hidden_size"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(values.get("num_key_value_heads") or heads),
            "head_dim": int(values.get("head_dim") or values["hidden_size"] // heads),
            "intermediate_size": int(values["intermediate_size"]),
            "rms_norm_eps": float(values["rms_norm_eps"]),
            "qk_norm": family in QK_NORM_FAMILIES,
            "attention_bias": family in BIAS_FAMILIES,
            "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
            **_model_rotary(folder, values),
        }
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(
            f"head.from_model: the {CONFIG_FILE} of '{folder}' lacks a size ({error!r})."
        ) from error


def _model_rotary(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    theta = float(scaling.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "llama3":
        names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        return {"rope_theta": theta, "rope_scaling": tuple(float(scaling[name]) for name in names)}
    if kind != "default" or float(scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(
            f"head.from_model: '{folder}' has rotary positions of type '{kind}'; those of a "
            "drafter are plain or Llama 3.1's. Use head.from_target_layers or a fresh drafter "
            "instead."
        )
    return {"rope_theta": theta}


# Weights


def fill_from(module: nn.Module, source: StartingModel, info: TargetInfo) -> None:
    """Set every parameter of a small language model from the source's tensor of the same name.

    Vocabulary rows beyond the target's are left out; missing ones become the mean of all. Raises
    `UserError` for another tokenizer (unless any is accepted) and for missing, unknown or misshapen
    tensors.
    """
    _require_tokenizer(source, info)
    tensors = _load(source.folder)
    wanted = dict(module.named_parameters())
    if "lm_head.weight" not in wanted:
        tensors.pop("lm_head.weight", None)  # some files repeat a tied head
    # facts of another kind
    numbers = {name for name, value in tensors.items() if not value.is_floating_point()}
    known = {*wanted, *numbers}
    odd = sorted({*wanted} - {*tensors}) or sorted(
        name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")
    )
    if odd:
        raise UserError(
            f"head.from_model: the tensors of '{source.folder}' do not fit its {CONFIG_FILE}: "
            f"{odd[:3]}{' and more' if len(odd) > 3 else ''} are missing or unknown. Fetch or "
            "train it again."
        )
    for name, parameter in wanted.items():
        value = tensors[name]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            value = _fit_vocabulary(value, info.vocab_size)
        if value.shape != parameter.shape:
            raise UserError(
                f"head.from_model: tensor '{name}' of '{source.folder}' has shape "
                f"{list(value.shape)}, expected {list(parameter.shape)}."
            )
        init.copy(parameter, value)
    for name, buffer in module.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])


def _fit_vocabulary(rows: Tensor, size: int) -> Tensor:
    """Rows [V', H] -> [V, H]."""
    missing = size - rows.shape[0]
    if missing <= 0:
        return rows[:size]
    mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
    return torch.cat([rows, mean.expand(missing, -1)])


def _load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: one file, or the shards that an index names."""
    index = folder / INDEX_FILE
    try:
        names = {WEIGHTS_FILE}
        if not (folder / WEIGHTS_FILE).is_file() and index.is_file():
            names = set(require_object(read_object(index).get("weight_map"), str(index)).values())
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise UserError(f"head.from_model: '{index}' names files outside its folder.")
        return dict(ChainMap(*(read_tensors(folder / name) for name in sorted(names)[::-1])))
    except UserError as error:
        raise UserError(
            f"head.from_model: the weights in '{folder}' cannot be read ({error}). A "
            f"{WEIGHTS_FILE} is needed, or the shards that {INDEX_FILE} lists."
        ) from error


def _require_tokenizer(source: StartingModel, info: TargetInfo) -> None:
    """Refuse a source with other token ids than the target's, unless the configuration allows
    it."""
    if source.any_tokenizer:
        return
    found = source.tokenizer_hash
    if found is None:
        from transformers import AutoTokenizer  # only here: importing a kind must stay quick

        try:
            own = AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True)
            found = tokenizer_hash(own)
        except (OSError, ValueError) as error:
            raise UserError(
                f"head.from_model: '{source.folder}' has no tokenizer to compare with the "
                f"target's ({error}). Copy one there, or set head.any_tokenizer=true if you know "
                "that both read the same ids."
            ) from error
    if found != info.tokenizer_hash:
        raise UserError(
            f"head.from_model: '{source.folder}' has another tokenizer than target '{info.id}' "
            f"({found} and {info.tokenizer_hash}), so its token ids mean other words. Use a model "
            "of the target's family, or set head.any_tokenizer=true."
        )


def copy_target_layers(
    module: nn.Module, layers: tuple[int, ...], info: TargetInfo, weights: TargetWeights
) -> None:
    """Set every parameter from the target's weight of the same Hugging Face name."""
    for layer in layers:
        if reason := unlike_llama(info, weights, layer):
            raise UserError(
                f"layer {layer} of target '{info.id}' ({info.model_type}) cannot start a Llama "
                f"drafter: {reason}. Use head.from_target_layers=[] for a fresh drafter."
            )
    own = {"lm_head.weight": weights.lm_head, "model.embed_tokens.weight": weights.embedding}
    # read by name: a divided target gathers the requested weights
    state = ChainMap(own, cast(Any, weights.state))
    wanted = {}
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(layers[int(parts[2])])
        wanted[".".join(parts)] = parameter
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    missing = sorted(name for name in wanted if name not in state)
    extra = sorted(name for name in state if name.startswith(prefixes) and name not in wanted)
    odd = missing or extra or [n for n, p in wanted.items() if p.shape != state[n].shape]
    if odd:
        raise UserError(
            f"layers {list(layers)} of target '{info.id}' ({info.model_type}, "
            f"{info.num_layers} layers) cannot start a Llama drafter: weights {odd[:3]}"
            f"{' and more' if len(odd) > 3 else ''} are missing or of another kind. "
            "Use head.from_target_layers=[] for a fresh drafter."
        )
    for name, parameter in wanted.items():
        init.copy(parameter, state[name])
