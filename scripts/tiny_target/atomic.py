"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON with a final newline."""
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
