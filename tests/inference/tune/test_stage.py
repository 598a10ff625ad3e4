"""`headstart tune` and `headstart traffic`, from the command line to the files they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.decoding.decode_file import read_tuned
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.process import device
from scripts.stages import traffic, tune
from tests.inference.tokenizers import save_micro_target

QUICK = ["prompts_per_domain=4", "max_new_tokens=6", "repeats=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target's folder and a checkpoint for it."""
    place, folder = (
        save_micro_target(tmp_path_factory.mktemp("target")),
        tmp_path_factory.mktemp("drafter") / "mine",
    )
    model = TargetModel.load(TargetConfig(str(place), device="cpu"))
    medusa = new_drafter(
        "medusa", get_kind("medusa").config_class(num_heads=3), model.info, model.weights, seed=0
    )
    save_drafter(medusa, folder, model.info)
    return place, folder


@pytest.fixture
def prompts(in_folder: Path) -> Path:
    file = in_folder / "prompts.jsonl"
    rows = [{"id": f"p{n}", "domain": "ab"[n % 2], "prompt": f"What is {n}?"} for n in range(8)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def run(stage: str, folders: tuple[Path, Path], prompts: Path, *more: str) -> None:
    quick = [f"{stage}.{setting}" for setting in QUICK]
    given = [
        f"target.path={folders[0]}",
        "target.device=cpu",
        f"{stage}.prompts={prompts}",
        *quick,
        *more,
    ]
    {"tune": tune, "traffic": traffic}[stage].run(load_settings(STAGES[stage], given))


def test_tune_leaves_decode_yaml_and_what_it_rests_on(
    folders: tuple[Path, Path],
    prompts: Path,
    in_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = ["tune.depths=[1,2]", "tune.nodes=[4]", "tune.thresholds=[0.5]"]
    grid += ["tune.finalists=1", "tune.rounds=1", "tune.close_rounds=0"]
    run("tune", folders, prompts, f"tune.drafter={folders[1]}", "tune.batches=[1,2]", *grid)
    tuned = read_tuned(folders[1])
    assert tuned is not None and [row.batch_size for row in tuned.rows] == [1, 2]
    told: dict[str, Any] = json.loads(
        (in_folder / "outputs/default/tune/mine/tune.json").read_text()
    )
    assert told["command"].startswith("headstart tune target.path=")
    assert [row["label"] for row in told["rows"]] == [row.draft.label for row in tuned.rows]
    assert {"chain 1", "chain 2", "none", "chain 2, confidence 0.5"} <= {
        item["label"] for item in told["rows"][0]["predictions"]
    }
    assert told["drafter"]["kind"] == "medusa" and told["survival"][0]["tested"][0] > 0
    shown = capsys.readouterr().out
    assert "batch size" in shown and "decode.yaml" in shown
    assert shown.count("no speculation") == sum(row.draft.shape == "none" for row in tuned.rows)
    # Repeated, it is only shown again, unless something has changed or is gone.
    tunings: list[tuple[float, ...]] = []
    monkeypatch.setattr(tune, "tune", lambda given, *_: tunings.append(given.tune.temperatures))
    given = [f"tune.drafter={folders[1]}", "tune.batches=[1,2]", *grid]
    run("tune", folders, prompts, *given)
    again = capsys.readouterr().out
    assert "is complete; nothing has changed" in again and "decode.yaml" in again
    assert tunings == []
    run("tune", folders, prompts, *given, "decode.temperature=0.7")
    run("tune", folders, prompts, *given, "decode.temperature=0.7", "tune.temperatures=[0,1]")
    assert tunings == [(0.7,), (0.0, 1.0)]
    for change in (
        lambda: prompts.write_text(prompts.read_text().replace("What", "Where")),
        lambda: monkeypatch.setattr(tune, "device", lambda _: {"kind": "cpu", "name": "other"}),
        (folders[1] / "decode.yaml").unlink,
    ):
        run("tune", folders, prompts, *given)
        before = len(tunings)
        change()
        run("tune", folders, prompts, *given)
        assert len(tunings) == before + 1
        monkeypatch.setattr(tune, "device", device)


def test_tune_refuses_what_has_no_checkpoint(
    folders: tuple[Path, Path], prompts: Path, in_folder: Path
) -> None:
    with pytest.raises(
        UserError, match=r"'ngram' has no checkpoint that decode\.yaml could lie in"
    ):
        run("tune", folders, prompts, "tune.drafter=ngram")
    with pytest.raises(UserError, match=r"holds no trained drafter"):
        run("tune", folders, prompts)


def test_traffic_says_what_speculation_gains(
    folders: tuple[Path, Path],
    prompts: Path,
    in_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = in_folder / "requests.jsonl"
    rows = [
        {"timestamp": n / 50, "prompt": "What?", "answer_tokens": 1 + n % 9, "domain": "abc"[n % 3]}
        for n in range(40)
    ]
    log.write_text("\n".join(map(json.dumps, rows)))
    given = [
        f"traffic.file={log}",
        f"traffic.drafters=[{folders[1]}]",
        "traffic.rows=2",
        "traffic.depths=[1,3,9]",
    ]
    run("traffic", folders, prompts, *given)
    told = json.loads((in_folder / "outputs/default/traffic/traffic.json").read_text())
    assert [(way["drafter"], way["draft"]) for way in told["ways"]] == [
        ("none", "none"),
        ("mine", "chain 1"),
        ("mine", "chain 3"),
    ]
    assert told["traffic"]["requests"] == 40 and told["traffic"]["domains"] == ["a", "b", "c"]
    plain, short, long = told["ways"]
    assert (
        plain["speedup_at"] == {"p50": 1.0, "p95": 1.0}
        and plain["tau"] == 1.0
        and plain["extra_bytes"] == 0
    )
    assert 0 < short["extra_bytes"] <= long["extra_bytes"] and long["memory_bytes"]["weights"] > 0
    for way in told["ways"]:
        assert 0 < way["first_token"]["p50"] <= way["latency"]["p50"] <= way["latency"]["p95"]
    assert 1 <= told["concurrency"]["p50"] <= told["concurrency"]["p95"]
    said = capsys.readouterr().out
    assert "(p95)" in said
    with monkeypatch.context() as patch:  # repeated, it is only shown again
        heats: list[float] = []
        patch.setattr(
            traffic, "simulate", lambda given, *_: heats.append(given.traffic.temperature)
        )
        run("traffic", folders, prompts, *given)
        assert capsys.readouterr().out.endswith(said.splitlines()[-1] + "\n") and heats == []
        run("traffic", folders, prompts, *given, "decode.temperature=0.7")
        patch.setattr(traffic, "device", lambda _: {"kind": "cpu", "name": "other"})
        run("traffic", folders, prompts, *given, "decode.temperature=0.7")
        assert heats == [0.7, 0.7]
    with pytest.raises(
        UserError, match=r"a request of the traffic takes \d+ positions .*; traffic\.context is 10"
    ):
        run("traffic", folders, prompts, *given, "traffic.context=10")
    with pytest.raises(UserError, match=r"traffic\.drafters names two drafters alike: mine, mine"):
        run("traffic", folders, prompts, given[0], f"traffic.drafters=[{folders[1]},{folders[1]}]")
    with pytest.raises(UserError, match=r"has no trained drafter"):
        run("traffic", folders, prompts, given[0])
