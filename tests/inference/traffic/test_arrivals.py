"""Traffic is read: logs with times, a server's own /metrics; what is neither is refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from heads.api.errors import UserError
from inference.decoding.clock import StepClock
from inference.server.metrics import ServerMetrics
from inference.traffic.arrivals import Arrival, read_traffic
from inference.traffic.config import TrafficConfig


def read(
    tmp_path: Path, text: str, tokenizer: Any = None, context: int = 4096, **changes: Any
) -> list[Arrival]:
    file = tmp_path / "traffic"
    file.write_text(text, encoding="utf-8")
    return read_traffic(TrafficConfig(file=str(file), **changes), tokenizer, context)


def test_requests_are_put_in_order_and_start_at_zero(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": "2026-01-31T12:00:03+00:00",
            "prompt_tokens": 7,
            "answer_tokens": 5,
            "domain": "code",
        },
        {"timestamp": "2026-01-31T12:00:01+00:00", "tokens": [4, 5, 6]},
    ]
    found = read(tmp_path, "\n".join(map(json.dumps, rows)), answer_tokens=9)
    assert found == [Arrival(0.0, 3, 9), Arrival(2.0, 7, 5, "code")]
    assert read(tmp_path, '{"timestamp": 5.5, "prompt_tokens": 1}')[0].time == 0.0


def test_a_prompt_may_hold_any_separator_but_the_lines_end(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "prompt_tokens": 3, "domain": "a\u2028b\x85c"}]
    rows += [{"timestamp": 1, "prompt_tokens": 2}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert [one.prompt for one in read(tmp_path, text, answer_tokens=4)] == [3, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"prompt_tokens": 3}', r"line 1: a request needs a `timestamp`"),
        (
            '{"timestamp": "yesterday", "prompt_tokens": 3}',
            r"line 1: timestamp 'yesterday' is neither",
        ),
        (
            '{"timestamp": 1, "prompt_tokens": 0}',
            r"line 1: prompt_tokens must be a whole number of at least 1; given: 0",
        ),
        (
            '{"timestamp": 1, "prompt_tokens": 2, "answer_tokens": "x"}',
            r"answer_tokens must be .* given: 'x'",
        ),
        ('{"timestamp": 1}', r"line 1: a request needs prompt_tokens, or its prompt"),
        ('{"timestamp": 1, "prompt_tokens": 2}\n{"timest', r"line 2 is not readable as JSON"),
        ("timestamp,prompt", r"line 1: not a sample in Prometheus' text format"),
        ("up 1\n", r"counts no answered requests"),
    ],
)
def test_what_is_no_traffic_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)
    with pytest.raises(UserError, match=r"cannot be read: No such file"):
        read_traffic(TrafficConfig(file=str(tmp_path / "absent")), None, 100)
    with pytest.raises(UserError, match=r"traffic\.file is not set"):
        read_traffic(TrafficConfig(), None, 100)


def exported(seconds: float) -> str:
    """What a server shows at /metrics that has answered 200 requests of two domains."""
    clock = StepClock(torch.device("cpu"))
    clock.seconds["verify"] = seconds
    metrics = ServerMetrics(4, clock, drafts=True)
    metrics.requests.labels("stop").inc(150)
    metrics.requests.labels("length").inc(50)
    metrics.requests.labels("cancelled").inc(40)
    metrics.prompt_tokens.labels("code").inc(3000)
    metrics.prompt_tokens.labels('od"d').inc(1000)
    metrics.tokens.labels("code").inc(9000)
    metrics.tokens.labels('od"d').inc(3000)
    metrics.first.observe(0.1)
    return generate_latest(metrics.registry).decode()


def test_a_servers_sums_become_requests_like_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, exported(40.0), requests=4000)
    assert len(found) == 4000 and found[0].time == 0.0
    # five a second while it was busy
    assert found[-1].time == pytest.approx(4000 / (200 / 40), rel=0.1)
    assert sum(item.prompt for item in found) / 4000 == pytest.approx(20, rel=0.1)
    assert sum(item.answer for item in found) / 4000 == pytest.approx(60, rel=0.1)
    assert sum(item.domain == "code" for item in found) / 4000 == pytest.approx(0.75, abs=0.05)
    # half of the answers' lengths lie beyond 42
    cut = read(tmp_path, exported(40.0), requests=4000, context=100)
    assert (
        max(item.prompt + item.answer for item in cut) == 100
        and min(item.answer for item in cut) >= 1
    )
    slower = read(tmp_path, exported(40.0), requests=4000, seconds=400.0)
    assert slower[-1].time == pytest.approx(10 * found[-1].time)
    with pytest.raises(UserError, match=r"traffic\.seconds is not set"):
        read(tmp_path, exported(0.0))


VLLM = """# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 100.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 50.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 50.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 40.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 3000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 12000.0
"""
SGLANG = """sglang:num_requests_total{model_name="m"} 200.0
sglang:prompt_tokens_total{model_name="m"} 4e+03
sglang:generation_tokens_total{model_name="m"} 1.2e+04
"""


@pytest.mark.parametrize("text", [VLLM, SGLANG])
def test_counters_of_other_servers_are_read_too(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text, requests=4000, seconds=40.0)
    assert found[-1].time == pytest.approx(4000 / (200 / 40), rel=0.1)
    assert sum(item.prompt for item in found) / 4000 == pytest.approx(20, rel=0.1)
    assert sum(item.answer for item in found) / 4000 == pytest.approx(60, rel=0.1)
    assert {item.domain for item in found} == {""}
    with pytest.raises(UserError, match=r"traffic\.seconds is not set"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, r"traffic\.rows must lie in \[1, 65536\]; given: 0"),
        ({"depths": ()}, r"traffic\.depths is empty"),
        ({"seconds": -1.0}, r"traffic\.seconds must lie in \[0"),
        ({"max_new_tokens": 1}, r"traffic\.max_new_tokens must lie in \[2, "),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrafficConfig(**changes)
