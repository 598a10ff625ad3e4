"""EAGLE and HASS: the unrolled layer against HASS's own definition, the losses, noise, names that
engines read."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.eagle import Config, Drafter
from heads.nn import losses
from heads.nn.feature.base import add_noise
from inference.parity import check_parity
from tests.heads.explicit import (
    DOCUMENTS,
    PACKED,
    attend,
    behind_attention,
    check_trees_and_pieces,
    project,
    shake_norms,
)
from tests.heads.micro import MicroTarget, packed_batch

HASS = {"align_steps": 3, "top_k_weight": 0.7, "top_k": 4, "step_decay": 0.9}


def make(target: MicroTarget, **options: object) -> Drafter:
    drafter = new_drafter("eagle", Config(**options), target.info, target.weights, seed=0)
    shake_norms(drafter)
    return drafter.eval()


def harmonised(
    drafter: Drafter, document: list[int], true: Tensor, steps: int
) -> dict[tuple[int, int], Tensor]:
    """The feature drafted at step n for position p, counted as HASS does: at step n, the row at p
    reads the feature of p that is n-1 steps old, and sees the row at s with the feature that is
    n-1-(p-s) steps old, the target's own from 0 on.
    """
    layer, attn = drafter.layers[0], drafter.layers[0].self_attn
    features = {(0, p): true[p] for p in range(len(document))}

    def fused(step: int, position: int) -> Tensor:
        embedded = target_embedding(drafter, document[position + 1])
        return drafter.fc.weight @ torch.cat([embedded, features[step, position]])

    for n in range(1, steps + 1):
        for p in range(n - 1, len(document) - 1):
            rows = [(max(0, n - 1 - (p - s)), s) for s in range(p + 1)]
            seen = [project(attn, fused(age, s), s)[1:] for age, s in rows]
            own = fused(n - 1, p)
            attended = attend(attn, project(attn, own, p)[0], seen)
            features[n, p + 1] = behind_attention(layer, own, attended)
    return {(n, p): value for (n, p), value in features.items() if n > 0}


def target_embedding(drafter: Drafter, token: int) -> Tensor:
    assert drafter.target is not None
    return drafter.target.embedding[token]


def test_unrolled_training_is_the_harmonised_context(target: MicroTarget) -> None:
    drafter = make(target)
    batch = packed_batch(target, drafter.needs, PACKED)
    outputs = drafter.chain.unroll(batch, 3)
    for row, documents in enumerate(PACKED):
        first = 0
        for document in documents:
            true = batch.last_hidden[row, first : first + len(document)]
            for (n, p), expected in harmonised(drafter, document, true, 3).items():
                # Angles are computed in float32.
                torch.testing.assert_close(
                    outputs[n - 1][row, first + p - n], expected, rtol=1e-5, atol=1e-5
                )
            first += len(document)


@pytest.mark.parametrize(
    "options",
    [{}, HASS, {"feature_weight": 0.0}, {"logit_weight": 0.0}],
    ids=["eagle", "hass", "ce", "feature"],
)
def test_loss_equals_the_sum_over_steps_and_positions(target: MicroTarget, options: dict) -> None:
    drafter = make(target, noise=0.0, **options)
    config, batch = drafter.config, packed_batch(target, drafter.needs, PACKED)
    expected, right, count = torch.zeros((), dtype=torch.float64), 0, 0
    for row, documents in enumerate(PACKED):
        first = 0
        for document in documents:
            true = batch.last_hidden[row, first : first + len(document)]
            for (n, p), drafted in harmonised(drafter, document, true, config.align_steps).items():
                if not 2 <= p + 1 < len(document):
                    continue
                gap = (drafted - true[p]).abs()
                distance = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                p_true = target.weights.logits(true[p]).softmax(-1)
                log_q = target.weights.logits(drafted).log_softmax(-1)
                best = p_true.topk(config.top_k).indices
                value = (
                    config.feature_weight * distance - config.logit_weight * (p_true * log_q).sum()
                )
                value -= config.top_k_weight * (p_true[best] * log_q[best]).sum()
                expected += config.step_decay ** (n - 1) * value
                if n == 1:
                    count += 1
                    right += int(log_q.argmax() == p_true.argmax())
            first += len(document)
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert tuple(map(int, output.metrics["accuracy/depth1"])) == (right, count)


def test_top_k_loss_over_the_whole_vocabulary_is_the_soft_cross_entropy() -> None:
    logits, p = torch.randn(2, 5, 11).double(), torch.randn(5, 11).double().softmax(-1)
    expected = -(p * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(losses.top_k_cross_entropy(logits, p, 99), expected)
    assert bool((losses.top_k_cross_entropy(logits, p, 3) < expected).all())


def test_noise_is_bounded_seeded_and_only_in_training(target: MicroTarget) -> None:
    drafter = make(target, noise=0.1)
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[0]], [DOCUMENTS[2]]])
    batch.seeds = torch.tensor([3, 4])
    moved = add_noise(batch.last_hidden, batch, 0.1) - batch.last_hidden
    assert 0.09 < moved.abs().max() <= 0.1 and moved.mean().abs() < 0.02
    assert torch.equal(add_noise(batch.last_hidden, batch, 0.1) - batch.last_hidden, moved)
    assert not torch.equal(moved[0, :5], moved[1, :5])
    quiet = make(target, noise=0.0)
    assert drafter.loss(batch).loss_sum != quiet.loss(batch).loss_sum
    for noisy, plain in zip(
        drafter.train_logits(batch, 2), quiet.train_logits(batch, 2), strict=True
    ):
        assert torch.equal(noisy, plain)


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 4, "intermediate_size": 20}])
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    assert check_parity(target, make(target, **options), DOCUMENTS, depth=3).compared > 12


def test_trees_and_pieces(target: MicroTarget) -> None:
    check_trees_and_pieces(target, make(target))


def test_weights_are_those_that_engines_load(target: MicroTarget) -> None:
    """vLLM and SGLang: no bias, no norm before attention, no final norm, no head."""
    names = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    names |= {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    drafter = make(target)
    assert set(drafter.state_dict()) == names | {
        "fc.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    assert drafter.fc.weight.shape == (16, 32)


def test_layer_starts_from_one_of_the_target(target: MicroTarget) -> None:
    drafter = new_drafter("eagle", Config(from_target_layer=2), target.info, target.weights, seed=0)
    state = target.weights.state
    for name in (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "post_attention_layernorm",
    ):
        weight = drafter.layers[0].get_submodule(name).weight
        assert torch.equal(weight, state[f"model.layers.2.{name}.weight"])
    with pytest.raises(
        UserError, match=r"model.layers.7.self_attn.q_proj.weight of shape \[16, 16\]"
    ):
        new_drafter("eagle", Config(from_target_layer=7), target.info, target.weights, seed=0)


def test_a_layer_that_is_not_llamas_is_not_copied(target: MicroTarget) -> None:
    """Although names and shapes fit: norms of another place, a window, another family."""
    state = dict(target.weights.state)
    state["model.layers.2.post_feedforward_layernorm.weight"] = torch.ones(16)
    normed = replace(target.weights, state=state)
    windowed = replace(target.weights, windows=(0, 0, 6, 0, 0))
    gemma = replace(target.info, model_type="gemma")
    for info, weights, reason in (
        (target.info, normed, "it has model.layers.2.post_f"),
        (target.info, windowed, "the latest 6 positions"),
        (gemma, target.weights, "only layers of llama, "),
    ):
        with pytest.raises(UserError, match=f"computes something else .*{reason}"):
            new_drafter("eagle", Config(from_target_layer=2), info, weights, seed=0)
    new_drafter("eagle", Config(from_target_layer=1), target.info, windowed, seed=0)


def test_the_feature_is_learnt(target: MicroTarget) -> None:
    """With the feature loss alone the drafted features come near the target's, and so do the
    tokens."""
    drafter = make(target, logit_weight=0.0, noise=0.0).train()
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2]])
    optimiser = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        drafter.loss(batch).loss_sum.backward()
        optimiser.step()
    drafted = drafter.chain.unroll(batch, 1)[0][0, 2:11]
    assert (
        F.mse_loss(drafted, batch.last_hidden[0, 3:12]) < 0.05 * batch.last_hidden[0].pow(2).mean()
    )
    correct, count = drafter.loss(batch).metrics["accuracy/depth1"]
    assert correct / count > 0.8


def test_a_fresh_drafter_hears_the_token_as_well_as_the_feature(target: MicroTarget) -> None:
    """Embeddings of real targets are many times smaller than features; without a norm the token
    would go unheard."""
    small = target.weights.embedding * 0.01
    weights = dataclasses.replace(target.weights, embedding=small)
    drafter = new_drafter("eagle", Config(), target.info, weights, seed=0)
    heard = F.linear(small, drafter.fc.weight[:, :16])
    assert 0.5 < heard.pow(2).mean().sqrt() < 2.0
    assert torch.allclose(
        drafter.fc.weight[:, 16:].diagonal().mean(), torch.tensor(1.0).double(), atol=0.1
    )
