"""What is read of the CPU, from facts as Linux writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference import cpu

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile

processor\t: 1
vendor_id\t: GenuineIntel
"""
EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 f16c
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    cpu._facts.cache_clear()
    monkeypatch.setattr(cpu, "FACTS", tmp_path / "cpuinfo")
    yield tmp_path / "cpuinfo"
    cpu._facts.cache_clear()


@pytest.mark.parametrize(
    ("facts", "name", "intel", "fast"),
    [
        (XEON, "Intel(R) Xeon(R) Processor", True, True),
        (EPYC, "AMD EPYC", False, False),
        (XEON.replace(" avx512_bf16", ""), "Intel(R) Xeon(R) Processor", True, False),
        (ARM, None, False, True),
        ("", None, False, False),
        (None, None, False, False),
    ],
)
def test_the_facts_of_a_processor(
    fresh: Path, facts: str | None, name: str | None, intel: bool, fast: bool
) -> None:
    if facts is not None:
        fresh.write_text(facts)
    assert cpu.is_intel() is intel
    assert cpu.multiplies_bfloat16() is fast
    assert cpu.processor_name() == name if name else cpu.processor_name()
