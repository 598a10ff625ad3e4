"""Shared settings of all tests: few threads, no network, no outputs outside the temporary
folder."""

from __future__ import annotations

import logging
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Two cores are shared by the test workers: one thread each is faster than two workers fighting for
# both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU kernels run under Triton's interpreter. It must be asked for before anything imports
# triton, which torch's compiler does while tests are collected.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

THREADS = int(os.environ["OMP_NUM_THREADS"])
REPOSITORY = Path(__file__).resolve().parents[1]
ROTATED_PARTS = 4
"""One case in so many of a `rotated` test runs in `make test`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """--slow-part: of the slow tests one part in so many, which CI changes from commit to commit."""
    parser.addoption(
        "--slow-part", metavar="K/N", help="run part K (from 0) of N of the slow tests"
    )


def in_part(name: str, part: str) -> bool:
    """Whether a test belongs to part "K/N"; a test stays in its part."""
    number, parts = map(int, part.split("/"))
    return zlib.crc32(name.encode()) % parts == number


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of `rotated` tests as slow, but for the first part of them. Skip `gpu` tests
    where there is no GPU (torch is imported only when one is asked for), and leave out the slow
    tests of other parts. Slow tests come first, so that none of them is what the others wait
    for."""
    for item in items:
        if item.get_closest_marker("rotated") and not in_part(item.nodeid, f"0/{ROTATED_PARTS}"):
            item.add_marker(pytest.mark.slow)
    part = config.getoption("--slow-part")
    if part:
        left = [i for i in items if i.get_closest_marker("slow") and not in_part(i.nodeid, part)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)  # stable: a file's tests stay together
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BEFORE = {name: os.environ.get(name) for name in LAUNCHER}


@pytest.fixture(autouse=True)
def launcher_variables() -> Iterator[None]:
    """Libraries that train in this process (fixtures of whole modules included) may leave a
    launcher's variables behind; processes that later tests start would take themselves for a part
    of a launch.
    """
    restore_launcher_variables()
    yield
    restore_launcher_variables()


def restore_launcher_variables() -> None:
    """Bring back what stood when the tests were collected."""
    for name, value in BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """A command that runs in this process may configure logging (Hydra's own settings do); what it
    leaves would write the records of later tests to its closed streams."""
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in before]:
        if not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
            handler.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A command that runs in this process may set torch's threads (`run.threads`, evidence tools).
    With two workers on two cores, later tests of small products would wait for each other: up to
    35 times as long."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


@pytest.fixture
def repository() -> Path:
    """The root of this repository."""
    return REPOSITORY


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, so that relative outputs land there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose `headstart` is this repository's, also where nothing is installed."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "headstart"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m scripts.cli "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
    }
