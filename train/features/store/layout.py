"""The layout of a store's folder, and the identity of its features.

    store.json                    what is stored, for which answers and target, in how many shards
    shards/rows-00012.safetensors a tensor per stored thing (`tap.3.values`, `tap.3.scales`,
                                  `last_hidden.values`, ...) over its rows' tokens without padding
    index/rows-00012.json         written after its shard: size, SHA-256, digest and tokens per row
    claims/rows-00012.json        who is writing a shard now
    manifest.json                 written last

A row is found by the digest of the target's input (tokens, positions, segments). So a store can
never return the features of another text, and training may deal rows in any order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter
from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import read_bytes, read_object
from inference.manifest import FORMAT, write_bytes, write_json
from train.data.loader import PackedBatch

STORE_FILE = "store.json"
LAST, TOP = "last_hidden", "top"
COMPARED = {
    "answers": "other answers (SHA-256 of their manifest)",
    "domains": "other train.domains",
    "sequence_length": "another train.sequence_length",
    "revision": "another revision of the target",
    "tokenizer_hash": "a target with another tokenizer",
    "precision": "another engine.precision or target.dtype",
    "format": "another features.format",
    "top_logits": "another features.top_logits",
    "source": "another features.source",
    "loading": "another target.quantization or target.long_context",
}
"""The fields that must agree before a store is read or continued, and their names in errors."""


@dataclass(frozen=True)
class Identity:
    """The identity of a store's features. answers: SHA-256 of their manifest; precision: see
    `precision_of`; taps, last_hidden: what is stored; top_logits: number of logits that replace the
    last hidden state; domains: those of the packed answers, empty: all; source: what computed the
    features; loading: see `inference.target.settings.loading_text`."""

    answers: str
    sequence_length: int
    revision: str
    tokenizer_hash: str
    precision: str
    format: str
    top_logits: int
    taps: tuple[int, ...]
    last_hidden: bool
    domains: tuple[str, ...] = ()
    source: str = "target"
    loading: str = ""

    def things(self) -> list[str]:
        """What is stored per token: `tap.L` in ascending order, then `last_hidden` or `top`."""
        names = [f"tap.{tap}" for tap in self.taps]
        return names + ([TOP] if self.top_logits else [LAST] if self.last_hidden else [])

    def differences(self, wanted: Identity) -> list[str]:
        """The differences from the wanted identity, in words; more features are no difference."""
        mine, theirs = asdict(self), asdict(wanted)
        found = [
            f"it is for {words}: {brief(mine[name])}, not {brief(theirs[name])}"
            for name, words in COMPARED.items()
            if mine[name] != theirs[name]
            # a reader of taps alone needs neither the last state nor the logits made of it
            and (name != "top_logits" or wanted.last_hidden)
        ]
        missing = [name for name in wanted.things() if name not in self.things()]
        return found + ([f"it lacks {', '.join(missing)}"] if missing else [])


def precision_of(features: torch.dtype, target: torch.dtype) -> str:
    """How the target was run: its own dtype, and that of the features that a training gets."""
    return f"{str(features).removeprefix('torch.')} of {str(target).removeprefix('torch.')}"


@dataclass(frozen=True)
class StorePlan:
    """The content of store.json. rows, tokens: of all shards; hidden: H; target: facts for
    people."""

    identity: Identity
    rows: int
    tokens: int
    rows_per_shard: int
    hidden: int
    estimated_bytes: int
    target: dict[str, object] = field(default_factory=dict)
    seed: int | None = None
    """Of the order of the rows; None in stores of earlier versions: the writer's."""

    @property
    def shards(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    def content(self) -> dict[str, Any]:
        """The plan as JSON. `identity.loading` is left out at its default, as in stores of earlier
        versions."""
        content = asdict(self)
        if not self.identity.loading:
            del content["identity"]["loading"]
        return content

    def write(self, folder: Path) -> None:
        write_json(folder / STORE_FILE, {"format": FORMAT, "stage": "features", **self.content()})


def read_plan(folder: Path) -> StorePlan:
    """The store.json of a folder; raises `UserError` if there is none or it cannot be read."""
    path = folder / STORE_FILE
    if not path.is_file():
        raise UserError(
            f"there is no feature store in '{folder}'. Write one with `headstart features` and "
            "the same settings; training can begin as soon as that has begun. Or set "
            "features.mode=online, or features.path to another folder."
        )
    try:
        content = read_object(path)
    except UserError as error:
        raise damaged_json(path, error) from error
    try:
        if content["format"] != FORMAT:
            raise ValueError("another format")
        return TypeAdapter(StorePlan).validate_python(content)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"'{path}' is not a store's description of format {FORMAT}. Delete '{folder}' and run "
            "`headstart features` again."
        ) from error


def damaged_json(path: Path, error: ValueError) -> UserError:
    return UserError(
        f"'{path}' is damaged ({error}). Delete it; `headstart features` with the same settings "
        "writes what is missing."
    )


class ShardIndex(BaseModel):
    """The index of a shard: its file in the store, its size and hash, and its rows in order."""

    file: str
    bytes: int
    sha256: str
    rows: list[tuple[str, int]]
    """Digest and tokens of each row."""

    @classmethod
    def read(cls, path: Path) -> ShardIndex:
        """The index at `path`; raises `UserError` if it is damaged."""
        try:
            return cls.model_validate_json(read_bytes(path))
        except ValueError as error:
            raise damaged_json(path, error) from error

    def write(self, path: Path) -> None:
        """Write JSON with one line per row."""
        head = json.dumps(self.model_dump(exclude={"rows"}))[:-1]
        rows = ",\n".join(f'["{digest}",{length}]' for digest, length in self.rows)
        write_bytes(path, f'{head}, "rows": [\n{rows}\n]}}\n'.encode())


def shard_name(shard: int) -> str:
    """`rows-00012`."""
    return f"rows-{shard:05d}"


def shard_path(folder: Path, shard: int) -> Path:
    return folder / "shards" / f"{shard_name(shard)}.safetensors"


def index_path(folder: Path, shard: int) -> Path:
    return folder / "index" / f"{shard_name(shard)}.json"


def row_digests(packed: PackedBatch) -> list[str]:
    """Per row of a batch on the CPU, the digest of the target's input: 32 hexadecimal digits."""
    rows = torch.stack([packed.tokens, packed.positions, packed.segments.long()], 1)  # [b, 3, T]
    contents = [row.tobytes() for row in rows.int().numpy()]
    return [hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents]


def tensors_of(content: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """`{thing: {part: tensor}}` under flat names, as safetensors takes it."""
    return {
        f"{thing}.{part}": tensor
        for thing, parts in content.items()
        for part, tensor in parts.items()
    }


def things_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `tensors_of`."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        thing, part = name.rsplit(".", 1)
        found.setdefault(thing, {})[part] = tensor
    return found


def brief(value: Any) -> str:
    """A value as an error shows it; of `loading`, the defaults are empty."""
    text = str(value) or "the defaults"
    return text if len(text) <= 24 else text[:20] + "..."
