"""What no published file holds: the folders of this machine, and credentials.

Paths are reduced to their last part, and addresses lose their user, password and query. A file with
any other credential is found by `find_secret` and not published.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
QUERY = re.compile(r"""(://[^\s?#,'"\]}]*)[?#][^\s,'"\]}]*""")
ABSOLUTE = re.compile(r"/|~|\.\.?[/\\]|file:|[A-Za-z]:[/\\]")
VALUE = re.compile(r"""\w+://[^\s,\[\]{}()'"]+|[^=,\[\]{}()'"]+""")
"""A value of a setting; a path may contain spaces."""
WORD = re.compile(r"""\w+://[^\s,\[\]{}()'"]+|[^\s=,\[\]{}()'"]+""")
PROMPT_IDS = ("left_out", "domains", "hashes")
"""Keys of a report whose values are ids and domains of prompts, which may contain slashes."""
SECRETS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("a Hub access token", rb"hf_(?<!\whf_)[A-Za-z0-9]{30,}"),
        ("an API key", rb"sk-(?<![\w-]sk-)(?:[A-Za-z0-9]{32,}|[a-z]+[0-9]*-[A-Za-z0-9_-]{20,})"),
        ("a GitHub token", rb"gh[pousr]_(?<!\wgh._)[A-Za-z0-9]{36,}"),
        ("a GitHub token", rb"github_pat_[A-Za-z0-9_]{40,}"),
        ("an AWS access key", rb"AKIA(?<!\wAKIA)[A-Z0-9]{16}(?!\w)"),
        ("a Weights & Biases key", rb"WANDB_API_KEY\W{1,4}[0-9a-f]{40}"),
        ("a Weights & Biases key", rb"wandb_v1_[A-Za-z0-9_]{40,}"),
        ("a private key", rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    )
)
"""What files are searched for. Expressions that begin with fixed text take the least time."""
PIECE, OVERLAP = 1 << 24, 1 << 10
"""Bytes that are read at once, and bytes of the piece before that are searched again."""


def hide(content: Any) -> Any:
    """JSON values without local folders and credentials of addresses. The value of a key `command`
    is read as a command."""
    if isinstance(content, Mapping):
        return {
            key: value
            if key in PROMPT_IDS
            else hide_command(value)
            if key == "command" and isinstance(value, str)
            else hide(value)
            for key, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [hide(value) for value in content]
    if not isinstance(content, str):
        return content
    return last_part(content) if ABSOLUTE.match(content) else hide_parts(content, WORD)


def hide_command(command: str) -> str:
    """A command line without local folders and credentials of addresses."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quotation mark
        return hide_parts(command, WORD)
    hidden = [hide_parts(word, VALUE) for word in words]
    return command if hidden == words else shlex.join(hidden)


def hide_parts(text: str, part: re.Pattern[str]) -> str:
    """A text whose parts are values. Relative paths are told from Hub ids by a second slash."""
    text = QUERY.sub(r"\1", CREDENTIALS.sub("", text))
    return part.sub(lambda found: last_part(found[0]) if is_local(found[0]) else found[0], text)


def is_local(text: str) -> bool:
    """Whether a value is a path of this machine that has more than its last part."""
    return bool(ABSOLUTE.match(text)) or ("://" not in text and text.count("/") > 1)


def last_part(path: str) -> str:
    """The last part of a path; the path itself if it has none."""
    return PureWindowsPath(path).name or path


def find_secret(path: Path) -> str:
    """What a file of any kind seems to contain that must not be published, such as "an API key", in
    UTF-8 and compatible encodings or in UTF-16; empty for nothing."""
    before = b""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            text = before + piece
            for seen in (text, text.replace(b"\0", b"")):  # ASCII in UTF-16 is every second byte
                for name, pattern in SECRETS:
                    if pattern.search(seen):
                        return name
            before = text[-OVERLAP:]
    return ""
