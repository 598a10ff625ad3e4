"""Targets whose files are quantised by compressed-tensors or ModelOpt, loaded as plain weights.

Weights are read, dequantised and put into the model one by one, so that loading takes the memory of
the model in `target.dtype` plus that of the weights being converted. Neither library is needed. The
model is the one that weight-only kernels serve. If an engine also quantises activations (W8A8,
NVFP4 with inputs), its states differ by that rounding; scales of activations and of key/value
caches are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.target.packed_weights import dequantise, require_readable, sort_parts

COMPRESSED, MODELOPT = "compressed-tensors", "modelopt"
MODELOPT_FILE = "hf_quant_config.json"
"""File in which older versions of ModelOpt describe the quantisation."""
BLOCKS = dict.fromkeys(("FP8_PB_WO", "FP8_BLOCK_SCALES"), (128, 128))
"""ModelOpt's methods with a scale per block, and the block's shape."""
MORE = ("pre_quant_scale", "svdquant_lora_a", "lora_a", "smoothing_factor")
"""Ends of the names of tensors that change a layer's inputs."""


def packed_settings(path: str, revision: str | None, described: Any) -> dict[str, Any] | None:
    """How a target's files are quantised, if by one of the two libraries; otherwise None.

    described: its transformers config. Raises `UserError` for sparse weights and rotated
    activations, which plain weights cannot represent.
    """
    own = getattr(described, "quantization_config", None)
    own = own if own is None or isinstance(own, dict) else own.to_dict()
    if own is None:
        found = cached_file(
            path,
            MODELOPT_FILE,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        content = read_object(Path(found), "Fetch it again.") if found else {}
        own = {**content.get("quantization", {}), "quant_method": MODELOPT} if content else None
    method = str((own or {}).get("quant_method"))
    if own is None or not method.startswith((COMPRESSED, MODELOPT)):
        return None
    sparse = (own.get("sparsity_config") or {}).get("format", "dense")
    rotated = (own.get("transform_config") or {}).get("config_groups")
    what = "sparse weights" if sparse != "dense" else "rotated activations" if rotated else ""
    if what:
        raise UserError(
            f"target '{path}' has {what} ({method}), which plain weights do not give; use a "
            "checkpoint without them, or take the states from an engine (features.source=vllm)."
        )
    return own


def block_of(settings: dict[str, Any]) -> tuple[int, ...]:
    """Rows and columns that share a scale, if the settings name such blocks."""
    for group in (settings.get("config_groups") or {}).values():
        given = (group.get("weights") or {}).get("block_structure")
        if given:
            sides = given.split("x") if isinstance(given, str) else given
            return tuple(int(side) for side in sides)
    return BLOCKS.get(str(settings.get("quant_algo")).upper(), ())


class PlainWeight:
    """A weight that is dequantised when it is read with `[...]`, as transformers reads parts of
    files."""

    def __init__(
        self, name: str, parts: dict[str, tuple[Any, str]], dtype: torch.dtype, block: Sequence[int]
    ) -> None:
        self.name, self.parts, self.dtype, self.block = name, parts, dtype, block

    def __getitem__(self, index: Any) -> Tensor:
        parts = {end: file.get_tensor(full) for end, (file, full) in self.parts.items()}
        return dequantise(parts, self.dtype, self.block)[index]

    def check(self) -> None:
        """Raise `UserError` if the shapes of the parts do not fit; it dequantises the weight."""
        try:
            self[...]
        except UserError as error:
            raise UserError(f"'{self.name}': {error}") from error


def open_packed(
    path: str, revision: str | None, settings: dict[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """A target's tensors by name: those of its files, with `PlainWeight` instead of quantised ones.
    Raises `UserError` for a format that is not read, missing files, and tensors that change the
    layers' inputs."""
    instead = "Use another checkpoint, or take the states from an engine (features.source=vllm)."
    require_readable(settings, f"target '{path}'", instead)
    folder = Path(path)
    if not folder.is_dir():
        patterns = ["*.safetensors", "*.json"]
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise UserError(f"target '{path}' has no safetensors files; others are not dequantised.")
    places = {name: (file, name) for file in files for name in file.keys()}  # noqa: SIM118
    more = next((name for name in places if name.endswith(MORE)), None)
    if more is not None:
        raise UserError(
            f"target '{path}' changes the inputs of its layers ('{more}'), which plain weights do "
            "not give; take the states from an engine (features.source=vllm)."
        )
    found, block = sort_parts(places), block_of(settings)
    tensors: dict[str, Any] = {
        name: file.get_slice(full) for name, (file, full) in found.others.items()
    }
    for layer, parts in found.layers.items():
        weight = PlainWeight(f"{layer}.weight", parts, dtype, block)
        tensors[f"{layer}.weight"] = weight
    first = next((each for each in tensors.values() if isinstance(each, PlainWeight)), None)
    if first is None:
        raise UserError(f"target '{path}' says that it is quantised, and none of its tensors is.")
    first.check()
    return tensors


def without_settings(described: Any) -> Any:
    """A transformers config without its quantization, for a model of plain weights."""
    found = deepcopy(described)
    for config in (found, found.get_text_config()):
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
    return found
