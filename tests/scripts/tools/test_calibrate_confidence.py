"""Calibrating a checkpoint's confidence: what is recorded is what decoding did, and the copy has
other temperatures."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.tools import calibrate_confidence, fit_acceptance
from scripts.tools.calibrate_confidence import main, recorded
from tests.heads.recipes import build
from tests.models import random_target

TINY = Path(__file__).parents[3] / "assets" / "tiny-target"


def test_what_is_recorded_is_what_decoding_did() -> None:
    target = random_target()
    drafter = build("dspark", target)
    decode, requests = DecodeConfig(depth=4), [Request(i, (5, 9, 7 + i), i, 30) for i in range(2)]
    odds, accepted = recorded(target, drafter, decode, requests)
    passes = {c.request.index: c.passes for c in Engine(target, drafter, decode).run(requests)}
    assert accepted.tolist() == [p.accepted for index in (0, 1) for p in passes[index][:-1]]
    assert odds.shape == (len(accepted), 4) and bool(torch.isfinite(odds).all())


@pytest.mark.slow
def test_a_calibrated_copy_is_written_and_errors_fall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh drafter is almost always wrong while its confidence has no opinion: temperatures have
    to move."""
    target = TargetModel.load(TargetConfig(path=str(TINY), dtype="float32", device="cpu"))
    config = get_kind("dflash").config_class(
        confidence=True, tv=1.0, num_layers=3, start_from="random", carry_root=False
    )
    save_drafter(
        new_drafter("dflash", config, target.info, target.weights, 0), tmp_path / "raw", target.info
    )
    options = ["--out", str(tmp_path / "out"), "--count", "2", "--tokens", "12", "--depth", "3"]
    assert main([str(tmp_path / "raw"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["temperatures"]) == 3 and report["temperatures"] != [1.0] * 3
    copy = load_drafter(tmp_path / "out", target.info, target.weights)
    assert [round(value, 3) for value in copy.confidence_head.temperatures[:3].tolist()] == report[
        "temperatures"
    ]
    assert len(report["calibration_error_after"]) == 3


@pytest.mark.parametrize("tool", [calibrate_confidence, fit_acceptance])
def test_the_target_is_loaded_as_asked(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(config: TargetConfig) -> None:
        asked.append(config)
        raise UserError("asked")

    monkeypatch.setattr(TargetModel, "load", load)
    given = ["drafter", "--out", str(tmp_path), "--target", "some/model"]
    assert tool.main([*given, "--dtype", "bfloat16", "--device", "cuda:1"]) == 2
    assert tool.main(given) == 2
    assert asked == [
        TargetConfig("some/model", dtype="bfloat16", device="cuda:1"),
        TargetConfig("some/model", dtype="float32", device="cpu"),
    ]


def test_a_drafter_without_confidence_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetModel.load(TargetConfig(path=str(TINY), dtype="float32", device="cpu"))
    config = get_kind("medusa").config_class()
    save_drafter(
        new_drafter("medusa", config, target.info, target.weights, 0), tmp_path / "raw", target.info
    )
    assert main([str(tmp_path / "raw"), "--out", str(tmp_path / "out")]) == 2
    assert "has no confidence to calibrate" in capsys.readouterr().err
