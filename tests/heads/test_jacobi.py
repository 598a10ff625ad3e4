"""Jacobi drafting: which guess goes where, that it is the fixed-point iteration, and that no text
changes at any temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Noise, Proposal, TargetStates, Verified
from heads.api.errors import UserError
from heads.api.tree import DynamicShape, TokenTree
from heads.jacobi import Config, Drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.placement import PlacedDrafter
from inference.decoding.requests import Request
from tests.heads.micro import PlainNoise, micro_target
from tests.heads.test_ngram import run
from tests.models import VOCAB, random_target


def new(fill: str = "follow") -> Drafter:
    return Drafter(Config(fill=fill), micro_target().info)


def after(drafter: Drafter, state: Any, picks: list[int], text: list[int], first: int) -> list[int]:
    """The next proposal when the target picked `picks` after every node and `text` (root first,
    bonus last) was committed."""
    proposal = drafter.propose(state, PlainNoise())
    accepted = run([text], [first])
    depth = proposal.tree.max_depth
    path = torch.arange(depth + 1)[None]
    accepted.verified = Verified(proposal.tokens, torch.tensor([picks]), proposal.tree, path)
    tokens: list[int] = (
        drafter.propose(drafter.commit(state, accepted), PlainNoise()).tokens[0].tolist()
    )
    return tokens


def test_picks_move_to_the_positions_they_were_picked_for() -> None:
    """Nothing accepted: the picks behind the bonus are the guesses; the tail repeats the last of
    them."""
    drafter = new("repeat")
    state = drafter.start(run([[5, 6, 7]], [0]), TokenTree.chain(4), capacity=32)
    assert drafter.propose(state, PlainNoise()).tokens.tolist() == [[7, 7, 7, 7, 7]]
    # node 0 (the root 7) -> 11, so 11 is committed; nodes 1..4 were guessed 7 and picked 12..15
    assert after(drafter, state, [11, 12, 13, 14, 15], [7, 11], 2) == [11, 12, 13, 14, 15]
    # two accepted (12, 13), bonus 23: what was picked at nodes 3 and 4 stands behind it
    assert after(drafter, state, [12, 13, 23, 24, 25], [11, 12, 13, 23], 3) == [23, 24, 25, 25, 25]
    # all accepted: nothing is left
    assert after(drafter, state, [24, 25, 25, 25, 31], [23, 24, 25, 25, 25, 31], 6) == [31] * 5


def test_the_tail_follows_the_text() -> None:
    drafter = new("follow")
    state = drafter.start(run([[4, 5, 6, 8, 4]], [0]), TokenTree.chain(4), capacity=32)
    assert drafter.propose(state, PlainNoise()).tokens.tolist() == [[4, 5, 6, 8, 4]]
    # 6 was picked behind the bonus 9: 8 followed it once, and so on round
    assert after(drafter, state, [9, 1, 1, 2, 6], [4, 9], 4)[1:] == [1, 1, 2, 6]
    assert after(drafter, state, [1, 1, 3, 6, 6], [9, 1, 1, 3], 5) == [3, 6, 6, 8, 4]


def test_the_tail_from_the_prompt_is_made_of_its_tokens() -> None:
    drafter = new("prompt")
    state = drafter.start(
        run([[4, 5, 6, 8, 4], [9, 9, 3]], [0, 0]), TokenTree.chain(6), capacity=32
    )
    first, second = drafter.propose(state, PlainNoise()).tokens.tolist()
    assert set(first) <= {4, 5, 6, 8} and set(second) <= {9, 3} and len(set(first)) > 1


@pytest.mark.parametrize(
    ("shape", "depth"),
    [
        (DynamicShape(9, 3, 3), 3),
        (DynamicShape(3, 5, 3), 2),
        (TokenTree.from_choices([[0], [1], [0, 0]]), 2),
    ],
)
def test_every_shape_is_filled_with_a_chain_within_it(shape: Any, depth: int) -> None:
    drafter = new()
    proposal = drafter.propose(
        drafter.start(run([[4, 5, 6]], [0]), shape, capacity=32), PlainNoise()
    )
    assert proposal.tree.is_chain and proposal.tree.max_depth == depth
    assert proposal.tokens.shape == (1, depth + 1)


class Watched(Drafter):
    """Compares every proposal with the definition: picks of the last pass, moved by what was
    committed."""

    def __init__(self, config: Config, info: Any) -> None:
        super().__init__(config, info)
        self.expected: list[dict[int, int]] = []  # per row: absolute position -> guess
        self.hits = self.compared = 0

    def propose(self, state: Any, noise: Noise) -> Proposal:
        proposal = super().propose(state, noise)
        for row, guesses in enumerate(self.expected):
            root = int(state.history.length[row]) - 1
            for place, token in enumerate(proposal.tokens[row].tolist()):
                if place and root + place in guesses:
                    assert guesses[root + place] == token
                    self.compared += 1
        return proposal

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        seen = accepted.verified
        assert seen is not None
        first = accepted.positions[:, 0].tolist()
        self.expected = [
            {first[row] + node + 1: token for node, token in enumerate(picks)}
            for row, picks in enumerate(seen.picks.tolist())
        ]
        for row, length in enumerate(
            accepted.lengths.tolist()
        ):  # the match rule commits the picks themselves
            assert accepted.next_tokens[row, :length].tolist() == seen.picks[row, :length].tolist()
        return super().commit(state, accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_the_targets_own_picks_at_any_temperature(temperature: float) -> None:
    target = random_target()
    watched = Watched(Config(), target.info)
    settings = DecodeConfig(temperature=temperature, depth=4)
    request = Request(0, (5, 9, 3), seed=3, max_new_tokens=24)
    texts = [
        next(Engine(target, drafter, settings).run([request])).tokens for drafter in (None, watched)
    ]
    assert texts[0] == texts[1]
    assert watched.compared > 40


class ByPosition:
    """A target whose pick depends on the position alone: the iteration must reach its fixed point
    in one pass."""

    def picks(self, tokens: Tensor, first: int) -> Tensor:
        return (torch.arange(tokens.shape[1])[None] + first + 1) % 7 + 20


def test_a_text_that_does_not_depend_on_guesses_is_found_in_one_pass() -> None:
    drafter, target = new("prompt"), ByPosition()
    state = drafter.start(run([[5, 6, 7]], [0]), TokenTree.chain(4), capacity=64)
    first, root, accepted = 2, 7, []
    for _ in range(6):
        proposal = drafter.propose(state, PlainNoise())
        assert proposal.tokens[0, 0] == root
        picks = target.picks(proposal.tokens, first)
        same = (proposal.tokens[:, 1:] == picks[:, :-1])[0].long().cumprod(0).sum()
        count = int(same)
        text = [*proposal.tokens[0, : count + 1].tolist(), int(picks[0, count])]
        states = run([text], [first])
        states.verified = Verified(proposal.tokens, picks, proposal.tree, torch.arange(5)[None])
        state = drafter.commit(state, states)
        first, root = first + count + 1, text[-1]
        accepted.append(count)
    # The first guesses are wrong; then all picks that remain are right, until they are used up and
    # new ones are guessed.
    assert accepted == [0, 4, 0, 4, 0, 4]


def test_a_verification_of_another_tree_teaches_nothing() -> None:
    drafter = new("repeat")
    state = drafter.start(run([[5, 6, 7]], [0]), TokenTree.chain(3), capacity=32)
    other = TokenTree.chain(3)
    accepted, zeros = run([[7, 11]], [2]), torch.zeros(1, 4, dtype=torch.int64)
    accepted.verified = Verified(zeros, zeros + 1, other, zeros)
    assert drafter.propose(drafter.commit(state, accepted), PlainNoise()).tokens.tolist() == [
        [11] * 4
    ]


def test_a_placed_drafter_is_told_of_the_verification() -> None:
    target = random_target()
    settings = DecodeConfig(temperature=1.0, depth=4, batch_size=2)
    requests = [Request(i, (i + 4, 9, VOCAB - 1 - i), seed=i, max_new_tokens=16) for i in range(3)]
    found = []
    for placed in (False, True):
        drafter: Any = Drafter(Config(), target.info)
        if placed:
            drafter = PlacedDrafter(drafter, "cpu", "cpu")
        found.append(
            {
                c.request.index: (c.tokens, c.passes)
                for c in Engine(target, drafter, settings).run(requests)
            }
        )
    assert found[0] == found[1]


def test_an_unknown_fill_is_refused() -> None:
    with pytest.raises(UserError, match=r"head\.fill 'promt' is unknown\. Did you mean 'prompt'"):
        Config(fill="promt")
