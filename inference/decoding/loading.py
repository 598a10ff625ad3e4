"""Drafters for a loaded target: by folder, by name on the Hub, or by kind."""

from __future__ import annotations

from pathlib import Path

from heads.api import checkpoint
from heads.api.drafter import Drafter
from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from inference.decoding.placement import PlacedDrafter, weights_on
from inference.hub.fetch import fetch, is_published_name
from inference.integrity import require_unchanged
from inference.target.loading import pick_device
from inference.target.model import TargetModel


def load_drafter(
    source: str | Path, target: TargetModel, *, device: str | None = None
) -> Drafter | PlacedDrafter:
    """The drafter from `source`, ready to decode with `target`.

    source: a checkpoint folder; "user/name" or "user/name@revision" on the Hub, which is fetched
    once; or the name of a kind without weights, such as "ngram". device: the drafter's device, if
    it is not the target's. Raises `UserError` if there is no such drafter, if it was not made for
    the target, or if its files are damaged.
    """
    weights = target.weights if device is None else weights_on(target, pick_device(device))
    folder = checkpoint_folder(source)
    if folder is None:
        kind = get_kind(str(source))
        made = checkpoint.new_drafter(kind.name, kind.config_class(), target.info, weights, seed=0)
    else:
        require_unchanged(folder)
        made = checkpoint.load_drafter(folder, target.info, weights)
    loaded: Drafter = made
    return loaded if device is None else PlacedDrafter(loaded, pick_device(device), target.device)


def checkpoint_folder(source: str | Path) -> Path | None:
    """The folder to load a drafter from; None for a kind without weights.

    For a training's folder it is the best checkpoint; a published drafter is fetched. Raises
    `UserError` if there is no such drafter.
    """
    name = str(source)
    given = Path(source).expanduser()
    if given.is_dir():
        best = given / "best"
        return best if (best / checkpoint.CONFIG_FILE).is_file() else given
    if name in kind_names():
        if get_kind(name).trainable:
            raise UserError(
                f"'{name}' is a kind of drafter that has to be trained, and there is no folder of "
                "that name. Give the folder that holds its trained weights, or a name on the Hub "
                "(user/name)."
            )
        return None
    if isinstance(source, str) and is_published_name(name):
        try:
            return fetch(name)
        except UserError as error:
            raise UserError(f"there is no checkpoint folder '{name}', and {error}") from error
    raise UserError(
        f"there is no checkpoint folder '{name}', and it is neither a name on the Hub (user/name) "
        "nor that of a kind without weights (such as ngram). Give the folder that holds the "
        "drafter's weights."
    )
