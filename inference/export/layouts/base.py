"""What layouts share: our checkpoint as they see it, the target's facts they ask for, a table of tensors, and what they hand back.

A layout turns a checkpoint of ours into the files of one format (`write`) and such files into a checkpoint of ours (`read`). Both
directions use the same `rows`: which of our tensors is which of theirs, and its shape. A tensor that is one of theirs but only a
part of one of ours (Medusa's heads are stacked here) is a row with an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
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

EXACT_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that engines compute as transformers does; the others change with the length of the sequence."""


@dataclass(frozen=True)
class Checkpoint:
    """One of our checkpoints. drafter: its module, complete but not bound to a target; sha256: of its weights file."""

    folder: Path
    kind: str
    config: Any
    info: TargetInfo
    drafter: TrainableDrafter
    sha256: str

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every persistent tensor by name, in the dtype it was stored in."""
        return {name: value.detach() for name, value in self.drafter.state_dict().items()}


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder completely; raises `UserError` when it is broken or its kind has no weights."""
    from safetensors import safe_open

    content = read_config(folder)
    kind, info = get_kind(content["kind"]), TargetInfo.from_dict(content["target"])
    config = build_config(kind.name, content["config"])
    drafter = kind.drafter_class(config, info)
    weights = folder / WEIGHTS_FILE
    if not isinstance(drafter, TrainableDrafter) or not weights.is_file():
        raise UserError(
            f"'{folder}': kind '{kind.name}' has no weights, so there is nothing that a file could hold."
        )
    with safe_open(str(weights), "pt") as file:
        dtypes = {file.get_tensor(name).dtype for name in file.keys() if name not in INTEGERS}  # noqa: SIM118
    if len(dtypes) == 1:
        drafter.to(dtypes.pop())
    load_weights(drafter, weights)
    return Checkpoint(folder, kind.name, config, info, drafter.eval(), file_sha256(weights))


INTEGERS = ("d2t", "t2d", "pard_token")
"""Tensors of ours that are not floating-point."""


class Target:
    """The target's facts and, when a layout asks for them, its weights: most layouts need its config.json and tokenizer alone."""

    def __init__(self, config: TargetConfig) -> None:
        self.config = config
        self.described = load_config(config).get_text_config()
        self.tokenizer = load_tokenizer(config)

    @classmethod
    def of(cls, config: TargetConfig, info: TargetInfo) -> Target:
        """The target of a drafter trained for `info`; raises `UserError` when `config` names another one."""
        target = cls(config)
        target.require(info)
        return target

    def require(self, info: TargetInfo) -> None:
        """Raise `UserError` unless this is the target that `info` describes."""
        text = self.described
        found: dict[str, Any] = {
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
            "hidden_size": text.hidden_size,
            "num_layers": text.num_hidden_layers,
            "revision": revision_of(self.config.path, self.config.revision),
        }
        for name, value in found.items():
            if getattr(info, name) != value:
                raise UserError(
                    f"this drafter was trained for target '{info.id}' with {name} {getattr(info, name)}, but target="
                    f"'{self.config.path}' has {value}. Give the target it was trained for (target.path=...)."
                )

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary parameters of its config.json, one flat table; empty when it has several sets of them, or none."""
        found = getattr(self.described, "rope_parameters", None) or {}
        return dict(found) if "rope_theta" in found else {}

    @cached_property
    def weights(self) -> TargetWeights:
        """Its embedding and LM head, read from its files."""
        return shared_weights(load_model(self.config))

    def unused_token(self, chosen: int) -> int:
        """A token id that text hardly ever holds, for drafters that read one as "unknown"; `chosen` when that is an id.

        Taken, in this order: a row of the embedding behind the tokenizer's last token, a token named unused, reserved or pad.
        Raises `UserError` when there is none.
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
            fitting = sorted(number for name, number in names.items() if word in name.lower() and "<" in name)
            for number in fitting:
                if number not in ends:
                    return int(number)
        raise UserError(
            "this drafter was trained with a mask vector of its own, which engines read as the embedding of a token; the target's "
            "tokenizer has no unused one. Choose a token that text does not hold with export.mask_token_id=<id>."
        )


@dataclass(frozen=True)
class Row:
    """Our tensor `ours` (or the part of it at `index`) is their tensor `theirs`, of `shape`."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()


@dataclass
class Written:
    """One exported folder before it is on disk.

    config: config.json; tensors: model.safetensors; files: further files by name; speculative: what the engine is told beside the
    folder (`model` is left out: it is the folder); kept: what we must remember to read it back bit for bit; notes: what a person
    who serves it should know.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    speculative: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tokenizer: bool = False


@dataclass
class Imported:
    """A checkpoint of ours made of somebody else's files: kind, the values of its configuration that differ from the defaults, its
    tensors, and what was left out or could not be known.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """What a person may choose of an export. tokens: drafts per step, 0: as many as it was trained for; mask_token_id: see
    `Target.unused_token`.
    """

    tokens: int = 0
    mask_token_id: int = -1


Writer = Callable[[Checkpoint, Target, Options], Written]


def give(rows: Sequence[Row], ours: Mapping[str, Tensor], left: Iterable[str] = ()) -> dict[str, Tensor]:
    """Our tensors under their names. left: tensors of ours that the layout places elsewhere or drops on purpose.

    Every tensor of ours must be in a row or in `left`, and every row's shape must be the tensor's: a layout that forgets one is
    our bug.
    """
    unknown = set(ours) - {row.ours for row in rows} - set(left)
    assert not unknown, f"tensors without a place in the layout: {sorted(unknown)}"
    found = {}
    for row in rows:
        value = ours[row.ours][row.index] if row.index else ours[row.ours]
        assert tuple(value.shape) == row.shape, (
            f"{row.ours} is {tuple(value.shape)}, the layout says {row.shape}"
        )
        found[row.theirs] = value.contiguous()
    return found


def take(
    rows: Sequence[Row], theirs: Mapping[str, Tensor], where: str, spare: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Their tensors under our names; raises `UserError` for missing, unknown and misshapen ones. spare: names that may be there."""
    wanted = {row.theirs for row in rows}
    missing, odd = sorted(wanted - set(theirs)), sorted(set(theirs) - wanted - set(spare))
    if missing or odd:
        raise UserError(
            f"'{where}' does not fit its own config.json: missing tensors {missing[:6]}, unknown tensors {odd[:6]}. It is of an "
            "architecture that we do not have, or incomplete."
        )
    for row in rows:
        if tuple(theirs[row.theirs].shape) != row.shape:
            raise UserError(
                f"'{where}': tensor '{row.theirs}' has shape {list(theirs[row.theirs].shape)}, expected {list(row.shape)}."
            )
    found: dict[str, Tensor] = {}
    parts: dict[str, list[Row]] = {}
    for row in rows:
        if row.index:
            parts.setdefault(row.ours, []).append(row)
        else:
            found[row.ours] = theirs[row.theirs]
    for name, pieces in parts.items():
        lead = [max(row.index[axis] for row in pieces) + 1 for axis in range(len(pieces[0].index))]
        first = theirs[pieces[0].theirs]
        whole = torch.empty(*lead, *first.shape, dtype=first.dtype)
        for row in pieces:
            whole[row.index] = theirs[row.theirs]
        found[name] = whole
    return found


def refuse(what: str, engine: str, instead: str) -> UserError:
    """The error for an option that an engine cannot express."""
    return UserError(f"{engine} cannot run this drafter: {what}. {instead}")
