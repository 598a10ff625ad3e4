"""Pass costs for adaptive draft length, and the parts built from them. The costs are measured on
this machine when a batch is set up, or given.

Legend: B rows, D drafted tokens of a chain, N nodes, M tokens of a verification over all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.tree import DraftShape
from inference.decoding.adaptive.lengths import Lengths, Limits
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import CostConfig, measure_costs
from inference.target.model import TargetModel

MEASURED_LENGTH = 256
"""Cached tokens per row while costs are measured."""
REPEATS = 7


def adaptive_parts(
    target: TargetModel, drafter: Any, decode: DecodeConfig, tree: DraftShape, rows: int
) -> tuple[Limits | None, Lengths | None]:
    """Build what adapts the draft length of a batch of `rows` rows, as `decode` asks. Raises
    `UserError` for drafters that need their whole draft verified."""
    settings = decode.adaptive_settings()
    if drafter is None or not settings.active:
        return None, None
    if drafter.needs.verified:
        raise UserError(
            f"kind '{drafter.kind}' learns from the verification of its whole draft: "
            "decode.adaptive and decode.adaptive_lengths do not go with it."
        )
    if decode.compiles and settings.lengths and target.device.type == "cpu":
        raise UserError(
            "decode.adaptive_lengths chooses between several steps; decode.compile compiles one. "
            "Turn one of them off."
        )
    verify, draft = None, [0.0] * (decode.depth + 1)
    if settings.mode == "throughput" or settings.lengths:
        verify, draft = pass_seconds(target, drafter, decode, rows)
    seconds = None if verify is None else token_seconds(verify, rows).to(target.device)
    limits = Limits(settings, decode.temperature, tree.max_depth, seconds, target.device)
    if not settings.lengths:
        return limits, None
    assert verify is not None
    return limits, Lengths(settings.lengths, [verify[n] + draft[n] for n in settings.lengths])


def pass_seconds(
    target: TargetModel, drafter: Any, decode: DecodeConfig, rows: int
) -> tuple[list[float], list[float]]:
    """Seconds of verifying and drafting chains of 0..D tokens. Given costs include both."""
    depth = decode.depth
    if decode.adaptive_costs:
        return list(decode.adaptive_costs), [0.0] * (depth + 1)
    room = target.info.max_position_embeddings - depth - 2
    length = max(1, min(MEASURED_LENGTH, room))
    config = CostConfig(tuple(range(1, depth + 2)), (rows,), (length,), REPEATS, 2)
    arm = Arm("drafter", drafter, decode)
    text = [token % target.info.vocab_size for token in range(3, 3 + length)]
    curves = measure_costs(config, target, [arm], text)
    verify = [curves.verify(n, rows, length) for n in config.nodes]
    return verify, [curves.draft("drafter", n, rows) for n in config.nodes]


def token_seconds(verify: list[float], rows: int) -> Tensor:
    """Seconds [M+1] of verifying m = 0..B * (D + 1) tokens in all rows, interpolated."""
    nodes = torch.arange(rows * len(verify) + 1, dtype=torch.float64) / rows
    values = torch.tensor(verify, dtype=torch.float64)
    place = (nodes - 1).clamp(0, len(verify) - 1)
    below = place.floor().long().clamp(max=max(0, len(verify) - 2))
    above = (below + 1).clamp(max=len(verify) - 1)
    return (values[below] + (place - below) * (values[above] - values[below])).float()
