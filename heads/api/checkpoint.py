"""Drafter checkpoints: one folder with `config.json` and `model.safetensors`, loaded whole or not
at all.

The folder records the kind, its configuration and the target it was trained for; another target is
refused. An adapter's folder holds low-rank updates in place of `model.safetensors` and names the
checkpoint that they are added to. docs/formats.md describes the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from heads.api.adapter import ADAPTER_WEIGHTS, LARGEST_CONFIG, Base, Updates, read_updates
from heads.api.config import build, shown
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError, missing_folder
from heads.api.reading import read_object
from heads.api.registry import Kind, get_kind
from heads.api.starts import Started, named_parts
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tensors import read_tensors, require_shapes, tensor_shapes, write_tensors

FORMAT = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CONFIG_KEYS: dict[str, type] = {
    "format": int,
    "kind": str,
    "config": dict,
    "needs": dict,
    "target": dict,
}
ADAPTER_KEY = "adapter"
"""Key of an adapter's config.json besides `CONFIG_KEYS`: its base (`heads.api.adapter.Base`)."""


def save_drafter(
    drafter: Any, directory: Path, info: TargetInfo, state: dict[str, Tensor] | None = None
) -> None:
    """Write `drafter` to `directory` (created; files replaced atomically).

    state: weights to write instead of the module's own, e.g. gathered from a sharded engine. A kind
    without weights writes only config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(drafter, TrainableDrafter):
        given = (state or drafter.state_dict()).items()
        tensors = {name: value.detach().cpu().contiguous() for name, value in given}
        partial = directory / (WEIGHTS_FILE + ".partial")
        write_tensors(tensors, partial, {"format": "pt"})
        os.replace(partial, directory / WEIGHTS_FILE)
    write_config(drafter, directory, info)


def save_adapter(
    drafter: TrainableDrafter, updates: Updates, base: Path, base_sha256: str, out: Path
) -> None:
    """Write only the updates of a drafter to `out` (created; files replaced atomically). base: the
    checkpoint that they are added to; base_sha256: hash of its weights when they were loaded."""
    out.mkdir(parents=True, exist_ok=True)
    entry = Base.of(base, out, base_sha256)
    updates.write(out, entry.base, base_sha256)
    write_config(drafter, out, drafter.info, {ADAPTER_KEY: asdict(entry)})


def write_config(
    drafter: Any, directory: Path, info: TargetInfo, more: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint's config.json, with further keys, atomically."""
    content = {
        "format": FORMAT,
        "kind": drafter.kind,
        "config": asdict(drafter.config),
        "needs": asdict(drafter.needs),
        "target": info.to_dict(),
        **(more or {}),
    }
    partial = directory / (CONFIG_FILE + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, directory / CONFIG_FILE)


def read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json: `CONFIG_KEYS`, and `ADAPTER_KEY` for an adapter. Raises
    `UserError` when absent, broken or of another format."""
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise UserError(f"{missing_folder(directory)} Give the folder of a drafter's checkpoint.")
    if not path.is_file():
        raise UserError(
            f"'{directory}' is not a drafter checkpoint: it has no {CONFIG_FILE}. Give the folder "
            "that training wrote."
        )
    advice = "Train or download the checkpoint again."
    content = read_object(path, advice, LARGEST_CONFIG)
    missing = [key for key in CONFIG_KEYS if key not in content]
    if missing:
        raise UserError(f"'{path}' is broken: it lacks {', '.join(missing)}. {advice}")
    if content["format"] != FORMAT:
        raise UserError(
            f"'{path}' has checkpoint format {shown(content['format'])}; this version reads format "
            f"{FORMAT}."
        )
    found = {key: content[key] for key in (*CONFIG_KEYS, ADAPTER_KEY) if key in content}
    for key, value in found.items():
        if not isinstance(value, CONFIG_KEYS.get(key, dict)):
            raise UserError(f"'{path}' is broken: its {key} is {shown(value)}. {advice}")
    return found


def weights_file(directory: Path) -> Path:
    """The file of a checkpoint's own tensors, whose hash stands for its weights; for an adapter,
    the file of its updates. It need not exist."""
    updates = directory / ADAPTER_WEIGHTS
    return updates if updates.is_file() else directory / WEIGHTS_FILE


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensors on disk. path: the file of all of them, for an adapter its base's;
    updates: the updates added to them; base: the entry of an adapter's base."""

    path: Path
    updates: Updates | None = None
    base: Base | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in the dtype they were stored in; layers that an adapter updates, in
        float32 or a wider dtype. Raises `UserError`."""
        whole = read_tensors(self.path)
        return whole if self.updates is None else self.updates.merged(whole)


def stored_weights(directory: Path) -> Stored:
    """Where the tensors of a checkpoint are, and an adapter's updates; raises `UserError` for an
    adapter whose base is missing or has other weights than those it was trained on."""
    entry = read_config(directory).get(ADAPTER_KEY)
    if entry is None:
        return Stored(directory / WEIGHTS_FILE)
    try:
        base = build(Base, entry, ADAPTER_KEY)
    except UserError as error:
        raise UserError(f"'{directory / CONFIG_FILE}' is broken: {error}") from error
    return Stored(base.weights(directory, WEIGHTS_FILE), read_updates(directory), base)


def build_config(kind: str, values: dict[str, Any]) -> Any:
    """A kind's configuration from stored plain values; raises `UserError` if they do not fit."""
    config_class = get_kind(kind).config_class
    try:
        return build(config_class, values, "head")
    except UserError as error:
        raise UserError(f"the stored configuration does not fit kind '{kind}': {error}") from error


def new_drafter(
    kind: str,
    config: Any,
    info: TargetInfo,
    weights: TargetWeights,
    seed: int,
    token_counts: Tensor | None = None,
) -> Any:
    """A freshly initialised drafter, on the device and in the dtype of the target's weights.

    token_counts [V]: of the training data, for kinds with a reduced draft vocabulary.
    """
    drafter = get_kind(kind).drafter_class(config, info)
    if isinstance(drafter, TrainableDrafter):
        drafter.to(device=weights.embedding.device, dtype=weights.embedding.dtype)
        drafter.bind(weights)
        if token_counts is not None:
            drafter.choose_vocabulary(token_counts)
        drafter.initialise(weights, torch.Generator().manual_seed(seed))
        refuse_unset(drafter)
    return drafter


def load_drafter(
    directory: Path, info: TargetInfo, weights: TargetWeights, *, changed_target: bool = False
) -> Any:
    """Load a checkpoint for the target `info`, in the dtype and on the device of its weights. An
    adapter is loaded as its base with the updates merged.

    changed_target: accept a target of other weights with the same tokenizer and sizes, to measure
    the drafter with it. Raises `UserError` for another target, for missing, unknown or misshapen
    tensors, for weights that are not finite, and for an adapter without its base.
    """
    content = read_config(directory)
    trained_for = TargetInfo.from_dict(content["target"])
    if changed_target:
        trained_for.require_same_sizes(info)
    else:
        trained_for.require_same(info)
    kind = get_kind(content["kind"])
    config = build_config(kind.name, content["config"])
    stored = stored_weights(directory)
    drafter = build_drafter(kind, config, info, stored.path)
    if not isinstance(drafter, TrainableDrafter):
        return drafter
    drafter.to(device=weights.embedding.device, dtype=weights.embedding.dtype)
    load_weights(drafter, stored)
    drafter.bind(weights)
    return drafter.eval()


def build_drafter(kind: Kind, config: Any, info: TargetInfo, path: Path) -> Any:
    """A drafter that is to be filled from the safetensors file `path`; raises `UserError` if the
    file has other tensors."""
    if issubclass(kind.drafter_class, TrainableDrafter):
        check_file(kind, config, info, path)
    return kind.drafter_class(config, info)


def check_file(kind: Kind, config: Any, info: TargetInfo, path: Path) -> None:
    """Raise `UserError` unless a safetensors file has the tensors of a kind with weights.

    A configuration may specify any size, so its tensors are compared with those of the file before
    memory is allocated for them.
    """
    most = 1000 + 10 * len(tensor_shapes(path))
    # A kind of another package may compute with its weights in its constructor, which fails here
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"), at_most(most, path):
        check_shapes(kind.drafter_class(config, info), path)


@contextmanager
def at_most(parameters: int, path: Path) -> Iterator[None]:
    """End the block with a `UserError` once it has created more parameters: a million take minutes,
    even without memory."""
    made = 0

    def count(module: torch.nn.Module, name: str, parameter: object) -> None:
        nonlocal made
        made += 1
        if made > parameters:
            raise UserError(
                f"'{path}' does not fit its {CONFIG_FILE}, which asks for many more tensors than "
                "the file holds. Train or download the checkpoint again."
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_shapes(drafter: TrainableDrafter, path: Path) -> None:
    """Raise `UserError` unless a safetensors file holds every persistent tensor and no other."""
    expected = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    require_shapes(tensor_shapes(path), expected, path, f"kind '{drafter.kind}'")


def load_weights(drafter: TrainableDrafter, stored: Stored) -> None:
    """Fill every persistent tensor from a checkpoint, completely or not at all."""
    check_shapes(drafter, stored.path)
    drafter.load_state_dict(stored.tensors(), strict=True)
    refuse_unset(drafter)


def load_start_weights(drafter: TrainableDrafter, directory: Path) -> Started:
    """Fill an initialised drafter from a checkpoint of the same kind, whose `additions` may differ,
    or of a kind in `starts_from`; raises `UserError` if it does not fit."""
    content, stored = read_config(directory), stored_weights(directory)
    source, additions, path = content["kind"], drafter.additions, stored.path
    if source != drafter.kind:
        kind, theirs = get_kind(source), TargetInfo.from_dict(content["target"])
        check_file(kind, build_config(source, content["config"]), theirs, path)
    given = stored.tensors()
    found = given
    if source != drafter.kind:
        other = drafter.starts_from[source]
        found, additions = other.carry(drafter, given), additions + other.additions

    def may_differ(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in additions)

    own = drafter.state_dict()
    fresh = [name for name in own if name not in found and may_differ(name)]
    unused = [name for name in found if name not in own and may_differ(name)]
    expected = {name: tuple(own[name].shape) for name in own if name not in fresh}
    shapes = {name: tuple(value.shape) for name, value in found.items() if name not in unused}
    require_shapes(shapes, expected, path, f"kind '{drafter.kind}'")
    drafter.load_state_dict({name: found[name] for name in expected}, strict=False)
    refuse_unset(drafter)
    objects, left = {id(value) for value in given.values()}, {id(found[name]) for name in unused}
    carried = [name for name in expected if id(found[name]) in objects]
    return Started(
        named_parts(carried, own),
        named_parts([name for name in expected if name not in carried], own),
        named_parts(fresh, own),
        named_parts([name for name, value in given.items() if id(value) in left], given),
    )


def refuse_unset(drafter: TrainableDrafter) -> None:
    """Raise `UserError` naming the first tensor that is not finite (unset weights are NaN)."""
    for name, value in drafter.state_dict().items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise UserError(
                f"weight '{name}' of kind '{drafter.kind}' holds values that are not finite: it "
                "was never set."
            )


def unset_parameters(module: torch.nn.Module) -> None:
    """Fill every parameter with NaN; kinds call this at the end of `__init__`."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
