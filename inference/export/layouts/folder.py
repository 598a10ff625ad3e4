"""A folder that somebody else wrote, read without executing anything, and the target that receives what is in it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from inference.folders import EXPORT_FILE

CONFIG = "config.json"
PICKLES = ("*.pt", "*.bin", "*.pth")
NOT_WEIGHTS = (
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "mask_embedding.pt",
    "trainer_state.pt",
)
SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Folder:
    """config: its config.json; tensors: of all its weight files; export: our own notes beside them, empty in other people's."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    export: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Read a folder; raises `UserError` when it lacks a config.json or weights, or one of them is broken."""
        if not path.is_dir():
            raise UserError(
                f"'{path}' is not a folder. Fetch the drafter first (`hf download <repo> --local-dir <folder>`)."
            )
        config = read_json(path / CONFIG)
        export = read_json(path / EXPORT_FILE) if (path / EXPORT_FILE).is_file() else {}
        return cls(path, config, read_tensors(path), export)

    @cached_property
    def architecture(self) -> str:
        """The first of its architectures, or nothing."""
        return str((self.config.get("architectures") or [""])[0])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises `UserError` when it is absent or broken."""
    if not path.is_file():
        raise UserError(f"'{path.parent}' has no {path.name}: it is not the folder of a drafter.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"'{path}' is broken ({error}). Fetch it again.") from error
    if not isinstance(found, dict):
        raise UserError(f"'{path}' is broken: an object is needed, it holds a {type(found).__name__}.")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files; without any, of its torch files, with nothing but tensors unpickled."""
    found: dict[str, Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        try:
            found.update(load_file(str(file)))
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"'{file}' cannot be read ({error}). It is cut off or damaged; fetch it again."
            ) from error
    if files:
        return found
    for file in sorted(
        item for pattern in PICKLES for item in path.glob(pattern) if item.name not in NOT_WEIGHTS
    ):
        found.update(unpickled(file))
    if not found:
        raise UserError(f"'{path}' holds no weights: neither *.safetensors nor {', '.join(PICKLES)}.")
    return found


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a torch file; raises `UserError` for one that would execute code, or holds anything else."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        first = str(error).split("\n")[0]
        raise UserError(
            f"'{file}' cannot be read as tensors alone ({first}). Nothing in it was executed."
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"'{file}' does not hold a table of tensors by name.")
    return {str(name): value for name, value in state.items()}


@dataclass(frozen=True)
class Receiver:
    """The target that an imported drafter is for."""

    info: TargetInfo
    weights: TargetWeights

    def without_shared(
        self, folder: Folder, names: tuple[str, ...] = SHARED
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Their tensors but copies of the target's embedding and LM head, and what was left out.

        Raises `UserError` for an embedding that is not the target's: ours of this kind share it.
        """
        rest, notes = dict(folder.tensors), []
        for name in names:
            theirs = rest.get(name)
            if theirs is None:
                continue
            if not self.is_shared(name, theirs):
                what = "embedding" if name.startswith("embed") else "LM head"
                raise UserError(
                    f"'{folder.path}' has an {what} of its own ('{name}' differs from the target's), which our drafters of this "
                    "kind share with the target. Was it made for this target?"
                )
            del rest[name]
            notes.append(f"{name}: a copy of the target's, left out")
        return rest, notes

    def is_shared(self, name: str, theirs: Tensor) -> bool:
        """Whether their tensor is the target's own, up to the rounding of the number format it was stored in."""
        own = self.weights.embedding if name.startswith("embed") else self.weights.lm_head
        return own.shape == theirs.shape and torch.equal(own.to(theirs.dtype).cpu(), theirs.cpu())
