"""Turns a drafter that `speculators` trained into a checkpoint of ours, so that one decoder measures both.

Only architectures that both have: EAGLE-3 with one norm per tap, the feature itself as residual and the normalised output in the
recurrence; DFlash and DSpark with full attention. Their rows count positions from 1 (eagle3), which shifts queries and keys alike
and so changes nothing under rotary positions. Frozen copies of the target's tensors are left out, as ours are shared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.api.checkpoint import build_config, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.target import TargetModel

FROZEN = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "d2t", "t2d")


def convert(folder: Path, out: Path, target: TargetModel) -> None:
    """Write `out` from their checkpoint `folder`; UserError where the architecture is none that ours has."""
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {name: value for name, value in read_weights(folder).items() if name not in FROZEN}
    kind = theirs["speculators_model_type"]
    if kind == "eagle3":
        config, tensors = eagle3(theirs, tensors, target)
    elif kind in ("dflash", "dspark"):
        config, tensors = block(theirs, tensors)
    else:
        raise UserError(f"a drafter of type '{kind}' cannot be converted; eagle3, dflash and dspark can.")
    name = "eagle3" if kind == "eagle3" else "dflash"
    drafter = get_kind(name).drafter_class(build_config(name, config), target.info).float()
    wanted = drafter.state_dict()
    for extra in ("confidence_head.temperatures",):
        if extra in wanted:
            tensors[extra] = torch.ones_like(wanted[extra])
    if set(wanted) != set(tensors):
        missing, odd = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        raise UserError(f"'{folder}' is not of an architecture that ours has: missing {missing}, unknown {odd}.")
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})
    save_drafter(drafter, out, target.info)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(str(file)))
    if not found:
        raise UserError(f"'{folder}' holds no safetensors file.")
    return found


def sizes(layer: dict[str, Any]) -> dict[str, int]:
    """The sizes of a decoder layer, in our names."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return {name: int(layer[name]) for name in names}


def eagle3(
    theirs: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an EAGLE-3 head."""
    if theirs["norm_before_residual"] or theirs["norm_before_fc"]:
        raise UserError("EAGLE-3 with norm_before_residual or norm_before_fc is not ours: train with both off and fc_norm on.")
    config = {
        "taps": list(theirs["eagle_aux_hidden_state_layer_ids"]),
        "tap_norm": bool(theirs["fc_norm"]),
        "post_norm_recurrence": bool(theirs["norm_output"]),
        **sizes(theirs["transformer_layer_config"]),
    }
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    renamed.setdefault("lm_head.weight", target.weights.lm_head)  # frozen there, and left out where nothing was pruned
    return config, renamed


def block(theirs: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a DFlash or DSpark drafter."""
    layer = theirs["transformer_layer_config"]
    if "sliding_attention" in (layer.get("layer_types") or []):
        raise UserError("sliding layers of block drafters are causal inside a block there: train with full attention everywhere.")
    config = {
        "block_size": int(theirs["block_size"]),
        "sample_from_anchor": bool(theirs["sample_from_anchor"]),
        "num_layers": int(layer["num_hidden_layers"]),
        "taps": list(theirs["aux_hidden_state_layer_ids"]),
        "mask_token_id": int(theirs["mask_token_id"]),
        "start_from": "random",
        "carry_root": False,
        **sizes(layer),
    }
    if theirs.get("markov_rank"):
        if theirs["markov_head_type"] != "vanilla" or not theirs["confidence_head_with_markov"]:
            raise UserError("only the vanilla Markov head with a confidence head that reads it can be converted.")
        config |= {"dependency": "markov", "dependency_rank": int(theirs["markov_rank"]), "confidence": True}
    return config, {name: value for name, value in tensors.items() if name != "lm_head.weight"}
