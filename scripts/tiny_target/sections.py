"""Cuts prose into sections: reStructuredText and Markdown files and `pydoc` topics become heading -> text pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.tiny_target.corpus import Document
from scripts.tiny_target.phrasing import Pair

MIN_SECTION = 90
MAX_SECTION = 1250
UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}$")
MARKDOWN = re.compile(r"^#{1,4} +(.*?)#* *$")
NOISE = re.compile(r"^\.\. (_[^:]*:|index::|module::|currentmodule::|highlight::|meta::|toctree::|contents::|versionadded::).*$")
BADGE = re.compile(r"^(\[!\[|!\[|\.\. image::|\.\. figure::|\||<)")


def trim(text: str, limit: int) -> str:
    """Return `text` cut to at most `limit` characters at a paragraph's end, or "" if its first paragraph is longer."""
    text = text.strip()
    if len(text) <= limit:
        return text
    cut = text.rfind("\n\n", 0, limit + 1)
    return text[:cut].rstrip() if cut > 0 else ""


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, body) of a reStructuredText or Markdown text; text before the first heading is left out."""
    lines = text.split("\n")
    heading, body = "", list[str]()
    fenced = False
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.startswith("```"):
            fenced = not fenced
        title = MARKDOWN.match(line) if not fenced else None
        below = lines[index + 1] if index + 1 < len(lines) else ""
        underlined = not fenced and _is_title(line, below)
        if title or underlined:
            if heading:
                yield heading, "\n".join(body)
            heading, body = (title.group(1) if title else line).strip(), []
            index += 1 if title else 2
            continue
        body.append(line)
        index += 1
    if heading:
        yield heading, "\n".join(body)


def _is_title(line: str, below: str) -> bool:
    return bool(UNDERLINE.match(below)) and 2 < len(line) <= len(below) + 1 and line[0] not in " .:=-*|+#>"


def tidy(body: str) -> str:
    """Return a section's body without labels, badges and index entries, with at most one empty line in a row."""
    kept = [line for line in body.split("\n") if not NOISE.match(line) and not BADGE.match(line) and not UNDERLINE.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def reference_pairs(document: Document) -> Iterator[Pair]:
    """Yield the reference pairs of one prose document: sections with a real heading and enough text."""
    topic = document.source == "topics"
    where = "the Python reference" if topic else document.source
    for heading, body in sections(document.text):
        heading = re.sub(r"[*`]+|:\w+:|\{#.*?\}|\[|\]\(.*?\)", "", heading).strip().rstrip(":")
        answer = trim(tidy(body), MAX_SECTION)
        if not 3 < len(heading) < 80 or not re.match(r"[A-Za-z\"_]", heading) or len(answer) < MIN_SECTION:
            continue
        letters = sum(map(str.isalpha, answer)) / len(answer)
        if letters >= 0.55 and not re.search(r"https?://\S{60,}", answer):
            yield Pair("reference", document.name, where, heading, "", answer)
