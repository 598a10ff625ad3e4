"""Adapters: a drafter stored as low-rank updates of the linear layers of another one, its base.

The layout is that of the library peft: `adapter_config.json` and `adapter_model.safetensors` with
two matrices per layer. A merged layer has the weight W + alpha / r * B A (LoRA, 2106.09685).

Legend: r rank. Weights are [out, in] as `nn.Linear` holds them; A is [r, in], B is [out, r].
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.api.config import shown
from heads.api.errors import UserError
from heads.api.reading import file_sha256, read_object
from heads.api.tensors import read_tensors, write_tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LARGEST_CONFIG = 16 * 1024 * 1024
"""Bytes of a config.json or adapter_config.json; ours have some thousand."""
ADVICE = "Train or copy the adapter again."
_LAYER = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_FURTHER = (
    *("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("trainable_token_indices", "alora_invocation_tokens", "fan_in_fan_out"),
)
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of peft's `init_lora_weights` that change the weights of the base."""


def beyond_plain(settings: Mapping[str, object]) -> list[str]:
    """The settings of peft, among those given, with which an adapter is not one low-rank product
    for every layer, added to the layer's weight [out, in] as the base has it."""
    found = [name for name in _FURTHER if settings.get(name)]
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REPLACING):
        found.append(f"init_lora_weights={start}")
    return found


@dataclass(frozen=True)
class Base:
    """The drafter that an adapter belongs to, as its config.json says under `adapter`."""

    base: str
    """Its checkpoint folder, from the root."""
    beside: str
    """The same, relative to the adapter's folder: tried first, so that both can move together."""
    sha256: str
    """Of its weights file."""

    @classmethod
    def of(cls, base: Path, folder: Path, sha256: str) -> Base:
        """The entry of an adapter in `folder`, or in another folder beside it."""
        whole = base.resolve()
        return cls(str(whole), Path(os.path.relpath(whole, folder.resolve())).as_posix(), sha256)

    def weights(self, folder: Path, file: str) -> Path:
        """The weights `file` of the base of the adapter in `folder`; raises `UserError` if it is
        not found, or only with other contents."""
        places = dict.fromkeys([(folder.resolve() / self.beside).resolve(), Path(self.base)])
        there = [place / file for place in places if (place / file).is_file()]
        found = [(path, file_sha256(path)) for path in there]
        for path, digest in found:
            if digest == self.sha256:
                return path
        wanted = f"The adapter in '{folder}' was trained on the base drafter '{self.base}'"
        if not found:
            raise UserError(
                f"{wanted}, which is not there: looked for {file} in "
                f"{' and '.join(f'{str(place)!r}' for place in places)}. Copy the base's folder "
                f"there; the SHA-256 of its {file} begins with {self.sha256[:12]}."
            )
        raise UserError(
            f"{wanted}, whose weights are others by now: the SHA-256 of '{found[0][0]}' begins "
            f"with {found[0][1][:12]}, the adapter needs {self.sha256[:12]}. Put the base back as "
            "it was, or train the adapter again."
        )


@dataclass(frozen=True)
class Updates:
    """Low-rank updates by the name of their linear layer. rank: r; layers: (A [r, in], B [out, r]),
    float32 as they were trained."""

    rank: int
    alpha: float
    layers: Mapping[str, tuple[Tensor, Tensor]]

    @torch.no_grad()
    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A base's tensors with the updates merged, summed in float32 or a wider dtype; those of
        other layers stay as they are. Raises `UserError` for an update without a weight that it
        fits."""
        self.require_fit(tensors)
        found = dict(tensors)
        for layer, (down, up) in self.layers.items():
            name = f"{layer}.weight"
            weight = found[name]
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = up.to(wide) @ down.to(wide)
            found[name] = weight.to(wide) + self.alpha / self.rank * product
        return found

    def require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `UserError` for an update without a weight in `tensors` that it fits."""
        if self.layers and (self.rank < 1 or not math.isfinite(self.alpha)):
            raise UserError(
                "low-rank updates need a rank of 1 or more and a finite alpha; given: "
                f"rank {self.rank}, alpha {self.alpha}."
            )
        for layer, (down, up) in self.layers.items():
            if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
                raise UserError(
                    f"the update of layer '{layer}' has matrices A {list(down.shape)} and B "
                    f"{list(up.shape)}; A is [r, in] and B [out, r]. Parameters that are divided "
                    "among processes (ZeRO-3) have to be gathered first."
                )
            weight = tensors.get(f"{layer}.weight")
            if weight is None or weight.shape != (up.shape[0], down.shape[1]):
                there = "there is none" if weight is None else f"its shape is {list(weight.shape)}"
                raise UserError(
                    f"the adapter updates the weight of layer '{layer}', "
                    f"{[up.shape[0], down.shape[1]]}, but in its base {there}. {ADVICE}"
                )

    def write(self, folder: Path, base: str, base_sha256: str) -> None:
        """Write both files of peft's layout into `folder`, each atomically. base: where the base
        is, for peft; base_sha256: hash of its weights, which becomes part of the file of tensors,
        so that adapters of different bases differ in the hash of that file."""
        tensors = {}
        for layer, (down, up) in self.layers.items():
            tensors[f"{_LAYER}{layer}{_DOWN}"] = down.detach().cpu().contiguous()
            tensors[f"{_LAYER}{layer}{_UP}"] = up.detach().cpu().contiguous()
        content = peft_config(base, self.rank, self.alpha, sorted(self.layers), None)
        partial = folder / (ADAPTER_WEIGHTS + ".partial")
        # only one entry, because safetensors writes several in any order
        write_tensors(tensors, partial, {"base_sha256": base_sha256})
        os.replace(partial, folder / ADAPTER_WEIGHTS)
        partial = folder / (ADAPTER_CONFIG + ".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / ADAPTER_CONFIG)


def peft_config(
    base: str, rank: int, alpha: float, modules: Sequence[str], task: str | None
) -> dict[str, Any]:
    """The content of adapter_config.json for plain LoRA on the linear layers `modules` of the model
    in `base`. task: peft's name of the model's task."""
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": [*modules],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_updates(folder: Path) -> Updates:
    """The updates in a folder of peft's layout; raises `UserError` for files that are missing,
    damaged, or hold anything but one low-rank product per layer."""
    path = folder / ADAPTER_CONFIG
    content = read_object(path, ADVICE, LARGEST_CONFIG)
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if (
        content.get("peft_type") != "LORA"
        or not isinstance(rank, int)
        or not isinstance(alpha, int | float)
        or rank < 1
    ):
        given = {name: content.get(name) for name in ("peft_type", "r", "lora_alpha")}
        raise UserError(f"'{path}' describes no low-rank updates: {shown(given)}. {ADVICE}")
    more = beyond_plain(content)
    if more:
        raise UserError(
            f"'{path}' sets {', '.join(more)}, which adapters of drafters do not have: they are "
            "one low-rank product per layer. Train it with train.refresh.adapter=true."
        )
    return Updates(rank, float(alpha), pairs(read_tensors(folder / ADAPTER_WEIGHTS), rank, folder))


def pairs(tensors: dict[str, Tensor], rank: int, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of every layer; raises `UserError` for a single one, for other tensors, and
    for another rank."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    layers = {name.removeprefix(_LAYER).removesuffix(_DOWN).removesuffix(_UP) for name in tensors}
    expected = {f"{_LAYER}{layer}{part}" for layer in layers for part in (_DOWN, _UP)}
    if set(tensors) != expected:
        odd = sorted(expected ^ set(tensors))[:4]
        raise UserError(
            f"'{folder / ADAPTER_WEIGHTS}' does not hold two matrices per layer: missing or "
            f"unknown {odd}. {ADVICE}"
        )
    for layer in sorted(layers):
        down, up = (tensors[f"{_LAYER}{layer}{part}"] for part in (_DOWN, _UP))
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
            raise UserError(
                f"'{folder / ADAPTER_WEIGHTS}': the update of layer '{layer}' has shapes "
                f"{list(down.shape)} and {list(up.shape)}, which are not of rank {rank}. {ADVICE}"
            )
        found[layer] = (down, up)
    return found
