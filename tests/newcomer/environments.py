"""Copies of the repository, its wheel, and virtual environments that know nothing of it; all
without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.newcomer.pages import ROOT

SOURCES = ("headstart", "heads", "inference", "train", "scripts", "conf", "assets")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
OFFLINE = ("--quiet", "--no-config", "--offline")
SHARED = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
"""Where the packages are that this Python has."""


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, in an environment without this repository; its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def copy_of_the_repository(folder: Path, *files: str) -> Path:
    """What the packages are built from, and further files, in an empty folder."""
    for source in SOURCES:
        shutil.copytree(
            ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in (*FILES, *files):
        shutil.copy(ROOT / file, folder / file)
    return folder


def wheel_of(source: Path, out: Path) -> Path:
    """The wheel of the sources in a folder, which the build writes to as well."""
    uv = (sys.executable, "-m", "uv", "build", *OFFLINE)
    call(*uv, "--wheel", "--no-build-isolation", "-o", out, source, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def environment_with(folder: Path, *packages: Path, shared: tuple[str, ...] = ()) -> Path:
    """A virtual environment that holds these packages (wheels or source folders) alone, and sees
    those in the folders `shared`; its folder of programs."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    # a path file's folders are searched, their own path files (an editable install) are not read
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    uv = (sys.executable, "-m", "uv", "pip", "install", *OFFLINE, "--no-deps")
    for package in packages:
        call(*uv, "--no-build-isolation", "--python", python, package, cwd=folder.parent)
    return python.parent
