"""The distilled drafter: its network is a Hugging Face Llama, its objectives, drafting against
training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.distilled import Config, Drafter
from heads.nn import losses
from inference.parity import check_parity
from tests.heads.explicit import (
    CHOICES,
    DOCUMENTS,
    check_chunks_change_nothing,
    check_paths_of_a_tree,
    check_refilled_row,
)
from tests.heads.micro import MicroTarget, packed_batch

VARIANTS = [
    {},
    {"num_layers": 1, "hidden_size": 24, "num_key_value_heads": 3, "tie_embeddings": True},
    {"share_embeddings": True, "num_layers": 3},
    {"from_target_layers": (0, 2, 4)},
]


def make(target: MicroTarget, **options: object) -> Drafter:
    return new_drafter("distilled", Config(**options), target.info, target.weights, seed=0).eval()


@pytest.mark.parametrize("options", VARIANTS)
@torch.no_grad()
def test_network_is_a_hugging_face_llama(target: MicroTarget, options: dict) -> None:
    """The drafter's own weights, under their own names, in transformers' model: same logits."""
    drafter = make(target, **options)
    shape = drafter.shape
    config = LlamaConfig(
        vocab_size=target.info.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=len(drafter.model.layers),
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=drafter.config.tie_embeddings,
    )
    model = LlamaForCausalLM(config).double().eval()
    state = drafter.state_dict()
    if drafter.config.share_embeddings:
        state |= {
            "model.embed_tokens.weight": target.weights.embedding,
            "lm_head.weight": target.weights.lm_head,
        }
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= (
        {"lm_head.weight"} if drafter.config.tie_embeddings else set()
    )
    model.tie_weights()
    logits = drafter.train_logits(packed_batch(target, drafter.needs, [DOCUMENTS[:1]]), 1)[0]
    expected = model(torch.tensor(DOCUMENTS[:1])).logits
    # its norms are float32
    torch.testing.assert_close(logits[0, :-1], expected[0, 1:], rtol=1e-3, atol=1e-5)


def test_all_layers_of_the_target_are_the_target(target: MicroTarget) -> None:
    drafter = make(target, from_target_layers=(0, 1, 2, 3, 4))
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:1]])
    expected = target.weights.logits(batch.last_hidden)
    torch.testing.assert_close(
        drafter.train_logits(batch, 1)[0][0, :-1], expected[0, 1:], rtol=1e-3, atol=1e-5
    )
    output = drafter.loss(batch)
    assert abs(float(output.loss_sum)) < 1e-9
    assert output.metrics["accuracy/depth1"][0] == output.metrics["accuracy/depth1"][1] == 11


@pytest.mark.parametrize("options", VARIANTS)
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    assert check_parity(target, make(target, **options), DOCUMENTS, depth=3).compared > 12


MIXES = [
    {"forward_kl": 0.0, "reverse_kl": 1.0},
    {"forward_kl": 0.5, "jsd": 2.0, "jsd_beta": 0.3},
    {"forward_kl": 0.0, "tv": 1.0, "ce": 0.25, "temperature": 2.0},
    {"forward_kl": 0.0, "ce": 1.0},
    {"forward_kl": 0.0, "lk": 1.0},
    {"forward_kl": 0.0, "lk_annealed": 2.0, "lk_eta": 1.5},
]


def mean_rates(target: MicroTarget, drafter: Drafter) -> list[Tensor]:
    """Per document the mean acceptance rate of its row: the first two are packed into one."""
    rates = []
    for document in DOCUMENTS:
        alone = packed_batch(target, replace(drafter.needs, last_hidden=True), [[document]])
        q = drafter.logits(drafter.sequence(alone)[0, 1:-1]).softmax(-1)
        p = target.weights.logits(alone.last_hidden[0, 1:-1]).softmax(-1)
        rates.append(torch.minimum(p, q).sum(-1).detach())
    first = torch.cat(rates[:2]).mean()
    return [first, first, rates[2].mean()]


@pytest.mark.parametrize("options", MIXES)
def test_loss_is_the_mix_summed_over_supervised_positions(
    target: MicroTarget, options: dict
) -> None:
    drafter = make(target, **options)
    config = drafter.config
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    expected, right, count = torch.zeros((), dtype=torch.float64), 0, 0
    rates = mean_rates(target, drafter)
    for number, document in enumerate(DOCUMENTS):
        alone = packed_batch(target, replace(drafter.needs, last_hidden=True), [[document]])
        states = drafter.sequence(alone)[0]
        for t in range(1, len(document) - 1):
            raw, teacher = drafter.logits(states[t]), target.weights.logits(alone.last_hidden[0, t])
            q, p = (
                (raw / config.temperature).softmax(-1),
                (teacher / config.temperature).softmax(-1),
            )
            m = config.jsd_beta * p + (1 - config.jsd_beta) * q
            expected += (
                config.forward_kl * (p * (p / q).log()).sum()
                + config.reverse_kl * (q * (q / p).log()).sum()
            )
            expected += config.jsd * config.jsd_beta * (p * (p / m).log()).sum()
            expected += config.jsd * (1 - config.jsd_beta) * (q * (q / m).log()).sum()
            rate, weight = torch.minimum(p, q).sum(), (-config.lk_eta * rates[number]).exp()
            expected += config.tv * (1 - rate) - config.lk * rate.log()
            expected += config.lk_annealed * (
                weight * (p * (p / q).log()).sum() + (1 - weight) * (1 - rate)
            )
            expected -= config.ce * raw.log_softmax(-1)[document[t + 1]]
            best = teacher.argmax() if config.soft else document[t + 1]
            right, count = right + int(raw.argmax() == best), count + 1
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert tuple(map(int, output.metrics["accuracy/depth1"])) == (right, count)


def test_chunked_loss_has_the_same_value_and_gradients(
    target: MicroTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(target, reverse_kl=0.5, lk_annealed=0.5)
    check_chunks_change_nothing(target, drafter, losses, (1 << 25, 41 * 4), monkeypatch)


def test_each_path_of_a_tree_equals_its_chain(target: MicroTarget) -> None:
    drafter = make(target)
    check_paths_of_a_tree(target, drafter, CHOICES, torch.arange(41))


def test_refilled_row_equals_a_fresh_one(target: MicroTarget) -> None:
    check_refilled_row(target, make(target))


def test_other_architectures_are_not_copied(target: MicroTarget) -> None:
    state = dict(target.weights.state)
    state["model.layers.1.self_attn.q_norm.weight"] = torch.ones(4)
    with pytest.raises(UserError, match="q_norm"):
        new_drafter(
            "distilled",
            Config(from_target_layers=(1,)),
            target.info,
            replace(target.weights, state=state),
            seed=0,
        )
    with pytest.raises(UserError, match=r"layers \[7\]"):
        make(target, from_target_layers=(7,))


def test_settings_that_make_no_sense_are_refused(target: MicroTarget) -> None:
    with pytest.raises(UserError, match="needs an objective"):
        Config(forward_kl=0.0)
    with pytest.raises(UserError, match="exclude each other"):
        Config(share_embeddings=True, tie_embeddings=True)
    with pytest.raises(UserError, match="hidden_size 16; given 32"):
        make(target, share_embeddings=True, hidden_size=32)


def test_drafter_learns_its_target(target: MicroTarget) -> None:
    drafter = make(target, share_embeddings=True)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    optimiser = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(80):
        optimiser.zero_grad()
        output = drafter.loss(batch)
        output.loss_sum.backward()
        optimiser.step()
    correct, count = output.metrics["accuracy/depth1"]
    assert correct / count > 0.9
    assert all(value.grad is None for value in (target.weights.lm_head, target.weights.embedding))


# Token selection


def selective(
    target: MicroTarget, folder: Path, share: float, **options: object
) -> tuple[Drafter, Drafter]:
    """A drafter that is trained on a share of the tokens, and its reference."""
    reference = make(target, from_target_layers=(0, 2, 3))
    save_drafter(reference, folder, target.info)
    return make(target, token_share=share, reference=str(folder), **options), reference


@pytest.mark.parametrize("share", [0.4, 0.01, 0.99])
def test_tokens_furthest_behind_the_reference_are_trained_on(
    target: MicroTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """AdaSPEC's selection, document by document, against a plain sort; in one piece and in
    chunks."""
    drafter, reference = selective(target, tmp_path, share)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    expected, kept = torch.zeros((), dtype=torch.float64), 0
    for document in DOCUMENTS:
        alone = packed_batch(target, drafter.needs, [[document]])
        wanted = target.weights.logits(alone.last_hidden[0, 1:-1])
        mine, theirs = (
            losses.forward_kl(model.logits(model.sequence(alone)[0, 1:-1]), wanted)
            for model in (drafter, reference)
        )
        best = (mine - theirs).argsort(descending=True)[: math.ceil(share * wanted.shape[0])]
        expected, kept = expected + mine[best].sum(), kept + len(best)
    for limit in (1 << 25, 41 * 4):
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", limit)
        output = drafter.loss(batch)
        torch.testing.assert_close(output.loss_sum, expected)
        assert int(output.metrics["accuracy/depth1"][1]) == kept


def test_the_reference_is_no_part_of_the_drafter(target: MicroTarget, tmp_path: Path) -> None:
    drafter, _ = selective(target, tmp_path / "reference", 0.5)
    drafter.loss(packed_batch(target, drafter.needs, [DOCUMENTS])).loss_sum.backward()
    assert not any("reference" in name for name in drafter.state_dict())
    assert not any(p.requires_grad for p in drafter._reference[0].parameters())
    save_drafter(drafter, tmp_path / "drafter", target.info)
    (tmp_path / "reference" / "model.safetensors").unlink()
    load_drafter(tmp_path / "drafter", target.info, target.weights)  # who drafts needs no reference
    fresh, _ = selective(target, tmp_path / "other", 0.5)
    assert (
        float(fresh.loss(packed_batch(target, fresh.needs, [DOCUMENTS], prompt=99)).loss_sum) == 0.0
    )


def test_selection_needs_a_reference() -> None:
    for options in ({"token_share": 0.5}, {"reference": "x"}):
        with pytest.raises(UserError, match="belong together"):
            Config(**options)
    with pytest.raises(UserError, match="above 0 and at most 1"):
        Config(token_share=0.0, reference="x")
    with pytest.raises(UserError, match="lk_annealed"):
        Config(token_share=0.5, reference="x", lk_annealed=1.0)
