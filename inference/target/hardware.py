"""The device that the target runs on, as reports name it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TypedDict

import torch


class Device(TypedDict):
    """The `device` block of report.json and of other records."""

    kind: str
    """Type of torch device, for instance "cuda"."""
    name: str
    threads: int
    """CPU threads of torch."""


def device_facts(device: torch.device) -> Device:
    """The device as reports name it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()
    return {"kind": device.type, "name": name, "threads": torch.get_num_threads()}


def _processor_name() -> str:
    """The processor's model, or its architecture where the system does not name it."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
