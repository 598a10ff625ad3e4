"""Hooks of the documentation site (mkdocs.yml): titles of code blocks, and links that leave docs/.

The info string of a bash block says who has run it: `bash test` (executed by tests/test_docs.py),
`bash long` (minutes on a CPU) or `bash gpu` (needs a GPU, a download or another program); of the
last two the tests compose every `headstart` command. `bash example` uses a file that the page
describes.
"""

from __future__ import annotations

import re
from typing import Any

TITLES = {
    "test": "executed by the tests",
    "long": "takes minutes; composed by the tests",
    "gpu": "needs a GPU or a real model",
    "example": "with the files of this page",
}
BLOCK = re.compile(r"^```bash (\w+)$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Add titles to marked code blocks; replace links to files outside docs/ by the files'
    names."""
    titled = BLOCK.sub(lambda found: f'```bash title="{TITLES[found[1]]}"', markdown)
    return OUTSIDE.sub(
        lambda found: found[1] if found[1].startswith("`") else f"{found[1]} (`{found[2]}`)", titled
    )
