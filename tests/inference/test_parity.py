"""The parity check passes for every kind on real targets, and catches drafters that decode
otherwise than they train.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from heads import distilled, eagle3, medusa, ngram
from heads.api.checkpoint import new_drafter
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.nn.drafting.state import Cached
from inference.parity import ParityError, check_parity
from tests.models import VOCAB, random_target

KINDS: list[tuple[str, Any]] = [
    ("medusa", medusa.Config(num_heads=3)),
    ("eagle3", eagle3.Config(ttt_steps=3)),
    ("eagle3", eagle3.Config(draft_vocab_size=70, tap_norm=False, post_norm_recurrence=False)),
    ("distilled", distilled.Config(hidden_size=24)),
]


def documents(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in (20, 13, 31)[:count]
    ]


def make(kind: str, config: Any, target: Any) -> Any:
    drafter = new_drafter(
        kind, config, target.info, target.weights, seed=0, token_counts=torch.arange(VOCAB, 0, -1)
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    return drafter


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_every_kind_decodes_as_it_trains(family: str, kind: str, config: Any) -> None:
    target = random_target(family)
    report = check_parity(target, make(kind, config, target), documents(), depth=3)
    assert report.compared >= 20
    assert all(0 < gap < 1e-9 for gap in report.worst)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_default_tolerance_suits_the_dtype(kind: str, config: Any, dtype: torch.dtype) -> None:
    target = random_target(dtype=dtype)
    check_parity(target, make(kind, config, target), documents(), depth=3)


def test_drafters_without_weights_have_nothing_to_compare() -> None:
    target = random_target()
    report = check_parity(target, ngram.Drafter(ngram.Config(), target.info), documents(), depth=3)
    assert (report.compared, report.worst) == (0, ())


class LateTaps(eagle3.Drafter):
    """Reads each token's taps one position late when it serves: the classic off-by-one."""

    def commit(self, state: Cached, accepted: TargetStates) -> Cached:
        accepted.taps = accepted.taps.roll(1, 1)
        return super().commit(state, accepted)


class StaleChain(eagle3.Drafter):
    """Feeds every drafted step the committed feature instead of its own output: wrong from depth 3
    on."""

    def propose(self, state: Cached, noise: Any) -> Any:
        advance = self.chain._advance
        committed = self.emit(state.output)[1]
        self.chain._advance = lambda *parts: advance(*parts[:-1], committed)  # type: ignore[method-assign]
        try:
            return super().propose(state, noise)
        finally:
            self.chain._advance = advance  # type: ignore[method-assign]


class WrongPositions(distilled.Drafter):
    """Counts positions from the wrong place when it serves deeper tokens."""

    def propose(self, state: Cached, noise: Any) -> Any:
        turned = state.rotations(self._rope).roll(-1, 0)
        state.rotations = lambda rope: turned  # type: ignore[method-assign]
        try:
            return super().propose(state, noise)
        finally:
            del state.rotations  # type: ignore[method-assign]


class HeadsSwapped(medusa.Drafter):
    """Drafts with its heads in reverse order."""

    def propose(self, state: medusa.State, noise: Any) -> Any:
        own = self._outputs
        self._outputs = lambda hidden, heads: own(hidden, heads).flip(0)
        try:
            return super().propose(state, noise)
        finally:
            self._outputs = own


class WrongRoot(medusa.Drafter):
    """Believes another token to be the root."""

    def start(self, seen: TargetStates, tree: Any, capacity: int) -> medusa.State:
        state = super().start(seen, tree, capacity)
        state.root.add_(1)
        return state


@pytest.mark.parametrize(
    ("broken", "config", "depth"),
    [
        (LateTaps, eagle3.Config(), 1),
        (StaleChain, eagle3.Config(), 3),
        (WrongPositions, distilled.Config(), 2),
        (HeadsSwapped, medusa.Config(num_heads=3), 1),
    ],
)
def test_a_drafter_that_serves_something_else_is_caught(
    broken: type, config: Any, depth: int
) -> None:
    target = random_target()
    drafter = make(broken.kind, config, target)
    check_parity(target, drafter, documents(), depth=3)
    drafter.__class__ = broken
    with pytest.raises(ParityError) as caught:
        check_parity(target, drafter, documents(), depth=3)
    message = str(caught.value)
    assert f"disagrees with itself at depth {depth}, position" in message
    values = re.search(r"is (\S+) in training and (\S+) in decoding", message)
    assert values
    assert float(values[1]) != float(values[2])


def test_a_wrong_root_is_caught() -> None:
    target = random_target()
    drafter = make("medusa", medusa.Config(num_heads=3), target)
    drafter.__class__ = WrongRoot
    with pytest.raises(ParityError, match=r"document 0, position \d+: node 0 carries"):
        check_parity(target, drafter, documents(), depth=3)


def test_broken_weights_do_not_pass_as_equal() -> None:
    target = random_target()
    drafter = make("medusa", medusa.Config(num_heads=3), target)
    with torch.no_grad():
        drafter.residual_bias[0, 1, 0] = float("nan")
    with pytest.raises(ParityError, match="depth 2 not finite"):
        check_parity(target, drafter, documents(), depth=3)


def test_documents_too_short_to_walk_are_refused() -> None:
    target = random_target()
    drafter = make("medusa", medusa.Config(num_heads=3), target)
    with pytest.raises(UserError, match=r"at least 7 tokens; too short: documents \[1\] of 2"):
        check_parity(target, drafter, [list(range(3, 12)), [3, 4, 5]], depth=3)
