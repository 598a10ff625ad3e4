"""Answers from a real vLLM server: the tokens that it sampled, whatever happens to it meanwhile."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.manifest import read_manifest
from inference.target.loading import TargetConfig
from scripts.evidence.vllm_server import VllmServer
from train.data.config import DataConfig
from train.generate.config import GenerateConfig
from train.generate.run import generate
from train.generate.sampling import SamplingConfig

pytestmark = [pytest.mark.serve, pytest.mark.slow]

NEW = 24
ROWS = 48
WRITE_OFTEN = GenerateConfig(flush_rows=4, shard_rows=16)


@pytest.fixture(scope="module")
def data(tiny_target: Path) -> DataConfig:
    return DataConfig(
        str(tiny_target.parent / "prompts" / "explain.jsonl"), id_column="id", limit=ROWS
    )


@pytest.fixture(scope="module")
def own(
    tiny_target: Path, data: DataConfig, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """What our own decoder answers."""
    out = tmp_path_factory.mktemp("own")
    decode = DecodeConfig(shape="none", max_new_tokens=NEW, batch_size=8)
    generate(WRITE_OFTEN, data, decode, TargetConfig(str(tiny_target)), out)
    return answers(out)


def answers(out: Path) -> dict[str, list[int]]:
    """id -> tokens of a finished folder; every row once."""
    shards = read_manifest(out, "generate")["shards"]
    rows = [row for shard in shards for row in pq.read_table(out / shard["file"]).to_pylist()]
    found = {row["id"]: row["tokens"] for row in rows}
    assert len(found) == len(rows) == ROWS
    return found


def sampling(server: VllmServer, **changes: object) -> SamplingConfig:
    given = {"retries": 8, "backoff": 0.2, "timeout": 120.0, "concurrency": 8, **changes}
    return SamplingConfig(server=server.address, shape="none", max_new_tokens=NEW, **given)  # type: ignore[arg-type]


def ask(server: VllmServer, data: DataConfig, target: Path, out: Path, **changes: object) -> None:
    """`generate` with that server."""
    generate(WRITE_OFTEN, data, sampling(server, **changes), TargetConfig(str(target)), out)


def test_the_servers_tokens_are_the_targets(
    server: VllmServer,
    data: DataConfig,
    own: dict[str, list[int]],
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    ask(server, data, tiny_target, tmp_path / "out")
    assert answers(tmp_path / "out") == own


def test_a_server_that_hangs_is_asked_again(
    server: VllmServer,
    data: DataConfig,
    own: dict[str, list[int]],
    tiny_target: Path,
    tmp_path: Path,
    after: Any,
) -> None:
    def freeze() -> None:
        server.send(signal.SIGSTOP)
        threading.Timer(8.0, server.send, [signal.SIGCONT]).start()

    after(8, freeze)
    ask(server, data, tiny_target, tmp_path / "out", timeout=4.0, concurrency=4)
    assert answers(tmp_path / "out") == own


def test_a_server_that_comes_back_is_waited_for(
    server: VllmServer,
    data: DataConfig,
    own: dict[str, list[int]],
    tiny_target: Path,
    tmp_path: Path,
    after: Any,
) -> None:
    def replace() -> None:
        server.kill()
        server.launch()

    after(8, replace)
    # a busy machine starts vLLM slowly
    ask(server, data, tiny_target, tmp_path / "out", retries=16, concurrency=4)
    assert answers(tmp_path / "out") == own


def test_what_a_dead_server_answered_is_kept_and_the_same_command_continues(
    server: VllmServer,
    data: DataConfig,
    own: dict[str, list[int]],
    tiny_target: Path,
    tmp_path: Path,
    after: Any,
) -> None:
    out = tmp_path / "out"
    if server.process is None or server.process.poll() is not None:
        server.start()  # the test before this one may have lost it
    after(12, server.kill)
    with pytest.raises(UserError, match="the same command continues"):
        ask(server, data, tiny_target, out, retries=1, concurrency=4)
    kept = list((out / "parts").glob("*"))
    assert kept, "what was answered before the end is on disk"
    with pytest.raises(UserError, match=r"does not answer: .*Is the server up\?"):
        ask(server, data, tiny_target, out, retries=0)
    server.start()
    ask(server, data, tiny_target, out)
    assert answers(out) == own
