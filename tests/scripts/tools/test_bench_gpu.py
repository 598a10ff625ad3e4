"""The speed test on a toy shape: the known text is written in every dtype, trajectories are
followed, the report is whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.measure.prompts import Prompt, to_requests
from inference.report.model import parse_report
from scripts.tools import bench_gpu

TINY = ["--shape", "toy", "--device", "cpu", "--hidden", "64", "--layers", "3", "--vocab", "256"]
TINY += [
    "--prompts",
    "2",
    "--context",
    "12",
    "--tokens",
    "24",
    "--repeats",
    "1",
    "--intermediate",
    "64",
]
ACCEPTED = {"eagle3": [2, 0, 1, 3], "distilled": [3, 3, 0]}


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    path = tmp_path / "trajectories.json"
    content = {
        name: {"accepted": accepted, "source": "here"} for name, accepted in ACCEPTED.items()
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_random_target_writes_its_known_text_in_every_dtype(dtype: torch.dtype) -> None:
    sizes = {**bench_gpu.SHAPES["toy"], "vocab": 300}
    target = bench_gpu.random_target(sizes, torch.device("cpu"), dtype, 64)
    prompts = [Prompt("p", "x", tokens=(5, 17, 200))]
    requests = to_requests(prompts, target.tokenizer, DecodeConfig(max_new_tokens=20))
    (text,) = bench_gpu.texts(target, requests)  # decodes, and refuses a text that differs
    assert text[:3] == [5, 17, 200]
    assert text[3] == (200 + bench_gpu.STRIDE) % 300
    assert len(set(text[3:])) == 20


def test_a_text_that_is_not_the_targets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = bench_gpu.random_target(
        bench_gpu.SHAPES["toy"], torch.device("cpu"), torch.float32, 64
    )
    requests = to_requests(
        [Prompt("p", "x", tokens=(5,))], target.tokenizer, DecodeConfig(max_new_tokens=4)
    )
    monkeypatch.setattr(bench_gpu, "STRIDE", 1)
    with pytest.raises(UserError, match="does not write its known text"):
        bench_gpu.texts(target, requests)


def test_the_whole_bench_on_a_toy(
    tmp_path: Path,
    trajectories: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("inference.measure.roofline.PROBE_BYTES", {"cpu": 1 << 20})
    # a few prompts on a busy machine: no statement on speed
    monkeypatch.setattr("inference.measure.metrics.TIMING_NOISE", 100.0)
    out = tmp_path / "reports" / "gpu.json"
    arguments = [
        *TINY,
        "--dtype",
        "float32",
        "--trajectories",
        str(trajectories),
        "--out",
        str(out),
    ]
    arguments += ["--trajectory", "own"]
    assert bench_gpu.main(arguments) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert report["command"] == "python -m scripts.tools.bench_gpu " + " ".join(arguments)
    assert (report["sizes"]["hidden"], report["sizes"]["heads"]) == (64, 4)
    parse_report(report["report"])
    assert {name: item["tau"] for name, item in report["trajectories"].items()} == {
        "eagle3": 2.5,
        "distilled": 3.0,
    }
    measured = report["measured"]
    assert measured["plain_synchronisations_per_step"] is None  # no CUDA here
    for name, numbers in measured["arms"].items():
        assert numbers["trajectory_followed"] is True
        assert sum(numbers["split"].values()) == pytest.approx(1.0)
        assert 0 < numbers["share"] < 50
        cycle = ACCEPTED[name]
        assert (
            abs(numbers["tau"] - 1 - sum(cycle) / len(cycle)) < 0.7
        )  # answers are too short for whole cycles
    entries = report["report"]["drafters"]
    assert [entry["lossless"]["mismatches"] for entry in entries] == [0, 0]
    assert [entry["draft"]["depth"] for entry in entries] == [3, 3]  # as deep as the trajectories
    assert measured["plain_share"] > 0
    assert '"measured"' in capsys.readouterr().out


def test_trajectories_are_recorded_from_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"fingerprint": "x"}]
    passes = [[2, 3, True], [1, 2, True], [0, 1, True]]
    record = {"arm": "eagle3", "prompt": "a", "repeat": 0, "tokens": [1], "seconds": {}}
    rows += [{**record, "passes": passes}]
    folder = tmp_path / "measure"
    folder.mkdir()
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    path = tmp_path / "trajectories.json"
    assert bench_gpu.main(["--record", f"eagle3={folder}", "--trajectories", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "eagle3": {"accepted": [2, 1], "source": "eagle3, 1 answers"}
    }
    assert bench_gpu.main(["--record", "eagle3", "--trajectories", str(path)]) == 2
    assert "--record takes ARM=FOLDER" in capsys.readouterr().err
    assert bench_gpu.main([*TINY, "--dtype", "float32", "--trajectories", str(path)]) == 2
    assert "holds no trajectory 'distilled'" in capsys.readouterr().err
    assert bench_gpu.main([*TINY, "--trajectories", str(tmp_path / "nowhere.json")]) == 2
    assert "holds no trajectories" in capsys.readouterr().err
