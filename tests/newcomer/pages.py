"""What the documentation prints: its pages, their code blocks, and the commands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("howto/*.md")])
"""The pages of the site; those of docs/reports/ are written by commands."""
FIRST = [README, DOCS / "quickstart.md", *sorted(DOCS.glob("howto/*.md"))]
"""What a newcomer reads first."""
INFOS = ("bash", "bash test", "bash long", "bash gpu")
"""Blocks whose commands need nothing but what the page names (scripts/tools/docs_site.py)."""


def blocks(page: Path, info: str) -> list[str]:
    """The code blocks of a page with this info string."""
    return re.findall(
        rf"^```{re.escape(info)}\n(.*?)^```",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )


def file_block(page: Path, file: str) -> str:
    """The code block of a page that opens with the path of its file in a comment."""
    (found,) = re.findall(
        rf"```\w+\n# {re.escape(file)}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return str(found)


def lines(block: str) -> list[str]:
    """The commands of a block: continued lines are joined, exported variables are replaced by their
    values, comments are left out."""
    found, values = [], {}
    for line in block.replace("\\\n", " ").splitlines():
        if exported := re.fullmatch(r'export (\w+)="([^"]*)"', line.strip()):
            values[exported[1]] = exported[2]
        elif line := re.sub(r"(^|\s)#.*", "", line).strip():
            found.append(re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), line))
    return found


def commands(page: Path, *infos: str) -> list[str]:
    """The commands of a page that call `headstart`, or what launches it, in blocks with these info
    strings (default: `INFOS`)."""
    calls = re.compile(r"(^|[ |])(headstart|scripts\.cli|\S*launch/\S+) ")
    return [
        line
        for info in infos or INFOS
        for block in blocks(page, info)
        for line in lines(block)
        if calls.search(line)
    ]


def command(page: str, *words: str) -> str:
    """The first command of a page ("docs/data.md") with these words in it, as printed."""
    found = [line for line in commands(ROOT / page) if all(word in line for word in words)]
    assert found, f"{page} prints no command with {words}"
    return found[0]


def page_name(page: Path) -> str:
    """How tests call a page."""
    return page.relative_to(ROOT).as_posix()
