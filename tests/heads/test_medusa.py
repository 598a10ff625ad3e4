"""Medusa: what the heads compute, learn and draft."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.medusa import Config, Drafter
from inference.parity import check_parity
from tests.heads.micro import MicroTarget, PlainNoise, micro_target, packed_batch, seen_states

DOCUMENTS = [
    [5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19],
    [7, 7, 1, 40, 3, 12, 13, 14, 15],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
]


@pytest.fixture(scope="module")
def target() -> MicroTarget:
    return micro_target()


def trained(target: MicroTarget, **options: object) -> Drafter:
    """A drafter whose weights are not at their (too symmetric) initial values."""
    drafter = new_drafter("medusa", Config(**options), target.info, target.weights, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(3)
            )
    return drafter


def slow_logits(
    drafter: Drafter, target: MicroTarget, hidden: torch.Tensor, head: int
) -> torch.Tensor:
    for layer in range(drafter.config.num_layers):
        weight, bias = drafter.residual_weight[layer, head], drafter.residual_bias[layer, head]
        hidden = hidden + F.silu(weight @ hidden + bias)
    return (target.weights.lm_head if drafter.lm_heads is None else drafter.lm_heads[head]) @ hidden


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"own_lm_head": True}, {"soft_labels": True}]
)
def test_loss_equals_the_sum_over_heads_and_positions(target: MicroTarget, options: dict) -> None:
    drafter = trained(target, num_heads=3, **options)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    output = drafter.loss(batch)
    expected, count = torch.zeros((), dtype=torch.float64), 0
    for row, documents in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        first = 0
        for document in documents:
            for t in range(len(document)):
                for k in (1, 2, 3):
                    if 2 <= t + k + 1 < len(document):
                        logits = slow_logits(
                            drafter, target, batch.last_hidden[row, first + t], k - 1
                        ).log_softmax(-1)
                        if drafter.config.soft_labels:
                            teacher = target.weights.logits(
                                batch.last_hidden[row, first + t + k]
                            ).softmax(-1)
                            expected -= 0.8**k * (teacher * logits).sum()
                        else:
                            expected -= 0.8**k * logits[document[t + k + 1]]
                        count += 1
            first += len(document)
    torch.testing.assert_close(output.loss_sum, expected)
    assert sum(int(output.metrics[f"loss/depth{k}"][1]) for k in (1, 2, 3)) == count


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"own_lm_head": True}])
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    report = check_parity(target, trained(target, **options), DOCUMENTS, depth=4)
    assert report.compared > 20


def test_training_starts_at_the_target_own_prediction(target: MicroTarget) -> None:
    drafter = new_drafter("medusa", Config(), target.info, target.weights, seed=0)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:1]])
    for logits in drafter.train_logits(batch, 4):
        torch.testing.assert_close(logits, target.weights.logits(batch.last_hidden))


def test_tree_takes_the_best_of_each_head(target: MicroTarget) -> None:
    drafter = trained(target)
    tree = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 6), (0, 4)])
    tokens = drafter.propose(drafter.start(seen, tree, 32), PlainNoise()).tokens
    for row, t in enumerate((5, 3)):
        hidden = seen.last_hidden[row, t]
        best = [
            slow_logits(drafter, target, hidden, head).topk(3).indices.tolist() for head in range(3)
        ]
        root = DOCUMENTS[row][t + 1]
        assert tokens[row].tolist() == [
            root,
            *best[0],
            best[1][0],
            best[1][1],
            best[1][0],
            best[2][0],
        ]


def test_a_tree_deeper_than_the_heads_is_refused(target: MicroTarget) -> None:
    drafter = trained(target, num_heads=2)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:1], [(0, 4)])
    with pytest.raises(UserError, match="2 heads cannot draft 3 tokens"):
        drafter.start(seen, TokenTree.chain(3), 32)


def test_heads_learn_a_repeating_text(target: MicroTarget) -> None:
    drafter = new_drafter(
        "medusa", Config(num_heads=2, own_lm_head=True), target.info, target.weights, seed=0
    )
    batch = packed_batch(target, drafter.needs, [[[3, 14, 15, 9, 26, 5, 35] * 4]])
    optimiser = torch.optim.Adam(drafter.parameters(), lr=2e-2)
    for _ in range(60):
        optimiser.zero_grad()
        output = drafter.loss(batch)
        (output.loss_sum / 28).backward()
        optimiser.step()
    for depth in (1, 2):
        correct, count = output.metrics[f"accuracy/depth{depth}"]
        assert correct / count > 0.9
    assert all(value.grad is None for value in (target.weights.lm_head, target.weights.embedding))
