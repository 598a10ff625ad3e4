"""The comparison of decoding loops: the page has the report's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evidence.common import read_json
from scripts.evidence.plain_decoding import PAGE, REPORT, SECTION, folder_and_depth, table


def test_the_page_has_the_table_of_the_report() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert SECTION.put(text, table(read_json(REPORT))) == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("outputs/demo/train/medusa/best:1", ("outputs/demo/train/medusa/best", 1)),
        ("outputs/demo-3/train/eagle3@0.01", ("outputs/demo-3/train/eagle3@0.01", None)),
        ("a:b/best", ("a:b/best", None)),
        ("run-3", ("run-3", None)),
    ],
)
def test_a_drafter_may_have_a_depth(given: str, expected: tuple[str, int | None]) -> None:
    assert folder_and_depth(given) == (Path(expected[0]), expected[1])
