"""Peak speeds of devices: a table of known GPUs, and a short matrix product on CPUs.

Peaks are the makers' figures for dense bfloat16 tensor cores with float32 sums (without sparsity),
at the boost clock. Peaks of float32 are not used, since GPUs train in bfloat16.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from heads.api.errors import UserError, suggest

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Gpu:
    """peak: bfloat16 FLOP/s; memory: bytes; link: bytes/s to each of the GPUs of the same machine,
    one direction; word: how CUDA's device names show it.
    """

    peak: float
    memory: float
    link: float
    word: str


GPUS = {
    "a100": Gpu(312 * TERA, 80 * GIGA, 300 * GIGA, "A100"),
    "h100": Gpu(989.4 * TERA, 80 * GIGA, 450 * GIGA, "H100"),
    "h200": Gpu(989.4 * TERA, 141 * GIGA, 450 * GIGA, "H200"),
    "b200": Gpu(2250 * TERA, 180 * GIGA, 900 * GIGA, "B200"),
    "l40s": Gpu(362 * TERA, 48 * GIGA, 32 * GIGA, "L40S"),
    "l4": Gpu(121 * TERA, 24 * GIGA, 32 * GIGA, "L4"),
    "a10": Gpu(125 * TERA, 24 * GIGA, 32 * GIGA, "A10"),
    "rtx4090": Gpu(165.2 * TERA, 24 * GIGA, 32 * GIGA, "4090"),
    "rtx3090": Gpu(71 * TERA, 24 * GIGA, 32 * GIGA, "3090"),
}
"""Name in configurations -> figures (SXM where there are several)."""
VARIANTS = {"H100 PCIe": 756 * TERA, "H100 NVL": 835 * TERA, "H200 NVL": 835 * TERA}
"""How CUDA names slower variants of GPUs of the table -> bfloat16 FLOP/s."""
UNKNOWN_VARIANTS = {"D", "Laptop", "MIG", "Ti"}
"""Words in the names of other variants of these GPUs, and of parts of one."""
PROBE_SIZE, PROBE_REPEATS = 1024, 5
SLOW_PROBE = 0.5
"""Seconds from which on a product is not repeated: the number format is then emulated."""
_probes: dict[tuple[torch.dtype, int], tuple[float, int]] = {}
"""(dtype, threads) -> the highest FLOP/s that this process has measured, and the number of
probes."""


@dataclass(frozen=True)
class Peak:
    """The FLOP/s to which utilisation refers, and the source of the number. flops 0: unknown."""

    flops: float
    source: str


def gpu(name: str) -> Gpu:
    """A GPU of the table; raises `UserError` for one that is not in it."""
    if name not in GPUS:
        raise UserError(f"plan.gpu '{name}' is unknown.{suggest(name, GPUS)}")
    return GPUS[name]


def find_peak(
    device: torch.device, dtype: torch.dtype, given_tflops: float = 0.0, *, again: bool = False
) -> Peak:
    """The peak in `dtype`: given, from the table, or measured (CPU; `again`: measure once more)."""
    if given_tflops > 0:
        return Peak(given_tflops * TERA, "train.peak_tflops")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        words = re.findall(r"\w+", name)  # whole ones: L40S is no L4, an A10G no A10
        for known in GPUS.values():
            if known.word in words and not UNKNOWN_VARIANTS.intersection(words):
                slower = (peak for variant, peak in VARIANTS.items() if variant in name)
                return Peak(next(slower, known.peak), f"{name}, dense bfloat16, maker's figure")
        return Peak(0.0, f"{name} is not in the table; give train.peak_tflops")
    return measured_peak(dtype, again=again)


def measured_peak(dtype: torch.dtype, *, again: bool) -> Peak:
    """The speed of a product of two [1024, 1024] matrices on this CPU: the highest of all probes.
    Other work can only slow a product down, so probes at different times (`again`) come nearer to
    the CPU's peak than a single one."""
    threads = torch.get_num_threads()
    highest, count = _probes.get((dtype, threads), (0.0, 0))
    if again or not count:
        highest, count = max(highest, _probe(dtype)), count + 1
        _probes[dtype, threads] = highest, count
    name = str(dtype).removeprefix("torch.")
    source = (
        f"measured: {PROBE_SIZE}^3 {name} matrix product, {threads} threads, highest of "
        f"{count} probe{'s' * (count > 1)}"
    )
    return Peak(highest, source)


def _probe(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several products."""
    left, right = (torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype) for _ in range(2))
    best = _time_product(left, right)  # also warms up
    for _ in range(PROBE_REPEATS if best < SLOW_PROBE else 0):
        best = min(best, _time_product(left, right))
    return 2 * PROBE_SIZE**3 / best


def _time_product(left: torch.Tensor, right: torch.Tensor) -> float:
    begun = time.perf_counter()
    left @ right
    return time.perf_counter() - begun
