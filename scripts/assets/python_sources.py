"""Collects the embedded target's text: the standard library, its manual's topics, Python packages.

The order is deterministic (source, then path), equal files are kept once, and files that are
neither source nor prose (minified, generated, tables of numbers, other scripts) are left out. The
collected files are neither imported nor executed. Held-out groups are complete and disjoint: a
held-out module includes its tests, a held-out package all its files. Group A provides prompts for
training drafters; group B provides prompts for measuring and the held-out loss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from heads.api.errors import UserError

Group = Literal["train", "A", "B"]
Kind = Literal["python", "prose"]

STDLIB: dict[Group, frozenset[str]] = {
    "A": frozenset(
        "argparse asynchat cgi cmd code codeop concurrent configparser cgitb compileall csv "
        "doctest fractions glob gzip imaplib ipaddress json mailbox nntplib numbers optparse "
        "pprint profile pstats queue sched smtplib statistics tarfile telnetlib textwrap timeit "
        "trace turtle wave wsgiref xmlrpc zipapp".split()
    ),
    "B": frozenset(
        "bisect calendar chunk colorsys contextlib copy crypt datetime difflib dis fileinput "
        "ftplib functools getopt heapq hmac html linecache logging mimetypes netrc pathlib "
        "plistlib poplib quopri random reprlib secrets selectors shelve shlex shutil "
        "socketserver sqlite3 string symtable tempfile tokenize uuid weakref zipfile".split()
    ),
}
PACKAGES: dict[Group, frozenset[str]] = {
    "A": frozenset(
        "networkx werkzeug sphinx nltk dask boltons hypothesis celery scrapy scikit_image "
        "omegaconf hydra markdown_it prompt_toolkit nbconvert pyramid".split()
    ),
    "B": frozenset(
        "mpmath seaborn jinja2 fsspec starlette more_itertools marshmallow trio optuna parso "
        "xarray gunicorn dulwich traitlets".split()
    ),
}

MIN_FILE_BYTES, MAX_FILE_BYTES = 200, 300_000
PROSE_SUFFIXES = (".md", ".rst", ".txt")
SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages _vendor vendor _vendored node_modules locale locales .git".split()
)
SKIPPED_STDLIB = ("lib2to3/tests/data", "test/badsyntax", "pydoc_data")
CHANGES = re.compile(
    r"chang|news|histor|release|whatsnew|what.?s.new|licen|copying|authors|credits|requirements|zh|translat",
    re.I,
)
SPECIAL = re.compile(r"<\|(pad|bos|user|assistant|system|end)\|>")
WINDOW = 6
"""Consecutive equal code lines from which two files count as sharing a passage."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One file or manual topic: `source` is the package, `path` its place in it."""

    source: str
    path: str
    kind: Kind
    group: Group
    text: str

    @property
    def name(self) -> str:
        return f"{self.source}/{self.path}"


def stdlib_group(path: str) -> Group:
    """Return the group of a standard library file, given its posix path in the library."""
    parts = [re.sub(r"\.pyi?$", "", part) for part in path.split("/")]
    while parts and parts[0] in ("test", "tests"):
        parts = parts[1:]
    name = re.sub(r"^_?(test_?)?", "", parts[0]) if parts else ""
    for group, held in STDLIB.items():
        if name in held or any(name.startswith((f"{module}_", f"{module}test")) for module in held):
            return group
    return "train"


def package_group(name: str) -> Group:
    """Return the group of a distribution or package; case and `-`/`.`/`_` do not matter."""
    return next((group for group, held in PACKAGES.items() if normalise(name) in held), "train")


def topic_group(topic: str) -> Group:
    """Return the group of a `pydoc_data.topics` entry: a fifth each for A and B, by its hash."""
    bucket = hashlib.sha256(topic.encode()).digest()[0] % 5
    return "A" if bucket == 0 else "B" if bucket == 1 else "train"


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).strip("_").lower()


def from_stdlib() -> Iterator[Document]:
    """Yield the standard library's modules and their tests, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not path.startswith(SKIPPED_STDLIB):
            yield from _read("stdlib", path, stdlib_group(path), file.read_bytes)


def from_topics() -> Iterator[Document]:
    """Yield the language reference topics that `help()` shows."""
    from pydoc_data.topics import topics  # half a megabyte of text

    for topic, text in sorted(topics.items()):
        if len(text) >= MIN_FILE_BYTES:
            yield Document("topics", topic, "prose", topic_group(topic), clean(text))


def from_site_packages(skip: Iterable[str] = ()) -> Iterator[Document]:
    """Yield sources, prose and descriptions of installed packages, except those named in `skip`."""
    root = Path(sysconfig.get_paths()["purelib"])
    left_out = set(skip)
    for folder in sorted(root.iterdir()):
        name = normalise(folder.name.split("-")[0])
        if folder.is_symlink() or folder.name.endswith(".egg-info") or name in left_out:
            continue
        if folder.name.endswith(".dist-info"):
            if (folder / "METADATA").is_file():
                body = (folder / "METADATA").read_bytes().partition(b"\n\n")[2]
                yield from _read(name, "README.md", package_group(name), partial(bytes, body))
            continue
        for file in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if file.is_file():
                path = file.relative_to(root).as_posix()
                yield from _read(name, path, package_group(name), file.read_bytes)


def from_archive(archive: Path) -> Iterator[Document]:
    """Yield the files of one downloaded sdist (`.tar.gz`) or wheel, in path order."""
    name, files = archive_package(archive), dict[str, bytes]()
    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if info.file_size <= MAX_FILE_BYTES and is_wanted(info.filename):
                    files[info.filename] = wheel.read(info)
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                path = member.name.partition("/")[2]
                small = member.isfile() and member.size <= MAX_FILE_BYTES
                stream = sdist.extractfile(member) if small and is_wanted(path) else None
                if stream is not None:
                    files[path] = stream.read()
    for path in sorted(files):
        yield from _read(name, path, package_group(name), partial(files.__getitem__, path))


def archive_package(archive: Path) -> str:
    """Return the normalised package name of a downloaded archive."""
    return normalise(re.split(r"-\d", archive.name)[0])


def download(folder: Path) -> list[Path]:
    """Download the packages of packages.txt that are not in `folder` with pip; return its archives,
    sorted."""
    pinned = Path(__file__).with_name("packages.txt")
    lines = [line.strip() for line in pinned.read_text().splitlines()]
    options = [word for line in lines if line.startswith("--") for word in line.split()]
    wanted = [line for line in lines if line and not line.startswith(("#", "--"))]
    folder.mkdir(parents=True, exist_ok=True)
    there = {
        normalise(re.sub(r"(\.tar\.gz|-[^-]+-[^-]+-[^-]+\.whl)$", "", f.name))
        for f in folder.iterdir()
    }
    missing = [pin for pin in wanted if normalise(pin.replace("==", "-")) not in there]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), *options]
    if missing and subprocess.run([*command, *missing], check=False).returncode:
        raise UserError(
            f"pip could not download the packages of {pinned} into {folder}, see above. Run it "
            "again, or prepare without --extra-packages."
        )
    return sorted(path for path in folder.iterdir() if path.suffix in (".gz", ".whl"))


def is_wanted(path: str) -> bool:
    """Return whether a file is source or documentation by its posix path."""
    if any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.split("/")[:-1]):
        return False
    if path.endswith(PROSE_SUFFIXES):
        return not CHANGES.search(path) and (not path.endswith(".txt") or "/doc" in f"/{path}")
    return path.endswith(".py")


def _read(source: str, path: str, group: Group, read: Callable[[], bytes]) -> Iterator[Document]:
    """Yield the document of one file, or nothing if it is unsuitable for training."""
    if not is_wanted(path):
        return
    raw = read()
    if not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES:
        return
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return
    if is_readable(text) and len(cleaned := clean(text)) >= MIN_FILE_BYTES:
        yield Document(source, path, "python" if path.endswith(".py") else "prose", group, cleaned)


def is_readable(text: str) -> bool:
    """Return False for minified and generated text: long lines, many digits, few ASCII letters."""
    lines = text.split("\n")
    if len(text) < MIN_FILE_BYTES or SPECIAL.search(text):
        return False
    if len(text) / len(lines) > 120 or max(map(len, lines)) > 2000:
        return False
    solid = max(1, len(text) - text.count(" ") - text.count("\n"))
    digits = sum(map(text.count, "0123456789"))
    return digits / solid < 0.25 and (len(text.encode()) - len(text)) / solid < 0.05


def clean(text: str) -> str:
    """Return `text` with unix line ends, no trailing blanks, no leading licence comment, and at
    most two empty lines in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    lines = [line.rstrip() for line in text.split("\n")]
    code = (i for i, line in enumerate(lines) if line and not line.startswith("#"))
    head = next(code, len(lines))
    if re.search(r"copyright|licen[sc]e|coding[:=]", "\n".join(lines[:head]), re.I):
        lines = lines[head:]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Return the documents with equal texts once; a held-out copy wins over a training copy."""
    best: dict[bytes, Document] = {}
    for document in documents:
        key = hashlib.sha256(document.text.encode()).digest()
        known = best.setdefault(key, document)
        if known.group == "train" and document.group != "train":
            best[key] = document
    return sorted(best.values(), key=lambda document: document.name)


def cap_sources(documents: list[Document], max_bytes: int) -> list[Document]:
    """Return the documents with each training source cut to about `max_bytes`, with files chosen by
    their hash. Otherwise a few very large packages would be most of the corpus."""
    used: dict[str, int] = {}
    kept = []
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        size = used.get(document.source, 0)
        if document.group != "train" or document.source == "stdlib" or size < max_bytes:
            used[document.source] = size + len(document.text)
            kept.append(document)
    return sorted(kept, key=lambda document: document.name)


def drop_leaks(documents: list[Document]) -> tuple[list[Document], list[str]]:
    """Return the documents without training files that share passages with a held-out one, and the
    names of those files.

    This finds vendored and lightly edited copies: a file is dropped if three windows of six code
    lines, or one in ten of its windows, also occur in a held-out file.
    """

    def passages(text: str) -> list[int]:
        lines = [line.strip() for line in text.split("\n")]
        lines = [line for line in lines if len(line) > 3 and not line.startswith("#")]
        return [hash(tuple(lines[i : i + WINDOW])) for i in range(len(lines) - WINDOW + 1)]

    held = {passage for d in documents if d.group != "train" for passage in passages(d.text)}
    dropped = set()
    for document in documents:
        if document.group == "train":
            found = passages(document.text)
            shared = sum(passage in held for passage in found)
            if shared >= 3 or shared > 0.1 * len(found):
                dropped.add(document.name)
    names = [document.name for document in documents if document.name in dropped]
    return [document for document in documents if document.name not in dropped], names
