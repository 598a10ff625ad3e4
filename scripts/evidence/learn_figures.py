"""The figures of the report on learning: shares of tau with intervals, tau over time, facts from
the learner's journal, and how often a drafter is swapped for itself.

Legend: P probes, R resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from inference.measure.metrics import Floats, divide, middle95, ratios, resample_weights
from inference.server.trial import ArmAnswer
from scripts.evidence.common import Facts
from scripts.evidence.served import Answer
from scripts.evidence.trial_replay import replay
from train.learning.comparison import BETTER, OPEN, WORSE, TrialTest, needed_evidence
from train.learning.config import LearnConfig
from train.learning.cycle import COLLECTED, CRASHED, REJECTED, SWAPPED, TRAINED
from train.learning.journal import Entry

FROZEN, LEARNED, RETRAINED = SIDES = ("frozen", "learned", "retrained")
LOOK = 10
"""Answers of each drafter between two evaluations of a simulated comparison."""


def sums(arm: Facts) -> tuple[Floats, Floats]:
    """Committed tokens and passes of an arm's probes, each [P]."""
    return np.array(arm["committed"], dtype=float), np.array(arm["passes"], dtype=float)


def tau(arm: Facts) -> float:
    """Committed tokens per pass."""
    committed, passes = sums(arm)
    return divide(committed.sum(), passes.sum())


def shares(arms: Mapping[str, Facts]) -> Facts:
    """tau of the three sides on the same probes, and learning's share of the retrained tau, with
    95% intervals over probes, drawn together.

    `by_retrained`: learned tau / retrained tau. `accepted_by_retrained`: the same of tau - 1.
    `regained`: (learned - frozen) / (retrained - frozen), None if the interval of the denominator
    contains 0.
    """
    weights = resample_weights(len(arms[FROZEN]["passes"]), seed=0)  # [R, P]
    found: dict[str, float] = {name: tau(arms[name]) for name in SIDES}
    drawn = {}
    for name in SIDES:
        committed, passes = sums(arms[name])
        drawn[name] = ratios(weights @ committed, weights @ passes)  # [R]
    content: Facts = {
        name: {"tau": found[name], "tau_ci95": middle95(drawn[name])} for name in SIDES
    }

    def put(key: str, above: float, below: float, tops: Floats, bottoms: Floats) -> None:
        content[key] = divide(above, below)
        content[f"{key}_ci95"] = middle95(ratios(tops, bottoms))

    ours, theirs, before = (found[name] for name in (LEARNED, RETRAINED, FROZEN))
    mine, other, old = (drawn[name] for name in (LEARNED, RETRAINED, FROZEN))
    put("by_retrained", ours, theirs, mine, other)
    put("accepted_by_retrained", ours - 1, theirs - 1, mine - 1, other - 1)
    put("regained", ours - before, theirs - before, mine - old, other - old)
    if middle95(other - old)[0] <= 0:
        content |= {"regained": None, "regained_ci95": None}
    return content


def over_time(live: Sequence[Answer], arms: Mapping[str, Facts], windows: int) -> list[Facts]:
    """tau by windows of the probes, in the order of their requests: of the server's answers, and of
    the frozen and the retrained drafter on the same probes. live: the probes' answers."""
    found = []
    for part in np.array_split(np.arange(len(live)), min(windows, len(live))):
        own = [live[place] for place in part]
        passes = sum(one.passes for one in own)
        row: Facts = {"through": own[-1].number + 1}
        row["learning"] = divide(sum(one.committed for one in own), passes)
        for name in (FROZEN, RETRAINED):
            committed, counts = sums(arms[name])
            row[name] = divide(committed[part].sum(), counts[part].sum())
        found.append(row)
    return found


def cycles(entries: Sequence[Entry]) -> Facts:
    """The learner's cycles from its journal, by their outcome, and the cost of training."""
    count = Counter(entry.event for entry in entries)
    trained = [entry.facts for entry in entries if entry.event == TRAINED]
    return {
        "begun": count[COLLECTED],
        "swapped": count[SWAPPED],
        "rejected": [entry.facts["why"] for entry in entries if entry.event == REJECTED],
        "crashed": count[CRASHED],
        "learnt_from_tokens": sum(
            entry.facts["tokens"] for entry in entries if entry.event == COLLECTED
        ),
        "trainings": len(trained),
        "tokens": sum(facts["tokens"] for facts in trained),
        "seconds": sum(facts["seconds"] for facts in trained),
    }


def swaps_of_itself(pools: Sequence[Facts], count: int, pairs: int, clients: int) -> Facts:
    """`count` comparisons of a drafter with itself. Each has `pairs` answers per side, drawn from
    the observed answers of an arm; arms take turns. The settings are the learner's."""
    config, rng, verdicts = LearnConfig(), np.random.default_rng(0), Counter[str]()
    for number in range(count):
        observed = [one for one in pools[number % len(pools)]["observed"] if one[1]]
        rows = rng.integers(len(observed), size=(2, pairs))
        senders = rng.integers(clients, size=(2, pairs))
        current, candidate = (
            [
                ArmAnswer("", observed[row][0], observed[row][1], int(sender))
                for row, sender in zip(*side, strict=True)
            ]
            for side in zip(rows, senders, strict=True)
        )
        needed = needed_evidence(config.error_rate, 1)
        depth = pools[number % len(pools)]["depth"]
        test = TrialTest(needed, depth, config.client_share)
        verdicts[replay(test, current, candidate, LOOK)] += 1
    return {
        "comparisons": count,
        "pairs": pairs,
        "bound": config.error_rate,
        "swaps": verdicts[BETTER],
        "found_worse": verdicts[WORSE],
        "open": verdicts[OPEN],
    }
