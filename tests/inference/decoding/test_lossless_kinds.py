"""Whole batches of every recipe: a batch drafts what single rows draft. (Texts:
tests/heads/test_contract.py.)"""

from __future__ import annotations

from typing import Any

import pytest

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.model import TargetModel
from tests.heads.recipes import RECIPES, REMEMBERING, build
from tests.inference.decoding.test_lossless import decode, requests
from tests.models import random_target, texts_of


def drafter_of(name: str, target: TargetModel, seed: int = 0) -> Any:
    """A fresh drafter of a recipe, shaken."""
    return build(name, target, seed)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in REMEMBERING])
def test_a_batch_and_its_refills_draft_what_single_rows_draft(name: str) -> None:
    """Passes, not only tokens: a state written into a refilled row must be the state the row would
    have had alone."""
    target = random_target()
    items = requests(5, new=12)
    alone = decode(target, drafter_of(name, target), DecodeConfig(depth=3), items)
    batched = decode(target, drafter_of(name, target), DecodeConfig(depth=3, batch_size=2), items)
    assert {i: c.passes for i, c in batched.items()} == {i: c.passes for i, c in alone.items()}


def test_without_shared_noise_the_text_is_the_same() -> None:
    target = random_target()
    items = requests(3)
    drafter = drafter_of("eagle3", target)
    texts = []
    for share in (True, False):
        config = DecodeConfig(temperature=1.0, share_noise=share)
        texts.append(texts_of(Engine(target, drafter, config), items))
    assert texts[0] == texts[1]
