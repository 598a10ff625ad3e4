"""Adaptive length: the text stays the target's, schedulers that peek are caught, and what is saved
is really saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.adaptive.cost import pass_seconds, token_seconds
from inference.decoding.adaptive.head import AcceptanceHead, Recorded, fit, level_features
from inference.decoding.adaptive.lengths import (
    AdaptiveSettings,
    Lengths,
    Limits,
    admit,
    entropies,
    leading,
)
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.decoding.rules.registry import get_rule
from inference.decoding.rules.weights import Chain
from inference.decoding.sampling.distribution import SamplingSettings
from tests.fakes import AlwaysRight, SometimesRight
from tests.heads.micro import PlainNoise, micro_target, seen_states
from tests.heads.recipes import RECIPES, build
from tests.inference.decoding.rules.test_rejection import kept_one_by_one, rests
from tests.inference.decoding.rules.toys import CLEAR, Toy, decode, exact_law, p_value, weighing
from tests.inference.decoding.test_captured import record, replayed
from tests.inference.decoding.test_lossless import answers, requests
from tests.inference.steps import NoHost, step_on_device, under_way
from tests.models import VOCAB, plain_texts, random_target, texts_of

DOCUMENTS = [[5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19], [7, 7, 1, 30, 3, 12, 13, 14, 15]]
COSTS = (1.0, 1.1, 1.2, 1.5, 2.0)
ADAPTIVE: dict[str, dict[str, Any]] = {
    "entropy": {"adaptive": "entropy", "adaptive_threshold": 1.4},
    "confidence": {"adaptive": "confidence", "adaptive_threshold": 0.1},
    "throughput": {"adaptive": "throughput", "adaptive_costs": COSTS},
    "lengths": {"adaptive_lengths": (0, 1, 2, 4), "adaptive_costs": COSTS},
    "both": {"adaptive": "throughput", "adaptive_lengths": (0, 2, 4), "adaptive_costs": COSTS},
}


def run(target: Any, drafter: Any, **settings: Any) -> dict[int, Completion]:
    return {
        c.request.index: c
        for c in Engine(target, drafter, DecodeConfig(**settings)).run(requests(5))
    }


def texts(found: dict[int, Completion]) -> dict[int, list[int]]:
    return {index: completion.tokens for index, completion in found.items()}


# Rule match: any schedule gives the same text


def learns_from_its_whole_draft(name: str) -> bool:
    return bool(build(name, micro_target()).needs.verified)


WHOLE = [name for name in RECIPES if learns_from_its_whole_draft(name)]


@pytest.mark.rotated
@pytest.mark.parametrize("mode", ["confidence", "both"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in WHOLE])
def test_every_kind_gives_the_same_text(name: str, mode: str) -> None:
    target = random_target()
    found = run(target, build(name, target), temperature=0.8, batch_size=3, **ADAPTIVE[mode])
    assert texts(found) == plain_texts(requests(5), temperature=0.8)


@pytest.mark.rotated
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("mode", ADAPTIVE)
def test_every_mode_gives_the_same_text_whenever_the_host_learns_of_it(mode: str, lag: int) -> None:
    target = random_target()
    drafter = build("distilled", target)
    for temperature in (0.0, 1.0):
        found = run(
            target, drafter, temperature=temperature, batch_size=2, lag=lag, **ADAPTIVE[mode]
        )
        assert texts(found) == plain_texts(requests(5), temperature=temperature)
        live = [record.live for completion in found.values() for record in completion.passes]
        assert min(live) < 4, "nothing was adapted"


@pytest.mark.parametrize("name", WHOLE)
def test_kinds_that_learn_from_the_whole_draft_are_refused(name: str) -> None:
    target = random_target()
    with pytest.raises(UserError, match="whole draft"):
        run(target, build(name, target), **ADAPTIVE["confidence"])


@pytest.mark.rotated
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in WHOLE])
@torch.no_grad()
def test_a_shorter_draft_is_the_beginning_of_the_longer_one(name: str) -> None:
    target = micro_target()
    drafter = build(name, target)
    limits = Limits(AdaptiveSettings(lengths=(1, 2, 4)), 0.0, 4, None, torch.device("cpu"))
    seen = seen_states(target, drafter.needs, DOCUMENTS, [(0, 7), (0, 5)])
    state = drafter.start(seen, TokenTree.chain(4), 32)
    root = torch.tensor([DOCUMENTS[0][7], DOCUMENTS[1][5]])
    whole = drafter.propose(state, PlainNoise()).tokens
    for length in (0, 1, 2, 4):
        found = limits.propose(drafter, state, PlainNoise(), length, root)
        assert found.tree.max_depth == length
        assert torch.equal(found.tokens, whole[:, : length + 1])
    assert torch.equal(drafter.propose(state, PlainNoise()).tokens, whole)


# Rules that weigh drafts: no decision may look at what it decides about


def limited(limits: Limits) -> Callable[[Proposal], None]:
    def tamper(proposal: Proposal) -> None:
        proposal.limit = limits.limit(
            proposal, torch.ones_like(proposal.tokens[:, 0], dtype=torch.bool)
        )

    return tamper


def limits_of(mode: str, threshold: float, seconds: Tensor | None = None) -> Limits:
    return Limits(AdaptiveSettings(mode, threshold), 1.0, 3, seconds, torch.device("cpu"))


ROWS = 40_000
TOY = Toy.random(apart=0.8)
# seconds per tokens over all rows
RISING = (torch.arange(ROWS * 4 + 1) / ROWS - 1).clamp(min=0) * 0.55 + 1.0


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
@pytest.mark.parametrize(
    "limits",
    [
        limits_of("entropy", 1.0),
        limits_of("confidence", 0.25),
        limits_of("throughput", 0.0, RISING),
    ],
    ids=["entropy", "confidence", "throughput"],
)
def test_the_law_of_the_text_is_the_targets(limits: Limits, rule: str) -> None:
    settings, shape = SamplingSettings(1.0), TokenTree.chain(3)
    seen: list[Tensor] = []

    def tamper(proposal: Proposal) -> None:
        kept = proposal.logits
        proposal.logits = TOY.drafter[proposal.tokens]  # rule match does not ask for them
        limited(limits)(proposal)
        proposal.logits = kept
        assert proposal.limit is not None
        seen.append(proposal.limit)

    found = decode(TOY, get_rule(rule, shape), shape, settings, rows=ROWS, tokens=3, tamper=tamper)
    assert p_value(found.text, TOY.law(settings, 3)) > 1e-4
    counts = torch.bincount(torch.cat(seen), minlength=4)
    assert (counts > ROWS // 50).sum() >= 2, "the limits hardly vary, so nothing was tested"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_schedule_that_looks_at_the_drawn_token_is_caught(rule: str) -> None:
    """The control: verify a draft only where its own probability under q is high."""
    settings, shape = SamplingSettings(1.0), TokenTree.chain(3)

    def peek(proposal: Proposal) -> None:
        assert proposal.logits is not None
        q = proposal.logits[:, :-1].softmax(-1).gather(-1, proposal.tokens[:, 1:, None])[..., 0]
        proposal.limit = leading(q > 0.3)

    found = decode(TOY, get_rule(rule, shape), shape, settings, rows=ROWS, tokens=3, tamper=peek)
    assert p_value(found.text, TOY.law(settings, 3)) < CLEAR


def law_under(early_stop: bool) -> Tensor:
    """DSpark's counterexample by enumeration: the law of the first token when a scheduler chooses
    how much of a chain of two is verified. The target says token 0 with 0.7, the drafter with 0.5;
    behind token 0 a draft is sure to be kept, behind token 1 it is hopeless. A second node costs
    almost a whole pass, a third next to nothing.
    """
    p, q = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.5, 0.5]).double()
    same = torch.tensor([0.5, 0.5]).double()
    toy = Toy(torch.stack([p, same]).log(), torch.stack([q, same]).log())
    seconds = torch.tensor([0.0, 1.0, 1.95, 2.0])
    drafted = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    # the root is token 0, and token 0 is followed by p; what follows a drafted token 0 is p as well
    tokens = torch.cat([torch.zeros(4, 1, dtype=torch.int64), drafted], 1)
    limits = []
    for first in drafted[:, 0].tolist():
        chance = torch.tensor(
            [[0.8, 1.0 if first == 0 else 0.0]]
        )  # of the second level: told by the first token
        limits.append(admit(chance, torch.tensor([True]), seconds, early_stop))
    proposal = Proposal(tokens, TokenTree.chain(2), toy.drafter[tokens], limit=torch.cat(limits))
    settings = SamplingSettings(1.0)
    chain = Chain.of(proposal, toy.target[tokens], weighing(settings, toy))
    weight = (q[drafted[:, 0]] * toy.drafter.exp()[drafted[:, 0], drafted[:, 1]]).double()
    law = exact_law(toy, settings, chain, weight, kept_one_by_one(chain), rests(chain))
    return law.reshape(2, -1).sum(1)


def test_dsparks_counterexample_fails_without_the_early_stop_and_passes_with_it() -> None:
    """Choosing the best length of all peeks: a hopeless second level takes the first one with it
    exactly when that is token 1."""
    torch.testing.assert_close(law_under(early_stop=True), torch.tensor([0.7, 0.3]).double())
    torch.testing.assert_close(law_under(early_stop=False), torch.tensor([0.85, 0.15]).double())


# What is decided


def test_admission_takes_what_pays_over_the_whole_batch() -> None:
    chance = torch.tensor([[0.9, 0.9, 0.9], [0.2, 0.9, 0.9], [0.9, 0.1, 0.9], [0.9, 0.9, 0.9]])
    active = torch.tensor([True, True, True, False])
    flat = torch.ones(20)
    assert admit(chance, active, flat).tolist() == [3, 3, 3, 0]
    # a token costs as much as a pass: nothing below certainty pays
    linear = torch.arange(20).float()
    assert admit(chance, active, linear).tolist() == [0, 0, 0, 0]
    rising = 3 + 0.5 * (torch.arange(20).float() - 3).clamp(
        min=0
    )  # a token costs half of what a row's pass costs
    assert admit(chance, active, rising).tolist() == [3, 0, 1, 0]


def test_entropies_and_their_limit() -> None:
    logits = torch.zeros(1, 4, 8)
    logits[0, 0, 3] = logits[0, 2, 1] = 100.0
    found = entropies(logits, 0.0)
    torch.testing.assert_close(found, torch.tensor([[0.0, 2.0794, 0.0, 2.0794]]), atol=1e-3, rtol=0)
    proposal = Proposal(torch.zeros(1, 4, dtype=torch.int64), TokenTree.chain(3), logits)
    limit = Limits(AdaptiveSettings("entropy", 1.0), 0.0, 3, None, torch.device("cpu")).limit
    assert limit(proposal, torch.tensor([True])).tolist() == [1]  # type: ignore[union-attr]


def test_the_host_cuts_the_chain_and_a_late_host_masks_it_with_the_same_passes() -> None:
    target = random_target()
    drafter = build("distilled", target)
    now, late = (run(target, drafter, lag=lag, **ADAPTIVE["entropy"]) for lag in (0, 2))
    whole = run(target, drafter)
    for index, completion in now.items():
        assert completion.passes == late[index].passes
        assert [r.live for r in completion.passes] == [r.live for r in late[index].passes]
        assert all(r.nodes == r.live + 1 for r in completion.passes)
        assert all(r.nodes == 5 for r in whole[index].passes)
        assert {r.nodes for r in late[index].passes[1:]} == {
            5
        }  # with nothing under way the host knows it all
    nodes = [sum(r.nodes for c in found.values() for r in c.passes) for found in (now, whole)]
    assert nodes[0] < nodes[1]


def test_unsure_rows_are_not_counted_as_refused() -> None:
    """A pass that ends at its limit has no refused draft: TAR stays a rate of tested drafts."""
    target = random_target()
    found = run(target, build("distilled", target), adaptive="confidence", adaptive_threshold=1.0)
    records = [record for completion in found.values() for record in completion.passes]
    assert all(
        record.live == 0 and not record.rejected and record.accepted == 0 for record in records
    )


# The next step's length


def test_lengths_follow_acceptance_and_cost() -> None:
    flat, steep = [1.0, 1.01, 1.02, 1.04, 1.08], [1.0, 1.9, 3.0, 5.2, 9.6]
    for seconds, right, wrong in ((flat, 8, 1), (steep, 1, 0)):
        lengths = Lengths((0, 1, 2, 4, 8), seconds)
        for _ in range(60):
            lengths.observe(8, 8)
        assert lengths.next() == right
        for _ in range(300):
            lengths.observe(0, 1)
        assert lengths.next() == wrong
    lengths = Lengths((1, 2, 4), [1.0, 1.1, 1.2])
    assert lengths.next() == 4, "it starts by trying"


def test_a_length_that_did_not_pay_is_tried_again() -> None:
    """After many refusals nothing is drafted; the estimate fades, drafts are tried, and their
    success is noticed."""
    lengths = Lengths((0, 4), [1.0, 1.6])
    for _ in range(40):
        lengths.observe(0, 1)
    assert lengths.next() == 0
    waited = 0
    while lengths.next() == 0 and waited < 400:
        lengths.observe(0, 0)
        waited += 1
    assert 20 < waited < 399
    for _ in range(50):
        lengths.observe(4, 4)
    assert lengths.next() == 4


@pytest.mark.parametrize(("fake", "expected"), [(AlwaysRight, 4), (SometimesRight, None)])
def test_the_engine_settles_at_the_length_that_pays(fake: Any, expected: int | None) -> None:
    target = random_target()
    plain = run(target, None)
    drafter = fake(answers(plain), VOCAB)
    found = run(target, drafter, adaptive_lengths=(0, 1, 4), adaptive_costs=COSTS)
    assert texts(found) == texts(plain)
    used = {record.nodes - 1 for completion in found.values() for record in completion.passes}
    assert used <= {0, 1, 4}
    assert expected is None or used == {expected}


def test_costs_are_measured_where_none_are_given() -> None:
    target = random_target()
    drafter = build("distilled", target)
    verify, draft = pass_seconds(target, drafter, DecodeConfig(depth=3), rows=2)
    assert len(verify) == len(draft) == 4 and min(verify) > 0 and draft[0] == 0 < draft[3]
    table = token_seconds([1.0, 2.0, 4.0], rows=2)
    assert table.tolist() == [1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0]
    found = run(target, drafter, adaptive="throughput", adaptive_lengths=(0, 2, 4), batch_size=2)
    assert texts(found) == plain_texts(requests(5))


# The trained head


def test_the_acceptance_head_learns_what_decides_acceptance(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (
        torch.randn(4000, 3, 20, generator=generator)
        * torch.rand(4000, 1, 1, generator=generator)
        * 5
    )
    features = level_features(logits, 1.0).flatten(0, 1)
    truth = (2.0 * features[:, 0] - 0.5 * features[:, 2] + 1.5).sigmoid()
    accepted = torch.rand(truth.shape, generator=generator) < truth
    head = fit([Recorded(features, accepted)])
    assert float((head.chance(features) - truth).abs().mean()) < 0.02
    strict = fit([Recorded(features, accepted)], refusal_weight=4.0)
    assert float(strict.chance(features).mean()) < float(head.chance(features).mean()) - 0.1
    head.save(tmp_path / "head.json")
    loaded = AcceptanceHead.load(tmp_path / "head.json")
    torch.testing.assert_close(loaded.chance(features), head.chance(features))
    with pytest.raises(UserError, match="accepted and refused"):
        fit([Recorded(features, torch.ones_like(accepted))])
    (tmp_path / "head.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="is no acceptance head"):
        AcceptanceHead.load(tmp_path / "head.json")


def test_recorded_passes_train_a_head_that_the_engine_uses(tmp_path: Path) -> None:
    target = random_target()
    drafter = build("distilled", target)
    engine = Engine(
        target, drafter, DecodeConfig(adaptive="confidence", adaptive_threshold=0.0), capacity=96
    )
    lanes = engine._lanes_for(requests(1))
    assert lanes.limits is not None
    found: list[Recorded] = []
    lanes.limits.recorder = found
    passes = [record for completion in engine.run(requests(1)) for record in completion.passes]
    assert sum(len(item.accepted) for item in found) == sum(r.accepted + r.rejected for r in passes)
    cut = 1  # the last pass may have been cut at the budget
    assert (
        abs(sum(int(item.accepted.sum()) for item in found) - sum(r.accepted for r in passes))
        <= cut
    )
    head = AcceptanceHead(torch.zeros(5), torch.tensor(-9.0))
    head.save(tmp_path / "never.json")
    settings = {
        "adaptive": "confidence",
        "adaptive_threshold": 0.5,
        "adaptive_head": str(tmp_path / "never.json"),
    }
    never = run(target, drafter, **settings)
    assert all(record.nodes == 1 for completion in never.values() for record in completion.passes)
    assert texts(never) == plain_texts(requests(5))


def test_what_is_known_of_a_level_does_not_depend_on_its_own_token() -> None:
    """Features and estimates of level j may change with the tokens above it, never with token j:
    the logits are all they see."""
    logits = torch.randn(2, 4, 11)
    changed = logits.clone()
    changed[:, 2:] = torch.randn(2, 2, 11)  # what follows when token 2 comes out differently
    one, two = level_features(logits, 1.0), level_features(changed, 1.0)
    assert torch.equal(one[:, :2], two[:, :2]) and not torch.equal(one[:, 2:], two[:, 2:])


# Steps that can be captured


@pytest.mark.parametrize("mode", ["entropy", "confidence", "throughput"])
def test_a_step_does_not_wait_for_the_host(mode: str) -> None:
    target = random_target()
    lanes = under_way(
        target, build("distilled", target), DecodeConfig(batch_size=3, **ADAPTIVE[mode])
    )
    with NoHost():
        step_on_device(lanes)


@pytest.mark.parametrize("mode", ["confidence", "throughput"])
def test_a_recorded_step_decodes_other_prompts(mode: str) -> None:
    target = random_target()
    drafter = build("distilled", target)
    config = DecodeConfig(temperature=1.0, batch_size=2, **ADAPTIVE[mode])
    engine = Engine(target, drafter, config, capacity=96)
    engine._kept.lanes = under_way(target, drafter, config, count=2)
    lanes = engine._kept.lanes
    replayed(engine, record(lambda: step_on_device(lanes)))
    items = requests(4)
    found = texts_of(engine, items)
    assert found == plain_texts(items, temperature=1.0)


@pytest.mark.parametrize("length", [0, 2])
def test_a_recorded_shorter_step_decodes_other_prompts(length: int) -> None:
    """One graph per length is captured on CUDA; here such a step is recorded and replayed in its
    place."""
    target = random_target()
    drafter = build("distilled", target)
    config = DecodeConfig(temperature=1.0, batch_size=2, **ADAPTIVE["lengths"])
    engine = Engine(target, drafter, config, capacity=96)
    engine._kept.lanes = lanes = under_way(target, drafter, config, count=2)

    def step() -> Tensor:
        decoder = lanes.runner.decoder
        return decoder.step(lanes.cache, lanes.rows, lanes.state, None, length=length)[0].packed()

    recorded = record(step)
    lanes.lengths = None  # the replayed step has the one length
    replayed(engine, recorded)
    items = requests(4)
    found = {c.request.index: c for c in engine.run(items)}
    assert texts(found) == plain_texts(items, temperature=1.0)
    assert {r.nodes for c in found.values() for r in c.passes} == {length + 1}


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adaptive": "entrpy"}, "Did you mean 'entropy'"),
        ({"adaptive": "entropy", "shape": "dynamic"}, "work on chains"),
        ({"adaptive": "entropy", "rule": "specinfer"}, "decode.rule=rejection"),
        ({"adaptive": "confidence", "adaptive_threshold": 1.5}, "adaptive_threshold"),
        ({"adaptive_lengths": (2, 1, 4)}, "must ascend"),
        ({"adaptive_lengths": (1, 2)}, "end with decode.depth"),
        ({"adaptive_lengths": (1, 4), "adaptive_costs": (1.0, 2.0)}, "must be 5 numbers"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecodeConfig(**settings)


def test_a_head_that_does_not_exist_is_refused() -> None:
    target = random_target()
    with pytest.raises(UserError, match="is no acceptance head"):
        run(target, build("distilled", target), adaptive="confidence", adaptive_head="nowhere.json")
