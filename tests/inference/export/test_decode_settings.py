"""An export carries what decode.yaml says for its engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.decoding.decode_file import write_tuned
from inference.decoding.draft import NONE, Draft
from inference.engines.settings import LENGTHS, P_MIN, TOKENS
from inference.export.layouts.folder import ExportNotes
from inference.manifest import checkpoint_hash
from inference.target.model import TargetModel
from tests.inference.export.ground import save, write


def tune(folder: Path, depths: dict[int, int], least: float | None = None) -> None:
    """A decode.yaml with these greedy rows. least: the least probability of a drafted token."""
    numbers = {
        "predicted_tokens_per_second": 1.0,
        "tokens_per_second": 1.0,
        "baseline_tokens_per_second": 1.0,
        "speedup": 1.0,
        "speedup_ci95": [1.0, 1.0],
        "tau": 1.0,
    }
    rows = [
        {
            "batch_size": batch,
            "temperature": 0.0,
            "draft": (Draft("chain", depth) if depth else NONE).plain(),
            "chain": (Draft("chain", depth) if depth else NONE).plain(),
            "least_probability": least,
            "rule": "match",
        }
        | numbers
        for batch, depth in depths.items()
    ]
    device = {"kind": "cpu", "name": "here", "threads": 1}
    where = {"id": "t", "revision": "r"}
    write_tuned(folder, checkpoint_hash(folder), where, device, rows, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "engine", "settings", "said"),
    [
        (
            "eagle3_plain",
            "vllm",
            {TOKENS: 3, LENGTHS: [[1, 2, 3], [3, 8, 1]]},
            "[[1, 2, 3], [3, 8, 1]]",
        ),
        (
            "eagle3_plain",
            "sglang",
            {
                "--speculative-num-steps": 3,
                "--speculative-eagle-topk": 1,
                "--speculative-num-draft-tokens": 4,
            },
            "--speculative-num-steps 3 --speculative-eagle-topk 1",
        ),
        ("medusa", "vllm", {}, '"num_speculative_tokens": 3'),
    ],
)
def test_an_export_carries_them(
    target: TargetModel, tmp_path: Path, name: str, engine: str, settings: dict[str, int], said: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    tune(mine, {1: 3, 8: 1})
    write(target, mine, tmp_path / "out", engine)
    notes = ExportNotes.read(tmp_path / "out")
    assert notes.decode_settings == json.loads(json.dumps(settings))
    assert said in notes.serve
    assert LENGTHS not in notes.speculative_config
    write(target, mine, tmp_path / "fixed", engine, tokens=2)
    assert ExportNotes.read(tmp_path / "fixed").decode_settings == {}


def test_the_settings_of_a_tuning_or_of_simulated_traffic_go_along(
    target: TargetModel, tmp_path: Path
) -> None:
    mine = save(target, "eagle3_plain", tmp_path / "train" / "mine" / "best")
    lengths = {TOKENS: 4, LENGTHS: [[1, 2, 4], [3, 8, 2]]}
    trees = {
        "--speculative-num-steps": 2,
        "--speculative-eagle-topk": 3,
        "--speculative-num-draft-tokens": 6,
    }
    engines = {"vllm": lengths, "sglang": trees, "llama.cpp": {"--spec-draft-n-max": 4}}
    files = {"tune.json": engines, "traffic.json": {"mine": engines, "other": {}}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps({"engines": content}))
        given = str(tmp_path / name)
        for engine, settings in (("vllm", lengths), ("sglang", trees)):
            notes = write(target, mine, tmp_path / name[:-5] / engine, engine, settings=given)
            assert notes.decode_settings == settings
            assert notes.speculative_config["num_speculative_tokens"] == (
                4 if engine == "vllm" else 2
            )
    swept = save(target, "eagle3_plain", tmp_path / "train" / "mine@0.01" / "best")
    given = str(tmp_path / "traffic.json")  # which has a sweep's drafter under its row's name
    notes = write(target, swept, tmp_path / "swept", "vllm", settings=given)
    assert notes.decode_settings == lengths
    other = save(target, "eagle3_plain", tmp_path / "train" / "third" / "best")
    with pytest.raises(UserError, match=r"has no settings of vllm for 'third'.* mine, other"):
        write(target, other, tmp_path / "no", "vllm", settings=str(tmp_path / "traffic.json"))


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("distilled", True),
        ("eagle3_llama_cpp", True),
        ("jetspec", True),
        ("dflash", False),  # drafts its whole block, for which the value was not chosen
        ("dspark", False),
    ],
)
def test_a_gguf_file_is_served_with_the_least_probability(
    target: TargetModel, tmp_path: Path, name: str, carried: bool
) -> None:
    pytest.importorskip("gguf")
    mine = save(target, name, tmp_path / "mine")
    tune(mine, {1: 3, 8: 1}, least=0.35)
    notes = write(target, mine, tmp_path / "out", "llama.cpp")
    assert notes.decode_settings == ({P_MIN: 0.35} if carried else {})
    assert notes.serve.endswith(f" --spec-draft-n-max 3 {P_MIN} 0.35") is carried
    if carried:
        fixed = write(target, mine, tmp_path / "fixed", "llama.cpp", tokens=2)
        assert fixed.serve.endswith(" --spec-draft-n-max 2")
    given = tmp_path / "tune.json"
    chosen = {"--spec-draft-n-max": 3, P_MIN: 0.0}
    given.write_text(json.dumps({"engines": {"llama.cpp": chosen}}))
    read = write(target, mine, tmp_path / "given", "llama.cpp", settings=str(given))
    assert read.decode_settings == ({P_MIN: 0.0} if carried else {})
