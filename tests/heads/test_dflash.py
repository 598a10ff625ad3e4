"""Block drafters: the network one block at a time, training against drafting, what slots may see,
starting from the target."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.target_info import TargetWeights
from heads.api.tree import TokenTree
from heads.dflash import Drafter
from heads.nn import losses
from heads.nn.anchors import Anchors
from heads.nn.block.config import Config
from inference.parity import check_parity
from tests.heads.explicit import CHOICES, DOCUMENTS, check_paths_of_a_tree
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"in_block": "causal", "taps": (1, 4)},
    "anchor": {
        "sample_from_anchor": True,
        "num_layers": 3,
        "num_key_value_heads": 4,
        "start_from": "random",
    },
    "mask_token": {"mask_token_id": 9},
    "fusion": {"layer_fusion": True, "taps": (0, 2, 4)},
    "convolution": {"convolution": True, "conv_group_size": 4},
}
DEPENDENT: dict[str, dict[str, Any]] = {
    "markov": {"dependency": "markov", "sample_from_anchor": True},
    "gated": {"dependency": "gated"},
    "rnn": {"dependency": "rnn", "in_block": "causal"},
    "gru": {"dependency": "gru"},
    "selector": {
        "dependency": "selector",
        "selector_top_k": 5,
        "convolution": True,
        "conv_group_size": 8,
    },
    "parent": {"dependency": "parent"},
    "lilicorr": {
        "dependency": "lilicorr",
        "selector_top_k": 5,
        "correlator": {"size": 12, "heads": 2},
    },
}


def make(target: MicroTarget, **options: Any) -> Drafter:
    """A drafter of blocks of 5 with every weight moved from where it starts, which is trained
    behind every position."""
    config = Config(**{"block_size": 5, "dependency_rank": 6, "num_anchors": 64, **options})
    drafter: Drafter = new_drafter("dflash", config, target.info, target.weights, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


# The network


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt() * weight


def turn(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head vector by its definition, angles in float32 as everywhere."""
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(float(position)) * (1.0 / 10000.0 ** torch.tensor(2 * i / x.shape[0]))
        out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
        out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
    return out


def convolve(conv: Any, rows: list[Tensor], kernels: list[Tensor], side: int) -> list[Tensor]:
    """out[i] = (base[0] + delta[i, 0]) x[i] + (base[1] + delta[i, 1]) x[i-1]; kernels [2, 2, C] per
    row."""
    found = []
    for i, row in enumerate(rows):
        taps = [
            conv.base_kernel[side, t] + kernels[i][side, t].repeat_interleave(conv.group_size)
            for t in (0, 1)
        ]
        found.append(taps[0] * row + (taps[1] * rows[i - 1] if i else 0.0))
    return found


def one_block(drafter: Drafter, document: list[int], taps: Tensor, t: int) -> list[Tensor]:
    """States before the final norm of all slots of the block behind position t, one head vector at
    a time."""
    slots, target = drafter.config.block_size, drafter.target
    assert target is not None
    mask = (
        drafter.mask_embedding
        if drafter.mask_embedding is not None
        else target.embedding[drafter.config.mask_token_id]
    )
    states = [target.embedding[document[t + 1]]] + [mask] * (slots - 1)
    for number, layer in enumerate(drafter.layers):
        layer_: Any = layer
        attn = layer_.self_attn
        groups = attn.q_proj.out_features // attn.k_proj.out_features
        keys, values = [], []
        for j in range(t + 1):
            if drafter.layer_fusion is not None:
                shares = drafter.layer_fusion.mix[number].softmax(0)
                mixed = sum(s * rms(tap) for s, tap in zip(shares, taps[j], strict=True))
                feature = rms(mixed, drafter.layer_fusion.norms[number].weight)
                k, v = attn.context_k_proj.weight @ feature, attn.context_v_proj.weight @ feature
            else:
                feature = rms(drafter.fc.weight @ taps[j].flatten(), drafter.hidden_norm.weight)
                k, v = attn.k_proj.weight @ feature, attn.v_proj.weight @ feature
            keys.append([turn(rms(head, attn.k_norm.weight), j) for head in k.split(attn.head_dim)])
            values.append(v.split(attn.head_dim))
        normed = [rms(x, layer_.input_layernorm.weight) for x in states]
        conv = layer_.attention_conv
        if conv is not None:
            kernels = [(conv.kernel_projection.weight @ x).view(2, 2, -1) for x in normed]
            normed = convolve(conv, normed, kernels, 0)
        for i, x in enumerate(normed):
            heads = (attn.k_proj.weight @ x).split(attn.head_dim)
            keys.append([turn(rms(head, attn.k_norm.weight), t + 1 + i) for head in heads])
            values.append((attn.v_proj.weight @ x).split(attn.head_dim))
        outputs = []
        for i, x in enumerate(normed):
            seen = t + 2 + i if drafter.causal else len(keys)
            parts = []
            for h, q in enumerate((attn.q_proj.weight @ x).split(attn.head_dim)):
                query = turn(rms(q, attn.q_norm.weight), t + 1 + i)
                scores = torch.stack([query @ key[h // groups] for key in keys[:seen]]) / math.sqrt(
                    attn.head_dim
                )
                parts.append(
                    scores.softmax(0) @ torch.stack([value[h // groups] for value in values[:seen]])
                )
            outputs.append(attn.o_proj.weight @ torch.cat(parts))
        if conv is not None:
            outputs = convolve(conv, outputs, kernels, 1)
        states = [x + out for x, out in zip(states, outputs, strict=True)]
        normed = [rms(x, layer_.post_attention_layernorm.weight) for x in states]
        conv, mlp = layer_.mlp_conv, layer_.mlp
        if conv is not None:
            kernels = [(conv.kernel_projection.weight @ x).view(2, 2, -1) for x in normed]
            normed = convolve(conv, normed, kernels, 0)
        outputs = [
            mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ x) * (mlp.up_proj.weight @ x))
            for x in normed
        ]
        if conv is not None:
            outputs = convolve(conv, outputs, kernels, 1)
        states = [x + out for x, out in zip(states, outputs, strict=True)]
    return states


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_training_blocks_equal_one_block_at_a_time(target: MicroTarget, name: str) -> None:
    drafter = make(target, **VARIANTS[name])
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    logits = drafter.train_logits(batch, drafter.depths)
    # (row, start of the document, t) -> document
    places = {(0, 0, 2): 0, (0, 13, 4): 1, (1, 0, 7): 2}
    for (row, first, t), number in places.items():
        document = DOCUMENTS[number]
        states = one_block(drafter, document, batch.taps[row, first : first + len(document)], t)
        shift = 0 if drafter.config.sample_from_anchor else 1
        for depth in range(1, drafter.depths + 1):
            expected = target.weights.logits(rms(states[depth - 1 + shift], drafter.norm.weight))
            torch.testing.assert_close(logits[depth - 1][row, first + t], expected)


@pytest.mark.parametrize("name", [*VARIANTS, *DEPENDENT])
def test_drafting_computes_what_training_did(target: MicroTarget, name: str) -> None:
    drafter = make(target, **(VARIANTS | DEPENDENT)[name])
    report = check_parity(target, drafter, DOCUMENTS, depth=drafter.depths)
    assert report.compared > 12 and max(report.worst) < 1e-11


@pytest.mark.parametrize("name", [*VARIANTS, *DEPENDENT])
@torch.no_grad()
def test_nothing_behind_the_root_is_seen(target: MicroTarget, name: str) -> None:
    """Taps from the root on, and tokens behind those that a depth is conditioned on, may be
    anything; other documents too."""
    drafter = make(target, **(VARIANTS | DEPENDENT)[name])
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[1], DOCUMENTS[0]]])
    before = drafter.train_logits(batch, drafter.depths)
    t = len(DOCUMENTS[1]) + 5
    assert batch.taps is not None
    batch.taps[:, t + 1 :] = 7.0
    batch.taps[:, : len(DOCUMENTS[1])] = -3.0
    batch.tokens[:, : len(DOCUMENTS[1])] = 1
    for depth in range(drafter.depths, 0, -1):
        batch.tokens[:, t + depth + 1 :] = 2
        after = drafter.train_logits(batch, drafter.depths)
        torch.testing.assert_close(
            after[depth - 1][0, t], before[depth - 1][0, t], rtol=1e-12, atol=1e-12
        )
    batch.taps[:, t] += 1.0  # and what may be seen, is
    assert not torch.allclose(drafter.train_logits(batch, 1)[0][0, t], before[0][0, t])


@pytest.mark.parametrize("in_block", ["bidirectional", "causal"])
@torch.no_grad()
def test_a_shorter_draft_is_the_beginning_of_a_longer_one(
    target: MicroTarget, in_block: str
) -> None:
    """Slots that see each other are all run whatever is asked for; causal ones do not need the
    others."""
    drafter = make(target, in_block=in_block)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    drafts = [
        drafter.propose(drafter.start(seen, TokenTree.chain(depth), 32), PlainNoise()).tokens
        for depth in (2, 4)
    ]
    assert drafts[0].tolist() == drafts[1][:, :3].tolist()


@pytest.mark.parametrize("name", ["plain", *DEPENDENT])
def test_each_path_of_a_tree_equals_its_chain(target: MicroTarget, name: str) -> None:
    """Children depend on their own parent (or on their depth alone): drafting a path as a forced
    chain gives the same siblings."""
    drafter = make(target, **(VARIANTS | DEPENDENT)[name])
    check_paths_of_a_tree(target, drafter, CHOICES, torch.arange(41))


@torch.no_grad()
def test_refused_drafts_leave_nothing_behind(target: MicroTarget) -> None:
    """Proposing writes the block into the cache behind the context; the next commit must find it
    gone."""
    drafter, tree = make(target), TokenTree.chain(4)
    state = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 6), (0, 4)]), tree, 32
    )
    for spans in ([(6, 7), (4, 6)], [(7, 9), (6, 7)]):
        drafter.propose(state, PlainNoise())
        state = drafter.commit(state, seen_states(target, drafter.needs, DOCUMENTS[:2], spans))
    fresh = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 9), (0, 7)]), tree, 32
    )
    found, expected = (drafter.propose(s, PlainNoise()).tokens for s in (state, fresh))
    assert found.tolist() == expected.tolist()


# Training


def test_loss_is_the_weighted_sum_over_blocks_and_depths(target: MicroTarget) -> None:
    drafter = make(target, ce=0.3, kl=0.7, tv=0.4, gamma=3.0)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    logits = drafter.train_logits(batch, drafter.depths)
    expected, counts = torch.zeros((), dtype=torch.float64), [0] * drafter.depths
    for row, documents in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        first = 0
        for document in documents:
            for t in range(
                1, len(document) - 2
            ):  # the root t + 1 and the token behind it are answers (from 2 on)
                for k in range(1, drafter.depths + 1):
                    if t + k + 1 >= len(document):
                        break
                    log_q = logits[k - 1][row, first + t].log_softmax(-1)
                    log_p = target.weights.logits(
                        batch.last_hidden[row, first + t + k]
                    ).log_softmax(-1)
                    kl = (log_p.exp() * (log_p - log_q)).sum()
                    tv = (log_p.exp() - log_q.exp()).abs().sum() / 2
                    expected += math.exp(-(k - 1) / 3) * (
                        0.7 * kl + 0.4 * tv - 0.3 * log_q[document[t + k + 1]]
                    )
                    counts[k - 1] += 1
            first += len(document)
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert [
        int(output.metrics[f"accuracy/depth{k}"][1]) for k in range(1, drafter.depths + 1)
    ] == counts


def test_few_anchors_estimate_the_loss_of_all(target: MicroTarget) -> None:
    drafter = make(target)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    whole = float(drafter.loss(batch).loss_sum)
    drafter.config = replace(drafter.config, num_anchors=3)
    found = []
    for seed in range(200):
        batch.seeds = torch.tensor([seed, seed + 1000])
        found.append(float(drafter.loss(batch).loss_sum.detach()))
    assert sum(found) / len(found) == pytest.approx(whole, rel=0.03)
    assert max(found) > 1.05 * whole


def test_a_quarter_of_the_positions_are_anchors_unless_their_number_is_given(
    target: MicroTarget,
) -> None:
    drafter, left = make(target), make(target, num_anchors=None)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    length = batch.tokens.shape[1]
    drafter.config = replace(drafter.config, num_anchors=length // 4)
    losses = [float(one.loss(batch).loss_sum.detach()) for one in (drafter, left)]
    assert losses[0] == losses[1]
    drafter.config = replace(drafter.config, num_anchors=length // 4 + 1)
    assert float(drafter.loss(batch).loss_sum.detach()) != losses[0]
    assert Config().blocks(2) == 1


ANNEALED = {"annealed_lk": 1.0, "ce": 0.1, "dependency": "gru", "base_share_start": 0.5}


@pytest.mark.parametrize("name", ["plain", "gru", "selector", "annealed"])
def test_recomputed_chunks_and_micro_batches_change_nothing(
    target: MicroTarget, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = VARIANTS | DEPENDENT | {"annealed": ANNEALED}
    drafter = make(target, confidence=True, **options[name])
    rows = [DOCUMENTS[:2], DOCUMENTS[2:]]
    batch = packed_batch(target, drafter.needs, rows)
    results = []
    for limit in (1 << 25, 2000):
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", limit)
        drafter.zero_grad()
        output = drafter.loss(batch)
        output.loss_sum.backward()
        grads = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append([output.loss_sum.detach(), *grads, *drafter.train_logits(batch, 2)])
    assert drafter._chunk(batch, drafter.depths) < 5
    torch.testing.assert_close(results[0], results[1])
    alone = [drafter.loss(packed_batch(target, drafter.needs, [row])).loss_sum for row in rows]
    torch.testing.assert_close(torch.stack(alone).sum().detach(), results[0][0])


def test_the_loss_moves_from_base_to_final_logits(target: MicroTarget) -> None:
    drafter = make(target, dependency="gru", base_share_start=1.0, base_share_end=0.0)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    sums = {}
    for progress in (0.0, 0.25, 1.0):
        batch.progress = progress
        sums[progress] = drafter.loss(batch).loss_sum
    torch.testing.assert_close(sums[0.25], 0.75 * sums[0.0] + 0.25 * sums[1.0])
    (unused,) = torch.autograd.grad(sums[0.0], [drafter.prefix_gru.weight_hh_l0], retain_graph=True)
    (used,) = torch.autograd.grad(sums[1.0], [drafter.prefix_gru.weight_hh_l0])
    assert not unused.any() and used.any()


# Where it starts


def test_layers_start_from_the_targets(target: MicroTarget) -> None:
    config = Config(
        start_from="target",
        from_target_layers=(1, 4),
        layer_fusion=True,
        taps=(1, 4),
        carry_root=False,
    )
    drafter: Drafter = new_drafter("dflash", config, target.info, target.weights, seed=0)
    state, layer = target.weights.state, drafter.layers[1]
    folded = (
        state["model.layers.4.self_attn.k_proj.weight"]
        * state["model.layers.4.input_layernorm.weight"]
    )
    for projection in (layer.self_attn.k_proj, layer.self_attn.context_k_proj):
        torch.testing.assert_close(
            projection.weight.double(), folded.double(), rtol=1e-6, atol=1e-6
        )
    assert torch.equal(layer.input_layernorm.weight, torch.ones_like(layer.input_layernorm.weight))
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[0]]])
    features = drafter.layer_fusion(batch.taps)
    own = (
        target.model.model.layers[4].input_layernorm(batch.taps[:, :, 1])
        / state["model.layers.4.input_layernorm.weight"]
    )
    assert float(F.cosine_similarity(features[1], own, dim=-1).min()) > 0.98
    norm = drafter.layers[0].self_attn.q_norm.weight
    heads = (
        state["model.layers.1.self_attn.q_proj.weight"]
        * state["model.layers.1.input_layernorm.weight"]
    )
    assert float(norm[0]) == pytest.approx(float(heads.square().sum(1).mean().sqrt()), rel=1e-5)


def test_what_does_not_fit_is_refused_or_left_random(target: MicroTarget) -> None:
    state = {k: v for k, v in target.weights.state.items() if "layers.2.mlp" not in k}
    weights = TargetWeights(
        target.weights.embedding, target.weights.lm_head, target.weights.logits, state
    )
    config = Config(start_from="target", from_target_layers=(0, 2))
    for start in ("target", "auto"):  # layers that are named must fit
        with pytest.raises(
            UserError, match=r"layer 2 of target 'micro' .* no model.layers.2.mlp.gate_proj.weight"
        ):
            new_drafter("dflash", replace(config, start_from=start), target.info, weights, seed=0)
    with pytest.raises(UserError, match=r"start_from=random starts from none"):
        new_drafter("dflash", replace(config, start_from="random"), target.info, weights, seed=0)
    one, other = (
        new_drafter(
            "dflash", Config(start_from=name, carry_root=False), target.info, weights, seed=0
        )
        for name in ("auto", "random")
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    normed = dict(target.weights.state) | {
        "model.layers.0.pre_feedforward_layernorm.weight": torch.ones(16)
    }
    weights = TargetWeights(
        target.weights.embedding, target.weights.lm_head, target.weights.logits, normed
    )
    with pytest.raises(UserError, match="pre_feedforward_layernorm"):
        new_drafter("dflash", config, target.info, weights, seed=0)
    other = replace(target.info, model_type="gemma")
    with pytest.raises(UserError, match="only layers of llama, "):
        new_drafter("dflash", config, other, target.weights, seed=0)


@pytest.mark.parametrize("carry_root", [True, False])
def test_a_layer_reads_mostly_the_tap_nearest_to_the_layer_that_it_copies(
    target: MicroTarget, carry_root: bool
) -> None:
    """The layer that carries the root is no copy; it begins with the mean of all taps."""
    layers = 2 + int(carry_root)
    config = Config(
        layer_fusion=True,
        taps=(1, 3, 5),
        num_layers=layers,
        from_target_layers=(1, 4),
        carry_root=carry_root,
    )
    drafter = new_drafter("dflash", config, target.info, target.weights, seed=0)
    shares = drafter.layer_fusion.mix.softmax(-1)
    assert shares[-2:].argmax(-1).tolist() == [0, 1]
    assert float(shares[-2:].max(-1).values.min()) > 0.9
    if carry_root:
        torch.testing.assert_close(shares[0], torch.full_like(shares[0], 1 / 3))


@pytest.mark.parametrize(
    ("layers", "draft", "taps"),
    [(3, 3, (1, 2)), (5, 3, (1, 2, 3)), (8, 5, (2, 3, 4, 5, 6)), (36, 5, (2, 10, 18, 26, 34))],
)
def test_sizes_follow_the_target(
    target: MicroTarget, layers: int, draft: int, taps: tuple[int, ...]
) -> None:
    """36 layers: the taps of the published checkpoints."""
    drafter = Drafter(Config(), replace(target.info, num_layers=layers))
    assert (len(drafter.layers), drafter.needs.taps) == (draft, taps)


def test_a_tree_deeper_than_the_block_is_refused(target: MicroTarget) -> None:
    for options, depth in (({}, 4), ({"sample_from_anchor": True}, 5)):
        drafter = make(target, **options)
        seen = seen_states(target, drafter.needs, DOCUMENTS[:1], [(0, 8)])
        drafter.start(seen, TokenTree.chain(depth), 32)
        with pytest.raises(
            UserError, match=f"draft {depth} tokens at most, not {depth + 1}.*head.block_size=6"
        ):
            drafter.start(seen, TokenTree.chain(depth + 1), 32)


# Confidence


@torch.no_grad()
def test_confidence_is_that_of_every_nodes_slot_and_parent(
    target: MicroTarget, tmp_path: Any
) -> None:
    drafter = make(target, dependency="markov", sample_from_anchor=True, confidence=True)
    assert drafter.confidence_head is not None
    odds, accepted = (
        torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * 3,
        torch.arange(500) % 4,
    )
    before, after = drafter.calibrate(odds, accepted)
    assert after[0] <= before[0]
    seen = seen_states(target, drafter.needs, DOCUMENTS[:1], [(0, 8)])
    tree = TokenTree.from_choices([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    proposal = drafter.propose(drafter.start(seen, tree, 32), PlainNoise())
    batch = packed_batch(target, drafter.needs, [[DOCUMENTS[0]]])
    states = [
        rms(s, drafter.norm.weight) for s in one_block(drafter, DOCUMENTS[0], batch.taps[0], 7)
    ]
    assert proposal.confidence is not None and proposal.confidence.dtype == torch.float32
    assert float(proposal.confidence[0, 0]) == 1.0
    head, words = drafter.confidence_head, drafter.markov_head.markov_w1.weight
    for node in range(1, 6):
        depth, parent = int(tree.depth[0, node]), int(proposal.tokens[0, tree.parents[0, node]])
        value = (
            head.proj.weight[0] @ torch.cat([states[depth - 1], words[parent]]) + head.proj.bias[0]
        )
        expected = torch.sigmoid(value / head.temperatures[depth - 1])
        assert float(proposal.confidence[0, node]) == pytest.approx(float(expected), abs=1e-6)
    save_drafter(drafter, tmp_path, target.info)
    loaded = load_drafter(tmp_path, target.info, target.weights)
    assert (
        torch.equal(loaded.confidence_head.temperatures, head.temperatures)
        and float(head.temperatures[0]) != 1.0
    )


def test_without_confidence_there_is_nothing_to_calibrate(target: MicroTarget) -> None:
    with pytest.raises(UserError, match=r"head\.confidence=true"):
        make(target).calibrate(torch.zeros(1, 2), torch.zeros(1))


@torch.no_grad()
def test_every_position_can_be_an_anchor(target: MicroTarget) -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    anchors = Anchors.everywhere(tokens)
    assert anchors.last.tolist() == [[0, 1, 2, 3, 4]] * 2 and anchors.valid.all()
