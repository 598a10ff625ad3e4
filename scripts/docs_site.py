"""Hooks of the documentation site (mkdocs.yml): what code blocks are marked with, in words, and links that leave docs/.

A bash block says in its info string who has run it: `bash test` (tests/test_docs.py executes it), `bash long` (minutes on a CPU) or
`bash gpu` (a GPU, a download or another program); of the last two the tests compose every `headstart` command. `bash example`
belongs to a file that the page tells how to write.
"""

from __future__ import annotations

import re
from typing import Any

TITLES = {"test": "executed by the tests", "long": "takes minutes; composed by the tests", "gpu": "needs a GPU or a real model",
          "example": "with the files of this page"}  # fmt: skip
BLOCK = re.compile(r"^```bash (\w+)$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Titles for marked code blocks; a link to a file outside of docs/ becomes its name, since the site does not hold it."""
    titled = BLOCK.sub(lambda found: f'```bash title="{TITLES[found[1]]}"', markdown)
    return OUTSIDE.sub(lambda found: found[1] if found[1].startswith("`") else f"{found[1]} (`{found[2]}`)", titled)
