"""Last hidden states from SGLang servers: the same numbers as online, and servers that fail or do
not fit. The servers are stand-ins (vllm_stub.py), written from the source of sglang 0.5.23."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import train.features.servers as servers
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.train.features.test_store import MEDUSA, job
from tests.train.features.vllm_stub import Stub, serving
from tests.train.micro_run import settings
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.document_target import DocumentTarget, document_target
from train.features.fetch import FetchedFeatures
from train.features.make import make_features
from train.features.sglang import SPARE, launch_command
from train.features.store.writer import write_features
from train.run import train
from train.target.parts import load_parts
from train.tracking.tracker import LOG_FILE, read_log

NEEDS = FeatureSpec(last_hidden=True, logits=True)
LENGTH = 64
RUN: dict[str, Any] = {"max_steps": 3, "eval_every": 0, "parity": False}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_PAUSE", 0.01)


@pytest.fixture(scope="module")
def own(micro: Path) -> TargetModel:
    """The servers' copy of the target."""
    return TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))


@pytest.fixture(scope="module")
def another(micro: Path) -> TargetModel:
    """Another model with the target's shape, tokenizer, embedding and LM head."""
    found = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in found.decoder.layers:
            for weight in layer.parameters():
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return found


@pytest.fixture
def sglang(tmp_path: Path) -> Any:
    """`with sglang(target, ...) as stub`: a server with room for documents."""
    return lambda model, **more: serving(model, tmp_path, **{"longest": LENGTH + SPARE, **more})


def config_of(*stubs: Stub | str, **more: Any) -> FeaturesConfig:
    addresses = tuple(stub if isinstance(stub, str) else stub.address for stub in stubs)
    given = {"format": "fp32", "timeout_seconds": 5.0, "retries": 8, **more}
    return FeaturesConfig(**{"mode": "sglang", "servers": addresses, **given})


def engine_of(target: TargetModel, *stubs: Stub | str, **more: Any) -> DocumentTarget:
    return document_target(config_of(*stubs, **more), Path(), target, NEEDS, LENGTH)


def features_of(
    target: TargetModel, micro: Path, *stubs: Stub, **more: Any
) -> tuple[FetchedFeatures, StepLoader]:
    """Features from these servers, and a loader."""
    data = PackedData.from_manifest(micro / "answers", target.info, LENGTH)
    loader = StepLoader(data, 4, 2, 1, 0, seed=0)
    given = {"answers": micro / "answers", "loader": loader, "steps": 2}
    config = config_of(*stubs, **more)
    found = make_features(config, target, NEEDS, torch.float32, **given)
    assert isinstance(found, FetchedFeatures)
    return found, loader


def require_equal(features: FetchedFeatures, loader: StepLoader, target: TargetModel) -> None:
    """Compare the features of a step with the target's own."""
    online = OnlineFeatures(target, NEEDS, torch.float32)
    for packed in loader.step(0):
        got, true = features.batch(packed), online.batch(packed)
        real = got.segments > 0
        assert got.taps is None
        torch.testing.assert_close(
            got.last_hidden[real], true.last_hidden[real], rtol=1e-4, atol=1e-5
        )


def require_same_training(found: Path, wanted: Path) -> None:
    mine, true = (
        [(line["loss"], line["grad_norm"]) for line in read_log(folder / LOG_FILE)]
        for folder in (found, wanted)
    )
    assert len(mine) == len(true) == RUN["max_steps"]
    for one, other in zip(mine, true, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_served_states_are_the_features_computed_online(
    target: TargetModel, own: TargetModel, micro: Path, sglang: Any
) -> None:
    with sglang(own) as one, sglang(own) as two:
        features, loader = features_of(target, micro, one, two)
        require_equal(features, loader, target)
        features.close()
        assert abs(len(one.requests) - len(two.requests)) <= 1
    half = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu", dtype="bfloat16"))
    with sglang(half) as stub:
        states = engine_of(half, stub).source.states([5, 6, 7, 8])
        assert torch.equal(states[:, 0], stub.step([5, 6, 7, 8])[1])


@pytest.mark.parametrize("holds", ["whole", "parts"])
def test_training_from_a_server_is_training_online(
    own: TargetModel, micro: Path, tmp_path: Path, sglang: Any, holds: str
) -> None:
    train(out=tmp_path / "online", **settings(micro, **RUN))
    with sglang(own) as stub:
        config = config_of(stub, trainer_target=holds)
        train(out=tmp_path / "sglang", **{**settings(micro, **RUN), "features": config})
    require_same_training(tmp_path / "sglang", tmp_path / "online")


def test_a_store_is_written_from_a_server_continued_and_read(
    own: TargetModel, micro: Path, tmp_path: Path, sglang: Any
) -> None:
    store, said = tmp_path / "store", list[str]()
    with sglang(own) as stub:
        config = config_of(
            stub, mode="store", source="sglang", shard_mib=0.02, path=str(store), concurrency=4
        )
        load = partial(load_parts, norm=True)
        parts = replace(config, trainer_target="parts")
        given = replace(job(micro, store, MEDUSA), features=parts, load=load)
        assert len(write_features(given, say=said.append)["shards"]) > 2
        asked = len(stub.requests)
        shard = sorted((store / "shards").iterdir())[1]
        content = shard.read_bytes()
        shard.unlink()
        write_features(given, say=said.append)
        assert shard.read_bytes() == content
        assert asked < len(stub.requests) < 1.7 * asked
    train(out=tmp_path / "online", **settings(micro, **RUN))
    train(out=tmp_path / "read", **{**settings(micro, **RUN), "features": config})
    require_same_training(tmp_path / "read", tmp_path / "online")


REASONS = {
    "503": (503, "status 503, EngineCore encountered an issue"),
    "cut": ("cut", "RemoteDisconnected"),
    "hang": ("hang", r"no answer within 0\.3 s"),
    "words": ("words", r"an answer that is none of SGLang's \(Invalid JSON"),
    "stateless": ("stateless", "it answered without hidden states"),
    "null": ("null", "its hidden states are no rows of numbers"),
    "infinite": ("infinite", "its hidden states hold numbers that are not finite"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_fails_is_asked_for_again_and_ends_with_its_reason_if_it_lasts(
    target: TargetModel, own: TargetModel, micro: Path, sglang: Any, name: str
) -> None:
    fault, words = REASONS[name]
    more = {"retries": 2, "ahead": 0, "concurrency": 1, "timeout_seconds": 0.3}
    with sglang(own) as stub:
        features, loader = features_of(target, micro, stub, **more)
        stub.faults += [fault] * 2
        require_equal(features, loader, target)
        assert not stub.faults
        before = len(stub.requests)
        stub.faults += [fault] * 100
        with pytest.raises(UserError, match=rf"no features after 3 attempts \(.*{words}"):
            features.batch(loader.step(1)[0])
        assert len(stub.requests) - before <= 3 * 2  # of the document, and the one behind it
        features.close()


def test_a_server_that_does_not_fit_is_refused_with_the_command_that_would(
    target: TargetModel,
    own: TargetModel,
    another: TargetModel,
    sglang: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(words: str, model: TargetModel = own, fault: str = "", **more: Any) -> None:
        served = sglang(model, faults=[fault], **more)
        with served as stub, pytest.raises(UserError, match=words):
            engine_of(target, stub)

    command = r"[\s\S]*sglang.launch_server .*--enable-return-hidden-states --disable-radix-cache"
    refused("refuses: The server is not configured to return" + command, flag=False)
    refused("takes 63 tokens and 7 more, but documents may have 64" + command, longest=70)
    refused(
        r"returns the states of \d+ tokens of \d+: it caches prefixes" + command, fault="cached"
    )
    refused(r"states \[tokens, hidden\] of .* 8\], not of" + command, width=8)
    refused("another log-probability than its states do" + command, fault="other")
    refused(r"differ from the target's at layer 2 \(by \d+%\)" + command, another)
    refused("refuses: Unauthorized Set HEADSTART_FEATURES_TOKEN", token="secret")
    monkeypatch.setenv("HEADSTART_FEATURES_TOKEN", "secret")
    with sglang(own, token="secret") as stub:
        engine_of(target, stub).close()
    with pytest.raises(UserError, match=r"(?s)no SGLang server answers .*--api-key"):
        engine_of(target, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"(?s)names no SGLang server.*launch_server.*:30000"):
        engine_of(target)
    with pytest.raises(UserError, match=r"heads read its layers \[0, 1\]: use features=vllm"):
        document_target(config_of("http://a:1"), Path(), target, FeatureSpec((0, 1)), LENGTH)


def test_a_server_that_comes_back_with_another_model_is_refused(
    target: TargetModel, own: TargetModel, another: TargetModel, micro: Path, sglang: Any
) -> None:
    with sglang(own) as stub:
        features, loader = features_of(target, micro, stub, ahead=0)
        stub.target = another
        stub.faults += ["cut"]
        with pytest.raises(
            UserError, match=r"does not fit this training: it .* runs other weights"
        ):
            features.batch(loader.step(0)[0])
        features.close()


def test_the_command_names_everything_that_a_server_needs(target: TargetModel) -> None:
    info = replace(target.info, id="org/model", revision="0123abc")
    words = shlex.split(launch_command(FeaturesConfig(), info, "bfloat16", LENGTH))
    assert words[:7] == (
        "python -m sglang.launch_server --model-path org/model --revision 0123abc".split()
    )
    options = dict(pairwise(words))
    assert (options["--dtype"], options["--context-length"]) == ("bfloat16", str(LENGTH + SPARE))
    assert options["--chunked-prefill-size"] == "-1"
    longest = info.max_position_embeddings
    command = launch_command(FeaturesConfig(), info, "bfloat16", longest)
    assert command.startswith("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python ")
