"""The energy of NVIDIA GPUs, if NVML reports it: joules since the last reading.

The `pynvml` module (package nvidia-ml-py, the extra `gpu`) is optional; without it, on CPUs, and if
the driver refuses, there is no figure.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch


class EnergyMeter:
    """Joules of one CUDA device, by its energy counter or, without one, by its power at each
    reading."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except (nvml.NVMLError, AttributeError):
            return
        self._nvml = nvml
        self._counter, self._read_at = self._read("TotalEnergyConsumption"), time.monotonic()

    @property
    def available(self) -> bool:
        return self._nvml is not None

    def take(self) -> float | None:
        """Joules since the last call, or since the meter was created; None if unknown."""
        if self._nvml is None:
            return None
        counter, now = self._read("TotalEnergyConsumption"), time.monotonic()
        before, since = self._counter, now - self._read_at
        self._counter, self._read_at = counter, now
        if counter is not None and before is not None:
            return counter - before
        power = self._read("PowerUsage")
        return None if power is None else power * since

    def _read(self, figure: str) -> float | None:
        """Joules (TotalEnergyConsumption) or watts (PowerUsage), if the card reports them."""
        try:
            return float(getattr(self._nvml, f"nvmlDeviceGet{figure}")(self._handle)) / 1000.0
        except self._nvml.NVMLError:
            return None
