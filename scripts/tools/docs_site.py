"""Hooks of the documentation site (mkdocs.yml): titles of code blocks, links that leave docs/,
pictures, and the link to the repository.

The info string of a bash block says who has run it: `bash test` (executed by tests/newcomer/),
`bash long` (minutes on a CPU) or `bash gpu` (needs a GPU, a download or another program); of the
last two the tests compose every `headstart` command. `bash example` uses a file that the page
describes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "assets"

TITLES = {
    "test": "executed by the tests",
    "long": "takes minutes; composed by the tests",
    "gpu": "needs a GPU or a real model",
    "example": "with the files of this page",
}
BLOCK = re.compile(r"^```bash (\w+)$", re.MULTILINE)
PICTURE = re.compile(r"\]\(\.\./assets/([\w-]+\.(?:svg|png))\)")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_config(config: Any, **_: Any) -> Any:
    """Link the repository that the checkout was cloned from; without one there is no link."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    config["repo_url"] = repository_page(found.stdout.strip()) or None
    return config


def repository_page(remote: str) -> str:
    """The web page of a remote, "git@host:owner/name.git" or "https://host/owner/name.git"; empty
    for one that has none, such as a folder."""
    found = re.fullmatch(r"(?:https://(?:[^@/]+@)?|git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pictures of assets/, which pages name as on the repository's own pages."""
    from mkdocs.structure.files import File  # of the site's packages alone

    for path in sorted([*ASSETS.glob("*.svg"), *ASSETS.glob("*.png")]):
        files.append(File.generated(config, f"assets/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Add titles to marked code blocks; show pictures of assets/; replace links to other files
    outside docs/ by the files' names."""
    titled = BLOCK.sub(lambda found: f'```bash title="{TITLES[found[1]]}"', markdown)
    titled = PICTURE.sub(r"](assets/\1)", titled)
    return OUTSIDE.sub(
        lambda found: found[1] if found[1].startswith("`") else f"{found[1]} (`{found[2]}`)", titled
    )
