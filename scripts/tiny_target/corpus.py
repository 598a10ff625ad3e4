"""Collects the text of the corpus: the standard library, its documentation topics, installed and downloaded packages.

The order is deterministic (source, then path), equal files are kept once, and files that no reader would call source or prose
(minified, generated, tables of numbers, other scripts) are left out. Nothing collected here is imported or executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from scripts.tiny_target.groups import Group, normalise, package_group, stdlib_group, topic_group

MAX_FILE_BYTES = 300_000
MIN_FILE_BYTES = 200
SKIPPED_FOLDERS = frozenset("__pycache__ site-packages _vendor vendor _vendored node_modules locale locales .git".split())
PROSE_SUFFIXES = (".md", ".rst", ".txt")
CHANGES = re.compile(r"chang|news|histor|release|whatsnew|what.?s.new|licen|copying|authors|credits|requirements|zh|translat", re.I)
SPECIAL = re.compile(r"<\|(pad|bos|user|assistant|system|end)\|>")


@dataclasses.dataclass(frozen=True)
class Document:
    """One file or documentation topic: `source` is the package, `path` its place in it, `text` the cleaned content."""

    source: str
    path: str
    kind: Literal["python", "prose"]
    group: Group
    text: str

    @property
    def name(self) -> str:
        """Return `source/path`, unique in a corpus."""
        return f"{self.source}/{self.path}"


def clean(text: str) -> str:
    """Return `text` with unix line ends, no trailing blanks, no leading licence comment and at most two empty lines in a row."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4).split("\n")]
    head = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    if re.search(r"copyright|licen[sc]e|coding[:=]", "\n".join(lines[:head]), re.I):
        lines = lines[head:]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"


def is_readable(text: str) -> bool:
    """Return False for minified or generated files: long lines, mostly digits, many non-ASCII letters, special tokens."""
    if len(text) < MIN_FILE_BYTES or SPECIAL.search(text):
        return False
    lines = text.count("\n") + 1
    if len(text) / lines > 120 or max(map(len, text.split("\n"))) > 2000:
        return False
    solid = max(1, len(text) - text.count(" ") - text.count("\n"))
    digits = sum(map(text.count, "0123456789"))
    strange = len(text.encode()) - len(text)
    return digits / solid < 0.25 and strange / solid < 0.05


def _document(source: str, path: str, group: Group, raw: bytes) -> Document | None:
    """Return the document of one file, or None where it is not worth training on."""
    if not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES:
        return None
    prose = path.endswith(PROSE_SUFFIXES)
    if prose and CHANGES.search(path):
        return None
    if path.endswith(".txt") and "/doc" not in f"/{path}":
        return None
    if not prose and not path.endswith(".py"):
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not is_readable(text):
        return None
    text = clean(text)
    if len(text) < MIN_FILE_BYTES:
        return None
    return Document(source, path, "prose" if prose else "python", group, text)


def _skipped(path: str) -> bool:
    return any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.split("/")[:-1])


def from_stdlib(root: Path | None = None) -> Iterator[Document]:
    """Yield the standard library's modules and their tests, in path order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not _skipped(path) and not path.startswith(("lib2to3/tests/data", "test/badsyntax", "pydoc_data")):
            document = _document("stdlib", path, stdlib_group(path), file.read_bytes())
            if document:
                yield document


def from_topics() -> Iterator[Document]:
    """Yield the language reference topics that `help()` shows."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        if len(text) >= MIN_FILE_BYTES:
            yield Document("topics", topic, "prose", topic_group(topic), clean(text))


def from_site_packages(root: Path | None = None, skip: Iterable[str] = ()) -> Iterator[Document]:
    """Yield sources, prose files and package descriptions of every installed package whose name is not in `skip`."""
    root = root or Path(sysconfig.get_paths()["purelib"])
    left_out = set(skip)
    for folder in sorted(root.iterdir()):
        name = normalise(folder.name.split("-")[0])
        if folder.is_symlink() or folder.name.endswith(".egg-info") or name in left_out:
            continue
        if folder.name.endswith(".dist-info"):
            readme = _readme(folder / "METADATA", name)
            if readme:
                yield readme
            continue
        files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        for file in files:
            path = file.relative_to(root).as_posix()
            if file.suffix in (".py", *PROSE_SUFFIXES) and file.is_file() and not _skipped(path):
                document = _document(name, path, package_group(name), file.read_bytes())
                if document:
                    yield document


def _readme(metadata: Path, name: str) -> Document | None:
    if not metadata.is_file():
        return None
    body = metadata.read_bytes().partition(b"\n\n")[2]
    return _document(name, "README.md", package_group(name), body)


def from_archive(archive: Path) -> Iterator[Document]:
    """Yield the files of one downloaded sdist (`.tar.gz`) or wheel, in path order."""
    name = normalise(re.split(r"-\d", archive.name)[0])
    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            members = [(info.filename, info) for info in wheel.infolist() if not info.is_dir()]
            for path, info in sorted(members, key=lambda pair: pair[0]):
                if _wanted(path) and info.file_size <= MAX_FILE_BYTES:
                    document = _document(name, path, package_group(name), wheel.read(info))
                    if document:
                        yield document
        return
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as sdist:
        for member in sdist:
            path = member.name.partition("/")[2]
            if member.isfile() and member.size <= MAX_FILE_BYTES and _wanted(path):
                stream = sdist.extractfile(member)
                if stream is not None:
                    found[path] = stream.read()
    for path in sorted(found):
        document = _document(name, path, package_group(name), found[path])
        if document:
            yield document


def _wanted(path: str) -> bool:
    return path.endswith((".py", *PROSE_SUFFIXES)) and not _skipped(path)


def archive_package(archive: Path) -> str:
    """Return the normalised package name of a downloaded archive."""
    return normalise(re.split(r"-\d", archive.name)[0])


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Return the documents with equal texts kept once; a held-out copy wins over a training copy."""
    best: dict[bytes, Document] = {}
    for document in documents:
        key = hashlib.sha256(document.text.encode()).digest()
        known = best.get(key)
        if known is None or (known.group == "train" and document.group != "train"):
            best[key] = document
    return sorted(best.values(), key=lambda document: document.name)


def cap_sources(documents: list[Document], max_bytes: int) -> list[Document]:
    """Return the documents with each training source cut to about `max_bytes` of text, files chosen by their hash.

    A few very large packages would otherwise be most of the corpus.
    """
    def order(document: Document) -> bytes:
        return hashlib.sha256(document.name.encode()).digest()

    used: dict[str, int] = {}
    kept = []
    for document in sorted(documents, key=order):
        size = used.get(document.source, 0)
        if document.group != "train" or document.source == "stdlib" or size < max_bytes:
            used[document.source] = size + len(document.text)
            kept.append(document)
    return sorted(kept, key=lambda document: document.name)


WINDOW = 6  # code lines that must agree in a row before two files count as sharing a passage


def _passages(text: str) -> Iterator[int]:
    lines = [line for line in map(str.strip, text.split("\n")) if len(line) > 3 and not line.startswith("#")]
    for start in range(len(lines) - WINDOW + 1):
        yield hash(tuple(lines[start : start + WINDOW]))


def drop_leaks(documents: list[Document]) -> tuple[list[Document], list[str]]:
    """Return the documents without training files that share passages with a held-out one, and the names dropped.

    Catches vendored and lightly edited copies, which a hash of the whole file does not. A file goes when three windows of six
    code lines, or one in ten of its windows, stand in a held-out file too.
    """
    held = {passage for document in documents if document.group != "train" for passage in _passages(document.text)}
    kept, dropped = [], []
    for document in documents:
        if document.group == "train":
            windows = list(_passages(document.text))
            shared = sum(window in held for window in windows)
            if shared >= 3 or shared > 0.1 * len(windows):
                dropped.append(document.name)
                continue
        kept.append(document)
    return kept, dropped
