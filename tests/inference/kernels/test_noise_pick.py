"""The noise and the pick with it: Triton kernels against the torch reference and against logarithms
in float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from heads.kernels.dispatch import VARIABLE
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.kernels import noise_pick as kernels
from inference.kernels.noise_pick import _gumbel
from inference.kernels.reference.noise import (
    GUMBEL_NOISE,
    NOISE_PICK,
    gumbel_noise,
    noise_bits,
    noise_pick,
)
from tests.heads.kernels.devices import DEVICES, ON_CPU, ON_CUDA

NAN, INF = float("nan"), float("inf")
SEEDS = torch.tensor([0, 7, (1 << 62) + 12345678901])


# The noise


@triton.jit
def gumbel_of(bits, noise, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.arange(0, COUNT)
    tl.store(noise + place, _gumbel(tl.load(bits + place).to(tl.uint32, bitcast=True)))


def as_int32(values: Tensor) -> Tensor:
    return torch.where(values > 0x7FFFFFFF, values - (1 << 32), values).to(torch.int32)


def edge_bits() -> Tensor:
    """2^17 bit patterns as int64: all powers of two and thirds of the range with their neighbours,
    both ends, and random ones."""
    around = torch.arange(-300, 301)
    centres = [1 << power for power in range(33)] + [
        round(share * 2**32) for share in (1 / 3, 2 / 3, 5 / 6, 11 / 12)
    ]
    edges = torch.cat([centre + around for centre in centres])
    # outer logarithm near zero: -log(1 - v) near 1, and near the borders 2/3 and 4/3 of its
    # exponent
    shares = 1 - torch.exp(-torch.tensor([1.0, 2 / 3, 4 / 3, 1 / 3, 8 / 3], dtype=torch.float64))
    edges = torch.cat([edges, *((share * 2**32).long() + around * 128 for share in shares)])
    ends = torch.cat([torch.arange(5000), 2**32 - 1 - torch.arange(5000)])
    edges = torch.cat([edges, ends]).clamp(0, 2**32 - 1)
    torch.manual_seed(0)
    magnitudes = 2.0 ** (32 * torch.rand((1 << 17) - edges.numel(), dtype=torch.float64))
    return torch.cat([edges, magnitudes.long().clamp(max=2**32 - 1)])


def units(noise: Tensor) -> Tensor:
    """The last place of max(1, |g|), float64: what g is added to is larger than 1, so smaller
    errors of g mean nothing."""
    size = noise.abs().clamp(min=1).float()
    return (torch.nextafter(size, torch.tensor(INF, device=size.device)) - size).double()


@pytest.mark.parametrize("device", DEVICES)
def test_logarithms_over_all_edges(device: str) -> None:
    bits = edge_bits()
    found = torch.empty(bits.numel(), device=device)
    gumbel_of[(1,)](as_int32(bits).to(device), found, COUNT=bits.numel())
    found = found.cpu()
    assert int(bits.min()) == 0 and int(bits.max()) == 2**32 - 1  # v = 2^-33, and the cap
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exact = -torch.log(-torch.log1p(-v.double()))
    assert float(((found - exact).abs() / units(exact)).max()) <= 1.25
    in_torch = -torch.log(-torch.log1p(-v))
    assert float(((found.double() - in_torch).abs() / units(exact)).max()) <= 2
    # negative control: without log1p, small v (large noise, the winners) are far off
    naive = -torch.log(-torch.log(1 - v))
    assert not float(((naive - exact).abs() / units(exact)).max()) <= 1000
    # in the order of v
    ordered = found[v.argsort()]
    assert bool((ordered[1:] <= ordered[:-1] + units(ordered[:-1]).float()).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 1024, 1500])
def test_bits_are_equal_and_the_noise_nearly(size: int, device: str) -> None:
    torch.manual_seed(size)
    positions = torch.tensor([[0, 1], [2**31 - 1, 2**31], [2**32 + 3, 77]])
    token_ids = torch.randperm(300_000)[:size]
    given = [t.to(device) for t in (SEEDS, positions, token_ids)]
    noise, bits = kernels.noise_and_bits(*given, with_bits=True)
    assert bits is not None and torch.equal(bits.cpu(), noise_bits(SEEDS, positions, token_ids))
    assert torch.equal(GUMBEL_NOISE.triton()(*given), noise)
    noise, expected = noise.cpu(), gumbel_noise(SEEDS, positions, token_ids)
    assert noise.dtype == torch.float32 and noise.shape == expected.shape
    assert float(((noise.double() - expected).abs() / units(expected)).max()) <= 2


# The pick


def random_logits(
    nodes: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(vocab)
    return (3 * torch.randn(3, nodes, vocab)).to(dtype), torch.randint(0, 5000, (3, nodes))


def kernel(
    device: str,
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor | None,
    temperature: float,
    ids: Tensor | None = None,
) -> Tensor:
    """The kernel's picks, brought back to the CPU, where the reference runs: torch's logarithms on
    a GPU are others."""
    seeds, ids = (None if t is None else t.to(device) for t in (seeds, ids))
    picks: Tensor = NOISE_PICK.triton()(
        logits.to(device), positions.to(device), seeds, temperature, ids
    )
    return picks.cpu()


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "vocab"), [(1, 1), (2, 1024), (1, 2500)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_picks_are_equal(
    temperature: float, nodes: int, vocab: int, dtype: torch.dtype, device: str
) -> None:
    logits, positions = random_logits(nodes, vocab, dtype)
    found = kernel(device, logits, positions, SEEDS, temperature)
    assert found.dtype == torch.int64
    assert torch.equal(found, noise_pick(logits, positions, SEEDS, temperature))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("nodes", "temperature"), [(33, 1.0), (65, 0.0)])
def test_picks_of_many_nodes_laid_out_another_way(
    nodes: int, temperature: float, device: str
) -> None:
    """Medusa's logits are [heads, rows, V] turned around."""
    logits, positions = (
        torch.randn(nodes, 2, 90).to(device).transpose(0, 1),
        torch.arange(nodes).repeat(2, 1),
    )
    assert not logits.is_contiguous()
    found = kernel(device, logits, positions, SEEDS[1:], temperature)
    assert torch.equal(found, noise_pick(logits.cpu(), positions, SEEDS[1:], temperature))


@pytest.mark.parametrize("device", DEVICES)
def test_columns_with_a_stride(device: str) -> None:
    logits, positions = torch.randn(1, 2, 180).to(device)[..., ::2], torch.arange(2)[None]
    found = kernel(device, logits, positions, SEEDS[1:2], 1.0)
    assert torch.equal(found, noise_pick(logits.cpu(), positions, SEEDS[1:2], 1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_the_split_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, positions = random_logits(1, 2500, torch.bfloat16)
    expected = noise_pick(logits, positions, SEEDS, 1.0)
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    for steps in (1, 2, 8):
        monkeypatch.setattr(kernels, "MAX_STEPS", steps)
        assert torch.equal(kernel(device, logits, positions, SEEDS, 1.0), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reduced_vocabulary_is_keyed_by_its_token_ids(device: str) -> None:
    logits, positions = random_logits(2, 300)
    token_ids = torch.randperm(100_000)[:300].sort().values
    found = kernel(device, logits, positions, SEEDS, 1.0, token_ids)
    assert torch.equal(found, noise_pick(logits, positions, SEEDS, 1.0, token_ids))
    assert not torch.equal(found, noise_pick(logits, positions, SEEDS, 1.0)), "the ids must matter"
    # what is picked is what the whole vocabulary would pick, were nothing else possible
    whole = torch.full((3, 2, 100_000), -INF).index_copy(2, token_ids, logits)
    assert torch.equal(token_ids[found], noise_pick(whole, positions, SEEDS, 1.0))


def special(name: str) -> Tensor:
    """Logits [1, 1, 1500] with something special in them."""
    torch.manual_seed(4)
    x = torch.randn(1, 1, 1500)
    if name == "ties":
        x[..., [7, 500, 1100, 1400]] = 9.0
    elif name == "zeros of both signs":
        x = -x.abs() - 1
        x[..., 800], x[..., 1200] = -0.0, 0.0
    elif name == "one column left":
        x.fill_(-INF)
        x[..., 1300] = -50.0
    elif name == "nothing left":
        x.fill_(-INF)
    elif name == "infinite":
        x[..., [600, 1300]] = INF
    elif name == "nan":
        x[..., [600, 1300]] = NAN
        x[..., 300] = INF
    elif name == "negative nan":
        x[..., 1200] = -torch.tensor(NAN)
    return x


EXPECTED = {
    "ties": 7,
    "zeros of both signs": 800,
    "one column left": 1300,
    "nothing left": 0,
    "infinite": 600,
    "nan": 600,
    "negative nan": 1200,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXPECTED)
def test_special_logits_without_noise(name: str, device: str) -> None:
    positions = torch.tensor([[3]])
    for dtype in (torch.float32, torch.bfloat16):
        for seeds, temperature in ((SEEDS[1:2], 0.0), (None, 1.0)):
            given = (special(name).to(dtype), positions, seeds, temperature)
            assert (
                kernel(device, *given).tolist() == noise_pick(*given).tolist() == [[EXPECTED[name]]]
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["one column left", "nothing left", "infinite", "nan", "negative nan"]
)
def test_special_logits_with_noise(name: str, device: str) -> None:
    given = (special(name), torch.tensor([[3]]), SEEDS[1:2], 0.5)
    assert kernel(device, *given).tolist() == noise_pick(*given).tolist() == [[EXPECTED[name]]]


@pytest.mark.parametrize("device", DEVICES)
def test_the_targets_pick_after_filters(device: str) -> None:
    """Filters temper as well: what they leave is picked from at temperature 1, and what they
    removed never is."""
    logits, positions = random_logits(4, 400)
    shaped = shape_logits(logits, SamplingSettings(temperature=1.3, top_k=20, top_p=0.9))
    found = kernel(device, shaped, positions, SEEDS, 1.0)
    assert torch.equal(found, noise_pick(shaped, positions, SEEDS, 1.0))
    assert bool((shaped.gather(2, found[..., None]) > -INF).all())


@pytest.mark.gpu
@ON_CUDA
def test_a_large_vocabulary_on_a_gpu() -> None:
    """64 nodes over 152,064 tokens, as one verification of a large model has them."""
    torch.manual_seed(0)
    logits, positions = (4 * torch.randn(1, 64, 152_064)).bfloat16(), torch.arange(64)[None] + 900
    for temperature in (0.0, 1.0):
        found = kernel("cuda", logits, positions, SEEDS[2:], temperature)
        assert torch.equal(found, noise_pick(logits, positions, SEEDS[2:], temperature))


@ON_CPU
def test_float64_stays_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that float32 cannot tell apart: the kernel does not take float64, so the reference
    runs."""
    monkeypatch.setenv(VARIABLE, "triton")
    logits = torch.zeros(1, 1, 5, dtype=torch.float64)
    logits[..., 3] = 1e-12
    assert NOISE_PICK(logits, torch.zeros(1, 1, dtype=torch.int64), None, 0.0).tolist() == [[3]]
    assert NOISE_PICK(
        logits.float() * 0, torch.zeros(1, 1, dtype=torch.int64), None, 0.0
    ).tolist() == [[0]]
