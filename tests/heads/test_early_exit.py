"""Early exit: which layers are kept, what the adapter adds, where the loss goes. (What holds for
every kind: test_contract.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.early_exit import Config, Drafter, kept_layers
from heads.nn.target.drafting import SelfDrafter
from inference.parity import check_parity
from tests.heads.explicit import LONG_PAIR
from tests.heads.micro import MicroTarget, micro_target, packed_batch
from tests.models import random_target


def drafter_of(target: MicroTarget, **settings: Any) -> Drafter:
    drafter: Drafter = new_drafter("early_exit", Config(**settings), target.info, target.weights, 0)
    return drafter


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, [0, 1]),
        ({"exit_layer": 4}, [0, 1, 2, 3]),
        ({"layers": (1, 4)}, [1, 4]),
        ({"skip_ratio": 0.45}, [0, 2, 4]),
        ({"skip_ratio": 0.9}, [0, 4]),
        ({"skip_ratio": 0.01}, [0, 1, 2, 3, 4]),
    ],
)
def test_layers_that_are_kept(settings: dict[str, Any], layers: list[int]) -> None:
    assert [item.layer for item in kept_layers(Config(**settings), micro_target().info)] == layers


def test_taps_are_the_inputs_of_what_attends_and_the_exit() -> None:
    target = micro_target()
    assert drafter_of(target, exit_layer=2).needs.taps == (0, 1, 2)
    assert drafter_of(target, layers=(1, 3)).needs.taps == (1, 3)
    assert drafter_of(target, layers=(1, 2, 3), without_attention=(2,)).needs.taps == (1, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"exit_layer": 1},
        {"exit_layer": 4},
        {"layers": (1, 2, 4)},
        {"layers": (0, 2, 3), "without_attention": (2,)},
        {"layers": (0, 2, 3), "without_mlp": (0, 3)},
        {"exit_layer": 3, "adapter": "attention"},
        {"exit_layer": 2, "adapter": "layer"},
    ],
    ids=str,
)
def test_training_computes_what_decoding_computes(settings: dict[str, Any]) -> None:
    target = micro_target()
    report = check_parity(target, drafter_of(target, **settings), LONG_PAIR, depth=4)
    assert report.compared >= 24 and max(report.worst) < 1e-12


@torch.no_grad()
def test_the_tap_at_the_exit_is_what_the_layers_give() -> None:
    """Whole first layers: the short way of training (one tap) equals running the layers along the
    chain."""
    target = micro_target()
    drafter = drafter_of(target, exit_layer=3)
    batch = packed_batch(target, drafter.needs, [[LONG_PAIR[0]]])
    short, long = drafter.train_logits(batch, 3), SelfDrafter.train_logits(drafter, batch, 3)
    for depth, (one, other) in enumerate(zip(short, long, strict=True), 1):
        torch.testing.assert_close(one[:, :-depth], other[:, :-depth])


@torch.no_grad()
def test_left_out_parts_change_the_draft_and_nothing_left_out_does_not() -> None:
    target = micro_target()
    batch = packed_batch(target, drafter_of(target, exit_layer=4).needs, [[LONG_PAIR[0]]])
    drafters = [
        drafter_of(target, **settings)
        for settings in (
            {"exit_layer": 4},
            {"layers": (0, 1, 2, 3)},
            {"layers": (0, 1, 2, 3), "without_mlp": (1,)},
            {"layers": (0, 1, 2, 3), "without_attention": (1,)},
        )
    ]
    found = []
    for drafter in drafters:
        batch = packed_batch(target, drafter.needs, [[LONG_PAIR[0]]])
        found.append(drafter.train_logits(batch, 2)[1])
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2]) and not torch.allclose(found[0], found[3])
    assert not torch.allclose(found[2], found[3])


@pytest.mark.parametrize("settings", [{"exit_layer": 2}, {"layers": (0, 3)}], ids=str)
def test_without_an_adapter_the_loss_flows_into_the_taps(settings: dict[str, Any]) -> None:
    """What a joint finetuning of the target asks of this kind: a loss in the taps, and none in the
    target's distribution."""
    target = micro_target()
    drafter = drafter_of(target, **settings)
    batch = packed_batch(target, drafter.needs, [LONG_PAIR])
    assert batch.taps is not None and batch.last_hidden is not None
    batch.taps.requires_grad_(True)
    batch.last_hidden.requires_grad_(True)
    output = drafter.loss(batch)
    output.loss_sum.backward()
    assert batch.taps.grad is not None and bool(batch.taps.grad.abs().sum() > 0)
    assert batch.last_hidden.grad is None
    if "exit_layer" in settings:
        assert not batch.taps.grad[:, :, :-1].any(), "only the stream at the exit is read"
        logits = target.weights.logits(drafter._normalise(batch.taps[:, :, -1].detach()))
        wanted = batch.supervised(1)
        p = target.weights.logits(batch.last_hidden.detach()).softmax(-1)
        expected = -(p * logits.log_softmax(-1)).sum(-1)[wanted].sum()
        torch.testing.assert_close(output.loss_sum.detach(), expected)


def test_hard_labels_are_the_answers_tokens() -> None:
    target = micro_target()
    drafter = drafter_of(target, exit_layer=2, hard_label_weight=1.0)
    batch = packed_batch(target, drafter.needs, [LONG_PAIR])
    assert batch.taps is not None
    logits = target.weights.logits(drafter._normalise(batch.taps[:, :, -1]))
    wanted = batch.supervised(1)
    labels = batch.tokens.roll(-1, 1)[wanted]
    expected = torch.nn.functional.cross_entropy(logits[wanted], labels, reduction="sum")
    torch.testing.assert_close(drafter.loss(batch).loss_sum, expected)


def test_only_an_adapter_needs_training() -> None:
    assert Drafter.works_untrained(Config()) and Drafter.works_untrained(Config(layers=(0, 1)))
    assert not Drafter.works_untrained(Config(adapter="attention"))
    target = micro_target()
    assert not list(drafter_of(target, exit_layer=2).parameters())
    names = set(drafter_of(target, exit_layer=2, adapter="attention").state_dict())
    assert {name.split(".")[0] for name in names} == {"adapter", "norm"}
    assert not any("mlp" in name for name in names)


def test_a_fresh_adapter_drafts_nearly_like_the_plain_exit() -> None:
    target = micro_target()
    plain, adapted = (
        drafter_of(target, exit_layer=3),
        drafter_of(target, exit_layer=3, adapter="attention"),
    )
    batch = packed_batch(target, adapted.needs, [LONG_PAIR])
    with torch.no_grad():
        one, other = plain.loss(batch).loss_sum, adapted.loss(batch).loss_sum
    assert float((one - other).abs() / one) < 0.1


def test_settings_that_contradict_each_other_say_so() -> None:
    with pytest.raises(
        UserError, match=r"head.exit_layer, head.layers and head.skip_ratio exclude each other"
    ):
        Config(exit_layer=1, skip_ratio=0.5)
    with pytest.raises(UserError, match=r"Did you mean 'attention'"):
        Config(adapter="atention")
    with pytest.raises(UserError, match=r"it has 5 layers, numbered from 0; given \[0, 5\]"):
        drafter_of(micro_target(), layers=(0, 5))
    with pytest.raises(UserError, match=r"would not see its own prefix"):
        drafter_of(micro_target(), layers=(0, 1), without_attention=(0, 1))


def test_an_adapter_copied_from_the_next_layer_continues_the_target() -> None:
    """Exit after 4 of 5 layers into a copy of the fifth: the whole target, so its own
    distribution."""
    target = micro_target()
    drafter = drafter_of(target, exit_layer=4, adapter="layer", adapter_from_target_layer=4)
    batch = packed_batch(target, drafter.needs, [[LONG_PAIR[0]]])
    assert batch.last_hidden is not None
    with torch.no_grad():
        found = drafter.train_logits(batch, 1)[0]
        torch.testing.assert_close(
            found, target.weights.logits(batch.last_hidden).roll(-1, 1), rtol=1e-5, atol=1e-5
        )
        assert torch.equal(
            drafter.adapter.mlp.down_proj.weight,
            target.weights.state["model.layers.4.mlp.down_proj.weight"],
        )


def test_layers_that_an_adapter_cannot_be_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"adapter_from_target_layer=9 does not fit .*llama, 5 layers"
    ):
        drafter_of(micro_target(), exit_layer=2, adapter="attention", adapter_from_target_layer=9)
    target = random_target("qwen3")
    config = Config(exit_layer=1, adapter="attention", adapter_from_target_layer=1)
    with pytest.raises(UserError, match=r"does not fit .*also has .*k_norm"):
        new_drafter("early_exit", config, target.info, target.weights, 0)
    windowed = random_target("mistral")
    with pytest.raises(UserError, match=r"does not fit .* and it sees only the latest 9 positions"):
        new_drafter("early_exit", config, windowed.info, windowed.weights, 0)
    with pytest.raises(UserError, match=r"needs an adapter"):
        Config(adapter_from_target_layer=1)
