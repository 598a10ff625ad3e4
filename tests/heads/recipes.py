"""Every recipe of conf/head/ as a drafter of a tiny random target: what the tests that hold for
every kind run over.

A micro drafter is the recipe's own YAML with the few changes that a target of three layers needs,
so that the recipes themselves are tested and not look-alikes. `test_contract.py` checks that no
recipe and no kind is missing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from heads.api.checkpoint import new_drafter
from heads.api.config import build as to_dataclass
from heads.api.drafter import TrainableDrafter
from heads.api.kinds import kind_names
from heads.api.registry import get_kind

RECIPE_FILES = Path(__file__).parents[2] / "conf" / "head"

MICRO: dict[str, dict[str, Any]] = {
    "cascade": {},
    "cascade_join": {"branches": [2]},
    "dflare": {},
    "dflash": {},
    "dflash2": {"dependency_rank": 8, "conv_group_size": 8},
    "domino": {"dependency_rank": 8},
    "dspark": {"dependency_rank": 8},
    "jetspec": {},
    "lilicorr": {"dependency_rank": 8, "selector_top_k": 24, "correlator": {"size": 8, "heads": 2}},
    "treeflash": {"dependency_rank": 8},
    "early_exit": {},
    "kangaroo": {},
    "layer_skip": {},
    "quantized_self": {"group_size": 8},
    "distilled": {"from_target_layers": [0, 1]},
    "eagle": {},
    "eagle3": {"draft_vocab_size": 31, "ttt_steps": 2},
    "fastmtp": {"depths": 2},
    "hass": {"align_steps": 2},
    "jacobi": {},
    "jump_forward": {},
    "hydra_heads": {},
    "hydra_pp": {"num_layers": 2},
    "medusa": {},
    "mtp": {},
    "native_mtp": {"depths": 2, "layer": {"model_type": "qwen3"}},
    "peagle": {"draft_vocab_size": 31, "num_layers": 2, "depths": 4},
    "ngram": {},
    "pard": {"from_target_layers": [0, 1], "depth": 5},
    "specvocab": {"draft_vocab_size": 31, "ttt_steps": 2, "shortlist": 12, "shortlist_rank": 6},
    "suffix": {},
    "uno": {"rank": 4, "alpha": 8.0, "block_size": 6, "curriculum": [], "num_anchors": 16},
}
"""Recipe -> changes for tiny targets (micro_target: 5 layers, hidden 16, 41 tokens; random_target:
3 layers, hidden 32, 97 tokens). All must draft at least 4 deep.
"""


@cache
def recipe(name: str, whole_vocabulary: bool = False) -> tuple[str, Any]:
    """(kind, configuration) of a recipe with its micro changes, through the same conversion as the
    command line's."""
    values = yaml.safe_load((RECIPE_FILES / f"{name}.yaml").read_text(encoding="utf-8"))
    kind = values.pop("kind")
    values |= MICRO.get(name, {})
    if whole_vocabulary:
        values.pop("draft_vocab_size", None)
    return kind, to_dataclass(get_kind(kind).config_class, values, f"head ({name})")


def recipe_names() -> list[str]:
    """Every file of conf/head/."""
    return sorted(path.stem for path in RECIPE_FILES.glob("*.yaml"))


RECIPES = recipe_names()
TRAINED = [name for name in RECIPES if get_kind(recipe(name)[0]).needs_training(recipe(name)[1])]
"""Recipes that have to be trained: their loss must reach every weight."""
WITH_WEIGHTS = [name for name in RECIPES if get_kind(recipe(name)[0]).trainable]
"""Recipes whose kind is a module: they have the training contract, even if some need no
training."""
REMEMBERING = ["suffix"]
"""Recipes that learn from one request for the next, so that what they draft depends on the rows
beside and before."""
UNREACHED: dict[str, tuple[str, ...]] = {}
"""Parameters that a recipe's loss does not reach at the start; each needs a comment that says
why."""
SENSELESS: dict[str, list[dict[str, Any]]] = {
    "quantized_self": [
        {"bits": 3},
        {"group_size": 5},
        {"group_size": 32},
        {"layers": [1, 0]},
        {"layers": [99]},
    ],
    "cascade": [
        {},
        {"mode": "sideways"},
        {"parts": [{"kind": "ngram"}]},
        {"parts": [{"kind": "ngram"}, {"kind": "ngram"}]},  # cannot judge tokens
        # reads states that do not exist
        {"parts": [{"kind": "early_exit"}, {"kind": "early_exit"}]},
        {"parts": [{"kind": "ngram"}, {"kind": "ngram"}, {"kind": "ngram"}]},
        {"parts": [{"kind": "ngram"}, {"checkpoint": "x", "kind": "ngram"}], "mode": "join"},
        {"parts": [{"kind": "ngram"}, {"kind": "jacobi"}], "mode": "join"},
        {"parts": [{"kind": "ngram"}, {"kind": "early_exit"}], "proposed": 0},
        {"parts": [{"kind": "ngram"}, {"kind": "early_exit"}], "mode": "join", "branches": []},
    ],
    "early_exit": [
        {"exit_layer": 6},
        {"exit_layer": 2, "layers": [0, 1]},
        {"layers": [2, 1]},
        {"layers": [0, 7]},
        {"layers": [0, 1], "adapter": "attention"},
        {"adapter": "mlp"},
        {"layers": [0, 2], "without_mlp": [1]},
        {"layers": [0, 2], "without_attention": [0, 2]},
        {"skip_ratio": 1.0},
        {"hard_label_weight": 2.0},
    ],
    "dflash": [
        {"block_size": 1},
        {"block_size": 4},  # three drafts; four are asked for
        {"in_block": "backwards"},
        {"dependency": "sideways"},
        {"dependency": "markov", "dependency_rank": 0},
        {"dependency": "selector", "selector_top_k": 0},
        {"dependency": "lilicorr", "selector_top_k": 0},
        {"dependency": "lilicorr", "layer_fusion": True},
        {"dependency": "lilicorr", "correlator": {"size": 8, "heads": 3}},
        {"dependency": "lilicorr", "correlator": {"layers": 0}},
        {"dependency": "lilicorr", "correlator": {"scale": 0.0}},
        {"convolution": True, "conv_group_size": 7},
        {"kl": 0.0, "tv": 0.0},
        {"kl": -1.0},
        {"depth_weights": "late"},
        {"gamma": -1.0},
        {"taps": [99]},
        {"num_layers": 2, "from_target_layers": [0, 1, 2]},
        {"start_from": "target", "from_target_layers": [7]},
        {"start_from": "target", "intermediate_size": 20},
        {"start_from": "elsewhere"},
        {"mask_token_id": 4096},
        {"num_anchors": 0},
        {"base_share_start": 1.5},
        {"confidence_weight": -1.0},
    ],
    "distilled": [
        {"jsd_beta": 1.0},
        {"forward_kl": 0.0},
        {"from_target_layers": [1, 0]},
        {"num_layers": 0},
        {"rope_scaling": [8.0]},
        {"from_model": "nowhere"},
        {"token_share": 0.5},
        {"lk_annealed": 1.0, "lk_eta": 0.0},
    ],
    "eagle": [
        {"align_steps": 0},
        {"feature_weight": 0.0, "logit_weight": 0.0},
        {"noise": -0.1},
        {"from_target_layer": 99},
    ],
    "eagle3": [
        {"ttt_steps": 0},
        {"taps": [99]},
        {"draft_vocab_size": 10_000_000, "taps": [3, 1]},
        {"decay": 0.0},
        {"num_anchors": 0},
        {"shortlist": 1},
        {"shortlist": 8, "shortlist_rank": 17},
        {"feature_weight": -1.0},
    ],
    "hydra_heads": [
        {"num_heads": 0},
        {"num_heads": 3},
        {"decay": 1.5},
        {"hard_label_weight": -0.5},
        {"noise": -1.0},
    ],
    "medusa": [{"num_heads": 0}, {"decay": 1.5}, {"num_heads": 3}],
    "mtp": [{"depths": 0}, {"beta": 1.5}, {"depths": 3}, {"shared": True, "from_target_layer": 99}],
    "native_mtp": [
        {"depths": 0},
        {"layer": {"model_type": "no_such_model"}},
        {"layer": {"model_type": "qwen3"}, "from_target_layer": 99},
    ],
    "peagle": [{"depths": 0}, {"keep": 0.0}, {"taps": [99]}, {"hard_label_weight": 2.0}],
    "jacobi": [{"fill": "promt"}],
    "jump_forward": [],  # nothing to choose
    "lookahead": [{"ngram": 1}, {"pool": 3}, {"window": -1}],
    "suffix": [{"min_n": 0}, {"history_tokens": 20}, {"backoff": 2.0}, {"occurrences": 0}],
    "pard": [
        {"depth": 1},
        {"keep": 0.5, "keep_least": 0.6},
        {"keep": 0.0},
        {"pard_token": 41},
        {"forward_kl": 0.0},
    ],
    "ngram": [{"min_n": 0}, {"min_n": 3, "max_n": 2}],
    "uno": [
        {"block_size": 1},
        {"curriculum": [4, 2]},
        {"curriculum": [1, 2]},
        {"slots": "zeros"},
        {"noise_tokens": 42},
        {"modules": []},
        {"modules": ["lm_head"]},
        {"modules": ["q_proj", "q_proj"]},
        {"rank": 0},
        {"alpha": 0.0},
        {"num_anchors": 0},
        {"tv": 0.0},
    ],
}
"""Per kind: configurations that must be refused, if not when they are built then when a chain of 4
is asked for."""


def build(
    name: str,
    target: Any,
    seed: int = 0,
    shaken: float = 0.02,
    whole_vocabulary: bool = False,
    changes: dict[str, Any] | None = None,
) -> Any:
    """A fresh drafter of recipe `name`, its configuration with `changes`, for `target`; `shaken`
    out of its initial values, so that zeros take part.

    A draft vocabulary, where there is one, is chosen from falling token counts.
    """
    kind, config = recipe(name, whole_vocabulary)
    config = replace(config, **(changes or {}))
    counts = torch.arange(target.info.vocab_size).flip(0)
    drafter = new_drafter(kind, config, target.info, target.weights, seed, token_counts=counts)
    if isinstance(drafter, TrainableDrafter):
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += shaken * noise.to(parameter.device, parameter.dtype)
    return drafter


def unnamed_kinds() -> list[str]:
    """Kinds without a recipe of their own name."""
    return [kind for kind in kind_names() if kind not in RECIPES]
