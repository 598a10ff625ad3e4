"""What layouts share: checkpoint, target, tables of tensors, and the results.

A layout turns one of our checkpoints into the files of one format (`write`) and such files into a
checkpoint (`read`). Both directions use the same `rows`: which of our tensors is which of theirs,
and its shape. Where one of our tensors holds several of theirs (Medusa's heads are stacked), each
is a row with an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from heads.api.checkpoint import WEIGHTS_FILE, build_config, load_weights, read_config
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo, TargetWeights, tokenizer_hash
from inference.manifest import file_sha256
from inference.target.loading import (
    TargetConfig,
    load_config,
    load_model,
    load_tokenizer,
    shared_weights,
)
from inference.target.revision import revision_of

Json = dict[str, Any]
"""A JSON object of a foreign format, such as the content of a config.json."""
Shapes = dict[str, tuple[int, ...]]
"""Tensor names and their shapes."""
INTEGERS = ("d2t", "t2d", "pard_token")
"""Tensors of ours that are not floating-point."""


@dataclass(frozen=True)
class Checkpoint:
    """One of our checkpoints.

    method: what engines call such a drafter (`Kind.export_method`); drafter: its module, complete
    but not bound to a target; sha256: of its weights file.
    """

    folder: Path
    kind: str
    method: str
    config: Any
    info: TargetInfo
    drafter: TrainableDrafter
    sha256: str

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every persistent tensor by name, in the dtype it was stored in."""
        return {name: value.detach() for name, value in self.drafter.state_dict().items()}


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder; raises `UserError` if it is broken or its kind has no weights."""
    content = read_config(folder)
    kind, info = get_kind(content["kind"]), TargetInfo.from_dict(content["target"])
    config = build_config(kind.name, content["config"])
    drafter = kind.drafter_class(config, info)
    weights = folder / WEIGHTS_FILE
    if not isinstance(drafter, TrainableDrafter) or not weights.is_file():
        raise UserError(f"'{folder}': kind '{kind.name}' has no weights to export.")
    with safe_open(str(weights), "pt") as file:
        names = [name for name in file.keys() if name not in INTEGERS]  # noqa: SIM118
        dtypes = {file.get_tensor(name).dtype for name in names}
    if len(dtypes) == 1:
        drafter.to(dtypes.pop())
    load_weights(drafter, weights)
    method, digest = kind.export_method(config), file_sha256(weights)
    return Checkpoint(folder, kind.name, method, config, info, drafter.eval(), digest)


class Target:
    """The target's config.json and tokenizer, and its weights for the layouts that need them."""

    def __init__(self, config: TargetConfig) -> None:
        self.config = config
        self.described = load_config(config).get_text_config()
        self.tokenizer = load_tokenizer(config)

    @classmethod
    def of(cls, config: TargetConfig, info: TargetInfo) -> Target:
        """The target of a drafter trained for `info`.

        Raises `UserError` if `config` names another.
        """
        target = cls(config)
        target.require(info)
        return target

    def require(self, info: TargetInfo) -> None:
        """Raise `UserError` unless this is the target that `info` describes."""
        found = {
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
            "hidden_size": self.described.hidden_size,
            "num_layers": self.described.num_hidden_layers,
            "revision": revision_of(self.config.path, self.config.revision),
        }
        for name, value in found.items():
            if getattr(info, name) != value:
                raise UserError(
                    f"this drafter was trained for target '{info.id}' with {name} "
                    f"{getattr(info, name)}, but target='{self.config.path}' has {value}. Give the "
                    "target it was trained for (target.path=...)."
                )

    @property
    def rope(self) -> Json:
        """The rotary parameters of its config.json.

        Empty if it has several sets of them, or none.
        """
        found = getattr(self.described, "rope_parameters", None) or {}
        return dict(found) if "rope_theta" in found else {}

    @cached_property
    def weights(self) -> TargetWeights:
        """Its embedding and LM head, read from its files."""
        return shared_weights(load_model(self.config))

    def unused_token(self, chosen: int) -> int:
        """The id of a token that text does not hold, for drafters that read one as "unknown".

        `chosen` if that is an id (>= 0); else the first row of the embedding behind the tokenizer's
        last token; else a token named unused, reserved or pad. Raises `UserError` without one.
        """
        size = int(self.described.vocab_size)
        if chosen >= 0:
            if chosen >= size:
                raise UserError(
                    f"export.mask_token_id must lie below the vocabulary of {size}; given {chosen}."
                )
            return chosen
        if len(self.tokenizer) < size:
            return len(self.tokenizer)
        names = self.tokenizer.get_vocab()
        ends = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id}
        for word in ("unused", "reserved", "pad"):
            fitting = [i for name, i in names.items() if word in name.lower() and "<" in name]
            found = next((number for number in sorted(fitting) if number not in ends), None)
            if found is not None:
                return int(found)
        raise UserError(
            "this drafter was trained with a mask vector of its own, which engines read as the "
            "embedding of a token; the target's tokenizer has no unused one. Choose a token that "
            "text does not hold with export.mask_token_id=<id>."
        )


@dataclass(frozen=True)
class TensorRow:
    """Our tensor `ours` (or the part of it at `index`) is their tensor `theirs`, of `shape`."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()


def same_names(shapes: Shapes) -> list[TensorRow]:
    """Rows of tensors that have the same name on both sides."""
    return [TensorRow(name, name, shape) for name, shape in shapes.items()]


@dataclass
class Written:
    """One exported folder before it is on disk.

    config: config.json; tensors: model.safetensors; files: further files by name; speculative: the
    engine's `speculative_config` without `model`, which is the folder; kept: what a bit-exact
    import needs beyond the files; notes: for the person who serves it; tokenizer: whether the
    target's tokenizer belongs into the folder.
    """

    config: Json
    tensors: dict[str, Tensor]
    speculative: Json = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    kept: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tokenizer: bool = False


@dataclass
class Imported:
    """A checkpoint of ours made of foreign files.

    config: the values of the kind's configuration that differ from the defaults; notes: what was
    left out or could not be known.
    """

    kind: str
    config: Json
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """Choices of an export. tokens: drafts per step, 0: as many as it was trained for;
    mask_token_id: see `Target.unused_token`.
    """

    tokens: int = 0
    mask_token_id: int = -1


Writer = Callable[[Checkpoint, Target, Options, str], Written]
"""(checkpoint, target, options, engine) -> the folder; raises `UserError` for what the engine or
the layout cannot express."""


def give(
    rows: Sequence[TensorRow], ours: Mapping[str, Tensor], left: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Our tensors under their names. left: those that the layout stores elsewhere or drops.

    Every tensor of ours must be in a row or in `left`, and every row's shape must be the tensor's:
    anything else is a bug of the layout.
    """
    unknown = set(ours) - {row.ours for row in rows} - set(left)
    assert not unknown, f"tensors without a place in the layout: {sorted(unknown)}"
    found = {}
    for row in rows:
        value = ours[row.ours][row.index] if row.index else ours[row.ours]
        assert tuple(value.shape) == row.shape, f"{row.ours}: {tuple(value.shape)} != {row.shape}"
        found[row.theirs] = value.contiguous()
    return found


def take(
    rows: Sequence[TensorRow], theirs: Mapping[str, Tensor], where: str, spare: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Their tensors under our names. spare: names that may be there besides.

    Raises `UserError` for missing, unknown and misshapen ones.
    """
    wanted = {row.theirs for row in rows}
    missing = sorted(wanted - set(theirs))
    odd = sorted(set(theirs) - wanted - set(spare))
    if missing or odd:
        raise UserError(
            f"'{where}' does not fit its own config.json: missing tensors {missing[:6]}, unknown "
            f"tensors {odd[:6]}. It is of an architecture that we do not have, or incomplete."
        )
    found: dict[str, Tensor] = {}
    for row in rows:
        value = theirs[row.theirs]
        if tuple(value.shape) != row.shape:
            raise UserError(
                f"'{where}': tensor '{row.theirs}' has shape {list(value.shape)}, "
                f"expected {list(row.shape)}."
            )
        if not row.index:
            found[row.ours] = value
    for name in dict.fromkeys(row.ours for row in rows if row.index):
        parts = [row for row in rows if row.ours == name]
        lead = [1 + max(axis) for axis in zip(*(row.index for row in parts), strict=True)]
        first = theirs[parts[0].theirs]
        found[name] = torch.empty(*lead, *first.shape, dtype=first.dtype)
        for row in parts:
            found[name][row.index] = theirs[row.theirs]
    return found


def refuse(what: str, engine: str, instead: str) -> UserError:
    """The error for an option that an engine cannot express."""
    return UserError(f"{engine} cannot run this drafter: {what}. {instead}")
