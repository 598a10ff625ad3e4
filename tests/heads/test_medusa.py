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
from tests.heads.explicit import SHORTER
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states


def trained(target: MicroTarget, **options: object) -> Drafter:
    """A drafter whose weights are not at their (too symmetric) initial values."""
    counts = torch.arange(target.info.vocab_size) * 7 % 41
    config = Config(**options)
    drafter = new_drafter("medusa", config, target.info, target.weights, 0, token_counts=counts)
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
    if drafter.lm_heads is None:
        return target.weights.lm_head @ hidden
    return drafter.lm_heads[head if drafter.config.own_lm_head else 0] @ hidden


def draftable(drafter: Drafter) -> list[int]:
    """Target ids of the draft columns."""
    if not drafter.reduced:
        return list(range(drafter.info.vocab_size))
    return (drafter.d2t + torch.arange(len(drafter.d2t))).tolist()


REDUCED = {"draft_vocab_size": 26}
EACH = {"own_lm_head": True}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2},
        EACH,
        {"soft_labels": True},
        REDUCED,
        {**REDUCED, **EACH},
        {**REDUCED, **EACH, "soft_labels": True},
        {**REDUCED, "soft_labels": True},
    ],
)
def test_loss_equals_the_sum_over_heads_and_positions(target: MicroTarget, options: dict) -> None:
    drafter = trained(target, num_heads=3, **options)
    batch = packed_batch(target, drafter.needs, [SHORTER[:2], SHORTER[2:]])
    output = drafter.loss(batch)
    expected, count = torch.zeros((), dtype=torch.float64), 0
    right = {1: 0, 2: 0, 3: 0}
    for row, documents in enumerate([SHORTER[:2], SHORTER[2:]]):
        first = 0
        for document in documents:
            for t in range(len(document)):
                for k in (1, 2, 3):
                    if 2 <= t + k + 1 < len(document):
                        logits = slow_logits(
                            drafter, target, batch.last_hidden[row, first + t], k - 1
                        ).log_softmax(-1)
                        ids, token = draftable(drafter), document[t + k + 1]
                        count += 1
                        if drafter.config.soft_labels:
                            teacher = target.weights.logits(batch.last_hidden[row, first + t + k])
                            if int(teacher.argmax()) in ids:
                                expected -= 0.8**k * (teacher[ids].softmax(-1) * logits).sum()
                        elif token in ids:
                            expected -= 0.8**k * logits[ids.index(token)]
                        right[k] += token in ids and ids.index(token) == int(logits.argmax())
            first += len(document)
    torch.testing.assert_close(output.loss_sum, expected)
    assert sum(int(output.metrics[f"loss/depth{k}"][1]) for k in (1, 2, 3)) == count
    assert {k: int(output.metrics[f"accuracy/depth{k}"][0]) for k in right} == right


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, EACH, REDUCED, {**REDUCED, **EACH}])
def test_decoding_computes_what_training_did(target: MicroTarget, options: dict) -> None:
    report = check_parity(target, trained(target, **options), SHORTER, depth=4)
    assert report.compared > (10 if options.get("draft_vocab_size") else 20)


@pytest.mark.parametrize("options", [{}, EACH, REDUCED, {**REDUCED, **EACH}])
def test_training_starts_at_the_target_own_prediction(target: MicroTarget, options: dict) -> None:
    counts = torch.arange(target.info.vocab_size)
    config = Config(**options)
    drafter = new_drafter("medusa", config, target.info, target.weights, 0, token_counts=counts)
    batch = packed_batch(target, drafter.needs, [SHORTER[:1]])
    expected = target.weights.logits(batch.last_hidden)[..., draftable(drafter)]
    for logits in drafter.train_logits(batch, 4):
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("options", [{}, REDUCED, {**REDUCED, **EACH}])
def test_tree_takes_the_best_of_each_head(target: MicroTarget, options: dict) -> None:
    drafter = trained(target, **options)
    ids = torch.tensor(draftable(drafter))
    tree = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    seen = seen_states(target, drafter.needs, SHORTER[:2], [(0, 6), (0, 4)])
    tokens = drafter.propose(drafter.start(seen, tree, 32), PlainNoise()).tokens
    for row, t in enumerate((5, 3)):
        hidden = seen.last_hidden[row, t]
        best = [
            ids[slow_logits(drafter, target, hidden, head).topk(3).indices].tolist()
            for head in range(3)
        ]
        root = SHORTER[row][t + 1]
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
    seen = seen_states(target, drafter.needs, SHORTER[:1], [(0, 4)])
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
