"""Writes a target's checkpoint with another MTP block in it, which engines load as one model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import read_object, require_fit
from heads.api.tensors import open_tensors, tensor_shapes, write_tensors
from inference.export.layouts.folder import CONFIG
from inference.folders import EXPORT_FILE

INDEX = "model.safetensors.index.json"
BLOCK = "mtp-{}.safetensors"
"""The file that the block is written to, with the first number that is not taken."""
BESIDE = (".json", ".jinja", ".model", ".txt", ".md")
"""Suffixes of the files beside a model's weights that are copied."""
PT = {"format": "pt"}


def stitch(
    target: Path, block: dict[str, Tensor], is_of_block: Callable[[str], bool], out: Path
) -> None:
    """Write the files of the folder `target`, except config.json, into the folder `out`, with
    `block` in place of the target's own block. `is_of_block` tells which tensors belong to that
    block. Raises `UserError` for a target whose weights are incomplete, or not in safetensors
    files."""
    shards = sorted(target.glob("*.safetensors"))
    require_complete(target, shards)
    where: dict[str, str] = {}
    total = sum(value.nbytes for value in block.values())
    for shard in shards:
        names = tensor_shapes(shard).keys()
        kept = [name for name in names if not is_of_block(name)]
        if len(kept) == len(names):
            _link(shard, out / shard.name)
        elif kept:
            with open_tensors(shard) as file:
                write_tensors({name: file.get_tensor(name) for name in kept}, out / shard.name, PT)
        if kept:
            where |= dict.fromkeys(kept, shard.name)
            total += (out / shard.name).stat().st_size
    # a name that no linked file has: writing to a linked file would change the target's own
    place = next(name for number in count() if not (out / (name := BLOCK.format(number))).exists())
    write_tensors(block, out / place, PT)
    where |= dict.fromkeys(block, place)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in sorted(target.iterdir()):
        other = path.name not in (CONFIG, INDEX, EXPORT_FILE) and path.suffix in BESIDE
        if path.is_file() and other:
            shutil.copyfile(path, out / path.name)


def require_complete(target: Path, shards: Sequence[Path]) -> None:
    """Raise `UserError` unless the shards contain every tensor that the target's index lists; the
    Hub's cache may have only some of them. Without an index, there must be a shard."""
    index, listed = target / INDEX, dict[str, str]()
    if index.is_file():
        content = read_object(index, "Fetch it again.").get("weight_map")
        listed = require_fit(dict[str, str], content, f"weight_map in '{index}'")
    files = sorted(set(listed.values()))
    lacking = sorted(set(files) - {shard.name for shard in shards})
    if lacking:
        raise UserError(
            f"'{target}' lacks {len(lacking)} of the {len(files)} weight files that its {INDEX} "
            f"lists, such as {lacking[0]}. Fetch the whole target (`hf download`), then export "
            "again."
        )
    if not shards:
        raise UserError(
            f"'{target}' has no *.safetensors files to put the block into. Fetch the whole target "
            "(`hf download`), or save one in another format with safetensors."
        )
    held = {shard.name: tensor_shapes(shard).keys() for shard in shards}
    lost = sorted(name for name, file in listed.items() if name not in held[file])
    if lost:
        raise UserError(
            f"'{target}' lacks {len(lost)} of the {len(listed)} tensors that its {INDEX} lists, "
            f"such as '{lost[0]}' in {listed[lost[0]]}. Fetch that file again."
        )


def _link(source: Path, place: Path) -> None:
    """A hard link to a file, or a copy of it where the file system has no hard links."""
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copyfile(source, place)
