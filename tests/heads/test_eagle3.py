"""EAGLE-3: training-time test against an explicit loop, drafting against training, the reduced
vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from heads.api.tree import TokenTree
from heads.eagle3 import Config, Drafter
from heads.nn import attention
from heads.nn.blocks import Attention
from heads.nn.feature.parallel import AnchoredRows
from inference.parity import check_parity
from tests.heads.explicit import (
    CHOICES,
    DOCUMENTS,
    Rows,
    attend,
    behind_attention,
    check_chunks_change_nothing,
    check_paths_of_a_tree,
    check_refilled_row,
    column_of,
    judged,
    project,
    rms,
)
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states
from tests.models import random_target

VARIANTS = [
    {},
    {"tap_norm": False, "post_norm_recurrence": False},
    {"draft_vocab_size": 26},
    {"num_key_value_heads": 4, "taps": (0, 5), "hard_label_weight": 0.25},
    {"draft_vocab_size": 26, "hard_label_weight": 0.5, "tv": 3.0, "lk": 0.7},
    {"draft_vocab_size": 26, "feature_weight": 2.0},
]


def make(target: MicroTarget, **options: object) -> Drafter:
    """A drafter with non-trivial norms and, if reduced, the vocabulary 0, 2, 4, ... plus some."""
    counts = torch.arange(target.info.vocab_size).flip(0) + 100 * (
        torch.arange(target.info.vocab_size) % 3 == 0
    )
    config = Config(**{"ttt_steps": 3, "decay": 0.8, **options})
    drafter = new_drafter(
        "eagle3", config, target.info, target.weights, seed=0, token_counts=counts
    )
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    return drafter.eval()


def explicit_outputs(
    drafter: Drafter, document: list[int], taps: Tensor, steps: int
) -> dict[tuple[int, int], Tensor]:
    """Normalised output of step k (1-based) at row t, one row and one head at a time, along the
    document's own tokens.
    """
    layer, attn = drafter.midlayer, drafter.midlayer.self_attn
    context: Rows = []
    found = {}
    for t in range(len(document) - 1):
        parts = [taps[t, i] for i in range(taps.shape[1])]
        if drafter.fc_norm:
            parts = [
                rms(norm.weight, part) for norm, part in zip(drafter.fc_norm, parts, strict=True)
            ]
        feature = drafter.fc.weight @ torch.cat(parts)
        seen = list(context)
        for k in range(1, steps + 1):
            if t + k >= len(document):
                break
            embedded = rms(layer.input_layernorm.weight, drafter.target.embedding[document[t + k]])
            x = torch.cat([embedded, rms(layer.hidden_norm.weight, feature)])
            query, key, value = project(attn, x, t + k - 1)
            seen.append((key, value))
            if k == 1:
                context.append((key, value))
            output = behind_attention(layer, feature, attend(attn, query, seen))
            found[(k, t)] = rms(drafter.norm.weight, output)
            feature = found[(k, t)] if drafter.config.post_norm_recurrence else output
    return found


@pytest.mark.parametrize("options", VARIANTS)
def test_unrolled_training_equals_the_explicit_loop(target: MicroTarget, options: dict) -> None:
    drafter = make(target, **options)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    outputs = drafter.chain.unroll(batch, 3)
    for row, documents in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        first = 0
        for document in documents:
            span = slice(first, first + len(document))
            for (k, t), expected in explicit_outputs(
                drafter, document, batch.taps[row, span], 3
            ).items():
                torch.testing.assert_close(outputs[k - 1][row, first + t], expected)
            first += len(document)


def test_attention_in_recomputed_chunks_changes_nothing(
    target: MicroTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(target, train_lm_head=True)
    check_chunks_change_nothing(target, drafter, attention, (1 << 26, 400), monkeypatch)


@pytest.mark.parametrize("options", VARIANTS)
def test_loss_equals_the_sum_over_steps_and_positions(target: MicroTarget, options: dict) -> None:
    drafter = make(target, **options)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    ids = (
        drafter.d2t + torch.arange(26) if drafter.reduced else torch.arange(target.info.vocab_size)
    )
    expected, right, count = torch.zeros((), dtype=torch.float64), [0] * 3, [0] * 3
    for row, documents in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        first = 0
        for document in documents:
            taps = batch.taps[row, first : first + len(document)]
            for (k, t), output in explicit_outputs(drafter, document, taps, 3).items():
                if not 2 <= t + k + 1 < len(document):
                    continue
                state = batch.last_hidden[row, first + t + k]
                teacher = target.weights.logits(state)
                log_q = (drafter.lm_head.weight @ output).log_softmax(-1)
                count[k - 1] += 1
                right[k - 1] += int(ids[log_q.argmax()] == teacher.argmax())
                if teacher.argmax() in ids:
                    column = column_of(ids, document[t + k + 1])
                    value = judged(drafter.config, teacher[ids], log_q, column, output, state)
                    expected += 0.8 ** (k - 1) * value
            first += len(document)
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    for k in (1, 2, 3):
        assert tuple(map(int, output.metrics[f"accuracy/depth{k}"])) == (right[k - 1], count[k - 1])


@pytest.mark.parametrize("options", VARIANTS)
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    assert check_parity(target, make(target, **options), DOCUMENTS, depth=3).compared > 12


def restricted_loss(
    target: MicroTarget, drafter: Drafter, batch: TrainBatch, anchors: AnchoredRows
) -> tuple[Tensor, list[float], list[float]]:
    """The loss of the full unrolling, its steps behind the first at `anchors` alone, each as often
    as it stands for; by step, the number of predictions and of right ones."""
    steps, total = drafter.config.ttt_steps, torch.zeros((), dtype=torch.float64)
    outputs = drafter.chain.unroll(batch, steps)
    everywhere = torch.ones(batch.tokens.shape, dtype=torch.float64)
    behind = torch.zeros_like(everywhere)
    for row in range(len(behind)):
        for t, valid, share in zip(
            anchors.order[row], anchors.kept[0][row], anchors.share[row], strict=True
        ):
            if valid:
                behind[row, t] = share
    ids = drafter.d2t + torch.arange(26) if drafter.reduced else torch.arange(41)
    counts, right = [], []
    for k in range(1, steps + 1):
        share = (everywhere if k == 1 else behind) * batch.supervised(k + 1)
        counts.append(float(share.sum()))
        right.append(0.0)
        for row, t in share.nonzero().tolist():
            output, state = outputs[k - 1][row, t], batch.last_hidden[row, t + k]
            teacher = target.weights.logits(state)
            log_q = (drafter.lm_head.weight @ output).log_softmax(-1)
            weight = share[row, t]
            right[-1] += float(weight) * float(ids[log_q.argmax()] == teacher.argmax())
            if teacher.argmax() not in ids:
                continue
            if batch.weights is not None:
                weight = weight * batch.weights[row, t + k + 1] * batch.anchors[row, t + 1]
            column = column_of(ids, int(batch.tokens[row, t + k + 1]))
            value = judged(drafter.config, teacher[ids], log_q, column, output, state)
            total = total + 0.8 ** (k - 1) * weight * value
    return total, counts, right


def weighed(batch: TrainBatch) -> TrainBatch:
    """The batch with weights of tokens and of drafts, some of which are 0."""
    generator = torch.Generator().manual_seed(4)
    batch.weights = 0.5 + torch.rand(batch.tokens.shape, generator=generator)
    batch.anchors = (2 * torch.rand(batch.tokens.shape, generator=generator) - 0.3).clamp(min=0)
    return batch


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("weights", [False, True])
def test_the_loss_behind_anchors_is_the_full_unrollings_restricted_to_them(
    target: MicroTarget, options: dict, weights: bool
) -> None:
    """In value, gradients and metrics, for two rows, one of them of two documents."""
    drafter = make(target, num_anchors=4, train_lm_head=True, **options)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    batch.seeds = torch.tensor([5, 6])
    if weights:
        batch = weighed(batch)
    anchors = AnchoredRows.sampled(batch, 3, 4)
    assert 4 <= int(anchors.kept[0].sum()) <= 8
    expected, counts, right = restricted_loss(target, drafter, batch, anchors)
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    for k in (1, 2, 3):
        found = [float(value) for value in output.metrics[f"accuracy/depth{k}"]]
        assert found == pytest.approx([right[k - 1], counts[k - 1]])
    parameters = [each for each in drafter.parameters() if each.requires_grad]
    found = torch.autograd.grad(output.loss_sum, parameters)
    slow = torch.autograd.grad(expected, parameters)  # weights of steps are float32 in `loss`
    torch.testing.assert_close(found, slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [False, True])
def test_few_anchors_estimate_the_loss_and_the_counts_of_all(
    target: MicroTarget, weights: bool
) -> None:
    drafter = make(target)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    if weights:
        batch = weighed(batch)
        batch.anchors = batch.anchors.clamp(min=0.2)  # what weighs nothing is never counted
    whole, found = drafter.loss(batch), []
    drafter.config = replace(drafter.config, num_anchors=3)
    for seed in range(300):
        batch.seeds = torch.tensor([seed, seed + 1000])
        found.append(drafter.loss(batch))
    sums = torch.stack([output.loss_sum.detach() for output in found])
    assert float(sums.mean()) == pytest.approx(whole.loss_sum.item(), rel=0.02)
    assert float(sums.max()) > 1.02 * whole.loss_sum.item()
    for k in (1, 2, 3):
        counts = [float(output.metrics[f"loss/depth{k}"][1]) for output in found]
        expected = float(whole.metrics[f"loss/depth{k}"][1])
        assert sum(counts) / len(counts) == pytest.approx(expected, rel=0.04)


def test_enough_anchors_are_all_of_them_and_one_step_needs_none(target: MicroTarget) -> None:
    for steps in (1, 3):
        drafter = make(target, ttt_steps=steps)
        batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
        whole = drafter.loss(batch)
        drafter.config = replace(drafter.config, num_anchors=20 if steps == 3 else 1)
        found = drafter.loss(batch)
        torch.testing.assert_close(found.loss_sum, whole.loss_sum)
        for name, pair in whole.metrics.items():
            assert [float(each) for each in found.metrics[name]] == pytest.approx(
                [float(each) for each in pair]
            )


def test_anchors_follow_from_the_rows_seed_and_save_rows(target: MicroTarget) -> None:
    drafter = make(target, num_anchors=2, ttt_steps=4)
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[0]], [DOCUMENTS[2]]])
    rows: list[int] = []
    drafter.midlayer.mlp.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[1]))
    sums = []
    for seeds in ([1, 2], [1, 2], [3, 2]):
        batch.seeds = torch.tensor(seeds)
        torch.rand(3)
        sums.append(drafter.loss(batch).loss_sum.detach())
    assert rows == [13, 2, 2, 2] * 3
    assert torch.equal(sums[0], sums[1]) and not torch.equal(sums[0], sums[2])
    parts = []
    for row in (0, 1):
        alone = packed_batch(target, drafter.needs, [[DOCUMENTS[0]], [DOCUMENTS[2]]])
        alone.loss_mask[1 - row] = False
        alone.seeds = torch.tensor([1, 2])
        parts.append(drafter.loss(alone).loss_sum.detach())
    torch.testing.assert_close(parts[0] + parts[1], sums[0])


def test_packed_neighbours_do_not_leak(target: MicroTarget) -> None:
    drafter = make(target)
    alone = drafter.loss(
        packed_batch(target, drafter.needs, [[DOCUMENTS[0]], [DOCUMENTS[2]]])
    ).loss_sum
    packed = drafter.loss(
        packed_batch(target, drafter.needs, [[DOCUMENTS[0], DOCUMENTS[2]]])
    ).loss_sum
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 26}])
def test_each_path_of_a_tree_equals_its_chain(target: MicroTarget, options: dict) -> None:
    drafter = make(target, **options)
    ids = (
        drafter.d2t + torch.arange(26) if drafter.reduced else torch.arange(target.info.vocab_size)
    )
    check_paths_of_a_tree(target, drafter, CHOICES, ids)


def test_refilled_row_equals_a_fresh_one(target: MicroTarget) -> None:
    check_refilled_row(target, make(target), draft_between=True)


@torch.no_grad()
def test_reduced_vocabulary_is_kept_with_the_weights(target: MicroTarget, tmp_path) -> None:
    drafter = make(target, draft_vocab_size=26)
    frequent = [*range(0, 41, 3), 1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17]
    assert (drafter.d2t + torch.arange(26)).tolist() == sorted(frequent)
    assert drafter.t2d.nonzero().squeeze(1).tolist() == sorted(frequent)
    assert drafter.lm_head.weight.shape == (26, 16)
    save_drafter(drafter, tmp_path, target.info)
    loaded = load_drafter(tmp_path, target.info, target.weights)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:1], [(0, 9)])
    drafts = [
        d.propose(d.start(seen, TokenTree.chain(4), 32), PlainNoise()).tokens
        for d in (drafter, loaded)
    ]
    assert drafts[0].tolist() == drafts[1].tolist()
    assert set(drafts[0][0, 1:].tolist()) <= set(frequent)


def test_reduced_vocabulary_must_be_chosen_first(target: MicroTarget) -> None:
    with pytest.raises(UserError, match="draft vocabulary was not chosen"):
        new_drafter("eagle3", Config(draft_vocab_size=8), target.info, target.weights, seed=0)


def test_layer_starts_from_one_of_the_target(target: MicroTarget) -> None:
    config = Config(from_target_layer=1)
    drafter = new_drafter("eagle3", config, target.info, target.weights, seed=0)
    state, attn = target.weights.state, drafter.midlayer.self_attn
    assert torch.equal(attn.k_proj.weight[:, 16:], state["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(
        drafter.midlayer.mlp.down_proj.weight, state["model.layers.1.mlp.down_proj.weight"]
    )
    with pytest.raises(
        UserError, match=r"model.layers.7.self_attn.q_proj.weight of shape \[16, 16\]"
    ):
        new_drafter("eagle3", Config(from_target_layer=7), target.info, target.weights, seed=0)
    config = Config(from_target_layer=1, intermediate_size=20)
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight of shape \[20, 16\]"):
        new_drafter("eagle3", config, target.info, target.weights, seed=0)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_heads_of_a_copied_layer_have_the_targets_sizes(kind: str) -> None:
    """The target's norms of queries and keys: in a drafter without these, and copied."""
    target = random_target("qwen3", dtype=torch.float32)
    norms = [target.weights.state[f"model.layers.1.self_attn.{name}_norm.weight"] for name in "qk"]
    for norm in norms:
        norm.fill_(4.0)

    def attention(**settings: Any) -> Attention:
        config = get_kind(kind).config_class(from_target_layer=1, **settings)
        drafter = new_drafter(kind, config, target.info, target.weights, seed=0)
        return next(part for part in drafter.modules() if isinstance(part, Attention))

    hidden, found = target.info.hidden_size, attention()
    states = F.normalize(torch.randn(200, hidden, generator=torch.Generator().manual_seed(1)))
    for projection in (found.q_proj, found.k_proj):
        heads = states * hidden**0.5 @ projection.weight[:, -hidden:].T
        assert float(heads.square().mean().sqrt()) == pytest.approx(4.0, rel=0.1)
    if kind == "eagle3":
        copied = attention(qk_norm=True)
        assert torch.equal(copied.q_norm.weight, norms[0])
        assert torch.equal(copied.k_norm.weight, norms[1])


def test_the_last_tap_is_the_state_before_the_final_norm(target: MicroTarget) -> None:
    batch = packed_batch(target, FeatureSpec((5,), last_hidden=True), [[[5, 9, 3, 22]]])
    torch.testing.assert_close(target.model.model.norm(batch.taps[:, :, 0]), batch.last_hidden)


def test_taps_that_do_not_exist_are_refused(target: MicroTarget) -> None:
    with pytest.raises(UserError, match=r"taps \[9\] do not exist"):
        Drafter(Config(taps=(1, 9)), target.info)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_fresh_row_looks_at_the_others_as_at_itself(kind: str, target: MicroTarget) -> None:
    """Queries that start as keys keep nearly all attention on the own row, and learn from no other
    for hundreds of steps."""
    config = get_kind(kind).config_class()
    drafter = new_drafter(kind, config, target.info, target.weights, 0)
    attn = next(part for part in drafter.modules() if isinstance(part, Attention))
    rows = torch.randn(64, attn.q_proj.in_features, generator=torch.Generator().manual_seed(0))

    def own(queries: Tensor) -> float:
        """The own row's attention, as a multiple of an equal share, on average."""
        keys = attn.k_proj(rows.to(queries.dtype)).unflatten(-1, (-1, attn.head_dim))
        groups = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("thd,shd->hts", queries, keys.repeat_interleave(groups, 1))
        future = torch.ones(64, 64, dtype=torch.bool).triu(1)
        shares = (scores * attn.head_dim**-0.5).masked_fill(future, float("-inf")).softmax(-1)
        return float((shares.diagonal(dim1=1, dim2=2) * torch.arange(1, 65)).mean())

    with torch.no_grad():
        states = rows.to(attn.q_proj.weight.dtype)
        queries = attn.q_proj(states).unflatten(-1, (-1, attn.head_dim))
        keys = attn.k_proj(states).unflatten(-1, (-1, attn.head_dim))
        assert own(queries) < 2.0 < 4.0 < own(keys)
    assert not drafter.lm_head.weight.requires_grad


def test_drafter_learns_a_repeating_text(target: MicroTarget) -> None:
    drafter = make(target, ttt_steps=2, hard_label_weight=1.0)
    batch = packed_batch(target, drafter.needs, [[[3, 14, 15, 9, 26, 5, 35] * 4]])
    batch.target_logits = lambda hidden: F.one_hot(
        batch.tokens[0].roll(-1)[: hidden.shape[0] + 1][-hidden.shape[0] :], 41
    ).double()
    optimiser = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    first = None
    for _ in range(60):
        optimiser.zero_grad()
        loss = drafter.loss(batch).loss_sum
        loss.backward()
        optimiser.step()
        first = first or loss.item()
    assert loss.item() < 0.05 * first
    assert all(value.grad is None for value in (target.weights.lm_head, target.weights.embedding))
