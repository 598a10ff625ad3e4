"""A folder where a file is expected, given by a setting or found inside of an artefact: one sentence
with its path, status 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference.manifest import write_manifest
from scripts.cli import main
from scripts.tools.common import PROMPTS
from tests.scripts.test_deletions import ANSWERS, command, made, root

__all__ = ["made", "root"]

SMALL = [
    "measure.drafters=[medusa]",
    "measure.kinds=[]",
    "bench.prompts_per_domain=1",
    "decode.max_new_tokens=4",
    "decode.depth=2",
]


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("measure", [*SMALL, "decode.adaptive=confidence", "decode.adaptive_head={}"]),
        ("measure", [*SMALL, "bench.prompts={}"]),
        ("tune", ["tune.drafter=medusa", "tune.prompts={}"]),
        ("traffic", ["traffic.file={}", f"traffic.prompts={PROMPTS}"]),
        ("generate", ["data=jsonl", "data.path={}"]),
        ("generate", ["data.held_out=[{}]"]),
        ("generate", ["generate.drafter={}", "data.limit=4"]),
        ("serve", ["serve.drafter=medusa", "serve.token_file={}"]),
        ("serve", ["serve.drafter=medusa", "serve.ssl_certfile={}"]),
        ("features", ["head=medusa", "features.serve=true", "features.ssl_certfile={}"]),
        ("watch", ["watch.drafter=medusa", "watch.reference={}"]),
        ("plan", ["head=medusa", "plan.measured={}"]),
        ("import", ["import.source={}", "run.drafter=theirs"]),
        ("feedback", ["feedback.records=[{}]", "feedback.sequences=true"]),
        ("chat", ["chat.drafter={}"]),
        ("refresh", ["refresh.drafter={}"]),
    ],
)
def test_a_setting_that_names_a_folder_in_place_of_a_file(
    root: Path, capsys: pytest.CaptureFixture[str], stage: str, more: list[str]
) -> None:
    folder = root / "a.jsonl"
    folder.mkdir()
    for written in ("generate", "measure"):
        shutil.rmtree(root / "outputs" / "a" / written)
    write_manifest(root / "outputs" / "a" / "generate", "generate", ANSWERS)
    if stage == "generate":
        shutil.rmtree(root / "outputs" / "a" / "generate")
    given = [item.format(folder) for item in more]
    named = {item.split("=")[0] for item in given}
    common = [item for item in command(root, stage)[1:] if item.split("=")[0] not in named]
    assert main([stage, *common, *given]) == 2
    refusal(capsys, str(folder))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """The command's last words are one sentence for people, with `words` in it."""
    said = " ".join(capsys.readouterr().err.split())
    last = said[said.rindex("headstart: ") :]
    assert "Traceback" not in said and "This should not happen" not in said
    assert all(word in last for word in words), last


@pytest.mark.parametrize(
    ("file", "stage", "more"),
    [
        ("target/config.json", "measure", SMALL),
        ("target/model.safetensors", "measure", SMALL),
        ("outputs/a/train/medusa/best/config.json", "export", []),
        ("outputs/a/train/medusa/best/model.safetensors", "measure", SMALL),
        ("outputs/a/train/medusa/best/decode.yaml", "export", []),
        ("outputs/a/train/medusa/best/manifest.json", "export", []),
        ("outputs/a/train/medusa/manifest.json", "export", []),
        ("outputs/a/measure/config.yaml", "measure", SMALL),
        ("outputs/a/measure/run.json", "measure", SMALL),
        ("outputs/a/generate/manifest.json", "train", ["head=medusa", "run.drafter=other"]),
        ("p/x.jsonl", "tune", ["tune.drafter=medusa", "tune.prompts={root}/p"]),
        ("p/x.jsonl", "generate", ["data=jsonl", "data.path={root}/p", "run.name=c"]),
    ],
)
def test_a_folder_in_place_of_a_file_of_an_artefact(
    root: Path, capsys: pytest.CaptureFixture[str], file: str, stage: str, more: list[str]
) -> None:
    place = root / file
    if place.is_file():
        place.unlink()
    place.mkdir()
    if "/measure/" not in file:
        shutil.rmtree(root / "outputs" / "a" / "measure")
    given = [item.format(root=root) for item in more]
    named = {item.split("=")[0] for item in given}
    common = [item for item in command(root, stage)[1:] if item.split("=")[0] not in named]
    assert main([stage, *common, *given]) == 2
    refusal(capsys, str(place.parent))


def test_files_of_settings_that_are_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", str(tmp_path)]) == 2
    refusal(capsys, f"--config: '{tmp_path}' cannot be read: Is a directory")
    (tmp_path / "experiment" / "mine.yaml").mkdir(parents=True)
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path))
    assert main(["train", "experiment=mine"]) == 2
    refusal(capsys, "mine")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path / "file"))
    assert main(["train"]) == 2
    refusal(capsys, f"HEADSTART_CONF names '{tmp_path / 'file'}', which is not a folder")
