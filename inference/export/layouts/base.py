"""Shared parts of the layouts: checkpoint, target, tables of tensors, the engines' rules, and the
results.

A layout converts a checkpoint into the files of one format (`write`) and such files into a
checkpoint (`read`). Both directions use the same `rows`, which map our tensors to theirs and give
their shapes. Where one of our tensors contains several of theirs (Medusa's heads are stacked), each
is a row with an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import (
    WEIGHTS_FILE,
    build_config,
    build_drafter,
    load_weights,
    read_config,
    stored_weights,
    weights_file,
)
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo, TargetWeights, tokenizer_hash
from heads.api.tensors import open_tensors
from inference.export.config import ExportConfig
from inference.export.layouts.folder import CONFIG, Folder, Json
from inference.manifest import file_sha256
from inference.target import loading
from inference.target.revision import revision_of
from inference.target.settings import logit_factors
from inference.target.shared import shared_weights

CHAIN = 4
"""Drafted tokens per step of a distilled drafter, and at least of EAGLE and EAGLE-3, unless the
export sets another number."""

Shapes = dict[str, tuple[int, ...]]
"""Tensor names and their shapes."""
INTEGERS = ("d2t", "t2d", "pard_token")
"""Our tensors that are not floating-point."""
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. method: the engines' name for such a drafter (`Kind.export_method`); drafter:
    its module, complete but not bound to a target, with an adapter merged into its base; sha256: of
    its weights file."""

    folder: Path
    kind: str
    method: str
    config: Any
    info: TargetInfo
    drafter: TrainableDrafter
    sha256: str
    base: dict[str, str] = field(default_factory=dict)
    """Of an adapter: `base`, its base's folder, and `base_sha256`, of the weights there."""

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every persistent tensor by name, in the dtype that it (or the base of an adapter) was
        stored in."""
        return {name: value.detach() for name, value in self.drafter.state_dict().items()}


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder; raises `UserError` if it is broken or its kind has no weights."""
    content = read_config(folder)
    kind, info = get_kind(content["kind"]), TargetInfo.from_dict(content["target"])
    config = build_config(kind.name, content["config"])
    weights, stored = weights_file(folder), stored_weights(folder)
    if not issubclass(kind.drafter_class, TrainableDrafter) or not weights.is_file():
        raise UserError(f"'{folder}': kind '{kind.name}' has no weights to export.")
    drafter = build_drafter(kind, config, info, stored.path)
    with open_tensors(stored.path) as file:
        names = [name for name in file.keys() if name not in INTEGERS]  # noqa: SIM118
        dtypes = {file.get_tensor(name).dtype for name in names}
    if len(dtypes) == 1:
        drafter.to(dtypes.pop())
    load_weights(drafter, stored)
    method, digest = kind.export_method(config), file_sha256(weights)
    base = {}
    if stored.base is not None:
        base = {"base": str(stored.path.parent.resolve()), "base_sha256": stored.base.sha256}
    return Checkpoint(folder, kind.name, method, config, info, drafter.eval(), digest, base)


class Target:
    """The target's config.json and tokenizer, and its weights for the layouts that need them."""

    def __init__(self, config: loading.TargetConfig) -> None:
        self.config = config
        self.described = loading.load_config(config).get_text_config()
        self.tokenizer = loading.load_tokenizer(config)

    @classmethod
    def of(cls, config: loading.TargetConfig, info: TargetInfo) -> Target:
        """The target of a drafter trained for `info`; raises `UserError` if `config` is of another
        target."""
        target = cls(config)
        found = {
            "tokenizer_hash": tokenizer_hash(target.tokenizer),
            "hidden_size": target.described.hidden_size,
            "num_layers": loading.decoder_layers(target.described),
            "revision": revision_of(config.path, config.revision),
        }
        for name, value in found.items():
            if getattr(info, name) != value:
                raise UserError(
                    f"this drafter was trained for target '{info.id}' with {name} "
                    f"{getattr(info, name)}, but target='{config.path}' has {value}. Give the "
                    "target it was trained for (target.path=...)."
                )
        return target

    @property
    def rope(self) -> Json:
        """The rotary parameters of its config.json; empty if it has several sets, or none."""
        found = getattr(self.described, "rope_parameters", None) or {}
        return dict(found) if "rope_theta" in found else {}

    @cached_property
    def weights(self) -> TargetWeights:
        """Its embedding and LM head, read from its files."""
        return shared_weights(loading.load_model(self.config))

    @property
    def has_head_bias(self) -> bool:
        """Whether its LM head has a bias."""
        return any(name.endswith("lm_head.bias") for name in self.weights.state)

    def unused_token(self, chosen: int) -> int:
        """The id of a token that does not occur in text, for drafters that read one as "unknown".

        `chosen` if that is an id (>= 0); else the first row of the embedding behind the tokenizer's
        last token; else a token named unused, reserved or pad. Raises `UserError` if there is none.
        """
        size = int(self.described.vocab_size)
        if chosen >= size:
            raise UserError(
                f"export.mask_token_id must lie below the vocabulary of {size}; given {chosen}."
            )
        if chosen >= 0:
            return chosen
        after = 1 + max(self.tokenizer.get_vocab().values())
        if after < size:
            return after
        ends = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id}
        names = [(i, name) for name, i in self.tokenizer.get_vocab().items() if i not in ends]
        for word in ("unused", "reserved", "pad"):
            fitting = [i for i, name in names if word in name.lower() and "<" in name]
            if fitting:
                return int(min(fitting))
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


Expected = tuple[list[TensorRow], Shapes]
"""The tensors that an engine requires, and the optional ones."""


def same_names(shapes: Shapes) -> list[TensorRow]:
    """Rows of tensors that have the same name on both sides."""
    return [TensorRow(name, name, shape) for name, shape in shapes.items()]


def meta_state(kind: str, values: Json, info: TargetInfo) -> dict[str, Tensor]:
    """The tensors of a drafter, without their values."""
    with torch.device("meta"):
        drafter = get_kind(kind).drafter_class(build_config(kind, values), info)
    assert isinstance(drafter, TrainableDrafter), "layouts are of kinds with weights"
    return dict(drafter.state_dict())


def own_rows(
    kind: str, values: Json, info: TargetInfo, left: Iterable[str] = ()
) -> list[TensorRow]:
    """The tensors of a drafter except `left`, for layouts that store them under our names."""
    shapes = {name: tuple(value.shape) for name, value in meta_state(kind, values, info).items()}
    return same_names({name: shape for name, shape in shapes.items() if name not in left})


@dataclass
class Written:
    """One exported folder before it is on disk.

    config: the file `described`; tensors: the file `weights`; files: further files by name;
    speculative: the engine's `speculative_config` without `model`, which is the folder; kept: what
    a bit-exact import needs beyond the files; notes: for the person who serves it; tokenizer:
    whether the folder needs the target's tokenizer.
    """

    config: Json
    tensors: dict[str, Tensor]
    speculative: Json = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    kept: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tokenizer: bool = False
    described: str = CONFIG
    weights: str = WEIGHTS_FILE


@dataclass
class Imported:
    """A checkpoint made from foreign files. config: the values of the kind's configuration that
    differ from the defaults; notes: see `Receiver`."""

    kind: str
    config: Json
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


Writer = Callable[[Checkpoint, Target, ExportConfig], Written]
"""(checkpoint, target, options) -> the folder for `options.engine`; raises `UserError` for options
that the engine or the layout cannot express."""


def logit_scale(described: Any) -> float:
    """The factor on a target's logits, by its text config."""
    multiply, divide = logit_factors(described)
    return multiply / divide


def plain_rope(theta: float) -> Json:
    """Rotary positions without scaling."""
    return {"rope_type": "default", "rope_theta": float(theta)}


def own_rope(checkpoint: Checkpoint, target: Target) -> Json:
    """The rotary parameters of kinds that use the target's base without its scaling."""
    return plain_rope(checkpoint.info.rope_theta)


@dataclass(frozen=True)
class Layout:
    """The rules by which engines load a folder of one layout."""

    name: str
    architectures: tuple[str, ...]
    """Class names under which the engine finds its model."""
    tensors: Callable[[Folder, TargetInfo], Expected]
    """The tensors by the folder's config.json. Raises `UserError`, `KeyError`, `TypeError` or
    `ValueError` for one that does not describe such a drafter."""
    rope: Callable[[Checkpoint, Target], Json] | None = own_rope
    """The rotary parameters that a checkpoint's folder must have; None: no rotary positions."""
    draftable: Callable[[Json], tuple[int, str]] | None = None
    """(most drafts per step, what gives them) by config.json; None: any number."""
    taps: bool = False
    """Whether the engine captures inner states of the target (see `captured_layers`)."""
    block: bool = False
    """Whether it drafts blocks: which slot gives which token has to be settled."""
    eps: bool = True
    """Whether its norms must have the target's epsilon."""
    silent: bool = False
    """Whether the engine ignores unknown and missing tensors without an error."""
    linear: str = ""
    """A pattern of the weights that vLLM builds by the folder's own quantization_config; empty:
    none."""


def captured_layers(config: Json, layers: int, engine: str) -> tuple[int, ...]:
    """The layers whose states an engine captures for a config.json of a drafter that reads taps.
    config: `Folder.flat`; layers: of the target. L is the state after L layers."""
    inner = config.get("dflash_config") or {}
    numbered = inner.get("target_layer_ids") or config.get("target_layer_ids")
    nested = (config.get("eagle_config") or {}).get(IDS)
    if engine != "sglang" and config.get(IDS):
        return tuple(config[IDS])
    if config.get("aux_hidden_state_layer_ids"):
        return tuple(config["aux_hidden_state_layer_ids"])
    if numbered:
        return tuple(layer + 1 for layer in numbered)
    if nested:
        return tuple(layer + (1 if engine == "sglang" else 0) for layer in nested)
    return (2, layers // 2, layers - 3)


def require_taps(taps: tuple[int, ...], layers: int, where: Path) -> None:
    """Raise `UserError` unless the taps ascend and the target has such layers."""
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise UserError(
            f"'{where}' reads layers {list(taps)} of another target: this one has {layers}."
        )


def require_token(token: Any, size: int, where: Path) -> int:
    """A mask token that a config.json names; raises `UserError` unless it is one of the target's
    `size` tokens."""
    if not isinstance(token, int) or not 0 <= token < size:
        raise UserError(
            f"'{where}': config.json names the mask token {token!r}; allowed are the target's "
            f"tokens, 0 to {size - 1}. Was it made for this target?"
        )
    return token


def without_last(taps: Sequence[int], layers: int, engine: str) -> str:
    """The reason why an engine does not give a drafter its taps of a target of so many layers;
    empty if it does. vLLM (also through speculators) captures states behind every layer. SGLang and
    llama.cpp capture the inputs of layers, of which the last state is none, and transformers gives
    it after the final norm only."""
    if engine in ("vllm", "speculators") or layers not in taps:
        return ""
    return (
        f"it reads the state after the target's last layer (tap {layers}), which vLLM alone gives"
    )


def give(
    rows: Sequence[TensorRow], ours: Mapping[str, Tensor], left: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Our tensors under the layout's names. left: those that the layout stores elsewhere or drops.

    Each of our tensors must be in a row or in `left`, and each row's shape must be the tensor's.
    Anything else is a bug in the layout.
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
    rows: Sequence[TensorRow], theirs: Mapping[str, Tensor], where: Path, spare: Iterable[str] = ()
) -> dict[str, Tensor]:
    """The layout's tensors under our names. spare: optional names. Raises `UserError` for missing,
    unknown and misshapen ones."""
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
            sizes = f"{list(value.shape)}, expected {list(row.shape)}"
            raise UserError(f"'{where}': tensor '{row.theirs}' has shape {sizes}.")
        if row.index and row.ours not in found:
            parts = [each.index for each in rows if each.ours == row.ours]
            lead = [1 + max(axis) for axis in zip(*parts, strict=True)]
            found[row.ours] = value.new_empty(*lead, *row.shape)
        if row.index:
            found[row.ours][row.index] = value
        else:
            found[row.ours] = value
    return found


def refuse(what: str, engine: str, instead: str) -> UserError:
    """The error for an option that an engine cannot express."""
    return UserError(f"{engine} cannot run this drafter: {what}. {instead}")
