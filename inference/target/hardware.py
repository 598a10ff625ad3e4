"""The device that the target runs on, as reports name it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch


def device_facts(device: torch.device) -> dict[str, Any]:
    """The `device` block of report.json."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()
    return {"kind": device.type, "name": name, "threads": torch.get_num_threads()}


def _processor_name() -> str:
    """The processor's model, where the system tells."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
