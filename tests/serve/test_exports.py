"""Exports in a real vLLM: the engine's text and acceptance are ours, and a planted fault is seen.
docs/reports/serving.json has the trained drafters; these are as they begin, chosen so that they are
accepted all the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.engines.settings import LENGTHS
from inference.export.check.config import LiveConfig
from inference.export.check.live import LiveRow, Served, live_check, make_requests, read_served
from inference.measure.prompts import load_prompts
from inference.measure.vllm_process import EngineProcess
from inference.target.model import TargetModel
from tests.inference.export.ground import load_target, write
from train.data.loader import PackedBatch
from train.features.base import OnlineFeatures

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DRAFTERS: dict[str, dict[str, Any]] = {
    "distilled": {"from_target_layers": (*range(8), *range(9, 13), *range(14, 20))},
    "medusa": {"num_heads": 3},
    "eagle": {"from_target_layer": 19},
    "eagle3": {"from_target_layer": 19},
}
CUSTOM = "inference.export.vllm_medusa.MedusaProposer"


def exported(kind: str, target: TargetModel, requests: Sequence[Request], folder: Path) -> Path:
    """A fresh drafter that is a little off from where it began, exported for vLLM. Medusa begins
    with no idea of what is further ahead, and EAGLE-3 with a random fusion, so they learn the
    answers.
    """
    config = get_kind(kind).config_class(**DRAFTERS[kind])
    drafter = new_drafter(kind, config, target.info, target.weights, seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += (
                0.05
                * parameter.std(correction=0)
                * torch.randn(parameter.shape, generator=generator)
            )
    if kind in ("medusa", "eagle3"):
        teach(drafter, target, requests)
    save_drafter(drafter, folder / "checkpoint", target.info)
    write(target, folder / "checkpoint", folder / "export", "vllm")
    return folder / "export"


def teach(
    drafter: TrainableDrafter, target: TargetModel, requests: Sequence[Request], steps: int = 40
) -> None:
    """Train on the target's own greedy answers to the requests."""
    plain = Engine(target, None, DecodeConfig(shape="none", batch_size=len(requests)))
    texts = [(*done.request.tokens, *done.tokens) for done in plain.run(requests)]
    width = max(map(len, texts))
    tokens, segments = (
        torch.zeros(len(texts), width, dtype=dtype) for dtype in (torch.int64, torch.int32)
    )
    for row, text in enumerate(texts):
        tokens[row, : len(text)], segments[row, : len(text)] = torch.tensor(text), 1
    positions = torch.arange(width).expand(len(texts), -1)
    packed = PackedBatch(tokens, positions, segments, segments > 0, torch.arange(len(texts)))
    batch = OnlineFeatures(target, drafter.needs).batch(packed)
    optimiser = torch.optim.AdamW(
        (weight for weight in drafter.parameters() if weight.requires_grad), lr=1e-2
    )
    for _ in range(steps):
        optimiser.zero_grad()
        (drafter.loss(batch).loss_sum / sum(map(len, texts))).backward()
        optimiser.step()


@pytest.fixture(scope="module")
def rows(
    engine_python: str, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], LiveRow]:
    """Everything in one process of vLLM: the exports, Medusa by our proposer, and an export with a
    fault."""
    target, scratch = load_target(tiny_target), tmp_path_factory.mktemp("served")
    config = LiveConfig(prompts_per_domain=2, max_new_tokens=40)
    prompts = load_prompts(ROOT / "assets" / "prompts")
    requests = make_requests(config, prompts, target, 8)
    served: list[Served] = []
    for kind in DRAFTERS:
        served.append(
            replace(
                read_served(exported(kind, target, requests, scratch / kind), target), name=kind
            )
        )
        if kind == "medusa":
            told = {**served[-1].speculative, "method": "custom_class", "model": CUSTOM}
            where = {"headstart_medusa": str(served[-1].folder)}
            served.append(
                replace(served[-1], name="custom", folder=None, speculative=told, additional=where)
            )
    served.append(replace(with_fault(served[0], scratch / "fault"), name="fault"))
    for quantise in ("int8", "fp8"):
        write(
            target,
            scratch / "distilled" / "checkpoint",
            scratch / quantise,
            "vllm",
            quantise=quantise,
        )
        served.append(read_served(scratch / quantise, target))
    lengths = {LENGTHS: [[1, 1, 4], [2, 8, 1]]}
    told = {**served[0].speculative, **lengths}
    served.append(replace(served[0], name="lengths", speculative=told))
    process = EngineProcess(engine_python, environment={"PYTHONPATH": str(ROOT)})
    found = live_check(target, served, requests, process, (1, 3))
    return {(row.name, row.batch): row for row in found}


def with_fault(good: Served, folder: Path) -> Served:
    """A copy of an export whose queries and keys turn at another rate, as with a rotary base that
    was lost."""
    assert good.folder is not None
    folder.mkdir()
    for file in good.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 50.0
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"}
    )
    return replace(good, folder=folder)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*DRAFTERS, "custom"])
def test_text_and_acceptance_are_ours(
    rows: dict[tuple[str, int], LiveRow], name: str, batch: int
) -> None:
    found = rows[name, batch].to_dict()
    assert found["problems"] == []
    assert found["identical"] + found["near_ties"] == found["sequences"] == 12  # two of each domain
    assert found["tau_engine"] == pytest.approx(found["tau_ours"], rel=0.02)
    assert found["tau_ours"] > (1.5 if name in ("distilled", "medusa", "custom") else 1.0)
    assert found["answers_with_equal_steps"] >= 11


def test_our_medusa_proposer_does_what_the_engines_own_does(
    rows: dict[tuple[str, int], LiveRow],
) -> None:
    for batch in (1, 3):
        native, custom = (rows[name, batch].answers["engine"] for name in ("medusa", "custom"))
        assert (native.tokens, native.steps, native.counts) == (
            custom.tokens,
            custom.steps,
            custom.counts,
        )


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_quantised_weights_are_accepted_as_our_decoder_accepts_them(
    rows: dict[tuple[str, int], LiveRow], name: str
) -> None:
    row = rows[name, 1]
    assert row.lossless["mismatches"] == 0
    # the engine quantises activations too
    assert row.answers["engine"].counts.length == pytest.approx(
        row.answers["ours"].counts.length, rel=0.06
    )
    assert row.original is not None
    assert row.original.length == pytest.approx(row.answers["ours"].counts.length, rel=0.06)


def test_lengths_per_batch_size_are_used(rows: dict[tuple[str, int], LiveRow]) -> None:
    for batch in (1, 3):
        row = rows["lengths", batch]
        assert row.problems == []
        counts = row.answers["engine"].counts
        drafted = counts.drafted / counts.steps
        assert drafted == 4 if batch == 1 else 1 <= drafted < 4


def test_a_fault_shows_in_acceptance_alone(rows: dict[tuple[str, int], LiveRow]) -> None:
    row = rows["fault", 1]
    assert row.lossless["mismatches"] == 0, "speculative decoding hides it from the text"
    (problem,) = row.problems
    assert "part at drafted position" in problem and "rotary frequencies" in problem
