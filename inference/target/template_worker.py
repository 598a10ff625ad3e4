"""The process in which chat templates run: a separate program, started by
`inference.target.templates`, that imports nothing of Headstart.

A template is code of the tokenizer's author. transformers' sandbox denies it access to files and to
Python, but does not stop it from running forever or taking all memory. Here both have a limit, and
the template can only reach a process without secrets.

Messages are a length of four bytes and JSON, in both directions. A single length of 0 means that
the process is ready. Request: template, messages, values, marks (whether the spans of
`{% generation %}` are returned). Answer: text and spans, or error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = 4
MEMORY = 1024**3
"""Bytes that rendering may take beyond the process's memory at its start."""
LONGEST = 64 * 1024**2
"""Most characters of a rendered conversation."""


def main() -> None:
    """Answer requests until the other end closes. Argument: most CPU seconds per request."""
    seconds = int(sys.argv[1])
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints must not be part of the answers
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers starts faster without it
    render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
    limit_memory()
    answers.write(bytes(LENGTH))
    answers.flush()
    while (request := receive(requests)) is not None:
        limit_time(seconds)
        answer = respond(render, request)
        send(answers, answer)


def respond(render: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    try:
        texts, spans = render(
            conversations=[request["messages"]],
            chat_template=request["template"],
            return_assistant_tokens_mask=request["marks"],
            **request["values"],
        )
    except Exception as error:  # noqa: BLE001 - a foreign program may raise anything
        lines = str(error).strip().splitlines()
        name = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        return {"error": f"{name}{lines[0] if lines else 'no reason given'}"[:500]}
    if len(texts[0]) > LONGEST:
        return {"error": f"it writes {len(texts[0]):,} characters; at most {LONGEST:,} are read"}
    return {"text": texts[0], "spans": spans[0] if spans else []}


def limit_memory() -> None:
    """Limit this process to `MEMORY` bytes more than it has, if the system supports it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(seconds: int) -> None:
    """Make the system end this process after `seconds` more of CPU time."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        end = int(used.ru_utime + used.ru_stime) + seconds + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, hard))


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None if the other end has closed."""
    head = stream.read(LENGTH)
    if len(head) < LENGTH:
        return None
    message: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "big")))
    return message


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    stream.write(len(content).to_bytes(LENGTH, "big") + content)
    stream.flush()


if __name__ == "__main__":
    main()
