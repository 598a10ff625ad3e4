"""Scores of neighbouring candidates: the correlator pair by pair with torch's own attention, and
what a lattice says of paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.nn.block.dependency import Correlated, build_dependency
from heads.nn.block.lattice import OUTSIDE, CorrelatorConfig, Lattice, candidate_logits
from tests.heads.micro import MicroTarget

BLOCKS, SLOTS, COUNT, FACTORS = 3, 4, 5, 6


def make(target: MicroTarget, size: int) -> Correlated:
    """The rule with random weights in float64; size: of the correlator, 0: the target's."""
    shape = CorrelatorConfig(size=size, heads=2, mlp_ratio=1.5, scale=4.0)
    rule = build_dependency("lilicorr", FACTORS, COUNT, target.info, SLOTS, shape)
    assert isinstance(rule, Correlated)
    generator = torch.Generator().manual_seed(3)
    for parameter in rule.correlator.double().parameters():
        parameter.data = 0.5 * torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64
        )
    return rule


def example(target: MicroTarget) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits [M, K, V], states [M, K, H] and anchors [M, H]."""
    generator = torch.Generator().manual_seed(5)
    hidden = target.info.hidden_size
    states = torch.randn(BLOCKS, SLOTS, hidden, generator=generator, dtype=torch.float64)
    anchors = torch.randn(BLOCKS, hidden, generator=generator, dtype=torch.float64)
    return target.weights.logits(states), states, anchors


def lattice_of(target: MicroTarget, rule: Correlated) -> Lattice:
    base, states, anchors = example(target)
    found = rule.lattice(base, states, anchors, lambda t: F.embedding(t, target.weights.embedding))
    assert found is not None
    return found


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def mlp(part: Any, x: Tensor) -> Tensor:
    up = part.up_proj.weight @ x + part.up_proj.bias
    return part.down_proj.weight @ F.silu(up) + part.down_proj.bias


@pytest.mark.parametrize("size", [0, 8])
def test_scores_are_the_formulas(target: MicroTarget, size: int) -> None:
    rule = make(target, size)
    head: Any = rule.correlator
    base, states, anchors = example(target)
    found = lattice_of(target, rule)
    for block in range(BLOCKS):
        tokens, rows = [], []
        for slot in range(SLOTS):
            log_probs = base[block, slot].log_softmax(-1)
            best = log_probs.sort(descending=True)
            for rank in range(COUNT):
                token, log_prob = int(best.indices[rank]), best.values[rank]
                known = torch.stack(
                    [
                        log_prob,
                        log_prob.exp(),
                        log_prob - best.values[0],
                        torch.tensor(rank / (COUNT - 1), dtype=torch.float64),
                        torch.tensor(float(rank == 0), dtype=torch.float64),
                    ]
                )
                word = target.weights.embedding[token].double()
                if head.token_proj is not None:
                    word = head.token_proj.weight @ word + head.token_proj.bias
                state = head.pass_hidden_proj.weight @ states[block, slot]
                row = word + state + head.pass_hidden_proj.bias
                row = row + mlp(head.feature_mlp, head.feature_norm(known))
                row = row + head.slot_embedding[0, 0, slot, 0] + head.rank_embedding[0, 0, 0, rank]
                tokens.append(token)
                rows.append(row)
        places = [number // COUNT for number in range(SLOTS * COUNT)]
        bias = torch.stack(
            [
                torch.stack(
                    [
                        head.relative_slot_bias[:, i - j + SLOTS]
                        + (head.same_slot_bias if i == j else 0)
                        for j in places
                    ]
                )
                for i in places
            ]
        ).permute(2, 0, 1)
        for layer in head.layers:
            attention = nn.MultiheadAttention(rows[0].shape[0], 2, batch_first=True).double()
            attention.load_state_dict(layer.attn.state_dict())
            normed = torch.stack([rms(row, layer.attn_norm) for row in rows])[None]
            mixed = attention(normed, normed, normed, attn_mask=bias, need_weights=False)[0][0]
            rows = [row + more for row, more in zip(rows, mixed, strict=True)]
            rows = [row + mlp(layer.mlp, rms(row, layer.mlp_norm)) for row in rows]
        near = rms(head.context_proj(anchors[block]), head.anchor_norm)
        vectors = []
        for row in rows:
            out = rms(row, head.output_norm)
            mixed = F.silu(head.factor_input_proj(torch.cat([out, near, out * near])))
            vectors.append((head.out_head(mixed), head.in_head(mixed)))
        first = head.anchor_out_head(near)
        assert found.tokens[block].flatten().tolist() == tokens
        for j in range(COUNT):
            score = 4.0 * F.cosine_similarity(first, vectors[j][1], dim=0)
            torch.testing.assert_close(found.start[block, j], score)
        for slot in range(SLOTS - 1):
            for i in range(COUNT):
                for j in range(COUNT):
                    out = vectors[slot * COUNT + i][0]
                    into = vectors[(slot + 1) * COUNT + j][1]
                    score = 4.0 * F.cosine_similarity(out, into, dim=0)
                    torch.testing.assert_close(found.pair[block, slot, i, j], score)


def test_a_path_takes_the_scores_behind_each_of_its_tokens(target: MicroTarget) -> None:
    lattice = lattice_of(target, make(target, 8))
    ranks = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1], [4, 0, 3, 3]])
    path = lattice.tokens.gather(2, ranks[..., None])[..., 0]
    parents = torch.cat([torch.zeros(BLOCKS, 1, dtype=torch.int64), path[:, :-1]], 1)
    scores = lattice.along(parents)
    torch.testing.assert_close(scores[:, 0], lattice.start)
    for block in range(BLOCKS):
        for slot in range(1, SLOTS):
            row = lattice.pair[block, slot - 1, ranks[block, slot - 1]]
            torch.testing.assert_close(scores[block, slot], row)
    assert bool(lattice.holds(path).all())
    strange = int(next(t for t in range(41) if t not in lattice.tokens[1, 1].tolist()))
    path[1, 1] = strange
    assert lattice.holds(path).tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    behind = lattice.follow(3, torch.tensor([[0], [strange], [0]]))
    torch.testing.assert_close(behind[1, 0], lattice.log_probs[1, 2])


def test_tokens_outside_the_lattice_come_last_in_their_own_order_and_learn_nothing() -> None:
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(2, 9, generator=generator, requires_grad=True)
    tokens = base.detach().topk(3, -1).indices
    scores = torch.tensor([[-1.0, 1.0, 0.5], [0.0, -2.0, 2.0]], requires_grad=True)
    logits = candidate_logits(base, tokens, scores, 2.0)
    for row in range(2):
        inside = dict(zip(tokens[row].tolist(), scores[row].tolist(), strict=True))
        rest = [token for token in range(9) if token not in inside]
        assert {token: logits[row, token].item() for token in inside} == inside
        log_probs = base[row].log_softmax(-1)
        for token in rest:
            assert logits[row, token].item() == pytest.approx(log_probs[token].item() - 2 - OUTSIDE)
    logits.logsumexp(-1).sum().backward()
    assert base.grad is None and scores.grad is not None
