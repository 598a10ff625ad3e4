"""What README installs resolves on the platforms that it names, from the public index alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
EXTRAS = [word for name in ("serve", "tracking", "trackio", "mlflow") for word in ("--extra", name)]
PYTHONS = ("3.11", "3.12", "3.13")
NOT_ON_MACOS = ("triton", "deepspeed")
LOCAL_SETTINGS = ("PIP_", "UV_")
"""Variables that could add an index or a folder of wheels which other machines do not have."""


@pytest.mark.parametrize(
    ("platform", "python"),
    [
        # each platform and each Python once, the other pairs in `make test-all`
        pytest.param(platform, python, marks=[] if at == by else pytest.mark.slow)
        for at, platform in enumerate(PLATFORMS)
        for by, python in enumerate(PYTHONS)
    ],
)
def test_the_install_resolves_from_the_public_index(
    platform: str, python: str, tmp_path: Path
) -> None:
    """uv reads metadata only: nothing large is downloaded, and pip's configuration is not read."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LOCAL_SETTINGS)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet"),
            *("pyproject.toml", "--extra", "dev", "-c", "constraints.txt", *EXTRAS),
            *("--python-platform", platform, "--python-version", python),
            *("--output-file", str(tmp_path / "resolved.txt")),
        ],
        cwd=REPOSITORY,
        env={**environment, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode and "error sending request" in done.stderr:
        pytest.skip("the public index cannot be reached")
    assert done.returncode == 0, done.stderr
    resolved = (tmp_path / "resolved.txt").read_text(encoding="utf-8").splitlines()
    for pin in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").split():
        left_out = "apple" in platform and pin.startswith(NOT_ON_MACOS)
        assert left_out or pin in resolved
    names = {line.partition("==")[0] for line in resolved if "==" in line}
    assert "apple" not in platform or not names & {*NOT_ON_MACOS, "nvidia-nccl-cu12"}
