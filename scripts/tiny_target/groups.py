"""Which modules, packages and topics the embedded target never trains on.

Group A gives prompts for training drafters, group B prompts for measuring and the held-out loss. The two are disjoint and whole:
a held-out module takes its tests along, a held-out package all its files.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Group = Literal["train", "A", "B"]

STDLIB_A = frozenset(
    "argparse asynchat cgi cmd code codeop concurrent configparser cgitb compileall csv doctest fractions glob gzip "
    "imaplib ipaddress json mailbox nntplib numbers optparse pprint profile pstats queue sched smtplib statistics "
    "tarfile telnetlib textwrap timeit trace turtle wave wsgiref xmlrpc zipapp".split()
)
STDLIB_B = frozenset(
    "bisect calendar chunk colorsys contextlib copy crypt datetime difflib dis fileinput ftplib functools getopt "
    "heapq hmac html linecache logging mimetypes netrc pathlib plistlib poplib quopri random reprlib secrets "
    "selectors shelve shlex shutil socketserver sqlite3 string symtable tempfile tokenize uuid weakref zipfile".split()
)
PACKAGES_A = frozenset(
    "networkx werkzeug sphinx nltk dask boltons hypothesis celery scrapy scikit_image omegaconf hydra markdown_it "
    "prompt_toolkit nbconvert pyramid".split()
)
PACKAGES_B = frozenset(
    "mpmath seaborn jinja2 fsspec starlette more_itertools marshmallow trio optuna parso xarray gunicorn "
    "dulwich traitlets".split()
)
assert not (STDLIB_A & STDLIB_B or PACKAGES_A & PACKAGES_B), "the held-out groups overlap"


def stdlib_group(path: str) -> Group:
    """Return the group of a standard library file, given its path relative to the library's root (posix)."""
    parts = [re.sub(r"\.pyi?$", "", part) for part in path.split("/")]
    while parts and parts[0] in ("test", "tests"):
        parts = parts[1:]
    if not parts:
        return "train"
    name = re.sub(r"^_?(test_?)?", "", parts[0])
    for group, held in (("A", STDLIB_A), ("B", STDLIB_B)):
        if name in held or any(name.startswith((f"{module}_", f"{module}test")) for module in held):
            return group  # type: ignore[return-value]
    return "train"


def package_group(name: str) -> Group:
    """Return the group of a distribution or import package; case and `-`/`.`/`_` do not matter."""
    name = normalise(name)
    if name in PACKAGES_A:
        return "A"
    return "B" if name in PACKAGES_B else "train"


def topic_group(topic: str) -> Group:
    """Return the group of a `pydoc_data.topics` entry: one in five each for A and B, by the hash of its name."""
    bucket = hashlib.sha256(topic.encode()).digest()[0] % 5
    return "A" if bucket == 0 else "B" if bucket == 1 else "train"


def normalise(name: str) -> str:
    """Return a package name in lower case with underscores."""
    return re.sub(r"[-_.]+", "_", name).strip("_").lower()
