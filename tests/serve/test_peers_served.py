"""Drafters of both sides of a comparison with `speculators` in a real vLLM. The library's side is
stood in for by our export in its layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference.export.check.live import make_requests
from inference.measure.prompts import load_prompts
from scripts.evidence import peers_served
from scripts.evidence.small_targets import PLACES
from tests.inference.export.ground import load_target, write
from tests.serve.test_exports import exported

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_both_sides_are_served_in_chains_of_the_same_length(
    engine_python: str, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = replace(peers_served.ANSWERED, prompts_per_domain=1, max_new_tokens=24)
    monkeypatch.setattr(peers_served, "ANSWERED", brief)
    target, place = load_target(tiny_target), PLACES["embedded"]
    requests = make_requests(brief, load_prompts(place.measuring), target, peers_served.DEPTH)
    exported("eagle3", target, requests, tmp_path)
    ours, theirs = tmp_path / "checkpoint", tmp_path / "theirs"
    write(target, ours, theirs, "speculators")
    rows = peers_served.serve_both(engine_python, place, target, "eagle3", ours, theirs)
    assert [row["side"] for row in rows] == ["ours", "speculators", peers_served.AGAIN]
    for row in rows:
        assert not row["problems"] and row["identical"] == row["sequences"] == len(requests)
        assert len(row["positions"]["engine"]) == peers_served.DEPTH
        assert row["tau_engine"] == pytest.approx(row["tau_ours"]) and row["tau_ours"] > 1
        assert row["tau_ours"] == pytest.approx(rows[0]["tau_ours"])  # they are the same drafter
    page = "\n".join(peers_served.served_lines([{"target": "embedded", **row} for row in rows]))
    assert f"| embedded | eagle3 | speculators | {len(requests)}/{len(requests)} |" in page
