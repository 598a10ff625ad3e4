"""Each definition on passes made by hand, where the right answer can be counted on fingers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.decoding.requests import PassRecord
from inference.measure import metrics
from inference.measure.metrics import Outcome, Totals
from tests.inference.example_report import outcome

DEPTH = 3
CONTEXTS = {"a": 30, "b": 40, "c": 50}
"""Tokens of the prompts, for what does not depend on them."""


def arm() -> Totals:
    """Two code prompts and one prose prompt: 7 passes, 8 accepted, 15 committed, 0.7 s."""
    return Totals.collect(
        [
            outcome("a", "code", [3, 1, 0], DEPTH, 0.3),
            outcome("b", "code", [2, 2], DEPTH, 0.2),
            outcome("c", "prose", [0, 0], DEPTH, 0.2),
        ],
        DEPTH,
    )


def plain() -> Totals:
    """The baseline: one token a pass, 0.09 s each; the same tokens per prompt."""
    rows = [("a", "code", 7), ("b", "code", 6), ("c", "prose", 2)]
    return Totals.collect([outcome(n, d, [0] * k, 0, 0.09 * k) for n, d, k in rows], 0)


def test_tau_is_committed_tokens_over_passes() -> None:
    estimate = metrics.tau_estimate(arm())
    assert (estimate.tokens, estimate.verify_passes) == (15, 7)
    assert estimate.tau == pytest.approx(15 / 7)
    assert estimate.ci95[0] < estimate.tau < estimate.ci95[1]


def test_tau_counts_what_was_committed_after_the_cut_at_end_of_text() -> None:
    cut = Outcome(
        "a", "code", [PassRecord(1, 2, True), PassRecord(2, 2, False)]
    )  # end-of-text was the second draft
    assert metrics.tau_estimate(Totals.collect([cut], DEPTH)).tau == 2.0


def test_acceptance_by_depth() -> None:
    estimate = metrics.tau_estimate(arm())
    # accepted per pass: 3 1 0 2 2 0 0
    assert estimate.unconditional == pytest.approx((4 / 7, 3 / 7, 1 / 7))
    assert estimate.conditional == pytest.approx((4 / 7, 3 / 4, 1 / 3))
    assert 1 + sum(estimate.unconditional) == pytest.approx(
        estimate.tau
    )  # without cuts, tau is one plus the sum


def test_acceptance_behind_a_depth_that_was_never_reached_is_zero() -> None:
    nothing = Totals.collect([outcome("a", "code", [0, 0], DEPTH)], DEPTH)
    assert metrics.tau_estimate(nothing).conditional == (0.0, 0.0, 0.0)


def test_tar_counts_the_refusal_that_ended_a_pass_and_no_untested_draft() -> None:
    # 8 accepted; every pass but the full one ended with a refusal
    assert metrics.tau_estimate(arm()).tar == pytest.approx(8 / (8 + 6))
    everything = Totals.collect([outcome("a", "code", [3, 3], DEPTH)], DEPTH)
    assert metrics.tau_estimate(everything).tar == 1.0
    assert metrics.tau_estimate(plain()).tar == 0.0  # the baseline drafts nothing


def test_speedup_is_a_ratio_of_sums_over_the_same_prompts() -> None:
    ratio, (low, high) = metrics.speedup(arm(), plain())
    assert ratio == pytest.approx((15 / 0.7) / (15 / (15 * 0.09)))
    assert low < ratio < high
    mean_of_ratios = np.mean([7 * 0.09 / 0.3, 6 * 0.09 / 0.2, 2 * 0.09 / 0.2])
    assert abs(ratio - mean_of_ratios) > 0.01


def test_speedup_pairs_prompts_whatever_their_order() -> None:
    shuffled = plain().take([2, 0, 1])
    assert metrics.speedup(arm(), shuffled)[0] == pytest.approx(metrics.speedup(arm(), plain())[0])
    found = metrics.summarise(arm(), shuffled, CONTEXTS)["domains"]
    assert found == metrics.summarise(arm(), plain(), CONTEXTS)["domains"]


def test_paired_interval_is_free_of_what_both_arms_share() -> None:
    """Prompts of very different speed, but the arm is twice as fast on each: the interval is a
    point."""
    times = [0.1, 1.0, 5.0, 0.3]
    slow = Totals.collect([outcome(str(i), "x", [0] * 9, 0, t) for i, t in enumerate(times)], 0)
    fast = Totals.collect(
        [outcome(str(i), "x", [2] * 3, DEPTH, t / 2) for i, t in enumerate(times)], DEPTH
    )
    assert metrics.speedup(fast, slow)[1] == pytest.approx((2.0, 2.0))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(100):
        rows = [outcome(str(i), "x", rng.binomial(1, 0.6, 12).tolist(), 1) for i in range(40)]
        low, high = metrics.tau_estimate(Totals.collect(rows, 1), seed=trial).ci95
        covered += low <= 1.6 <= high
    assert 86 <= covered <= 100


def test_prompts_of_one_unit_are_drawn_together() -> None:
    """As the turns of a conversation: their intervals cover the truth as often as they say."""
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(100):
        rows = []
        for talk in range(40):
            chance = rng.uniform(0.2, 1.0)  # what the turns of a conversation have in common
            for turn in range(3):
                passes = rng.binomial(1, chance, 12).tolist()
                rows.append(replace(outcome(f"{talk}/{turn}", "x", passes, 1), unit=str(talk)))
        low, high = metrics.tau_estimate(Totals.collect(rows, 1), seed=trial).ci95
        covered += low <= 1.6 <= high
    assert covered >= 86
    totals = Totals.collect(rows, 1)
    assert totals.units[:4] == ["0", "0", "0", "1"] and totals.take([3, 0]).units == ["1", "0"]
    weights = totals.resampled(seed=0)
    assert weights.shape[1] == 120 and (weights[:, 0] == weights[:, 2]).all()


def test_intervals_repeat_with_the_seed() -> None:
    assert metrics.tau_estimate(arm(), seed=3) == metrics.tau_estimate(arm(), seed=3)


def test_repeats_of_a_prompt_are_one_prompt() -> None:
    once = [outcome("a", "x", [3, 1], DEPTH, 0.1), outcome("b", "x", [0], DEPTH, 0.3)]
    single, double = Totals.collect(once, DEPTH), Totals.collect(once * 2, DEPTH)
    assert double.prompts == ["a", "b"]
    assert metrics.tau_estimate(double).ci95 == metrics.tau_estimate(single).ci95
    assert metrics.tokens_per_second(double) == pytest.approx(metrics.tokens_per_second(single))


def test_ideal_speedup_uses_measured_draft_time() -> None:
    passes = [PassRecord(2, 3, True)] * 4
    drafted = Totals.collect(
        [Outcome("a", "x", passes, {"draft": 0.2, "verify": 0.5, "other": 0.1})], DEPTH
    )
    base = Totals.collect([outcome("a", "x", [0] * 12, 0, 1.2)], 0)
    assert metrics.ideal_speedup(drafted, base) == pytest.approx(3 / (1 + 0.05 / 0.1))
    summary = metrics.summarise(drafted, base, CONTEXTS)
    assert summary["step_ms"] == pytest.approx(
        {"draft": 50, "verify": 125, "commit": 0, "other": 25}
    )


def test_the_gap_is_told_where_any_prompt_has_one() -> None:
    rows = [outcome("a", "code", [1], DEPTH, 0.1), outcome("b", "code", [1], DEPTH, 0.1)]
    assert metrics.GAP not in metrics.step_ms(Totals.collect(rows, DEPTH))
    rows[1].seconds[metrics.GAP] = 0.02
    assert metrics.step_ms(Totals.collect(rows, DEPTH))[metrics.GAP] == pytest.approx(10.0)


def test_prefill_time_is_apart() -> None:
    with_prefill = Outcome("a", "x", [PassRecord(0, 1, False)], {"prefill": 9.0, "verify": 0.5})
    assert metrics.tokens_per_second(Totals.collect([with_prefill], 0)) == 2.0


def test_summary_by_domain() -> None:
    domains = metrics.summarise(arm(), plain(), CONTEXTS)["domains"]
    assert list(domains) == ["code", "prose"]
    assert domains["code"]["tau"] == pytest.approx(13 / 5)
    assert domains["prose"].pop("speedup") == pytest.approx(0.9)
    assert domains["prose"] == {"tau": 1.0, "tau_ci95": [1.0, 1.0], "tar": 0.0}
    intervals = metrics.domain_speedup_ci95(arm(), plain())
    assert intervals["prose"] == pytest.approx([0.9, 0.9])


def test_summary_by_context_sums_the_prompts_of_a_bin() -> None:
    """Against taus that are counted by hand, with the bins' bounds on both sides."""
    tokens = {"a": 0, "b": 511, "c": 512, "d": 1023, "e": 4096, "f": 2048}
    accepted = {"a": [3, 1], "b": [1], "c": [2, 2], "d": [0], "e": [3], "f": []}
    rows = [outcome(name, "x", each, DEPTH, 0.1 * len(each)) for name, each in accepted.items()]
    base = [outcome(x, "x", [0] * sum(n + 1 for n in c), 0, 0.5) for x, c in accepted.items()]
    summary = metrics.summarise(Totals.collect(rows, DEPTH), Totals.collect(base, 0), tokens)
    found = summary["contexts"]
    assert [(one["first"], one["end"], one["prompts"]) for one in found] == [
        *((0, 512, 2), (512, 1024, 2), (2048, 4096, 1), (4096, 8192, 1))
    ]
    assert [one["tau"] for one in found] == pytest.approx([8 / 3, 7 / 3, 0.0, 4.0])
    assert [one["tar"] for one in found] == pytest.approx([5 / 7, 4 / 7, 0.0, 1.0])
    # the same tokens in one tenth of a second per pass against half a second per prompt
    speeds = [1.0 / 0.3, 1.0 / 0.3, 0.0, 5.0]
    assert [one["speedup"] for one in found] == pytest.approx(speeds)
    low, high = found[0]["tau_ci95"]
    assert (low, high) == pytest.approx((2.0, 3.0))  # prompts are drawn, not passes
    assert found[3]["speedup_ci95"] == pytest.approx([5.0, 5.0])


def test_a_domain_of_one_token_answers_is_reported_as_zero() -> None:
    rows = [outcome("a", "code", [1], DEPTH, 0.1), outcome("b", "yes/no", [], DEPTH)]
    base = [outcome("a", "code", [0, 0], 0, 0.2), outcome("b", "yes/no", [], 0)]
    summary = metrics.summarise(Totals.collect(rows, DEPTH), Totals.collect(base, 0), CONTEXTS)
    nothing = {"tau": 0.0, "tau_ci95": [0.0, 0.0], "tar": 0.0, "speedup": 0.0}
    assert summary["domains"]["yes/no"] == nothing
    assert summary["tau"] == 2.0


def test_a_speedup_over_nothing_is_zero() -> None:
    empty = Totals.collect([outcome("b", "yes/no", [], 0)], 0)
    assert metrics.speedup(empty, empty) == (0.0, (0.0, 0.0))
    assert metrics.tokens_per_second_ci95(empty) == (0.0, 0.0)


def timed(pass_seconds: Sequence[float], accepted: int) -> Totals:
    """One prompt per value: 10 tokens, each pass taking that long."""
    count = 10 // (accepted + 1)
    rows = [
        outcome(str(i), "x", [accepted] * count, accepted, t * count)
        for i, t in enumerate(pass_seconds)
    ]
    return Totals.collect(rows, accepted)


def test_a_speedup_above_tau_is_noticed() -> None:
    plain_times = [1.0, 1.1, 0.9, 1.0, 1.0, 1.05]
    assert not metrics.exceeds_tau(timed(plain_times, 1), timed(plain_times, 0))
    close = timed([t * 0.98 for t in plain_times], 1)  # within the clock's noise
    assert not metrics.exceeds_tau(close, timed(plain_times, 0))
    cheap = timed([t * 0.9 for t in plain_times], 1)
    assert metrics.exceeds_tau(cheap, timed(plain_times, 0))


def test_one_disturbed_prompt_does_not_condemn_the_baseline() -> None:
    # something else ran while the last prompt was decoded plainly
    disturbed = [1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    assert not metrics.exceeds_tau(timed([1.0] * 6, 1), timed(disturbed, 0))


def test_the_fastest_repeats_are_those_of_all_arms_together() -> None:
    seconds = {"plain": {0: 9.0, 1: 10.0, 2: 10.1}, "eagle3": {0: 8.0, 1: 5.0, 2: 5.2}}
    assert metrics.fastest_repeats(seconds, 2) == [1, 2]  # though plain was fastest in the first
    assert metrics.fastest_repeats(seconds, 1) == [1]
    assert metrics.fastest_repeats(seconds, 5) == [0, 1, 2]


def test_the_spread_is_of_the_slowest_repeat_over_the_fastest() -> None:
    seconds = {0: 8.0, 1: 5.0, 2: 5.2}
    assert metrics.repeat_spread(seconds, [0, 1, 2]) == pytest.approx(0.6)
    assert metrics.repeat_spread(seconds, [1, 2]) == pytest.approx(0.04)
    assert metrics.repeat_spread(seconds, [1]) == 0.0
    assert metrics.repeat_spread({0: 0.0, 1: 0.0}, [0, 1]) == 0.0  # answers of one token


def test_nothing_to_measure_is_said_plainly() -> None:
    with pytest.raises(UserError, match="no prompt was decoded"):
        Totals.collect([], DEPTH)
    with pytest.raises(UserError, match="every answer ended with its first token"):
        metrics.tau_estimate(Totals.collect([outcome("a", "x", [], DEPTH)], DEPTH))


def passes_of(prompt: str, accepted: int, count: int) -> Outcome:
    return outcome(prompt, "code", [accepted] * count, 8)


def test_a_gain_is_a_difference_of_ratios_over_the_same_prompts() -> None:
    """Prompts differ a lot, the drafters differ alike on all of them: the paired interval knows."""
    old = Totals.collect([passes_of(f"p{n}", n % 4, 10) for n in range(40)], 8)
    new = Totals.collect([passes_of(f"p{n}", n % 4 + 1, 10) for n in reversed(range(40))], 8)
    found = metrics.gain(new, old)
    assert found.tau == pytest.approx(1.0) and found.tau_ci95 == pytest.approx((1.0, 1.0))
    assert found.accepted == pytest.approx(2.5 / 1.5 - 1)
    low, high = found.accepted_ci95
    assert 0.4 < low < found.accepted < high < 1.2
    same = metrics.gain(old, old)
    assert (same.tau, same.tau_ci95, same.accepted, same.accepted_ci95) == (
        0.0,
        (0.0, 0.0),
        0.0,
        (0.0, 0.0),
    )


def test_a_gain_over_a_drafter_that_is_never_right_has_no_ratio() -> None:
    never = Totals.collect([passes_of(f"p{n}", 0, 5) for n in range(4)], 8)
    once = Totals.collect([passes_of(f"p{n}", 1, 5) for n in range(4)], 8)
    found = metrics.gain(once, never)
    assert (found.tau, found.accepted, found.accepted_ci95) == (1.0, 0.0, (0.0, 0.0))
