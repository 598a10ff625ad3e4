"""Hydra heads: what they compute, learn and draft."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.hydra_heads import Config, Drafter
from inference.parity import check_parity
from tests.heads.explicit import SHORTER
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states

OPTIONS = [
    {},
    {"num_layers": 3, "embedding_norm": False},
    {"own_lm_head": True, "hard_label_weight": 0.0},
    {"hard_label_weight": 0.3},
]


def trained(target: MicroTarget, **options: object) -> Drafter:
    """A drafter whose weights are not at their (too symmetric) initial values."""
    drafter = new_drafter("hydra_heads", Config(**options), target.info, target.weights, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(3)
            )
    return drafter


def slow_logits(drafter: Drafter, target: MicroTarget, hidden: Tensor, tokens: list[int]) -> Tensor:
    """One state and the tokens behind it, written out."""
    read = [hidden]
    for token in tokens:
        vector = target.weights.embedding[token]
        norm = drafter.embedding_norm
        if norm is not None:
            vector = vector / (vector.square().mean() + norm.eps).sqrt() * norm.weight
        read.append(vector)
    head, row = drafter.heads[len(tokens) - 1], torch.cat(read)
    first = head.first
    states = first.residual.weight @ row + F.silu(first.linear.weight @ row + first.linear.bias)
    for block in head.deeper:
        states = states + F.silu(block.linear.weight @ states + block.linear.bias)
    return (target.weights.lm_head if head.lm_head is None else head.lm_head.weight) @ states


@pytest.mark.parametrize("options", OPTIONS)
def test_loss_equals_the_sum_over_heads_and_positions(target: MicroTarget, options: dict) -> None:
    drafter = trained(target, num_heads=3, **options)
    batch = packed_batch(target, drafter.needs, [SHORTER[:2], SHORTER[2:]])
    output = drafter.loss(batch)
    expected, count, hard = (
        torch.zeros((), dtype=torch.float64),
        0,
        drafter.config.hard_label_weight,
    )
    for row, documents in enumerate([SHORTER[:2], SHORTER[2:]]):
        first = 0
        for document in documents:
            for t in range(len(document)):
                for k in (1, 2, 3):
                    if not 2 <= t + k + 1 < len(document):
                        continue
                    hidden = batch.last_hidden[row, first + t]
                    logits = slow_logits(
                        drafter, target, hidden, document[t + 1 : t + k + 1]
                    ).log_softmax(-1)
                    teacher = target.weights.logits(batch.last_hidden[row, first + t + k]).softmax(
                        -1
                    )
                    soft = -(teacher * logits).sum()
                    expected += 0.8**k * (hard * -logits[document[t + k + 1]] + (1 - hard) * soft)
                    count += 1
            first += len(document)
    torch.testing.assert_close(output.loss_sum, expected)
    assert sum(int(output.metrics[f"loss/depth{k}"][1]) for k in (1, 2, 3)) == count


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"prefix_layer": True}, {"prefix_layer": True, "num_heads": 6}]
)
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    report = check_parity(target, trained(target, **options), SHORTER, depth=4)
    assert report.compared > 20


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "prefix_layer": True, "own_lm_head": True}]
)
def test_training_starts_at_the_target_own_prediction(target: MicroTarget, options: dict) -> None:
    drafter = new_drafter("hydra_heads", Config(**options), target.info, target.weights, seed=0)
    batch = packed_batch(target, drafter.needs, [SHORTER[:1]])
    for logits in drafter.train_logits(batch, 4):
        torch.testing.assert_close(logits, target.weights.logits(batch.last_hidden))


def test_every_node_follows_its_own_path(target: MicroTarget) -> None:
    """What stands below a node depends on the node: the children of siblings differ, as they cannot
    in Medusa."""
    drafter = trained(target, num_heads=2)
    tree = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0]])
    seen = seen_states(target, drafter.needs, SHORTER[:2], [(0, 6), (0, 4)])
    tokens = drafter.propose(drafter.start(seen, tree, 32), PlainNoise()).tokens
    children = []
    for row, t in enumerate((5, 3)):
        hidden, root = seen.last_hidden[row, t], SHORTER[row][t + 1]
        first = slow_logits(drafter, target, hidden, [root]).topk(3).indices.tolist()
        below = [
            slow_logits(drafter, target, hidden, [root, token]).topk(2).indices.tolist()
            for token in first
        ]
        assert tokens[row].tolist() == [root, *first, *below[0], below[1][0], below[2][0]]
        children.append({pair[0] for pair in below})
    assert max(len(found) for found in children) > 1


def test_the_prefix_layer_reads_the_whole_text_and_no_refused_token(target: MicroTarget) -> None:
    drafter = trained(target, prefix_layer=True)
    changed = [[8, *SHORTER[0][1:]]]
    tree = TokenTree.chain(3)
    states = [
        seen_states(target, drafter.needs, documents, [(0, 6)])
        for documents in (SHORTER[:1], changed)
    ]
    states[1].last_hidden[0, 1:] = states[0].last_hidden[0, 1:]  # only the first state differs
    hidden = [drafter.start(seen, tree, 32).output for seen in states]
    assert (hidden[0] - hidden[1]).abs().max() > 1e-6
    # A run of two with two entries of padding, then another: as if all had been read at once.
    whole = drafter.start(seen_states(target, drafter.needs, SHORTER[:1], [(0, 10)]), tree, 32)
    state = drafter.start(states[0], tree, 32)
    pair = seen_states(target, drafter.needs, [SHORTER[0], SHORTER[0]], [(6, 8), (4, 8)])
    for field in ("tokens", "next_tokens", "positions", "valid", "last_hidden"):
        setattr(pair, field, getattr(pair, field)[:1])
    state = drafter.commit(state, pair)
    state = drafter.commit(state, seen_states(target, drafter.needs, SHORTER[:1], [(8, 10)]))
    torch.testing.assert_close(state.output, whole.output)


def test_noise_is_drawn_in_training_alone(target: MicroTarget) -> None:
    quiet, noisy = trained(target), trained(target, noise=0.5)
    batch = packed_batch(target, quiet.needs, [SHORTER[:1]])
    assert noisy.loss(batch).loss_sum != quiet.loss(batch).loss_sum
    for one, other in zip(noisy.train_logits(batch, 2), quiet.train_logits(batch, 2), strict=True):
        assert torch.equal(one, other)


def test_a_tree_deeper_than_the_heads_is_refused(target: MicroTarget) -> None:
    drafter = trained(target, num_heads=2)
    seen = seen_states(target, drafter.needs, SHORTER[:1], [(0, 4)])
    with pytest.raises(UserError, match="2 heads cannot draft 3 tokens"):
        drafter.start(seen, TokenTree.chain(3), 32)
