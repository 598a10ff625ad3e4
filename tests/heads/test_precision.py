"""Every kind's loss in a training in bfloat16: the network under autocast, the loss in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from heads.api.batch import LossOutput, TrainBatch
from tests.heads.explicit import PAIR
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import WITH_WEIGHTS, build

PRODUCTS = {
    "linear",
    "matmul",
    "__matmul__",
    "bmm",
    "baddbmm",
    "conv1d",
    "scaled_dot_product_attention",
}
"""Matrix products that a network is made of; autocast lowers no other of its operations."""
CORRECTED = {"dspark", "domino", "dflash2"}
"""Recipes whose logits are a sum of two products, taken in bfloat16."""
LEARNING = [name for name in WITH_WEIGHTS if name != "quantized_self"]
"""Recipes whose kind has a loss."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LEARNING),
    ("distilled", {"temperature": 0.7}),
    ("distilled", {"reverse_kl": 0.2, "jsd": 0.3, "tv": 0.4, "temperature": 1.5}),
    ("distilled", {"lk": 0.5, "ce": 0.1, "temperature": 1.5}),
    ("distilled", {"forward_kl": 0.0, "lk_annealed": 1.0, "temperature": 0.7}),
    ("pard", {"lk_annealed": 0.5}),
    ("jetspec", {"kl": 1.0, "tv": 0.5, "lk": 0.3, "annealed_lk": 0.2, "confidence": True}),
    ("dspark", {"kl": 1.0, "depth_weights": "d_pace"}),
    ("eagle3", {"hard_label_weight": 0.3, "tv": 1.0, "lk": 0.5, "feature_weight": 1.0}),
    ("peagle", {"hard_label_weight": 0.3}),
    ("early_exit", {"hard_label_weight": 0.3}),
    ("hydra_heads", {"hard_label_weight": 0.5}),
    ("medusa", {"draft_vocab_size": 31, "soft_labels": True}),
    ("medusa", {"soft_labels": True}),
    ("mtp", {"soft_labels": False}),
]
"""Recipes, as they are and with the other objectives that their kinds offer."""


class FloatLoss(TorchFunctionMode):
    """Autocast for the products of the network alone: every other operation runs without it.

    widths: of vocabularies. A product that sums over a vocabulary belongs to the loss. wide:
    whether products that give logits have their bfloat16 values handed on as float32, so that
    nothing behind them can round to bfloat16.
    """

    def __init__(self, widths: set[int], wide: bool) -> None:
        super().__init__()
        self.widths, self.wide = widths, wide
        self.logits = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in PRODUCTS and args[0].shape[-1] not in self.widths:
            out = func(*args, **kwargs)
            if out.dtype == torch.bfloat16 and out.shape[-1] in self.widths:
                self.logits += 1
                return out.float() if self.wide else out
            return out
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def batch_and_drafter(name: str, changes: dict[str, Any]) -> tuple[Any, TrainBatch]:
    """A float32 drafter and a batch of bfloat16 features, as `engine.precision=bfloat16` has."""
    target = micro_target(torch.float32)
    drafter = build(name, target, shaken=0.1, changes=changes)
    batch = packed_batch(target, drafter.needs, [PAIR])
    word = batch.target_logits

    def target_logits(hidden: Tensor) -> Tensor:
        assert word is not None
        with torch.autocast("cpu", enabled=False):
            return word(hidden.float())

    batch.taps = None if batch.taps is None else batch.taps.bfloat16()
    batch.last_hidden = None if batch.last_hidden is None else batch.last_hidden.bfloat16()
    batch.target_logits = None if word is None else target_logits
    return drafter, batch


def assert_same(found: LossOutput, expected: LossOutput) -> None:
    assert found.loss_sum.dtype == torch.float32
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=2e-7, atol=0)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, values in found.metrics.items():
        torch.testing.assert_close(values, expected.metrics[name], rtol=2e-7, atol=0)


@pytest.mark.rotated
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_the_loss_under_autocast_is_float32s_of_the_same_bfloat16_logits(
    name: str, changes: dict[str, Any]
) -> None:
    drafter, batch = batch_and_drafter(name, changes)
    vocab = drafter.info.vocab_size
    widths = {vocab, getattr(drafter.config, "draft_vocab_size", 0) or vocab}
    reference = FloatLoss(widths, wide=name not in CORRECTED)
    with torch.autocast("cpu", torch.bfloat16):
        found = drafter.loss(batch)
        with reference:
            expected = drafter.loss(batch)
    assert reference.logits > 0, "no product gave logits: the comparison compares nothing"
    assert float(found.loss_sum.detach()) > 0
    assert_same(found, expected)
