"""Steps on targets with recurrent layers: nothing asks the device, a recorded or compiled step
decodes other prompts, packed documents do not see each other, and a load that would roll back
wrongly is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.target.model as model_module
import inference.target.recurrent.states as states_module
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.target.recurrent.delta_rule import LEVELS, solve
from tests.heads.recipes import RECIPES
from tests.inference.decoding.test_captured import record, replayed
from tests.inference.decoding.test_lossless import decode, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.decoding.test_no_sync import ALL_SHAPES
from tests.inference.steps import NoHost, step_on_device, under_way
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import VOCAB, plain_texts, random_target, save_random_target, texts_of

DENSE = ["qwen3_5_text", "kimi_linear", "falcon_h1", "mamba", "lfm2", "recurrent_gemma"]
"""One of every sort of state. (Experts look at values in the library itself, for every target.)"""


NEEDS_ATTENTION = {
    "cascade",
    "cascade_join",
    "distilled",
    "early_exit",
    "kangaroo",
    "layer_skip",
    "pard",
    "quantized_self",
    "uno",
}
"""Recipes with layers of the target's own, which are refused for such a target."""


def target_of(family: str) -> TargetModel:
    changes: dict[str, Any] = {}
    if family == "kimi_linear":
        changes = {"mlp_layer_types": ["dense"] * 4}
    return random_target(family, recurrent=True, **changes)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("family", DENSE)
def test_a_step_asks_the_device_for_nothing(family: str, shape: str) -> None:
    target = target_of(family)
    config = DecodeConfig(temperature=1.0, batch_size=3, **ALL_SHAPES[shape])
    lanes = under_way(target, drafter_of("eagle3", target), config)
    with NoHost():
        step_on_device(lanes)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "falcon_h1", "mamba", "lfm2", "recurrent_gemma"]
)
def test_a_recorded_step_decodes_other_prompts(family: str, shape: str) -> None:
    target = target_of(family)
    drafter = drafter_of("eagle3", target)
    config = DecodeConfig(temperature=1.0, batch_size=2, **ALL_SHAPES[shape])
    engine = Engine(target, drafter, config, capacity=96)
    engine._kept.lanes = under_way(target, drafter, config, count=2)
    lanes = engine._kept.lanes
    replayed(engine, record(lambda: step_on_device(lanes)))
    items = requests(5, new=14)
    found = texts_of(engine, items)
    assert found == plain_texts(items, family, recurrent=True, temperature=1.0)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "temperature"), [("chain", 0.0), ("tree", 1.0), ("dynamic", 1.0)]
)
@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_drafts_for_a_hybrid_target(name: str, shape: str, temperature: float) -> None:
    """Or says that it needs layers of another sort."""
    target, items = target_of("qwen3_5_text"), requests(4, new=10)
    if name in NEEDS_ATTENTION:
        with pytest.raises(UserError, match="layer"):
            drafter_of(name, target)
        return
    drafter = drafter_of(name, target)
    config = DecodeConfig(temperature=temperature, batch_size=3, **ALL_SHAPES[shape])
    found = {i: c.tokens for i, c in decode(target, drafter, config, items).items()}
    assert found == plain_texts(items, "qwen3_5_text", recurrent=True, temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3_5_text", "tree"),
        ("falcon_h1", "chain"),
        ("lfm2", "tree"),
        ("recurrent_gemma", "tree"),
    ],
)
def test_a_compiled_step_writes_the_same_text(family: str, shape: str) -> None:
    target, items = target_of(family), requests(4, new=14)
    drafter = drafter_of("eagle3", target)
    config = DecodeConfig(batch_size=2, compile=True, **ALL_SHAPES[shape])
    found = {i: c.tokens for i, c in decode(target, drafter, config, items).items()}
    assert found == plain_texts(items, family, recurrent=True)


# Training


@pytest.mark.rotated
@pytest.mark.parametrize(
    "family", [*DENSE, "qwen3_next", "jamba", "zamba", "zamba2", "nemotron_h", "minimax", "zaya"]
)
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    """Taps and last states of packed rows are those of every document alone."""
    target = random_target(family, recurrent=True)
    needs = FeatureSpec(taps=(1, 3), last_hidden=True)
    tokens = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(4))
    lengths = ((9, 1, 14), (5, 19))
    positions, segments = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, own in enumerate(lengths):
        positions[row] = torch.cat([torch.arange(length) for length in own])
        numbers = torch.arange(len(own)) + 1
        segments[row] = numbers.repeat_interleave(torch.tensor(own))
    together = both(target.features(tokens, positions, segments.int(), needs))
    for row, own in enumerate(lengths):
        start = 0
        for length in own:
            part = tokens[row : row + 1, start : start + length]
            place = torch.arange(length)[None]
            alone = both(target.features(part, place, torch.ones_like(part).int(), needs))
            for found, wanted in zip(together, alone, strict=True):
                found = found[row : row + 1, start : start + length]
                scale = float(wanted.abs().max())
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * scale)
            start += length


def both(features: Sequence[Tensor | None]) -> list[Tensor]:
    assert all(part is not None for part in features)
    return [part for part in features if part is not None]


def test_training_changes_a_hybrid_target_through_packed_rows() -> None:
    """Joint training needs gradients through the documents that were read apart."""
    target = target_of("qwen3_5_text")
    target.model.requires_grad_(True)
    tokens = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
    segments = torch.tensor([[1] * 5 + [2] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    needs = FeatureSpec(last_hidden=True)
    _, hidden = target.differentiable_features(tokens, positions, segments, needs)
    assert hidden is not None
    hidden.square().sum().backward()
    mixers = [layer for layer in target.taps.layers if hasattr(layer, "linear_attn")]
    assert mixers
    for layer in mixers:
        assert float(layer.linear_attn.conv1d.weight.grad.abs().max()) > 0


# Loading


def test_a_hybrid_target_loads_and_a_wrong_roll_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random_target(
        tmp_path / "hybrid", tiny_tokenizer("chatml"), "qwen3_5_text", recurrent=True
    )
    target = TargetModel.load(TargetConfig(path=str(folder), device="cpu"))
    assert target.recurrent and target.cache_sizes().row > 0
    of = states_module._End.of
    refused = staticmethod(lambda tree, node: of(tree, torch.full_like(node, 3)))
    monkeypatch.setattr(states_module._End, "of", refused)
    with pytest.raises(UserError, match="verified logits differ"):
        TargetModel.load(TargetConfig(path=str(folder), device="cpu"))


def test_a_library_whose_layers_work_otherwise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random_target(tmp_path / "lfm", tiny_tokenizer("chatml"), "lfm2", recurrent=True)
    monkeypatch.setattr(model_module, "install", lambda model: 0)
    with pytest.raises(UserError, match=r"with transformers \d.*recurrent layers do not call"):
        TargetModel.load(TargetConfig(path=str(folder), device="cpu"))


def test_bfloat16_is_allowed() -> None:
    """States stay in float32; a verification's logits are near those of single steps."""
    for family in DENSE:
        target = random_target(family, recurrent=True, dtype=torch.bfloat16)
        found = decode(target, None, DecodeConfig(batch_size=2), requests(3, new=6))
        assert all(len(done.tokens) for done in found.values())


# Solving


@pytest.mark.parametrize("nodes", [2, 6, 16, 64])
def test_both_ways_of_solving_are_exact(nodes: int) -> None:
    """With equal and with different keys, and rates up to 2, as OLMo's hybrids have them."""
    generator, worst = torch.Generator().manual_seed(3), 0.0
    for same in (0.0, 0.9, 1.0):
        keys = torch.randn(1, 4, nodes, 128, generator=generator)
        keys = torch.nn.functional.normalize(same * keys[:, :, :1] + (1 - same) * keys, dim=-1)
        rates = torch.rand(1, 4, nodes, 1, generator=generator) * 2
        system = (keys @ keys.transpose(-1, -2) * rates).tril(-1)
        wanted = torch.randn(1, 4, nodes, 32, generator=generator)
        exact = torch.linalg.solve(
            system.double() + torch.eye(nodes, dtype=torch.float64), wanted.double()
        )
        for depth in (nodes - 1, LEVELS + nodes):
            gap = (solve(system, wanted, depth) - exact).abs().max() / exact.abs().max()
            worst = max(worst, float(gap))
    assert worst < 1e-5
