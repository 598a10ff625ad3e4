"""Real vLLM servers that are killed, come back with another model, or whose folder of states is full,
while a store, a training or responses with their states are made from them: the error says why in one
sentence, nothing is lost, and the same command ends with the same bytes as in peace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.manifest import read_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.vllm_server import VllmServer
from tests.chaos.ground import UnsurvivedError, figures, small_disk, trained_steps
from tests.serve.states import HEAD, LAYERS, features_of, states_server
from tests.train.features.test_store import job
from tests.train.micro_run import settings
from tests.waiting import until
from train.data.config import DataConfig
from train.data.states import STATES
from train.features.store.writer import write_features
from train.generate.config import GenerateConfig
from train.generate.run import generate
from train.generate.sampling import SamplingConfig
from train.run import train

pytestmark = [pytest.mark.serve, pytest.mark.slow]

DISK_KIB = 512
STEPS, ROWS, CLIENTS = 24, 24, 4
LONG = 900.0
"""Seconds that something may take while a server starts on a busy machine."""
FULL = r"Its folder has 0\.0 MiB free"


@pytest.fixture(scope="module")
def servers(
    engine_python: str, micro: Path, target: TargetModel
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two servers with one folder. Each computes one request at a time, so that its numbers do not
    depend on what is asked for together."""
    (micro / "states").mkdir()
    one, two = (states_server(engine_python, micro, target.info, name, 1) for name in "ab")
    try:
        with ThreadPoolExecutor(2) as both:
            list(both.map(VllmServer.start, (one, two)))
        yield one, two
    finally:
        one.kill()
        two.kill()


@pytest.fixture
def server(servers: tuple[VllmServer, VllmServer], micro: Path) -> VllmServer:
    """The first one, started again if a test before has lost it."""
    if model_of(servers[0]) != micro / "target" or not runs(servers[0]):
        restart(servers[0], micro / "target")
    return servers[0]


@pytest.fixture(scope="module")
def another(micro: Path) -> Path:
    """Another model with the target's shape and tokenizer."""
    folder = micro / "another"
    folder.mkdir()
    for file in (micro / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def disk(micro: Path) -> Iterator[Path]:
    """The folder of states on a small disk of its own."""
    try:
        with small_disk(micro / "states", DISK_KIB) as found:
            yield found
    except UnsurvivedError as error:
        pytest.skip(str(error))


def runs(server: VllmServer) -> bool:
    return server.process is not None and server.process.poll() is None


def model_of(server: VllmServer) -> Path:
    return Path(server.command[server.command.index("--model") + 1])


def restart(server: VllmServer, model: Path, wait: bool = True) -> None:
    """Kill a server and start it at its port with a model."""
    server.kill()
    server.command[server.command.index("--model") + 1] = str(model)
    (server.start if wait else server.launch)()


@contextmanager
def meanwhile(*acts: Callable[[], object]) -> Iterator[None]:
    """Do these one after the other beside a block; what goes wrong in them is raised at its end."""
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(lambda: [act() for act in acts])
        yield
        doing.result(LONG)


@contextmanager
def filled(
    disk: Path, begin: Callable[[], bool] = lambda: True, end: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """A block in which a disk is full, by somebody else's file, from when `begin` to when `end` is
    true."""
    over, foreign = threading.Event(), disk / "foreign"

    def fill() -> None:
        while not begin() and not over.is_set():
            time.sleep(0.002)
        with foreign.open("wb", buffering=0) as file:
            while not over.is_set() and not end():
                with suppress(OSError):
                    file.write(bytes(4096))
        foreign.unlink()

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        if begin():
            until(lambda: foreign.is_file() and foreign.stat().st_size > (DISK_KIB - 8) << 10)
        yield
    finally:
        over.set()
        thread.join()


def left_in(folder: Path) -> int:
    """Files of states in a folder. A request that is given up at the end of a run may leave its file
    after that end; the next reader deletes it once it is an hour old."""
    return len([*folder.glob("*.safetensors")])


# Stores


def written(store: Path, micro: Path, server: VllmServer, **more: Any) -> None:
    """Write a store of features, a document at a time."""
    given: dict[str, Any] = {"path": str(store), "shard_mib": 0.05, "concurrency": 1, **more}
    config = replace(features_of(server, states=micro / "states", **given), mode="store")
    head = ("eagle3", "eagle3", get_kind("eagle3").config_class(**HEAD))
    write_features(replace(job(micro, store, head), features=replace(config, source="vllm")))


def shards_of(store: Path) -> dict[str, bytes]:
    """The content of the shards by their names."""
    return {path.name: path.read_bytes() for path in sorted((store / "shards").glob("*"))}


@pytest.fixture(scope="module")
def calm_store(
    servers: tuple[VllmServer, VllmServer], micro: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The shards of a store that was written in peace."""
    store = tmp_path_factory.mktemp("calm") / "store"
    written(store, micro, servers[0])
    found = shards_of(store)
    assert len(found) > 3
    return found


def test_a_full_folder_of_states_ends_a_store_with_its_reason_and_nothing_is_lost(
    calm_store: dict[str, bytes], server: VllmServer, micro: Path, disk: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    no_room = r"has 0\.0 MiB free, but the documents .*Make room, name another folder"
    with filled(disk), pytest.raises(UserError, match=no_room):
        written(store, micro, server)
    assert not shards_of(store)
    given_up = rf"no features after 3 attempts \(.*{FULL}.*continues from its last saved state"
    with filled(disk, lambda: bool(shards_of(store))), pytest.raises(UserError, match=given_up):
        written(store, micro, server, retries=2)
    kept = {path: path.stat().st_mtime_ns for path in (store / "shards").iterdir()}
    assert 0 < len(kept) < len(calm_store)
    written(store, micro, server)
    assert shards_of(store) == calm_store
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert left_in(disk) <= 1


def test_a_store_goes_on_where_room_is_made_in_time(
    calm_store: dict[str, bytes],
    server: VllmServer,
    micro: Path,
    disk: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = tmp_path / "store"
    with filled(disk, lambda: bool(shards_of(store)), lambda: "(attempt 3)" in caplog.text):
        written(store, micro, server)
    assert "Its folder has 0.0 MiB free" in caplog.text
    assert shards_of(store) == calm_store
    assert not any(disk.iterdir())


# Trainings


def trained(out: Path, micro: Path, servers: Sequence[VllmServer]) -> Path:
    """Train from servers' states; returns `out`."""
    run: dict[str, Any] = {
        "kind": "eagle3",
        "head": HEAD,
        "max_steps": STEPS,
        "eval_every": 0,
        "parity": False,
    }
    config = features_of(*servers, states=micro / "states", concurrency=1)
    train(out=out, **{**settings(micro, **run), "features": config})
    return out


def steps_of(out: Path) -> int:
    """Steps in the log so far."""
    with suppress(OSError, ValueError):  # a line is being written
        return len(trained_steps(out))
    return 0


def test_a_training_goes_on_without_a_killed_server_and_not_with_another_model(
    servers: tuple[VllmServer, VllmServer],
    server: VllmServer,
    micro: Path,
    another: Path,
    tmp_path: Path,
) -> None:
    second, out = servers[1], tmp_path / "struck"
    if not runs(second):
        second.start()
    calm = trained(tmp_path / "calm", micro, servers)
    alone = []

    def strike() -> None:
        until(lambda: steps_of(out) >= 3, LONG)
        second.kill()
        dead = steps_of(out)
        until(lambda: steps_of(out) >= dead + 5, LONG)
        alone.append(steps_of(out) - dead)
        restart(server, another, wait=False)

    unfit = (
        "does not fit this training: it (gives a token another log-prob|leaves states that differ)"
    )
    with meanwhile(strike), pytest.raises(UserError, match=unfit):
        trained(out, micro, servers)
    assert alone[0] >= 5
    saved = {path: path.stat().st_mtime_ns for path in (out / "checkpoints").iterdir()}
    assert saved and steps_of(out) < STEPS
    with pytest.raises(UserError, match=unfit):
        trained(out, micro, servers)
    server.kill()
    with pytest.raises(UserError, match=r"no vLLM server answers \(.*Connection refused"):
        trained(out, micro, servers)
    assert {path: path.stat().st_mtime_ns for path in (out / "checkpoints").iterdir()} == saved
    restart(server, micro / "target")
    trained(out, micro, servers)
    assert trained_steps(out) == trained_steps(calm)
    assert figures(out) == figures(calm)
    weights = [(each / "best" / "model.safetensors").read_bytes() for each in (out, calm)]
    assert weights[0] == weights[1]
    assert left_in(micro / "states") <= len(servers)


# Responses and states in one pass


def answered(server: VllmServer, micro: Path, out: Path, **more: Any) -> Path:
    """Generate responses and keep their states; returns `out`."""
    rows = [{"id": f"p{i}", "prompt": f"Add {i} and {i * i}."} for i in range(ROWS)]
    prompts = micro / "asked.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given: dict[str, Any] = {"backoff": 0.1, "concurrency": CLIENTS, "timeout": 120.0, **more}
    sampling = SamplingConfig(
        server=server.address,
        shape="none",
        max_new_tokens=16,
        states=str(micro / "states"),
        state_layers=LAYERS,
        **given,
    )
    data = DataConfig(str(prompts), id_column="id")
    target = TargetConfig(str(micro / "target"), device="cpu")
    generate(GenerateConfig(flush_rows=4), data, sampling, target, out)
    return out


def kept_in(out: Path) -> tuple[dict[str, list[int]], dict[str, bytes]]:
    """Tokens by id, and the content of the files of states by their names."""
    manifest = read_manifest(out, "generate")
    rows = [
        row
        for entry in manifest["shards"]
        for row in pq.read_table(out / entry["file"]).to_pylist()
    ]
    assert manifest["states"]["missing"] == 0 and len(rows) == ROWS
    states = {path.name: path.read_bytes() for path in (out / STATES).iterdir()}
    return {row["id"]: row["tokens"] for row in rows}, states


@pytest.fixture(scope="module")
def calm_answers(
    servers: tuple[VllmServer, VllmServer], micro: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[int]], dict[str, bytes]]:
    """What is generated in peace."""
    if model_of(servers[0]) != micro / "target" or not runs(servers[0]):
        restart(servers[0], micro / "target")
    return kept_in(answered(servers[0], micro, tmp_path_factory.mktemp("calm") / "generate"))


def test_responses_go_on_after_their_folder_of_states_was_full(
    calm_answers: tuple[dict[str, list[int]], dict[str, bytes]],
    server: VllmServer,
    micro: Path,
    disk: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "generate"

    def some() -> bool:
        return any((out / "parts").glob("*"))

    with filled(disk), pytest.raises(UserError, match=r"sampling\.states '.* has 0\.0 MiB free"):
        answered(server, micro, out)
    with filled(disk, some), pytest.raises(UserError, match=rf"{FULL}.*the same command continues"):
        answered(server, micro, out, retries=1)
    assert some()
    assert kept_in(answered(server, micro, out)) == calm_answers
    assert left_in(disk) <= CLIENTS


def test_responses_go_on_after_their_server_was_killed(
    calm_answers: tuple[dict[str, list[int]], dict[str, bytes]],
    server: VllmServer,
    micro: Path,
    tmp_path: Path,
    after: Callable[[int, Callable[[], None]], None],
) -> None:
    out, before = tmp_path / "generate", {*(micro / "states").iterdir()}
    after(ROWS // 2, server.kill)
    with pytest.raises(UserError, match="the same command continues"):
        answered(server, micro, out, retries=1)
    assert any((out / "parts").glob("*"))
    with pytest.raises(UserError, match=r"does not answer: .*Is the server up\?"):
        answered(server, micro, out, retries=1)
    server.start()
    assert kept_in(answered(server, micro, out)) == calm_answers
    assert {*(micro / "states").iterdir()} <= before


def test_responses_end_when_their_server_comes_back_with_another_model(
    calm_answers: tuple[dict[str, list[int]], dict[str, bytes]],
    server: VllmServer,
    micro: Path,
    another: Path,
    tmp_path: Path,
    after: Callable[[int, Callable[[], None]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "generate"
    after(ROWS // 2, lambda: restart(server, another, wait=False))
    came_back = rf"another model: 'tiny' from '{another}'; before: 'tiny' from '{micro}/target'"
    with pytest.raises(UserError, match=rf"{came_back}.*the same command continues"):
        answered(server, micro, out, retries=60)
    assert any((out / "parts").glob("*")) and not caplog.text.count("but the target is")
    with pytest.raises(UserError, match="states give a token another log-probability"):
        answered(server, micro, out)
    assert caplog.text.count(f"serves 'tiny' from '{another}', but the target is") == 1
    restart(server, micro / "target")
    assert kept_in(answered(server, micro, out)) == calm_answers
