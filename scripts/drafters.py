"""Finding drafters: the ones a run has trained, checkpoint folders from elsewhere, and kinds without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.api.checkpoint import CONFIG_FILE as CHECKPOINT_FILE
from heads.api.checkpoint import load_drafter, new_drafter, read_config
from heads.api.errors import UserError, suggest
from heads.api.registry import get_kind
from scripts.convert import to_dataclass
from scripts.run import CONFIG_FILE, RunConfig
from scripts.run import read_config as read_stage_config

if TYPE_CHECKING:
    from inference.engine import DecodeConfig
    from inference.target import TargetModel

BEST = "best"
DRAFT_KEYS = ("shape", "depth", "choices", "nodes", "width")
"""The part of the decode settings that belongs to a drafter (its draft) and not to the measurement."""


@dataclass(frozen=True)
class Found:
    """A drafter to load: `checkpoint` is its folder, or None for a kind without weights."""

    name: str
    kind: str
    checkpoint: Path | None

    @property
    def stage_folder(self) -> Path | None:
        """The train stage's folder around the checkpoint, where there is one."""
        folder = self.checkpoint.parent if self.checkpoint else None
        return folder if folder is not None and (folder / CONFIG_FILE).is_file() else None


def trained(run: RunConfig) -> dict[str, Found]:
    """Name -> drafter for every finished or unfinished training of a run that has a best checkpoint."""
    folders = sorted((run.directory / "train").glob(f"*/{BEST}/{CHECKPOINT_FILE}"))
    return {path.parents[1].name: at(path.parent) for path in folders}


def at(folder: Path) -> Found:
    """The drafter in a checkpoint folder or in a train stage's folder; raises `UserError` when there is none."""
    checkpoint = folder / BEST if (folder / BEST / CHECKPOINT_FILE).is_file() else folder
    kind = str(read_config(checkpoint)["kind"])
    name = checkpoint.resolve().parent.name if checkpoint.name == BEST else checkpoint.resolve().name
    return Found(name, kind, checkpoint)


def find(given: str, run: RunConfig) -> Found:
    """A drafter by the name it has in this run, by folder, or by kind if the kind has no weights."""
    known = trained(run)
    if given in known:
        return known[given]
    if Path(given).is_dir():
        return at(Path(given))
    if "/" not in given:
        try:
            if not get_kind(given).trainable:
                return Found(given, given, None)
        except UserError:
            pass  # the message below lists everything that would have been accepted
    raise UserError(
        f"there is no drafter '{given}' in '{run.directory}', and no checkpoint folder of that name."
        f"{suggest(given, known)} A kind without weights (ngram) is given by its name."
    )


def load(found: Found, target: TargetModel, values: Mapping[str, Any] | None = None) -> Any:
    """The drafter itself, for `target`. values: the configuration of a kind without weights (default: the kind's own)."""
    if found.checkpoint is not None:
        return load_drafter(found.checkpoint, target.info, target.weights)
    config: Any = to_dataclass(get_kind(found.kind).config_class, dict(values or {}), f"head ({found.kind})")
    return new_drafter(found.kind, config, target.info, target.weights, seed=0)


def draft_settings(
    found: Found, decode: DecodeConfig, changes: Mapping[str, Any] | None = None
) -> DecodeConfig:
    """`decode` with the draft (`DRAFT_KEYS`) that the drafter was trained for, and `changes` on top of that."""
    values: dict[str, Any] = {key: getattr(decode, key) for key in DRAFT_KEYS}
    if found.stage_folder is not None:
        stored = read_stage_config(found.stage_folder).get("decode", {})
        values |= {key: stored[key] for key in DRAFT_KEYS if key in stored}
    for key in changes or {}:
        if key not in DRAFT_KEYS:
            raise UserError(
                f"measure.drafts.{found.name}.{key}: a draft has no such key.{suggest(str(key), DRAFT_KEYS)}"
            )
    values |= dict(changes or {})
    merged = asdict(decode) | values
    merged["choices"] = [list(path) for path in merged["choices"]]  # the converter takes what YAML could hold
    return to_dataclass(type(decode), merged, "decode")
