"""The check that a kind's loss uses the weights that it is trained with."""

from __future__ import annotations

from dataclasses import replace

import torch

from heads.api.batch import TrainBatch
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError


@torch.no_grad()
def require_weighed(
    drafter: TrainableDrafter, batch: TrainBatch, device_type: str, bfloat16: bool
) -> None:
    """Raise `UserError` if the loss of `batch`, whose tokens or roots have weights, does not become
    0 when all of these are 0.

    drafter: in joint training the one that is trained together with the target, as the distance
    between the target and its original has no weights.
    """
    silent = {}
    if batch.weights is not None:
        silent["weights"] = replace(batch, weights=torch.zeros_like(batch.weights))
    if batch.anchors is not None:
        silent["anchors"] = replace(batch, anchors=torch.zeros_like(batch.anchors))
    for name, without in silent.items():
        with torch.autocast(device_type, torch.bfloat16, enabled=bfloat16):
            loss = float(drafter.loss(without).loss_sum)
        if loss != 0.0:
            raise UserError(
                f"the answers bring {name} for the loss, but kind '{drafter.kind}' does not heed "
                f"them: its loss is {loss:.3g} where all {name} are 0. Let its loss call "
                "`batch.weighed` (docs/adding_a_drafter.md), or train without feedback."
            )
