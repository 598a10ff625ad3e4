"""A running server is measured from outside: every engine's counters give the acceptance that the
server really had, per group; what is broken is said in a sentence, and repeated a few times at
most."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.engines.client import LONGEST_WAIT, Answer, Endpoint, asked_wait
from inference.engines.counters import Acceptance
from inference.measure.config import BenchConfig
from inference.measure.datasets import Loaded
from inference.measure.metrics import resample_weights
from inference.measure.prompts import Prompt
from inference.measure.serving.config import ServingConfig
from inference.measure.serving.run import measure_server, require_sent
from inference.measure.serving.summary import cells, estimate, place_of, units_of
from inference.measure.serving.windows import COUNTERS, RESPONSES, Group, Side, Window, told
from inference.report.markdown import print_table, render
from inference.report.model import Report, ServerCell, read_report
from inference.report.page.render import write_page
from tests.inference.engines.stub import DEPTH, Stub, serving

TOKENS = 24
EACH = 6


def prompts() -> list[Prompt]:
    found = []
    for domain in ("code", "prose"):
        for number in range(EACH):
            text = f"{domain} number {number}" + (" and much more" * 200 if number >= 4 else "")
            messages = ({"role": "user", "content": text},)
            found.append(Prompt(f"{domain}-{number}", domain, messages=messages))
    warm = ({"role": "user", "content": "prose to warm up"},)
    return [*found, Prompt("warm", "prose", messages=warm)]


def measure(
    out: Path,
    stub: Stub,
    plain: Stub | None = None,
    repeats: int = 1,
    temperature: float = 0.0,
    **settings: Any,
) -> Report:
    own = {"timeout": 20.0, "backoff": 0.01, "retries": 2, **settings}
    config = BenchConfig(
        prompts="stub",
        prompts_per_domain=EACH,
        warmup_prompts=1,
        repeats=repeats,
        server=stub.base,
        baseline_server=plain.base if plain else "",
        serving=ServingConfig(**own),
    )
    decode = DecodeConfig(max_new_tokens=TOKENS, temperature=temperature)
    # the warm-up prompt is the only one that is not chosen
    loaded = Loaded(prompts(), "stub", "")
    measure_server(config, decode, loaded, out)
    return read_report(out)


def cell(report: Report, concurrency: int = 1, domain: str = "", first: int = -1) -> ServerCell:
    assert report.server is not None
    (found,) = (
        one
        for one in report.server.speculative.cells
        if (one.concurrency, one.domain) == (concurrency, domain)
        and (bool(one.end) and one.first == first if first >= 0 else not one.end)
    )
    return found


def truth(stub: Stub, report: Report, domain: str = "") -> list[tuple[int, int]]:
    """(committed, passes) of each measured prompt."""
    chosen = report.run.prompts["domains"]
    texts = {one.id: one.messages[0]["content"] for one in prompts() if one.messages}
    return [stub.by_prompt[texts[name]] for name, own in chosen.items() if domain in ("", own)]


@pytest.mark.parametrize(
    "form",
    [*("vllm", "sglang", "sglang_gauge", "trtllm", "trtllm_totals"), *("llama", "vllm_responses")],
)
def test_every_engine_gives_the_acceptance_that_the_server_had(form: str, tmp_path: Path) -> None:
    with serving(form=form) as stub:
        report = measure(tmp_path / "out", stub)
    side = report.server.speculative if report.server else None
    assert side is not None and side.definition
    assert side.source == ("responses" if form in ("llama", "vllm_responses") else "counters")
    for domain in ("", "code", "prose"):
        known = truth(stub, report, domain)
        tau = sum(one for one, _ in known) / sum(passes for _, passes in known)
        found = cell(report, domain=domain)
        assert found.tau is not None and found.tau_ci95 is not None
        if form == "sglang_gauge":  # a mean of everything so far
            assert found.tau == pytest.approx(tau, rel=0.5)
            continue
        assert found.tau == pytest.approx(tau)
        assert found.passes == sum(passes for _, passes in known)
        assert found.tau_ci95[0] <= found.tau <= found.tau_ci95[1]
        assert found.requests == found.units == len(known)
    if form in ("vllm", "trtllm", "vllm_responses"):
        shares = cell(report).acceptance
        assert shares is not None and len(shares) == DEPTH
        assert 1 + sum(shares) == pytest.approx(cell(report).tau)
    assert report.drafters == [] and report.target.id == "stub-model"


def test_intervals_are_those_of_the_slow_way(tmp_path: Path) -> None:
    """With one client a window is a prompt: the interval is a bootstrap over prompts."""
    with serving() as stub:
        report = measure(tmp_path / "out", stub)
    known = truth(stub, report, "code")
    committed, passes = np.array(known, dtype=float).T
    drawn = resample_weights(len(known), seed=0)
    taus = [float(row @ committed / (row @ passes)) for row in drawn]
    low, high = np.percentile(taus, [2.5, 97.5])
    assert cell(report, domain="code").tau_ci95 == pytest.approx((low, high))


def test_groups_are_domains_concurrencies_and_ranges_of_prompt_tokens(tmp_path: Path) -> None:
    with serving(steps=0.001) as stub:
        report = measure(tmp_path / "out", stub, concurrency=(1, 3), repeats=2)
    assert report.server is not None and report.server.lengths == "estimate"
    assert report.settings.batch_size == 3
    short, long = cell(report, 3, first=0), cell(report, 3, first=512)
    whole, code = cell(report, 3), cell(report, 3, "code")
    assert short.prompt_tokens < 512 <= long.prompt_tokens
    assert short.requests + long.requests == whole.requests == 2 * len(truth(stub, report))
    assert cell(report, 3, "code", 512).requests == 2 * 2
    assert code.tau is not None and whole.tau is not None and code.tau > whole.tau
    assert code.tau == pytest.approx(cell(report, 1, "code").tau)
    assert cell(report, 1).running <= 1.01 < whole.running <= 3.01
    assert whole.units == whole.windows < cell(report, 1).windows
    assert whole.tokens == TOKENS * whole.requests
    for one in report.server.speculative.cells:
        assert 0 < one.first_token_ms <= one.first_token_ms_p99 and one.token_ms > 0
        assert one.tokens_per_second == pytest.approx(one.tokens / one.seconds)


def test_the_same_server_without_speculation_gives_speedup_and_texts(tmp_path: Path) -> None:
    with serving(steps=0.002) as stub, serving(speculates=False, steps=0.002) as plain:
        report = measure(tmp_path / "out", stub, plain)
    assert report.server is not None and report.server.baseline is not None
    assert report.server.baseline.source == "none"
    assert all(one.tau is None for one in report.server.baseline.cells)
    found = cell(report)
    assert found.speedup is not None and found.speedup_ci95 is not None
    plain_speed = report.server.baseline.overall()[0].tokens_per_second
    assert found.speedup == pytest.approx(found.tokens_per_second / plain_speed)
    assert found.speedup_ci95[0] <= found.speedup <= found.speedup_ci95[1]
    assert found.identical == found.requests
    assert report.baseline.tokens_per_second == found.baseline_tokens_per_second


@pytest.mark.parametrize("burst", [False, True])
def test_without_counters_tau_is_estimated_from_the_stream_and_says_so(
    burst: bool, tmp_path: Path
) -> None:
    with serving(form="none", steps=0.02, burst=burst) as stub:
        report = measure(tmp_path / "out", stub)
    assert report.server is not None
    side = report.server.speculative
    assert side.source == "chunks" and "estimate" in side.caveat and side.engine == ""
    known = truth(stub, report)
    tau = sum(one for one, _ in known) / sum(passes for _, passes in known)
    found = cell(report)  # what a busy machine's clock makes of it; exactly in the tests below
    assert found.tau == pytest.approx(tau, rel=0.5)
    assert found.acceptance is None and found.accepted_share is None


@pytest.mark.parametrize("burst", [1, 3])
def test_the_estimate_is_exact_where_steps_are_apart(burst: int) -> None:
    steps = [3, 1, 2, 4]
    arrivals = [0.0]
    for at, size in enumerate(steps, start=1):
        arrivals += [0.1 * at + 0.001 * piece for piece in range(min(burst, size))]
    found = estimate(Answer(tokens=1 + sum(steps), arrivals=arrivals))
    assert found is not None and (found.committed, found.passes) == (sum(steps), len(steps))
    assert estimate(Answer(tokens=1, arrivals=[0.0])) is None


def test_the_estimate_is_not_led_astray() -> None:
    """A server without speculation that stalls drafts nothing, and an answer whose pieces all come
    together tells nothing."""
    gaps = np.random.default_rng(0).permutation([0.02] * 90 + [0.1] * 10)
    found = estimate(Answer(tokens=101, arrivals=[0.0, *np.cumsum(gaps)]))
    assert found is not None and (found.committed, found.passes) == (100, 100)
    assert estimate(Answer(tokens=101, arrivals=[0.0001 * place for place in range(101)])) is None


def test_reports_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(steps=0.002) as stub, serving(speculates=False, steps=0.002) as plain:
        report = measure(tmp_path / "out", stub, plain, concurrency=(1, 2))
    text = render([tmp_path / "out"], tmp_path / "shown").read_text()
    assert "1 + accepted / drafting steps" in text and "nobody else may use it" in text
    whole = cell(report, 2)
    assert whole.tau is not None and "nan" not in text
    assert f"| speculating | 2 | {whole.running:.1f} | all prompts | {whole.tau:.2f} [" in text
    assert "0 parameters" not in text and "no drafter" not in text
    assert [path.name for path in (tmp_path / "shown").glob("*.png")] == ["server.png"]
    page = write_page([("out", tmp_path / "out")], tmp_path / "shown").read_text()
    assert "Accepted by position" in page and "0 parameters" not in page
    assert f"tau {whole.tau:.2f}" in page
    print_table(report)
    said = capsys.readouterr().out
    assert f"with 2 clients ({whole.running:.1f} requests in progress on average)" in said


@pytest.mark.parametrize("source", [RESPONSES, COUNTERS])
def test_the_turns_of_a_conversation_are_one_unit(source: str) -> None:
    """Seven more turns of ten conversations tell no more than the ten."""
    config, rng = ServingConfig(), np.random.default_rng(0)
    rates, group = rng.integers(2, 5, 10), Group("chat", 0, 512, ())
    found = []
    for turns in (1, 8):
        side = Side(Endpoint("http://h", "bench.server", "X", 1.0), config, True, source=source)
        for number in range(10 * turns):
            rate = int(rates[number % 10])
            said = {
                "headstart": {"verify_passes": 20, "tau": rate, "accepted_drafts": 20 * rate - 20}
            }
            times = {"end": 1.0, "arrivals": [0.01 * rate, 1.0]}
            answer = Answer("x", tokens=20 * rate + 1, prompt_tokens=5, last=said, **times)
            counted = Acceptance(20.0, 20.0 * rate, 20.0 * (rate - 1))
            unit = (f"c{number % 10}",)
            side.windows.append(Window(group, 1, 0, number, unit, [answer], 1.0, counted))
        found.append(cells(side, side, 0, compared=True)[0])
    few, many = found
    assert (few.units, many.units, few.windows, many.windows) == (10, 10, 10, 80)
    for name in ("tau", "tokens_per_second", "first_token_ms", "token_ms", "speedup"):
        interval = getattr(few, f"{name}_ci95")
        assert interval == pytest.approx(getattr(many, f"{name}_ci95")), name


def test_windows_that_share_a_conversation_are_one_unit() -> None:
    group = Group("chat", 0, 512, ())
    units = [("a", "b"), ("c", "d"), ("e",), ("d", "a")]
    windows = [Window(group, 2, 0, at, unit, [], 1.0, None) for at, unit in enumerate(units)]
    assert [units_of(windows)[place_of(one)] for one in windows] == ["a", "a", "e", "a"]


def test_cells_claim_no_more_than_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A group of two prompts keeps no eight clients busy, and one window has no interval."""
    with serving() as stub, serving(speculates=False) as plain:
        report = measure(tmp_path / "out", stub, plain, concurrency=(2, 8))
    code = cell(report, 8, "code", 512)
    assert code.windows == code.units == 1 and code.requests == 2
    assert code.running <= 2.01 and code.tau and code.speedup and code.acceptance
    assert code.tau_ci95 is code.speedup_ci95 is code.acceptance_ci95 is None
    assert code.tokens_per_second_ci95 is None and code.token_ms_ci95 is not None
    assert cell(report, 8).tau_ci95 is not None
    words = "Fewer prompts than clients: 4 of 4 groups (domain and range of lengths) with 8 clients"
    print_table(report)
    text = render([tmp_path / "out"], tmp_path / "shown").read_text()
    for said in (caplog.text, capsys.readouterr().out, text.replace("\\", "")):
        assert f"{words}. The smallest group has 2" in said
    row = f"| speculating | 8 | {code.running:.1f} | {code.label} | {code.tau:.2f} |"
    (found,) = (line for line in text.splitlines() if line.startswith(row))
    assert f"| {code.speedup:.2f}, no difference shown |" in found
    assert write_page([("out", tmp_path / "out")], tmp_path / "shown").is_file()


# A measurement that ended early


def test_windows_that_were_measured_are_kept(tmp_path: Path) -> None:
    with serving(faults=deque([None] * 5 + [503] * 3)) as stub, serving(speculates=False) as plain:
        said = refused(tmp_path, stub, plain=plain)
        assert "failed 3 times" in said and "repeat the command to continue" in said
        partial = tmp_path / "out" / "windows.partial.jsonl"
        assert len(partial.read_text().splitlines()) == 1 + 4
        with partial.open("a") as file:
            file.write('{"place": ["code", 0')  # killed in the middle of a line
        stub.restart()
        asked = [len(one.bodies) for one in (stub, plain)]
        report = measure(tmp_path / "out", stub, plain, retries=9)
        again = [len(one.bodies) - before for one, before in zip((stub, plain), asked, strict=True)]
        known = truth(stub, report)
        whole = measure(tmp_path / "whole", stub, plain)
    assert again == [1 + 8, 1 + 8]  # the warm-up, and the windows that were not measured
    assert report.server is not None and whole.server is not None
    assert cell(report).identical == len(known) == 2 * EACH
    assert cell(report).passes == sum(passes for _, passes in known)
    both = (report.server.speculative, whole.server.speculative)
    taus = [[(one.label, one.tau, one.tau_ci95) for one in side.cells] for side in both]
    assert taus[0] == taus[1]
    assert [side.restarts for side in both] == [1, 0]
    assert "was started again" in both[0].caveat
    assert not partial.exists() and (tmp_path / "out" / "windows.jsonl").is_file()


def test_windows_of_other_settings_are_not(tmp_path: Path) -> None:
    with serving(faults=deque([None] * 5 + [503] * 3)) as stub:
        refused(tmp_path, stub)
        asked = len(stub.bodies)
        measure(tmp_path / "out", stub, temperature=0.7)
    assert len(stub.bodies) - asked == 1 + 2 * EACH


# What is broken


def patience(fault: Any) -> float:
    """Seconds to wait for a server: a busy machine is slow, a server that hangs is slower."""
    return 3.0 if fault == "hang" else 20.0


def refused(tmp_path: Path, stub: Stub, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        measure(tmp_path / "out", stub, **settings)
    assert not (tmp_path / "out" / "report.json").exists()
    return str(caught.value)


def test_another_model_is_named(tmp_path: Path) -> None:
    with serving() as stub:
        said = refused(tmp_path, stub, model="stub-mode")
    assert "does not serve 'stub-mode'" in said and "Did you mean 'stub-model'?" in said


def test_a_wrong_key_is_said_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_SERVER_KEY", "sk-secret")
    with serving(key="sk-right") as stub:
        said = refused(tmp_path, stub)
        assert "HEADSTART_SERVER_KEY" in said and "secret" not in said
        monkeypatch.setenv("HEADSTART_SERVER_KEY", "sk-right")
        report = measure(tmp_path / "out", stub)
    assert cell(report).tau
    assert "sk-right" not in (tmp_path / "out" / "report.json").read_text()


@pytest.mark.parametrize("fault", [503, 500, "hang", "cut", "abort", "kill", "restart", "twice"])
def test_a_window_that_failed_is_measured_again(fault: Any, tmp_path: Path) -> None:
    with serving(faults=deque([None, None, fault])) as stub:
        report = measure(tmp_path / "out", stub, timeout=patience(fault))
    assert report.server is not None
    side = report.server.speculative
    assert side.repeated == 1 and side.restarts == (fault in ("kill", "restart"))
    assert ("was started again" in side.caveat) == (side.restarts > 0)
    known = truth(stub, report)
    assert cell(report).passes == sum(passes for _, passes in known)


def test_a_restart_shows_in_counters_that_are_no_source(tmp_path: Path) -> None:
    with serving(form="vllm_responses", faults=deque([None, None, "kill"])) as stub:
        report = measure(tmp_path / "out", stub)
    assert report.server is not None
    side = report.server.speculative
    assert (side.source, side.restarts) == ("responses", 1)


@pytest.mark.parametrize(
    ("form", "reborn", "words"),
    [
        ("vllm", {"card": {"root": "a/b"}}, "another model: 'stub-model' from 'a/b'; before: 'stu"),
        ("vllm", {"model": "other"}, "another model: 'other'; before: 'stub-model'"),
        ("vllm", {"speculates": False}, "says nothing of drafts any more"),
        ("vllm_responses", {"speculates": False}, "says nothing of drafts any more"),
    ],
)
def test_another_server_behind_a_restart_is_not_measured(
    form: str, reborn: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with serving(form=form, faults=deque([None, None, "kill"]), reborn=reborn) as stub:
        assert words in refused(tmp_path, stub)
        assert len(stub.bodies) <= 5  # the warm-up, a window, the one that is killed, two retries


@pytest.mark.parametrize("form", ["vllm", "sglang", "vllm_responses", "llama"])
def test_a_baseline_that_speculates_is_refused(form: str, tmp_path: Path) -> None:
    with serving(form=form) as stub, serving(form=form) as plain:
        said = refused(tmp_path, stub, plain=plain)
        assert len(plain.bodies) == 1
    assert said.startswith("bench.baseline_server: ") and "speculates too" in said


def test_a_baseline_that_begins_to_speculate_is_refused(tmp_path: Path) -> None:
    born = {"faults": deque([None, None, "kill"]), "reborn": {"speculates": True}}
    with serving() as stub, serving(speculates=False, **born) as plain:
        assert "speculates too" in refused(tmp_path, stub, plain=plain)


@pytest.mark.parametrize(
    "given", [{"repetition_penalty": 1.2}, {"logit_bias": ((3, 1.0),)}, {"bad_words": ((5,),)}]
)
def test_sampling_settings_that_are_not_sent_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"decode.{next(iter(given))} is not sent to a running"):
        require_sent(DecodeConfig(temperature=1.0, top_p=0.9, **given))
    require_sent(DecodeConfig(temperature=1.0, top_p=0.9))


def test_a_baseline_of_another_model_is_refused(tmp_path: Path) -> None:
    with serving(card={"root": "some/Model"}) as stub:
        with serving(speculates=False, card={"root": "some/other"}) as plain:
            said = refused(tmp_path, stub, plain=plain)
            assert stub.bodies == plain.bodies == []
        assert "serves 'some/other'" in said and "(bench.server) serves 'some/Model'" in said
        with serving(speculates=False, card={"root": "copies/model"}) as plain:
            assert cell(measure(tmp_path / "out", stub, plain)).speedup


def test_a_restart_of_minutes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, sleep = [], asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("inference.measure.serving.windows.asyncio.sleep", note)
    usual = ServingConfig()
    with serving(faults=deque([None, None, *[503] * 12])) as stub:
        measure(tmp_path / "out", stub, retries=usual.retries, backoff=usual.backoff)
    assert sum(waits) > 300


def test_a_server_may_ask_for_a_minute_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, sleep = [], asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("inference.measure.serving.windows.asyncio.sleep", note)
    with serving(faults=deque([503]), retry_after="86400") as stub:
        measure(tmp_path / "out", stub)
    assert LONGEST_WAIT in waits and max(waits) == LONGEST_WAIT == 60.0
    assert asked_wait("0.5") == 0.5 and asked_wait("3601") == 60.0
    assert asked_wait("") is asked_wait("Fri, 31 Dec 2027 23:59:59 GMT") is asked_wait("²") is None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (503, "answers with status 503"),
        ("hang", "sent nothing for 3 seconds"),
        ("cut", "ended a stream in the middle"),
        ("twice", "counts 2 answers where 1 were asked for: somebody else uses it"),
    ],
)
def test_retries_end(fault: Any, words: str, tmp_path: Path) -> None:
    with serving(faults=deque([None, None, *[fault] * 20])) as stub:
        said = refused(tmp_path, stub, timeout=patience(fault))
        assert len(stub.bodies) == 5  # the warm-up, one window, three attempts
    assert words in said and "failed 3 times" in said


def test_a_request_that_is_refused_is_not_repeated(tmp_path: Path) -> None:
    with serving(faults=deque([400] * 9)) as stub:
        said = refused(tmp_path, stub)
        assert len(stub.bodies) == 1
    assert "status 400" in said and "planted" in said


@pytest.mark.parametrize(
    ("settings", "own", "words"),
    [
        ({"metrics": "something_total 5\n"}, {}, "are of no known engine"),
        ({"metrics": "no metrics!\n"}, {}, "not a sample in Prometheus' text format"),
        ({"form": "none"}, {"acceptance": "counters"}, "shows no metrics"),
        ({"form": "vllm"}, {"acceptance": "responses"}, "say nothing of speculation"),
        ({"speculates": False}, {}, "serves without speculation"),
        ({"usage": False}, {}, "does not say how many tokens"),
    ],
)
def test_a_server_that_tells_too_little(
    settings: dict[str, Any], own: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with serving(**settings) as stub:
        assert words in refused(tmp_path, stub, **own)


def test_metrics_that_want_a_key_are_none(tmp_path: Path) -> None:
    with serving(shut=True, steps=0.02) as stub:
        report = measure(tmp_path / "out", stub)
        assert report.server is not None and report.server.speculative.source == "chunks"
        for own in ({"acceptance": "counters"}, {"metrics": f"{stub.base}/metrics"}):
            with pytest.raises(UserError, match="wants a valid key"):
                measure(tmp_path / "other", stub, **own)


def test_nobody_listens(tmp_path: Path) -> None:
    with serving() as stub:
        pass
    assert "the list of models failed 4 times" in refused(tmp_path, stub, retries=9)


def test_text_may_contain_any_separator(tmp_path: Path) -> None:
    with serving(text="\u2028\u0085") as stub:
        report = measure(tmp_path / "out", stub)
    assert cell(report).requests == 2 * EACH


def test_lengths_are_counted_by_servers_that_can(tmp_path: Path) -> None:
    with serving(tokenize=deque([{}, 503])) as stub:  # one connection breaks, one server starts
        report = measure(tmp_path / "out", stub)
    assert report.server is not None and report.server.lengths == "tokenizer"
    with serving(form="llama", tokenize=deque([{"tokens": []}] * 99)) as stub:
        report = measure(tmp_path / "other", stub)
    assert report.server is not None and report.server.lengths == "estimate"


def test_an_answer_of_llama_without_drafts_has_passes_of_one_token() -> None:
    answer = Answer(tokens=6, last={"timings": {"predicted_n": 6}})
    assert told(answer) == Acceptance(5.0, 5.0, 0.0, 0.0)
    assert told(Answer(tokens=6)) is None


def test_requests_say_what_the_settings_say(tmp_path: Path) -> None:
    with serving() as stub:
        measure(tmp_path / "out", stub, temperature=0.7)
    body = stub.bodies[-1]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.7, TOKENS, "stub-model")
    assert body["stream_options"] == {"include_usage": True} and 0 <= body["seed"] < 2**31
    assert {"top_p", "top_k", "min_p"} & set(body) == set()


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp"])
def test_what_is_off_is_off_whatever_the_model_recommends(owner: str, tmp_path: Path) -> None:
    """vLLM and SGLang take what a request leaves out from the model's generation_config.json."""
    with serving(card={"owned_by": owner}) as stub:
        report = measure(tmp_path / "out", stub)
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    named = {name: stub.bodies[-1][name] for name in off if name in stub.bodies[-1]}
    assert report.server is not None
    told = "the server's own defaults apply" in report.server.speculative.caveat
    assert (named, told) == (({}, True) if owner == "llamacpp" else (off, False))


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(UserError, match="give both"):
        BenchConfig(baseline_server="http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"bench.roofline needs the target"):
        BenchConfig(server="http://127.0.0.1:1", roofline=True)
