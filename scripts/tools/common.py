"""What scripts with a command line of their own share: options, errors, and sections of pages that
they write."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "tiny-target"
PROMPTS = ROOT / "assets" / "prompts"
VALIDATION = PROMPTS / "training" / "validation.jsonl"


def make_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m <module>`, described by the first line of the module's docstring."""
    about = (doc or "").split("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m {module}", description=about)


def add_options(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add `--name` for every name, with its default's type; a pair is (default, help)."""
    for name, given in options.items():
        default, about = given if isinstance(given, tuple) else (given, None)
        kind = Path if isinstance(default, Path) else type(default)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, help=about)


def run(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the arguments and call `work`; returns its exit status, or 2 with a `UserError`'s
    message.

    The namespace has the whole command line as `command`, for the report.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(words)
    given.command = " ".join([parser.prog, shlex.join(words)]).strip()
    try:
        return work(given) or 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


@dataclass(frozen=True)
class Section:
    """The part of a page between two comment lines, which `script` (a path) writes."""

    name: str
    script: str

    @property
    def begin(self) -> str:
        """The line before the section."""
        return f"<!-- {self.name}: written by {self.script} -->"

    @property
    def end(self) -> str:
        """The line after the section."""
        return f"<!-- end of {self.name} -->"

    def put(self, text: str, content: str) -> str:
        """`text` with `content` as the section; raises `UserError` without both lines, once
        each."""
        begin, end = self.begin, self.end
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise UserError(
                f"the page needs the lines '{begin}' and '{end}' once each, in this order."
            )
        before, rest = text.split(begin)
        return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"

    def write(self, page: Path, content: str, check: bool = False) -> int:
        """Write the section into a page; with `check` only compare, and return 1 if it differs."""
        text = page.read_text(encoding="utf-8")
        wanted = self.put(text, content)
        if not check and text != wanted:
            write_bytes(page, wanted.encode())
        if check:
            print(f"the tables of {page.name} are {'up to' if text == wanted else 'out of'} date")
        return int(check and text != wanted)
