"""A replay along known text accepts what decoding accepts, pass by pass."""

from __future__ import annotations

import pytest
import torch

from heads.api.tree import DraftShape, DynamicShape, TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.tune.replay import Replay
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target

SHAPES: list[DraftShape] = [
    TokenTree.chain(3),
    TokenTree.from_choices([[0], [1], [0, 0]]),
    DynamicShape(10, 3, 3),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "distilled"])
@torch.no_grad()
def test_a_replay_takes_the_passes_of_decoding(kind: str, temperature: float) -> None:
    target, items = random_target(), requests(4, new=14)
    decode = DecodeConfig(temperature=temperature, batch_size=2, depth=3)
    drafter = drafter_of(kind, target)
    texts = sorted(Engine(target, None, decode).run(items), key=lambda item: item.request.index)
    replay = Replay(target, drafter, texts, temperature)
    for shape in SHAPES:
        engine = Engine(target, drafter, decode)
        engine.tree = shape
        expected = {str(item.request.index): item.passes for item in engine.run(items)}
        found = {outcome.prompt: outcome.passes for outcome in replay.outcomes(shape)}
        assert {row: [p.committed for p in passes] for row, passes in found.items()} == {
            row: [p.committed for p in passes] for row, passes in expected.items()
        }
        assert {row: [p.accepted for p in passes] for row, passes in found.items()} == {
            row: [p.accepted for p in passes] for row, passes in expected.items()
        }
