"""Rejection sampling of chains: the law of its texts exactly and over several passes, what it
keeps, and its edges.
"""

from __future__ import annotations

import pytest
import torch

from heads.api.drafter import Proposal
from heads.api.tree import TokenTree
from inference.decoding.rules.rejection import Rejection
from inference.decoding.rules.weights import Chain
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from tests.inference.decoding.rules.toys import (
    CLEAR,
    CoinIsDraft,
    OnePass,
    ResidualIsDraft,
    Toy,
    all_chains,
    check_reused_noise,
    check_texts,
    decode,
    exact_law,
    p_value,
)

CHAIN = TokenTree.chain(
    2
)  # three tokens are compared: the first pass may commit all of them, its bonus included
SETTINGS = [
    SamplingSettings(1.0),
    SamplingSettings(0.7),
    SamplingSettings(1.0, top_k=3),
    SamplingSettings(0.7, top_p=0.8),
    SamplingSettings(1.3, min_p=0.2),
]


def kept_one_by_one(chain: Chain) -> torch.Tensor:
    """How likely rejection sampling keeps exactly i drafts [R, N]."""
    chance = (chain.p_drafted / chain.q_drafted).clamp(max=1)
    reached = torch.nn.functional.pad(chance.cumprod(1), (1, 0), value=1.0)
    return reached * (1 - torch.nn.functional.pad(chance, (0, 1)))


def rests(chain: Chain) -> torch.Tensor:
    """What follows when i drafts are kept [R, N, V], as the rule computes it."""
    rows = len(chain.drafted)
    return torch.stack([chain.rest(torch.full((rows,), i)) for i in range(chain.p.shape[1])], 1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_law_is_the_targets_by_enumeration(settings: SamplingSettings) -> None:
    toy = Toy.random(vocab=4)
    chain, weight = all_chains(toy, 3, settings)
    law = exact_law(toy, settings, chain, weight, kept_one_by_one(chain), rests(chain))
    assert torch.allclose(law, toy.law(settings, 4), atol=1e-13)
    # replaced from p
    wrong = exact_law(toy, settings, chain, weight, kept_one_by_one(chain), chain.p)
    assert (wrong - toy.law(settings, 4)).abs().sum() > 0.02


@pytest.mark.parametrize("drafted", [None, 3], ids=["whole", "reduced"])
@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_texts_of_several_passes_follow_the_target(
    settings: SamplingSettings, drafted: int | None
) -> None:
    check_texts(Rejection(), CHAIN, settings, drafted, apart=1.0)


def test_wrong_settings_are_noticed() -> None:
    toy = Toy.random()
    found = decode(toy, Rejection(), CHAIN, SamplingSettings(0.9))
    assert p_value(found.text, toy.law(SamplingSettings(1.0), 3)) < CLEAR


@pytest.mark.parametrize("noise", [CoinIsDraft, ResidualIsDraft])
def test_reused_noise_is_noticed(noise: type[SharedNoise]) -> None:
    check_reused_noise(Rejection(), CHAIN, noise, apart=1.5)


def test_a_wrong_q_is_noticed() -> None:
    toy, settings = Toy.random(), SamplingSettings(0.7)

    def untempered(proposal: Proposal) -> None:
        assert proposal.logits is not None
        proposal.logits = proposal.logits * settings.temperature

    found = decode(toy, Rejection(), CHAIN, settings, tamper=untempered)
    assert p_value(found.text, toy.law(settings, 3)) < CLEAR


def test_q_is_kept_in_the_precision_that_drafts_were_drawn_in() -> None:
    exact, settings = Toy.random(seed=1), SamplingSettings(1.0)
    exact.drafter += 40  # where bfloat16 steps by 0.25, as the logits of real models do
    rounded = Toy(exact.target, exact.drafter.bfloat16())

    def round_q(proposal: Proposal) -> None:
        assert proposal.logits is not None
        proposal.logits = proposal.logits.bfloat16()

    def unround_q(proposal: Proposal) -> None:
        proposal.logits = exact.drafter[proposal.tokens]

    law = exact.law(settings, 3)
    assert p_value(decode(rounded, Rejection(), CHAIN, settings).text, law) > 1e-4
    assert p_value(decode(exact, Rejection(), CHAIN, settings, tamper=round_q).text, law) < CLEAR
    assert (
        p_value(decode(rounded, Rejection(), CHAIN, settings, tamper=unround_q).text, law) < CLEAR
    )


def test_a_draft_is_kept_with_one_minus_the_total_variation() -> None:
    toy, settings, rows = Toy.random(), SamplingSettings(0.7), 100_000
    chain, weight = all_chains(toy, 1, settings)
    expected = float(torch.minimum(chain.p[0, 0], chain.q[0, 0]).sum())
    assert float((weight * kept_one_by_one(chain)[:, 1]).sum()) == pytest.approx(
        expected, abs=1e-12
    )
    found = decode(toy, Rejection(), TokenTree.chain(1), settings, rows=rows, tokens=1)
    assert found.accepted[0] == pytest.approx(
        expected, abs=5 * (expected * (1 - expected) / rows) ** 0.5
    )


ONE_PASS = OnePass(Rejection(), CHAIN, seeds=torch.arange(2_000) * 3 + (1 << 20))


def test_what_the_target_cannot_say_is_never_kept() -> None:
    ONE_PASS.check_the_impossible_is_never_kept()


def test_a_perfect_draft_is_always_kept() -> None:
    ONE_PASS.check_a_perfect_draft_is_always_kept([1, 2])
