"""The drafts a tuner chooses among: plain decoding, chains, static and dynamic trees, chains that
stop early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.target.memory import drafter_state_bytes
from inference.target.model import TargetModel
from inference.tune.config import TuneConfig
from inference.tune.tree_search import search_tree


def grid(
    config: TuneConfig, target: TargetModel, drafter: Any, accuracy: Sequence[Sequence[float]]
) -> tuple[list[Draft], dict[str, str]]:
    """All drafts to weigh, plain decoding first, and those left out: label -> why the drafter
    refused them.

    accuracy [D][R]: measured rates by depth and rank, which static trees are searched from; empty:
    no static trees.
    """
    wanted = [Draft("chain", depth) for depth in sorted(set(config.depths))]
    depth, width = config.tree_depth, config.width
    for nodes in sorted(set(config.nodes)):
        if accuracy and accuracy[0][0] > 0:
            found = search_tree(accuracy[:depth], nodes)
            levels = max(len(path) for path in found.choices)
            if levels < len(found.choices):  # a chain is there already
                wanted.append(Draft("tree", levels, found.choices))
        if nodes <= 1 + width + (depth - 1) * width**2:
            wanted.append(Draft("dynamic", min(depth, nodes - 1), (), nodes, width))
    reasons = {draft: refusal(target, drafter, draft) for draft in dict.fromkeys(wanted)}
    kept = [NONE, *(draft for draft, why in reasons.items() if not why)]
    refused = {draft.label: why for draft, why in reasons.items() if why}
    longest = max(draft.depth if draft.shape == "chain" else 0 for draft in kept)
    if longest > 1 and not drafter.needs.verified:
        kept += [
            Draft("chain", longest, adaptive="confidence", adaptive_threshold=threshold)
            for threshold in sorted(set(config.thresholds))
        ]
    if len(kept) == 1:
        raise UserError(
            f"kind '{drafter.kind}' can draft none of the shapes to choose from: "
            f"{next(iter(refused.values()))} Give shorter ones in tune.depths."
        )
    return kept, refused


def refusal(target: TargetModel, drafter: Any, draft: Draft) -> str:
    """Why `drafter` cannot fill a draft; empty when it can."""
    try:
        tree = draft.tree(DecodeConfig(), target.device)
        drafter_state_bytes(drafter, tree, 1, 64, target.info, target.weights.embedding)
    except UserError as error:
        return str(error)
    return ""


def deepest(config: TuneConfig, target: TargetModel, drafter: Any) -> int:
    """The longest chain of the grid that the drafter can draft, trees' levels included; at least
    1."""
    asked = sorted({*config.depths, config.tree_depth}, reverse=True)
    return next((d for d in asked if not refusal(target, drafter, Draft("chain", d))), 1)


def same(draft: Draft, decode: DecodeConfig) -> bool:
    """Whether `decode` drafts like this."""
    return asdict(draft.on(decode)) == asdict(decode)
