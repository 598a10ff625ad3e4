"""What slots know of drafted tokens: every rule by its formula, along given tokens and step by
step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.nn.block.dependency import FADE, OUTSIDE, Dependency, build_dependency, project_rows
from tests.heads.micro import MicroTarget

RULES = ("markov", "gated", "rnn", "gru", "selector", "parent")
BLOCKS, DEPTHS, RANK, TOP = 3, 5, 6, 4


def make(target: MicroTarget, name: str) -> Dependency:
    """A rule with random weights in float64."""
    rule = build_dependency(name, RANK, TOP, target.info)
    generator = torch.Generator().manual_seed(3)
    for part in rule.modules.values():
        part.double()
        for parameter in part.parameters():
            parameter.data = 0.5 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    return rule


def example(target: MicroTarget) -> tuple[Tensor, Tensor, Tensor]:
    """Parents [M, K], states [M, K, H] and base logits [M, K, V]."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, target.info.vocab_size, (BLOCKS, DEPTHS), generator=generator)
    states = torch.randn(
        BLOCKS, DEPTHS, target.info.hidden_size, generator=generator, dtype=torch.float64
    )
    return tokens, states, target.weights.logits(states)


def embed(target: MicroTarget) -> Any:
    return lambda tokens: F.embedding(tokens, target.weights.embedding)


def expected(
    target: MicroTarget, rule: Dependency, tokens: list[int], states: Tensor, base: Tensor
) -> list[Tensor]:
    """Logits at every depth of one block, by the rule's formula, one token at a time."""
    parts = dict(rule.modules)
    found = []
    memory = torch.zeros(RANK, dtype=torch.float64)
    for depth, token in enumerate(tokens):
        h, u = states[depth], base[depth]
        if "markov_head" in parts:
            tables: Any = parts["markov_head"]
            words = tables.markov_w1.weight[token]
            if tables.gate_proj is not None:
                gate = tables.gate_proj.weight @ torch.cat([h, words]) + tables.gate_proj.bias
                words = torch.sigmoid(gate) * words
            if tables.joint_proj is not None:
                joint = (
                    tables.joint_proj.weight @ torch.cat([memory, words, h])
                    + tables.joint_proj.bias
                )
                gate, fresh, out = joint.split(RANK)
                memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(
                    fresh
                )
                words = torch.tanh(out)
            found.append(u + tables.markov_w2.weight @ words)
        elif "prefix_gru" in parts:
            cell: Any = parts["prefix_gru"]
            reference = nn.GRU(target.info.hidden_size, RANK, bias=False, batch_first=True).double()
            reference.weight_ih_l0.data, reference.weight_hh_l0.data = (
                cell.weight_ih_l0.data,
                cell.weight_hh_l0.data,
            )
            words = target.weights.embedding[torch.tensor(tokens[: depth + 1])]
            state = reference(words[None])[0][0, -1]
            into, _, out = parts["embed_proj"]  # type: ignore[misc]
            found.append(u + out.weight @ F.silu(into.weight @ torch.cat([h, state])))
        elif "candidate_selector" in parts:
            tables = parts["candidate_selector"]
            edge = tables.predecessor_codebook[token] * (tables.hidden_projection.weight @ h)
            scores, worst = (
                u + tables.successor_codebook @ edge,
                u.sort(descending=True).values[TOP - 1],
            )
            found.append(
                torch.stack(
                    [s if v >= worst else v - OUTSIDE for s, v in zip(scores, u, strict=True)]
                )
            )
        else:
            mixer: Any = parts["parent_mixer"]
            word = target.weights.embedding[token]
            word = (
                word
                / (word.square().mean() + target.info.rms_norm_eps).sqrt()
                * mixer.embedding_norm.weight
            )
            both = torch.cat([word, F.rms_norm(h, h.shape)])
            inner = F.silu(mixer.gate_proj.weight @ both) * (mixer.up_proj.weight @ both)
            found.append(target.weights.logits(h + mixer.down_proj.weight @ inner))
    return found


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_every_rule_equals_its_formula(target: MicroTarget, name: str) -> None:
    rule, (tokens, states, base) = make(target, name), example(target)
    carry = rule.unroll(tokens, states, embed(target))
    logits = rule.logits(base, states, carry, target.weights.logits)
    for block in range(BLOCKS):
        for depth, row in enumerate(
            expected(target, rule, tokens[block].tolist(), states[block], base[block])
        ):
            if name == "selector":  # tokens on the fringe are tested below
                ranked = base[block, depth].sort(descending=True).values
                sharp = (base[block, depth] >= ranked[TOP - 1]) | (
                    base[block, depth] < ranked[TOP - 1] - FADE
                )
                torch.testing.assert_close(logits[block, depth][sharp], row[sharp])
            else:
                torch.testing.assert_close(logits[block, depth], row)


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_what_is_added_to_a_few_tokens_is_what_is_added_to_all(
    target: MicroTarget, name: str
) -> None:
    """For several parents of one slot, as drafting asks."""
    rule, (tokens, states, base) = make(target, name), example(target)
    carry, project = rule.unroll(tokens, states, embed(target)), target.weights.logits
    generator = torch.Generator().manual_seed(9)
    columns = torch.randint(0, base.shape[-1], (BLOCKS, 7), generator=generator)
    for depth in range(DEPTHS):
        slot, parents = base[:, depth : depth + 1], carry[:, [depth, 0, 1]]
        state = states[:, depth : depth + 1].expand(-1, 3, -1)
        whole = rule.logits(slot, state, parents, project) - slot
        expected = whole.gather(-1, columns[:, None].expand(-1, 3, -1))
        found = rule.added(columns, slot, state, parents, project)
        assert found.shape == (BLOCKS, 3, 7)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_reading_level_by_level_equals_reading_along_the_text(
    target: MicroTarget, name: str
) -> None:
    rule, (tokens, states, _) = make(target, name), example(target)
    whole = rule.unroll(tokens, states, embed(target))
    carry = states.new_zeros(BLOCKS, rule.size)
    for depth in range(DEPTHS):
        carry = rule.read(tokens[:, depth], states[:, depth], carry, embed(target))
        torch.testing.assert_close(carry, whole[:, depth])


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_every_rule_starts_as_none(target: MicroTarget, name: str) -> None:
    rule, (tokens, states, base) = (
        build_dependency(name, RANK, target.info.vocab_size, target.info),
        example(target),
    )
    for part in rule.modules.values():
        part.double()
    rule.initialise(target.weights, torch.Generator().manual_seed(0))
    carry = rule.unroll(tokens, states, embed(target))
    torch.testing.assert_close(rule.logits(base, states, carry, target.weights.logits), base)


@torch.no_grad()
def test_the_selectors_walk_is_the_best_choice_at_every_step(target: MicroTarget) -> None:
    """Walking by its logits picks, from the candidates alone, what enumerating unary plus edge
    finds."""
    rule, (_, states, base) = make(target, "selector"), example(target)
    tables: Any = rule.modules["candidate_selector"]
    for block in range(BLOCKS):
        token, carry = 7, states.new_zeros(rule.size)
        for depth in range(DEPTHS):
            h, u = states[block, depth], base[block, depth]
            candidates = u.topk(TOP).indices.tolist()
            edge = tables.predecessor_codebook[token] * tables.hidden_projection(h)
            scored = {b: float(u[b] + edge @ tables.successor_codebook[b]) for b in candidates}
            carry = rule.read(torch.tensor(token), h, carry, embed(target))
            logits = rule.logits(u, h, carry, target.weights.logits)
            outside = [b for b in range(len(u)) if u[b] < u[candidates[-1]] - FADE]
            assert all(float(logits[b]) == pytest.approx(scored[b]) for b in candidates)
            assert all(float(logits[b]) == pytest.approx(float(u[b]) - OUTSIDE) for b in outside)
            token = max(candidates, key=lambda b: scored[b])


@torch.no_grad()
def test_a_close_call_moves_the_selectors_logits_little(target: MicroTarget) -> None:
    """Rounding that swaps the worst candidate with the next token must not swap their logits' rank
    by more than itself."""
    rule, (tokens, states, base) = make(target, "selector"), example(target)
    carry = rule.unroll(tokens, states, embed(target))
    nudge = 1e-3 * torch.sin(torch.arange(base.numel(), dtype=torch.float64)).view(base.shape)
    found, moved = (
        rule.logits(u, states, carry, target.weights.logits) for u in (base, base + nudge)
    )
    assert float((found - moved).abs().max()) < 0.2


def test_the_selector_learns_only_where_the_right_token_is_a_candidate(target: MicroTarget) -> None:
    rule, (_, _, base) = make(target, "selector"), example(target)
    rows = base.flatten(0, 1)
    order = rows.sort(descending=True).indices
    inside = rule.teaches(rows, order[:, TOP - 1])
    outside = rule.teaches(rows, order[:, -1])
    assert inside is not None and outside is not None and inside.all() and not outside.any()


@pytest.mark.parametrize("size", [4, 16, 40])
def test_projected_rows_keep_what_is_alike_alike(size: int) -> None:
    rows = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    rows[1] = rows[0] + 0.05 * rows[2]
    turned = project_rows(rows, size, torch.Generator().manual_seed(1))
    assert turned.shape == (30, size)
    assert float(turned.square().mean()) == pytest.approx(1.0, rel=0.35)
    near = float((turned[0] - turned[1]).norm())
    assert all(
        near < float((turned[a] - turned[b]).norm())
        for a, b in itertools.combinations(range(2, 12), 2)
    )
