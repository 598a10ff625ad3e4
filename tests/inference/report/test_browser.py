"""report.html in headless Chromium (`make test-page`): silent, self-contained, not wider than a
phone, usable from the keyboard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.report.page.render import write_page
from scripts.tools.page_shots import VARIABLE, check, find_chromium, launch, open_page
from tests.inference.report.pages import HOSTILE, folder

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(not os.environ.get(VARIABLE), reason="needs Chromium: make test-page"),
]


def written(root: Path, words: str) -> Path:
    return write_page(
        [(words, root / "measure"), ("sampled", root / "sampled")], root / "out", root
    )


@pytest.mark.parametrize(
    "words",
    ["medusa", HOSTILE, "a_name_without_any_place_to_break_it_" * 9],
    ids=["tame", "hostile", "long"],
)
def test_a_page_has_no_fault(words: str, tmp_path: Path) -> None:
    assert check(written(folder(tmp_path, words), words), tmp_path / "shots") == []
    assert len(list((tmp_path / "shots").glob("*.png"))) == 4


def test_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><body><div style='width:5000px'>x</div><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.log('hello'); throw new Error('broken')</script>"
        + f"<!-- {'y' * 3_000_000} -->"
    )
    found = "\n".join(check(page, None))
    for words in (
        "bytes",
        "asks for http://127.0.0.1:9/x.png",
        "hello",
        "broken",
        "the window has 400",
        "stops only",
    ):
        assert words in found, words


def test_a_measurement_is_chosen_and_the_theme_changes(tmp_path: Path) -> None:
    page = written(folder(tmp_path, "medusa"), "measure")
    with launch(find_chromium()) as browser:
        tab, problems = open_page(browser, page, 1600, "light")
        hidden = "[...document.querySelectorAll('article')].map((a) => a.hidden)"
        assert tab.evaluate(hidden) == [False, True]
        tab.locator("#run").select_option("1")
        assert tab.evaluate(hidden) == [True, False]
        assert tab.locator("nav a").first.get_attribute("href") == "#summary-1"
        seen = []
        for _ in range(3):
            tab.locator("#theme").click()
            paper = "getComputedStyle(document.body).backgroundColor"
            seen.append(tab.evaluate(f"[document.documentElement.dataset.theme ?? '', {paper}]"))
        assert [theme for theme, _ in seen] == ["light", "dark", ""]
        assert seen[0][1] == seen[2][1] != seen[1][1]
        assert problems == []


def test_a_token_tells_both_models_candidates(tmp_path: Path) -> None:
    page = written(folder(tmp_path, "medusa"), "measure")
    with launch(find_chromium()) as browser:
        tab, _ = open_page(browser, page, 400, "dark")
        panel, answer = tab.locator(".candidates"), tab.locator(".answer")
        tab.locator(".token[role=option]").nth(3).focus()
        said = panel.inner_text()
        assert "corrected by the target" in said and "75.0%" in said and "50.0%" in said
        assert "verification 1" in said
        tab.keyboard.press("ArrowDown")
        assert "added by the target" in panel.inner_text()
        assert "if" in answer.inner_text() and "↵" in answer.inner_text()


def test_without_a_browser_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install chromium"):
        find_chromium()
