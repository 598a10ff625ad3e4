"""What is said about an exception that ends a command.

One that a person can do something about, such as a disk that is full or may not be written, becomes
one sentence (`complaint`). Anything else is a fault of ours or of a library: its traceback goes to
a file (`write_traceback`) that can be attached to a report. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from heads.api.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
WORDS: dict[int, tuple[str, str]] = {
    **dict.fromkeys(
        FULL,
        (
            "the disk is full",
            "What was complete is kept. Free some space, or give another run.root; the same "
            "command then continues where this one stopped.",
        ),
    ),
    errno.EROFS: (
        "this file system is read-only",
        "Give a place that can be written, such as another run.root.",
    ),
    errno.EFBIG: (
        "a file became larger than the system allows",
        "What was complete is kept. Raise the limit (`ulimit -f`), or write to another file "
        "system; the same command then continues.",
    ),
    errno.ENAMETOOLONG: (
        "a name is longer than the file system allows",
        "Give a shorter name (run.name, run.drafter) or place (run.root).",
    ),
    errno.EIO: ("the disk has failed", "Check the disk, or write to another one."),
    errno.EMFILE: (
        "too many files are open",
        "Raise the limit (`ulimit -n 4096`); the same command then continues.",
    ),
    errno.EACCES: (
        "access is not allowed",
        "Change the permissions, or give another place, such as another run.root.",
    ),
    errno.EPERM: (
        "the system does not allow it",
        "Change the permissions, or give another place, such as another run.root.",
    ),
    errno.EISDIR: ("there is a folder where a file is needed", "Move it away, or give another."),
    errno.ENOTDIR: ("there is a file where a folder is needed", "Move it away, or give another."),
    errno.EEXIST: ("something of that name is there already", "Move it away, or give another."),
    errno.ENOTEMPTY: ("the folder holds other files", "Move them away, or give another folder."),
    errno.ENOENT: ("there is no such file or folder", "Check the place, or make it."),
    errno.ELOOP: ("links lead to each other", "Remove the links."),
    errno.ESTALE: (
        "the file system of the network has lost it",
        "Mount it anew; the same command then continues.",
    ),
}
"""Number of an operating system's error: what is wrong, what to do."""
SPELT = (*FULL, errno.EROFS, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENAMETOOLONG)
"""Errors that libraries wrap (safetensors, pyarrow) and spell in words."""
NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


def complaint(error: BaseException) -> str | None:
    """One sentence for a person who can do something about `error`; None for a fault of ours."""
    if isinstance(error, UserError):
        return str(error)
    for cause in chain(error):
        number = system_error(cause)
        if number is not None and (number in SPELT or cause is error):
            return describe(cause, number)
        if is_memory(cause):
            return (
                f"there is not enough memory ({first_line(cause)}). Make what is computed at once "
                "smaller (train.micro_batch, train.sequence_length, decode.batch_size, the head's "
                "sizes), or use a larger machine; `headstart train --plan` says what a training "
                "takes."
            )
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def system_error(error: BaseException) -> int | None:
    """The number of an operating system's error, also of one that a library wrapped; None for an
    error of another sort, or one that concerns neither a file nor a disk."""
    if isinstance(error, OSError) and error.errno in WORDS:
        return error.errno if error.filename is not None or error.errno in SPELT else None
    said = str(error)
    return next((number for number in SPELT if os.strerror(number) in said), None)


def describe(error: BaseException, number: int) -> str:
    """What is wrong, with which file, what to do."""
    what, advice = WORDS[number]
    given = [getattr(error, key, None) for key in ("filename", "filename2")]
    names = [os.fsdecode(name) for name in given if isinstance(name, str | bytes | Path)]
    where = " and ".join(f"'{name}'" for name in names)
    # A library says in words what the disk has refused, and where.
    said = "" if isinstance(error, OSError) and where else f" ({first_line(error)})"
    return f"{where}{': ' if where else ''}{what}{said}. {advice}"


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the processor or of a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def write_traceback(error: BaseException, arguments: Sequence[str], version: str) -> Path | None:
    """Write what a report of a fault needs to a new file that only its owner may read, and return
    it; None where it cannot be written."""
    frames = "".join(traceback.format_exception(error))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = [
        f"headstart {version}, Python {platform.python_version()}, {platform.platform()}",
        f"{now}, process {os.getpid()}, rank {os.environ.get('RANK', '0')}",
        shlex.join(["headstart", *arguments]),
    ]
    with suppress(OSError):  # it may be gone
        facts.append(f"in {Path.cwd()}")
    try:
        descriptor, name = tempfile.mkstemp(prefix="headstart-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join([*facts, "", frames]))
    except OSError:
        return None
    return Path(name)


def report(error: BaseException, arguments: Sequence[str], version: str) -> str:
    """What the terminal says of a fault of ours: in short, and where the rest is."""
    file = write_traceback(error, arguments, version)
    lines = [
        f"{type(error).__name__}: {first_line(error)}",
        f"This should not happen: it is a fault of Headstart {version}, or of a library.",
    ]
    if file is None:
        traceback.print_exception(error, file=sys.stderr)
    else:
        lines.append(f"Please report it with {file}, which holds the traceback.")
    return "\n  ".join(lines)
