"""Opens report.html in headless Chromium, checks it and takes screenshots: light and dark, a phone's width and a wide screen.

    python -m scripts.page_shots outputs/demo/report.html --out shots

The browser is driven over its debugging pipe (the DevTools protocol, one JSON message behind the other), so nothing but a Chromium
is needed: Debian's package `chromium`, or any other that `--chromium` or HEADSTART_CHROMIUM names. What is checked, at every width:
no message on the console, no error, no request beside the page itself, nothing wider than the window, under 3 MB; and that the page
can be used from the keyboard: every stop of the Tab key is visible, and arrows walk through an answer's tokens.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.api.errors import UserError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "HEADSTART_CHROMIUM"
WIDTHS = (400, 1600)
MOST_BYTES = 3_000_000
SECONDS = 60.0
TABS = 400
"""Presses of the Tab key after which a walk is given up."""


def main(arguments: list[str] | None = None) -> int:
    """Check and photograph a page; the exit status is 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m scripts.page_shots", description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="folder for the screenshots; without it none are taken")
    parser.add_argument("--chromium", default=None)
    parser.add_argument("--sections", nargs="*", default=[], help="ids of elements to take close-ups of")
    given = parser.parse_args(arguments)
    try:
        found = check(given.page, given.out, given.chromium, given.sections)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(found) or "nothing found")
    return int(bool(found))


def find_chromium(named: str | None = None) -> str:
    """The browser's program; raises `UserError` where there is none."""
    wanted = named or os.environ.get(VARIABLE)
    for name in (wanted,) if wanted else NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise UserError(
        f"no Chromium was found{f' ({wanted})' if wanted else ''}. Install one (`apt-get install chromium`), or name it with "
        f"{VARIABLE}=/path/to/chromium."
    )


def check(page: Path, out: Path | None, chromium: str | None = None, sections: Sequence[str] = ()) -> list[str]:
    """What is wrong with a page, one sentence each; writes screenshots to `out`."""
    if not page.is_file():
        raise UserError(f"there is no page '{page}'. `headstart report` writes one.")
    found = []
    size = page.stat().st_size
    if size >= MOST_BYTES:
        found.append(f"the page has {size:,} bytes; {MOST_BYTES:,} are allowed.")
    with browser(find_chromium(chromium)) as chrome:
        for width in WIDTHS:
            for theme in ("light", "dark"):
                tab = Tab.open(chrome, width, theme)
                tab.visit(page.resolve().as_uri())
                found += [f"{width} {theme}: {problem}" for problem in tab.problems()]
                if out is not None:
                    tab.photograph(out / f"{width}-{theme}.png")
                    for name in sections:
                        tab.photograph(out / f"{width}-{theme}-{name}.png", name)
                if theme == "light":
                    found += [f"{width}: {problem}" for problem in tab.walk()]
                tab.close()
    return found


# ---- the browser -------------------------------------------------------------------------------------------------


@dataclass
class Chrome:
    """A running browser and its pipes. events: what it reported beside answers."""

    into: Any
    from_: Any
    last: int = 0
    buffer: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for its answer; raises `UserError` when it refuses."""
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self.last:
                if "error" in found:
                    raise UserError(f"Chromium refused {method}: {found['error'].get('message')}")
                return dict(found["result"])
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            chunk = os.read(self.from_, 1 << 20)
            if not chunk:
                raise UserError("Chromium ended unexpectedly.")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return dict(json.loads(message))


@contextmanager
def browser(program: str) -> Iterator[Chrome]:
    """A headless Chromium with a profile of its own, which goes when it does. It reads commands on descriptor 3, answers on 4."""
    commands, answers = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # the shell moves the pipes to the descriptors that Chromium looks at
        wrapped = f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}'
        process = subprocess.Popen(
            ["bash", "-c", wrapped, program, *options],
            pass_fds=(commands[0], answers[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            yield Chrome(commands[1], answers[0])
        finally:
            os.close(commands[1])
            os.close(answers[0])
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class Tab:
    """One page in the browser."""

    chrome: Chrome
    target: str
    session: str
    width: int
    address: str = ""

    @classmethod
    def open(cls, chrome: Chrome, width: int, theme: str) -> Tab:
        """An empty tab of a width, in a colour scheme."""
        target = chrome.call("Target.createTarget", url="about:blank")["targetId"]
        session = chrome.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = cls(chrome, target, session, width)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.ask(f"{domain}.enable")
        tab.ask("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        return tab

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.chrome.call(method, self.session, **parameters)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise UserError(f"the page threw: {found['exceptionDetails'].get('text')} ({expression[:80]})")
        return found["result"].get("value")

    def visit(self, address: str) -> None:
        """Open an address and wait until it has been drawn."""
        self.chrome.events.clear()
        self.address = address
        self.ask("Page.navigate", url=address)
        end = time.monotonic() + SECONDS
        while self.value("document.readyState") != "complete" or self.value("location.href") != address:
            if time.monotonic() > end:
                raise UserError(f"'{address}' was not loaded within {SECONDS:.0f} s.")
            time.sleep(0.05)
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def problems(self) -> list[str]:
        """Messages on the console, requests, and elements wider than the window."""
        found = []
        for event in self.chrome.events:
            if event.get("sessionId") != self.session:
                continue
            method, told = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(f"the console says: {_said(told)[:300]}")
            elif method == "Network.requestWillBeSent" and told["request"]["url"].split("#")[0] != self.address:
                found.append(f"the page asks for {told['request']['url'][:200]}")
        wide = self.value("document.documentElement.scrollWidth")
        if wide > self.width:
            found.append(f"the page is {wide} wide; the window has {self.width}")
        return found

    def photograph(self, path: Path, element: str = "") -> None:
        """A screenshot of the whole page, or of one element by its id."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if element:
            script = f"(() => {{ const e = document.getElementById({json.dumps(element)}); if (!e) return null; "
            script += "const b = e.getBoundingClientRect(); return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()"
            box = self.value(script)
            if box is None:
                raise UserError(f"the page has no element '{element}'.")
        else:
            box = [0, 0, self.width, self.value("document.documentElement.scrollHeight")]
        clip = {"x": box[0], "y": box[1], "width": box[2], "height": box[3], "scale": 1}
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def walk(self) -> list[str]:
        """Walk through the page by Tab and through an answer by arrows; what went wrong on the way."""
        found, stops = [], 0
        self.value("(document.activeElement && document.activeElement.blur(), scrollTo(0, 0), 1)")
        seen = False
        for _ in range(TABS):
            self.press("Tab", 9)
            here = self.value(FOCUSED)
            if here is None:
                break
            stops += 1
            if not here["visible"]:
                found.append(f"the Tab key stops at something that cannot be seen: {here['what']}")
            if not here["named"]:
                found.append(f"the Tab key stops at something without a name: {here['what']}")
            if here["token"] and not seen:
                seen = True
                found += self._arrows(here["text"])
        if stops < 5:
            found.append(f"the Tab key found {stops} stops only")
        if not seen and self.value("!!document.querySelector('.viewer')"):
            found.append("the Tab key never came to an answer's tokens")
        return found

    def _arrows(self, first: str) -> list[str]:
        self.press("ArrowRight", 39)
        here = self.value(FOCUSED)
        panel = self.value("document.activeElement.closest('.viewer').querySelector('.candidates').textContent")
        found = []
        if here is None or not here["token"]:
            found.append("the arrow keys leave the answer")
        elif "candidates" not in panel:
            found.append("a focused token does not show its candidates")
        self.press("Home", 36)
        at = self.value("[...document.activeElement.closest('.answer').querySelectorAll('.token')].indexOf(document.activeElement)")
        if at != 0:
            found.append(f"Home goes to token {at}, not to the first (from {first!r})")
        return found

    def close(self) -> None:
        self.chrome.call("Target.closeTarget", targetId=self.target)


def _said(told: dict[str, Any]) -> str:
    """The words of a console message, an exception or a log entry."""
    if "exceptionDetails" in told:
        details = told["exceptionDetails"]
        return str(details.get("exception", {}).get("description") or details.get("text"))
    if "entry" in told:
        return str(told["entry"].get("text"))
    return " ".join(str(item.get("value", item.get("description"))) for item in told.get("args", []))


FOCUSED = """(() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const b = e.getBoundingClientRect();
  const labels = e.labels ? [...e.labels].map((l) => l.textContent).join(" ") : "";
  const name = e.getAttribute("aria-label") || labels || e.textContent;
  return {
    what: e.outerHTML.slice(0, 120), text: e.textContent.slice(0, 40), token: e.classList.contains("token"),
    visible: b.width > 0 && b.height > 0 && b.right > 0 && b.left < innerWidth, named: name.trim() !== "",
  };
})()"""


if __name__ == "__main__":
    sys.exit(main())
