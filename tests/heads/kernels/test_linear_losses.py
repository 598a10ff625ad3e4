"""Losses behind an LM head, frozen and trained, through the kernels: gradients of states and weight
against plain float64, what is allocated, and whole drafters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.kernels.dispatch import VARIABLE
from heads.kernels.reference.row_losses import NAMES, ROW_LOSSES, row_losses
from heads.nn.early_gradient import with_gradient
from tests.heads.explicit import PAIR
from tests.heads.kernels.devices import DEVICES, ON_CPU
from tests.heads.kernels.test_row_losses import Widest
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import build

VOCAB = 301
WEIGHTS = {"soft_cross_entropy": 1.0, "cross_entropy": 0.3, "total_variation": 0.5}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")


def sample(rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States [M, H], an LM head [V, H], the target's logits [M, V], factors [M] of which one is 0."""
    generator = torch.Generator().manual_seed(hidden + rows)
    states = torch.randn(rows, hidden, generator=generator).to(dtype)
    head = (3 * hidden**-0.5 * torch.randn(VOCAB, hidden, generator=generator)).to(dtype)
    noise = torch.randn(rows, VOCAB, generator=generator).to(dtype)
    factors = torch.rand(rows, generator=generator) + 0.5
    factors[rows // 2 :][:1] = 0.0 if rows > 1 else 1.0
    return states, head, states @ head.T + noise, factors


def gradients(
    given: tuple[Tensor, Tensor, Tensor, Tensor], losses: Any, trained: bool, early: bool
) -> list[Tensor]:
    """Losses [M], and the gradients of states and, if it is trained, the LM head."""
    states, head = given[0].clone().requires_grad_(), given[1].clone().requires_grad_(trained)
    labels = torch.arange(states.shape[0], device=states.device)

    def judge(seen: Tensor) -> tuple[Tensor, Tensor]:
        found = losses(F.linear(seen, head), given[2], labels, tuple(WEIGHTS))
        values = torch.stack([weight * found[name] for name, weight in WEIGHTS.items()])
        return values.sum(0), found.best

    values, _ = with_gradient(judge, states) if early else judge(states)
    (values * given[3]).sum().backward()
    return [part for part in (values, states.grad, head.grad) if part is not None]


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 32), (3, 256), (17, 64), (64, 128)])
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_of_states_and_lm_head(
    device: str, rows: int, hidden: int, trained: bool
) -> None:
    given = sample(rows, hidden, torch.float32)
    exact = gradients(tuple(x.double() for x in given), row_losses, trained, False)  # type: ignore[arg-type]
    found = gradients(tuple(x.to(device) for x in given), ROW_LOSSES, trained, not trained)  # type: ignore[arg-type]
    assert len(found) == (3 if trained else 2)
    for here, there in zip(found, exact, strict=True):
        assert (here.cpu().double() - there).norm() <= 1e-5 * there.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True])
def test_no_logits_in_float32(device: str, trained: bool) -> None:
    """With weights in bfloat16 nothing as large as all logits is made in float32."""
    rows = 3
    given = tuple(x.to(device) for x in sample(rows, 32, torch.bfloat16))
    with Widest() as seen:
        gradients(given, ROW_LOSSES, trained, not trained)  # type: ignore[arg-type]
    assert seen.elements < VOCAB
    with Widest() as seen:
        gradients(given, row_losses, trained, not trained)  # type: ignore[arg-type]
    assert seen.elements >= rows * VOCAB


def learnt(name: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """The loss of a recipe, its metrics, and its gradients by weight."""
    target = micro_target(torch.float32)
    drafter = build(name, target, shaken=0.1, changes=changes)
    batch = packed_batch(target, drafter.needs, [[PAIR[0][:9], PAIR[1][:5]]])
    output = drafter.loss(batch)
    output.loss_sum.backward()
    found = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
    sums = {f"{name}/{i}": pair[i] for name, pair in output.metrics.items() for i in (0, 1)}
    return {"loss": output.loss_sum.detach(), **sums, **found}


RECIPES = [
    ("eagle3", {}),
    ("eagle3", {"train_lm_head": True, "hard_label_weight": 0.3}),
    ("dspark", {}),
    ("dflash", {"depth_weights": "d_pace"}),
    ("distilled", {"reverse_kl": 0.2, "jsd": 0.3, "lk": 0.4, "temperature": 1.5}),
    ("medusa", {"soft_labels": True}),
    ("mtp", {}),
    ("eagle", {}),
]


@pytest.mark.rotated
@ON_CPU
@pytest.mark.parametrize(("name", "changes"), RECIPES)
def test_drafters_learn_the_same_through_the_kernels(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set[str]()
    kernel = ROW_LOSSES.triton()

    def watched(logits: Tensor, target: Any = None, labels: Any = None, *more: Any) -> Any:
        asked.update(more[0] if more else ())
        return kernel(logits, target, labels, *more)

    monkeypatch.setitem(ROW_LOSSES._loaded, ROW_LOSSES.kernel, watched)
    fused = learnt(name, changes)
    assert asked and asked <= set(NAMES)
    monkeypatch.setenv(VARIABLE, "reference")
    plain = learnt(name, changes)
    assert fused.keys() == plain.keys()
    for part, value in fused.items():
        scale = float(plain[part].float().norm())
        assert float((value - plain[part]).float().norm()) <= 2e-5 * scale + 1e-7, part
