"""Hooks of the documentation site (mkdocs.yml): titles of code blocks, links that leave docs/,
pictures, the example report, and the link to the repository.

The info string of a bash block says how it is tested: `bash test` (executed by tests/newcomer/),
`bash long` (minutes on a CPU) or `bash gpu` (needs a GPU, a download or another program). For the
last two, the tests compose every `headstart` command and plan every training whose target's sizes
are known here. `bash example` uses a file that the page describes.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "assets"
REPORT = ROOT / "docs" / "reports" / "demo.json"
EXAMPLE = "example/report.html"
"""The place of the page of `REPORT` on the site; docs/example_report.md links to it."""

TITLES = {
    "test": "executed by the tests",
    "long": "takes minutes; composed by the tests",
    "gpu": "needs a GPU or a real model; composed by the tests",
    "example": "with the files of this page",
}
BLOCK = re.compile(r"^```bash (\w+)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+[^)]+)\)")
PICTURE = re.compile(r"assets/[\w-]+\.(?:svg|png)")


def on_config(config: Any, **_: Any) -> Any:
    """Link the repository that the checkout was cloned from, if any."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    config["repo_url"] = repository_page(found.stdout.strip()) or None
    return config


def repository_page(remote: str) -> str:
    """The web page of a remote, "git@host:owner/name.git" or "https://host/owner/name.git"; empty
    if it has none, such as a folder."""
    found = re.fullmatch(r"(?:https://(?:[^@/]+@)?|git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pictures of assets/, which pages reference as on the repository's pages, and the
    report's page."""
    from mkdocs.structure.files import File  # installed only with the site's packages

    for path in sorted([*ASSETS.glob("*.svg"), *ASSETS.glob("*.png")]):
        files.append(File.generated(config, f"assets/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, EXAMPLE, content=example_report()))
    return files


def example_report() -> str:
    """report.html of the committed report, as `headstart report` writes it."""
    from inference.report.page.render import write_page  # loads torch, which hooks do not need

    with tempfile.TemporaryDirectory() as folder:
        path = write_page([("demo", REPORT)], Path(folder))
        return path.read_text(encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add titles to marked code blocks, show pictures of assets/, and replace links to other files
    outside docs/ by the files' names."""
    return site_markdown(markdown, page.file.src_uri)


def site_markdown(markdown: str, uri: str) -> str:
    """The text of the page docs/<uri> as the site shows it."""
    titled = BLOCK.sub(lambda found: f'```bash title="{TITLES[found[1]]}"', markdown)
    folder = posixpath.dirname(uri)

    def shown(found: re.Match[str]) -> str:
        mark, words, link = found.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, link))
        if path.startswith("docs/"):
            return found[0]
        if PICTURE.fullmatch(path):
            return f"{mark}[{words}]({posixpath.relpath(path, folder or '.')})"
        return words if words.startswith("`") else f"{words} (`{path}`)"

    return LINK.sub(shown, titled)
