"""The advice: what is simulated is compared fairly, and the best way at each concurrency is
named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.engines.settings import N_MAX, P_MIN
from inference.measure.prompts import Prompt
from inference.traffic.advice import Way, advise, seen_by_users, ways_to_serve
from inference.traffic.arrivals import Arrival
from inference.traffic.config import TrafficConfig
from inference.traffic.simulate import Costs, Served, SimulatedRequest
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target

ROWS = 8
PLAIN = Way(
    "none",
    NONE,
    Costs((0.010,) * ROWS, (0.0,) * ROWS, 0.001, 0.0),
    {"": [1]},
    {"cache": 100, "weights": 0},
)
COSTLY = tuple(0.011 + 0.002 * rows for rows in range(ROWS))
"""Verification that grows with the batch: a long draft pays for few rows alone."""
LONG = Way(
    "a",
    Draft("chain", 4),
    Costs(COSTLY, (0.0,) * ROWS, 0.001, 0.0),
    {"": [2], "easy": [4]},
    {"cache": 110, "weights": 50},
    {1: 0.3, 8: 0.6},
)
SHORT = Way(
    "a",
    Draft("chain", 1),
    Costs((0.011,) * ROWS, (0.0,) * ROWS, 0.001, 0.0),
    {"": [1, 2]},
    {"cache": 104, "weights": 50},
)


def crowd(gap: float, count: int = 60, domain: str = "") -> list[Arrival]:
    return [Arrival(gap * number, 10, 41, domain) for number in range(count)]


def test_a_quiet_server_gets_the_long_draft_and_a_crowded_one_the_short_draft() -> None:
    ways = [PLAIN, SHORT, LONG]
    quiet = advise(ways, crowd(10.0), ROWS)
    assert quiet["concurrency"] == {"p50": 1, "p95": 1}
    assert quiet["best"] == {name: {"drafter": "a", "draft": "chain 4"} for name in ("p50", "p95")}
    assert quiet["engines"]["a"]["vllm"] == {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 1]],
    }
    assert quiet["engines"]["a"]["llama.cpp"] == {N_MAX: 4, P_MIN: 0.3}
    crowded = advise(ways, crowd(0.001), ROWS)
    assert crowded["concurrency"]["p95"] > ROWS  # some wait
    assert crowded["best"]["p95"] == {"drafter": "a", "draft": "chain 1"}
    plain, short, long = crowded["ways"]
    assert plain["speedup_at"] == {"p50": 1.0, "p95": 1.0}
    assert short["speedup_at"]["p95"] == pytest.approx(1.5 / 1.1, rel=0.1)
    assert long["speedup_at"]["p95"] == pytest.approx(2 * 0.010 / COSTLY[-1])
    assert [way["extra_bytes"] for way in crowded["ways"]] == [0, 54, 60]
    assert (
        short["latency"]["p95"] < plain["latency"]["p95"]
        and short["tokens_per_second"] > plain["tokens_per_second"]
    )


def test_where_nothing_pays_none_is_the_advice() -> None:
    dear = replace(LONG, costs=Costs((0.1,) * ROWS, (0.0,) * ROWS, 0.001, 0.0))
    told = advise([PLAIN, dear], crowd(0.01), ROWS)
    assert {best["draft"] for best in told["best"].values()} == {"none"}


def test_a_domain_has_its_own_acceptance() -> None:
    everywhere, easy = (
        advise([PLAIN, LONG], crowd(1.0, domain=name), ROWS) for name in ("unheard of", "easy")
    )
    assert everywhere["ways"][1]["tau"] == 2.0 and easy["ways"][1]["tau"] == 4.0
    assert easy["traffic"] == {
        "requests": 60,
        "seconds": 59.0,
        "prompt_tokens": 10.0,
        "answer_tokens": 41.0,
        "domains": ["easy"],
    }


def test_what_users_see_is_counted_from_their_arrival() -> None:
    jobs = [SimulatedRequest(Arrival(0.0, 3, 5), (4,)), SimulatedRequest(Arrival(2.0, 3, 5), (4,))]
    seen = seen_by_users(jobs, [Served(1.0, 3.0), Served(4.0, 5.0)])
    assert seen["tokens_per_second"] == 2.0
    assert seen["latency"]["p50"] == 3.0 and seen["first_token"]["p50"] == 1.5


def test_chains_that_llama_cpp_ends_early_have_a_least_probability() -> None:
    target = random_target()
    prompts = [Prompt(f"p{n}", "x", tokens=tuple(range(3, 8 + n))) for n in range(3)]
    config = TrafficConfig(rows=3, depths=(2,), batches=(1,), max_new_tokens=4, repeats=1)
    drafters = {kind: drafter_of(kind, target) for kind in ("distilled", "medusa")}
    ways = ways_to_serve(config, target, drafters, prompts, DecodeConfig(), 32)
    assert [(way.drafter, sorted(way.least)) for way in ways] == [
        ("none", []),
        ("distilled", [1, 2, 3]),
        ("medusa", []),
    ]
