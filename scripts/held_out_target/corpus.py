"""C++ headers that come with torch and pyarrow, turned into conversations: text that the embedded target never saw.

The embedded target reads Python files and prose; headers are neither. Three ways to ask: `continue` (some lines, then what
follows), `declare` (a comment, then the code under it) and `comment` (the other way round). Files are split by their stem, so that
`x.h` and `x_inl.h` stay together: group A gives prompts for training drafters, group B for measuring.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from scripts.tiny_target.corpus import Document, deduplicate, drop_leaks
from scripts.tiny_target.groups import Group

SUFFIXES = (".h", ".hpp", ".cuh")
PACKAGES = ("torch", "pyarrow")
GENERATED = re.compile(
    r"ATen/ops/|ATen/(Redispatch|Vmap|Registration|Native|Operators|Functions|MethodOp)|\.pb\.h$|sleef|ittnotify"
)
LICENCE = re.compile(r"copyright|licen[sc]e", re.I)
MIN_FILE, MAX_FILE = 400, 60_000
MIN_SHOWN, MAX_SHOWN = 40, 480
MIN_ANSWER, MAX_ANSWER = 60, 640
DOMAINS = ("continue", "declare", "comment")
ASKED = {
    "continue": "Go on with {path}:\n{shown}",
    "declare": "Code for this comment in {path}:\n{shown}",
    "comment": "Comment this code of {path}:\n{shown}",
}
Row = dict[str, str]
"""`domain`, `source`, `asked` (the user's message) and `answer`."""


def documents() -> list[Document]:
    """Return the headers of the installed packages, deduplicated, without training files that share passages with held-out ones."""
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is a dependency"
        found += list(headers(Path(spec.origin).parent / "include", package))
    return drop_leaks(deduplicate(found))[0]


def headers(root: Path, source: str) -> Iterator[Document]:
    """Yield the readable, hand-written headers below `root`, in path order."""
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix not in SUFFIXES or GENERATED.search(path) or not file.is_file():
            continue
        try:
            text = without_licence(file.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(4))
        except UnicodeDecodeError:
            continue
        digits = sum(map(text.count, "0123456789"))
        if MIN_FILE <= len(text) <= MAX_FILE and digits < 0.12 * len(text):
            yield Document(source, path, "prose", group_of(path), text)


def without_licence(text: str) -> str:
    """Return `text` without trailing blanks and without the licence comment that it opens with."""
    lines = [line.rstrip() for line in text.split("\n")]
    end = 0
    while end < len(lines) and (not lines[end] or lines[end].lstrip().startswith(("//", "/*", "*"))):
        end += 1
    if LICENCE.search("\n".join(lines[:end])):
        lines = lines[end:]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def group_of(path: str) -> Group:
    """Return the group of a header: a quarter A, an eighth B, by the hash of its stem without the usual endings."""
    stem = re.sub(r"([_-](inl|impl|internal|fwd|utils?|defs))+$", "", Path(path).stem.lower())
    bucket = hashlib.sha256(stem.encode()).digest()[0] % 8
    return "A" if bucket < 2 else "B" if bucket == 2 else "train"


def rows_of(document: Document) -> list[Row]:
    """Return what can be asked about one header, in the order of its text; equal answers once."""
    blocks = [block for block in document.text.split("\n\n") if block.strip()]
    seen: set[str] = set()
    rows = []
    for domain, shown, answer in [*_continued(blocks), *_commented(blocks)]:
        if MIN_SHOWN <= len(shown) <= MAX_SHOWN and MIN_ANSWER <= len(answer) <= MAX_ANSWER and answer not in seen:
            seen.add(answer)
            asked = ASKED[domain].format(path=document.path, shown=shown)
            rows.append({"domain": domain, "source": document.name, "asked": asked, "answer": answer})
    return rows


def _continued(blocks: list[str]) -> Iterator[tuple[str, str, str]]:
    for before, block in pairwise(blocks):
        shown = before[-MAX_SHOWN:].partition("\n")[2] if len(before) > MAX_SHOWN else before
        yield "continue", shown, block.rstrip()


def _commented(blocks: list[str]) -> Iterator[tuple[str, str, str]]:
    for block in blocks:
        lines = block.split("\n")
        end = 0
        while end < len(lines) and lines[end].lstrip().startswith(("//", "/*", "*")):
            end += 1
        comment, code = "\n".join(lines[:end]), "\n".join(lines[end:])
        if comment and code.strip():
            # One of the two, so that a question never holds another question's answer.
            if hashlib.sha256(block.encode()).digest()[0] % 2:
                yield "declare", comment, code
            else:
                yield "comment", code, comment
