"""The wheel: what an installed Headstart does far from any clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = ("headstart", "heads", "inference", "train", "scripts", "conf", "assets")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
OFFLINE = ("--quiet", "--no-config", "--offline")


def call(*command: str | Path, cwd: Path, **more: str) -> str:
    """Run a command that must succeed, in an environment without this repository; its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **more},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders in the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in FILES:
        shutil.copy(REPOSITORY / name, source / name)
    uv = (sys.executable, "-m", "uv", "build", *OFFLINE)
    call(*uv, "--wheel", "--no-build-isolation", "-o", out, source, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def environment_with(wheel: Path, folder: Path, *shared: str) -> Path:
    """A virtual environment that holds the wheel alone, and sees the packages in `shared`; its
    folder of programs."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    uv = (sys.executable, "-m", "uv", "pip", "install", *OFFLINE, "--no-deps")
    call(*uv, "--python", python, wheel, cwd=folder.parent)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # a path file's folders are searched, their own path files (an editable install) are not read
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    return python.parent


USE = """
import headstart, sys
assert "torch" not in sys.modules
assert headstart.__file__.startswith(sys.prefix), headstart.__file__
trained = headstart.train("medusa", run="python", debug="fast", train={"max_steps": 2})
engine = headstart.Engine.load(sys.argv[1], trained.checkpoint)
(answer,) = engine.generate("What is a list?", max_new_tokens=8)
assert len(answer.completion.tokens) == 8
report = headstart.measure(engine, trained.checkpoint, ["One?", "Two?", "Three?"], max_new_tokens=8)
assert [entry.kind for entry in report.drafters] == ["medusa"]
assert report.drafters[0].lossless.mismatches == 0
"""


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Also in a folder with modules of our packages' names."""
    shared = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    programs = environment_with(wheel, tmp_path / "environment", *shared)
    home = tmp_path / "project"
    home.mkdir()
    (home / "train.py").write_text(USE)
    for name in ("heads.py", "inference.py", "conf.py"):
        (home / name).write_text("raise SystemExit('somebody else')\n")
    (home / "scripts").mkdir()
    (home / "scripts" / "__init__.py").write_text("raise SystemExit('somebody else')\n")
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    call(programs / "headstart", "loop", "debug=fast", "run.name=wheel", cwd=home, **quiet)
    report = json.loads((home / "outputs" / "wheel" / "report.json").read_text())
    target = Path(report["target"]["id"])
    assert (home / target).resolve().is_relative_to(tmp_path / "environment")
    assert (home / "outputs" / "wheel" / "report.html").is_file()
    record = json.loads((home / "outputs" / "wheel" / "measure" / "run.json").read_text())
    assert record["sessions"][0]["git"] == {}
    python = programs / "python"
    assert "First steps" in call(python, "-m", "headstart", "--help", cwd=home)
    call(python, "train.py", home / target, cwd=home, **quiet)


@pytest.mark.slow
def test_its_types_reach_programs(wheel: Path, tmp_path: Path) -> None:
    programs = environment_with(wheel, tmp_path / "environment")
    (tmp_path / "use.py").write_text(
        "import headstart\n"
        'reveal_type(headstart.train("medusa").tau)\n'
        'reveal_type(headstart.Engine.load("x").generate("y")[0].text)\n'
        'headstart.measure("x", "y", 3)\n'
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", os.devnull, "--cache-dir", os.devnull),
            *("--ignore-missing-imports", "--python-executable", programs / "python", "use.py"),
        ],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert 'Revealed type is "float | None"' in done.stdout, done.stdout + done.stderr
    assert 'Revealed type is "str"' in done.stdout
    assert 'Argument 3 to "measure" has incompatible type "int"' in done.stdout
