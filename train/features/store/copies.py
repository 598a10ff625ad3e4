"""Copies of a batch from the host to the training device.

On the stream of the computations, a copy would begin only after all submitted work, such as the
step before. On a CUDA device copies therefore have a stream of their own. From pinned memory
(`train.features.fetch.pin`) they run while the device computes, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

Copy = Callable[[Mapping[Any, Tensor]], dict[Any, Tensor]]
"""Named tensors -> the same on a device."""


class SideStream:
    """Copies to a CUDA device on a separate stream, for which the current stream waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def __call__(self, parts: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """See `Copy`."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            moved = {name: part.to(self.device, non_blocking=True) for name, part in parts.items()}
        current.wait_stream(self.stream)
        for part in moved.values():
            # The memory is the side stream's. Without this its next copy could overwrite a tensor
            # that the host has released while the device still computes with it.
            part.record_stream(current)
        return moved


@cache
def copies_to(device: torch.device) -> Copy:
    """How tensors get to a device; one stream per CUDA device."""
    if device.type == "cuda":
        return SideStream(device)
    return lambda parts: {k: part.to(device, non_blocking=True) for k, part in parts.items()}
