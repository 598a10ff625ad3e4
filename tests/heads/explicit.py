"""Decoder layers one row and one head at a time, by their definitions: what the tests of feature
drafters compare with.

Legend: T rows, H hidden, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.state import write_rows
from heads.api.tree import TokenTree
from tests.heads.micro import ForcedNoise, MicroTarget, PlainNoise, packed_batch, seen_states

DOCUMENTS = [
    [5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19, 21],
    [7, 7, 1, 40, 3, 12, 13, 14, 15],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
]
PACKED = [DOCUMENTS[:2], DOCUMENTS[2:]]
SHORTER = [DOCUMENTS[0][:12], DOCUMENTS[1], DOCUMENTS[2][:10]]
PAIR = [[5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19], [7, 7, 1, 30, 3, 12, 13, 14, 15]]
LONG_PAIR = [PAIR[0], [*PAIR[1], 20, 21]]
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 1], [0, 1, 0], [2, 0, 0], [2, 0, 1]]
"""The paths of a tree whose second node has no child."""
SMALL = [[0], [1], [0, 0], [1, 0]]

Rows = list[tuple[list[Tensor], list[Tensor]]]
"""Keys and values of the rows that a query sees, per head."""


def rms(weight: Tensor, x: Tensor) -> Tensor:
    """RMSNorm of one vector [H]."""
    return x / (x.pow(2).mean() + 1e-6).sqrt() * weight


def turn(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head vector [D]."""
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / x.shape[0]), dtype=torch.float64)
        out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
        out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
    return out


def project(attn: Any, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values of one row, per head."""
    q, k, v = (
        list((part.weight @ x).split(attn.head_dim))
        for part in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    return [turn(each, position) for each in q], [turn(each, position) for each in k], v


def judged(
    config: Any, teacher: Tensor, log_q: Tensor, column: int | None, output: Tensor, state: Tensor
) -> Tensor:
    """The loss of one prediction of a drafter over fused taps, from the target's logits [V'] and
    the drafter's log-probabilities [V'] over the draft vocabulary, the token's column there (None:
    it has none), the drafter's output [H] and the target's last hidden state [H]."""
    p, q, share = teacher.softmax(-1), log_q.exp(), config.hard_label_weight
    hard = 0.0 if column is None else -log_q[column]
    value = (1 - share) * -(p * log_q).sum() + share * hard
    overlap = torch.minimum(p, q).sum()
    gap = (output - state).abs()
    distance = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
    value = value + config.feature_weight * distance
    return value + config.tv * (1 - overlap) - config.lk * overlap.log()


def column_of(ids: Tensor, token: int) -> int | None:
    """The column of a token among the tokens `ids` [V'] of a draft vocabulary; None: not in it."""
    found = (ids == token).nonzero()
    return int(found[0, 0]) if len(found) else None


def attend(attn: Any, query: list[Tensor], seen: Rows) -> Tensor:
    """One row's attention over the rows it sees, with the output projection [H]."""
    groups = attn.q_proj.out_features // attn.k_proj.out_features
    found = []
    for head, q in enumerate(query):
        scores = torch.stack([q @ keys[head // groups] for keys, _ in seen]) / math.sqrt(
            attn.head_dim
        )
        parts = zip(scores.softmax(0), seen, strict=True)
        found.append(sum(weight * values[head // groups] for weight, (_, values) in parts))
    return attn.o_proj.weight @ torch.cat(found)


def swiglu(mlp: Any, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)) of one vector."""
    return mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ x) * (mlp.up_proj.weight @ x))


def behind_attention(layer: Any, residual: Tensor, attended: Tensor) -> Tensor:
    """The rest of a layer: both residual additions, the MLP between them."""
    x = residual + attended
    return x + swiglu(layer.mlp, rms(layer.post_attention_layernorm.weight, x))


def shake_norms(drafter: torch.nn.Module) -> None:
    """Give norms weights other than one."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                noise = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
                parameter += 0.3 * noise


@torch.no_grad()
def check_paths_of_a_tree(
    target: MicroTarget, drafter: Any, choices: Sequence[Sequence[int]], ids: Tensor
) -> None:
    """A node's token depends on its ancestors alone: drafting each path as a forced chain shows the
    same siblings.

    ids [V']: target ids of the logits' columns.
    """
    tree = TokenTree.from_choices(choices)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 5)])
    tokens = drafter.propose(drafter.start(seen, tree, 32), PlainNoise()).tokens
    order = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    for row, end in enumerate((8, 5)):
        known = {path: int(tokens[row, 1 + i]) for i, path in enumerate(order)}
        for path in order:
            above = [known[path[: i + 1]] for i in range(len(path) - 1)]
            noise = ForcedNoise([DOCUMENTS[0][:9] + above, DOCUMENTS[1][:6] + above])
            drafter.propose(drafter.start(seen, TokenTree.chain(len(path)), 32), noise)
            logits = noise.logits[(row, end + len(path))]
            assert known[path] == int(ids[logits.topk(path[-1] + 1).indices[-1]])


@torch.no_grad()
def check_pieces_equal_the_whole(target: MicroTarget, drafter: Any, tree: TokenTree) -> None:
    """Committing in ragged pieces, with proposals in between, leaves nothing behind: as if it had
    been read at once."""
    state = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 3), (0, 1)]), tree, 32
    )
    for spans in ([(3, 7), (1, 2)], [(7, 8), (2, 6)]):
        drafter.propose(state, PlainNoise())
        state = drafter.commit(state, seen_states(target, drafter.needs, DOCUMENTS[:2], spans))
    whole = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 6)]), tree, 32
    )
    shown = []
    for each in (state, whole):
        noise = ForcedNoise([[0], [0]])
        shown.append((drafter.propose(each, noise).tokens, noise.logits))
    assert shown[0][0].tolist() == shown[1][0].tolist()
    assert shown[0][1].keys() == shown[1][1].keys()
    for place, logits in shown[0][1].items():
        torch.testing.assert_close(logits, shown[1][1][place])


def check_trees_and_pieces(target: MicroTarget, drafter: Any) -> None:
    """`check_paths_of_a_tree` and `check_pieces_equal_the_whole`, for a drafter of the whole
    vocabulary."""
    check_paths_of_a_tree(target, drafter, CHOICES, torch.arange(41))
    check_pieces_equal_the_whole(target, drafter, TokenTree.from_choices(SMALL))


def check_chunks_change_nothing(
    target: MicroTarget,
    drafter: Any,
    module: ModuleType,
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss and its gradients are the same for both limits on the elements of a chunk in
    `module`."""
    batch = packed_batch(target, drafter.needs, PACKED)
    results = []
    for limit in limits:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", limit)
        drafter.zero_grad()
        output = drafter.loss(batch)
        output.loss_sum.backward()
        results.append([output.loss_sum.detach(), *(p.grad.clone() for p in drafter.parameters())])
    torch.testing.assert_close(results[0], results[1])


@torch.no_grad()
def check_refilled_row(target: MicroTarget, drafter: Any, draft_between: bool = False) -> None:
    """A row that another document takes over drafts as if the document had been read from the
    start.

    draft_between: whether it also drafts before anything more is committed.
    """
    tree = TokenTree.from_choices(SMALL)
    state = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 9), (0, 6)]), tree, 32
    )
    drafter.propose(state, PlainNoise())
    fresh = seen_states(target, drafter.needs, DOCUMENTS[2:], [(0, 4)])
    write_rows(state, torch.tensor([1]), drafter.start(fresh, tree, 32))
    if draft_between:
        tokens = drafter.propose(state, PlainNoise()).tokens
        expected = drafter.propose(drafter.start(fresh, tree, 32), PlainNoise()).tokens
        assert tokens[1].tolist() == expected[0].tolist()
    more = seen_states(target, drafter.needs, [DOCUMENTS[0], DOCUMENTS[2]], [(9, 11), (4, 7)])
    tokens = drafter.propose(drafter.commit(state, more), PlainNoise()).tokens
    whole = seen_states(target, drafter.needs, [DOCUMENTS[0], DOCUMENTS[2]], [(0, 11), (0, 7)])
    assert (
        tokens.tolist()
        == drafter.propose(drafter.start(whole, tree, 32), PlainNoise()).tokens.tolist()
    )
