"""Prompts from datasets: the benchmarks that the field reports, and the user's own tables.

A table is a Hub dataset, a folder of parquet, a dataset that was saved to disk, or a .parquet,
.csv, .json or .jsonl file. A template turns a row into one user message: "{question}" is a column,
"{turns[0]}" the first entry of a list, "{translation[de]}" a key; a column that holds a list of
texts is joined by newlines, unless it holds the user messages of a conversation (`turns_column`).
The report records what was loaded: the commit that a Hub revision stood for, and a hash of every
prompt.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from heads.api.config import NonNegativeInt, config
from heads.api.errors import UserError, suggest
from inference.measure.prompts import Prompt, load_prompts
from inference.target.chat import Message

BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
COMMIT = 40
"""Hexadecimal digits of a Hub commit."""


@config("bench.dataset")
@dataclass(frozen=True)
class DatasetConfig:
    """How the rows of a dataset become prompts."""

    template: str = ""
    """The user message with columns in braces: "{question}". Empty: bench.prompts are files."""
    turns_column: str = ""
    """Column with the user messages of a conversation, in place of a template: each message is
    asked after the answer to the one before it, and measured."""
    name: str = ""
    """Configuration of a Hub dataset (`name` of `datasets.load_dataset`); empty: its only one."""
    split: str = "test"
    """Split of a Hub or saved dataset; a file is one split."""
    revision: str = "main"
    """Git revision of a Hub dataset. The report records its commit."""
    id_column: str = ""
    """Column with unique ids; empty: the row's number."""
    domain_column: str = ""
    """Column with the row's domain, for numbers by domain; empty: all rows belong to `domain`."""
    domain: str = ""
    """Domain of all rows without a domain column; empty: the file's or dataset's name."""
    placeholder: str = ""
    """Leave out rows with this text, a dataset's mark for content to be fetched elsewhere."""
    limit: NonNegativeInt = 0
    """Read at most this many rows, from the start; 0: all."""

    def __post_init__(self) -> None:
        if self.template and self.turns_column:
            raise UserError(
                "bench.dataset.template and bench.dataset.turns_column both say what is asked: "
                "give one of them."
            )

    @property
    def reads_table(self) -> bool:
        """Rows become prompts; otherwise prompts are files of prompts."""
        return bool(self.template or self.turns_column)


@dataclass(frozen=True)
class Loaded:
    """Prompts, and where they came from: `revision` is a commit for Hub datasets, else empty."""

    prompts: list[Prompt]
    source: str
    revision: str


def load_bench_prompts(source: str, dataset: DatasetConfig, domains: Sequence[str] = ()) -> Loaded:
    """The prompts of a measurement, from prompt files or a dataset.

    Of a folder of prompt files only those of the chosen `domains` are read: others may hold
    training prompts. Raises `UserError` for anything that cannot be found or read, for unknown
    columns, and when no row is left.
    """
    path = Path(source).expanduser()
    if dataset.reads_table:
        return _from_table(source, dataset)
    if path.suffix in (".parquet", ".csv", ".json"):
        raise UserError(
            f"bench.prompts '{source}' is a table; say how its rows become prompts: "
            "bench.dataset.template='{question}'."
        )
    if path.is_dir() and domains:
        return Loaded(load_prompts([path / f"{domain}.jsonl" for domain in domains]), source, "")
    return Loaded(load_prompts(path), source, "")


def prompt_facts(loaded: Loaded, measured: Sequence[Prompt]) -> dict[str, Any]:
    """The `prompts` block of a report's `run`: hash and domain by the id of each measured prompt,
    and a hash of all hashes."""
    hashes = {prompt.id: prompt_hash(prompt) for prompt in measured}
    return {
        "source": loaded.source,
        "revision": loaded.revision,
        "sha256": hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest(),
        "hashes": hashes,
        "domains": {prompt.id: prompt.domain for prompt in measured},
    }


def prompt_hash(prompt: Prompt) -> str:
    """Hex SHA-256, shortened to 16 digits, of a prompt's content: all that the answers depend on.
    What a prompt lacks is left out, so that the hash of a plain prompt stays the same."""
    follows = None if prompt.constraint is None else astuple(prompt.constraint)
    extras = (prompt.text, prompt.tools, prompt.arguments, follows, prompt.turns or None)
    more = [one for one in extras if one is not None]
    content = json.dumps([prompt.messages, prompt.tokens, *more], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# Tables


def _from_table(source: str, config: DatasetConfig) -> Loaded:
    table, revision = open_dataset(source, config)
    _check_columns(source, config, list(table.column_names))
    domain = config.domain or Path(source).stem.lower()
    prompts: dict[str, Prompt] = {}
    for number, row in enumerate(islice(table, config.limit or None)):
        asked = list(_asked(config, row))
        held = config.placeholder and any(config.placeholder in text for text in asked)
        if held or not all(asked) or not asked:
            continue
        own = str(row[config.domain_column]) if config.domain_column else domain
        name = str(row[config.id_column]) if config.id_column else f"{domain}-{number}"
        if name in prompts:
            raise UserError(
                f"id '{name}' occurs twice in '{source}' "
                f"(bench.dataset.id_column={config.id_column}). Ids must be unique: an answer's "
                "seed comes from its id."
            )
        first, *turns = asked
        messages: tuple[Message, ...] = ({"role": "user", "content": first},)
        prompts[name] = Prompt(name, own, messages=messages, turns=tuple(turns))
    if not prompts:
        how = f"template {config.template!r}" if config.template else "given turns_column"
        raise UserError(f"no row of '{source}' gives a prompt with the {how}.")
    return Loaded(list(prompts.values()), source, revision)


def _asked(config: DatasetConfig, row: Mapping[str, Any]) -> Iterator[str]:
    """The user messages of a row. Raises `UserError` if the turns are not a list of texts."""
    if config.template:
        yield fill(config.template, row).strip()
        return
    turns = row[config.turns_column]
    if not isinstance(turns, (list, tuple)) or not all(isinstance(one, str) for one in turns):
        raise UserError(
            f"bench.dataset.turns_column: '{config.turns_column}' must hold lists of texts; found: "
            f"{str(turns)[:80]!r}."
        )
    yield from (one.strip() for one in turns)


def open_dataset(source: str, config: DatasetConfig) -> tuple[Any, str]:
    """(rows, revision) of a file, a folder or a Hub dataset; the revision of files is empty."""
    from datasets import load_dataset

    path, named = Path(source).expanduser(), config.name or None
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _saved(path, config.split), ""
    with _clear_errors(source, config):
        if path.is_file():
            if path.suffix not in BUILDERS:
                raise UserError(f"bench.prompts '{source}' must end in {', '.join(BUILDERS)}.")
            return load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train"), ""
        if path.exists():
            return load_dataset(str(path), named, split=config.split), ""
        # a mistyped file name must not be looked up at the Hub, whose error would confuse
        if source.startswith(("/", ".", "~")) or path.suffix in BUILDERS or source.count("/") > 1:
            raise UserError(f"there is no prompt file or folder '{source}'. Check bench.prompts.")
        revision = resolve_revision(source, config.revision)
        return load_dataset(source, named, split=config.split, revision=revision), revision


def _saved(path: Path, split: str) -> Any:
    """A dataset that `save_to_disk` wrote."""
    from datasets import DatasetDict, load_from_disk

    found = load_from_disk(str(path))
    if not isinstance(found, DatasetDict):
        return found
    if split not in found:
        meant = suggest(split, map(str, found))
        raise UserError(f"'{path}' has no split '{split}' (bench.dataset.split).{meant}")
    return found[split]


def resolve_revision(dataset: str, revision: str) -> str:
    """The commit that a Hub revision stands for now: branches move."""
    if len(revision) == COMMIT and set(revision) <= set(string.hexdigits):
        return revision
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(dataset, revision=revision).sha)


@contextmanager
def _clear_errors(source: str, config: DatasetConfig) -> Iterator[None]:
    """Convert the errors of `datasets` and the Hub into one sentence each."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except ValueError as error:  # an unknown split or configuration: datasets lists what exists
        raise UserError(
            f"dataset '{source}': {_first_line(error)}. Check bench.dataset.split "
            f"('{config.split}') and bench.dataset.name ('{config.name}')."
        ) from error
    except (OSError, DatasetsError) as error:  # every error of huggingface_hub is an OSError
        raise UserError(
            f"dataset '{source}' cannot be read: {_first_line(error)}. Check the id, the network "
            "and whether access was granted; or download it and give its folder as bench.prompts."
        ) from error
    except RuntimeError as error:  # a dataset that is a script
        raise UserError(f"dataset '{source}' cannot be read: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


# Templates


def _check_columns(source: str, config: DatasetConfig, columns: Sequence[str]) -> None:
    """Raise `UserError` naming the first column that the table does not have."""
    columns_of_template = template_columns(config.template) if config.template else []
    wanted = [("template", column) for column in columns_of_template]
    wanted += [
        (key, getattr(config, key)) for key in ("turns_column", "id_column", "domain_column")
    ]
    for key, column in wanted:
        if column and column not in columns:
            raise UserError(
                f"'{source}' has no column '{column}' "
                f"(bench.dataset.{key}).{suggest(column, columns)} It has: {', '.join(columns)}."
            )


def template_columns(template: str) -> list[str]:
    """The columns that a template names; raises `UserError` for a broken one or none."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"bench.dataset.template {template!r} cannot be read: {error}.") from error
    columns = [name.split("[")[0] for name in names]
    if not columns or any(not column or "." in column for column in columns):
        raise UserError(
            f"bench.dataset.template {template!r} must name columns in braces, such as "
            "{question}, {turns[0]} or {translation[de]}."
        )
    return columns


def fill(template: str, row: Mapping[str, Any]) -> str:
    """A row as text. Missing values are empty; lists are joined by newlines."""
    try:
        return _Filler().vformat(template, (), row)
    except (KeyError, IndexError, TypeError) as error:
        words = f"bench.dataset.template {template!r} does not fit a row: {error!r}."
        raise UserError(words) from error


class _Filler(string.Formatter):
    """A `str.format` that supports lists and empty values."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, (list, tuple)):
            return "\n".join(map(str, value))
        return str(value)
