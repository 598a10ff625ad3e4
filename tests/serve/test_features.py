"""Features from a real vLLM: its states are ours, a training from them is the training online, and
an engine that is killed meanwhile loses nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.vllm_server import VllmServer
from tests.serve.states import HEAD, LAYERS, LENGTH, features_of, states_server
from tests.train.features.test_store import job
from tests.train.micro_run import settings
from train.data.config import DataConfig
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.fetch import FetchedFeatures
from train.features.make import make_features
from train.features.store.writer import write_features
from train.generate.config import GenerateConfig
from train.generate.run import generate
from train.generate.sampling import SamplingConfig
from train.run import train
from train.target.parts import load_parts
from train.tracking.tracker import LOG_FILE, read_log

pytestmark = [pytest.mark.serve, pytest.mark.slow]

TOKEN = "a-secret"
NEEDS = FeatureSpec((0, 1), last_hidden=True, logits=True)


@pytest.fixture(scope="module")
def server(engine_python: str, micro: Path, target: TargetModel) -> Iterator[VllmServer]:
    """vLLM as the printed command starts it."""
    served = states_server(engine_python, micro, target.info, "log", token=TOKEN)
    with served.running():
        yield served


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_FEATURES_TOKEN", TOKEN)


def config_of(server: VllmServer, micro: Path, **more: Any) -> FeaturesConfig:
    return features_of(server, states=micro / "states", **more)


def logs(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_log(folder / LOG_FILE)]


def test_its_states_are_ours_and_its_files_go(
    server: VllmServer, target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = PackedData.from_manifest(micro / "answers", target.info, LENGTH)
    loader = StepLoader(data, 4, 2, 1, 0, seed=0)
    online = OnlineFeatures(target, NEEDS, torch.float32)

    def made() -> FetchedFeatures:
        features = make_features(
            config_of(server, micro),
            target,
            NEEDS,
            torch.float32,
            answers=micro / "answers",
            loader=loader,
            steps=4,
        )
        assert isinstance(features, FetchedFeatures)
        return features

    features = made()
    for step in range(4):
        for packed in loader.step(step):
            got, true = features.batch(packed, step), online.batch(packed, step)
            real = got.segments > 0
            for mine, theirs in ((got.taps, true.taps), (got.last_hidden, true.last_hidden)):
                assert mine is not None
                assert theirs is not None
                torch.testing.assert_close(mine[real], theirs[real], rtol=1e-4, atol=1e-4)
    features.close()
    assert not any((micro / "states").iterdir())
    monkeypatch.setenv("HEADSTART_FEATURES_TOKEN", "another")
    with pytest.raises(UserError, match=r"refuses: Unauthorized Set HEADSTART_FEATURES_TOKEN"):
        made()


def test_responses_and_their_states_come_in_one_pass(
    server: VllmServer,
    target: TargetModel,
    micro: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADSTART_SERVER_KEY", TOKEN)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"Add {i} and {i * i}."} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sampling = SamplingConfig(
        server=server.address,
        shape="none",
        max_new_tokens=16,
        states=str(micro / "states"),
        state_layers=LAYERS,
    )
    out, config = tmp_path / "generate", TargetConfig(str(micro / "target"), device="cpu")
    data = DataConfig(str(prompts), id_column="id")
    manifest = generate(GenerateConfig(), data, sampling, config, out)
    assert manifest["states"]["files"] == manifest["counts"]["done"] > 0
    assert manifest["states"]["missing"] == 0
    assert not any((micro / "states").glob("*.safetensors"))
    loader = StepLoader(PackedData.from_manifest(out, target.info, LENGTH), 2, 2, 1, 0, seed=0)
    kept = make_features(
        FeaturesConfig(mode="responses", format="fp32"),
        target,
        NEEDS,
        torch.float32,
        answers=out,
        loader=loader,
        steps=3,
    )
    online, compared = OnlineFeatures(target, NEEDS, torch.float32), 0
    for step in range(2):
        for packed in loader.step(step):
            got, true = kept.batch(packed, step), online.batch(packed, step)
            behind = torch.nn.functional.pad(got.segments, (0, 1))[:, 1:]
            real = (got.segments > 0) & (behind == got.segments)  # a last token is never read
            for mine, theirs in ((got.taps, true.taps), (got.last_hidden, true.last_hidden)):
                assert mine is not None
                assert theirs is not None
                torch.testing.assert_close(mine[real], theirs[real], rtol=1e-4, atol=1e-4)
            compared += int(real.sum())
    kept.close()
    assert compared > 50


@pytest.mark.parametrize("holds", ["whole", "parts"])
def test_training_from_it_is_training_online(
    server: VllmServer, micro: Path, tmp_path: Path, holds: str
) -> None:
    run: dict[str, Any] = {
        "kind": "eagle3",
        "head": HEAD,
        "max_steps": 6,
        "eval_every": 0,
        "parity": False,
    }
    train(out=tmp_path / "online", **settings(micro, **run))
    config = config_of(server, micro, trainer_target=holds)
    train(out=tmp_path / "vllm", **{**settings(micro, **run), "features": config})
    found, wanted = logs(tmp_path / "vllm"), logs(tmp_path / "online")
    assert len(found) == 6
    for mine, true in zip(found, wanted, strict=True):
        assert mine == pytest.approx(true, rel=1e-3)


def test_an_engine_that_is_killed_while_a_store_is_written_loses_nothing(
    server: VllmServer, micro: Path, tmp_path: Path
) -> None:
    head = ("eagle3", "eagle3", get_kind("eagle3").config_class(**HEAD))

    def written(name: str) -> list[bytes]:
        config = config_of(server, micro, path=str(tmp_path / name), shard_mib=0.05)
        config = replace(config, mode="store", source="vllm", trainer_target="parts")
        given = replace(
            job(micro, tmp_path / name, head), features=config, load=partial(load_parts, norm=True)
        )
        write_features(given)
        return [path.read_bytes() for path in sorted((tmp_path / name / "shards").iterdir())]

    whole = written("whole")

    def strike() -> None:
        shards = tmp_path / "struck" / "shards"
        while not (shards.is_dir() and any(shards.iterdir())):
            time.sleep(0.005)
        server.kill()
        server.start()

    striking = threading.Thread(target=strike)
    striking.start()
    struck = written("struck")
    striking.join()
    assert len(struck) == len(whole) > 3
    assert [len(content) for content in struck] == [len(content) for content in whole]
