"""The kernels' bench runs as it stands, on toy sizes; what it measures there means nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.tools.bench_kernels import BENCHES, KERNEL, Sizes, main, measure
from tests.inference.kernels.devices import DEVICES

TOY = Sizes(
    heads=2,
    key_heads=1,
    head_dim=16,
    layers=2,
    hidden=32,
    vocab=300,
    contexts=((2, 20),),
    nodes=(3,),
    splits=(64,),
    spread_bytes=1,
    copy_bytes=1 << 14,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_compares_equal_results_with_reference_and_copy(name: str, device: str) -> None:
    report = measure([name], torch.device(device), TOY, repeats=2)
    json.dumps(report)
    assert report["results"]
    for result in report["results"]:
        assert result["bench"] == name and result["difference"] <= 0.02
        assert {KERNEL, "copy"} < set(result["seconds"]) and min(result["seconds"].values()) > 0
        others = set(result["seconds"]) - {KERNEL, "copy"}
        assert others and others == set(result["kernel_is_faster_than"])
        for ratio in (result["share_of_copy_bandwidth"], *result["kernel_is_faster_than"].values()):
            assert 0 < ratio["low"] <= ratio["value"] * 1.0001 and ratio["value"] <= ratio["high"] * 1.0001


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "report.json")]) == 2
    assert "CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def test_an_unknown_bench_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree_atention", "--out", str(tmp_path / "report.json")]) == 2
    assert "Did you mean 'tree_attention'" in capsys.readouterr().err
