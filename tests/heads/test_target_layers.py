"""Layers of the target run by a drafter: what they compute, what they share, what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from heads.api.checkpoint import new_drafter
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import Rotary
from heads.api.tree import TokenTree
from heads.early_exit import Config
from heads.nn.attention import masked_attention
from heads.nn.rope import Rope
from heads.nn.target.layers import FAMILIES, KeptLayer, read_layers
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.model import TargetModel
from tests.heads.micro import ForcedNoise
from tests.models import VOCAB, random_target

WINDOWED: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}}
TARGETS = [*((family, {}) for family in FAMILIES), *WINDOWED.items()]
NAMES = [*FAMILIES, "mistral without a window"]


def shaken_target(family: str, changes: Mapping[str, Any] | None = None) -> TargetModel:
    """A random target whose biases and norms are no zeros and ones."""
    target = random_target(family, **(changes or {}))
    generator = torch.Generator().manual_seed(5)
    for parameter in target.model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    return target


def requests(new: int = 22) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (9, 1, 14, 3)
    ]
    return [
        Request(i, tuple(prompt), seed=40 + i, max_new_tokens=new)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("family", "changes"), TARGETS, ids=NAMES)
@torch.no_grad()
def test_a_layer_computes_what_the_targets_own_computes(
    family: str, changes: dict[str, Any]
) -> None:
    target = shaken_target(family, changes)
    info, weights = target.info, target.weights
    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(8).expand(2, -1)
    taps, _ = target.features(tokens, positions, torch.ones(2, 8).int(), FeatureSpec((0, 1, 2, 3)))
    assert taps is not None
    rope = Rope(info.head_dim, info.rope_theta)
    rope.follow(weights.rotary)
    layers = read_layers("early_exit", info, weights, [KeptLayer(layer) for layer in range(3)])
    for number, layer in enumerate(layers):
        query, key, value = layer.project(taps[:, :, number], rope.at(positions, torch.float64))
        again = layer.key_value(taps[:, :, number], rope.at(positions, torch.float64))
        assert torch.equal(key, again[0]) and torch.equal(value, again[1])
        found = layer.finish(taps[:, :, number], masked_attention(query, key, value, None))
        torch.testing.assert_close(found, taps[:, :, number + 1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(("family", "changes"), TARGETS, ids=NAMES)
def test_with_all_layers_the_drafts_are_the_targets_own_picks(
    family: str, changes: dict[str, Any], shape: str, temperature: float
) -> None:
    """Every pass commits the deepest path and the bonus; windows, biases and norms of queries and
    keys included."""
    target = shaken_target(family, changes)
    drafter = new_drafter("early_exit", Config(exit_layer=3), target.info, target.weights, 0)
    choices = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
    settings = (
        {"shape": "tree", "choices": choices} if shape == "tree" else {"shape": "chain", "depth": 4}
    )
    decode = DecodeConfig(temperature=temperature, batch_size=3, **settings)  # type: ignore[arg-type]
    passes = 0
    for done in Engine(target, drafter, decode).run(requests()):
        assert not any(record.rejected for record in done.passes)
        assert [record.committed for record in done.passes[:-1]] == [5] * (len(done.passes) - 1)
        passes += len(done.passes) - 1
    assert passes >= 8


@torch.no_grad()
def test_a_window_matters_to_the_drafts() -> None:
    """Without the window the same layers see what the target does not: the test above would
    notice."""
    target = shaken_target("mistral")
    assert target.weights.windows == (9, 9, 9)
    assert random_target("qwen2").weights.windows == (0, 9, 9)
    assert random_target("llama").weights.windows == ()
    blind = replace(target.weights, windows=())
    drafter = new_drafter("early_exit", Config(exit_layer=3), target.info, blind, 0)
    done = list(Engine(target, drafter, DecodeConfig(batch_size=3, depth=4)).run(requests()))
    assert any(record.rejected for item in done for record in item.passes)


@torch.no_grad()
def test_the_cache_of_committed_tokens_is_the_targets_own() -> None:
    """Whatever layers are kept: keys and values of what the target has read come from the true
    streams."""
    target = shaken_target("qwen3")
    tokens = torch.randint(0, VOCAB, (1, 7), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(7)[None]
    drafters = [
        new_drafter("early_exit", Config(layers=layers), target.info, target.weights, 0)
        for layers in ((0, 1, 2), (0, 2))
    ]
    caches = []
    for drafter in drafters:
        taps, _ = target.features(tokens, positions, torch.ones(1, 7).int(), drafter.needs)
        engine = Engine(target, drafter, DecodeConfig(depth=2))
        states = engine_states(tokens, taps)
        caches.append(drafter.start(states, engine.tree, 32))
    torch.testing.assert_close(caches[0].keys[2][:, :6], caches[1].keys[1][:, :6])
    assert not torch.equal(caches[0].keys[2][:, 6], caches[1].keys[1][:, 6]), (
        "the root is only drafted"
    )


def engine_states(tokens: Tensor, taps: Tensor | None) -> TargetStates:
    """All but the last token as seen, the last one as the root."""
    assert taps is not None
    seen = tokens.shape[1] - 1
    valid = torch.ones(tokens.shape[0], seen, dtype=torch.bool)
    return TargetStates(
        tokens[:, :-1], tokens[:, 1:], torch.arange(seen).expand_as(valid), valid, taps[:, :seen]
    )


@torch.no_grad()
def test_reading_is_what_the_target_would_say() -> None:
    """With all layers kept the reader's logits are the target's; what is read again replaces what
    stood there."""
    target = shaken_target("llama")
    drafter = new_drafter("early_exit", Config(exit_layer=3), target.info, target.weights, 0)
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCAB, (2, 12), generator=generator)
    positions, segments = torch.arange(12).expand(2, -1), torch.ones(2, 12).int()
    taps, _ = target.features(tokens, positions, segments, drafter.needs)
    _, last = target.features(tokens, positions, segments, FeatureSpec(last_hidden=True))
    assert taps is not None and last is not None
    expected = target.weights.logits(last)
    state = drafter.start(engine_states(tokens[:, :8], taps[:, :8]), TokenTree.chain(4), 32)
    torch.testing.assert_close(drafter.root_logits(state), expected[:, 7])
    nowhere = torch.zeros(2, dtype=torch.int64)
    wrong = torch.randint(0, VOCAB, (2, 3), generator=generator)
    assert not torch.allclose(drafter.read(state, wrong, nowhere), expected[:, 8:11])
    torch.testing.assert_close(drafter.read(state, tokens[:, 8:10], nowhere), expected[:, 8:10])
    torch.testing.assert_close(
        drafter.read(state, tokens[:, 10:12], nowhere + 2), expected[:, 10:12]
    )
    ragged = drafter.read(
        state, torch.stack([tokens[0, 9:11], tokens[1, 10:12]]), torch.tensor([1, 2])
    )
    torch.testing.assert_close(ragged, torch.stack([expected[0, 9:11], expected[1, 10:12]]))
    forced = ForcedNoise(tokens.tolist())
    drafter.propose(state, forced)
    for row in range(2):
        torch.testing.assert_close(forced.logits[(row, 10)], expected[row, 9])


def test_weights_are_aliases_and_cost_nothing() -> None:
    target = random_target()
    drafter = new_drafter("early_exit", Config(exit_layer=2), target.info, target.weights, 0)
    layer = target.model.model.layers[1]
    products = drafter._blocks[1].attention, drafter._blocks[1].mlp
    assert (
        products[0].query.keywords["weight"].data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    )
    assert products[1].down.keywords["weight"].data_ptr() == layer.mlp.down_proj.weight.data_ptr()
    assert not list(drafter.parameters()) and not list(drafter.buffers())
    assert Engine(target, drafter).memory_bytes()["drafter"] == 0


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "olmo2", "phi"])
def test_other_families_are_refused_by_name(family: str) -> None:
    target = random_target(family)
    with pytest.raises(
        UserError, match=rf"knows those of llama, mistral, qwen2, qwen3; .* is a {family} model"
    ):
        new_drafter("early_exit", Config(), target.info, target.weights, 0)


def test_layers_of_another_make_are_refused() -> None:
    target = random_target()
    state = dict(target.weights.state)
    name = "model.layers.1.self_attn.o_proj.weight"
    variants = {
        "self_attn.o_proj": {**state, name: state[name].to(torch.int8)},
        "mlp.gate_proj": {
            key: value for key, value in state.items() if "layers.1.mlp.gate" not in key
        },
        "self_attn.sinks": {**state, "model.layers.1.self_attn.sinks": torch.zeros(4)},
    }
    for what, changed in variants.items():
        with pytest.raises(UserError, match=rf"cannot run layer 1 .*{what}"):
            new_drafter(
                "early_exit",
                Config(exit_layer=2),
                target.info,
                replace(target.weights, state=changed),
                0,
            )
    del state["model.norm.weight"]
    with pytest.raises(UserError, match=r"has no model\.norm\.weight"):
        new_drafter("early_exit", Config(), target.info, replace(target.weights, state=state), 0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda value: value["rope_type"],
)
def test_rotations_follow_scaled_frequencies(scaling: dict[str, Any]) -> None:
    settings = {**scaling, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=3,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters=settings,
    )
    module = LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 5, 90, 411]])
    cosine, sine = module(torch.zeros(1, dtype=torch.float64), positions)
    rope = Rope(8, 10000.0)
    plain = rope.table(512, positions.device, torch.float64)
    rope.follow(Rotary(module.inv_freq, float(module.attention_scaling)))
    for found in (
        rope.at(positions, torch.float64),
        rope.table(512, positions.device, torch.float64)[positions],
    ):
        cos, sin = found if isinstance(found, tuple) else found[..., None, :, :].unbind(-2)
        torch.testing.assert_close(cos[:, :, 0], cosine)
        torch.testing.assert_close(sin[:, :, 0, 4:], sine[..., 4:])
        torch.testing.assert_close(sin[:, :, 0, :4], -sine[..., :4])
    if scaling["rope_type"] != "default":
        assert not torch.allclose(plain, rope.table(512, positions.device, torch.float64))
    rope.follow(None)
    torch.testing.assert_close(rope.table(512, positions.device, torch.float64), plain)
    with pytest.raises(UserError, match="do not fit heads of size 8"):
        rope.follow(Rotary(torch.ones(3)))
