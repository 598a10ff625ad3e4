"""Features from vLLM servers: the same numbers as online, and servers, files and folders that fail
in every way. The servers are stand-ins (vllm_stub.py); tests/serve/test_features.py has vLLM itself."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import train.features.servers as servers
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from heads.api.target_info import UNKNOWN_REVISION
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import tiny_tokenizer
from tests.train.features.test_store import job
from tests.train.features.vllm_stub import Stub, serving
from tests.train.micro_run import settings
from tests.waiting import until
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.document_target import document_target, whole_documents
from train.features.fetch import FetchedFeatures
from train.features.make import make_features
from train.features.remote.server import FeatureServer
from train.features.store.writer import write_features
from train.features.vllm.client import VllmClient
from train.features.vllm.command import serve_command
from train.features.vllm.states_file import NAME, STALE_SECONDS
from train.run import train
from train.target.parts import load_parts
from train.tracking.tracker import LOG_FILE, read_log

NEEDS = FeatureSpec((0, 1), last_hidden=True, logits=True)
LENGTH, LAYERS = 64, (0, 1, 2)
HEAD: dict[str, Any] = {"taps": (0, 1), "ttt_steps": 2}
EAGLE3 = ("eagle3", "eagle3", get_kind("eagle3").config_class(**HEAD))


@pytest.fixture(scope="module")
def own(micro: Path) -> TargetModel:
    """The servers' copy of the target."""
    return TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))


@pytest.fixture(scope="module")
def another(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """Another model with the target's shape and tokenizer."""
    folder = tmp_path_factory.mktemp("another")
    for file in (micro / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return TargetModel.load(TargetConfig(str(folder), device="cpu"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(servers, "FIRST_PAUSE", 0.01)


def config_of(*stubs: Stub | str, states: Path, **more: Any) -> FeaturesConfig:
    addresses = tuple(stub if isinstance(stub, str) else stub.address for stub in stubs)
    given = {"format": "fp32", "timeout_seconds": 5.0, "retries": 8, **more}
    return FeaturesConfig(mode="vllm", servers=addresses, states=str(states), **given)


def client_of(config: FeaturesConfig, target: TargetModel) -> VllmClient:
    found = document_target(config, Path(), target, NEEDS, LENGTH).source
    assert isinstance(found, VllmClient)
    return found


def features_of(
    target: TargetModel, micro: Path, *stubs: Stub | str, states: Path, **more: Any
) -> tuple[FetchedFeatures, StepLoader]:
    """Features from these servers, and a loader."""
    data = PackedData.from_manifest(micro / "answers", target.info, LENGTH)
    loader = StepLoader(data, 4, 2, 1, 0, seed=0)
    found = make_features(
        config_of(*stubs, states=states, **more),
        target,
        NEEDS,
        torch.float32,
        answers=micro / "answers",
        loader=loader,
        steps=4,
    )
    assert isinstance(found, FetchedFeatures)
    return found, loader


def require_equal(features: FetchedFeatures, loader: StepLoader, target: TargetModel) -> None:
    """Compare the features of two steps with the target's own."""
    online = OnlineFeatures(target, NEEDS, torch.float32)
    for step in range(2):
        for packed in loader.step(step):
            got, true = features.batch(packed, step), online.batch(packed, step)
            real = got.segments > 0
            torch.testing.assert_close(got.taps[real], true.taps[real], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                got.last_hidden[real], true.last_hidden[real], rtol=1e-4, atol=1e-5
            )


def test_served_states_are_the_features_computed_online_and_their_files_go(
    target: TargetModel, own: TargetModel, micro: Path, tmp_path: Path
) -> None:
    states = tmp_path / "states"
    with serving(own, states) as one, serving(own, states) as two:
        features, loader = features_of(target, micro, one, two, states=states)
        require_equal(features, loader, target)
        features.close()
        assert not any(states.iterdir())
        # a document each in turn, and the probe
        assert abs(len(one.requests) - len(two.requests)) <= 1


def logs(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_log(folder / LOG_FILE)]


@pytest.mark.parametrize("holds", ["whole", "parts"])
def test_training_from_a_server_is_training_online(
    own: TargetModel, micro: Path, tmp_path: Path, holds: str
) -> None:
    run: dict[str, Any] = {
        "kind": "eagle3",
        "head": HEAD,
        "max_steps": 4,
        "eval_every": 0,
        "parity": False,
    }
    train(out=tmp_path / "online", **settings(micro, **run))
    with serving(own, tmp_path / "states") as stub:
        config = config_of(stub, states=tmp_path / "states", trainer_target=holds)
        train(out=tmp_path / "vllm", **{**settings(micro, **run), "features": config})
    found, wanted = logs(tmp_path / "vllm"), logs(tmp_path / "online")
    assert len(found) == 4
    for mine, true in zip(found, wanted, strict=True):
        assert mine == pytest.approx(true, rel=1e-3)


def test_rows_may_be_rewritten_on_the_way(own: TargetModel, micro: Path, tmp_path: Path) -> None:
    from train.on_policy import OnPolicyConfig

    run: dict[str, Any] = {
        "kind": "eagle3",
        "head": HEAD,
        "max_steps": 3,
        "eval_every": 0,
        "on_policy": OnPolicyConfig(share=0.5, window=3),
    }
    train(out=tmp_path / "online", **settings(micro, **run))
    with serving(own, tmp_path / "states") as stub:
        config = config_of(stub, states=tmp_path / "states")
        train(out=tmp_path / "vllm", **{**settings(micro, **run), "features": config})
    for mine, true in zip(logs(tmp_path / "vllm"), logs(tmp_path / "online"), strict=True):
        assert mine == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("holds", ["whole", "parts"])
def test_a_store_is_written_from_a_server_continued_and_read(
    own: TargetModel, micro: Path, tmp_path: Path, holds: str
) -> None:
    states, store = tmp_path / "states", tmp_path / "store"
    with serving(own, states) as stub:
        more = {"shard_mib": 0.05, "trainer_target": holds, "path": str(store)}
        reading = config_of(stub, states=states, **more)
        config = replace(reading, mode="store", source="vllm")
        load = partial(load_parts, norm=True) if holds == "parts" else TargetModel.load
        given = replace(job(micro, store, EAGLE3), features=config, load=load)
        said: list[str] = []
        written = write_features(given, say=said.append)
        assert len(written["shards"]) > 2
        assert not any(states.iterdir())
        asked = len(stub.requests)
        assert write_features(given, say=said.append) == written
        assert len(stub.requests) == asked  # nothing was missing
        shard = sorted((store / "shards").iterdir())[1]
        content = shard.read_bytes()
        shard.unlink()
        write_features(given, say=said.append)
        assert shard.read_bytes() == content
        assert asked < len(stub.requests) < 1.7 * asked
    run: dict[str, Any] = {
        "kind": "eagle3",
        "head": HEAD,
        "max_steps": 4,
        "eval_every": 0,
        "parity": False,
    }
    train(out=tmp_path / "online", **settings(micro, **run))
    train(out=tmp_path / "read", **{**settings(micro, **run), "features": config})
    for mine, true in zip(logs(tmp_path / "read"), logs(tmp_path / "online"), strict=True):
        assert mine == pytest.approx(true, rel=1e-3)
    plain = {**settings(micro, **run), "features": replace(config, source="target")}
    with pytest.raises(UserError, match=r"another features\.source: vllm, not target"):
        train(out=tmp_path / "refused", **plain)


FAULTS: list[list[int | str]] = [[500] * 6, ["cut"] * 3, ["half", "half"], ["nothing"], ["late"]]


@pytest.mark.parametrize(
    "faults", [*FAULTS, ["other"], ["another"], ["hang"]], ids=lambda faults: str(faults[0])
)
def test_what_fails_for_a_while_is_asked_for_again_and_nothing_is_lost(
    target: TargetModel, own: TargetModel, micro: Path, tmp_path: Path, faults: list[int | str]
) -> None:
    states = tmp_path / "states"
    with serving(own, states) as stub:
        slow = {"timeout_seconds": 1.0} if faults == ["hang"] else {}
        features, loader = features_of(target, micro, stub, states=states, ahead=0, **slow)
        stub.faults += faults
        require_equal(features, loader, target)
        assert not stub.faults
        features.close()
        assert not any(path for path in states.iterdir() if path.suffix == ".safetensors")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (503, "status 503, EngineCore encountered an issue"),
        ("cut", "RemoteDisconnected"),
        ("half", r"cannot be read: .*Its folder has .*iB free"),
        ("nothing", r"it answered, but wrote no '.*'\. Its folder has .*iB free"),
        ("hang", r"no answer within 0\.3 s"),
        ("other", "holds the states of another text"),
    ],
)
def test_what_goes_on_failing_ends_with_its_reason(
    target: TargetModel, own: TargetModel, micro: Path, tmp_path: Path, fault: int | str, words: str
) -> None:
    with serving(own, tmp_path) as stub:
        more = {"retries": 2, "ahead": 0, "concurrency": 1, "timeout_seconds": 0.3}
        features, loader = features_of(target, micro, stub, states=tmp_path, **more)
        before = len(stub.requests)
        stub.faults += [fault] * 100
        with pytest.raises(UserError, match=rf"no features after 3 attempts \(.*{words}"):
            features.batch(loader.step(0)[0])
        assert len(stub.requests) - before <= 3 * 2  # of the failed document, and the one behind it
        features.close()


def test_states_in_fp8_are_read_as_bfloat16(micro: Path, tmp_path: Path) -> None:
    half = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu", dtype="bfloat16"))
    document = [5, 6, 7, 8, 9]
    with serving(half, tmp_path) as plain, serving(half, tmp_path, fp8=True) as coded:
        exact, found = (
            client_of(config_of(stub, states=tmp_path), half).states(document)
            for stub in (plain, coded)
        )
    assert found.dtype == exact.dtype == torch.bfloat16
    error = (found.float() - exact.float()).abs()
    largest = exact.float().abs().amax((1, 2), keepdim=True)
    # half a step of e4m3 in relation to the value, and bfloat16's own; of the smallest values, to the token's scale
    assert bool((error <= exact.float().abs() / 14 + largest / 448 / 256).all())
    assert bool(error.any())


def test_threads_that_wait_for_a_hanging_server_share_its_failure(
    target: TargetModel, own: TargetModel, tmp_path: Path
) -> None:
    asking, retries = 8, 2
    with serving(own, tmp_path) as stub:
        config = config_of(stub, states=tmp_path, retries=retries, timeout_seconds=0.5)
        client = client_of(config, target)
        before = len(stub.requests)
        stub.faults += ["hang"] * 100

        def ask(number: int) -> str:
            with pytest.raises(UserError) as caught:
                client.states([5, 6, 7 + number])
            return str(caught.value)

        with ThreadPoolExecutor(asking) as pool:
            errors = [*pool.map(ask, range(asking))]
        assert all("no answer within 0.5 s" in error for error in errors)
        # the documents, and then looks: one for all threads that wait, not one for each
        assert len(stub.requests) - before < asking + retries * asking / 2
        client.close()


def test_others_are_asked_while_one_thread_tries_a_server_that_failed(tmp_path: Path) -> None:
    found = servers.Servers(config_of("http://a:1", "http://b:2", states=tmp_path), "server", {})
    failed, other = found.all
    while found._next() != failed:
        pass
    found._rest(failed)
    found._rested[failed] = 0.0  # its rest has ended
    chosen = [found._next() for _ in range(4)]
    assert chosen.count(failed) == 1, chosen
    assert chosen.count(other) == 3, chosen


def test_a_killed_server_is_worked_around_and_found_again(
    target: TargetModel, own: TargetModel, micro: Path, tmp_path: Path
) -> None:
    with serving(own, tmp_path) as one, serving(own, tmp_path) as two:
        features, loader = features_of(target, micro, one, two, states=tmp_path, ahead=0)
        one.stop()
        require_equal(features, loader, target)
        before = len(two.requests)
        one.start()
        one.requests.clear()
        two.faults += [500] * 3
        time.sleep(0.1)
        require_equal(features, loader, target)
        features.close()
        assert one.requests
        assert len(two.requests) > before
    with serving(own, tmp_path) as stub:
        features, loader = features_of(target, micro, stub, states=tmp_path, ahead=0, retries=30)
        stub.stop()
        late = threading.Timer(0.5, stub.start)
        late.start()
        require_equal(features, loader, target)
        features.close()
        late.join()


def test_a_server_that_comes_back_with_another_model_is_refused(
    target: TargetModel, own: TargetModel, another: TargetModel, micro: Path, tmp_path: Path
) -> None:
    parts = load_parts(TargetConfig(str(micro / "target"), device="cpu"), norm=True)
    for mine, more in ((target, {}), (parts, {"trainer_target": "parts"})):
        with serving(own, tmp_path) as stub:
            features, loader = features_of(mine, micro, stub, states=tmp_path, ahead=0, **more)
            stub.stop()
            stub.target = another
            stub.start()
            with pytest.raises(UserError, match=r"does not fit this training: it .*another model"):
                features.batch(loader.step(0)[0])
            features.close()
        # not even restarted, as far as is seen from here
        with serving(own, tmp_path) as stub:
            features, loader = features_of(mine, micro, stub, states=tmp_path, ahead=0, **more)
            stub.target = another
            with pytest.raises(UserError, match=r"another log-probability.*another model"):
                features.batch(loader.step(0)[0])
            features.close()


def test_a_server_that_does_not_fit_is_refused_with_the_command_that_would(
    target: TargetModel,
    own: TargetModel,
    micro: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(
        words: str,
        model: TargetModel = own,
        layers: tuple[int, ...] = LAYERS,
        named: tuple[int, ...] = (),
        **more: Any,
    ) -> None:
        """named: features.layers."""
        with (
            serving(model, tmp_path, layers, **more) as stub,
            pytest.raises(UserError, match=words),
        ):
            features_of(target, micro, stub, states=tmp_path, layers=named)

    command = r"[\s\S]*vllm serve .*extract_hidden_states"
    refused("leaves no states: it has no connector" + command, connector=False)
    refused(r"takes 63 tokens and 1 more, but documents may have 64" + command, longest=64)
    refused(r"states \[tokens, layers, hidden\] of .* 2, .*not of .* 3, " + command, layers=(0, 2))
    refused(r"differ from the target's at layer 1 \(by \d+%\)" + command, layers=(0, 0, 2))
    refused(r"another log-probability than its states do", layers=(0, 1, 1))
    half = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu", dtype="bfloat16"))
    refused("leaves bfloat16 states, but target.dtype is float32" + command, model=half)
    other = tiny_tokenizer("chatml")
    refused("has another tokenizer than the target", encode=other.encode)
    refused(r"features\.layers=\[0, 2\] lacks \[1\]", named=(0, 2))
    refused("taps .*9.* do not exist", named=(0, 1, 2, 9))
    refused(r"refuses: Unauthorized Set HEADSTART_FEATURES_TOKEN", token="secret")
    monkeypatch.setenv("HEADSTART_FEATURES_TOKEN", "secret")
    with serving(own, tmp_path, token="secret") as stub:
        features, _ = features_of(target, micro, stub, states=tmp_path)
        features.close()
    silent = r'no vLLM server answers .*api-key "\$HEADSTART_FEATURES_TOKEN"'
    with pytest.raises(UserError, match=f"(?s){silent}"):
        features_of(target, micro, "http://127.0.0.1:9", states=tmp_path)
    with pytest.raises(UserError, match=r"(?s)names no vLLM server.*vllm serve"):
        document_target(
            FeaturesConfig(source="vllm", states=str(tmp_path)), Path(), target, NEEDS, LENGTH
        )


def test_a_folder_without_room_or_not_mounted_is_named(
    target: TargetModel,
    own: TargetModel,
    micro: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(own, tmp_path) as stub:
        gone = rf"there is no folder '{tmp_path}/elsewhere' on this machine: features\.states"
        with pytest.raises(UserError, match=gone):
            features_of(target, micro, stub, states=tmp_path / "elsewhere")
        full = SimpleNamespace(free=100)
        monkeypatch.setattr("train.features.vllm.states_file.shutil.disk_usage", lambda _: full)
        with pytest.raises(UserError, match=r"has 0\.0 MiB free.*lower features\.concurrency"):
            features_of(target, micro, stub, states=tmp_path)


def test_what_readers_left_is_deleted_and_nothing_else(
    target: TargetModel, own: TargetModel, tmp_path: Path
) -> None:
    names = {
        f"cmpl-{NAME}gone-1.safetensors": STALE_SECONDS + 60,
        f"cmpl-{NAME}other-1.safetensors": 0.0,
        "cmpl-strange-1.safetensors": STALE_SECONDS + 60,
    }
    for name, age in names.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with serving(own, tmp_path) as stub:
        client = client_of(config_of(stub, states=tmp_path), target)
        client.states([5, 6, 7])
        stub.faults += ["foreign"]
        with pytest.raises(UserError, match=r"names its file '.*', not after the request"):
            client.states([5, 6, 7])
        left = tmp_path / f"cmpl-{client.name}77.safetensors"
        left.write_bytes(b"x")  # of a request that was given up
        client.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names][1:])


def test_files_that_come_after_a_request_was_given_up_are_deleted(
    target: TargetModel, own: TargetModel, tmp_path: Path
) -> None:
    with serving(own, tmp_path) as stub:
        client = client_of(config_of(stub, states=tmp_path, timeout_seconds=0.3), target)
        stub.faults += ["aborted"]
        client.states([5, 6, 7])
        until(lambda: any(tmp_path.glob("*.safetensors")))
        client.states([5, 6, 8])
        assert not any(tmp_path.iterdir())
        client.close()


def test_a_published_target_is_served_in_its_own_revision(target: TargetModel) -> None:
    config = FeaturesConfig(mode="vllm", servers=("http://a:1",), states="/dev/shm/a")
    info = replace(target.info, id="org/model", revision="0123abc")
    words = shlex.split(serve_command(config, info, LAYERS, "bfloat16", LENGTH))
    assert words[2] == "org/model" and words[words.index("--revision") + 1] == "0123abc"
    unknown = replace(info, revision=UNKNOWN_REVISION)
    assert "--revision" not in serve_command(config, unknown, LAYERS, "bfloat16", LENGTH)


def test_documents_are_told_apart() -> None:
    segments = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 0, 0, 0, 0]])
    found = [(one.row, one.first, one.end) for one in whole_documents(segments, positions)]
    assert found == [(0, 0, 2), (0, 2, 5), (1, 0, 1)]
    with pytest.raises(UserError, match="positions begin elsewhere"):
        list(whole_documents(segments, positions + 1))


def test_a_feature_server_may_stand_before_vllm(
    target: TargetModel, own: TargetModel, micro: Path, tmp_path: Path
) -> None:
    """For trainers that do not see the folder."""
    with serving(own, tmp_path) as stub:
        engine = document_target(config_of(stub, states=tmp_path), Path(), own, NEEDS, LENGTH)
        server = FeatureServer(engine, torch.float32, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            config = FeaturesConfig(mode="remote", servers=(server.address,), format="fp32")
            data = PackedData.from_manifest(micro / "answers", target.info, LENGTH)
            loader = StepLoader(data, 4, 2, 1, 0, seed=0)
            given = {"answers": micro / "answers", "loader": loader, "steps": 4}
            features = make_features(config, target, NEEDS, torch.float32, **given)
            assert isinstance(features, FetchedFeatures)
            require_equal(features, loader, target)
            features.close()
            wide = make_features(
                config, target, replace(NEEDS, taps=(0, 1, 2)), torch.float32, **given
            )
            assert isinstance(wide, FetchedFeatures)
            wide.batch(loader.step(0)[0])
            wide.close()
        finally:
            server.end()
            thread.join()
            engine.close()


def test_the_command_names_everything_that_a_server_needs(
    target: TargetModel, micro: Path, tmp_path: Path
) -> None:
    config = FeaturesConfig(mode="vllm", servers=("http://a:1",), states=str(tmp_path / "a b"))
    words = shlex.split(serve_command(config, target.info, LAYERS, "bfloat16", LENGTH))
    assert words[:3] == ["vllm", "serve", str(micro / "target")]
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert options["--dtype"] == "bfloat16"
    assert options["--max-model-len"] == "65"
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2]
    }
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "a b")}
    longest = target.info.max_position_embeddings
    words = shlex.split(serve_command(config, target.info, LAYERS, "float32", longest, cpu=True))
    assert words[0].startswith("PYTHONPATH=")
    assert words[1] == "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    assert "train.features.vllm.connector" in words[-1]
    with pytest.raises(UserError, match=r"features\.layers must be ascending"):
        FeaturesConfig(layers=(2, 1))
