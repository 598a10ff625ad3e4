"""report.html in headless Chromium (`make test-page`): silent, self-contained, not wider than a phone, usable from the keyboard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.page.page import write_page
from scripts.page_shots import VARIABLE, browser, check, find_chromium
from scripts.page_shots import Tab as BrowserTab
from tests.inference.page.pages import HOSTILE, folder

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(not os.environ.get(VARIABLE), reason="needs Chromium: make test-page"),
]


def written(root: Path, words: str) -> Path:
    return write_page([(words, root / "measure"), ("sampled", root / "sampled")], root / "out", root)


@pytest.mark.parametrize("words", ["medusa", HOSTILE, "a_name_without_any_place_to_break_it_" * 9], ids=["tame", "hostile", "long"])
def test_a_page_has_no_fault(words: str, tmp_path: Path) -> None:
    assert check(written(folder(tmp_path, words), words), tmp_path / "shots") == []
    assert len(list((tmp_path / "shots").glob("*.png"))) == 4


def test_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><body><div style='width:5000px'>x</div><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.log('hello'); throw new Error('broken')</script>" + f"<!-- {'y' * 3_000_000} -->"
    )
    found = "\n".join(check(page, None))
    for words in ("bytes", "asks for http://127.0.0.1:9/x.png", "hello", "broken", "the window has 400", "stops only"):
        assert words in found, words


def test_a_measurement_is_chosen_and_the_theme_changes(tmp_path: Path) -> None:
    page = written(folder(tmp_path, "medusa"), "measure")
    with browser(find_chromium()) as chrome:
        tab = BrowserTab.open(chrome, 1600, "light")
        tab.visit(page.resolve().as_uri())
        hidden = "[...document.querySelectorAll('article')].map((a) => a.hidden)"
        assert tab.value(hidden) == [False, True]
        tab.value("(() => { const s = document.getElementById('run'); s.value = '1'; s.dispatchEvent(new Event('change')); })()")
        assert tab.value(hidden) == [True, False]
        assert tab.value("document.querySelector('nav a').getAttribute('href')") == "#summary-1"
        seen = []
        for _ in range(3):
            tab.value("document.getElementById('theme').click()")
            paper = "getComputedStyle(document.body).backgroundColor"
            seen.append(tab.value(f"[document.documentElement.dataset.theme ?? '', {paper}]"))
        assert [theme for theme, _ in seen] == ["light", "dark", ""]
        assert seen[0][1] == seen[2][1] != seen[1][1]
        assert tab.problems() == []


def test_a_token_tells_both_models_candidates(tmp_path: Path) -> None:
    page = written(folder(tmp_path, "medusa"), "measure")
    with browser(find_chromium()) as chrome:
        tab = BrowserTab.open(chrome, 400, "dark")
        tab.visit(page.resolve().as_uri())
        tab.value("document.querySelectorAll('.token[role=option]')[3].focus()")
        said = tab.value("document.querySelector('.candidates').innerText")
        assert "corrected by the target" in said and "75.0%" in said and "50.0%" in said
        assert "verification 1" in said
        tab.press("ArrowDown", 40)
        assert "added by the target" in tab.value("document.querySelector('.candidates').innerText")
        shown = tab.value("document.querySelector('.answer').innerText")
        assert "if" in shown and "↵" in shown


def test_without_a_browser_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install chromium"):
        find_chromium()
