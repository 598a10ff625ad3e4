"""Comparing a candidate within a server: false swaps stay below the error rate, true gains are
found, and no client decides alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import log

import numpy as np
import pytest

from inference.server.trial import ArmAnswer
from scripts.evidence.trial_replay import replay, trial_of
from train.learning.comparison import (
    BETTER,
    OPEN,
    WORSE,
    TrialTest,
    conversations,
    needed_evidence,
    paired,
)

DEPTH, MOST = 3, 12


def answers(rng: np.random.Generator, means: np.ndarray) -> tuple[ArmAnswer, ...]:
    """An answer for each mean acceptance, which varies from answer to answer as texts do."""
    own = np.clip(rng.normal(means, 0.4), 0.05, DEPTH - 0.05)
    passes = rng.integers(MOST // 2, MOST + 1, len(means))
    accepted = rng.binomial(DEPTH * passes, own / DEPTH)
    return tuple(ArmAnswer("d", int(a), int(n)) for a, n in zip(accepted, passes, strict=True))


def verdict(rng: np.random.Generator, gain: np.ndarray, level: np.ndarray) -> str:
    """Look after every tenth pair until something is shown or the traffic ends."""
    first, second = answers(rng, level), answers(rng, level * gain)
    return replay(TrialTest(needed_evidence(0.01, 1), DEPTH, 0.25), first, second, 10)


def swaps_of_itself(count: int, length: int, drift: bool) -> list[str]:
    """Verdicts of comparisons of a drafter with itself. drift: acceptance of both changes along the
    traffic, as it does over a day."""
    rng, found, steps = np.random.default_rng(5), [], np.arange(length)
    for _ in range(count):
        turn = rng.uniform(0, 2 * np.pi)
        level = 1.0 + 0.6 * np.sin(steps / 40 + turn) if drift else np.ones(length)
        found.append(verdict(rng, np.ones(length), level))
    return found


def test_a_drafter_compared_with_itself_is_not_swapped() -> None:
    found = swaps_of_itself(40, 60, drift=True)
    assert found.count(BETTER) <= 1 and found.count(WORSE) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("drift", [False, True])
def test_of_200_comparisons_of_a_drafter_with_itself_at_most_one_in_a_hundred_swaps(
    drift: bool,
) -> None:
    found = swaps_of_itself(200, 200, drift)
    print(f"200 comparisons of a drafter with itself, drift={drift}: {Counter(found)}")
    assert found.count(BETTER) <= 2 and found.count(WORSE) <= 2


def test_a_better_candidate_is_found_and_a_worse_one_too() -> None:
    rng, level = np.random.default_rng(1), np.ones(400)
    assert [verdict(rng, 1.4 * level, level) for _ in range(8)].count(BETTER) >= 7
    assert [verdict(rng, 0.6 * level, level) for _ in range(8)].count(WORSE) >= 7


def test_the_thresholds_of_all_tries_together_spend_the_error_rate() -> None:
    spent = sum(np.exp(-needed_evidence(0.01, attempt)) for attempt in range(1, 60))
    assert spent == pytest.approx(0.01) and needed_evidence(0.01, 1) == pytest.approx(log(200))


def test_nothing_is_shown_before_the_first_answer() -> None:
    found = TrialTest(needed_evidence(0.01, 1), DEPTH, 0.25).look(trial_of((), ()))
    assert (found.verdict, found.pairs) == (OPEN, 0)


# Clients


def of_clients(
    rng: np.random.Generator, clients: np.ndarray, means: np.ndarray
) -> tuple[ArmAnswer, ...]:
    """Answers of these clients, with the mean acceptance of each."""
    own = zip(answers(rng, means[clients]), clients, strict=True)
    return tuple(replace(one, client=int(client)) for one, client in own)


def traffic_of(
    rng: np.random.Generator, rates: np.ndarray, current: np.ndarray, candidate: np.ndarray
) -> tuple[tuple[ArmAnswer, ...], tuple[ArmAnswer, ...]]:
    """Both arms' answers of clients at these rates, with their means under both drafters."""
    drawn = [rng.choice(len(rates), 600, p=rates / rates.sum()) for _ in range(2)]
    return of_clients(rng, drawn[0], current), of_clients(rng, drawn[1], candidate)


def judge(arms: tuple[tuple[ArmAnswer, ...], tuple[ArmAnswer, ...]], share: float) -> str:
    return replay(TrialTest(needed_evidence(0.01, 1), DEPTH, share), *arms, step=20)


RATES = np.array([90.0] + [2.0] * 20)
"""A client with two thirds of the traffic, and twenty others."""


def test_a_client_for_whom_alone_a_candidate_is_better_does_not_decide() -> None:
    # it has taught the candidate its own text, which the others pay for
    current = np.full(21, 1.2)
    candidate = np.array([2.4] + [0.7] * 20)
    assert 0.25 * 2.4 + 0.75 * 0.7 < 1.2  # with its largest share the candidate is worse
    rng = np.random.default_rng(3)
    arms = [traffic_of(rng, RATES, current, candidate) for _ in range(6)]
    assert [judge(one, 1.0) for one in arms] == [BETTER] * 6
    assert BETTER not in [judge(one, 0.25) for one in arms]


def test_a_client_beyond_its_share_does_not_hide_what_all_others_gain() -> None:
    current = np.full(21, 1.0)
    candidate = np.array([0.9] + [1.8] * 20)
    rng = np.random.default_rng(4)
    arms = [traffic_of(rng, RATES, current, candidate) for _ in range(6)]
    assert [judge(one, 0.25) for one in arms].count(BETTER) >= 5


def false_swaps_among_clients(count: int) -> list[str]:
    """Verdicts of comparisons of a drafter with itself on the traffic of clients who differ."""
    rng, found = np.random.default_rng(6), []
    for _ in range(count):
        means = np.array([rng.choice([0.1, 2.8]), *rng.uniform(0.5, 2.0, 20)])
        found.append(judge(traffic_of(rng, RATES, means, means), 0.25))
    return found


def test_a_drafter_compared_with_itself_among_unlike_clients_is_not_swapped() -> None:
    found = false_swaps_among_clients(20)
    assert found.count(BETTER) <= 1 and found.count(WORSE) <= 1


@pytest.mark.slow
def test_of_200_comparisons_among_unlike_clients_at_most_one_in_a_hundred_swaps() -> None:
    found = false_swaps_among_clients(200)
    print(f"200 comparisons of a drafter with itself: {Counter(found)}")
    assert found.count(BETTER) <= 2 and found.count(WORSE) <= 2


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
def test_what_counts_follows_from_clients_alone_and_stays_within_their_share(share: float) -> None:
    rng = np.random.default_rng(7)
    arms = traffic_of(rng, RATES, np.full(21, 1.0), np.full(21, 1.5))
    other = tuple(tuple(replace(one, accepted=0) for one in arm) for arm in arms)
    tests = [TrialTest(1e9, DEPTH, share) for _ in range(2)]
    for test, given in zip(tests, (arms, other), strict=True):
        found = test.look(trial_of(*given))
    taken = [[arm.taken for arm in (test._current, test._candidate)] for test in tests]
    assert taken[0] == taken[1]
    for arm, counted in zip(arms, taken[0], strict=True):
        whole, limit = Counter(one.client for one in arm), max(counted.values())
        assert counted == {client: min(of, limit) for client, of in whole.items()}
        assert limit <= max(share, 1 / len(whole)) * counted.total()
    assert found.pairs == min(counted.total() for counted in taken[0]) and found.answers == 600


def test_a_single_client_counts_wholly_and_clients_of_one_answer_each_do() -> None:
    rng = np.random.default_rng(8)
    for clients in (np.zeros(50, int), np.arange(50)):
        arms = [of_clients(rng, clients, np.ones(50)) for _ in range(2)]
        test = TrialTest(1e9, DEPTH, 0.25)
        assert test.look(trial_of(*arms)).pairs == 50


# On the same prompts


def on_prompts(
    rng: np.random.Generator, count: int, gain: float
) -> tuple[list[float], list[float]]:
    """Acceptances of two drafters on prompts that are easy or hard for both; gain: of the second."""
    level = rng.uniform(0.5, 2.0, count)
    own = (np.clip(rng.normal(level + more, 0.3), 0.0, DEPTH) for more in (0.0, gain))
    first, second = (one.tolist() for one in own)
    return first, second


def test_the_evidence_of_pairs_is_the_mean_of_what_gamblers_have_won() -> None:
    before, after = on_prompts(np.random.default_rng(0), 30, 0.2)
    won = []
    for share in (0.05, 0.1, 0.2, 0.4, 0.7, 0.95):
        money = 1.0
        for old, new in zip(before, after, strict=True):
            money *= 1.0 + share * (new - old) / DEPTH
        won.append(money)
    found = paired(before, after, DEPTH, 0.01)
    assert found.evidence == pytest.approx(log(sum(won) / len(won)))
    assert found.needed == pytest.approx(log(100)) and found.pairs == 30
    assert found.acceptance == pytest.approx((np.mean(before), np.mean(after)))
    back = paired(after, before, DEPTH, 0.01)
    assert (back.evidence, back.against) == (found.against, found.evidence)


def test_the_turns_of_a_conversation_are_one_observation() -> None:
    prompts = [[5, 6, 7], [5], [9, 9], [5, 6, 7, 8], [9], [7], [5, 8]]
    assert conversations(prompts) == [0, 0, 2, 0, 2, 1, 0]
    assert conversations([]) == []
    rng = np.random.default_rng(2)
    turns, false = 8, Counter[str]()
    units = np.repeat(np.arange(8), turns).tolist()
    for _ in range(300):  # each conversation likes or dislikes the candidate; on average none does
        level = np.clip(rng.normal(1.5, 0.3, 8 * turns), 0.0, DEPTH)
        liking = np.repeat(rng.normal(0.0, 0.4, 8), turns)
        other = np.clip(level + liking + rng.normal(0.0, 0.3, 8 * turns), 0.0, DEPTH)
        given = level.tolist(), other.tolist(), DEPTH, 0.01
        false["turns"] += paired(*given).verdict == BETTER
        false["conversations"] += paired(*given, units).verdict == BETTER
    assert false["conversations"] <= 3 < false["turns"]
    found = paired([0.0, 1.0, 2.0], [1.0, 1.0, 2.5], DEPTH, 0.01, [0, 0, 1])
    by_hand = paired([0.5, 2.0], [1.0, 2.5], DEPTH, 0.01)
    assert found == by_hand and found.pairs == 2


def test_pairs_show_a_gain_and_a_loss_and_seldom_what_is_not_there() -> None:
    rng = np.random.default_rng(1)
    verdicts = {
        gain: Counter(paired(*on_prompts(rng, 64, gain), DEPTH, 0.01).verdict for _ in range(200))
        for gain in (-0.5, 0.0, 0.5)
    }
    assert verdicts[0.5][BETTER] > 190 and verdicts[-0.5][WORSE] > 190
    assert verdicts[0.0][BETTER] <= 2 and verdicts[0.0][WORSE] <= 2
