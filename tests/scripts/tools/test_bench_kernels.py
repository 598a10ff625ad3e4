"""The kernels' bench runs as it stands, on toy sizes; what it measures there means nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.tools.bench_kernels import BENCHES, KERNEL, Call, Sizes, main, measure
from tests.heads.kernels.devices import DEVICES

TOY = Sizes(
    heads=2,
    key_heads=1,
    head_dim=16,
    layers=2,
    hidden=32,
    vocab=300,
    rows=2,
    contexts=((2, 20),),
    nodes=(3,),
    splits=(64,),
    copy_bytes=1 << 14,
)


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_compares_equal_results_with_reference_and_copy(name: str, device: str) -> None:
    calls = []

    def timer(call: Call) -> list[float]:
        """The copy takes 1 ms, every kernel 2, every other call 3 or more."""
        call()
        calls.append(call)
        return [float(len(calls)), 1.0, 9.0]

    report = measure([name], torch.device(device), TOY, timer)
    json.dumps(report)
    assert report["results"] and report["copy_milliseconds"] == [1.0, 1.0, 9.0]
    first = report["results"][0]
    assert first["milliseconds"][KERNEL][0] == 2.0
    assert first["share_of_copy_bandwidth"] == first["bytes"] / (2 * TOY.copy_bytes) / 2
    for result in report["results"]:
        assert result["bench"] == name and result["difference"] <= 0.02
        others = set(result["milliseconds"]) - {KERNEL}
        assert others and others == set(result["kernel_is_faster_than"])
    assert first["kernel_is_faster_than"][list(first["milliseconds"])[1]] == 1.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "report.json")]) == 2
    assert "CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def test_an_unknown_bench_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree_atention", "--out", str(tmp_path / "report.json")]) == 2
    assert "Did you mean 'tree_attention'" in capsys.readouterr().err
