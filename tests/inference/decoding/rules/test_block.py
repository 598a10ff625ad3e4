"""Block verification: the law of its texts exactly and over several passes, and that it keeps more
than rejection sampling.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import TokenTree
from inference.decoding.rules import block
from inference.decoding.rules.block import BlockVerification, chances, granted
from inference.decoding.rules.rejection import Rejection
from inference.decoding.rules.weights import Chain
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from tests.inference.decoding.rules.test_rejection import SETTINGS, kept_one_by_one
from tests.inference.decoding.rules.toys import (
    CLEAR,
    START,
    CoinIsDraft,
    OnePass,
    ResidualIsDraft,
    Toy,
    UnkeyedByPass,
    all_chains,
    check_reused_noise,
    check_texts,
    decode,
    exact_law,
    p_value,
)

CHAIN = TokenTree.chain(3)


def kept_together(chain: Chain) -> Tensor:
    """How likely block verification keeps exactly i drafts [R, N], by the chances that the rule
    computes."""
    chance = torch.nn.functional.pad(
        chances(chain, granted(chain.p_drafted, chain.q_drafted)), (1, 0), value=1.0
    )
    longer = torch.nn.functional.pad(
        (1 - chance).flip(1).cumprod(1).flip(1)[:, 1:], (0, 1), value=1.0
    )
    return chance * longer


def rests(chain: Chain) -> Tensor:
    """What follows when i drafts are kept [R, N, V], as the rule computes it."""
    shares, rows = granted(chain.p_drafted, chain.q_drafted), len(chain.drafted)
    return torch.stack(
        [chain.rest(torch.full((rows,), i), shares) for i in range(chain.p.shape[1])], 1
    )


def mean_kept(stops: Tensor, weight: Tensor) -> float:
    return float((weight[:, None] * stops * torch.arange(stops.shape[1])).sum())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_law_is_the_targets_by_enumeration(depth: int, settings: SamplingSettings) -> None:
    for seed in range(3):
        toy = Toy.random(vocab=3, seed=seed)
        chain, weight = all_chains(toy, depth, settings)
        stops = kept_together(chain)
        assert torch.allclose(stops.sum(1), torch.ones(len(stops), dtype=torch.float64))
        law = exact_law(toy, settings, chain, weight, stops, rests(chain))
        assert torch.allclose(law, toy.law(settings, depth + 1), atol=1e-13)


def test_a_wrong_chance_or_rest_breaks_the_law() -> None:
    toy, settings = Toy.random(vocab=4, apart=2), SamplingSettings(1.0)
    chain, weight = all_chains(toy, 3, settings)
    law, stops = toy.law(settings, 4), kept_together(chain)
    shares = granted(chain.p_drafted, chain.q_drafted)
    for chance in (shares[:, 1:], (chain.p_drafted / chain.q_drafted).clamp(max=1)):
        longer = torch.nn.functional.pad((1 - chance).flip(1).cumprod(1).flip(1), (0, 1), value=1.0)
        wrong = torch.nn.functional.pad(chance, (1, 0), value=1.0) * longer
        assert (
            exact_law(toy, settings, chain, weight, wrong, rests(chain)) - law
        ).abs().sum() > 0.01
    unshared = torch.stack([chain.rest(torch.full((len(weight),), i)) for i in range(4)], 1)
    assert (exact_law(toy, settings, chain, weight, stops, unshared) - law).abs().sum() > 0.01


def test_it_keeps_more_than_rejection_sampling() -> None:
    """The paper's example: 11/9 drafts of two instead of 10/9; and never fewer on random tables."""
    p, q = torch.tensor([1 / 3, 2 / 3]).double().log(), torch.tensor([2 / 3, 1 / 3]).double().log()
    settings = SamplingSettings(1.0)
    chain, weight = all_chains(Toy(p.expand(2, -1), q.expand(2, -1)), 2, settings)
    assert mean_kept(kept_one_by_one(chain), weight) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_kept(kept_together(chain), weight) == pytest.approx(11 / 9, abs=1e-12)
    gains = []
    for seed in range(40):
        toy = Toy.random(vocab=3, seed=seed, apart=0.5 + seed / 20)
        chain, weight = all_chains(toy, 3, SamplingSettings(0.7, top_k=seed % 3))
        gains.append(
            mean_kept(kept_together(chain), weight) - mean_kept(kept_one_by_one(chain), weight)
        )
    assert min(gains) > -1e-12 and max(gains) > 0.05


def test_measured_it_keeps_more_of_the_same_drafts() -> None:
    toy, settings = Toy.random(), SamplingSettings(1.0)
    together = decode(toy, BlockVerification(), CHAIN, settings, tokens=1).accepted[0]
    one_by_one = decode(toy, Rejection(), CHAIN, settings, tokens=1).accepted[0]
    chain, weight = all_chains(toy, 3, settings)
    assert together == pytest.approx(mean_kept(kept_together(chain), weight), abs=0.03)
    assert one_by_one == pytest.approx(mean_kept(kept_one_by_one(chain), weight), abs=0.03)
    assert together > one_by_one + 0.05


@pytest.mark.parametrize("drafted", [None, 3], ids=["whole", "reduced"])
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_texts_of_several_passes_follow_the_target(
    settings: SamplingSettings, drafted: int | None
) -> None:
    check_texts(BlockVerification(), CHAIN, settings, drafted, apart=1.0)


@pytest.mark.parametrize("noise", [UnkeyedByPass, CoinIsDraft, ResidualIsDraft])
def test_reused_noise_is_noticed(noise: type[SharedNoise]) -> None:
    """Also noise that comes back in the next pass: the rule stopped where it did because of drafts
    it then dropped.
    """
    check_reused_noise(BlockVerification(), CHAIN, noise, apart=1.5)


def test_noise_that_is_not_keyed_by_the_pass_is_refused() -> None:
    toy, tree = Toy.random(), TokenTree.chain(1)
    noise = SharedNoise(SamplingSettings(1.0), torch.zeros(1, dtype=torch.int64), 5)
    proposal = Proposal(torch.zeros(1, 2, dtype=torch.int64), tree, toy.drafter[None, :2])
    with pytest.raises(AssertionError, match="keyed by the pass"):
        BlockVerification().judge(proposal, toy.target[None, :2], START + tree.depth, noise)


def test_a_wrong_chance_is_noticed_when_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, settings = Toy.random(), SamplingSettings(1.0)
    monkeypatch.setattr(block, "chances", lambda chain, shares: shares[:, 1:])
    assert (
        p_value(decode(toy, BlockVerification(), CHAIN, settings).text, toy.law(settings, 3))
        < CLEAR
    )


DRAFTED = torch.randint(5, (2_000, 4), generator=torch.Generator().manual_seed(3))
ONE_PASS = OnePass(BlockVerification(), CHAIN, drafted=DRAFTED)


def test_what_the_target_cannot_say_is_never_kept() -> None:
    ONE_PASS.check_the_impossible_is_never_kept()


def test_a_perfect_draft_is_always_kept() -> None:
    ONE_PASS.check_a_perfect_draft_is_always_kept([1, 2, 3])
