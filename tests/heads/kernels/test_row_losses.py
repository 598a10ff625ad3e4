"""Losses of rows, kernel and reference, against plain torch in float64; what they leave in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.kernels.dispatch import is_interpreted
from heads.kernels.reference.row_losses import NAMES, ROW_LOSSES, row_losses
from tests.heads.kernels.devices import DEVICES

VOCAB = 2500
"""Two tiles, the second not full."""
ALL = NAMES
EACH = [(name,) for name in NAMES]


def sample(
    rows: int, vocab: int = VOCAB, steps: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [steps, rows, V] of the size that language models have, near the target's [rows, V];
    labels [steps, rows]."""
    generator = torch.Generator().manual_seed(rows)
    target = 10 + 4 * torch.randn(rows, vocab, generator=generator)
    noise = torch.randn(steps, rows, vocab, generator=generator)
    labels = torch.randint(vocab, (steps, rows), generator=generator)
    return (target + noise).to(dtype), target.to(dtype), labels


def graded(
    implementation: Any, given: tuple[Tensor, Tensor, Tensor], upstream: Tensor, *settings: Any
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Values by name, the gradient of the logits, both likeliest tokens."""
    logits = given[0].clone().requires_grad_()
    found = implementation(logits, given[1], given[2], *settings)
    values = [found[name] for name in settings[0]]
    if values:
        torch.stack(values).mul(upstream[: len(values)]).sum().backward()
    grad = torch.zeros_like(logits) if logits.grad is None else logits.grad
    return values, grad, found.best, found.target_best


def weights_of(given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A weight per loss and row, one row having none."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(len(NAMES), *given[2].shape, generator=generator) + 0.5
    drawn[:, 0, 0] = 0.0
    return drawn.to(given[0].device)


def compare(
    device: str, given: tuple[Tensor, Tensor, Tensor], names: Any, *more: float, kernel: Any = None
) -> None:
    """The kernel's values and gradient on `device` with the reference's in float64."""
    on_device = tuple(part.to(device) for part in given)
    upstream = weights_of(given)
    exact = given[0].double(), given[1].double(), given[2]
    wanted = graded(row_losses, exact, upstream.double(), names, *more)
    kernel = ROW_LOSSES.triton() if kernel is None else kernel
    found = graded(kernel, on_device, upstream.to(device), names, *more)  # type: ignore[arg-type]
    for name, value, right in zip(names, found[0], wanted[0], strict=True):
        assert value.dtype == torch.float32, name
        assert name == "cross_entropy" or bool((value >= 0).all()), name
        # differences of norms of the logits' size, up to 30: float32 steps by 2e-6 there
        torch.testing.assert_close(value.cpu().double(), right, rtol=1e-5, atol=1e-5)
    # the gradient has the logits' dtype, to which the interpreter cuts float32 instead of rounding
    last_place = 2.0**-7 if is_interpreted() else 2.0**-8
    rounding = {torch.bfloat16: last_place, torch.float32: 1e-5}[given[0].dtype]
    gap = (found[1].cpu().double() - wanted[1]).norm()
    assert gap <= rounding * wanted[1].norm(), (names, float(gap / wanted[1].norm()))
    assert not bool(found[1][0, 0].any()) or not names
    assert torch.equal(found[2].cpu(), wanted[2]) and torch.equal(found[3].cpu(), wanted[3])


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", [*EACH, ALL, ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_float64(
    device: str, names: tuple[str, ...], dtype: torch.dtype
) -> None:
    compare(device, sample(3, dtype=dtype), names)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_any_number_of_rows(device: str, rows: int) -> None:
    names = ("cross_entropy", "soft_cross_entropy", "total_variation")
    compare(device, sample(rows, vocab=301), names)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [5, 2048, 2049, 6000])
def test_any_vocabulary(device: str, vocab: int) -> None:
    compare(device, sample(2, vocab), ALL)


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("names", [*EACH, ALL])
def test_temperatures_are_of_all_losses_but_the_cross_entropy(
    device: str, temperature: float, names: tuple[str, ...]
) -> None:
    compare(device, sample(3, vocab=301), names, temperature, 0.2)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_share_the_rows_of_the_target(device: str) -> None:
    compare(device, sample(5, vocab=301, steps=3), ALL)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_neither_can_say_change_nothing(device: str) -> None:
    """-inf in both, in the first tile and as a tile of its own."""
    logits, target, labels = (part.to(device) for part in sample(3, vocab=2048))
    holes = torch.ones(2048, dtype=torch.bool, device=device)
    holes[3::5] = False
    labels = torch.zeros_like(labels)
    width = 3 * 2048
    wide = [logits.new_full((*part.shape[:-1], width), -torch.inf) for part in (logits, target)]
    for part, given in zip(wide, (logits, target), strict=True):
        part[..., 4096:][..., holes] = given[..., holes]
    labels_at = 4096 + torch.zeros_like(labels)
    upstream = weights_of((logits, target, labels))
    kernel = ROW_LOSSES.triton()
    alone = graded(kernel, (logits[..., holes], target[..., holes], labels), upstream, ALL)
    among = graded(kernel, (*wide, labels_at), upstream, ALL)
    for name, one, other in zip(ALL, alone[0], among[0], strict=True):
        torch.testing.assert_close(one, other, msg=name)
    kept = wide[1][0].isfinite()
    torch.testing.assert_close(alone[1], among[1][..., kept])
    assert not bool(among[1][..., ~kept].any())


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_target_alone_can_say(device: str) -> None:
    """-inf in the drafter's logits alone: losses that stay finite are right, with their
    gradients."""
    logits, target, labels = sample(3, vocab=301)
    logits[..., 7:300:3] = -torch.inf
    names = ("jensen_shannon", "total_variation", "acceptance_nll")
    on_device = tuple(part.to(device) for part in (logits, target, labels))
    upstream = weights_of((logits, target, labels)).to(device)
    found = graded(ROW_LOSSES.triton(), on_device, upstream, names)  # type: ignore[arg-type]
    q = logits.double().softmax(-1).requires_grad_()
    p = target.double().softmax(-1)
    mixed = 0.5 * (p + q)
    exact = [
        0.5 * (p * (p / mixed).log() + (q * (q / mixed).log()).nan_to_num()).sum(-1),
        0.5 * (p - q).abs().sum(-1),
        -torch.minimum(p, q).sum(-1).log(),
    ]
    for value, right in zip(found[0], exact, strict=True):
        torch.testing.assert_close(value.cpu().double(), right, rtol=1e-5, atol=1e-5)
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_divergence_of_equal_rows_is_zero_and_no_less(device: str) -> None:
    target = sample(17)[1].to(device)
    names = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
    found = ROW_LOSSES.triton()((target + 2.5)[None], target, None, names)
    for name in names:
        assert bool((found[name] >= 0).all())
        torch.testing.assert_close(
            found[name], torch.zeros_like(found[name]), atol=1e-5, rtol=0, msg=name
        )


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_not_hidden(device: str) -> None:
    logits, target, labels = (part.to(device) for part in sample(2, vocab=301))
    for spoilt in (logits[0], target):
        right = spoilt[1, 300].clone()
        spoilt[1, 300] = torch.nan
        found = ROW_LOSSES.triton()(logits, target, labels, ALL)
        spoilt[1, 300] = right
        for name in ALL[1:]:
            assert found[name].isnan().tolist() == [[False, True]], name


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_of_equal_tokens_is_the_likeliest(device: str) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[1, [4000, 2100, 4999]] = 1.0
    found = ROW_LOSSES.triton()(logits)
    assert found.best.tolist() == [0, 2100] and found.target_best is None


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    logits = torch.zeros(0, 9, device=device, requires_grad=True)
    found = ROW_LOSSES.triton()(logits, torch.zeros(0, 9, device=device), None, ("forward_kl",))
    found["forward_kl"].sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", [("total_variation",), ("soft_cross_entropy",)])
def test_a_lost_tile_is_noticed(device: str, names: tuple[str, ...]) -> None:
    """The comparison of these tests fails if the kernel leaves the second tile out."""

    def losing(logits: Tensor, target: Tensor, *rest: Any) -> Any:
        lost = torch.arange(logits.shape[-1], device=logits.device) >= 2048
        parts = (part.masked_fill(lost, -torch.inf) for part in (logits, target))
        return ROW_LOSSES.triton()(*parts, *rest)

    with pytest.raises(AssertionError):
        compare(device, sample(3), names, kernel=losing)


class Widest(TorchDispatchMode):
    """Remembers the largest float32 tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_in_float32_is_as_wide_as_the_vocabulary(device: str) -> None:
    logits, target, labels = (part.to(device) for part in sample(3, dtype=torch.bfloat16))
    given, widest = logits.requires_grad_(), {}
    for name, implementation in (("kernel", ROW_LOSSES.triton()), ("reference", row_losses)):
        with Widest() as seen:
            found = implementation(given, target, labels, ALL)
            torch.stack(list(found.values.values())).sum().backward()
        widest[name] = seen.elements
    assert widest["kernel"] < VOCAB <= 3 * VOCAB <= widest["reference"]


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_around_it_changes_nothing(device: str) -> None:
    given = tuple(part.to(device) for part in sample(3, vocab=301))
    upstream = weights_of(given).to(device)  # type: ignore[arg-type]
    plain = graded(ROW_LOSSES.triton(), given, upstream, ALL)  # type: ignore[arg-type]
    with torch.autocast(device, torch.bfloat16):
        inside = graded(ROW_LOSSES.triton(), given, upstream, ALL)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], inside[0], strict=True))
    assert torch.equal(plain[1], inside[1])
