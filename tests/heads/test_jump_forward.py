"""Jump-forward: it drafts what it was told must follow, and moves on in that as text is
committed."""

from __future__ import annotations

import pytest
import torch

from heads.api.drafter import FORCED_TOKENS, TargetStates
from heads.api.tree import DynamicShape, TokenTree
from heads.cascade import Config as CascadeConfig
from heads.cascade import Drafter as CascadeDrafter
from heads.jump_forward import Config, Drafter, State
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.placement import PlacedDrafter
from tests.heads.micro import PlainNoise, micro_target
from tests.heads.test_ngram import run
from tests.inference.decoding.structured.parts import asked, structured_target
from tests.inference.decoding.test_no_sync import ALL_SHAPES


def told(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([[*row, *[-1] * (FORCED_TOKENS - len(row))] for row in rows])


def started(shape: object = None) -> tuple[Drafter, State]:
    drafter = Drafter(Config(), micro_target().info)
    tree = TokenTree.chain(3) if shape is None else shape
    return drafter, drafter.start(run([[1, 2, 3], [4, 5]], [0, 0]), tree, capacity=64)  # type: ignore[arg-type]


def test_forced_tokens_are_drafted_as_far_as_the_chain_goes() -> None:
    drafter, state = started()
    drafter.guide(state, told([7, 8, 9, 10], [11]))
    proposal = drafter.propose(state, PlainNoise())
    assert proposal.tokens.tolist() == [[3, 7, 8, 9], [5, 11, 5, 5]]
    assert proposal.limit is not None and proposal.limit.tolist() == [3, 1]


def test_nothing_is_drafted_where_nothing_is_forced() -> None:
    drafter, state = started(DynamicShape(nodes=4, max_depth=3, width=2))
    proposal = drafter.propose(state, PlainNoise())
    assert proposal.tree.is_chain and proposal.tokens.tolist() == [[3] * 4, [5] * 4]
    assert proposal.limit is not None and proposal.limit.tolist() == [0, 0]


def test_committed_tokens_are_taken_off_what_is_forced() -> None:
    drafter, state = started()
    drafter.guide(state, told([7, 8, 9], [11, 12]))
    ends = TargetStates(
        torch.tensor([[3, 7], [5, 0]]),
        torch.tensor([[7, 8], [99, 0]]),
        torch.tensor([[2, 3], [1, 2]]),
        torch.tensor([[True, True], [True, False]]),
    )
    drafter.commit(state, ends)
    assert state.forced[:, :3].tolist() == [[9, -1, -1], [-1, -1, -1]]
    assert state.root.tolist() == [8, 99]


def cascade(mode: str) -> CascadeDrafter:
    parts = ({"kind": "ngram"}, {"kind": "jump_forward"})
    if mode == "speed_up":
        parts = ({"kind": "jump_forward"}, {"kind": "early_exit"})
    target = structured_target()
    drafter = CascadeDrafter(CascadeConfig(mode=mode, parts=parts), target.info)  # type: ignore[arg-type]
    drafter.bind(target.weights)
    drafter.initialise(target.weights, torch.Generator().manual_seed(0))
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("which", ["alone", "placed", "join", "speed_up"])
def test_it_drafts_the_keys_of_a_schema(which: str, temperature: float) -> None:
    target = structured_target()
    alone = Drafter(Config(), target.info)
    if which == "placed":
        drafter: object = PlacedDrafter(alone, "cpu", "cpu")
    else:
        drafter = alone if which == "alone" else cascade(which)
    items = asked(["schema", None, "choice"], new=30)
    settings = {"temperature": temperature, "batch_size": 2}
    plain = Engine(target, None, DecodeConfig(shape="none", **settings))  # type: ignore[arg-type]
    expected = {done.request.index: done.tokens for done in plain.run(items)}
    shape = ALL_SHAPES["tree" if which == "join" else "chain"]
    engine = Engine(target, drafter, DecodeConfig(**settings, **shape))  # type: ignore[arg-type]
    found = {done.request.index: done for done in engine.run(items)}
    assert {index: done.tokens for index, done in found.items()} == expected
    # two keys and the punctuation around them; in speed_up it has to please an upper level that
    # knows no grammar
    assert which == "speed_up" or sum(record.accepted for record in found[0].passes) >= 2
