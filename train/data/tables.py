"""Opens any dataset source as a table with random access to rows: Hub datasets and local parquet,
arrow, json and jsonl.

Local jsonl is read line by line here rather than through `datasets`, which infers one schema for
the whole file: there, one odd row would refuse the file, and here it is one skipped row with a
reason. Everything else goes through `datasets`.
"""

from __future__ import annotations

import glob
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from heads.api.errors import UserError, suggest

BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json"}
LINES = ".jsonl"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
COLUMN_PROBE = 100


RawRow = Mapping[str, object]
"""A row as a dataset has it, by column; which columns there are and what they hold is checked
later."""


class BadRowError(Exception):
    """A row that cannot be used, and the reason that is reported, without the row's content."""


class Table(Protocol):
    """Rows by number. `columns` names what rows have; reading a broken row raises `BadRowError`."""

    columns: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RawRow: ...


def open_table(path: str, name: str | None, split: str, revision: str | None) -> Table:
    """A local file, folder or glob, else a Hub dataset; raises `UserError` when it is neither."""
    files = local_files(path)
    if files is None:
        return _open_hub(path, name, split, revision)
    if isinstance(files, Path):
        return _open_saved(files, split)
    kind = _one_kind(path, files)
    if kind == LINES:
        return JsonLines(files)
    return HubTable(
        _load(path, split="train", path=BUILDERS[kind], data_files=[str(file) for file in files])
    )


class JsonLines:
    """Rows of .jsonl files, parsed when asked for; memory holds line offsets (24 bytes per row)."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._opened = [file.open("rb") for file in files]
        bounds = array("q")  # flat: file, begin, end; a list of tuples would take ten times as much
        for number, opened in enumerate(self._opened):
            for begin, end in _line_bounds(opened):
                bounds.extend((number, begin, end))
        self._lines = np.frombuffer(bounds, dtype=np.int64).reshape(-1, 3)
        self.columns = self._probe_columns()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> RawRow:
        number, begin, end = self._lines[index].tolist()
        try:
            row = json.loads(os.pread(self._opened[number].fileno(), end - begin, begin))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadRowError("the line is not valid JSON") from error
        if not isinstance(row, Mapping):
            raise BadRowError("the line is not a JSON object")
        return row

    def _probe_columns(self) -> list[str]:
        names: dict[str, None] = {}
        for index in range(min(len(self), COLUMN_PROBE)):
            try:
                names.update(dict.fromkeys(self[index]))
            except BadRowError:
                continue
        return list(names)


class HubTable:
    """A `datasets.Dataset` behind the `Table` interface."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.columns: list[str] = list(dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> RawRow:
        row: RawRow = self.dataset[int(index)]
        return row


def _line_bounds(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """[start, end) of every line that is not blank."""
    begin = 0
    for line in file:
        end = begin + len(line)
        if line.strip():
            yield begin, end
        begin = end


def open_stream(
    path: str, files: list[Path] | Path | None, name: str | None, split: str, revision: str | None
) -> Any:
    """A `datasets.IterableDataset`; raises `UserError` when there is none."""
    if isinstance(files, Path):
        return _open_saved(files, split).dataset.to_iterable_dataset()
    if files is None:
        _check_hub_id(path)
        return _load(path, split, path=path, name=name, revision=revision, streaming=True)
    kinds = _one_kind(path, files)
    return _load(
        path,
        split="train",
        path=BUILDERS[kinds],
        data_files=[str(file) for file in files],
        streaming=True,
    )


def local_files(path: str) -> list[Path] | Path | None:
    """Local files; the folder that `Dataset.save_to_disk` wrote; None for what must be a Hub id."""
    expanded = Path(path).expanduser()
    known = [*BUILDERS, LINES]
    if expanded.is_dir():
        if (expanded / "state.json").is_file() or (expanded / "dataset_dict.json").is_file():
            return expanded
        files = sorted(
            file
            for file in expanded.rglob("*")
            if file.suffix in known and not file.name.startswith(".")
        )
        if not files:
            raise UserError(f"the folder '{path}' has no files ending in {', '.join(known)}.")
        return files
    pattern = str(expanded)
    # Path.glob takes no absolute patterns.
    found = [pattern] if expanded.is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207
    matches = sorted(found)
    files = [Path(match) for match in matches]
    if files:
        odd = [file.name for file in files if file.suffix not in known]
        if odd:
            raise UserError(
                f"'{odd[0]}' is not a dataset file that is read here: its name must end in "
                f"{', '.join(known)}."
            )
        return files
    if (
        path.startswith(("/", ".", "~"))
        or any(sign in path for sign in "*?[")
        or Path(path).suffix in known
    ):
        raise UserError(
            f"there is no dataset file, folder or match for '{path}'. Check data.path (it is "
            "relative to the current folder)."
        )
    return None


def _one_kind(path: str, files: list[Path]) -> str:
    kinds = {file.suffix for file in files}
    if len(kinds) > 1:
        raise UserError(
            f"'{path}' mixes {', '.join(sorted(kinds))} files. Give one kind with a glob, e.g. "
            f"'{path}/*{sorted(kinds)[0]}'."
        )
    return kinds.pop()


def _open_saved(folder: Path, split: str) -> HubTable:
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(folder))
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise UserError(f"'{folder}' has no split '{split}'.{suggest(split, map(str, loaded))}")
        loaded = loaded[split]
    return HubTable(loaded)


def _open_hub(path: str, name: str | None, split: str, revision: str | None) -> Table:
    _check_hub_id(path)
    return HubTable(_load(path, split, path=path, name=name, revision=revision))


def _check_hub_id(path: str) -> None:
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"'{path}' is neither a local file or folder nor a Hub dataset id like 'owner/name'. "
            "Check data.path."
        )


def _load(shown: str, split: str, **arguments: Any) -> Any:
    """`datasets.load_dataset` with its many failures turned into one sentence each."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        return load_dataset(split=split, **arguments)
    except DatasetNotFoundError as error:
        raise UserError(
            f"dataset '{shown}' is neither a local path nor a dataset on the Hub that this "
            "account can read."
        ) from error
    except (DatasetGenerationError, pa.ArrowInvalid) as error:
        cause = error.__cause__ or error
        raise UserError(
            f"dataset '{shown}' cannot be read: {cause}. Check the file, or turn it into jsonl to "
            "skip broken rows."
        ) from error
    # unknown split or configuration: the message of `datasets` lists what exists
    except ValueError as error:
        raise UserError(f"dataset '{shown}': {error}. Check data.split and data.name.") from error
    except OSError as error:  # ConnectionError and every error of huggingface_hub are OSErrors
        raise UserError(
            f"dataset '{shown}' is not a local path, and the Hub did not answer: {error}. Check "
            "the path or the network."
        ) from error
