"""Where the speed of a planned training is taken from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from heads.api.errors import UserError
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.stages.plan import speed_of
from scripts.stages.train import job_of
from train.planning.devices import TERA, gpu
from train.planning.plan import PlanConfig
from train.tracking.summary import read_summary

SUMMARY = Path(__file__).parents[2] / "train" / "tracking" / "data" / "summary_first.json"


def test_a_measured_utilisation_applies_to_the_planned_gpu(in_folder: Path) -> None:
    job = job_of(load_settings(STAGES["plan"], ["target.path=somewhere"]))
    found, config = read_summary(SUMMARY), PlanConfig(measured=str(SUMMARY))
    assert found.mfu is not None
    here = speed_of(job, config)
    assert here.flops == pytest.approx(found.mfu * found.peak.tflops * TERA)
    there = speed_of(job, replace(config, gpu="h100"))
    assert there.flops == pytest.approx(found.mfu * gpu("h100").peak)
    assert str(SUMMARY) in there.source
    assert f"{found.mfu:.1%} of h100" in there.source
    with pytest.raises(UserError, match=r"'nowhere' cannot be read"):
        speed_of(job, PlanConfig(gpu="h100", measured="nowhere"))
