"""A kind that does not heed weights is not trained with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from heads.api.batch import LossOutput, TrainBatch
from heads.api.errors import UserError
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import TRAINED, build
from train.feedback.check import require_weighed

DOCUMENTS = [[5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19], [7, 7, 1, 30, 3, 12, 13, 14, 15]]


def prepared(name: str) -> tuple[Any, TrainBatch]:
    target = micro_target(torch.float32)
    drafter = build(name, target)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS])
    weights = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(1))
    return drafter, replace(batch, weights=weights, anchors=weights + 0.5)


@pytest.mark.parametrize("name", TRAINED)
def test_all_kinds_here_heed_them(name: str) -> None:
    require_weighed(*prepared(name), "cpu", True)


@pytest.mark.parametrize("ignored", ["weights", "anchors"])
def test_a_kind_that_does_not_is_refused(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, batch = prepared("distilled")
    own = drafter.loss

    def deaf(given: TrainBatch) -> LossOutput:
        changes: dict[str, Any] = {ignored: None}
        found: LossOutput = own(replace(given, **changes))
        return found

    monkeypatch.setattr(drafter, "loss", deaf)
    with pytest.raises(
        UserError, match=f"bring {ignored} for the loss, but kind 'distilled' does not heed them"
    ):
        require_weighed(drafter, batch, "cpu", False)
