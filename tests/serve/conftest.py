"""The environment with vLLM, and a real server of it on loopback. Without one, everything here is
skipped."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.vllm_server import VllmServer
from tests.train.micro_run import prepare
from train.generate.backends.servers import ServerPool

VARIABLE = "HEADSTART_SERVE_PYTHON"


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The Python that has vLLM."""
    found = os.environ.get(VARIABLE, "")
    if not found:
        pytest.skip(f"needs vLLM in an environment of its own: make test-serve, or {VARIABLE}")
    return found


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """The embedded target."""
    return Path(__file__).resolve().parents[2] / "assets" / "tiny-target"


@pytest.fixture(scope="module")
def server(
    engine_python: str, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """vLLM serving the embedded target; started again by whoever stopped it."""
    served = VllmServer(engine_python, tiny_target, tmp_path_factory.mktemp("server") / "log.txt")
    with served.running():
        yield served


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro target with heads of a size that vLLM takes on a CPU, and its answers."""
    return prepare(tmp_path_factory.mktemp("micro"), head_dim=32)


@pytest.fixture(scope="module")
def target(micro: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """after(n, act): act once, when n answers have come."""

    def arrange(count: int, act: Callable[[], None]) -> None:
        inner, lock, come = ServerPool._answer, threading.Lock(), [0]

        def answer(self: ServerPool, *arguments: Any) -> Any:
            found = inner(self, *arguments)
            with lock:
                come[0] += 1
                if come[0] == count:
                    act()
            return found

        monkeypatch.setattr(ServerPool, "_answer", answer)

    return arrange
