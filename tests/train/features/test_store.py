"""A store of features: the same training as online, written by several, read while written, damage
found and named."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from inference.manifest import MANIFEST_FILE, file_sha256
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.train.micro_run import settings
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.fetch import FetchedFeatures
from train.features.make import make_features
from train.features.store.claims import Claims
from train.features.store.layout import Identity, index_path, read_plan, shard_name, shard_path
from train.features.store.reader import StoreReader
from train.features.store.writer import StoreJob, Writer, missing_shards, write_features
from train.run import train
from train.tracking.tracker import LOG_FILE, read_log

LENGTH, SHARD_MIB = 64, 0.05
EAGLE3 = ("eagle3", "eagle3", get_kind("eagle3").config_class(taps=(0, 1, 2)))
TOKENS_ONLY = {"ce": 1.0, "kl": 0.0, "tv": 0.0}
DFLASH = ("dflash", "dflash", get_kind("dflash").config_class(taps=(0, 1, 2), **TOKENS_ONLY))
MEDUSA = ("medusa", "medusa", get_kind("medusa").config_class(num_heads=3))


pytestmark = pytest.mark.usefixtures("one_thread")


def job(
    micro: Path, folder: Path, *heads: Any, dtype: torch.dtype = torch.float32, **features: Any
) -> StoreJob:
    chosen = {"format": "fp32", "shard_mib": SHARD_MIB, "path": str(folder), **features}
    return StoreJob(
        heads=heads or (EAGLE3,),
        target=TargetConfig(str(micro / "target"), device="cpu"),
        answers=micro / "answers",
        features=FeaturesConfig(**chosen),
        dtype=dtype,
        sequence_length=LENGTH,
        batch_rows=2,
        seed=0,
    )


def quiet(text: str) -> None:
    """Where a test does not look at what is said."""


def write(made: StoreJob) -> dict[str, Any]:
    return write_features(made, say=quiet)


@pytest.fixture(scope="module")
def exact(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of float32 features for eagle3 and medusa."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("stores") / "exact"
    write(job(micro, folder, EAGLE3, MEDUSA))
    return folder


def copy(source: Path, target: Path) -> Path:
    import shutil

    shutil.copytree(source, target)
    return target


def opened(
    micro: Path,
    folder: Path,
    needs: FeatureSpec,
    dtype: torch.dtype,
    loading: str = "",
    **features: Any,
) -> tuple[Any, Any, StepLoader]:
    """Features from the store, features computed here, and a loader of the same rows."""
    target = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))
    data = PackedData.from_manifest(micro / "answers", target.info, LENGTH)
    loader = StepLoader(data, 4, 2, 1, 0, seed=0)
    config = FeaturesConfig(mode="store", path=str(folder), **{"format": "fp32", **features})
    given = {"answers": micro / "answers", "loader": loader, "loading": loading}
    stored = make_features(config, target, needs, dtype, steps=8, **given)
    return stored, OnlineFeatures(target, needs, dtype), loader


def read_all(stored: Any, loader: StepLoader) -> None:
    """Read every row once."""
    for step in range(loader.steps_per_epoch):
        for packed in loader.step(step):
            stored.batch(packed)


# The same numbers


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_stored_features_are_those_computed_online_to_the_last_bit(
    micro: Path, tmp_path: Path, dtype: torch.dtype, fmt: str
) -> None:
    write(job(micro, tmp_path / "store", dtype=dtype, format=fmt))
    needs = FeatureSpec((0, 1, 2), last_hidden=True, logits=True)
    stored, online, loader = opened(micro, tmp_path / "store", needs, dtype, format=fmt)
    for step in range(8):
        for packed in loader.step(step):
            one, other = stored.batch(packed, step), online.batch(packed, step)
            real = one.segments > 0
            for name in ("tokens", "positions", "segments", "loss_mask", "seeds"):
                assert torch.equal(getattr(one, name), getattr(other, name))
            assert one.taps.dtype == other.taps.dtype == dtype
            assert torch.equal(one.taps[real], other.taps[real])
            assert torch.equal(one.last_hidden[real], other.last_hidden[real])
            rows = one.last_hidden[real][:5]
            assert torch.equal(one.target_logits(rows), other.target_logits(rows))
            assert not one.taps[~real].any()
    stored.close()


@pytest.mark.parametrize(("precision", "fmt"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_training_from_a_store_is_training_online(
    micro: Path, tmp_path: Path, precision: str, fmt: str
) -> None:
    head = {"kind": "eagle3", "head": {"taps": (0, 1, 2), "ttt_steps": 2}, "precision": precision}
    dtype = getattr(torch, precision)
    write(job(micro, tmp_path / "store", dtype=dtype, format=fmt))
    online = settings(micro, **dict(head))
    train(out=tmp_path / "online", **online)
    stored = {
        **online,
        "features": FeaturesConfig(mode="store", path=str(tmp_path / "store"), format=fmt),
    }
    train(out=tmp_path / "stored", **stored)
    logs = [
        [
            {k: line[k] for k in line if k in ("loss", "grad_norm", "tau", "step")}
            for line in read_log(tmp_path / name / LOG_FILE)
        ]
        for name in ("online", "stored")
    ]
    assert len(logs[0]) >= 6
    assert logs[0] == logs[1]
    best = [
        (tmp_path / name / "best" / "model.safetensors").read_bytes()
        for name in ("online", "stored")
    ]
    assert best[0] == best[1]


def test_one_store_serves_several_heads_each_with_its_own_part(micro: Path, exact: Path) -> None:
    for needs in (
        FeatureSpec((0, 1, 2), last_hidden=True, logits=True),
        FeatureSpec(last_hidden=True),
        FeatureSpec((2,)),
    ):
        stored, online, loader = opened(micro, exact, needs, torch.float32)
        packed = loader.step(3)[1]
        one, other = stored.batch(packed), online.batch(packed)
        assert (one.taps is None) == (other.taps is None)
        if needs.taps:
            assert torch.equal(one.taps[one.segments > 0], other.taps[one.segments > 0])
        # What is not needed is not even read.
        read = stored.source.fetch(packed)
        assert set(read) == {f"tap.{tap}" for tap in needs.taps} | (
            {"last_hidden"} if needs.last_hidden else set()
        )
        stored.close()


def test_the_largest_logits_take_the_place_of_the_last_hidden_state(
    micro: Path, tmp_path: Path
) -> None:
    write(job(micro, tmp_path / "store", top_logits=8))
    # a drafter that reads only taps continues the store with what it holds
    for path in (index_path, shard_path):
        path(tmp_path / "store", 0).unlink()
    write(job(micro, tmp_path / "store", DFLASH))
    needs = FeatureSpec((0, 1, 2), last_hidden=True, logits=True)
    stored, online, loader = opened(micro, tmp_path / "store", needs, torch.float32, top_logits=8)
    assert read_plan(tmp_path / "store").identity.things() == ["tap.0", "tap.1", "tap.2", "top"]
    packed = loader.step(0)[0]
    one, other = stored.batch(packed), online.batch(packed)
    real = one.segments > 0
    found = one.target_logits(one.last_hidden[real]).log_softmax(-1)
    true = other.target_logits(other.last_hidden[real]).log_softmax(-1)
    top = true.topk(8).indices
    assert torch.allclose(found.gather(1, top), true.gather(1, top), atol=5e-3)
    stored.close()
    head = {
        "kind": "eagle3",
        "head": {"taps": (0, 1, 2), "ttt_steps": 2},
        "max_steps": 2,
        "eval_every": 0,
    }
    features = FeaturesConfig(
        mode="store", path=str(tmp_path / "store"), format="fp32", top_logits=8
    )
    train(out=tmp_path / "out", **{**settings(micro, **head), "features": features})


def test_logits_cannot_replace_a_hidden_state_that_is_read_itself(
    micro: Path, tmp_path: Path
) -> None:
    features = FeaturesConfig(mode="store", path=str(tmp_path), top_logits=8)
    with pytest.raises(
        UserError,
        match=r"kind 'medusa' reads the target's last hidden state itself.*features\.top_logits=0",
    ):
        train(
            out=tmp_path / "out",
            **{**settings(micro, eval_every=0, parity=False), "features": features},
        )


# Size and room


@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4", "fp8"])
def test_the_estimate_is_within_two_percent_of_what_lies_there(
    micro: Path, tmp_path: Path, fmt: str
) -> None:
    folder = tmp_path / "store"
    manifest = write(job(micro, folder, format=fmt))
    real = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert abs(manifest["estimated_bytes"] - real) / real < 0.02
    assert manifest["bytes"] <= real


def test_a_quota_and_a_full_disk_are_refused_before_the_first_byte(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"would take .* MiB, but features\.quota_gib allows .*int8 is half of bf16"
    ):
        write(job(micro, tmp_path / "store", quota_gib=1e-6))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    with pytest.raises(
        UserError, match=r"still need .* the disk of .* has 1\.00 MiB free.*features\.path"
    ):
        write(job(micro, tmp_path / "store"))
    assert not list((tmp_path / "store").rglob("*.*afetensors"))


def test_a_disk_that_is_full_all_the_same_leaves_what_is_whole(
    micro: Path, tmp_path: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import train.features.store.writer as writer

    plain, calls = writer.write_bytes, []

    def full(path: Path, content: bytes) -> None:
        calls.append(path)
        if len([p for p in calls if p.suffix == ".safetensors"]) == 3:
            raise OSError(28, "No space left on device")
        plain(path, content)

    monkeypatch.setattr(writer, "write_bytes", full)
    made = job(micro, tmp_path / "store", EAGLE3, MEDUSA)
    with pytest.raises(
        UserError,
        match=r"cannot be written: .*No space left.*Free some space.*the same command continues",
    ):
        write(made)
    assert len(list((tmp_path / "store" / "shards").iterdir())) == 2
    assert not Claims(tmp_path / "store").all()
    monkeypatch.setattr(writer, "write_bytes", plain)
    write(made)
    assert same_store(tmp_path / "store", exact)


def same_store(one: Path, other: Path) -> bool:
    """Whether the shards and indices of two stores are equal byte for byte."""
    hashes = [
        {
            path.relative_to(folder): file_sha256(path)
            for kind in ("shards", "index")
            for path in (folder / kind).iterdir()
        }
        for folder in (one, other)
    ]
    return hashes[0] == hashes[1]


# Several writers, and readers meanwhile


def test_several_writers_share_the_work_and_write_each_shard_once(
    micro: Path, tmp_path: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    plain = Writer.write

    def note(self: Writer, shard: int) -> None:
        written.append(shard)
        plain(self, shard)

    monkeypatch.setattr(Writer, "write", note)
    # signals are the main thread's
    monkeypatch.setattr("train.features.store.writer.terminable", lambda: threading.Lock())
    made = job(micro, tmp_path / "store", EAGLE3, MEDUSA)
    threads = [threading.Thread(target=write, args=(made,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    plan = read_plan(tmp_path / "store")
    assert plan.shards > 3
    assert sorted(written) == list(range(plan.shards))
    assert same_store(tmp_path / "store", exact)
    assert (tmp_path / "store" / MANIFEST_FILE).is_file()


def test_a_claim_of_a_dead_writer_is_taken_over_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    import os
    import socket
    import subprocess
    import sys

    claims = Claims(tmp_path)
    assert claims.take("rows-00000")
    assert not claims.take("rows-00000")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = claims.path("rows-00000")
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": gone.pid}))
    assert claims.take("rows-00000")
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    assert not claims.take("rows-00000")
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert claims.take("rows-00000")
    path.write_text("{")  # being written at this moment
    assert not claims.take("rows-00000")


def test_training_reads_rows_while_they_are_being_written(
    micro: Path, exact: Path, tmp_path: Path
) -> None:
    folder = copy(exact, tmp_path / "store")
    plan = read_plan(folder)
    kept = tmp_path / "kept"
    (folder / MANIFEST_FILE).unlink()
    (folder / "index").rename(kept)
    (folder / "index").mkdir()
    needs = FeatureSpec((0, 1, 2), last_hidden=True, logits=True)

    def writer() -> None:
        for shard in range(plan.shards):
            time.sleep(0.05)
            (kept / f"{shard_name(shard)}.json").rename(index_path(folder, shard))

    thread = threading.Thread(target=writer)
    stored, online, loader = opened(micro, folder, needs, torch.float32, wait_seconds=30.0)
    assert not stored.source.fetch.__self__.complete
    thread.start()
    for step in range(loader.steps_per_epoch):
        for packed in loader.step(step):
            one, other = stored.batch(packed, step), online.batch(packed, step)
            assert torch.equal(one.taps[one.segments > 0], other.taps[one.segments > 0])
    thread.join()
    stored.close()


def test_the_first_epoch_reads_the_shards_in_the_order_in_which_they_are_written(
    micro: Path, exact: Path
) -> None:
    stored, _, loader = opened(micro, exact, FeatureSpec((1,)), torch.float32)
    from train.features.store.layout import row_digests

    reader: StoreReader = stored.source.fetch.__self__
    shards = [
        reader.find(digest).shard
        for step in range(len(loader.data) // loader.global_batch)
        for packed in loader.step(step)
        for digest in row_digests(packed)
    ]
    assert shards == sorted(shards)
    assert len(set(shards)) > 2
    stored.close()


def test_a_writer_that_stands_still_is_named(micro: Path, exact: Path, tmp_path: Path) -> None:
    folder = copy(exact, tmp_path / "store")
    last = read_plan(folder).shards - 1
    index_path(folder, last).unlink()
    stored, _, loader = opened(micro, folder, FeatureSpec((1,)), torch.float32, wait_seconds=0.3)
    with pytest.raises(
        UserError,
        match=r"not yet in the feature store .* for 0 s nobody is writing it.*headstart features",
    ):
        read_all(stored, loader)
    claims = Claims(folder)
    claims.path(shard_name(last)).parent.mkdir(exist_ok=True)
    claims.path(shard_name(last)).write_text(json.dumps({"host": "node7", "pid": 4711}))
    with pytest.raises(
        UserError,
        match=rf"no progress \({shard_name(last)}: process 4711 on node7, last sign of life",
    ):
        read_all(stored, loader)
    stored.close()


# Damage


@pytest.mark.parametrize("damage", ["flip", "cut", "lost"])
def test_a_damaged_shard_is_named_and_only_it_is_written_again(
    micro: Path, exact: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(exact, tmp_path / "store")
    path = shard_path(folder, 1)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-7])
    else:
        path.unlink()
    stored, _, loader = opened(micro, folder, FeatureSpec((1,)), torch.float32)
    match = {
        "flip": "rows-00001.* its sha256 is",
        "cut": r"rows-00001.* it has \d+ bytes",
        "lost": "rows-00001.* is not there",
    }
    with pytest.raises(
        UserError, match=match[damage] + ".*`headstart features` with the same settings"
    ):
        read_all(stored, loader)
    stored.close()
    written: list[int] = []
    plain = Writer.write
    monkeypatch.setattr(
        Writer, "write", lambda self, shard: (written.append(shard), plain(self, shard))[1]
    )
    said: list[str] = []
    write_features(job(micro, folder, EAGLE3, MEDUSA, verify=damage == "flip"), say=said.append)
    assert written == [1]
    assert same_store(folder, exact)
    assert any("rows-00001" in line for line in said)


def test_a_store_keeps_the_order_that_it_was_begun_with(
    micro: Path, exact: Path, tmp_path: Path
) -> None:
    """A continuation with another train.seed writes the rows that are missing, and no others."""
    folder = copy(exact, tmp_path / "store")
    (folder / "shards" / "rows-00001.safetensors").unlink()
    write(replace(job(micro, folder, EAGLE3, MEDUSA), seed=7))
    assert same_store(folder, exact)


def test_what_does_not_fit_is_refused_in_words(micro: Path, exact: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no feature store in .*headstart features"):
        opened(micro, tmp_path / "none", FeatureSpec((1,)), torch.float32)
    write(job(micro, tmp_path / "small", MEDUSA))
    with pytest.raises(UserError, match=r"does not fit this training: it lacks tap\.0, tap\.1"):
        opened(micro, tmp_path / "small", FeatureSpec((0, 1)), torch.float32)
    with pytest.raises(
        UserError,
        match=r"another engine\.precision or target\.dtype: float32 of float32, not bfloat16 of float32",
    ):
        opened(micro, exact, FeatureSpec((1,)), torch.bfloat16)
    long = job(micro, exact, EAGLE3, MEDUSA)
    long = replace(long, target=replace(long.target, long_context=True))
    loaded = r"another target\.quantization or target\.long_context: the defaults, not long_context"
    with pytest.raises(UserError, match=rf"cannot be continued: .*{loaded}"):
        write(long)
    with pytest.raises(UserError, match=r"another features\.format: fp32, not int8"):
        opened(micro, exact, FeatureSpec((1,)), torch.float32, format="int8")
    with pytest.raises(
        UserError, match=r"cannot be continued: .*another train\.sequence_length: 64, not 32"
    ):
        write(replace(job(micro, exact, EAGLE3, MEDUSA), sequence_length=32))
    plan = json.loads((exact / "store.json").read_text())
    folder = copy(exact, tmp_path / "other")
    plan["identity"] |= {"revision": "sha256:another", "answers": "0" * 64}
    (folder / "store.json").write_text(json.dumps(plan))
    with pytest.raises(
        UserError,
        match=r"other answers .*0000\.\.\., not .*another revision of the target: sha256:another, not",
    ):
        opened(micro, folder, FeatureSpec((1,)), torch.float32)
    with pytest.raises(
        UserError, match=r"ngram.* has no weights to train, so there is nothing to store"
    ):
        write(job(micro, tmp_path / "x", ("ngram", "ngram", get_kind("ngram").config_class())))
    with pytest.raises(
        UserError,
        match=r"train\.on_policy\.share is above 0.*features\.mode=online, remote, vllm, sglang or group",
    ):
        make_features(
            FeaturesConfig(mode="store"),
            None,
            FeatureSpec((1,)),
            torch.float32,
            answers=micro,
            loader=None,
            steps=1,
            on_policy=True,
        )


def test_features_that_are_no_numbers_are_never_stored(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OnlineFeatures.batch

    def broken(self: OnlineFeatures, packed: Any, step: int = 0) -> Any:
        batch = plain(self, packed, step)
        assert batch.taps is not None
        batch.taps[0, 0, 1, 0] = float("nan")
        return batch

    monkeypatch.setattr(OnlineFeatures, "batch", broken)
    with pytest.raises(UserError, match=r"the target's tap\.1 holds values that are not finite"):
        write(job(micro, tmp_path / "store"))
    assert missing_shards(tmp_path / "store", read_plan(tmp_path / "store")) == list(
        range(read_plan(tmp_path / "store").shards)
    )


def test_fetching_ahead_asks_for_each_batch_once(micro: Path, exact: Path) -> None:
    stored, _, loader = opened(micro, exact, FeatureSpec((1,)), torch.float32)
    assert isinstance(stored, FetchedFeatures)
    asked: list[int] = []
    plain = stored.source.fetch
    stored.source.fetch = lambda packed: (asked.append(1), plain(packed))[1]
    for step in range(8):
        for packed in loader.step(step):
            stored.batch(packed, step)
    assert len(asked) == 16  # 8 steps of two batches, none beyond the last step
    stored.close()


def test_a_store_is_read_with_the_settings_its_target_was_loaded_with(
    micro: Path, tmp_path: Path
) -> None:
    made = job(micro, tmp_path / "store", MEDUSA)
    write(replace(made, target=replace(made.target, long_context=True)))
    stored = json.loads((tmp_path / "store" / "store.json").read_text())
    assert stored["identity"]["loading"] == "long_context=true"
    needs = FeatureSpec((), last_hidden=True)
    opened(micro, tmp_path / "store", needs, torch.float32, loading="long_context=true")
    with pytest.raises(UserError, match=r"another target\.quantization or target\.long_context"):
        opened(micro, tmp_path / "store", needs, torch.float32)


def test_a_store_of_the_default_settings_is_described_as_in_earlier_versions(exact: Path) -> None:
    for name in ("store.json", "manifest.json"):
        assert "loading" not in json.loads((exact / name).read_text())["identity"]
    assert read_plan(exact).identity.loading == ""


def test_a_store_of_the_largest_logits_serves_heads_that_read_taps_alone() -> None:
    stored = Identity("t", "r", "a", 64, "fp32", "int8", 8, (1, 2), True)
    taps = replace(stored, top_logits=0, taps=(2,), last_hidden=False)
    assert not stored.differences(taps)
    (other,) = stored.differences(replace(stored, top_logits=4))
    assert "features.top_logits: 8, not 4" in other
