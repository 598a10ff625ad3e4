"""Settings with which a training fits that does not fit as it is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.stages.train import job_of
from train.config import TrainingJob
from train.optim import OptimConfig
from train.planning.fitting import apart, largest, more_gpus, savings, shorter, ways_to_fit
from train.planning.plan import PlanConfig, Speed, make_plan

CONFIGS = Path(__file__).resolve().parents[3] / "assets" / "configs"


def job_for(target: str, *more: str) -> TrainingJob:
    given = [f"target.path={CONFIGS / target}", "target.dtype=bfloat16", *more]
    return job_of(load_settings(STAGES["plan"], given))


@pytest.mark.slow
def test_what_is_named_does_fit() -> None:
    """8 billion weights on 24 GB: the rows of one forward pass are too many."""
    rows = ["train.sequence_length=4096", "train.micro_batch=4", "train.global_batch=16"]
    rows += ["head=eagle3", "head.draft_vocab_size=32000"]
    config = PlanConfig(gpu="l4", count=2, tokens=10**6)
    job, speed = job_for("llama-3.1-8b", *rows), Speed.of(config)
    plan = make_plan(job, config, speed)
    assert plan["fits"] is False
    fitting, closest = ways_to_fit(job, config, speed)
    assert closest is None
    assert fitting
    for words, size in fitting:
        # the words are settings: given, they make the plan fit
        given = words.split()
        changed = [item for item in given if not item.startswith("plan.")]
        count = next((int(i.split("=")[1]) for i in given if i.startswith("plan.count")), 2)
        again = make_plan(
            job_for("llama-3.1-8b", *rows, *changed), replace(config, count=count), speed
        )
        assert again["fits"] is True, words
        assert largest(again) == size


def test_trials_build_on_one_another() -> None:
    job, config = job_for("llama-3.1-8b"), PlanConfig(gpu="h100", count=8)
    words = [" ".join(found[0]) for found in savings(job, config)]
    assert words[0] == "train.micro_batch=1"
    assert all(later.startswith(first) for first, later in itertools.pairwise(words))
    assert "engine.target_sharding=zero3" in words[-1]
    assert not [
        w for w, _, _ in savings(job, replace(config, count=1)) if "target_sharding" in w[-1]
    ]
    muon = replace(job, optim=OptimConfig(kind="muon"))
    assert not [w for w, _, _ in savings(muon, config) if "engine.zero_stage=3" in w]
    assert [w for w, _, _ in savings(job, config) if "engine.zero_stage=3" in w]
    assert list(shorter(job, config)) == []  # rows of 512 are not halved
    counts = [planned.count for _, _, planned in more_gpus(job, config)]
    assert counts == [16, 32, 64]
    ((words_apart, changed, _),) = apart(job, config)
    assert "features=store" in words_apart
    assert changed.features.trainer_target == "parts"
    assert list(apart(replace(job, features=changed.features), config)) == []
