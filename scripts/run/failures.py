"""Messages for exceptions that end a command.

An error that the user can resolve, such as a disk that is full or not writable, becomes one
sentence (`complaint`). Any other error is a fault of Headstart or of a library: its traceback goes
to a file (`write_traceback`) that can be attached to a report. The module imports nothing heavy.
"""

from __future__ import annotations

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
from heads.api.system_errors import SPELT, describe, first_line, system_error

NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


def complaint(error: BaseException) -> str | None:
    """One sentence about an `error` that the user can resolve; None for a fault of Headstart."""
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
    """An exception and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_memory(error: BaseException) -> bool:
    """Whether the processor or a GPU ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def write_traceback(error: BaseException, arguments: Sequence[str], version: str) -> Path | None:
    """Write the contents of a fault report to a new file that only its owner may read, and return
    the file; None if it cannot be written."""
    frames = "".join(traceback.format_exception(error))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = [
        f"headstart {version}, Python {platform.python_version()}, {platform.platform()}",
        f"{now}, process {os.getpid()}, rank {os.environ.get('RANK', '0')}",
        shlex.join(["headstart", *arguments]),
    ]
    with suppress(OSError):  # the folder may be gone
        facts.append(f"in {Path.cwd()}")
    try:
        descriptor, name = tempfile.mkstemp(prefix="headstart-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join([*facts, "", frames]))
    except OSError:
        return None
    return Path(name)


def report(error: BaseException, arguments: Sequence[str], version: str) -> str:
    """The terminal's message about a fault of Headstart: a summary, and the place of the
    details."""
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
