"""Drafts that follow the row's grammar: allowed along the forced text, of the drafter's own choice
elsewhere, and weighed by the logits that they were drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution import compiled
from inference.decoding.placement import PlacedDrafter
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.session import Session
from inference.decoding.step import Decoder
from inference.decoding.structured.constraint import Constraint
from inference.decoding.structured.grammars import Grammars, _reason
from inference.decoding.structured.leading import NO_TOKEN, Lead, LedNoise, hide, unpacked
from tests.heads.recipes import build
from tests.inference.decoding.structured.parts import (
    CONSTRAINTS,
    allowed,
    asked,
    structured_target,
    text_of,
)
from tests.inference.decoding.structured.test_decoding import decode, tokens
from tests.inference.decoding.test_no_sync import ALL_SHAPES

VOCAB, DEPTH = 70, 3
WORDS = -(-VOCAB // 32)


def words_of(*sets: Sequence[int] | None) -> Tensor:
    """Words [D, W] that allow these tokens; None: all."""
    words = torch.full((DEPTH, WORDS), -1, dtype=torch.int32)
    for own, given in zip(words, sets, strict=False):
        if given is not None:
            bits = [sum(1 << t % 32 for t in given if t // 32 == w) for w in range(WORDS)]
            own.copy_(torch.tensor(bits).to(torch.int32))
    return words


def noise(temperature: float = 0.0) -> SharedNoise:
    settings = SamplingSettings(temperature=temperature)
    return SharedNoise(settings, torch.tensor([3, 4]), VOCAB, keeps_logits=True)


def lead() -> Lead:
    """Row 0: 7 or 69 may come first; 7 is forced text, behind which 1 or 2 may come, then anything.
    Row 1 has no grammar."""
    tokens = torch.tensor([[7, NO_TOKEN, NO_TOKEN], [NO_TOKEN] * 3])
    return Lead(tokens, torch.stack([words_of([7, 69], [1, 2]), words_of()]))


def logits_for(*best: int) -> Tensor:
    """Logits [2, D, V] whose best tokens are these at all levels, in this order."""
    logits = torch.zeros(2, DEPTH, VOCAB)
    for rank, token in enumerate(best):
        logits[..., token] = 10.0 - rank
    return logits


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("best", "expected"),
    [((50, 7, 2), [7, 2, 50]), ((50, 69, 2), [69, 50, 50]), ((50, 60, 3), [7, 1, 50])],
)
def test_a_chain_is_led_along_the_path_until_it_leaves_it(
    best: tuple[int, ...], expected: list[int], at_once: bool
) -> None:
    """The third draft has no best token that is allowed: the first of the equal ones is taken."""
    logits, roots = logits_for(*best), torch.tensor([10, 4])
    led = LedNoise(noise(), lead(), roots, chain=True)
    positions = roots[:, None] + torch.arange(1, DEPTH + 1)
    if at_once:
        found = led.pick(logits, positions)
    else:
        each = [led.pick(logits[:, i : i + 1], positions[:, i : i + 1]) for i in range(DEPTH)]
        found = torch.cat(each, 1)
    assert found[0].tolist() == expected
    assert found[1].tolist() == [best[0]] * DEPTH


def test_a_reduced_vocabulary_is_led_by_the_tokens_of_its_columns() -> None:
    ids = torch.tensor([50, 2, 69, 1])
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).expand(2, DEPTH, 4)
    led = LedNoise(noise(), lead(), torch.tensor([10, 4]), chain=True)
    positions = torch.tensor([[11, 12, 13], [5, 6, 7]])
    assert ids[led.pick(logits, positions, ids)].tolist() == [[69, 50, 50], [50, 50, 50]]
    none = torch.tensor([50, 3])  # nothing of it is allowed: the drafter's own choice
    led = LedNoise(noise(), lead(), torch.tensor([10, 4]), chain=True)
    assert none[led.pick(logits[..., :2], positions, none)].tolist() == [[50] * 3, [50] * 3]


def test_of_a_tree_the_roots_children_are_led() -> None:
    roots = torch.tensor([10, 4])
    led = LedNoise(noise(), lead(), roots, chain=False)
    scores = led.scores(logits_for(50, 69), roots[:, None] + torch.tensor([1, 2, 2]))
    assert scores[0, 0].isfinite().nonzero().flatten().tolist() == [7, 69]
    assert scores[0, 1:].isfinite().all() and scores[1].isfinite().all()


def test_logits_are_kept_as_tokens_were_drawn_from_them() -> None:
    """Of nodes on the path alone; the last row of logits is a leaf's."""
    roots, tree = torch.tensor([10, 4]), TokenTree.chain(DEPTH)
    logits = torch.cat([logits_for(50), torch.zeros(2, 1, VOCAB)], 1)
    for drawn, hidden in (([7, 1, 50], 2), ([69, 1, 50], 1)):
        given = torch.tensor([[0, *drawn], [0, 50, 50, 50]])
        led = LedNoise(noise(1.0), lead(), roots, chain=True)
        kept = led.led(Proposal(given, tree, logits)).logits
        assert kept is not None
        for level in range(DEPTH + 1):
            left = kept[0, level].isfinite().nonzero().flatten().tolist()
            assert left == ([[7, 69], [1, 2]][level] if level < hidden else list(range(VOCAB)))
        assert torch.equal(kept[1], logits[1])


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_path_has_the_masks_of_its_places(name: str) -> None:
    """Against a matcher that takes the path's tokens one by one."""
    target, size, constraint = structured_target(), 6, CONSTRAINTS[name][0]
    grammars, taken, longest = Grammars.of(target), list[int](), 0
    matcher = grammars.matcher(constraint)
    for _ in range(12):
        words = torch.full((size, target.info.vocab_size // 32), -1, dtype=torch.int32)
        path, twin = matcher.path(words), grammars.matcher(constraint)
        assert path == matcher.forced(size - 1)
        longest = max(longest, len(path))
        twin.accept(taken)
        for place in range(len(path) + 1):
            bits = unpacked(words[place], None)
            assert bits.nonzero().flatten().tolist() == allowed(twin)
            twin.accept(path[place : place + 1])
        assert (words[len(path) + 1 :] == -1).all()
        step = path[0] if path else allowed(matcher)[0]
        if step in target.eos_token_ids:
            break
        matcher.accept([step])
        taken.append(step)
    found = {"schema": size - 1, "choice": size - 1, "loose schema": 2}
    assert longest == found.get(name, longest)


@pytest.mark.parametrize("shape", ["chain", "tree", "dynamic"])
def test_led_drafts_are_accepted_more_often(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    items, config = asked(["schema"] * 6, new=40), DecodeConfig(batch_size=6, **ALL_SHAPES[shape])
    drafter = build("eagle3", structured_target())
    led = decode(drafter, config, items)
    monkeypatch.setattr(Decoder, "_leading", lambda self, rows: None)
    unled = decode(drafter, config, items)
    assert tokens(led) == tokens(unled)
    passes = [sum(len(done.passes) for done in found.values()) for found in (led, unled)]
    assert passes[0] < passes[1]


def test_a_placed_drafter_and_those_of_a_pair_are_led_too() -> None:
    items, target = asked(["schema"] * 4, new=24), structured_target()
    config = DecodeConfig(batch_size=4, **ALL_SHAPES["chain"])
    alone = decode(build("eagle3", target), config, items)
    placed = PlacedDrafter(build("eagle3", target), "cpu", "cpu")
    found = [decode(placed, config, items)]
    with Session(Engine(target, build("eagle3", target), config), 64) as session:
        session.pair_with(build("ngram", target), lambda request: False)
        for item in items:
            session.add(item)
        ended = []
        while session.unfinished:
            ended += session.step()
    found.append({done.request.index: done for done in ended})
    for way in found:
        assert tokens(way) == tokens(alone)
        for index, done in alone.items():
            assert [one.accepted for one in way[index].passes] == [
                one.accepted for one in done.passes
            ]


def test_a_certain_draft_of_a_forbidden_token_keeps_its_probability() -> None:
    """As a pair's drafter without probabilities gives it."""
    logits = torch.full((2, 1, VOCAB), float("-inf"))
    logits[:, :, 5] = 0.0
    allowed = torch.zeros(2, 1, VOCAB, dtype=torch.bool)
    allowed[0, 0, 7], allowed[1, 0, 5] = True, True
    assert torch.equal(hide(logits, allowed), logits)


def test_an_error_of_xgrammar_without_text_is_named() -> None:
    assert _reason(RuntimeError()) == "RuntimeError"
    assert _reason(RuntimeError("a.cc:7: no rule 'x'\nmore")) == "no rule 'x'"


def test_traced_steps_draft_as_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass by pass, in a batch with a free row."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, arguments: graph)
    items, drafter = asked(["schema", None], new=24), build("eagle3", structured_target())
    config = DecodeConfig(batch_size=2, **ALL_SHAPES["chain"])
    ways = [decode(drafter, replace(config, compile=way), items) for way in (False, True)]
    assert tokens(ways[0]) == tokens(ways[1])
    for item in items:
        launched, traced = ([one.accepted for one in way[item.index].passes] for way in ways)
        assert launched == traced
    assert max(one.accepted for one in ways[0][0].passes) > 0


def test_logits_that_tokens_were_not_drawn_from_change_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of `test_a_rule_keeps_the_constrained_distribution`."""
    monkeypatch.setattr(LedNoise, "led", lambda self, proposal: proposal)
    count, letters = 400, Constraint("regex", "[ab][cd]")
    items = [Request(seed, (50, 60, 70), seed + 1, 8, constraint=letters) for seed in range(count)]
    ways = []
    for head, config in (
        (None, DecodeConfig(shape="none", temperature=1.0, batch_size=64)),
        (
            build("medusa", structured_target(), shaken=0.3),
            DecodeConfig(rule="block", temperature=1.0, batch_size=64, **ALL_SHAPES["chain"]),
        ),
    ):
        found = decode(head, config, items)
        ways.append(Counter(text_of(done.tokens) for done in found.values()))
    most = max(abs(ways[0][text] - ways[1][text]) / count for text in ways[0])
    assert most > 4.5 * (2 * 0.25 / count) ** 0.5
