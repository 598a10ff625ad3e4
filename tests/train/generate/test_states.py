"""Responses and their hidden states in one pass: the same features as a pass of the target over the
responses, and servers and files that fail. tests/serve/test_features.py has vLLM itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.folders import is_aside
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import save_micro_target
from tests.train.features.vllm_stub import Stub, serving
from train.data.answers import AnswersManifest, read_answers
from train.data.config import DataConfig
from train.data.loader import StepLoader
from train.data.pack import PackedData, read_documents
from train.data.states import STATES, path_of
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.fetch import FetchedFeatures
from train.features.make import make_features
from train.features.store.writer import StoreJob, write_features
from train.generate.backends.servers import ServerPool
from train.generate.config import GenerateConfig
from train.generate.run import generate
from train.generate.sampling import SamplingConfig
from train.generate.target_facts import TargetFacts

ROWS, LIMIT, LAYERS = 12, 10, (0, 1, 2)
pytestmark = pytest.mark.usefixtures("one_thread")
NEEDS = FeatureSpec((0, 1), last_hidden=True, logits=True)
EAGLE3 = ("eagle3", "eagle3", get_kind("eagle3").config_class(taps=(0, 1), ttt_steps=2))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder = save_micro_target(tmp_path_factory.mktemp("target"))
    return TargetConfig(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def target(config: TargetConfig) -> TargetModel:
    return TargetModel.load(config)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [
        {
            "id": f"p{i}",
            "messages": [
                {"role": "user", "content": f"Add {i} and {i * i % 17}."},
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": "And again."},
            ],
        }
        for i in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(str(path), id_column="id", turn="all")


def sampling(stub: Stub, **more: Any) -> SamplingConfig:
    given = {
        "max_new_tokens": LIMIT,
        "temperature": 0.0,
        "backoff": 0.01,
        "timeout": 30.0,
        "concurrency": 4,
        **more,
    }
    named = {"states": str(stub.folder), "state_layers": LAYERS, "shape": "none"}
    return SamplingConfig(server=stub.address, protocol="openai", **{**named, **given})


def answered(
    stub: Stub, prompts: DataConfig, config: TargetConfig, out: Path, **more: Any
) -> AnswersManifest:
    return generate(GenerateConfig(), prompts, sampling(stub, **more), config, out)


def reading(
    out: Path, target: TargetModel, length: int, **more: Any
) -> tuple[FetchedFeatures, StepLoader]:
    data = PackedData.from_manifest(out, target.info, length)
    loader = StepLoader(data, 2, 2, 1, 0, seed=0)
    features = FeaturesConfig(**{"mode": "responses", "format": "fp32", **more})
    given = {"answers": out, "loader": loader, "steps": 3}
    found = make_features(features, target, NEEDS, torch.float32, **given)
    assert isinstance(found, FetchedFeatures)
    return found, loader


def require_equal(found: FetchedFeatures, loader: StepLoader, target: TargetModel) -> int:
    """Compare with the target's own pass over the responses; a document's last token, which no
    server reads, is zero. Returns how many tokens were compared."""
    online, compared = OnlineFeatures(target, NEEDS, torch.float32), 0
    for step in range(2):
        for packed in loader.step(step):
            got, true = found.batch(packed, step), online.batch(packed, step)
            behind = torch.nn.functional.pad(got.segments, (0, 1))[:, 1:]
            last = (got.segments > 0) & (behind != got.segments)
            real = (got.segments > 0) & ~last
            for mine, theirs in ((got.taps, true.taps), (got.last_hidden, true.last_hidden)):
                same = (mine[real] - theirs[real]).abs().max()
                assert same < 1e-4
            whole = last & (got.positions < loader.data.sequence_length - 1)
            assert not got.taps[whole].any()
            compared += int(real.sum())
    found.close()
    return compared


@pytest.mark.parametrize("length", [96, 24])
def test_kept_states_are_those_of_a_second_pass(
    config: TargetConfig, target: TargetModel, prompts: DataConfig, tmp_path: Path, length: int
) -> None:
    """length 24: shorter than the documents, which are cut."""
    out = tmp_path / "generate"
    with serving(target, tmp_path / "left", longest=200) as stub:
        manifest = answered(stub, prompts, config, out)
        assert not any(stub.folder.glob("*.safetensors"))
    assert manifest["served"] and not [path for path in out.iterdir() if is_aside(path.name)]
    facts, files = manifest["states"], list((out / STATES).iterdir())
    documents = PackedData.from_manifest(out, target.info, 96).report.documents
    assert facts["layers"] == [*LAYERS] and facts["missing"] == 0
    # turns that others went on from left states too
    assert facts["files"] == len(files) == documents
    assert facts["bytes"] == sum(file.stat().st_size for file in files)
    assert require_equal(*reading(out, target, length), target) > 50
    plain = DecodeConfig(max_new_tokens=LIMIT, temperature=0.0, shape="none")
    own = generate(GenerateConfig(), prompts, plain, config, tmp_path / "own")
    assert own["counts"] == manifest["counts"] and "states" not in own


def test_documents_that_a_training_reads_from_a_later_token_on_are_refused_at_the_start(
    config: TargetConfig, target: TargetModel, prompts: DataConfig, tmp_path: Path
) -> None:
    out = tmp_path / "generate"
    with serving(target, tmp_path / "left", longest=200) as stub:
        answered(stub, prompts, config, out)
    late = [min(a for a, _ in spans) for _, spans in read_documents(out, target.info)]
    with pytest.raises(UserError) as refused:
        reading(out, target, min(late))
    assert f"{sum(one >= min(late) for one in late)} documents of" in str(refused.value)
    assert f"train.sequence_length={max(late) + 2} or more" in str(refused.value)
    require_equal(*reading(out, target, max(late) + 2), target)


def test_a_store_is_written_from_them(
    config: TargetConfig, target: TargetModel, prompts: DataConfig, tmp_path: Path
) -> None:
    out = tmp_path / "generate"
    with serving(target, tmp_path / "left", longest=200) as stub:
        answered(stub, prompts, config, out)
    store = FeaturesConfig(mode="store", source="responses", format="fp32")
    assert store.folder(out) == tmp_path / "features" / "responses_fp32"
    job = StoreJob((EAGLE3,), config, out, store, torch.float32, 96, 2, 0)
    written = write_features(job, say=lambda text: None)
    assert written["rows"] > 0
    again = {"mode": "store", "source": "responses"}
    assert require_equal(*reading(out, target, 96, **again), target) > 50


def test_what_fails_is_asked_for_again_and_a_run_continues(
    config: TargetConfig, target: TargetModel, prompts: DataConfig, tmp_path: Path
) -> None:
    out = tmp_path / "generate"
    with serving(target, tmp_path / "left", longest=200) as stub:
        # the first is for the probe; after a failure, the server's next is again for a probe
        stub.faults += ["", "", 500, 500, "paused", "nothing"]
        stub.faults += ["", "half", "", "other", "", "nothing", "", "late"]
        assert answered(stub, prompts, config, out, concurrency=1)["states"]["missing"] == 0
        assert not stub.faults
    assert require_equal(*reading(out, target, 96), target) > 50


def test_a_file_that_comes_after_its_request_failed_is_deleted_while_others_are_answered(
    config: TargetConfig, target: TargetModel, tmp_path: Path
) -> None:
    facts, names = TargetFacts.load(config), list[str]()
    with serving(target, tmp_path / "left", longest=200) as stub:
        answer = stub.answer

        def named(handler: Any, body: dict[str, Any]) -> None:
            names.append(handler.headers["X-Request-Id"])
            answer(handler, body)

        stub.answer = named  # type: ignore[method-assign]
        pool = ServerPool(sampling(stub, concurrency=1), facts, config, tmp_path / "out")
        stub.faults += [500]
        first = pool.sample([Request(0, (5, 6, 7), 0, LIMIT)])
        next(first)
        assert not any(stub.folder.glob("*.safetensors")), "the probe's file has gone"
        _, failed, _, _ = names
        late = stub.folder / f"cmpl-{failed}-0-1a2b3c4d.safetensors"
        late.write_bytes(b"late")
        second = pool.sample([Request(1, (5, 6, 8), 0, LIMIT)])
        next(second)
        # the ends of these, which delete every file, are still to come
        assert not late.exists()
        first.close()
        second.close()
        assert len([*(tmp_path / "out" / STATES).iterdir()]) == 2


@pytest.fixture(scope="module")
def another(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A model with the target's tokenizer and shape, and other weights."""
    folder = save_micro_target(tmp_path_factory.mktemp("another"), seed=6)
    return TargetModel.load(TargetConfig(str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def calm(
    config: TargetConfig,
    target: TargetModel,
    prompts: DataConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, bytes]:
    """The states of a generation in peace."""
    folder = tmp_path_factory.mktemp("calm")
    with serving(target, folder / "left", longest=200) as stub:
        answered(stub, prompts, config, folder / "generate")
    return {path.name: path.read_bytes() for path in (folder / "generate" / STATES).iterdir()}


def test_states_of_another_model_are_refused_before_anything_is_asked_for(
    config: TargetConfig, another: TargetModel, prompts: DataConfig, tmp_path: Path
) -> None:
    with serving(another, tmp_path / "left", longest=200) as stub:
        with pytest.raises(UserError, match=r"token another log-probability .*another model than"):
            answered(stub, prompts, config, tmp_path / "generate")
        assert len(stub.requests) == 1, "the probe"


@pytest.mark.parametrize("fault", ["root", "weights", "dtype"])
def test_a_server_that_comes_back_with_another_model_ends_a_generation_and_nothing_is_lost(
    fault: str,
    config: TargetConfig,
    target: TargetModel,
    another: TargetModel,
    calm: dict[str, bytes],
    prompts: DataConfig,
    tmp_path: Path,
) -> None:
    """weights: others at the same place; dtype: the target itself, in another one."""
    out, asked = tmp_path / "generate", list[int]()
    problem = {
        "root": r"another model: 'served' from 'models/tuned'; before: 'served' from 'models/served",
        "weights": "another log-probability than it reports",
        "dtype": r"leaves bfloat16 states, and those before were float32",
    }[fault]
    with serving(target, tmp_path / "left", longest=200) as stub:

        def replaced() -> None:
            stub.root = "models/tuned" if fault == "root" else stub.root
            stub.target, stub.fp8 = another if fault == "weights" else target, fault == "dtype"
            asked.append(len(stub.requests))

        stub.faults += ["", "", "", "", replaced]  # the first is for the probe
        given = (GenerateConfig(flush_rows=1), prompts, sampling(stub, concurrency=1), config, out)
        with pytest.raises(UserError, match=rf"cannot be used: .*{problem}.*is kept; the same com"):
            generate(*given)
        assert len(stub.requests) <= asked[0] + 1, "at most the probe"
        assert 0 < len([*(out / STATES).iterdir()]) < len(calm)
        stub.root, stub.target, stub.fp8 = "models/served", target, False
        assert generate(*given)["states"]["missing"] == 0
    assert {path.name: path.read_bytes() for path in (out / STATES).iterdir()} == calm


def test_a_target_that_cannot_be_read_in_parts_is_a_warning(
    config: TargetConfig,
    target: TargetModel,
    prompts: DataConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(config.path, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    moved = replace(config, path=str(folder))
    with serving(target, tmp_path / "left", longest=200) as stub:
        assert answered(stub, prompts, moved, tmp_path / "generate")["states"]["missing"] == 0
    assert "states are not compared with the target: " in caplog.text


def test_a_folder_without_room_is_named_before_anything_is_asked_for(
    config: TargetConfig,
    target: TargetModel,
    prompts: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for one answer fewer than four at once may need: three layers of 32 values."""
    answer = LIMIT * 3 * 32 * 2
    with serving(target, tmp_path / "left", longest=200) as stub:
        for free, fits in ((4 * answer - 1, False), (4 * answer, True)):
            usage = SimpleNamespace(free=free)
            monkeypatch.setattr(
                "train.features.vllm.states_file.shutil.disk_usage", lambda _, u=usage: u
            )
            if fits:
                answered(stub, prompts, config, tmp_path / "generate")
                continue
            with pytest.raises(UserError, match=r"sampling\.states '.*lower sampling\.concurrency"):
                answered(stub, prompts, config, tmp_path / "generate")
            assert not stub.requests


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"connector": False}, "leaves no hidden states. Start vLLM with the method"),
        ({"layers": (0, 2)}, r"leaves states .* of \[\d+, 2, \d+\], not of \[\d+, 3, \d+\]"),
    ],
)
def test_servers_that_leave_others_are_refused(
    more: dict[str, Any],
    problem: str,
    config: TargetConfig,
    target: TargetModel,
    prompts: DataConfig,
    tmp_path: Path,
) -> None:
    given = {"longest": 200, **more}
    layers = given.pop("layers", LAYERS)
    with (
        serving(target, tmp_path / "left", layers, **given) as stub,
        pytest.raises(UserError, match=problem),
    ):
        answered(stub, prompts, config, tmp_path / "generate")


def test_settings_that_do_not_go_together_are_refused(
    config: TargetConfig, target: TargetModel, prompts: DataConfig, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"sampling\.states keeps what vLLM servers leave"):
        SamplingConfig(states="left", shape="none")
    out = tmp_path / "generate"
    with serving(target, tmp_path / "left", longest=200) as stub:
        with pytest.raises(UserError, match="must be ascending and end with 2"):
            answered(stub, prompts, config, tmp_path / "refused", state_layers=(0, 1))
        answered(stub, prompts, config, out, states="")
        with pytest.raises(UserError, match="no hidden states were kept"):
            reading(out, target, 96)
        with pytest.raises(UserError, match="state_layers"):  # answers of another configuration
            answered(stub, prompts, config, out)


def test_damaged_and_foreign_states_are_refused(
    config: TargetConfig, target: TargetModel, prompts: DataConfig, tmp_path: Path
) -> None:
    out = tmp_path / "generate"
    with serving(target, tmp_path / "left", longest=200) as stub:
        answered(stub, prompts, config, out)

    def refused(problem: str) -> None:
        found, loader = reading(out, target, 96)
        with pytest.raises(UserError, match=problem):
            require_equal(found, loader, target)
        found.close()

    one, *others = sorted((out / STATES).iterdir())
    kept = {path: path.read_bytes() for path in (one, *others)}
    for path in kept:
        path.write_bytes(kept[path][:-100])
    refused("safetensors")
    for path in kept:
        path.write_bytes(kept[one])
    refused("does not hold the states")
    for path in kept:
        path.unlink()
    refused("cannot be read")
    for path, content in kept.items():
        path.write_bytes(content)
    half = TargetModel.load(replace(config, dtype="bfloat16"))
    found, loader = reading(out, half, 96)
    with pytest.raises(UserError, match=r"are float32, but target\.dtype is bfloat16"):
        next(iter(found.batch(packed, 0) for packed in loader.step(0)))
    found.close()
    assert path_of(out, one.name.partition(".")[0]) == one
    assert read_answers(out)["states"]["missing"] == 0
