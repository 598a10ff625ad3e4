"""A drafter follows a policy: the same text, a refresh that pays, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api import checkpoint
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.placement import PlacedDrafter, weights_on
from inference.decoding.requests import Completion, Request
from tests.heads.recipes import build
from tests.models import VOCAB, random_model, random_target
from train.engines.torch_engine import TorchEngine
from train.on_policy import OnPolicyConfig
from train.optim import OptimConfig
from train.policy.follower import Follower
from train.policy.rollouts import token_logprobs
from train.policy.training import RefreshSettings

SAMPLED = DecodeConfig(depth=3, temperature=1.0, batch_size=4, max_new_tokens=24)
PROMPTS = [[5, 6, 7], [9, 8], [1, 2, 3, 4, 5], [30, 31]] * 2
QUICK = RefreshSettings(OptimConfig(kind="muon", lr=0.02))


def policy(seed: int = 4) -> Any:
    return random_model("llama", seed).double()


def follower(kind: str = "eagle3", decode: DecodeConfig = SAMPLED, **settings: Any) -> Follower:
    target = random_target()
    changes = {"draft_vocab_size": 0} if kind == "eagle3" else {}
    drafter = build(kind, target, changes=changes) if kind else None
    return Follower(Engine(target, drafter, decode), replace(QUICK, **settings))


def texts(rollout: Any) -> list[list[int]]:
    return [one.tokens for one in rollout.completions]


def test_rollouts_are_the_policy_s_own_text_with_any_drafter() -> None:
    """Over changes of the policy and of the drafter, with the seeds going on by themselves."""
    found = []
    for kind in ("", "eagle3", "medusa"):
        one = follower(kind)
        parts = [one.rollout(PROMPTS)]
        for seed in (4, 5):
            one.follow(policy(seed))
            if kind:
                one.refresh(2)
            parts.append(one.rollout(PROMPTS))
        found.append([texts(part) for part in parts])
    assert found[0] == found[1] == found[2]
    assert found[0][1] != found[0][2]
    fresh = Follower(Engine(random_target(seed=5), None, SAMPLED))
    seeds = range(2 * len(PROMPTS), 3 * len(PROMPTS))
    assert texts(fresh.rollout(PROMPTS, seeds)) == found[0][2]


@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_a_refresh_raises_tau_after_the_policy_moved(optim: str) -> None:
    """Greedy text of a random target, whose patterns are quickly learnt."""
    greedy = replace(SAMPLED, temperature=0.0)
    one = follower(decode=greedy, optim=OptimConfig(kind=optim, lr=0.02))
    one.rollout(PROMPTS)
    one.refresh(25)
    known = one.rollout(PROMPTS).tau
    one.follow(policy())
    moved = one.rollout(PROMPTS).tau
    facts = one.refresh(25)
    again = one.rollout(PROMPTS).tau
    assert facts.tau == moved
    assert facts.last_loss < facts.loss
    assert known > 1.3 * moved
    assert again > 1.3 * moved


def test_a_refresh_is_the_same_every_time() -> None:
    found = []
    for _ in range(2):
        one = follower(micro_rows=2)
        one.rollout(PROMPTS)
        one.refresh(3)
        found.append(one.drafter.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_micro_batches_do_not_change_the_step() -> None:
    found = []
    for micro in (8, 1):
        one = follower(micro_rows=micro)
        one.rollout(PROMPTS)
        found.append(one.refresh(1).loss)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_last_rollouts_are_trained_on() -> None:
    counts = []
    for kept in (1, 3):
        one = follower(rollouts=kept, rows=100)
        for _ in range(3):
            one.rollout(PROMPTS)
        counts.append(one.refresh(1).tokens)
    assert counts[1] > 2 * counts[0]


def test_a_drafter_learns_from_its_own_words_if_asked() -> None:
    one = follower(on_policy=OnPolicyConfig(share=1.0, window=3))
    one.rollout(PROMPTS)
    assert math.isfinite(one.refresh(2).last_loss)


def test_a_rewritten_steps_loss_is_divided_by_what_is_supervised_then(
    divisors: list[tuple[int, int]],
) -> None:
    one = follower(on_policy=OnPolicyConfig(share=1.0, window=3), micro_rows=1, length=64)
    one.rollout(PROMPTS)
    one.refresh(1)
    assert len(divisors) > 1
    assert {divisor for _, divisor in divisors} == {sum(count for count, _ in divisors)}


def test_a_state_is_not_changed_by_later_refreshes() -> None:
    one = follower()
    one.rollout(PROMPTS)
    one.refresh(1)
    state = one.state()
    weights = one.drafter.fc.weight.clone()
    one.refresh(2)
    again = follower()
    again.load_state(state)
    assert not torch.equal(one.drafter.fc.weight, weights)
    assert torch.equal(again.drafter.fc.weight, weights)
    assert state["training"]["steps"] == 1


def test_a_drafter_on_another_device_is_refreshed_there() -> None:
    target = random_target()
    inner = build("eagle3", target)
    inner.follow(weights_on(target, "cpu"))
    one = Follower(Engine(target, PlacedDrafter(inner, "cpu", "cpu"), SAMPLED), QUICK)
    before = inner.fc.weight.clone()
    one.rollout(PROMPTS)
    one.refresh(1)
    assert not torch.equal(inner.fc.weight, before)


def test_log_probabilities_are_those_of_reading_each_answer_alone() -> None:
    one = follower(decode=replace(SAMPLED, temperature=0.7, top_k=9, repetition_penalty=1.3))
    rollout = one.rollout(PROMPTS, logprobs=True)
    assert rollout.logprobs is not None
    for done, found in zip(rollout.completions, rollout.logprobs, strict=True):
        assert found == pytest.approx(slow_logprobs(done), abs=1e-5)


@torch.no_grad()
def slow_logprobs(done: Completion) -> list[float]:
    """Token by token by the model's own forward pass and transformers' order of settings."""
    text, found, model = list(done.request.tokens), [], random_model("llama", 3).double()
    for token in done.tokens:
        logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        seen = torch.tensor(sorted(set(text)))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.3, logits[seen] / 1.3)
        logits = logits / 0.7
        logits[logits < logits.topk(9).values[-1]] = -torch.inf
        found.append(float(logits.log_softmax(-1)[token]))
        text.append(token)
    return found


def test_a_sampled_token_that_a_filter_would_remove_has_a_finite_log_probability() -> None:
    """Rounding may move it over the filter's edge in the pass that reads the answer."""
    done = [Completion(Request(0, (3, 4), 0, 9), [5, 6, 7])]
    for filters in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.99}):
        (found,) = token_logprobs(random_target(), done, replace(SAMPLED, **filters).sampling())
        assert all(math.isfinite(value) and value < 0 for value in found)


def test_log_probabilities_of_answers_of_all_lengths() -> None:
    """Also of none, and of more than one pass reads."""
    target = random_target()
    done = [
        Completion(Request(i, (3,) * (1 + i % 3), 0, 99), list(range(4, 4 + length)))
        for i, length in enumerate((0, 1, 60, 5))
    ]
    found = token_logprobs(target, done * 40, SAMPLED.sampling())
    assert [len(part) for part in found] == [0, 1, 60, 5] * 40
    assert found[2] == pytest.approx(token_logprobs(target, done[2:3], SAMPLED.sampling())[0])


def test_a_saved_drafter_loads_with_the_saved_policy(tmp_path: Path) -> None:
    one = follower()
    one.rollout(PROMPTS)
    one.refresh(1)
    one.save(tmp_path / "drafter", tmp_path)
    content = checkpoint.read_config(tmp_path / "drafter")
    assert content["target"]["id"] == str(tmp_path)
    stored = checkpoint.stored_weights(tmp_path / "drafter").tensors()
    assert torch.equal(stored["fc.weight"], one.drafter.fc.weight)


def test_a_step_that_is_no_number_changes_nothing_and_the_next_refresh_works() -> None:
    one = follower()
    one.rollout(PROMPTS)
    one.refresh(1)
    before = {name: value.clone() for name, value in one.drafter.state_dict().items()}
    training = one._training
    assert training is not None
    with torch.no_grad():
        training.drafter.fc.weight[0, 0] = torch.nan  # type: ignore[index,union-attr]
    with pytest.raises(UserError, match="The drafter keeps its weights"):
        one.refresh(2)
    for name, value in one.drafter.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert math.isfinite(one.refresh(1).last_loss)


def test_a_refresh_that_is_interrupted_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(micro_rows=4)
    one.rollout(PROMPTS)
    one.refresh(1)
    before = {name: value.clone() for name, value in one.drafter.state_dict().items()}
    training = one._training
    assert training is not None
    plain, calls = TorchEngine.forward_backward, []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:  # behind a whole step and half of the next one
            raise KeyboardInterrupt
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "forward_backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.refresh(3)
    for name, value in one.drafter.state_dict().items():
        assert torch.equal(value, before[name]), name
        own = training.drafter.state_dict()[name]
        assert torch.equal(own, value.to(own.dtype)), name
    assert all(parameter.grad is None for parameter in training.drafter.parameters())


def test_rows_are_read_in_as_few_passes_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(rows=6, micro_rows=4)
    one.rollout(PROMPTS)
    plain, rows = TorchEngine.forward_backward, []

    def counted(engine: Any, batch: Any, *given: Any) -> Any:
        rows.append(len(batch.tokens))
        return plain(engine, batch, *given)

    monkeypatch.setattr(TorchEngine, "forward_backward", counted)
    one.refresh(1)
    assert rows == [3, 3]


def test_a_state_from_before_an_update_keeps_the_targets_head() -> None:
    target = random_target()
    drafter = build("eagle3", target, changes={"draft_vocab_size": 0, "train_lm_head": False})
    one = Follower(Engine(target, drafter, SAMPLED), QUICK)
    one.rollout(PROMPTS)
    one.refresh(1)
    state = one.state()
    one.follow(policy())
    one.load_state(state)
    head = target.weights.lm_head
    assert torch.equal(one.drafter.lm_head.weight, head.float().double())  # trained in float32
    assert torch.equal(head, policy().lm_head.weight)


def test_what_cannot_be_refreshed_is_refused() -> None:
    for kind, said in (
        ("", "has no drafter"),
        ("ngram", "kind 'ngram'"),
        ("quantized_self", "no weights to train"),
        ("cascade", "no weights of its own"),
    ):
        one = follower(kind)
        one.rollout(PROMPTS[:1])
        with pytest.raises(UserError, match=said):
            one.refresh(1)
    with pytest.raises(UserError, match="call rollout before"):
        follower().refresh(1)
    with pytest.raises(UserError, match="at least 1 step"):
        follower().refresh(0)
    with pytest.raises(UserError, match="micro_rows"):
        RefreshSettings(micro_rows=0)


def test_rollouts_that_are_no_samples_of_the_policy_are_refused() -> None:
    with pytest.raises(UserError, match="samples of the policy"):
        follower(decode=replace(SAMPLED, rule="typical"))
    with pytest.raises(UserError, match="temperature=0"):
        follower(decode=replace(SAMPLED, temperature=0.0)).rollout(PROMPTS, logprobs=True)
    with pytest.raises(UserError, match="as many seeds"):
        follower().rollout(PROMPTS, seeds=[1])
    assert VOCAB > 31
