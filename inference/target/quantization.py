"""Quantised targets: the values of `target.quantization`, and the libraries that they need.

Weights are quantised while they load (bitsandbytes, torchao, fp8), or the checkpoint is quantised
and its config says so ("auto"). Checkpoints of compressed-tensors and ModelOpt are dequantised
(`inference.target.packed_target`). Lossless refers to the quantised model: its text is compared
with that model's own greedy text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from heads.api.errors import UserError, suggest


@dataclass(frozen=True)
class Library:
    """A library that must be present: the module to import and its name for pip."""

    module: str
    pip: str

    def require(self, what: str) -> None:
        """Raise `UserError` if it is not installed."""
        if find_spec(self.module) is None:
            raise UserError(
                f"{what} needs the library {self.module}, which is not installed. Install it "
                f"with: pip install {self.pip}"
            )


_BITSANDBYTES = Library("bitsandbytes", "bitsandbytes")
_TORCHAO = Library("torchao", "torchao")
_ACCELERATE = Library("accelerate", "accelerate")
# transformers supports a narrow range of its versions, which the extra names
_KERNELS = Library("kernels", "'transformers[kernels]'")
OWN_LIBRARIES: dict[str, Library] = {
    "bitsandbytes": _BITSANDBYTES,
    "torchao": _TORCHAO,
    "gptq": Library("gptqmodel", "gptqmodel"),
    "awq": Library("gptqmodel", "gptqmodel"),
    "hqq": Library("hqq", "hqq"),
    "quanto": Library("optimum", "optimum-quanto"),
    "aqlm": Library("aqlm", "aqlm[gpu,cpu]"),
    "fp8": _ACCELERATE,
}
"""Libraries of the methods that checkpoints name in their quantization_config."""


def quantization_settings(name: str, own: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The quantisation config to load with; None for the checkpoint's own config or none.

    name: `target.quantization`. own: the checkpoint's quantization_config (a dict or an object) or
    None. Raises `UserError` for an unknown name, a contradiction with the checkpoint, a missing
    library or an unsupported device.
    """
    if name not in NAMES:
        raise UserError(f"target.quantization '{name}' is unknown.{suggest(name, NAMES)}")
    if own is not None:
        method = _method(own)
        if name != "auto":
            raise UserError(
                f"the target's files are quantised already ({method}), so "
                f"target.quantization={name} cannot be had; use target.quantization=auto, or a "
                "checkpoint in full precision."
            )
        if method in OWN_LIBRARIES:
            OWN_LIBRARIES[method].require(f"a target quantised with {method}")
        if method == "fp8" and not _entry(own, "dequantize") and _multiplies_fp8(device):
            _KERNELS.require(f"a target quantised with {method}")
        return None
    make = _METHODS.get(name)
    return None if make is None else make(dtype, device)


def _entry(own: Any, name: str) -> Any:
    return own.get(name) if isinstance(own, dict) else getattr(own, name, None)


def _method(own: Any) -> str:
    method = _entry(own, "quant_method")
    return str(getattr(method, "value", method) or "an unnamed method")


def _bitsandbytes(dtype: torch.dtype, device: torch.device, bits: int) -> Any:
    _BITSANDBYTES.require(f"target.quantization=bnb-{bits}bit")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    nf4 = {"quant_type": "nf4", "compute_dtype": dtype, "use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, **{f"bnb_4bit_{k}": v for k, v in nf4.items()})


def _torchao(dtype: torch.dtype, device: torch.device, bits: int) -> Any:
    _TORCHAO.require(f"target.quantization=torchao-int{bits}")
    if bits == 4 and (device.type != "cuda" or dtype is not torch.bfloat16):
        raise UserError(
            "target.quantization=torchao-int4 has kernels for bfloat16 on CUDA only; given: "
            f"{str(dtype)[6:]} on {device.type}. Set target.dtype=bfloat16 on a CUDA device, or "
            "use torchao-int8."
        )
    from transformers import TorchAoConfig

    library = import_module("torchao.quantization")
    if bits == 8:
        return TorchAoConfig(library.Int8WeightOnlyConfig())
    return TorchAoConfig(library.Int4WeightOnlyConfig(group_size=128))


def _multiplies_fp8(device: torch.device) -> bool:
    """Whether transformers multiplies fp8 weights on `device`; elsewhere it dequantises them."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "xpu"


def _fp8(dtype: torch.dtype, device: torch.device) -> Any:
    if device.type != "cuda" or not _multiplies_fp8(device):
        raise UserError(
            "target.quantization=fp8 needs a CUDA device of compute capability 8.9 or above "
            f"(Ada, Hopper); given: {device}. Use torchao-int8 or bnb-8bit there."
        )
    _KERNELS.require("target.quantization=fp8")
    from transformers import FineGrainedFP8Config

    return FineGrainedFP8Config()


_METHODS: dict[str, Callable[[torch.dtype, torch.device], Any]] = {
    "bnb-4bit": partial(_bitsandbytes, bits=4),
    "bnb-8bit": partial(_bitsandbytes, bits=8),
    "torchao-int8": partial(_torchao, bits=8),
    "torchao-int4": partial(_torchao, bits=4),
    "fp8": _fp8,
}
NAMES = ("none", "auto", *_METHODS)


def dense_weight(weight: Tensor, rows: int, columns: int, what: str) -> Tensor:
    """`weight` of an embedding or LM head in floating point [rows, columns], no gradients.

    Raises `UserError` if it cannot be dequantised: drafters share these matrices.
    """
    plain: Any = weight.detach()
    if type(plain).__module__.startswith("torchao."):
        plain = plain.dequantize()
    if tuple(plain.shape) != (rows, columns) or not plain.is_floating_point():
        raise UserError(
            f"the target's {what} is quantised in a layout that cannot be read back (shape "
            f"{tuple(plain.shape)}, {str(plain.dtype)[6:]}); use a checkpoint whose embedding and "
            "LM head are not quantised."
        )
    return cast(Tensor, plain)
