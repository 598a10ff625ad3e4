"""`import headstart`: light, and undisturbed by a program's own modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headstart
from headstart import siblings

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("heads", "inference", "train", "scripts", "conf")


def program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`, whose modules come first on the import path."""
    (folder / "program.py").write_text(text)
    return python(folder, "-W", "ignore", "program.py")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_public_name_is_there_and_the_import_is_light_beside_modules_with_our_names(
    tmp_path: Path,
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else')\n")
    done = program(
        "import sys, headstart\n"
        "heavy = {'torch', 'transformers', 'hydra', 'heads', 'train'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(headstart.__all__) <= set(dir(headstart))\n"
        "for name in headstart.__all__:\n"
        "    assert getattr(headstart, name) is getattr(headstart, name), name\n"
        "assert callable(headstart.train) and callable(headstart.measure)\n"
        "print(headstart.DecodeConfig(depth=2).depth, headstart.train.__module__)\n",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "2 headstart.training\n"), done.stderr
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = headstart.tarin


def test_a_program_that_has_imported_its_own_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine = True\n")
    text = (
        "import train, headstart\n"
        "print(headstart.DecodeConfig(depth=2).depth, train.mine)\n"  # decoding needs no `train`
        "headstart.train\n"
    )
    done = program(text, tmp_path)
    assert done.stdout == "2 True\n"
    assert f"a module 'train' is imported already, from {tmp_path / 'train.py'}" in done.stderr
    assert "Rename yours" in done.stderr


def test_the_command_line_runs_as_a_module_from_such_a_folder(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text("raise SystemExit('somebody else')\n")
    done = python(tmp_path, "-m", "headstart", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headstart: there is no stage 'nonsense'")


def test_an_incomplete_installation_is_named() -> None:
    with pytest.raises(ImportError, match=r"incomplete: '.*no_such_package' is missing"):
        siblings.load_siblings(["no_such_package"])


def test_every_package_says_that_it_is_typed() -> None:
    for name in ("headstart", *NAMES[:-1]):
        assert (REPOSITORY / name / "py.typed").is_file(), name
