"""Jacobi iteration over blocks of a greedy text, against one pass at a time."""

from __future__ import annotations

import pytest
import torch

from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.jacobi_blocks import passes_until_stable
from tests.inference.tokenizers import save_micro_target

BLOCK = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tmp_path_factory.mktemp("target")
    save_micro_target(folder)
    return TargetModel.load(TargetConfig(str(folder), device="cpu"))


def pick(target: TargetModel, text: list[int]) -> int:
    """The target's greedy token after a text."""
    last = target.last_states(torch.tensor([text]))[0, -1]
    return int(target.weights.logits(last).argmax())


def iterate(target: TargetModel, before: list[int]) -> tuple[int, list[int]]:
    """The passes that change a block after `before`, and the block."""
    guess, passes = [before[-1]] * BLOCK, 0
    while True:
        found = [pick(target, before + guess[:place]) for place in range(BLOCK)]
        if found == guess:
            return passes, guess
        guess, passes = found, passes + 1


def test_passes_are_those_of_one_block_after_the_other(target: TargetModel) -> None:
    text = [5, 6, 7, 8, 9]
    while len(text) < 5 + 6 * BLOCK + 3:
        text.append(pick(target, text))
    slow = [iterate(target, text[: 5 + BLOCK * number]) for number in range(6)]
    assert [token for _, block in slow for token in block] == text[5 : 5 + 6 * BLOCK]
    found = passes_until_stable(target, text, 5, BLOCK)
    assert found == [passes for passes, _ in slow]
    assert all(0 <= passes <= BLOCK for passes in found)
    assert any(found)
