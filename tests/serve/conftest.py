"""The environment with vLLM, and a real server of it on loopback. Without one, everything here is
skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.evidence.vllm_server import VllmServer

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
    running = VllmServer(engine_python, tiny_target, tmp_path_factory.mktemp("server") / "log.txt")
    running.start()
    yield running
    running.kill()
