"""The wheel: what an installed Headstart does far from any clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.newcomer.environments import SHARED, environment_with
from tests.newcomer.reader import Reader

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
    programs = environment_with(tmp_path / "environment", wheel, shared=SHARED)
    reader = Reader(tmp_path / "project", programs)
    home = reader.home
    home.mkdir()
    (home / "train.py").write_text(USE)
    for name in ("heads.py", "inference.py", "conf.py"):
        (home / name).write_text("raise SystemExit('somebody else')\n")
    (home / "scripts").mkdir()
    (home / "scripts" / "__init__.py").write_text("raise SystemExit('somebody else')\n")
    reader.run("headstart loop debug=fast run.name=wheel")
    report = reader.json("outputs/wheel/report.json")
    target = Path(report["target"]["id"])
    assert (home / target).resolve().is_relative_to(tmp_path / "environment")
    assert (home / "outputs" / "wheel" / "report.html").is_file()
    record = reader.json("outputs/wheel/measure/run.json")
    assert record["sessions"][0]["git"] == {}
    assert "First steps" in reader.run("python -m headstart --help")
    reader.run(f"python train.py {target}")


@pytest.mark.slow
def test_its_types_reach_programs(wheel: Path, tmp_path: Path) -> None:
    programs = environment_with(tmp_path / "environment", wheel)
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
