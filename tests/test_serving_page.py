"""docs/serving.md says what the registry of layouts says. `python -m tests.test_serving_page`
renews the page."""

from __future__ import annotations

import re
from pathlib import Path

from inference.engines import settings
from inference.export.config import READABLE
from inference.export.importing import READERS
from inference.export.layouts.registry import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
PART = re.compile(r"(<!-- routes -->\n).*?(<!-- /routes -->)", re.DOTALL)
SETTINGS = re.compile(r"(<!-- settings -->\n).*?(<!-- /settings -->)", re.DOTALL)


def test_the_table_of_routes_is_the_registrys() -> None:
    found = PART.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == f"<!-- routes -->\n{markdown()}\n<!-- /routes -->", (
        "run python -m tests.test_serving_page"
    )


def test_the_table_of_settings_is_the_engines() -> None:
    found = SETTINGS.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == f"<!-- settings -->\n{settings.markdown()}\n<!-- /settings -->", (
        "run python -m tests.test_serving_page"
    )


def test_the_page_names_what_is_checked_and_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    check = PAGE.parents[1] / "inference" / "export" / "check" / "verify.py"
    checks = check.read_text(encoding="utf-8").partition("def check_files")[2]
    names = set(re.findall(r'f?"([a-z0-9 ]+): ', checks))
    assert {"architecture", "tensor", "d2t", "layer ids", "rope"} <= names
    said = " ".join(text.split())
    for name in names:
        assert re.search(rf"\b{name}\b", said), name
    assert tuple(READERS) == READABLE


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    page = PART.sub(lambda found: f"{found[1]}{markdown()}\n{found[2]}", page)
    page = SETTINGS.sub(lambda found: f"{found[1]}{settings.markdown()}\n{found[2]}", page)
    PAGE.write_text(page, encoding="utf-8")
