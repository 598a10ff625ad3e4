"""SpecVocab's shortlist: against the whole LM head row by row, its start, its loss, both ways of
computing it, drafting and training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.tree import TokenTree
from heads.nn.feature.shortlist import EDGE, OUTSIDE, Shortlist, logits_of
from inference.parity import check_parity
from tests.heads.explicit import CHOICES, DOCUMENTS, check_paths_of_a_tree
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states
from train.refresh import load_start

KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3},
    "peagle": {"depths": 3, "num_layers": 2},
}


def make(target: MicroTarget, kind: str = "eagle3", **options: Any) -> Any:
    config = get_kind(kind).config_class(**(KINDS[kind] | options))
    counts = torch.arange(41).flip(0) + 100 * (torch.arange(41) % 3 == 0)
    drafter = new_drafter(kind, config, target.info, target.weights, 0, counts)
    if drafter.shortlist is not None:  # other scores than the start, which know the LM head
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in drafter.shortlist.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


def parts(rows: int = 7, size: int = 9) -> tuple[Shortlist, nn.Linear, Tensor]:
    """A shortlist of an LM head of 41 columns, and states of size 16."""
    generator = torch.Generator().manual_seed(5)
    found = Shortlist(16, 41, size, 4).double()
    lm_head = nn.Linear(16, 41, bias=False).double()
    with torch.no_grad():
        for weight in (*found.parameters(), *lm_head.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return found, lm_head, torch.randn(rows, 16, generator=generator).double()


def explicit_row(found: Shortlist, lm_head: nn.Linear, state: Tensor) -> Tensor:
    """The logits [V'] of one state, by the definition, from all logits of the LM head."""
    scores = found.up_proj.weight @ (found.down_proj.weight @ state)
    exact = lm_head.weight @ state
    ranked = scores.argsort(descending=True).tolist()
    on = ranked[: found.size]
    way = [float((scores[i] - scores[on[-1]]) / (scores[on[0]] - scores[on[-1]])) for i in on]
    inside = torch.tensor([min(1.0, each / EDGE) for each in way], dtype=torch.float64)
    level = ((inside * exact[on].exp()).sum() / (inside * scores[on].exp()).sum()).log()
    out = scores + level - OUTSIDE
    out[on] = inside * exact[on] + (1 - inside) * out[on]
    return out


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("size", [2, 9, 40])
def test_logits_are_exact_on_the_shortlist_and_far_below_outside(rows: int, size: int) -> None:
    found, lm_head, states = parts(rows, size)
    logits = found(states, lm_head)
    for row in range(rows):
        torch.testing.assert_close(logits[row], explicit_row(found, lm_head, states[row]))
    if size == 9:
        same = torch.isclose(logits, lm_head(states))
        assert bool((same.sum(1) >= 3).all()) and bool((same.sum(1) < 9).all())
        scores = found.scores(states)[:, None].expand(-1, 41, -1)
        on = found.holds(scores, torch.arange(41))
        assert on.shape == (rows, 41) and on.sum(1).tolist() == [9] * rows
        assert not bool((same & ~on).any())


@torch.no_grad()
def test_few_rows_are_read_one_by_one_and_many_with_the_whole_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, lm_head, states = parts(rows=7)
    calls = []
    lm_head.register_forward_hook(lambda *_: calls.append(1))
    by_row = torch.cat([found(states[i : i + 1], lm_head) for i in range(7)])
    assert not calls, "9 of 41 columns: the matrix is not read"
    torch.testing.assert_close(found(states, lm_head), by_row)
    assert calls == [1], "63 rows of a matrix of 41"


@torch.no_grad()
def test_low_rank_updates_of_the_lm_head_are_in_the_logits_of_a_shortlist() -> None:
    """Its rows cannot be read one by one then."""
    _, lm_head, states = parts(rows=1)
    model = nn.ModuleDict({"lm_head": lm_head})
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    updated = inject_adapter_in_model(config, model)["lm_head"]
    updated.to(states.dtype)
    tokens = torch.tensor([[3, 8]])
    torch.testing.assert_close(
        logits_of(states, updated, tokens), updated(states).gather(-1, tokens)
    )
    assert not torch.allclose(
        logits_of(states, updated, tokens), lm_head(states).gather(-1, tokens)
    )


@torch.no_grad()
def test_a_tie_at_the_edge_moves_nothing() -> None:
    """Which of two tokens is last on the shortlist is decided by rounding: their logits are those
    of tokens outside."""
    found, lm_head, states = parts(rows=1)
    order = found.scores(states)[0].argsort(descending=True)
    last, next_ = int(order[8]), int(order[9])
    other = []
    for first in (last, next_):
        found.up_proj.weight[last] = found.up_proj.weight[next_]
        found.up_proj.weight[first] *= 1 + 1e-9
        other.append(found(states, lm_head))
    torch.testing.assert_close(other[0], other[1], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_scores_start_as_the_best_approximation_of_the_lm_head(target: MicroTarget) -> None:
    config = get_kind("eagle3").config_class(shortlist=9, shortlist_rank=6)
    drafter = new_drafter("eagle3", config, target.info, target.weights, 0)
    weight = drafter.lm_head.weight
    u, s, v = torch.linalg.svd(weight)
    best = u[:, :6] @ s[:6].diag() @ v[:6]
    product = drafter.shortlist.up_proj.weight @ drafter.shortlist.down_proj.weight
    torch.testing.assert_close(product, best, rtol=1e-4, atol=1e-4)
    whole = new_drafter(
        "eagle3",
        get_kind("eagle3").config_class(shortlist=9, shortlist_rank=16),
        target.info,
        target.weights,
        0,
    )
    states = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).double()
    exact = whole.lm_head(states)
    torch.testing.assert_close(whole.shortlist.scores(states), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole.logits(states).argmax(-1), exact.argmax(-1))
    assert drafter.shortlist.down_proj.weight.shape == (6, 16)
    assert make(target, shortlist=9).shortlist.down_proj.weight.shape == (2, 16)
    assert make(target, shortlist=41).shortlist is None, "all tokens need no list"


@pytest.mark.parametrize("reduced", [0, 31])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_computes_what_training_did(target: MicroTarget, kind: str, reduced: int) -> None:
    drafter = make(target, kind, shortlist=9, shortlist_rank=4, draft_vocab_size=reduced)
    assert check_parity(target, drafter, DOCUMENTS, depth=3).compared > 12


@torch.no_grad()
def test_each_path_of_a_tree_equals_its_chain(target: MicroTarget) -> None:
    drafter = make(target, shortlist=9, shortlist_rank=4)
    check_paths_of_a_tree(target, drafter, CHOICES, torch.arange(41))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_computes_the_shortlists_logits_alone(target: MicroTarget, kind: str) -> None:
    """And drafts the best of them."""
    drafter = make(target, kind, shortlist=9, shortlist_rank=4)
    state = drafter.start(
        seen_states(target, drafter.needs, DOCUMENTS[:1], [(0, 8)]), TokenTree.chain(1), 32
    )
    drafter.lm_head.register_forward_hook(lambda *_: pytest.fail("the whole LM head was computed"))
    emitted = state.output if kind == "peagle" else drafter.norm(state.output)
    expected = explicit_row(drafter.shortlist, drafter.lm_head, emitted[0, 0]).argmax()
    assert int(drafter.propose(state, PlainNoise()).tokens[0, 1]) == int(expected)


@pytest.mark.parametrize("reduced", [0, 26])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_adds_the_scores_own_which_reaches_no_other_weight(
    target: MicroTarget, kind: str, reduced: int
) -> None:
    """Every other weight is trained as without a shortlist; right tokens that are not on it count
    as wrong."""
    options = {"draft_vocab_size": reduced, "train_lm_head": True}
    plain, listed = make(target, kind, **options), make(target, kind, shortlist=9, **options)
    listed.load_state_dict(plain.state_dict(), strict=False)
    batch = packed_batch(target, plain.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    before, after = plain.loss(batch), listed.loss(batch)
    before.loss_sum.backward()
    after.loss_sum.backward()
    gradients = dict(listed.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad)
    # the scores' loss is that of a drafter whose LM head gives the scores
    plain.lm_head.register_forward_hook(lambda _, given, __: listed.shortlist.scores(given[0]))
    torch.testing.assert_close(after.loss_sum - before.loss_sum, plain.loss(batch).loss_sum)


@torch.no_grad()
@pytest.mark.parametrize("reduced", [0, 26])
def test_right_tokens_count_where_they_are_on_the_shortlist(
    target: MicroTarget, reduced: int
) -> None:
    drafter = make(target, shortlist=9, shortlist_rank=4, draft_vocab_size=reduced)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    states = torch.arange(30)
    near = batch.last_hidden.flatten(0, 1)[states]
    outputs = torch.stack([near, near + 0.3 * near.flip(0)])  # [K, M, H]
    _, counts, right = drafter.judge(batch, outputs, states)
    ids = drafter.d2t + torch.arange(26) if drafter.reduced else torch.arange(41)
    on_list = 0
    for k in range(2):
        for m in range(30):
            wanted = int(target.weights.logits(near[m]).argmax())
            best = int(ids[drafter.lm_head(outputs[k, m]).argmax()])
            ranked = drafter.shortlist.scores(outputs[k, m]).topk(9).indices
            expected = best == wanted and wanted in ids[ranked]
            assert bool(right[k, m]) == expected
            on_list += expected
            assert bool(counts.expand(2, -1)[k, m]) == (wanted in ids)
    assert 5 < on_list < 55


def test_a_trained_drafter_gets_a_shortlist(target: MicroTarget, tmp_path: Any) -> None:
    """A training may start from one without: its scores begin as they do in a new one."""
    plain = make(target)
    save_drafter(plain, tmp_path, target.info)
    listed = new_drafter(
        "eagle3", get_kind("eagle3").config_class(shortlist=9), target.info, target.weights, 1
    )
    load_start(listed, tmp_path, target.info, False)
    for name, value in plain.state_dict().items():
        assert torch.equal(listed.state_dict()[name], value), name
    assert bool(listed.shortlist.up_proj.weight.isfinite().all())


def test_settings_of_a_shortlist(target: MicroTarget) -> None:
    with pytest.raises(UserError, match=r"head.shortlist must be 0 \(all tokens\) or at least 2"):
        make(target, shortlist=1)
    with pytest.raises(UserError, match="at most the target's hidden size of 16; given: 17"):
        make(target, shortlist=9, shortlist_rank=17)
