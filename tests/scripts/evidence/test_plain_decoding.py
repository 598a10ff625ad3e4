"""The comparison of decoding loops: the page has the report's table."""

from __future__ import annotations

from scripts.evidence.common import read_json
from scripts.evidence.plain_decoding import PAGE, REPORT, SECTION, table


def test_the_page_has_the_table_of_the_report() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert SECTION.put(text, table(read_json(REPORT))) == text
