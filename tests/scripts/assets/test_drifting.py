"""Prompts of traffic that drifts: other domains, then all of them mixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.assets import cpp_headers, drifting
from scripts.assets.conversations import Pair


def test_prompts_drift_and_then_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drifting, "python_pairs", few_pairs)
    drifting.write_prompts(tmp_path, 24)
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("*.jsonl")
    }
    domains = {name: {row["domain"] for row in own} for name, own in rows.items()}
    assert domains["python"] == set(drifting.ENGLISH)
    assert domains["drift"] == {*cpp_headers.DOMAINS, *drifting.JSON}
    asked = {name: [str(row["messages"]) for row in own] for name, own in rows.items()}
    assert all(len(own) == len(set(own)) == 24 for own in asked.values())
    before = {*asked["python"], *asked["drift"]}
    assert not {*asked["python"]} & {*asked["drift"]}
    assert {*asked["finetuned"], *asked["merged"]} == before  # each has one half
    # what nothing learnt from in the first two phases is not learnt from in the others either
    probes = {
        name: {one for number, one in enumerate(own) if drifting.is_probe(number)}
        for name, own in asked.items()
    }
    first = probes["python"] | probes["drift"]
    assert len(first) == 8 and probes["finetuned"] | probes["merged"] == first
    assert drifting.json_pairs() == [one for one in few_pairs() if one.domain == "json"]


def few_pairs() -> tuple[Pair, ...]:
    """Stands for what the standard library gives."""
    domains = (*drifting.ENGLISH, *drifting.JSON)
    return tuple(
        Pair(domain, "m", f"m{n}", f"f{n}_{domain}", f"def f{n}(a, b):", f"It adds {n} and {n}.")
        for domain in domains
        for n in range(30)
    )
