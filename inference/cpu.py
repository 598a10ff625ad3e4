"""Facts about the CPU from the system. Reads /proc/cpuinfo, which Linux has; needs no torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

FACTS = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instructions that multiply bfloat16 matrices, by their names in /proc/cpuinfo: the first two are
of x86, the last of 64-bit ARM."""


def processor_name() -> str:
    """The processor's model, or its architecture where the system does not name it."""
    return _facts().get("model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
    return _facts().get("vendor_id") == "GenuineIntel"


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 matrices. Without them, torch
    emulates the product, which takes five to eighty times as long as in float32."""
    facts = _facts()
    flags = facts.get("flags") or facts.get("Features") or ""
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


@cache
def _facts() -> dict[str, str]:
    """Key -> value of the first core."""
    if not FACTS.is_file():
        return {}
    first = FACTS.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
