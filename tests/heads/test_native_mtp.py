"""A target's own MTP block: every family's layer against the library's own forward pass, drafting
against training, and text with its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.native_mtp import Config, Drafter
from heads.nn.matrices import holds_vectors, matrices
from heads.nn.native.family import SMALL_VOCABULARY, Family, one_layer
from inference.decoding.config import DecodeConfig
from inference.parity import check_parity
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.heads.explicit import DOCUMENTS
from tests.heads.micro import micro_target, packed_batch
from tests.inference.decoding.test_lossless import decode, requests
from tests.inference.decoding.test_no_sync import ALL_SHAPES
from tests.inference.tokenizers import save_micro_target
from tests.models import ALL_FAMILIES, RECURRENT_FAMILIES, plain_texts, random_target
from train.engines.base import EngineConfig
from train.planning.dry_run import dry_step, plan_drafter
from train.planning.target import plan_target

GLM = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": RECURRENT_FAMILIES["qwen3_next"],
    "qwen3_5_text": RECURRENT_FAMILIES["qwen3_5_text"],
    "deepseek_v3": ALL_FAMILIES["deepseek_v3"],
    "bailing_hybrid": RECURRENT_FAMILIES["bailing_hybrid"],
    "glm4_moe": {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8, **GLM},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}
"""Family -> settings of a small layer beside the sizes of the micro target."""
EXPERTS = {"qwen3_next", "deepseek_v3", "bailing_hybrid", "glm4_moe"}
"""Families whose grouped product takes no float64."""


@pytest.fixture(scope="module", params=LAYERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(family: str, **options: Any) -> tuple[Any, Drafter]:
    dtype = torch.float32 if family in EXPERTS else torch.float64
    target = micro_target(dtype)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes["intermediate_size"] = 24
    given = {**sizes, "num_hidden_layers": 4, **LAYERS[family]}
    given = {key: value for key, value in given.items() if value is not None}
    layer = one_layer(AutoConfig.for_model(family, **given))
    config = Config(layer=layer, depths=2, **options)
    drafter = new_drafter("native_mtp", config, target.info, target.weights, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(0.3 * drawn.to(parameter))
    return target, drafter.eval()


def of_library(drafter: Drafter) -> Any:
    """The block's layer in the library's own model of one layer, with its own attention."""
    settings = dict(drafter.config.layer)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings | SMALL_VOCABULARY)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    decoder = model.get_decoder().to(drafter.mtp.fc.weight.dtype).eval()
    decoder.layers[0].load_state_dict(drafter.mtp.layers[0].state_dict())
    decoder.norm.load_state_dict(drafter.mtp.norm.state_dict())
    return decoder


def test_the_first_step_is_the_librarys_layer_over_the_joined_rows(family: str) -> None:
    target, drafter = make(family)
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[0]]])
    with torch.no_grad():
        found = drafter.chain.unroll(batch, 1)[0]
        length = len(DOCUMENTS[0]) - 1
        embedded = drafter.embed(batch.tokens[:, 1:], found.dtype)
        block, state = drafter.mtp, drafter.features(None, batch.last_hidden)[:, :-1]
        both = [block.pre_fc_norm_embedding(embedded), block.pre_fc_norm_hidden(state)]
        joined = block.fc(torch.cat(both, -1))
        wanted = of_library(drafter)(inputs_embeds=joined, use_cache=False).last_hidden_state
    torch.testing.assert_close(found[:, :length], wanted, rtol=1e-4, atol=1e-5)


def test_drafts_are_what_training_saw(family: str) -> None:
    target, drafter = make(family)
    check_parity(target, drafter, DOCUMENTS, 4)


def test_a_checkpoint_keeps_the_layers_settings(family: str, tmp_path: Any) -> None:
    target, drafter = make(family)
    save_drafter(drafter, tmp_path, target.info)
    again = load_drafter(tmp_path, target.info, target.weights)
    assert again.config.layer["model_type"] == family
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_training_reaches_every_weight(family: str) -> None:
    target, drafter = make(family)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS, DOCUMENTS[::-1]])
    output = drafter.train().loss(batch)
    output.loss_sum.backward()
    unreached = [
        name
        for name, parameter in drafter.named_parameters()
        if parameter.grad is None or not bool(parameter.grad.any())
    ]
    # which experts are chosen has no gradient where the bias alone decides it
    assert not [name for name in unreached if "e_score_correction_bias" not in name]


def test_optimisers_take_experts_and_routers_for_matrices(family: str) -> None:
    _, drafter = make(family)
    chosen = {id(weight) for weight in matrices(drafter)}
    for name, parameter in drafter.named_parameters():
        assert (id(parameter) in chosen) == (parameter.ndim >= 2), name


def test_optimisers_take_stacked_biases_of_experts_for_vectors() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_local_experts": 2, "head_dim": 8}
    layer = Family.build({"model_type": "gpt_oss", "intermediate_size": 8, **sizes}).layer
    biases = [p for name, p in layer.named_parameters() if ".experts." in name and "bias" in name]
    assert [bias.ndim for bias in biases] == [2, 2] and all(map(holds_vectors, biases))
    assert not {id(bias) for bias in biases} & {id(weight) for weight in matrices(layer)}


@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_experts_under_autocast_are_those_of_bfloat16_weights(family: str) -> None:
    target, drafter = make(family)
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[0]]])
    with torch.autocast("cpu", torch.bfloat16):
        loss = drafter.train().loss(batch).loss_sum
    loss.backward()
    weights = [p for name, p in drafter.named_parameters() if ".experts." in name]
    assert weights and all(bool(p.grad.isfinite().all()) for p in weights)
    with torch.no_grad():
        exact = drafter.loss(batch).loss_sum
    torch.testing.assert_close(loss.float(), exact, rtol=0.03, atol=0.0)


def drafter_of_targets_family(target: TargetModel, dense: int = 1, **options: Any) -> Drafter:
    # without DeepSeek's experts, whose grouped product takes no float64
    layer = one_layer(target.model.config) | {"first_k_dense_replace": dense}
    config = Config(layer=layer, depths=2, **options)
    return new_drafter("native_mtp", config, target.info, target.weights, seed=1).eval()


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("name", ["qwen3_5_text", "deepseek_v3", "exaone4"])
def test_text_with_its_drafts_is_the_plain_text(name: str, shape: str) -> None:
    recurrent = name in RECURRENT_FAMILIES
    target, items = random_target(name, recurrent=recurrent), requests(4, new=10)
    drafter = drafter_of_targets_family(target)
    config = DecodeConfig(batch_size=3, **ALL_SHAPES[shape])
    found = {i: c.tokens for i, c in decode(target, drafter, config, items).items()}
    assert found == plain_texts(items, name, recurrent=recurrent)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "deepseek_v3", "qwen2", "exaone4"])
def test_rotations_are_the_targets_own(name: str) -> None:
    """Partial ones too, where a family's defaults say how much is turned."""
    target = random_target(name, recurrent=name in RECURRENT_FAMILIES)
    drafter = drafter_of_targets_family(target)
    positions = torch.arange(20)[None]
    wanted = target.decoder.rotary_emb(torch.zeros(1), positions)
    found = drafter.mtp.rope.at(positions, torch.float32)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[:, :, 0], other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "layer", "part"),
    [
        ("qwen2", 1, "self_attn.q_proj.bias"),
        ("qwen3_next", 2, "mlp.experts.down_proj"),
        ("deepseek_v3", 1, "mlp.gate.e_score_correction_bias"),
    ],
)
def test_biases_experts_and_routers_of_a_layer_are_copied(name: str, layer: int, part: str) -> None:
    target = random_target(name, recurrent=name in RECURRENT_FAMILIES)
    wanted = target.taps.layers[layer].state_dict()
    wanted[part].normal_(generator=torch.Generator().manual_seed(1))  # begins at zero
    drafter = drafter_of_targets_family(target, dense=0, from_target_layer=layer)
    own = drafter.mtp.layers[0].state_dict()
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(own[name].to(value), value), name


def test_a_layer_of_the_target_is_copied() -> None:
    target = random_target("qwen3_5_text", recurrent=True)
    drafter = drafter_of_targets_family(target, from_target_layer=2)
    own: dict[str, Tensor] = dict(drafter.mtp.layers[0].named_parameters())
    layer = dict(target.taps.layers[2].named_parameters())
    assert own.keys() == layer.keys()
    assert all(torch.equal(own[name].to(value), value) for name, value in layer.items())
    with pytest.raises(UserError, match=r"from_target_layer=1 does not fit"):
        drafter_of_targets_family(target, from_target_layer=1)


def test_both_input_norms_are_like_the_final_norm(family: str) -> None:
    _, drafter = make(family)
    block = drafter.mtp
    norms = (block.pre_fc_norm_embedding, block.pre_fc_norm_hidden, block.norm)
    assert len({id(weight) for norm in norms for weight in norm.parameters()}) == 3
    for norm in norms[:2]:
        assert (type(norm), norm.extra_repr()) == (type(block.norm), block.norm.extra_repr())


def test_its_training_is_planned(tmp_path: Path) -> None:
    """On a target that is described and not loaded."""
    described = TargetConfig(str(save_micro_target(tmp_path / "target")), device="cpu")
    plan = plan_target(described)
    drafter = plan_drafter("native_mtp", Config(depths=2), plan)
    engine = EngineConfig(name="torch", precision="float32")
    assert dry_step(drafter, plan, engine, 1, 32, 0.7).peak > 0
    with torch.device("meta"):
        real = Drafter(Config(depths=2), plan.info)
    assert {name: value.shape for name, value in drafter.state_dict().items()} == {
        name: value.shape for name, value in real.state_dict().items()
    }


def test_what_is_no_layer_is_refused() -> None:
    target = micro_target()

    def build(layer: dict[str, Any]) -> Drafter:
        config = Config(layer=layer)
        return new_drafter("native_mtp", config, target.info, target.weights, seed=0)

    with pytest.raises(UserError, match="settings of the target's layers cannot be read"):
        build({})
    with pytest.raises(UserError, match="does not describe a layer"):
        build({"model_type": "no_such_model"})
    with pytest.raises(UserError, match="hidden size 24"):
        build({"model_type": "qwen3", "hidden_size": 24})
    sinks = build({"model_type": "gpt_oss", "sliding_window": 9, "num_local_experts": 4})
    with pytest.raises(UserError, match="s_aux"):
        check_parity(target, sinks, DOCUMENTS, 4)
    others = [random_target("kimi_linear", recurrent=True), random_target("gemma3_text")]
    for other in (*others, random_target("llama4_text"), random_target("gpt2")):
        with pytest.raises(UserError, match="no rotary positions"):
            build(one_layer(other.model.config) | {"hidden_size": 16})
