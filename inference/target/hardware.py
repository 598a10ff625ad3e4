"""The target's device: choosing it, waiting for it, and its name in reports.

CUDA uses Headstart's kernels and captured steps. AMD's GPUs, which torch names cuda as well (ROCm),
and the other accelerators that torch supports (`torch.accelerator`: Intel's XPU, Apple's MPS) run
torch's operations one by one, as a CPU does. XPU and MPS are used only if named. None of these
three has run this code yet.
"""

from __future__ import annotations

import logging
from typing import TypedDict

import torch

from inference.cpu import processor_name

logger = logging.getLogger(__name__)


class Device(TypedDict):
    """The `device` block of report.json and of other records."""

    kind: str
    """Type of torch device, for instance "cuda"."""
    name: str
    threads: int
    """CPU threads of torch."""


def found_device() -> torch.device:
    """The device for `auto`: CUDA if it is available, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_there(device: torch.device) -> bool:
    """Whether this machine has a device of this type."""
    if device.type == "cuda":
        return torch.cuda.is_available()
    if device.type in ("cpu", "meta"):
        return True
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return other is not None and other.type == device.type


def wait_for(device: torch.device) -> None:
    """Return when all work submitted to a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def release_unused() -> None:
    """Return memory that torch's allocator keeps for CUDA devices without using it. If it cannot,
    that is logged: work that is already done is worth more than the memory."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        logger.warning("unused memory of the GPU could not be released: %s", error)


def device_facts(device: torch.device) -> Device:
    """The device as named in reports."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {"kind": device.type, "name": name, "threads": torch.get_num_threads()}
