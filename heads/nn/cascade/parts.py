"""The parts of a cascade: built from descriptions, kept in one checkpoint.

A part is described by a mapping: {checkpoint: folder}, or {kind: name, ...settings of that kind}.
The second form is always stored, so that a saved cascade needs no other folder.

Legend: B rows, T positions, H hidden, n taps of the cascade, m taps of a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heads.api.checkpoint import build_config, load_weights, read_config, stored_weights
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo, TargetWeights


@dataclass
class CascadePart:
    """One part: the drafter, its whole description, and its weights' folder, if any."""

    drafter: Any
    described: dict[str, Any]
    folder: Path | None


def build_part(given: Mapping[str, Any], info: TargetInfo) -> CascadePart:
    """Build the described drafter, with weights unset; raises `UserError` without a description."""
    keys = [key for key in ("checkpoint", "kind") if key in given]
    if len(keys) != 1 or (keys == ["checkpoint"] and len(given) != 1):
        raise UserError(
            "every entry of head.parts is either {checkpoint: FOLDER} or {kind: NAME, "
            f"...settings of that kind}}; given: {dict(given)}."
        )
    folder = None
    if keys == ["checkpoint"]:
        folder = Path(str(given["checkpoint"]))
        content = read_config(folder)
        TargetInfo.from_dict(content["target"]).require_same(info)
        name, settings = str(content["kind"]), dict(content["config"])
    else:
        name, settings = str(given["kind"]), {k: v for k, v in given.items() if k != "kind"}
    config = build_config(name, {key: _frozen(value) for key, value in settings.items()})
    drafter = get_kind(name).drafter_class(config, info)
    return CascadePart(drafter, {"kind": name, **vars(drafter.config)}, folder)


def _frozen(value: Any) -> Any:
    """Lists as the tuples that configurations declare, at any depth."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def modules_of(parts: list[CascadePart]) -> nn.ModuleDict:
    """The parts that have tensors, by their number."""
    drafters = ((str(i), part.drafter) for i, part in enumerate(parts))
    return nn.ModuleDict({i: each for i, each in drafters if isinstance(each, nn.Module)})


def initialise_part(part: CascadePart, weights: TargetWeights, generator: torch.Generator) -> None:
    """Load the part's weights from its folder, or initialise them; raises `UserError` for a part
    without a folder that has to be trained."""
    if not isinstance(part.drafter, TrainableDrafter):
        return
    if part.folder is None:
        kind = part.described["kind"]
        if not part.drafter.works_untrained(part.drafter.config):
            raise UserError(
                f"a part of head.parts is of kind '{kind}', which drafts nothing of use before it "
                f"is trained. Train it (`headstart train head={kind}`) and give its folder: "
                "{checkpoint: FOLDER}."
            )
        part.drafter.initialise(weights, generator)
    else:
        load_weights(part.drafter, stored_weights(part.folder))
        part.drafter.bind(weights)  # some share results of the loaded tensors
