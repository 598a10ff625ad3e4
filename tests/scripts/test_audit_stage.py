"""`headstart audit`: what it audits, the files it leaves, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.target.kv_cache import KVCache
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.cli import main
from tests.inference.tokenizers import save_micro_target

FEW = [
    "audit.prompts=2",
    "audit.max_new_tokens=8",
    "audit.checks=[invariance]",
    "audit.temperatures=[0]",
    "audit.shapes=[tree]",
    "audit.precisions=[float64]",
    "decode.depth=3",
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def command(target: Path, in_folder: Path) -> list[str]:
    Path("prompts.jsonl").write_text(
        "".join(
            json.dumps({"id": str(n), "prompt": text}) + "\n"
            for n, text in enumerate(("hello", "bye now"))
        )
    )
    given = [
        f"target.path={target}",
        "target.device=cpu",
        "bench.prompts=prompts.jsonl",
        "bench.domains=[]",
    ]
    return ["audit", *given, *FEW]


def audit_json() -> dict[str, object]:
    content = json.loads(Path("outputs/default/audit/audit.json").read_text())
    assert isinstance(content, dict)
    return content


def test_a_fresh_drafter_is_audited_where_nothing_is_trained(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "head=medusa"]) == 0
    shown = capsys.readouterr().out
    # a pipe hears from it now and then
    assert shown.splitlines()[0] == "loading the target in float64"
    assert shown.count("rows\n") < 5
    assert "LOSSLESS: 11 comparisons" in shown
    assert shown.splitlines()[-1] == "outputs/default/audit/audit.json"
    content = audit_json()
    assert {row["drafter"] for row in content["comparisons"]} == {  # type: ignore[attr-defined]
        "none",
        "medusa (fresh)",
        "ngram",
        "knows 70%",
        "always wrong",
        "random",
    }
    assert content["settings"]["audit"]["prompts"] == 2  # type: ignore[index]
    assert content["git"]["revision"]  # type: ignore[index]
    assert "**LOSSLESS" in Path("outputs/default/audit/audit.md").read_text()
    assert main([*command, "head=medusa"]) == 0
    assert "is complete; nothing has changed" in capsys.readouterr().out
    kept = [Path("outputs/default/audit", name) for name in ("run.json", "config.yaml")]
    before = [file.read_bytes() for file in kept]
    assert main([*command, "head=medusa", "audit.max_new_tokens=3000"]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert before == [file.read_bytes() for file in kept]
    prompts = Path("prompts.jsonl")
    prompts.write_text(prompts.read_text().replace("hello", "good evening"))
    assert main([*command, "head=medusa"]) == 0
    assert "nothing has changed" not in capsys.readouterr().out


def test_a_mismatch_ends_with_status_1_and_says_so_again(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # accepted nodes stay where they were verified; the check at loading would find that first
    monkeypatch.setattr(KVCache, "compact", lambda *_: None)
    monkeypatch.setattr(TargetModel, "_check_against", lambda *_: None)
    for _ in range(2):
        assert main([*command, "head=ngram", "audit.kinds=[]"]) == 1
        shown = capsys.readouterr().out
        assert "NOT LOSSLESS" in shown
        assert "knows 70%, tree" in shown
    assert "nothing has changed" in shown
    assert audit_json()["verdict"]["lossless"] is False  # type: ignore[index]


def test_a_trained_drafter_is_taken_from_its_folder(
    command: list[str], target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TargetModel.load(TargetConfig(str(target), device="cpu"))
    medusa = new_drafter(
        "medusa", get_kind("medusa").config_class(), model.info, model.weights, seed=1
    )
    save_drafter(medusa, Path("outputs/default/train/mine/best"), model.info)
    assert main([*command, "audit.kinds=[]"]) == 0
    found = {row["drafter"] for row in audit_json()["comparisons"]}  # type: ignore[attr-defined]
    assert "mine" in found and "medusa (fresh)" not in found
    capsys.readouterr()


def test_a_wrong_setting_ends_with_status_2(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "audit.checks=[invarience]"]) == 2
    assert "audit.checks: 'invarience' is unknown" in capsys.readouterr().err
    assert main([*command, "audit.drafters=[nobody]"]) == 2
    assert "there is no drafter 'nobody'" in capsys.readouterr().err
