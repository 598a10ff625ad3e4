"""Counters, responses and streams as they come: what follows from what is counted, what falls."""

from __future__ import annotations

from typing import Any

import pytest

from inference.engines.client import steps_of
from inference.engines.counters import (
    ENGINES,
    SGLANG,
    SGLANG_GAUGE,
    TENSORRT_TOTALS,
    VLLM,
    Acceptance,
    Look,
    ResetError,
    acceptance,
    identify,
    of_response,
    read_domains,
    read_look,
)
from inference.engines.scrape import read_samples


def test_two_of_three_numbers_give_the_third() -> None:
    known = Acceptance(40.0, 100.0, 60.0)
    for look in (
        Look(passes=40.0, accepted=60.0),
        Look(passes=40.0, tokens=110.0, requests=10.0),
        Look(accepted=60.0, tokens=110.0, requests=10.0),
        Look(length=2.5, tokens=110.0, requests=10.0),
        Look(passes=40.0),  # the client's own counts
    ):
        assert acceptance(look, 10, 110) == known
    assert acceptance(Look(tokens=5.0), 1, 5) is None


def test_series_of_ranks_are_added_and_created_times_are_not_counters() -> None:
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 3\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 4\n'
        'vllm:spec_decode_num_drafts_created{engine="1"} 1.7e9\n'
        'vllm:request_success_total{finished_reason="stop"} 2\n'
        'vllm:request_success_total{finished_reason="abort"} 9\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 5\n'
    )
    samples = list(read_samples(text))
    assert identify(samples) is VLLM
    look = read_look(samples, VLLM)
    assert (look.passes, look.requests, look.by_position) == (7.0, 2.0, (5.0, 2.0))
    assert list(read_domains(samples, VLLM)) == [""]


def test_what_fell_or_vanished_was_started_again() -> None:
    before = Look(requests=3.0, passes=20.0, by_position=(9.0, 4.0))
    assert Look(requests=5.0, passes=30.0, by_position=(12.0, 4.0)).since(before) == Look(
        requests=2.0, passes=10.0, by_position=(3.0, 0.0)
    )
    for now in (
        Look(requests=3.0, passes=19.0, by_position=(9.0, 4.0)),
        Look(requests=3.0, by_position=(9.0, 4.0)),
        Look(requests=3.0, passes=20.0, by_position=(9.0,)),
        Look(requests=3.0, passes=20.0, by_position=(9.0, 3.0)),
    ):
        with pytest.raises(ResetError):
            now.since(before)
    assert before.since(Look()) == before


def test_the_better_counters_of_an_engine_are_taken() -> None:
    gauge = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:num_requests_total 1\n'
    assert identify(list(read_samples(gauge))) is SGLANG_GAUGE
    both = gauge + "sglang:spec_verify_calls_total 5\n"
    assert identify(list(read_samples(both))) is SGLANG
    idle = list(read_samples(gauge.replace("2.5", "0")))
    assert acceptance(read_look(idle, SGLANG_GAUGE), 1, 5) is None  # it drafts nothing
    older = "trtllm_spec_decode_num_accepted_tokens_total 5\n"
    assert identify(list(read_samples(older))) is TENSORRT_TOTALS
    assert identify(list(read_samples("python_info 1\n"))) is None
    assert len({(engine.name, engine.definition) for engine in ENGINES}) == len(ENGINES)


@pytest.mark.parametrize(
    ("content", "engine", "found"),
    [
        (
            {"timings": {"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 9}},
            "llama.cpp",
            Acceptance(6.0, 15.0, 9.0, 12.0),
        ),
        (
            {
                "metrics": {
                    "speculative_decoding": {
                        "acceptance_histogram": [2, 1, 3],
                        "num_draft_tokens": 12,
                    }
                }
            },
            "vLLM",
            Acceptance(6.0, 13.0, 7.0, 12.0, (4.0, 3.0)),
        ),
        (
            {"headstart": {"verify_passes": 4, "tau": 2.25, "accepted_drafts": 6}},
            "headstart",
            Acceptance(4.0, 9.0, 6.0),
        ),
    ],
)
def test_responses_tell_their_own_acceptance(
    content: dict[str, Any], engine: str, found: Acceptance
) -> None:
    told = of_response(content)
    assert told is not None and (told[0], told[2]) == (engine, found)
    assert of_response({"timings": {"predicted_n": 3}, "metrics": None}) is None


def test_pieces_that_come_together_are_one_step() -> None:
    steady = [0.1 * place for place in range(10)]
    assert steps_of(steady) == 10
    bursts = [at + 0.001 * piece for at in steady for piece in range(3)]
    assert steps_of(bursts) == 10
    assert steps_of([0.5]) == 1 and steps_of([]) == 0
