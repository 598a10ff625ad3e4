"""Counters, responses and streams as they come: what follows from what is counted, what falls, what
is odd."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.engines.client import CHAT, PROBE, Answer, Endpoint, PassingError, steps_of
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
from tests.inference.engines.stub import Stub, serving
from tests.inference.tokenizers import tiny_tokenizer


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


@pytest.mark.parametrize(
    "content",
    [
        {"timings": {"predicted_n": 16, "draft_n": 12}},
        {"timings": {"predicted_n": None, "draft_n": 12, "draft_n_accepted": 9}},
        {"metrics": {"speculative_decoding": {"acceptance_histogram": 3, "num_draft_tokens": 9}}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": 4, "num_draft_tokens": 9}}},
        {"headstart": {"verify_passes": 4, "tau": 2.25}},
    ],
)
def test_figures_that_cannot_be_read_are_quoted(content: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="figures of speculation that cannot be read") as caught:
        of_response(content)
    assert str(content) in str(caught.value)


# Streams


def test_pieces_that_come_together_are_one_step() -> None:
    steady = [0.1 * place for place in range(10)]
    assert steps_of(steady) == 10
    bursts = [at + 0.001 * piece for at in steady for piece in range(3)]
    assert steps_of(bursts) == 10
    assert steps_of([0.5]) == 1 and steps_of([]) == 0


Gaps = Callable[[np.random.Generator], list[float]]


def stalled(rng: np.random.Generator) -> list[float]:
    """No speculation, a token every 20 ms, and every tenth one late."""
    return [*rng.permutation([0.02] * 90 + [0.1] * 10)]


def uneven(rng: np.random.Generator) -> list[float]:
    """No speculation, on a busy network."""
    return [*(0.02 * np.exp(rng.normal(0.0, 0.4, 100)) + 0.08 * (rng.random(100) < 0.1))]


def quick(rng: np.random.Generator) -> list[float]:
    return [*(0.004 * np.exp(rng.normal(0.0, 0.3, 100)))]


def bursting(rng: np.random.Generator, step: float = 0.02, within: float = 1e-4) -> list[float]:
    """Steps of four pieces."""
    parts = [[step * np.exp(rng.normal(0, 0.2)), *rng.exponential(within, 3)] for _ in range(25)]
    return [gap for part in parts for gap in part]


def quick_bursts(rng: np.random.Generator) -> list[float]:
    return bursting(rng, step=0.003, within=3e-5)


def smeared(rng: np.random.Generator) -> list[float]:
    """Gaps of every length alike."""
    return [*np.exp(rng.uniform(np.log(2e-4), np.log(5e-2), 100))]


def blurred(rng: np.random.Generator) -> list[float]:
    """Bursts whose pieces come one by one."""
    return bursting(rng, within=2e-3)


def at_once(rng: np.random.Generator) -> list[float]:
    """A proxy has held the whole answer back."""
    return [*rng.exponential(1e-4, 100)]


@pytest.mark.parametrize(
    ("gaps", "steps"),
    [
        *((gaps, 100) for gaps in (stalled, uneven, quick)),
        *((gaps, 25) for gaps in (bursting, quick_bursts)),
        *((gaps, 0) for gaps in (smeared, blurred, at_once)),
    ],
)
def test_delays_are_no_speculation_and_blurred_bursts_tell_nothing(gaps: Gaps, steps: int) -> None:
    for seed in range(10):
        found = steps_of([0.0, *np.cumsum(gaps(np.random.default_rng(seed)))])
        assert found - 1 == pytest.approx(steps, abs=2) if steps else found == 0


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:abc",
        "http://127.0.0.1:99999",
        "http://[::1",
        "127.0.0.1:8000",
        "http://:8",
    ],
)
def test_a_mistyped_address_is_refused_at_once(address: str) -> None:
    given = "HEADSTART_SERVER_KEY", 20.0
    with pytest.raises(UserError, match=r"bench\.server must be an address .* given: '") as caught:
        Endpoint(address, "bench.server", *given)
    assert address in str(caught.value)
    if "://" in address:
        with pytest.raises(UserError, match=r"bench\.serving\.metrics must be an address"):
            Endpoint("http://127.0.0.1:8000", "bench.server", *given, metrics=address)


def asked(stub: Stub) -> Answer:
    """The answer of a stub to a conversation."""
    body = {"messages": [{"role": "user", "content": "prose"}], "max_tokens": 9}

    async def ask() -> Answer:
        endpoint = Endpoint(stub.base, "bench.server", "HEADSTART_SERVER_KEY", 20.0)
        try:
            return await endpoint.ask(CHAT, body)
        finally:
            await endpoint.close()

    return asyncio.run(ask())


def test_a_text_may_have_parts() -> None:
    thought = {"choices": [{"delta": {"reasoning": [{"type": "image"}, {"text": "Hm. "}]}}]}
    with serving(parts=True, events=[thought]) as stub:
        found = asked(stub)
    assert found.text == "x" * 9 + "Hm. " and found.reasoned


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [None]},
        {"choices": ["text"]},
        {"choices": [{"delta": ["text"]}]},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [], "usage": [9, 9]},
        {"choices": [], "usage": {"completion_tokens": "many"}},
    ],
)
def test_an_event_of_another_form_is_quoted(event: dict[str, Any]) -> None:
    with serving(events=[event]) as stub, pytest.raises(UserError) as caught:
        asked(stub)
    said = str(caught.value)
    assert said.startswith(f"bench.server: {stub.base} streams an event that is not as in OpenAI's")
    assert str(event["choices"])[1:-1].replace("'", '"').replace("None", "null") in said


def test_a_tokenizer_that_cannot_be_asked_now_is_not_taken_for_none() -> None:
    tokenizer = tiny_tokenizer("chatml")
    mine = tokenizer.encode(PROBE, add_special_tokens=False)
    said = [503, 429, {"tokens": [7, *mine]}, 500, 500, 500, 502]

    async def check(stub: Stub) -> None:
        endpoint = Endpoint(stub.base, "bench.server", "HEADSTART_SERVER_KEY", 20.0)
        try:
            for status in (503, 429):
                with pytest.raises(PassingError, match=f"status {status}"):
                    await endpoint.require_tokenizer(tokenizer, "change it")
            with pytest.raises(UserError, match=r"has another tokenizer: .*; change it\."):
                await endpoint.require_tokenizer(tokenizer, "change it")
            # a route that is broken is none, in both forms of the question
            await endpoint.require_tokenizer(tokenizer, "change it")
            assert await endpoint.count_tokens({"prompt": "x"}) is None
            with pytest.raises(PassingError, match="status 502"):
                await endpoint.count_tokens({"prompt": "x"})
        finally:
            await endpoint.close()

    with serving(tokenize=deque(said)) as stub:
        asyncio.run(check(stub))
