"""How acceptance runs: a file per part, limits, faults of a part, time, and no package that a bare
image lacks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.evidence import gpu
from scripts.evidence.acceptance import parts as acceptance_parts
from scripts.evidence.acceptance import speed
from scripts.evidence.acceptance.parts import CALL_SECONDS, Check, Found, Part, Setting, run_parts
from scripts.evidence.acceptance.shapes import FULL, TINY
from scripts.tools.common import ROOT
from tests.inference.kernels.planted import one_piece_lost, run_in_its_place

SETTING = Setting(torch.device("cpu"), torch.float32, TINY)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check("x", 1.0), True),
        (Check("x", 1.0, least=1.0, most=1.0), True),
        (Check("x", 0.9, least=1.0), False),
        (Check("x", 1.1, most=1.0), False),
        (Check("x", math.nan), False),
        (Check("x", math.nan, least=0.0), False),
    ],
)
def test_a_check_passes_within_its_limits(check: Check, passed: bool) -> None:
    assert check.passed is passed


def test_every_part_leaves_a_file_and_one_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(acceptance_parts, "git_state", lambda: {"revision": "abc", "diff": "+"})

    def good(setting: Setting) -> Found:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        return Found({"n": 1}, [Check("n", 1, least=0)])

    def wrong(setting: Setting) -> Found:
        return Found({}, [Check("gap", 0.5, most=0.1), Check("n", 1)])

    def broken(setting: Setting) -> Found:
        raise RuntimeError("an illegal address")

    parts = [Part("a", wrong, 1), Part("b", broken, 1), Part("c", good, 1), Part("d", good, 1e9)]
    assert not run_parts("speed", parts, SETTING, tmp_path, 100, "the command")
    assert seen == [["speed-a.json", "speed-b.json"]]
    assert read(tmp_path / "speed-a.json")["failures"] == ["gap 0.5, allowed is at most 0.1"]
    assert read(tmp_path / "speed-b.json")["failures"] == ["RuntimeError: an illegal address"]
    assert read(tmp_path / "speed-c.json")["facts"] == {"n": 1}
    whole = read(tmp_path / "speed.json")
    (code,) = {json.dumps(read(path)["git"]) for path in tmp_path.iterdir()}
    assert code == '{"revision": "abc", "changed": true}'
    assert whole["parts"] == {"a": "failed", "b": "error", "c": "passed", "d": "not run"}
    assert whole["passed"] is False and whole["command"] == "the command"
    assert "not run, 100 s are left" in capsys.readouterr().out
    assert run_parts("speed", parts[2:3], SETTING, tmp_path, 100, "x")


@pytest.mark.slow
def test_parts_that_measure_no_time_run_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["correctness", "--out", str(tmp_path), "--device", "cpu", "--jobs", "2"]
    assert gpu.main([*given, "--only", "environment", "attention"]) == 0
    whole = read(tmp_path / "correctness.json")
    assert whole["parts"] == {"environment": "passed", "attention": "passed"}
    assert whole["command"].endswith("--jobs 2 --only environment attention")
    assert read(tmp_path / "correctness-attention.json")["facts"]["rows"]
    assert capsys.readouterr().out.count("passed (") == 2


def test_a_part_whose_process_dies_or_hangs_is_an_error(tmp_path: Path) -> None:
    """A device that fails takes the process along; what the part left before does not count."""
    said: list[str] = []
    parts = [Part(name, lambda _: Found({}), 0) for name in ("dies", "hangs")]
    parts.append(Part("timed", lambda _: Found({}), 0, timed=True))
    (tmp_path / "training-dies.json").write_text('{"result": "passed"}')
    code = {"dies": "raise SystemExit('out of memory')", "hangs": "import time; time.sleep(60)"}
    passed = run_parts(
        *("training", parts, SETTING, tmp_path, 3.0, "x"),
        say=said.append,
        jobs=2,
        alone=lambda part, seconds: ["-c", code[part.name]],
    )
    results = read(tmp_path / "training.json")["parts"]
    assert not passed and results["dies"] == results["hangs"] == "error"
    assert "  out of memory" in said and any("did not end in" in line for line in said)


@pytest.mark.parametrize("stage", gpu.STAGES)
def test_the_parts_of_a_call_take_no_longer_than_a_call(stage: str) -> None:
    """Else the last ones are never begun, by the estimates of the parts themselves."""
    assert sum(part.seconds for part in gpu.STAGES[stage]) <= CALL_SECONDS == 570


def test_every_context_is_measured_with_every_number_of_rows_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = set()

    def noted(setting: Setting, name: str, context: int, rows: int, which: str) -> Found:
        measured.add((name, context, rows))
        return Found({})

    monkeypatch.setattr(speed, "decoding", noted)
    setting = Setting(torch.device("cpu"), torch.float32, FULL)
    names = [part for part in (*speed.PARTS, *speed.CONTEXTS) if part.name.startswith("llama")]
    for part in names:
        part.work(setting)
    wanted = {("llama31_8b", c, r) for c in (512, 8_192, 32_768) for r in (1, 8, 32)}
    assert wanted - measured == {("llama31_8b", 32_768, 32)} and measured <= wanted


def test_the_status_says_whether_every_part_ran_and_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["correctness", "--out", str(tmp_path), "--device", "cpu", "--size", "tiny"]
    given += ["--only", "environment", "attention"]

    def status(*more: str) -> tuple[int, str]:
        code = gpu.main([*given, *more])
        return code, read(tmp_path / "correctness.json")["parts"]["attention"]

    assert status() == (0, "passed")
    # less time than the part is said to take
    assert status("--seconds", "30") == (1, "not run")
    with monkeypatch.context() as planted:
        run_in_its_place(planted, one_piece_lost)
        assert status() == (1, "failed")
    with monkeypatch.context() as planted:
        run_in_its_place(planted, lambda *given, **more: torch.zeros(1)[7])
        assert status() == (1, "error")
    assert capsys.readouterr().out.count("correctness: NOT PASSED") == 3


def test_a_part_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert gpu.main(["speed", "--out", out, "--device", "cpu", "--only", "bandwith"]) == 2
    assert "Did you mean 'bandwidth'" in capsys.readouterr().err
    assert gpu.main(["speed", "--out", out, "--device", "cpu", "--only", "bandwidth"]) == 0
    assert read(tmp_path / "out" / "speed.json")["passed"] is True


def test_nothing_is_imported_that_a_bare_image_lacks() -> None:
    """torch, transformers, triton and pytest are there; the rest of the dependencies is not."""
    absent = ("hydra", "omegaconf", "datasets", "deepspeed", "peft", "accelerate", "wandb")
    code = f"import sys; [sys.modules.update({{name: None}}) for name in {absent}]\n"
    code += "import scripts.evidence.gpu"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
