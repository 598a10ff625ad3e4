"""export, verify-export and import as commands: a trained run's drafter goes out, is checked, and
comes in again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.api.errors import UserError
from inference.export.hub.config import PushConfig
from inference.manifest import file_entry, write_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.cli import main
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import RunRecord
from scripts.stages.publish import import_drafter
from scripts.stages.publish.push import plain_name
from scripts.stages.publish.verify_export import prompts_of
from tests.inference.export.ground import load_target, save, save_target


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two trained drafters, as the stages before leave them."""
    root = tmp_path_factory.mktemp("run")
    target = load_target(save_target(root / "target"))
    for name in ("eagle3_plain", "medusa"):
        save(target, name, root / "outputs" / "demo" / "train" / name / "best")
    return root


def command(run: Path, *arguments: str) -> list[str]:
    stage, *rest = arguments
    return [
        stage,
        "target=local",
        f"target.path={run / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        f"run.root={run / 'outputs'}",
        "run.name=demo",
        *rest,
    ]


def test_a_drafter_goes_out_is_checked_and_comes_in_again(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(run, "export", "run.drafter=eagle3_plain")) == 0
    out = run / "outputs" / "demo" / "export" / "eagle3_plain" / "vllm"
    said = capsys.readouterr().out
    assert f"eagle3 for vllm (eagle3): {out}" in said
    assert '"num_speculative_tokens": 4' in said
    assert main(command(run, "verify-export", f"verify.dir={out}")) == 0
    said = capsys.readouterr().out
    assert "nothing wrong found" in said
    with monkeypatch.context() as whole:
        whole.delattr(TargetModel, "load")  # embedding and LM head are enough
        assert main(command(run, "import", f"import.source={out}", "run.drafter=back")) == 0
    assert "eagle3 of" in capsys.readouterr().out
    back = run / "outputs" / "demo" / "train" / "back" / "best"
    mine = run / "outputs" / "demo" / "train" / "eagle3_plain" / "best"
    assert (back / "config.json").read_text() == (mine / "config.json").read_text()
    assert main(command(run, "import", f"import.source={out}", "run.drafter=back")) == 2
    assert "import.overwrite=true" in capsys.readouterr().err
    assert (
        main(
            command(
                run, "import", f"import.source={out}", "run.drafter=back", "import.overwrite=true"
            )
        )
        == 0
    )


def test_an_import_reads_a_target_without_safetensors_whole_on_the_cpu(
    run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run / "target", tmp_path / "target")
    weights = load_file(str(folder / "model.safetensors"))
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for place in (run / "target", folder):
        found = import_drafter.load_target(TargetConfig(str(place), "float32", device="cuda"))
        assert found.device.type == "cpu"
        assert torch.equal(found.weights.embedding, weights["model.embed_tokens.weight"])


def test_head_and_engine_name_the_drafter_and_the_engine_for_short(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(run, "export", "head=eagle3_plain", "engine=sglang")) == 0
    out = run / "outputs" / "demo" / "export" / "eagle3_plain" / "sglang"
    assert f"eagle3 for sglang (eagle3): {out}" in capsys.readouterr().out
    assert (
        main(command(run, "export", "head=nothing", "run.drafter=eagle3_plain", "engine=vlm")) == 2
    )
    assert "did you mean 'vllm'" in capsys.readouterr().err.lower()


def test_a_broken_folder_ends_with_status_one_and_names_the_fault(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run / "broken"
    assert (
        main(
            command(
                run, "export", "run.drafter=eagle3_plain", f"export.out={out}", "export.tokens=2"
            )
        )
        == 0
    )
    found = load_file(str(out / "model.safetensors"))
    del found["d2t"]
    save_file(found, out / "model.safetensors")
    assert main(command(run, "verify-export", f"verify.dir={out}")) == 1
    said = capsys.readouterr().out
    assert "WRONG d2t: missing" in said
    assert "WRONG files: 'model.safetensors' has changed since the export" in said


@pytest.mark.parametrize("name", ["eagle3", "eagle3@0.01", "medusa-lr=0.001"])
def test_every_drafter_has_a_name_that_the_hub_takes(name: str) -> None:
    assert PushConfig(f"me/{plain_name(name)}").repo.startswith(f"me/{name[:6]}")


def test_a_checkpoint_folder_needs_no_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "outputs" / "demo" / "train" / "medusa"
    assert (
        main(
            command(run, "export", f"export.checkpoint={checkpoint}", f"export.out={run / 'heads'}")
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "vllm_medusa.MedusaProposer" in said
    assert (run / "heads" / "vllm_medusa.py").is_file()
    facts = json.loads((run / "heads" / "headstart_export.json").read_text())
    assert facts["method"] == "medusa"
    assert facts["source"]["checkpoint"] == str((checkpoint / "best").resolve())


def test_a_live_check_takes_the_prompts_that_a_measurement_would(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given ones, those of `bench`, or those held out of the data that the drafter learned from;
    the embedded target's are for that target alone."""
    out = tmp_path / "vllm"
    assert main(command(run, "export", "run.drafter=medusa", f"export.out={out}")) == 0
    stage = STAGES["verify-export"]

    def asked(*more: str) -> list[str]:
        given = command(run, "verify-export", f"verify.dir={out}", "verify.mode=live", *more)[1:]
        return [one.id for one in prompts_of(load_settings(stage, given))]

    with pytest.raises(UserError, match="there are no prompts to measure on"):
        asked()
    for name in ("own", "held"):
        row = {"id": name, "domain": "code", "prompt": f"Write {name}."}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert asked(f"verify.live.prompts={tmp_path / 'own.jsonl'}") == ["own"]
    assert asked("bench=jsonl", f"bench.prompts={tmp_path / 'own.jsonl'}") == ["own"]

    answers = run / "elsewhere" / "generate"
    (answers / "input").mkdir(parents=True)
    (tmp_path / "held.jsonl").rename(answers / "input" / "bench.jsonl")
    held = {"bench": file_entry(answers, "input/bench.jsonl", rows=1)}
    whole = {"target": {}, "counts": {}, "shards": []}
    write_manifest(answers, "generate", {"held_out": held, **whole})
    trained = run / "outputs" / "demo" / "train" / "medusa"
    (trained / "config.yaml").write_text("train: {}\n")
    RunRecord(stage="train", inputs={str(answers / "manifest.json"): "hash"}).write(trained)
    assert asked() == ["held"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export"], "Say which with run.drafter=<name>"),
        (["export", "run.drafter=eagel"], "has trained no 'eagel'"),
        (["export", "run.drafter=medusa", "export.engine=vlm"], "Did you mean 'vllm'?"),
        (["export", "run.drafter=medusa", "export.dtype=int8"], "export.dtype 'int8'"),
        (["export", "run.drafter=medusa", "export.engine=sglang"], "it has no Medusa"),
        (["export", "export.checkpoint=nowhere", "export.out=x"], "there is no folder 'nowhere'"),
        (["verify-export"], "verify.dir: give the folder"),
        (["verify-export", "verify.dir=nowhere"], "is not a folder"),
        (["verify-export", "verify.mode=dead"], "verify.mode 'dead'"),
        (["verify-export", "verify.mode=forward"], "Use verify.mode=live verify.live.python="),
        (["verify-export", "verify.contexts=6"], "Use verify.mode=live verify.live.python="),
        (["import"], "import.source: give the folder"),
        (["import", "import.source=nowhere"], "is not a folder"),
        (["import", "import.layout=pickle"], "import.layout 'pickle'"),
    ],
)
def test_mistakes_are_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(command(run, *arguments)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["export", "verify-export", "import"])
def test_the_stages_explain_their_keys(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([stage, "--help"]) == 0
    said = capsys.readouterr().out
    assert {"export": "export.engine", "verify-export": "verify.dir", "import": "import.source"}[
        stage
    ] in said.replace("  ", " ")
