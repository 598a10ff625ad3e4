"""pyarrow's errors for a Parquet file, as readable messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from heads.api.errors import UserError

SHARD = "It is a shard of answers: run `headstart generate` again with run.overwrite=true."
"""What to do about a damaged shard of answers."""


@contextmanager
def readable(path: Path, advice: str = SHARD) -> Iterator[None]:
    """Around the reading of `path`: raises `UserError`, with `advice`, if the file is damaged or
    cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"'{path}' is damaged or cannot be read ({what}). {advice}") from error
