"""The report of drafting ahead on two short answers of the embedded target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.evidence import ahead
from scripts.evidence.acceptance.shapes import STRIDE, TOY, as_target, counting_model


def test_the_counting_drafter_is_wrong_at_some_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "WIDE", TOY)
    target = as_target(counting_model(TOY, torch.device("cpu"), torch.float32, 64))
    drafter = ahead.miscounting_drafter(target)
    tokens = torch.arange(TOY.vocab)[:, None]
    with torch.no_grad():
        states = drafter.model.norm(drafter.embed(tokens))  # the layers add next to nothing
        said = drafter.logits(states)[:, 0].argmax(-1)
    right = said == (tokens[:, 0] + STRIDE) % TOY.vocab
    assert right.float().mean().item() == pytest.approx(1 - ahead.WRONG, abs=0.01)


@pytest.mark.slow
def test_the_report_has_every_way_of_every_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "ahead"
    monkeypatch.setattr(ahead, "WIDE", TOY)
    given = ["--prompts", "2", "--tokens", "8", "--depth", "2", "--repeats", "1", "--serial", "1"]
    assert ahead.main([*given, "--out", str(out)]) == 0
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    ways = [(row["target"], row["drafter"], row["way"]) for row in rows]
    drafters = {"embedded": ("ngram", "small model"), "wide": ("counting model",)}
    expected = []
    for target, names in drafters.items():
        expected.append((target, "", "plain 1"))
        expected += [(target, name, way) for name in names for way in ("serial 1", "ahead")]
    assert ways == expected
    for row in rows:
        assert row["texts"] == row["answers"] == 2
        if row["drafter"]:
            assert row["drafts"] == 2 and row["over"]["serial 1"]["ratio"] > 0
        if row["way"] == "ahead":
            assert 0 <= row["kept_ahead"] <= 1 and row["hidden_ms"] >= 0
    page = out.with_suffix(".md").read_text()
    assert page.count("| small model |") == 2
