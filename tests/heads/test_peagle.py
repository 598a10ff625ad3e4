"""P-EAGLE: all depths in one pass against rows computed one at a time, dropped anchors, one pass in
drafting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.tree import DynamicShape, TokenTree
from heads.nn import attention
from heads.nn.blocks import FusingLayer
from heads.nn.feature.parallel import AnchoredRows
from heads.peagle import Config, Drafter
from inference.parity import check_parity
from tests.heads.explicit import (
    DOCUMENTS,
    PACKED,
    Rows,
    attend,
    behind_attention,
    check_chunks_change_nothing,
    check_trees_and_pieces,
    column_of,
    judged,
    project,
    rms,
    shake_norms,
)
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states

VARIANTS = [{}, {"num_layers": 3, "tap_norm": False}, {"num_layers": 1, "draft_vocab_size": 26}]


def make(target: MicroTarget, **options: object) -> Drafter:
    config = Config(**{"depths": 4, "num_layers": 2, **options})
    counts = torch.arange(41).flip(0) + 100 * (torch.arange(41) % 3 == 0)
    drafter = new_drafter(
        "peagle", config, target.info, target.weights, seed=0, token_counts=counts
    )
    shake_norms(drafter)
    return drafter.eval()


def fused(drafter: Drafter, taps: Tensor) -> Tensor:
    parts = list(taps)
    if drafter.fc_norm:
        parts = [rms(norm.weight, part) for norm, part in zip(drafter.fc_norm, parts, strict=True)]
    return drafter.fc.weight @ torch.cat(parts)


def explicit_output(
    drafter: Drafter, document: list[int], taps: Tensor, anchor: int, depth: int
) -> Tensor:
    """Normalised output of depth `depth` behind `anchor`: the true rows up to the anchor, then
    depth - 1 mask rows, as one plain causal sequence.
    """
    embedded = [drafter.target.embedding[token] for token in document[1 : anchor + 2]]
    states = [fused(drafter, taps[t]) for t in range(anchor + 1)]
    masked = fused(drafter, drafter.mask_hidden.view(taps.shape[1], -1))
    embedded += [drafter.mask_embedding] * (depth - 1)
    states += [masked] * (depth - 1)
    for layer in drafter.layers:
        seen: Rows = []
        after = []
        for position, (e, x) in enumerate(zip(embedded, states, strict=True)):
            if isinstance(layer, FusingLayer):
                read = torch.cat(
                    [rms(layer.input_layernorm.weight, e), rms(layer.hidden_norm.weight, x)]
                )
            else:
                read = rms(layer.input_layernorm.weight, x)
            query, key, value = project(layer.self_attn, read, position)
            seen.append((key, value))
            after.append(behind_attention(layer, x, attend(layer.self_attn, query, seen)))
        states = after
    return rms(drafter.norm.weight, states[-1])


@pytest.mark.parametrize("options", VARIANTS)
def test_one_pass_equals_plain_causal_sequences(target: MicroTarget, options: dict) -> None:
    drafter = make(target, **options)
    batch = packed_batch(target, drafter.needs, PACKED)
    outputs = drafter._parallel(batch, AnchoredRows.everywhere(batch, 3))
    for row, first, document in ((0, 0, DOCUMENTS[0]), (0, 13, DOCUMENTS[1]), (1, 0, DOCUMENTS[2])):
        taps = batch.taps[row, first : first + len(document)]
        for depth, anchor in ((1, 0), (1, 5), (2, 0), (2, 6), (3, 3), (3, len(document) - 2)):
            expected = explicit_output(drafter, document, taps, anchor, depth)
            found = outputs[depth - 1][row, first + anchor]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 26, "hard_label_weight": 0.25, "tv": 2.0}, {"feature_weight": 2.0}],
)
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_loss_equals_the_sum_over_kept_anchors(
    target: MicroTarget, options: dict, keep: float
) -> None:
    drafter = make(target, keep=keep, keep_at_least=0.3, decay=0.9, **options)
    batch = packed_batch(target, drafter.needs, PACKED)
    anchors = AnchoredRows.dropped(batch, 4, keep, 0.3)
    everywhere = drafter._parallel(batch, AnchoredRows.everywhere(batch, 4))
    ids = drafter.d2t + torch.arange(26) if drafter.reduced else torch.arange(41)
    expected, counts = torch.zeros((), dtype=torch.float64), []
    for depth in range(1, 5):
        kept = torch.ones_like(batch.loss_mask)
        if depth > 1:
            chosen = anchors.order[:, : anchors.sizes[depth - 2]]
            kept = torch.zeros_like(kept).scatter(1, chosen, anchors.kept[depth - 2])
        wanted = batch.supervised(depth + 1) & kept
        counts.append(int(wanted.sum()))
        for row, t in wanted.nonzero().tolist():
            output, state = everywhere[depth - 1][row, t], batch.last_hidden[row, t + depth]
            teacher = target.weights.logits(state)
            log_q = (drafter.lm_head.weight @ output).log_softmax(-1)
            if teacher.argmax() in ids:
                column = column_of(ids, int(batch.tokens[row, t + depth + 1]))
                value = judged(drafter.config, teacher[ids], log_q, column, output, state)
                expected += 0.9 ** (depth - 1) * value
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert [int(output.metrics[f"loss/depth{k}"][1]) for k in (1, 2, 3, 4)] == counts
    if keep == 1.0:
        assert counts == [int(batch.supervised(depth + 1).sum()) for depth in range(1, 5)]


def test_anchors_thin_out_with_depth_and_stay_nested(target: MicroTarget) -> None:
    batch = packed_batch(target, make(target).needs, [[list(range(1, 38)) * 3], [DOCUMENTS[0]]])
    batch.seeds = torch.tensor([5, 6])
    anchors = AnchoredRows.dropped(batch, 6, 0.7, 0.2)
    useful = torch.zeros_like(batch.loss_mask)
    for depth in range(2, 7):
        useful |= batch.supervised(depth + 1)
    shares = [0.7, 0.49, 0.343, 0.2401, 0.2]
    for row in range(2):
        count, kept = int(useful[row].sum()), [set(range(111))]
        for depth, share in enumerate(shares, start=1):
            here = anchors.at(torch.arange(111).expand(2, -1), depth)[row][
                anchors.kept[depth - 1][row]
            ]
            assert bool(useful[row, here].all())
            assert len(here) == -(-round(share * count, 9) // 1)
            assert set(here.tolist()) <= kept[-1]
            kept.append(set(here.tolist()))
    again = AnchoredRows.dropped(batch, 6, 0.7, 0.2)
    assert torch.equal(again.order, anchors.order)
    batch.seeds = torch.tensor([7, 8])
    assert not torch.equal(AnchoredRows.dropped(batch, 6, 0.7, 0.2).order, anchors.order)


def test_attention_in_recomputed_chunks_changes_nothing(
    target: MicroTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(target, train_lm_head=True)
    check_chunks_change_nothing(target, drafter, attention, (1 << 26, 400), monkeypatch)


@pytest.mark.parametrize("options", VARIANTS)
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    drafter = make(target, **options)
    assert check_parity(target, drafter, DOCUMENTS, depth=4).compared > 12
    assert check_parity(target, drafter, DOCUMENTS, depth=1).compared > 4


def test_trees_and_pieces(target: MicroTarget) -> None:
    check_trees_and_pieces(target, make(target))


@torch.no_grad()
def test_drafting_runs_no_layer(target: MicroTarget) -> None:
    """All depths are ready when the run was committed, for every shape."""
    drafter = make(target)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    for shape in (TokenTree.chain(6), DynamicShape(8, 3, 3)):
        state = drafter.start(seen, shape, 32)
        handles = [
            layer.mlp.register_forward_hook(lambda *_: pytest.fail("ran"))
            for layer in drafter.layers
        ]
        assert drafter.propose(state, PlainNoise()).tokens.shape == (2, shape.num_nodes)
        for handle in handles:
            handle.remove()


def test_weights_are_those_that_engines_load(target: MicroTarget) -> None:
    """The names that vLLM and SGLang load (docs/serving.md)."""
    state = make(target, num_layers=2).state_dict()
    assert state["mask_hidden"].shape == (1, 1, 3 * 16)
    assert state["layers.0.self_attn.q_proj.weight"].shape == (16, 32)
    assert state["layers.1.self_attn.q_proj.weight"].shape == (16, 16)
    fusing = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    assert {f"layers.0.{name}.weight" for name in fusing} <= set(state)
    assert "layers.1.hidden_norm.weight" not in state and "layers.1.input_layernorm.weight" in state
    assert len(make(target, num_layers=0).layers) == 1
