"""Opens any dataset, on the Hub or local, as a table with random access to rows.

Local jsonl and txt files are read line by line here and not through `datasets`, which infers one
schema for the whole file. There, one odd row would make the file unreadable; here it is one skipped
row with a reason. Everything else goes through `datasets`.
"""

from __future__ import annotations

import glob
import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from heads.api.errors import UserError, suggest
from heads.api.reading import reason
from train.data.config import SourceConfig

BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json"}
LINES, PROMPTS = ".jsonl", ".txt"
"""Endings of files that are read line by line: JSON objects, prompts."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
COLUMN_PROBE = 100
MOST_OPEN = 16
"""Files of a table of lines that are open at once."""


RawRow = Mapping[str, object]
"""A row of a dataset, by column; the columns and their contents are checked later."""


class BadRowError(Exception):
    """A row that cannot be used, and the reason that is reported, without the row's content."""


class Table(Protocol):
    """Rows by number, as in `datasets.Dataset` and `Lines`."""

    @property
    def column_names(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RawRow | BadRowError: ...


def open_table(source: SourceConfig) -> Table:
    """A local file, folder or glob, else a Hub dataset; raises `UserError` if it is neither."""
    files = local_files(source.path)
    if isinstance(files, list) and _one_kind(source.path, files) in (LINES, PROMPTS):
        return Lines(files)
    table: Table = open_dataset(source, files)
    return table


class Lines:
    """Rows of .jsonl or .txt files, parsed when read; memory holds line offsets (24 bytes per
    row)."""

    def __init__(self, files: list[Path]) -> None:
        self._parse = parser_of(files[0])
        self._files = OpenFiles(files)
        bounds = array("q")  # flat: file, begin, end; a list of tuples would take ten times as much
        for number, path in enumerate(files):
            begin = 0
            with path.open("rb") as file:
                for line in file:
                    if line.strip():
                        bounds.extend((number, begin, begin + len(line)))
                    begin += len(line)
        self._lines = np.frombuffer(bounds, dtype=np.int64).reshape(-1, 3)
        self.column_names = names_in(self[index] for index in range(min(len(self), COLUMN_PROBE)))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> RawRow | BadRowError:
        number, begin, end = self._lines[index].tolist()
        return self._parse(self._files.read(number, begin, end))


class OpenFiles:
    """Ranges of files, of which the last `MOST_OPEN` that were read stay open."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, number: int, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of file `number`."""
        if number not in self._descriptors:
            if len(self._descriptors) == MOST_OPEN:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[number] = os.open(self.files[number], os.O_RDONLY)
        self._descriptors.move_to_end(number)
        return os.pread(self._descriptors[number], end - begin, begin)

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def parser_of(file: Path) -> Callable[[bytes], RawRow | BadRowError]:
    """The function that turns a line of this file into a row."""
    return parse_prompt if file.suffix == PROMPTS else parse_line


def parse_prompt(line: bytes) -> RawRow | BadRowError:
    """A line of text as a prompt, or the error in it."""
    try:
        return {"prompt": line.decode("utf-8-sig").strip()}
    except UnicodeDecodeError:
        return BadRowError("the line is not UTF-8")


def parse_line(line: bytes) -> RawRow | BadRowError:
    """The row in a line of JSON, or the error in it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also: no UTF-8, numbers of thousands of digits
        return BadRowError("the line is not valid JSON")
    return row if isinstance(row, Mapping) else BadRowError("the line is not a JSON object")


def names_in(rows: Iterable[RawRow | BadRowError]) -> list[str]:
    """Columns of all usable rows, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows if isinstance(row, Mapping) for name in row))


def open_dataset(
    source: SourceConfig, files: list[Path] | Path | None, streaming: bool = False
) -> Any:
    """A `datasets.Dataset` (streaming: `IterableDataset`) of `local_files` or, without any, from
    the Hub; raises `UserError` when there is none."""
    path = source.path
    if isinstance(files, Path):
        saved = _open_saved(files, source.split)
        return saved.to_iterable_dataset() if streaming else saved
    if files is not None:
        given: dict[str, Any] = {"path": BUILDERS[_one_kind(path, files)], "split": "train"}
        return _load(path, streaming=streaming, data_files=[str(f) for f in files], **given)
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"'{path}' is neither a local file or folder nor a Hub dataset id like 'owner/name'. "
            "Check data.path."
        )
    given = {"path": path, "name": source.name, "split": source.split, "revision": source.revision}
    return _load(path, streaming=streaming, **given)


def local_files(path: str) -> list[Path] | Path | None:
    """Local files; the folder that `Dataset.save_to_disk` wrote; None if it must be a Hub id."""
    expanded = Path(path).expanduser()
    known = [*BUILDERS, LINES, PROMPTS]
    if expanded.is_dir():
        if (expanded / "state.json").is_file() or (expanded / "dataset_dict.json").is_file():
            return expanded
        inside = sorted(each for each in expanded.rglob("*") if not each.name.startswith("."))
        files = [file for file in inside if file.suffix in known]
        if not files:
            raise UserError(f"the folder '{path}' has no files ending in {', '.join(known)}.")
        return files
    # Path.glob takes no absolute patterns.
    pattern = str(expanded)
    found = [pattern] if expanded.is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207
    files = [Path(match) for match in sorted(found)]
    odd = [file.name for file in files if file.suffix not in known]
    if odd:
        raise UserError(
            f"'{odd[0]}' is not a dataset file that is read here: its name must end in "
            f"{', '.join(known)}."
        )
    local = path.startswith(("/", ".", "~")) or Path(path).suffix in known
    if not files and (local or any(sign in path for sign in "*?[")):
        raise UserError(
            f"there is no dataset file, folder or match for '{path}'. Check data.path (it is "
            "relative to the current folder)."
        )
    return files or None


def _one_kind(path: str, files: list[Path]) -> str:
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"'{path}' mixes {', '.join(kinds)} files. Give one kind with a glob, e.g. "
            f"'{path}/*{kinds[0]}'."
        )
    return kinds[0]


def _open_saved(folder: Path, split: str) -> Any:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(folder))
    # a file that is missing, no JSON (or no table), or without an entry
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{folder}' has a state.json or dataset_dict.json, as saved datasets have, but it "
            f"cannot be opened as one: {reason(error)}. Save the dataset again, or "
            f"give the files in the folder as a glob, such as '{folder}/*.parquet'."
        ) from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise UserError(f"'{folder}' has no split '{split}'.{suggest(split, map(str, loaded))}")
    return loaded[split]


def _load(shown: str, **arguments: Any) -> Any:
    """`datasets.load_dataset` with its many failures turned into one sentence each."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        return load_dataset(**arguments)
    except DatasetNotFoundError as error:
        raise UserError(
            f"dataset '{shown}' is neither a local path nor a dataset on the Hub that this "
            "account can read."
        ) from error
    except (DatasetGenerationError, pa.ArrowInvalid) as error:
        cause = error.__cause__ or error
        raise UserError(
            f"dataset '{shown}' cannot be read: {reason(cause)}. Are its rows alike? Check the "
            "file, or turn it into jsonl to skip broken rows."
        ) from error
    # unknown split or configuration: the message of `datasets` lists what exists
    except ValueError as error:
        raise UserError(f"dataset '{shown}': {error}. Check data.split and data.name.") from error
    except OSError as error:  # ConnectionError and every error of huggingface_hub are OSErrors
        raise UserError(
            f"dataset '{shown}' is not a local path, and the Hub did not answer: {error}. Check "
            "the path or the network."
        ) from error
