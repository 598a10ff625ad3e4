"""The first invariant with every real kind: fresh drafters on random targets, chains and trees, ragged refilled batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind, kind_names
from inference.engine import DecodeConfig, Engine
from inference.target import TargetModel
from tests.inference.test_lossless import SHAPES, decode, requests
from tests.models import random_target

SMALL: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 4},
    "eagle3": {"ttt_steps": 2},
    "distilled": {"from_target_layers": (0, 2)},
}
FAMILIES = ["llama", "mistral", "gpt2"]


def drafter_of(kind: str, target: TargetModel, seed: int = 0) -> Any:
    """A fresh drafter of a kind with noise on its weights, so that zero-initialised parts take part."""
    config = get_kind(kind).config_class(**SMALL.get(kind, {}))
    drafter = new_drafter(kind, config, target.info, target.weights, seed)
    if isinstance(drafter, torch.nn.Module):
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return drafter


def small_kinds(family: str) -> list[str]:
    """The kinds that fit a random target of a family: copied layers need Llama's weight names."""
    return [kind for kind in kind_names() if not (kind == "distilled" and family != "llama")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("family", "kind"), [(f, k) for f in FAMILIES for k in small_kinds(f)])
def test_every_kind_is_lossless(family: str, kind: str, shape: str, temperature: float) -> None:
    target = random_target(family)
    items = requests(5)
    plain = decode(target, None, DecodeConfig(temperature=temperature), items)
    config = DecodeConfig(temperature=temperature, batch_size=3, **SHAPES[shape])  # type: ignore[arg-type]
    found = decode(target, drafter_of(kind, target), config, items)
    assert {i: c.tokens for i, c in found.items()} == {i: c.tokens for i, c in plain.items()}


@pytest.mark.parametrize("kind", kind_names())
def test_a_batch_and_its_refills_draft_what_single_rows_draft(kind: str) -> None:
    """Passes, not only tokens: a state written into a refilled row must be the state the row would have had alone."""
    target = random_target()
    items = requests(5)
    alone = decode(target, drafter_of(kind, target), DecodeConfig(depth=3), items)
    batched = decode(target, drafter_of(kind, target), DecodeConfig(depth=3, batch_size=2), items)
    assert {i: c.passes for i, c in batched.items()} == {i: c.passes for i, c in alone.items()}


def test_without_shared_noise_the_text_is_the_same() -> None:
    target = random_target()
    items = requests(3)
    drafter = drafter_of("eagle3", target)
    texts = []
    for share in (True, False):
        config = DecodeConfig(temperature=1.0, share_noise=share)
        texts.append({c.request.index: c.tokens for c in Engine(target, drafter, config).run(items)})
    assert texts[0] == texts[1]
