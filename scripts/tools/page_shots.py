"""Opens report.html in headless Chromium, checks it and takes screenshots.

    python -m scripts.tools.page_shots outputs/demo/report.html --out shots
    python -m scripts.tools.page_shots outputs/demo/report.html --picture assets/report.png

The second command takes one picture of the page's best parts for a README. It shows whole elements,
one below another: the head with the summary, the first charts of the lost speed, and the beginning
of an answer.

It needs `pip install playwright` and a Chromium: Debian's package `chromium`, or the one that
`--chromium` or HEADSTART_CHROMIUM names. The check runs at widths of 400 and 1600 pixels, light and
dark. It requires no message on the console, no error, no request except for the page itself,
nothing wider than the window, a size under 3 MB, every stop of the Tab key visible and named, and
arrow keys that move through an answer's tokens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from heads.api.errors import UserError
from scripts.tools.common import command

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "HEADSTART_CHROMIUM"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
WIDTHS = (400, 1600)
MOST_BYTES = 3_000_000
MOST_STOPS = 400
"""Presses of the Tab key after which the walk ends."""
FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const b = e.getBoundingClientRect();
  const labels = e.labels ? [...e.labels].map((l) => l.textContent).join(" ") : "";
  const viewer = e.closest(".viewer");
  return {
    what: e.outerHTML.slice(0, 120), token: e.classList.contains("token"),
    visible: b.width > 0 && b.height > 0 && b.right > 0 && b.left < innerWidth,
    named: (e.getAttribute("aria-label") || labels || e.textContent).trim() !== "",
    place: viewer ? [...viewer.querySelectorAll(".answer .token")].indexOf(e) : -1,
    panel: viewer ? viewer.querySelector(".candidates").textContent : "",
  };
}"""


PICTURE_WIDTH = 1280
KEEP = """() => {
  const show = (selector, most) => [...document.querySelectorAll(selector)].slice(0, most);
  const wanted = [
    ...show("header.top > div", 1), ...show("#summary-0", 1),
    ...show("#lost-0 > h2, #lost-0 > .grid:first-of-type", 2),
    ...show("#answers-0:has(.answer) > h2, #answers-0 .legend, #answers-0 .answer", 3),
  ];
  const keep = new Set();
  for (const e of wanted) for (let p = e; p; p = p.parentElement) keep.add(p);
  for (const e of document.body.querySelectorAll("*")) {
    if (!keep.has(e) && !wanted.some((w) => w.contains(e))) e.style.display = "none";
  }
  for (const e of show(".columns, .reader", 9)) e.style.display = "block";
  for (const e of show("#lost-0 .grid figure", 99).slice(2)) e.style.display = "none";
  for (const e of show("#answers-0 .answer > *", 9999).slice(90)) e.style.display = "none";
  for (const e of show("main, section", 99)) e.style.paddingBottom = "1.5rem";
}"""
"""Hides everything except the elements that are completely in the picture."""


def report(given: argparse.Namespace) -> int:
    if given.picture is not None:
        take_picture(given.page, given.picture, given.chromium)
        return 0
    found = check(given.page, given.out, given.chromium, given.sections)
    print("\n".join(found) or "nothing found")
    return int(bool(found))


def check(
    page: Path, out: Path | None, chromium: str | None = None, sections: Sequence[str] = ()
) -> list[str]:
    """The faults of a page, one sentence each; writes screenshots to `out`."""
    if not page.is_file():
        raise UserError(f"there is no page '{page}'. `headstart report` writes one.")
    found = []
    size = page.stat().st_size
    if size >= MOST_BYTES:
        found.append(f"the page has {size:,} bytes; {MOST_BYTES:,} are allowed.")
    themes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    with launch(find_chromium(chromium)) as browser:
        for width in WIDTHS:
            for theme in themes:
                tab, problems = open_page(browser, page, width, theme)
                if out is not None:
                    tab.screenshot(path=out / f"{width}-{theme}.png", full_page=True)
                    for name in sections:
                        shot = out / f"{width}-{theme}-{name}.png"
                        tab.locator(f"[id='{name}']").screenshot(path=shot)
                if theme == "light":
                    problems += walk(tab)
                found += [f"{width} {theme}: {problem}" for problem in problems]
                tab.context.close()
    return found


def take_picture(page: Path, picture: Path, chromium: str | None) -> None:
    """Write one picture of a page's best parts; nothing in it is cut."""
    if not page.is_file():
        raise UserError(f"there is no page '{page}'. `headstart report` writes one.")
    with launch(find_chromium(chromium)) as browser:
        tab, _ = open_page(browser, page, PICTURE_WIDTH, "light")
        tab.evaluate(KEEP)
        tab.screenshot(path=picture, full_page=True)
        tab.context.close()


def find_chromium(named: str | None = None) -> str:
    """The browser's program; raises `UserError` if there is none."""
    wanted = named or os.environ.get(VARIABLE)
    for path in map(shutil.which, (wanted,) if wanted else NAMES):
        if path:
            return path
    raise UserError(
        f"no Chromium was found{f' ({wanted})' if wanted else ''}. Install one (`apt-get install "
        f"chromium`), or name it with {VARIABLE}=/path/to/chromium."
    )


@contextmanager
def launch(program: str) -> Iterator[Any]:
    """A headless browser, as playwright's `Browser`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise UserError("checking a page needs playwright: `pip install playwright`.") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def open_page(
    browser: Any, page: Path, width: int, theme: Literal["light", "dark"]
) -> tuple[Any, list[str]]:
    """A tab with the page, and the problems while it loaded; later problems are added to the
    list."""
    address = page.resolve().as_uri()
    viewport = {"width": width, "height": 1000}
    tab = browser.new_context(viewport=viewport, color_scheme=theme).new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(f"the console says: {message.text[:300]}"))
    tab.on("pageerror", lambda error: problems.append(f"the page throws: {str(error)[:300]}"))

    def note_request(request: Any) -> None:
        if request.url.split("#")[0] != address:
            problems.append(f"the page asks for {request.url[:200]}")

    tab.on("request", note_request)
    tab.goto(address)
    wide = tab.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        problems.append(f"the page is {wide} wide; the window has {width}")
    return tab, problems


def walk(tab: Any) -> list[str]:
    """Walk through a page by Tab and through an answer by arrows; returns the problems."""

    def press(key: str) -> Any:
        tab.keyboard.press(key)
        return tab.evaluate(FOCUSED)

    found, stops, tokens = [], 0, False
    while stops < MOST_STOPS and (here := press("Tab")):
        stops += 1
        if not here["visible"]:
            found.append(f"the Tab key stops at something that cannot be seen: {here['what']}")
        if not here["named"]:
            found.append(f"the Tab key stops at something without a name: {here['what']}")
        if here["token"] and not tokens:
            tokens, after = True, press("ArrowRight")
            if after is None or not after["token"]:
                found.append("the arrow keys leave the answer")
            elif "candidates" not in after["panel"]:
                found.append("a focused token does not show its candidates")
            first = press("Home")
            if first is None or first["place"] != 0:
                found.append("Home does not go to the first token")
    if stops < 5:
        found.append(f"the Tab key found {stops} stops only")
    if not tokens and tab.locator(".viewer").count():
        found.append("the Tab key never came to an answer's tokens")
    return found


main = command(
    report,
    page={"positional": True, "type": Path},
    picture={"type": Path, "help": "take one picture of the best parts and check nothing"},
    out={"type": Path, "help": "folder for screenshots; default: none"},
    chromium={},
    sections={"nargs": "*", "default": [], "help": "ids of elements for close-ups"},
)

if __name__ == "__main__":
    sys.exit(main())
