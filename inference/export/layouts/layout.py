"""The rules by which engines load a layout, and the layers that they capture for a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.export.layouts.base import Checkpoint, Json, Shapes, Target, TensorRow
from inference.export.layouts.folder import Folder
from inference.export.layouts.llama import plain_rope

IDS = "eagle_aux_hidden_state_layer_ids"


def own_rope(checkpoint: Checkpoint, target: Target) -> Json:
    """The rotary parameters of kinds that take the target's base without its scaling."""
    return plain_rope(checkpoint.info.rope_theta)


@dataclass(frozen=True)
class Layout:
    """The rules by which engines load a folder of one layout."""

    name: str
    architectures: tuple[str, ...]
    """Class names under which the engine finds its model."""
    tensors: Callable[[Folder, TargetInfo], tuple[list[TensorRow], Shapes]]
    """The tensors that the engine looks for by the folder's config.json, and those that may be
    there besides. Raises `UserError`, `KeyError`, `TypeError` or `ValueError` for a config.json
    that does not describe such a drafter."""
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


def captured_layers(config: Json, layers: int, engine: str) -> tuple[int, ...]:
    """The layers whose states an engine captures for a config.json of a drafter that reads taps.

    config: `Folder.flat`; layers: of the target. L is the state after L layers.
    """
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


def require_taps(taps: tuple[int, ...], layers: int, where: str) -> None:
    """Raise `UserError` unless the taps ascend and the target has such layers."""
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise UserError(
            f"'{where}' reads layers {list(taps)}, the target has {layers}. It was made for "
            "another target."
        )
