"""The pick with noise inside compiled steps on CPUs: an operation that is one C++ function.

Reference: `inference.kernels.reference.noise.noise_pick`. Traced in plain torch, the noise is
dozens of small operations per call. Inductor takes longer to compile them than the rest of a draft,
and they compute every column's noise. Only float32 is supported.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from inference.kernels.cpp_operations import call_in_cpp
from inference.kernels.reference import noise

SOURCE = Path(__file__).with_name("noise_pick.h")


def noise_pick(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor | None,
    temperature: float,
    token_ids: Tensor | None = None,
) -> Tensor:
    """`inference.kernels.reference.noise.noise_pick` as one operation of a trace."""
    if seeds is None or temperature == 0:
        return logits.argmax(-1)
    ids = None if token_ids is None else token_ids.contiguous()
    return _operation(logits.contiguous(), positions, seeds, temperature, ids)


@torch.library.custom_op("headstart::noise_pick", mutates_args=())
def _operation(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: float, token_ids: Tensor | None
) -> Tensor:
    return noise.noise_pick(logits, positions, seeds, temperature, token_ids)


@_operation.register_fake
def _shape(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64)


call_in_cpp(
    _operation,
    SOURCE,
    "AtenTensorHandle logits, AtenTensorHandle positions, AtenTensorHandle seeds, "
    "double temperature, AtenTensorHandle* token_ids",
)
