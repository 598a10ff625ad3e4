"""The picks: filters, the noise's distribution and its keys, and exact sampling by the Gumbel-max
rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.api.errors import UserError
from inference.decoding.sampling import distribution
from inference.decoding.sampling import noise as noise_module
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits, widest_float
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.sampling.row_settings import FILTERED, RowNoise, RowSettings
from inference.kernels.reference.noise import gumbel_noise, noise_bits, noise_pick

TOKENS = torch.arange(24)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    seen = expected >= 5
    return float((((counts - expected) ** 2) / expected.clamp(min=1e-9))[seen].sum())


def picks(
    logits: torch.Tensor, shaping: SamplingSettings, trials: int, stride: int = 1
) -> torch.Tensor:
    """Sample `trials` times from one distribution, every time at another position (and every 64th
    at another seed)."""
    seeds = torch.arange(trials // 64) * stride + 11
    noise = SharedNoise(shaping, seeds, logits.shape[-1])
    positions = torch.arange(64)[None].expand(len(seeds), -1)
    return noise.target_pick(logits.expand(len(seeds), 64, -1), positions).flatten()


@pytest.mark.parametrize(
    "shaping",
    [
        SamplingSettings(1.0),
        SamplingSettings(0.6),
        SamplingSettings(1.3, top_k=7),
        SamplingSettings(1.0, top_p=0.8),
    ],
)
def test_picks_follow_the_shaped_distribution(shaping: SamplingSettings) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, generator=generator) * 1.5
    trials = 64_000
    found = torch.bincount(picks(logits, shaping, trials), minlength=24).double()
    expected = shape_logits(logits, shaping).softmax(-1).double() * trials
    assert found[expected == 0].sum() == 0
    assert (
        chi_square(found, expected) < 70
    )  # 24 cells: the 1e-6 point of chi-square with 23 degrees of freedom is about 73
    wrong = (logits / (shaping.temperature * 1.1)).softmax(
        -1
    ).double() * trials  # negative control: 10% off in temperature
    assert chi_square(found, wrong) > 150


class Divisors(TorchDispatchMode):
    """The types of what tensors are divided by within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[type] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::div"):
            self.seen.append(type(args[1]))
        return func(*args, **(kwargs or {}))


def test_temperatures_divide_on_a_gpu_as_those_of_rows_do() -> None:
    """There torch multiplies by the rounded reciprocal of a plain number, but divides by a
    tensor."""
    seeds, positions, logits = torch.tensor([3]), torch.zeros(1, 1).long(), torch.randn(1, 1, 24)
    held = RowSettings(1, SamplingSettings(0.7), 24, torch.device("cpu"), True)
    with Divisors() as rows:
        tempered = held.at_temperature(logits)
    noise = SharedNoise(SamplingSettings(0.7), seeds, 24)
    with Divisors() as shared:
        found = (
            *(shape_logits(logits, noise.settings), noise.draft_logits(logits, None)),
            noise.tempered(logits),
        )
        noise.scores(logits, positions)
        noise_pick(logits, positions, seeds, 0.7)
    assert rows.seen == [torch.Tensor] and shared.seen == 5 * rows.seen
    assert all(torch.equal(each, tempered) for each in found)


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    logits = torch.zeros(8)
    drawn = picks(logits, SamplingSettings(1.0), 64_000).reshape(-1, 64)
    for one, other in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        pairs = torch.bincount((one * 8 + other).flatten(), minlength=64).double()
        assert chi_square(pairs, torch.full((64,), pairs.sum() / 64)) < 140  # 63 degrees of freedom


def test_noise_is_standard_gumbel_finite_and_keyed_by_everything() -> None:
    seeds = torch.tensor([1, 2, 1 + (1 << 32), (1 << 62) + 5])
    positions = torch.tensor([[0, 1, 2_000_000]]).expand(4, -1)
    noise = gumbel_noise(seeds, positions, torch.arange(50_000))
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.57722) < 0.01 and abs(float(noise.var()) - 1.64493) < 0.03
    flat = noise.reshape(12, -1)
    correlation = torch.corrcoef(flat) - torch.eye(12)
    assert correlation.abs().max() < 0.03


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(0, 200_000))
def test_a_tokens_noise_does_not_depend_on_its_company(
    seed: int, position: int, token: int
) -> None:
    alone = noise_bits(torch.tensor([seed]), torch.tensor([[position]]), torch.tensor([token]))
    among = noise_bits(
        torch.tensor([3, seed]),
        torch.tensor([[7, position], [1, position]]),
        torch.tensor([5, token, token + 1]),
    )
    assert int(alone) == int(among[1, 1, 1])


def test_noise_bits_are_frozen() -> None:
    """Texts made with a seed must stay the same from release to release, and kernels reproduce
    these very bits."""
    bits = noise_bits(
        torch.tensor([0, 123_456_789_012_345]),
        torch.tensor([[0, 1], [77, 4096]]),
        torch.tensor([0, 1, 151_000]),
    )
    assert bits.tolist() == FROZEN


FROZEN = [
    [[-1828761191, 1524350756, -554102439], [-752788108, 1626156112, 730647588]],
    [[459642134, -633097448, 1612804379], [734067996, -1652696242, 2000273464]],
]


def test_filters_keep_what_they_promise() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0, 2.5])
    assert torch.isfinite(shape_logits(logits, SamplingSettings(1.0, top_k=2))).tolist() == [
        False,
        True,
        False,
        False,
        True,
    ]
    probabilities = logits.softmax(-1)
    kept = torch.isfinite(
        shape_logits(logits, SamplingSettings(1.0, top_p=float(probabilities[1]) + 0.01))
    )
    assert kept.tolist() == [False, True, False, False, True]
    assert torch.isfinite(shape_logits(logits, SamplingSettings(1.0, top_p=1e-9))).sum() == 1
    ratio = float(torch.exp(torch.tensor(-0.6)))
    assert torch.isfinite(shape_logits(logits, SamplingSettings(1.0, min_p=ratio))).tolist() == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_shared_noise_lifts_agreement_of_a_drafter_towards_one_minus_tv() -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(400, 1, 200, generator=generator) * 2
    draft = target + torch.randn(400, 1, 200, generator=generator) * 0.8
    seeds, positions = torch.arange(400), torch.full((400, 1), 9)
    shaping = SamplingSettings(1.0)
    shared, alone = SharedNoise(shaping, seeds, 200), SharedNoise(shaping, seeds, 200, drafts=None)
    wanted = shared.target_pick(target, positions)
    with_noise = float((shared.pick(draft, positions) == wanted).float().mean())
    without = float((alone.pick(draft, positions) == wanted).float().mean())
    optimum = float(torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).mean())
    assert with_noise > without + 0.15 and with_noise > optimum - 0.12
    assert torch.equal(shared.scores(draft, positions).argmax(-1), shared.pick(draft, positions))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": ((3, 1.0), (3, 2.0))},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((3, float("-inf")),)},
        {"bad_words": ((),)},
        {"bad_words": ((4, -7),)},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"decode\.{next(iter(bad))}(\[\d+\])* must "):
        SamplingSettings(**bad)


def test_settings_say_what_they_do_to_the_logits() -> None:
    for shaping, uses_prefix, changes in (
        (SamplingSettings(1.0, top_k=3), False, False),
        (SamplingSettings(logit_bias=((3, 1.0),)), False, True),
        (SamplingSettings(bad_words=((3,),)), False, True),
        (SamplingSettings(bad_words=((3,), (4, 5))), True, True),
        (SamplingSettings(repetition_penalty=0.9), True, True),
    ):
        assert (shaping.uses_prefix, shaping.changes_logits) == (uses_prefix, changes)


class NoFloat64(TorchDispatchMode):
    """A device on which float64 tensors cannot be made, as Apple's MPS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return out


def test_devices_without_float64_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest_float(torch.device("cpu")) == widest_float(torch.device("cuda")) == torch.float64
    assert widest_float(torch.device("mps")) == torch.float32
    for has, dtype in ((0, torch.float32), (1, torch.float64)):
        facts = SimpleNamespace(has_fp64=has)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _, facts=facts: facts)
        assert widest_float(torch.device("xpu")) == dtype


def test_rows_sample_and_draw_on_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picks of rows are those of other devices; uniform numbers are theirs, rounded."""
    device = torch.device("cpu")
    rows = [SamplingSettings(), SamplingSettings(0.7), SamplingSettings(1.3, 5, 0.9, 0.01)]
    seeds, positions = torch.tensor([1, 2, 3]), torch.arange(40)[None].expand(3, -1)
    logits = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(0))

    def computed() -> tuple[torch.Tensor, ...]:
        held = RowSettings(3, SamplingSettings(), 50, device, static=False)
        held.put([0, 1, 2], rows)
        held.arrange(range(3))
        assert held.mode == FILTERED
        noise = RowNoise(held, seeds, 50, roots=torch.zeros(3, dtype=torch.int64))
        uniforms = noise.uniforms(positions, 4)
        return noise.target_pick(logits, positions), noise.pick(logits, positions), uniforms

    there = computed()
    assert there[2].dtype == torch.float64
    with pytest.raises(TypeError, match="float64"), NoFloat64():
        computed()
    monkeypatch.setattr(distribution, "_has_float64", lambda device: False)
    with NoFloat64():
        here = computed()
    assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])
    torch.testing.assert_close(here[2], there[2].float(), rtol=1e-6, atol=1e-9)


def test_uniform_numbers_in_float32_stay_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a rejection's coin are all ones once in four billion draws."""
    monkeypatch.setattr(distribution, "_has_float64", lambda device: False)
    for bits, value in ((-1, 1 - 2.0**-24), (0, 2.0**-33)):
        frozen = torch.tensor([[[bits]]], dtype=torch.int32)
        monkeypatch.setattr(noise_module, "noise_bits", lambda *_, frozen=frozen: frozen)
        noise = SharedNoise(SamplingSettings(1.0), torch.tensor([1]), 8)
        noise.roots = torch.zeros(1, dtype=torch.int64)
        assert float(noise.uniforms(torch.zeros(1, 1, dtype=torch.int64), 1)) == value
