"""Counters as observations: windows of several engines, restarts, timestamps; alarms at the
promised rate however the traffic clumps."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.engines.client import PROBE
from inference.engines.scrape import read_samples
from inference.measure.prompts import Prompt
from inference.staleness.comparison import Comparison, Fresh, with_system
from inference.staleness.config import WatchConfig
from inference.staleness.evidence import Bets, Grid, Sums
from inference.staleness.reference import DomainAnswers, Reference
from inference.staleness.scrapes import (
    SILENT,
    Observation,
    Windows,
    follow,
    places_of,
    read_files,
    served_model,
    spread_of,
)
from inference.staleness.sequential_test import DriftTest
from tests.inference.engines.stub import DEPTH, Stub, serving, spec_lines
from tests.inference.staleness.answers import acceptance, draw
from tests.inference.tokenizers import tiny_tokenizer

VLLM = (
    'vllm:request_success_total{{finished_reason="stop"}} {answers}\n'
    "vllm:generation_tokens_total{{}} {tokens}\n"
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {passes}\n'
    'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}\n'
    'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
)


TENSORRT = "".join(
    f'trtllm_spec_decode_{name}_tokens_total{{token_position="{place}"}} {count}\n'
    for name, counts in (("drafted", (100, 100, 100)), ("accepted", (80, 20)))
    for place, count in enumerate(counts)
)
"""Drafts of three tokens, of which the third was never accepted."""


def scrape(passes: float, accepted: float, depth: int = 4, at: int | None = None) -> str:
    """vLLM's counters; accepted drafts are spread over the first positions."""
    text = VLLM.format(
        answers=passes // 10,
        tokens=passes,
        passes=passes,
        drafted=depth * passes,
        accepted=accepted,
    )
    for place in range(depth):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        text += f'{name}{{position="{place}"}} {accepted / depth}\n'
    return text if at is None else "".join(f"{line} {at}\n" for line in text.splitlines())


def reference(domains: Sequence[str] = ("code", "prose"), chance: float = 0.5) -> Reference:
    rng = np.random.default_rng(0)
    tallies = {}
    for name in domains:
        answers = [
            [min(4, accepted // passes + (place < accepted % passes)) for place in range(passes)]
            for accepted, passes in draw(rng, chance, 200)
        ]
        tallies[name] = DomainAnswers([[min(4, count) for count in one] for one in answers])
    draft: Any = {"shape": "chain", "depth": 4, "choices": []}
    return Reference({}, {}, draft, 0.0, 101, tallies, 4, "reference")


def take(windows: Windows, *texts: str) -> None:
    for text in texts:
        windows.take(list(read_samples(text)), "a scrape")


@pytest.mark.parametrize("form", ["vllm", "sglang", "trtllm", "trtllm_totals"])
def test_every_engine_counts_the_same(form: str) -> None:
    windows = Windows(least=100, depth=DEPTH)
    stub, rng = Stub(form=form), np.random.default_rng(0)
    known = []
    for _ in range(5):
        steps = [int(count) for count in rng.integers(0, DEPTH + 1, 60)]
        stub.count(steps, "p")
        known.append(sum(steps))
        take(windows, stub.show())
    seen = windows.whole[""]
    assert [one.passes for one in seen] == [120, 120]
    assert [one.accepted for one in seen] == [sum(known[:2]), sum(known[2:4])]
    assert windows.totals()[""].passes == 300
    if form in ("vllm", "trtllm"):
        assert sum(seen[0].reached) == sum(known[:2])
    assert spec_lines("something else", stub) == []
    assert not windows.gauged
    depth_known = form in ("vllm", "trtllm")
    assert [one[:13] for one in windows.remarks] == ([] if depth_known else ["Depth unknown"])


def test_a_gauge_is_no_count() -> None:
    """The mean of a log interval stands for every window that ends in it."""
    windows, stub = Windows(least=50, depth=DEPTH), Stub(form="sglang_gauge")
    rng = np.random.default_rng(0)
    for highest in (DEPTH, 1):
        stub.count([int(count) for count in rng.integers(0, highest + 1, 400)], "p")
        take(windows, stub.show())
    first, second = (one.accepted / one.passes for one in windows.whole[""])
    assert second > 0.5 * (first + 0.5)  # of half a token in truth
    assert windows.gauged
    gauge, depth = windows.remarks
    assert "neither the alarm rate nor the intervals are guaranteed" in gauge
    assert depth.startswith("Depth unknown: the counters of SGLang")


def test_a_server_that_was_started_again_goes_on_counting() -> None:
    windows = Windows(least=50, depth=4)
    take(windows, scrape(100, 200), scrape(200, 400), scrape(60, 90), scrape(120, 180))
    assert windows.restarts == 1
    seen = [(one.passes, one.accepted) for one in windows.whole[""]]
    assert seen == [(100, 200), (100, 200), (60, 90), (60, 90)]


def test_a_server_that_goes_on_without_speculation_is_not_watched() -> None:
    """Calm looks do not count, and neither does a server that drafts again in time."""
    plain = 'vllm:request_success_total{{finished_reason="stop"}} {}\n'
    answers = [plain.format(number) for number in range(SILENT + 1)]
    windows = Windows(least=50, depth=4)
    take(windows, scrape(100, 200), scrape(200, 400))
    take(windows, *answers[:SILENT], *[answers[SILENT - 1]] * SILENT)
    take(windows, scrape(60, 90), *answers[:SILENT])
    with pytest.raises(UserError, match="was started again without speculation"):
        take(windows, answers[SILENT])
    assert [one.passes for one in windows.whole[""]] == [100, 100, 60]


def test_a_server_that_was_started_again_may_have_counted_nothing_yet() -> None:
    """`headstart serve` shows its requests from the start, and the rest with the first answer."""
    own = (
        'headstart_requests_total{{outcome="stop"}} {answers}\n'
        'headstart_verify_passes_total{{domain="code"}} {passes}\n'
        'headstart_committed_tokens_total{{domain="code"}} {committed}\n'
    )
    texts = [own.format(answers=n, passes=100 * n, committed=250 * n) for n in (1, 2)]
    fresh = 'headstart_requests_total{outcome="stop"} 0\n'
    windows = Windows(least=50, depth=4)
    take(windows, *texts, fresh, texts[0])
    assert windows.restarts == 1
    assert [(one.passes, one.accepted) for one in windows.whole["code"]] == [(100, 150)] * 3
    with pytest.raises(UserError, match="has not answered yet"):
        take(Windows(least=50, depth=4), fresh)


@pytest.mark.parametrize(
    ("address", "base", "metrics"),
    [
        ("http://a:1", "http://a:1", ""),
        ("http://a:1/metrics", "http://a:1", "http://a:1/metrics"),
        ("http://metrics.b:9/c/metrics", "http://metrics.b:9/c", "http://metrics.b:9/c/metrics"),
        ("http://metrics:9", "http://metrics:9", ""),
    ],
)
def test_an_address_may_name_the_metrics(address: str, base: str, metrics: str) -> None:
    assert places_of(address) == (base, metrics)


@pytest.mark.parametrize("address", ["http://[::1/metrics", "http://a:b/metrics", "http://a:99999"])
def test_an_address_that_cannot_be_read_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"watch\.metrics must be an address such as"):
        places_of(address)


def test_a_server_that_runs_already_is_counted_from_the_first_look_on() -> None:
    windows = Windows(least=50, depth=4)
    windows.take(list(read_samples(scrape(1e6, 3e6))), "it", first=True)
    take(windows, scrape(1e6 + 80, 3e6 + 120))
    assert [(one.passes, one.accepted) for one in windows.whole[""]] == [(80, 120)]


def test_timestamps_give_the_order(tmp_path: Path) -> None:
    (tmp_path / "a.prom").write_text(scrape(300, 600, at=3000) + scrape(100, 200, at=1000))
    (tmp_path / "b.prom").write_text(scrape(200, 400, at=2000))
    windows = Windows(least=1, depth=4)
    for where, samples in read_files([tmp_path]):
        windows.take(samples, where)
    assert [one.passes for one in windows.whole[""]] == [100, 100, 100] and not windows.restarts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing_total 5\n", "no counters of a known engine"),
        ("vllm:generation_tokens_total 5\n", "serves without speculation"),
        (scrape(100, 200, depth=5), "drafts of 5 tokens"),
        (scrape(100, 200, depth=3), "drafts of 3 tokens"),
        (TENSORRT, "drafts of 3 tokens"),
    ],
)
def test_what_is_no_such_counter_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        take(Windows(least=10, depth=4), text)


def test_another_system_prompt_changes_nothing_else_of_a_prompt() -> None:
    asked = ({"role": "user", "content": "Hi."},)
    prompt = Prompt("p", "d", messages=asked, arguments={"enable_thinking": False})
    (found,) = with_system([prompt], "Be brief.")
    assert found.messages == ({"role": "system", "content": "Be brief."}, *asked)
    assert dataclasses.replace(found, messages=asked) == prompt


def test_the_spread_is_that_of_neighbours() -> None:
    """Against the variance that windows were drawn with; a change of level does not add to it."""
    rng = np.random.default_rng(1)

    def windows(level: float) -> list[Observation]:
        found = []
        for passes in rng.integers(50, 400, 300):
            own = level * passes + rng.normal(0.0, np.sqrt(2.5 * passes))
            found.append(Observation(float(own), float(passes)))
        return found

    assert spread_of(windows(2.0)) == pytest.approx(2.5, rel=0.25)
    assert spread_of(windows(2.0) + windows(1.0)) == pytest.approx(2.5, rel=0.25)
    assert spread_of(windows(2.0)[:4]) == 0.0


def clumped(rng: np.random.Generator, mean: float, count: int) -> list[tuple[float, float]]:
    """(accepted, passes) of windows whose requests are alike: each has an acceptance of its own."""
    found = []
    for own in np.clip(rng.normal(mean, 0.6, count), 0.1, 3.9):
        passes = int(rng.integers(256, 600))
        found.append((float(rng.normal(own * passes, np.sqrt(passes))), float(passes)))
    return found


def test_windows_keep_the_error_rate_where_passes_clump_and_sums_do_not() -> None:
    """Unchanged traffic in which a window's requests are alike: taken as one sum of independent
    answers it alarms again and again, window by window it does not."""
    rng, grid, most = np.random.default_rng(2), Grid(4), 20
    answers = draw(rng, 0.55, 400)
    mean = acceptance(answers)
    known = {"code": Bets(grid, most, answers)}
    alarms = {"windows": 0, "sums": 0}
    for _ in range(40):
        tests = {name: DriftTest(grid, most, known, 0.01, 0.2) for name in alarms}
        accepted = passes = 0.0
        for own, size in clumped(rng, mean, 80):
            own = min(max(own, 0.0), 4.0 * size)
            tests["windows"].add("code", own / size * most, most)
            accepted, passes = accepted + own, passes + size
            tests["sums"].replace("code", Sums(grid, accepted, passes, 1.5, 4000.0))
        for name, test in tests.items():
            alarms[name] += bool(test.alarms)
    assert alarms["windows"] <= 0.2 * 40 < alarms["sums"]


def test_windows_find_a_loss() -> None:
    config = WatchConfig(metrics=("http://127.0.0.1:1",))
    comparison = Comparison(config, reference())
    comparison.choose_domains([""])
    assert list(comparison.test.reference) == ["mixed"]
    mean = comparison.reference.tallies["mixed"].acceptance
    rng = np.random.default_rng(3)
    for own, size in clumped(rng, 0.5 * mean, 150):
        comparison.add_window("mixed", Observation(max(0.0, own), size))
    assert comparison.test.alarms == ["mixed", "all"]
    assert comparison.test.alarm_after is not None and comparison.test.alarm_after < 120


def test_one_domain_of_the_reference_may_be_meant() -> None:
    known = reference()
    config = WatchConfig(metrics=("scrapes",), domain="code")
    comparison = Comparison(config, known)
    comparison.choose_domains([""])
    assert list(comparison.test.reference) == ["code"]
    with pytest.raises(UserError, match=r"no domain 'cod'. Did you mean 'code'\?"):
        Comparison(dataclasses.replace(config, domain="cod"), known).choose_domains([""])
    with pytest.raises(UserError, match="Leave it out"):
        Comparison(config, known).choose_domains(["code"])


HEADSTART = (
    'headstart_requests_total{{outcome="stop"}} {requests}\n'
    'headstart_verify_passes_total{{domain="none"}} {passes}\n'
    'headstart_accepted_drafts_total{{domain="none"}} {accepted}\n'
)


def test_requests_that_name_no_domain_are_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headstart serve` counts and records them as domain none."""
    known = reference()
    for number in range(1, 41):
        counts = {"requests": 50 * number, "passes": 1000 * number, "accepted": 950 * number}
        (tmp_path / f"{number:03d}.txt").write_text(HEADSTART.format(**counts))
    for domain, name in (("", "mixed"), ("code", "code")):
        comparison = Comparison(WatchConfig(metrics=(str(tmp_path),), domain=domain), known)
        comparison.add_scrapes([str(tmp_path)])
        comparison.require_fresh()
        assert set(comparison.test.fresh) >= {name} and not comparison.test.unknown
    answers = [Fresh("none", [1, 0]), Fresh("none", [2, 1])]
    monkeypatch.setattr("inference.staleness.comparison.read_recorded", lambda *_: answers)
    comparison = Comparison(WatchConfig(records="records"), known)
    comparison.add_records(tmp_path)
    assert comparison.answers["mixed"].answers == [[1, 0], [2, 1]] and not comparison.remarks
    sampled = dataclasses.replace(known, sampling={"top_p": 0.9, "top_k": 0})
    comparison = Comparison(WatchConfig(records="records"), sampled)
    comparison.add_records(tmp_path)
    assert "the reference's: top_p 0.9." in comparison.remarks[0]
    # beside requests that name one, they stay apart, as a domain that the reference does not have
    comparison = Comparison(WatchConfig(records="records"), known)
    answers.append(Fresh("code", [1]))
    comparison.add_records(tmp_path)
    assert list(comparison.test.unknown) == ["none"]


def test_a_running_server_is_watched_until_the_alarm() -> None:
    rng = np.random.default_rng(4)
    known = dataclasses.replace(reference(), depth=DEPTH)
    tallies = {
        name: DomainAnswers([[min(DEPTH, count) for count in one] for one in tally.answers])
        for name, tally in known.tallies.items()
    }
    known = dataclasses.replace(known, tallies=tallies)
    with serving(form="vllm") as stub:
        show = stub.show

        def busy() -> str:
            stub.count([int(count) for count in rng.integers(0, 2, 400)], "p")
            return show()

        stub.show = busy  # type: ignore[method-assign]
        config = WatchConfig(metrics=(f"{stub.base}/metrics",), every=0.01, seconds=30.0)
        comparison = Comparison(config, known)
        comparison.add_running(config.running)
    assert comparison.test.alarms
    assert comparison.unit == "windows"
    assert comparison.reached["mixed"][0] == pytest.approx(0.5, abs=0.05)
    gone = dataclasses.replace(config, timeout=0.2)
    with pytest.raises(UserError, match="looks in a row failed"):
        Comparison(gone, known).add_running(gone.running)


@pytest.mark.parametrize("shown", [503, 404, 403, "<html>Back soon</html>", "python_info 1\n", ""])
def test_a_server_may_be_away_for_a_while(shown: Any) -> None:
    windows = Windows(least=50, depth=DEPTH)
    with serving(form="vllm") as stub:
        stub.count([1] * 100, "p")
        stub.looks = deque([None, *[shown] * 8])
        looks = follow(watched(stub, seconds=30.0), f"{stub.base}/metrics", windows)
        next(looks)
        stub.restart()
        stub.count([2] * 60, "p")
        assert next(looks) == [""] and not stub.looks
        looks.close()
    assert windows.restarts == 1
    assert [(one.passes, one.accepted) for one in windows.whole[""]] == [(60, 120)]


@pytest.mark.parametrize(
    ("shown", "words"), [(503, "5 looks in a row failed"), (404, "there is nothing at")]
)
def test_a_server_that_never_was_there_is_not_waited_for(shown: int, words: str) -> None:
    looks = deque([shown] * 9)
    with serving(looks=looks) as stub, pytest.raises(UserError, match=words):
        list(follow(watched(stub), f"{stub.base}/metrics", Windows(50, DEPTH)))


# What a running server serves


def watched(stub: Stub, seconds: float = 0.2) -> WatchConfig:
    return WatchConfig(metrics=(f"{stub.base}/metrics",), every=0.02, seconds=seconds, timeout=20)


@pytest.mark.parametrize(
    ("card", "known", "warned"),
    [
        ({}, "org/Stub-Model", False),
        ({"root": "/models/stub-model/"}, "stub-model", False),
        ({"id": "prod", "root": "Org/Real"}, "/data/me/real", False),
        ({"id": "a", "root": "/hub/models--Org--Real/snapshots/0123abc"}, "Org/Real", False),
        ({"id": "prod", "root": "Org/Other"}, "Org/Real", True),
        ({}, "Org/Real", True),
        ({}, "", False),
    ],
)
def test_another_model_than_the_reference_s_is_said(
    card: dict[str, str], known: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(card=card) as stub:
        found = served_model(watched(stub), f"{stub.base}/metrics", known)
    assert found == card.get("root", card.get("id", "stub-model"))
    assert ("but the reference is of Org/Real" in caplog.text) == warned


def test_a_server_with_another_tokenizer_is_refused() -> None:
    tokenizer = tiny_tokenizer("chatml")
    mine = tokenizer.encode(PROBE, add_special_tokens=False)
    with serving(tokenize=deque([{"tokens": mine}, {"tokens": [7, *mine]}])) as stub:
        given = (watched(stub), stub.base, "stub-model", tokenizer)
        assert served_model(*given) == "stub-model"
        with pytest.raises(UserError, match=r"has another tokenizer: .* or set target.path"):
            served_model(*given)
    assert served_model(*given) == ""  # nobody listens


def test_advice_about_metrics_is_that_of_watch() -> None:
    with serving(metrics="[]") as stub, pytest.raises(UserError) as caught:
        list(follow(watched(stub), f"{stub.base}/metrics", Windows(least=50, depth=4)))
    assert "Give the address of its metrics as watch.metrics" in str(caught.value)
    assert "bench" not in str(caught.value) and "chunks" not in str(caught.value)
