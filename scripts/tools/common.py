"""Shared code of scripts with command lines: options, errors, targets, and generated sections of
pages."""

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
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "tiny-target"
PROMPTS = ROOT / "assets" / "prompts"
VALIDATION = PROMPTS / "training" / "validation.jsonl"
REPORTS = ROOT / "docs" / "reports"


def named(path: Path) -> str:
    """A path as reports name it: relative to the repository if it lies inside."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def command(
    work: Callable[[argparse.Namespace], int | None], /, **options: Any
) -> Callable[..., int]:
    """The `main` of the module that defines `work`; the module's docstring is its description.

    options: name -> default (of the option's type; False makes a flag), a pair (default, help), or
    a dict of `add_argument`'s arguments, with "positional" if it is no option. The namespace has
    the whole command line as `command`, for reports. `main(arguments)` returns the status of
    `work`, or 2 with a `UserError`'s message.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        """Read the arguments and do the work; see `command`."""
        module = sys.modules[work.__module__]
        assert module.__spec__ is not None, "a module of its own, run by python -m"
        about = (module.__doc__ or "").split("\n")[0]
        parser = argparse.ArgumentParser(f"python -m {module.__spec__.name}", description=about)
        for name, given in options.items():
            if isinstance(given, dict):
                own = dict(given)
            else:
                default, text = given if isinstance(given, tuple) else (given, None)
                kind = Path if isinstance(default, Path) else type(default)
                flag = default is False
                own = {"action": "store_true"} if flag else {"type": kind, "default": default}
                own["help"] = text
            place = name if own.pop("positional", False) else f"--{name.replace('_', '-')}"
            parser.add_argument(place, **own)
        words = list(sys.argv[1:] if arguments is None else arguments)
        space = parser.parse_args(words)
        space.command = " ".join([parser.prog, shlex.join(words)]).strip()
        try:
            return work(space) or 0
        except UserError as error:
            print(error, file=sys.stderr)
            return 2

    return main


def target_of(given: argparse.Namespace) -> TargetModel:
    """The target of a tool with the options target, dtype and device."""
    return TargetModel.load(TargetConfig(given.target, dtype=given.dtype, device=given.device))


def cpu_target(path: Path | str = TARGET, dtype: str = "float32") -> TargetModel:
    return TargetModel.load(TargetConfig(path=str(path), dtype=dtype, device="cpu"))


@dataclass(frozen=True)
class Section:
    """The part of a page between two comment lines, which `script` (a path) writes."""

    name: str
    script: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: written by {self.script} -->"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"

    def put(self, text: str, content: str) -> str:
        """`text` with `content` as the section; raises `UserError` unless both lines occur exactly
        once."""
        begin, end = self.begin, self.end
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise UserError(
                f"the page needs the lines '{begin}' and '{end}' once each, in this order."
            )
        before, rest = text.split(begin)
        return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"

    def write(self, page: Path, content: str, check: bool = False) -> int:
        """Write the section into a page; with `check`, only compare, and return 1 if it differs."""
        text = page.read_text(encoding="utf-8")
        wanted = self.put(text, content)
        if not check and text != wanted:
            write_bytes(page, wanted.encode())
        if check:
            print(f"the tables of {page.name} are {'up to' if text == wanted else 'out of'} date")
        return int(check and text != wanted)
