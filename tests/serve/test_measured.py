"""A real vLLM measured from outside: its counters and its responses agree, `headstart serve` is
measured in the same way, and a drafter has the tau that our decoder gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from scripts.evidence import server_measure
from tests.inference.export.ground import load_target

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_vllm_is_measured_as_our_decoder_measures(
    engine_python: str, tiny_target: Path, tmp_path: Path
) -> None:
    target = load_target(tiny_target)
    layers = (*range(8), *range(9, 13), *range(14, 20))
    config = get_kind("distilled").config_class(from_target_layers=layers)
    drafter = new_drafter("distilled", config, target.info, target.weights, seed=1)
    save_drafter(drafter, tmp_path / "drafter", target.info)
    status = server_measure.main(
        [
            *(str(tmp_path / "drafter"), "--engine-python", engine_python),
            *("--target", str(tiny_target), "--out", str(tmp_path), "--responses"),
            *("--prompts-per-domain", "1", "--max-new-tokens", "16", "--clients", "1"),
        ]
    )
    rows = json.loads((tmp_path / "server_measure.json").read_text())["rows"]
    assert status == 0, rows
    counters, responses = rows
    assert (counters["source"], responses["source"]) == ("counters", "responses")
    assert counters["tau"] == pytest.approx(responses["tau"])
    assert counters["tau"] == pytest.approx(counters["tau_ours"], rel=0.02) and counters["tau"] > 1
    assert counters["positions"] == pytest.approx(counters["positions_ours"], abs=0.03)
    assert counters["identical_to_ours"] == counters["prompts"]
