"""`headstart features`: a store from the command line, repeated, killed and continued, for several
heads; and a server."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.manifest import file_sha256, read_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.cli import main
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.stages.features import all_heads, require_no_writers
from tests import forked
from tests.train.features import vllm_stub
from tests.train.launch import environment
from tests.train.micro_run import prepare
from train.features.store.claims import Claims


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("micro"))


def command(micro: Path, root: Path, *more: str) -> list[str]:
    """A store of exact features of the micro target, in many small shards."""
    return [
        "features",
        "target=local",
        f"target.path={micro / 'target'}",
        "target.device=cpu",
        "target.dtype=float32",
        f"run.root={root}",
        "run.name=r",
        f"run.answers={micro / 'answers'}",
        "head=eagle3",
        "head.taps=[0,1,2]",
        "engine=torch",
        "engine.precision=float32",
        "features.format=fp32",
        "features.shard_mib=0.02",
        "train.sequence_length=64",
        "train.micro_batch=2",
        f"features.path={root / 'store'}",
        "run.threads=1",
        *more,
    ]


def shards(folder: Path) -> dict[str, str]:
    """Hashes of what is stored."""
    return {
        path.name: file_sha256(path)
        for kind in ("shards", "index")
        for path in (folder / kind).iterdir()
    }


def test_a_store_is_written_once_and_says_what_it_weighs(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(micro, tmp_path)) == 0
    said = capsys.readouterr().out
    manifest = read_manifest(tmp_path / "store", "features")
    assert manifest["identity"]["taps"] == [0, 1, 2]
    assert manifest["provenance"]["command"]
    assert re.search(r"bytes per token +fp32 +bf16 +fp8 +int8 +int4", said)
    assert re.search(
        r"tokens in \d+ rows x .* bytes \(fp32: tap\.0, tap\.1, tap\.2, last_hidden\) = ", said
    )
    assert "Train on it with features=store" in said
    before = shards(tmp_path / "store")
    assert main(command(micro, tmp_path)) == 0
    assert "is written:" not in capsys.readouterr().out
    assert shards(tmp_path / "store") == before
    assert main(command(micro, tmp_path, "train.sequence_length=32")) == 2
    assert (
        "cannot be continued: it is for another train.sequence_length: 64, not 32"
        in capsys.readouterr().err
    )


def test_a_store_for_several_heads_holds_what_any_of_them_reads(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(micro, tmp_path, "features.heads=[medusa]")) == 0
    said = capsys.readouterr().out
    assert re.search(r"^eagle3 .*\n^medusa .*\n^all of them ", said, re.M)


def test_further_heads_have_none_of_the_settings_of_the_first() -> None:
    given = ["experiment=qwen3_8b_eagle3", "head.decay=0.5", "features.heads=[medusa,dflash]"]
    found = all_heads(load_settings(STAGES["features"], given))
    assert [(name, kind) for name, kind, _ in found] == [
        ("eagle3", "eagle3"),
        ("medusa", "medusa"),
        ("dflash", "dflash"),
    ]
    assert (found[0][2].ttt_steps, found[0][2].decay) == (7, 0.5)
    assert found[1][2] == load_settings(STAGES["train"], ["head=medusa"]).head.config


def test_a_killed_writer_is_continued_and_nothing_is_written_twice(
    micro: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assert main(command(micro, whole)) == 0
    killed = tmp_path / "killed"
    slow = (
        "import sys, time; from train.features.store.writer import Writer; plain = Writer.write\n"
        "def write(self, shard):\n    time.sleep(0.2)\n    plain(self, shard)\n"
        "Writer.write = write\nfrom scripts.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    process = forked.start("-c", slow, *command(micro, killed), env=environment())
    end = time.monotonic() + 300
    while len(list((killed / "store").glob("index/*.json"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (killed / "store").glob("index/*.json")}
    assert len(kept) < len(shards(whole / "store")) // 2
    assert main(command(micro, killed)) == 0
    assert shards(killed / "store") == shards(whole / "store")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not list((killed / "store").rglob("*.partial"))
    assert not list((killed / "store" / "claims").iterdir())


def test_a_server_says_where_it_is_and_ends_when_it_is_told(micro: Path, tmp_path: Path) -> None:
    process = forked.start(
        "scripts.cli",
        *command(micro, tmp_path, "features.serve=true", "features.port=0"),
        env=environment(),
    )
    line = process.stdout.readline()
    found = re.search(r"at http://127\.0\.0\.1:(\d+);", line)
    assert found, line
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", "/identity")
    said = json.loads(connection.getresponse().read())
    assert said["precision"] == "float32 of float32"
    assert said["target"]["hidden_size"] > 0
    connection.close()
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "stopped after 0 requests" in rest


def test_a_store_that_others_write_to_is_not_deleted(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.take("rows-00000")
    with pytest.raises(UserError, match=f"while others write to it: process {os.getpid()} on"):
        require_no_writers(tmp_path)
    claims.drop("rows-00000")
    require_no_writers(tmp_path)


def test_a_store_from_vllm_takes_a_server_and_names_the_command_that_starts_one(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = tmp_path / "states"
    words = command(micro, tmp_path, "features.source=vllm", f"features.states={states}")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"vllm serve {micro / 'target'} --dtype float32 --max-model-len 65 " in said
    assert '{"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}' in said
    target = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))
    with vllm_stub.serving(target, states) as stub:
        words += [f"features.servers=[{stub.address}]", "features.trainer_target=parts"]
        assert main(words) == 0
    assert "Train on it with features=store features.source=vllm" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "store", "features")
    assert manifest["identity"]["source"] == "vllm"
    assert not any(states.iterdir())


def test_a_store_from_sglang_takes_a_server_and_heads_that_read_the_last_state_alone(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(micro, tmp_path, "features.source=sglang")
    assert main(words) == 2
    assert "SGLang servers return only the target's last hidden state" in capsys.readouterr().err
    words = [word for word in words if not word.startswith("head")] + ["head=medusa"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"sglang.launch_server --model-path {micro / 'target'} --dtype float32 " in said
    target = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))
    with vllm_stub.serving(target, tmp_path / "unused", longest=71) as stub:
        words += [f"features.servers=[{stub.address}]", "features.trainer_target=parts"]
        assert main(words) == 0
    assert "Train on it with features=store features.source=sglang" in capsys.readouterr().out
    assert read_manifest(tmp_path / "store", "features")["identity"]["source"] == "sglang"
