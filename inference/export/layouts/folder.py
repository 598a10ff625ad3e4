"""A drafter's folder on disk, read without executing any code, and the target that receives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from heads.api import tensors
from heads.api.adapter import ADAPTER_CONFIG
from heads.api.checkpoint import CONFIG_KEYS
from heads.api.errors import UserError
from heads.api.reading import read_object
from heads.api.target_info import TargetInfo, TargetWeights
from inference.folders import EXPORT_FILE

Json = dict[str, Any]
"""A JSON object of a foreign format, such as the content of a config.json."""
CONFIG = "config.json"
PICKLES = ("*.pt", "*.bin", "*.pth")
NOT_WEIGHTS = (
    "training_args.bin optimizer.pt scheduler.pt rng_state.pth mask_embedding.pt trainer_state.pt"
).split()
BROKEN_PICKLE = (
    *(UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError, LookupError),
    *(AttributeError, ImportError, MemoryError, AssertionError),
)
"""The errors of torch for a file that is damaged or contains anything but tensors."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class ExportNotes:
    """`headstart_export.json`: the content of an exported folder and how to serve it
    (docs/formats.md). All fields are empty for the folder of another trainer."""

    format: int = 1
    kind: str = ""
    method: str = ""
    engine: str = "vllm"
    layout: str = ""
    source: dict[str, str] = field(default_factory=dict)
    """`checkpoint`: the folder it was made of; `sha256`: of that folder's weights; of an adapter
    also `base`, the folder of its base, and `base_sha256`."""
    config: Json = field(default_factory=dict)
    """The drafter's configuration, as in the checkpoint."""
    taps: list[int] = field(default_factory=list)
    """The layers of the target that the drafter reads: L is the state after L layers."""
    target: Json = field(default_factory=dict)
    """The target's facts, as in the checkpoint."""
    speculative_config: Json = field(default_factory=dict)
    hf_overrides: Json = field(default_factory=dict)
    decode_settings: Json = field(default_factory=dict)
    """Settings beyond `speculative_config` that the checkpoint's decode.yaml gives this engine: for
    vLLM draft lengths per batch size, for SGLang the options of its trees, for llama.cpp the least
    probability of a drafted token."""
    serve: str = ""
    serve_as_custom_class: str = ""
    kept: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Name -> SHA-256 of every other file of the folder."""

    @classmethod
    def read(cls, folder: Path) -> ExportNotes:
        """The notes of a folder, empty if it has none; raises `UserError` if they are broken.

        Unknown keys are ignored, and missing keys get their defaults, since other versions may have
        written the file.
        """
        path, found = folder / EXPORT_FILE, cls()
        content = read_json(path) if path.is_file() else {}
        for name in [each.name for each in fields(cls) if each.name in content]:
            wanted = type(getattr(found, name))
            if not isinstance(content[name], wanted):
                raise UserError(
                    f"'{path}' is broken: {name} must be a {wanted.__name__}, it is a "
                    f"{type(content[name]).__name__}. Export the drafter again."
                )
            setattr(found, name, content[name])
        return found


@dataclass(frozen=True)
class Folder:
    """A folder's config.json (for an adapter, its adapter_config.json), the tensors of all its
    weight files, and the notes of its export."""

    path: Path
    config: Json
    tensors: dict[str, Tensor]
    export: ExportNotes

    @classmethod
    def read(cls, path: Path, only: Callable[[str], bool] | None = None) -> Folder:
        """Raises `UserError` if the folder lacks config.json or weights, or one is broken.

        only: which tensors of safetensors files are read, by name; None: all.
        """
        if not path.is_dir():
            raise UserError(
                f"'{path}' is not a folder. Fetch the drafter first "
                "(`hf download <repo> --local-dir <folder>`)."
            )
        adapter = (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file()
        config = read_json(path / (ADAPTER_CONFIG if adapter else CONFIG))
        if config.keys() >= CONFIG_KEYS.keys():
            raise UserError(
                f"'{path}' is a checkpoint of Headstart's own and needs no import: give it as it "
                "is, such as measure.drafters=[<folder>] or chat.drafter=<folder>."
            )
        notes = ExportNotes.read(path)
        if adapter and notes.source.get("base"):
            raise UserError(
                f"'{path}' is an adapter in peft's layout, which holds a drafter's updates alone. "
                "Merge it with its base: `headstart export` with export.merge=true."
            )
        found = read_tensors(path) if only is None else read_some(path, only)
        return cls(path, config, found, notes)

    @cached_property
    def architecture(self) -> str:
        """The first of its architectures, the type of an adapter, or an empty string."""
        given = self.config.get("architectures")
        if isinstance(given, list) and given:
            return str(given[0])
        return str(self.config.get("peft_type", ""))

    @cached_property
    def flat(self) -> Json:
        """config.json with the keys of a nested decoder layer (speculators) at the top level."""
        layer = self.config.get("transformer_layer_config")
        return {**layer, **self.config} if isinstance(layer, dict) else self.config

    @cached_property
    def block(self) -> Json:
        """`flat` with the keys of `dflash_config` at the top level."""
        more = self.flat.get("dflash_config")
        return {**self.flat, **more} if isinstance(more, dict) else self.flat


def read_json(path: Path) -> Json:
    """A JSON object; raises `UserError` if it is absent or broken."""
    if not path.is_file():
        raise UserError(f"'{path.parent}' has no {path.name}: it is not the folder of a drafter.")
    return read_object(path, "Fetch it again.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files; if it has none, of its torch files."""
    found: dict[str, Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        found.update(tensors.read_tensors(file, "It is cut off or damaged; fetch it again."))
    if not files:
        items = {item for pattern in PICKLES for item in path.glob(pattern)}
        for file in sorted(item for item in items if item.name not in NOT_WEIGHTS):
            found.update(unpickle(file))
        if not found:
            kinds = ", ".join(PICKLES)
            raise UserError(f"'{path}' holds no weights: neither *.safetensors nor {kinds}.")
    return found


def read_some(path: Path, only: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files whose names `only` accepts; no others are
    read."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with tensors.open_tensors(file, "It is cut off or damaged; fetch it again.") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if only(name)}  # noqa: SIM118
    return found


def unpickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a torch file; raises `UserError` for one that holds anything else."""
    state = load_plain(file)
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"'{file}' does not hold a table of tensors by name.")
    return {str(name): value for name, value in state.items()}


def load_plain(file: Path) -> Any:
    """The content of a torch file, tensors and plain values only; raises `UserError` for anything
    else."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except BROKEN_PICKLE as error:
        # torch's own message advises to read it without this protection
        raise UserError(
            f"'{file}' cannot be read as tensors alone ({type(error).__name__}): it is damaged, or "
            "holds other objects. Nothing in it was executed. Fetch it again, or fetch its "
            "safetensors file."
        ) from error


@dataclass(frozen=True)
class Receiver:
    """The target of an imported drafter. notes: what was left out or could not be known; tokenizer:
    the target's, for drafters that may come with their own."""

    info: TargetInfo
    weights: TargetWeights
    notes: list[str] = field(default_factory=list)
    tokenizer: Any = None

    def drop_shared(self, name: str, theirs: dict[str, Tensor], where: Path) -> None:
        """Remove a copy of the target's embedding or LM head from their tensors, and note that.
        Raises `UserError` for a tensor that is not the target's."""
        value = theirs.pop(name, None)
        if value is None:
            return
        if not self.is_shared(name, value):
            what = "embedding" if name.startswith("embed") else "LM head"
            raise UserError(
                f"'{where}' has an {what} of its own ('{name}' differs from the target's), which "
                "our drafters of this kind share with the target. Was it made for this target?"
            )
        self.notes.append(f"{name}: a copy of the target's, left out")

    def is_shared(self, name: str, theirs: Tensor) -> bool:
        """Whether a tensor is the target's own, up to the rounding of either's number format."""
        own = self.weights.embedding if name.startswith("embed") else self.weights.lm_head
        return own.shape == theirs.shape and equal_rounded(own.cpu(), theirs.cpu())

    def is_shared_but(self, token: int, embedding: Tensor) -> bool:
        """Whether all rows of an embedding, except the token's, are the target's."""
        own, theirs = self.weights.embedding.cpu(), embedding.cpu()
        rest = torch.arange(own.shape[0]) != token
        return own.shape == theirs.shape and equal_rounded(own[rest], theirs[rest])


def equal_rounded(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor, rounded to the number format of the other, is the other. A target may be
    loaded in another format than the one that it is stored in, from which others copied it."""
    return torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))
