"""/metrics: Prometheus can read it, and its numbers add up with each other and with what clients
saw."""

from __future__ import annotations

import re

import httpx
import pytest

from inference.decoding.engine import Engine
from tests.inference.server.running import MODEL, serving

LINE = re.compile(
    r'^[a-z_]+(\{[a-z]+="(?:[^"\\\n]|\\.)*"(,[a-z]+="(?:[^"\\\n]|\\.)*")*\})? (-?[0-9.e+-]+|\+Inf)$'
)


def test_the_numbers_add_up(engine: Engine) -> None:
    engine.clock.reset()
    with serving(engine, domains=("code", "chat")) as running:
        domains = ["code", "chat", "code", "", "martian", 'no"label\\']
        answers = [
            running.client.completions.create(
                model=MODEL,
                prompt=[5, 6, 7, 8 + number],
                max_tokens=20,
                temperature=0,
                extra_headers={"X-Headstart-Domain": domain} if domain else {},
            )
            for number, domain in enumerate(domains)
        ]
        refused = httpx.post(f"{running.base}/v1/completions", json={"model": MODEL})
        text = httpx.get(f"{running.base}/metrics")
        found = running.metrics()
        version = httpx.get(f"{running.base}/version").json()["version"]
    (info,) = (name for name in found if name.startswith("headstart_info{"))
    assert f'version="{version}"' in info
    assert refused.status_code == 400
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "_created" not in text.text
    for line in text.text.splitlines():
        assert line.startswith("# ") or LINE.match(line), line

    def total(name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for key, value in found.items()
            if key.split("{")[0] == f"headstart_{name}" and all(part in key for part in wanted)
        )

    count = len(answers)
    assert total("requests_total") == count + 1
    assert total("requests_total", outcome="invalid") == 1
    assert (
        total("requests_total", outcome="stop") + total("requests_total", outcome="length") == count
    )
    generated = sum(item.usage.completion_tokens for item in answers if item.usage)
    assert total("generated_tokens_total") == generated
    assert total("prompt_tokens_total") == 4 * count
    # every token but the first of an answer was committed by a verification
    assert total("committed_tokens_total") == generated - count
    assert total("accepted_drafts_total") == total("accepted_by_depth_total")
    assert (
        total("verify_passes_total") == total("steps_total") == total("drafter_passes_total")
    )  # one client at a time
    assert total("time_to_first_token_seconds_count") == total("request_seconds_count") == count
    for label in ("code", "chat", "none", "other"):
        passes = total("verify_passes_total", domain=label)
        assert total("tau", domain=label) == pytest.approx(
            total("committed_tokens_total", domain=label) / passes
        )
        kept = total("accepted_by_depth_total", domain=label, depth="1")
        assert total("acceptance", domain=label, depth="1") == pytest.approx(kept / passes)
    assert {key for key in found if "martian" in key or "label" in key} == set()
    assert total("prompt_tokens_total", domain="other") == 8
    assert found["process_resident_memory_bytes"] > 1e7
    assert found["headstart_requests_running"] == found["headstart_requests_waiting"] == 0
