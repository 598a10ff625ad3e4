"""The parts of the slow tests that CI runs by turns."""

from __future__ import annotations

from collections import Counter

from tests.conftest import in_part


def test_every_test_is_in_one_part_and_the_parts_are_alike() -> None:
    names = [f"tests/test_{number % 9}.py::test_it[{number}]" for number in range(800)]
    sizes = Counter(part for name in names for part in range(8) if in_part(name, f"{part}/8"))
    assert sum(sizes.values()) == len(names) and len(sizes) == 8
    assert max(sizes.values()) < 2 * min(sizes.values())
