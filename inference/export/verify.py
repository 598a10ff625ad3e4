"""`headstart verify-export`: an exported folder checked as files and as a forward pass, without any engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.export.forward_check import ForwardReport, check_forward, source_of
from inference.export.importing import recognise
from inference.export.layouts.base import Target, read_checkpoint
from inference.export.layouts.causal import rope_of
from inference.export.layouts.folder import Folder
from inference.export.layouts.llama import followed_rope, plain_rope
from inference.export.static_check import check_files
from inference.export.verify_config import VerifyConfig
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

NAMES = {"mtp": "mtp-mimo"}
UNCHECKED = "files: the forward pass was not run, since the files are not those of this layout"


@dataclass
class Verdict:
    """layout and engine of the folder; faults: what is wrong, each beginning with a name; forward: None where it was not run."""

    layout: str
    engine: str
    faults: list[str]
    forward: ForwardReport | None
    notes: list[str]


def verify(config: VerifyConfig, given: TargetConfig, target: TargetModel | None = None) -> Verdict:
    """Check the folder of `config` against a target; raises `UserError` when it is no folder of a drafter at all.

    target: the target of `given`, where it is loaded already.
    """
    folder = Folder.read(Path(config.dir))
    target = TargetModel.load(given) if target is None else target
    engine = str(folder.export.get("engine", "vllm"))
    layout = str(folder.export.get("layout") or layout_of(folder))
    source, why = source_of(folder, config.source)
    notes = (
        []
        if source
        else [f"no comparison with our own drafter: {why}; compared with what the target says itself"]
    )
    faults = check_files(folder, layout, target.info, engine, rope_for(folder, source, given))
    fatal = [fault for fault in faults if fault.split(":")[0] in ("config", "shape", "tensor", "vocabulary")]
    forward = None if fatal else check_forward(folder, layout, target, source, config.contexts)
    if forward is None:
        notes.append(UNCHECKED)
    else:
        faults += forward.faults
        notes += forward.notes
    return Verdict(layout, engine, faults, forward, [*notes, *folder.export.get("notes", [])])


def layout_of(folder: Folder) -> str:
    """The layout of a folder that we did not write."""
    name = recognise(folder)
    if name == "speculators":
        return f"speculators-{folder.config['speculators_model_type']}"
    if name == "eagle3" and "mask_hidden" in folder.tensors:
        return "peagle"
    if name == "dflash":
        by_tensor = {
            "markov_head.markov_w1.weight": "dspark",
            "prefix_gru.weight_ih_l0": "domino",
            "candidate_selector.predecessor_codebook": "dflash2",
            "encoder.fc.weight": "dflash-assistant",
        }
        return next((flavour for tensor, flavour in by_tensor.items() if tensor in folder.tensors), "dflash")
    return NAMES.get(name, name)


def rope_for(folder: Folder, source: Path | None, given: TargetConfig) -> Mapping[str, Any]:
    """The rotary parameters that the folder must have: by its checkpoint, by the note of its kind, or unknown."""
    kind = folder.export.get("kind")
    target = Target(given)
    try:
        if source is not None:
            checkpoint = read_checkpoint(source)
            drafter: Any = checkpoint.drafter
            if checkpoint.kind in ("distilled", "pard"):
                return rope_of(checkpoint, target)
            if checkpoint.kind == "dflash":
                return followed_rope(target, drafter.shape.head_dim, checkpoint.info.rope_theta)
            return plain_rope(checkpoint.info.rope_theta)
    except UserError:
        return {}
    theta = folder.export.get("target", {}).get("rope_theta")
    return plain_rope(theta) if theta and kind in ("eagle", "eagle3", "peagle", "mtp") else {}
