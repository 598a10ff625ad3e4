"""New weights taken in place: whole or as updates, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.adapter import Updates
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.session import Session
from inference.target.merged import merge
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import decode, requests
from tests.models import random_model, random_target

PLAIN = DecodeConfig(shape="none")


def texts(target: TargetModel) -> dict[int, list[int]]:
    return {index: done.tokens for index, done in decode(target, None, PLAIN, requests()).items()}


def policy(family: str = "llama", seed: int = 4) -> Any:
    """A model of `random_target`'s configuration with other weights, trainable as a policy is."""
    return random_model(family, seed).double().requires_grad_(True)


def updates(target: TargetModel, names: tuple[str, ...] = ("q_proj", "down_proj")) -> Updates:
    generator = torch.Generator().manual_seed(1)
    layers = {}
    for name, part in target.model.named_modules():
        if name.endswith(names):
            out, into = part.weight.shape
            down, up = (torch.randn(s, generator=generator) for s in ((2, into), (out, 2)))
            layers[name] = (0.3 * down, 0.3 * up)
    return Updates(2, 4.0, layers)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "olmo2"])
@pytest.mark.parametrize("exact", [False, True])
def test_weights_taken_in_place_are_those_of_a_fresh_target(family: str, exact: bool) -> None:
    target, fresh = random_target(family), random_target(family, seed=4)
    config = DecodeConfig(shape="none", exact=exact)
    before = decode(target, None, config, requests())
    target.follow(policy(family))
    found = {i: c.tokens for i, c in decode(target, None, config, requests()).items()}
    wanted = {i: c.tokens for i, c in decode(fresh, None, config, requests()).items()}
    assert found == wanted
    assert found != {i: c.tokens for i, c in before.items()}


def test_packed_weights_follow() -> None:
    """float32 weights of the size that is packed on every CPU."""
    sizes = {"hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 1}
    target = random_target(dtype=torch.float32, **sizes)
    fresh = random_target(dtype=torch.float32, seed=4, **sizes)
    linear, other = (t.model.model.layers[0].mlp.up_proj for t in (target, fresh))
    assert "forward" in vars(linear), "the case needs a packed layer"
    x = torch.randn(5, 768)
    with torch.no_grad():
        linear(x)
        target.follow(fresh.model.state_dict())
        assert torch.equal(linear(x), other(x))


def test_merged_projections_follow() -> None:
    target, fresh = random_target(), random_target(seed=4)
    for layer in target.taps.layers:
        assert merge(layer) == 3
    target.follow(fresh.model)
    assert texts(target) == texts(fresh)


def test_updates_are_merged_weights_and_replace_each_other() -> None:
    target, base = random_target(), random_target()
    given = updates(target)
    merged = given.merged(base.model.state_dict())
    base.model.load_state_dict(merged)
    for _ in range(2):  # the second is added to the base, not to the first
        target.follow(given)
        assert_equal(target.model.state_dict(), merged)
    assert texts(target) == texts(base)


def test_layers_that_are_updated_no_more_go_back() -> None:
    target, whole = random_target(), random_target()
    target.follow(updates(target))
    target.follow(updates(target, ("q_proj",)))
    wanted = updates(whole, ("q_proj",)).merged(whole.model.state_dict())
    assert_equal(target.model.state_dict(), wanted)


def test_updates_behind_a_whole_state_are_of_that_state() -> None:
    target, other = random_target(), random_target(seed=4)
    target.follow(updates(target))
    target.follow(policy())
    target.follow(updates(target))
    assert_equal(target.model.state_dict(), updates(other).merged(other.model.state_dict()))


def test_a_peft_model_is_followed_by_its_updates() -> None:
    peft = pytest.importorskip("peft")
    target = random_target(dtype=torch.float32)
    model = random_model("llama", 3).float()
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    target.follow(model)
    merged = model.merge_and_unload().state_dict()
    assert_equal(target.model.state_dict(), merged)


def test_what_is_written_later_says_that_the_weights_are_others() -> None:
    target = random_target()
    loaded = target.info.revision
    target.follow(policy())
    target.follow(policy())
    assert (target.version, target.info.revision) == (2, f"{loaded}+2")


def without(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: without(state, NORM), f"{NORM}: missing"),
        (lambda state: {**state, "model.extra": torch.zeros(1)}, "model.extra: unknown"),
        (lambda state: {**state, DOWN: state[DOWN][:5]}, "of another shape"),
        (lambda state: {**state, DOWN: state[DOWN] * float("nan")}, "not finite"),
        (lambda state: {"q_proj.lora_A.weight": torch.zeros(2, 2)}, "without their scale"),
        (
            lambda state: Updates(1, 1.0, {"model.none": (torch.zeros(1, 2), torch.zeros(2, 1))}),
            "there is none",
        ),
    ],
)
def test_what_does_not_fit_is_refused_whole(change: Any, said: str) -> None:
    target = random_target()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    with pytest.raises(UserError, match=said):
        target.follow(change(policy().state_dict()))
    assert_equal(target.model.state_dict(), before)
    assert target.version == 0


def test_updates_that_are_not_finite_are_refused() -> None:
    target = random_target()
    given = updates(target)
    next(iter(given.layers.values()))[0][0, 0] = float("inf")
    with pytest.raises(UserError, match="not finite"):
        target.follow(given)
    assert_equal(target.model.state_dict(), random_target().model.state_dict())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Updates(2, 4.0, {"q": (torch.zeros(2, 24), torch.zeros(24, 3))}), "A is .r, in."),
        (Updates(2, 4.0, {"q": (torch.zeros(0), torch.zeros(0))}), "gathered first"),
        (Updates(0, 4.0, {"q": (torch.zeros(2, 24), torch.zeros(24, 2))}), "rank of 1 or more"),
        (Updates(2, float("nan"), {"q": (torch.zeros(2, 24), torch.zeros(24, 2))}), "finite alpha"),
        (Updates(2, 1e308, {"q": (torch.ones(2, 24), torch.ones(24, 2))}), "not finite"),
    ],
)
def test_updates_that_cannot_be_added_are_refused_before_one_is(given: Updates, said: str) -> None:
    """Behind a layer that could be."""
    target = random_target()
    good = updates(target, ("q_proj",))
    layer = "model.layers.1.self_attn.o_proj"
    rows, columns = target.model.state_dict()[f"{layer}.weight"].shape
    down, up = given.layers["q"]
    if down.ndim == 2 and down.shape[0] == up.shape[1]:
        down, up = torch.full((2, columns), float(down.sum())), torch.ones(rows, 2)
    layers = {**good.layers, layer: (down, up)}
    with pytest.raises(UserError, match=said):
        target.follow(Updates(given.rank, given.alpha, layers))
    assert_equal(target.model.state_dict(), random_target().model.state_dict())
    assert target.version == 0


def test_an_update_of_a_tied_head_is_refused() -> None:
    target = random_target(tie_word_embeddings=True)
    rows, columns = target.weights.lm_head.shape
    given = Updates(1, 1.0, {"lm_head": (torch.ones(1, columns), torch.ones(rows, 1))})
    before = target.weights.lm_head.clone()
    with pytest.raises(UserError, match="would change both"):
        target.follow(given)
    assert torch.equal(target.weights.lm_head, before)


def test_of_two_adapters_the_active_one_is_followed() -> None:
    """As TRL makes them: a second one is the reference."""
    peft = pytest.importorskip("peft")
    target = random_target(dtype=torch.float32)
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"])
    model = peft.get_peft_model(random_model("llama", 3).float(), settings)
    model.add_adapter("ref", settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    target.follow(model)
    merged = model.merge_and_unload(adapter_names=["default"]).state_dict()
    assert_equal(target.model.state_dict(), merged)


@pytest.mark.parametrize(
    "setting",
    [
        *({"use_rslora": True}, {"bias": "all"}, {"trainable_token_indices": [1, 2]}),
        *({"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}),
    ],
)
def test_other_adapters_than_plain_lora_are_refused_by_name(setting: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], **setting)
    model = peft.get_peft_model(random_model("llama", 3).float(), settings)
    with pytest.raises(UserError, match="plain LoRA"):
        random_target().follow(model)


def test_tied_weights_need_one_name_and_refuse_two_values() -> None:
    target = random_target(tie_word_embeddings=True)
    state = random_model("llama", 4, tie_word_embeddings=True).double().state_dict()
    target.follow(without(state, "lm_head.weight"))
    assert torch.equal(target.weights.lm_head, state["lm_head.weight"])
    with pytest.raises(UserError, match="one weight in this target"):
        target.follow({**state, "lm_head.weight": state["lm_head.weight"] + 1})


def test_a_quantised_target_is_refused() -> None:
    target = random_target()
    target.model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match="quantised"):
        target.follow(policy())


def test_weights_do_not_change_under_a_run() -> None:
    target = random_target()
    engine, other = Engine(target, None, PLAIN), Engine(target, None, PLAIN)
    run = engine.run(requests(), yield_steps=True)
    next(run)
    with pytest.raises(UserError, match="while requests run"):
        engine.follow(policy())
    other.follow(policy())  # knows nothing of that run
    with pytest.raises(UserError, match="while requests run"):
        next(run)


def test_weights_do_not_change_under_a_sessions_requests() -> None:
    target = random_target()
    engine, version = Engine(target, None, PLAIN), target.version
    with Session(engine, 60) as session:
        session.add(requests()[0])
        session.step()
        with pytest.raises(UserError, match="while requests run"):
            engine.follow(policy())
        assert target.version == version
        session.cancel(requests()[0].index)
        while session.unfinished:
            session.step()
        engine.follow(policy())


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name
