"""The device that the target runs on, as reports name it."""

from __future__ import annotations

from typing import TypedDict

import torch

from inference.processor import processor_name


class Device(TypedDict):
    """The `device` block of report.json and of other records."""

    kind: str
    """Type of torch device, for instance "cuda"."""
    name: str
    threads: int
    """CPU threads of torch."""


def device_facts(device: torch.device) -> Device:
    """The device as reports name it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {"kind": device.type, "name": name, "threads": torch.get_num_threads()}
