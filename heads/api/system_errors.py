"""Explanations of the operating system's errors for the user: a full disk, a file that may not be
written, and the like. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
WORDS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: (
        "the disk is full",
        "What was complete is kept. Free some space, or give another run.root; the same command "
        "then continues where this one stopped.",
    ),
    errno.EDQUOT: (
        "your quota of this disk is used up",
        "What was complete is kept. Free some space, have the quota raised, or give another "
        "run.root; the same command then continues where this one stopped.",
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


def explained(error: BaseException) -> str:
    """The problem and what to do, for an error of the system; else the error's first line."""
    number = system_error(error)
    return f"{first_line(error)}." if number is None else describe(error, number)


def system_error(error: BaseException) -> int | None:
    """The number of an operating system's error, also if a library wrapped it; None for an error of
    another type, or one that concerns neither a file nor a disk."""
    if isinstance(error, OSError) and error.errno in WORDS:
        return error.errno if error.filename is not None or error.errno in SPELT else None
    said = str(error)
    return next((number for number in SPELT if os.strerror(number) in said), None)


def describe(error: BaseException, number: int) -> str:
    """The problem, the file and what to do."""
    what, advice = WORDS[number]
    given = [getattr(error, key, None) for key in ("filename", "filename2")]
    names = [os.fsdecode(name) for name in given if isinstance(name, str | bytes | Path)]
    where = " and ".join(f"'{name}'" for name in names)
    # A library's message may say in words what the disk refused, and where.
    said = "" if isinstance(error, OSError) and where else f" ({first_line(error)})"
    return f"{where}{': ' if where else ''}{what}{said}. {advice}"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__
