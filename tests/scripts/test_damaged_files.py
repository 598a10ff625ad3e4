"""Files that are cut, overwritten or of another kind, and places that are files: every stage ends
with one sentence, status 2."""

from __future__ import annotations

import json
import logging
import logging.handlers
from pathlib import Path

import pytest

from inference.manifest import write_manifest
from inference.report.model import write_report
from scripts.cli import main
from scripts.tools.common import PROMPTS
from tests.inference.example_report import example_report
from tests.inference.test_folders import contents
from tests.scripts.test_deletions import ANSWERS, command, made, refused, root

__all__ = ["made", "root"]

BINARY = b"\xff\xfe\x00" + bytes(range(256))
EMPTY = b"\x08\0\0\0\0\0\0\0{}      "
"""A file of safetensors without tensors."""
WEIGHTS = "outputs/a/train/medusa/best/model.safetensors"
CONFIG = "outputs/a/train/medusa/best/config.json"


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("measure", ["measure.name=other", "bench.prompts={}"]),
        ("tune", ["tune.drafter=medusa", "tune.prompts={}"]),
        ("traffic", ["traffic.file={}", f"traffic.prompts={PROMPTS}"]),
    ],
)
def test_prompts_that_are_no_text(
    root: Path, capsys: pytest.CaptureFixture[str], stage: str, more: list[str]
) -> None:
    file = root / "binary.jsonl"
    file.write_bytes(BINARY)
    words = f"'{file}' is not text in UTF-8"
    assert main(command(root, stage, *(item.format(file) for item in more))) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read: "),
        (b"\x10\0\0\0\0\0\0\0{", "cannot be read: "),
        (b"garbage" * 99, "cannot be read: "),
        (None, "has no weights to export"),
    ],
)
def test_weights_that_are_none_are_not_exported(
    root: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    (root / WEIGHTS).unlink()
    if content is not None:
        (root / WEIGHTS).write_bytes(content)
    refused(root, capsys, words, "export", f"export.out={root / 'x'}")


def test_missing_weights_are_not_pushed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / WEIGHTS).unlink()
    write_report(example_report(), root / "outputs" / "a" / "measure" / "report.json")
    common = [f"run.root={root / 'outputs'}", "run.name=a", "run.drafter=medusa"]
    before = contents(root)
    assert main(["push", *common, "push.repo=someone/x", "push.license=mit"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "medusa/best/model.safetensors'" in said and "Traceback" not in said
    assert contents(root) == before


def test_the_configuration_of_another_kind_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((root / CONFIG).read_text())
    (root / CONFIG).write_text(json.dumps({**content, "kind": "eagle3"}))
    words = "there is no such key. Did you mean"
    refused(root, capsys, words, "export", f"export.out={root / 'x'}")


def test_a_target_whose_weights_are_of_other_sizes(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root / "target" / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "vocab_size": content["vocab_size"] + 8}))
    table = logging.handlers.BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [table])
    assert main(command(root, "measure", "measure.name=other")) == 2
    said = capsys.readouterr().err
    assert "its files hold weights of other sizes than its config.json says" in said
    assert [record.getMessage() for record in table.buffer] == []


@pytest.mark.parametrize("form", ["data=jsonl", "data.column=messages"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", BINARY * 9, "ach line must be a JSON object"),
        ("x.json", b'[{"prompt": "a"}, 5, [1]]', "Are its rows alike?"),
        ("x.parquet", b"PAR1garbage", "x.parquet' cannot be read"),
    ],
)
def test_data_that_is_none(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, words: str, form: str
) -> None:
    (root / name).write_bytes(content)
    given = ["generate", "target=local", f"target.path={root / 'target'}", "target.dtype=float32"]
    given += ["target.device=cpu", f"run.root={root / 'outputs'}", "run.name=new", form]
    assert main([*given, f"data.path={root / name}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said[said.rindex("headstart: ") :]


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (b'{"architectures": 5}', EMPTY, "is of no layout that we read"),
        (b'{"architectures": [5]}', EMPTY, "is of no layout that we read"),
        (b'{"architectures": ["LlamaForCausalLM"]}', b"", "i/model.safetensors"),
        (BINARY, b"", "i/config.json"),
    ],
)
def test_what_is_no_drafter_is_not_imported(
    root: Path, capsys: pytest.CaptureFixture[str], config: bytes, weights: bytes, words: str
) -> None:
    (root / "i").mkdir()
    (root / "i" / "config.json").write_bytes(config)
    (root / "i" / "model.safetensors").write_bytes(weights)
    refused(root, capsys, words, "import", f"import.source={root / 'i'}", "run.drafter=theirs")


def test_a_broken_pickle_and_a_checkpoint_of_our_own_are_not_imported(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "i").mkdir()
    (root / "i" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (root / "i" / "pytorch_model.bin").write_bytes(b"\x80\x04broken")
    words = "cannot be read as tensors alone (IndexError): it is damaged, or holds other objects."
    refused(root, capsys, words, "import", f"import.source={root / 'i'}", "run.drafter=theirs")
    own = f"import.source={(root / CONFIG).parent}"
    words = "is a checkpoint of Headstart's own and needs no import"
    refused(root, capsys, words, "import", own, "run.drafter=theirs")


@pytest.mark.parametrize(
    ("stage", "place", "more"),
    [
        ("generate", "outputs/c/generate", ["run.name=c"]),
        ("measure", "outputs/a/other", ["measure.name=other"]),
        ("audit", "outputs/a/audit", []),
        ("export", "outputs/a/export/medusa", []),
        ("tune", "outputs/a/tune/medusa", ["tune.drafter=medusa", f"tune.prompts={PROMPTS}"]),
        ("features", "store", ["head=medusa", "features.path={}/store"]),
        ("report", "out", ["report.out={}/out"]),
        ("import", "taken", ["import.source={}/exported", "import.out={}/taken/x"]),
    ],
)
def test_a_file_in_place_of_a_folder_is_named(
    root: Path, capsys: pytest.CaptureFixture[str], stage: str, place: str, more: list[str]
) -> None:
    write_report(example_report(), root / "outputs" / "a" / "measure" / "report.json")
    if stage == "import":
        assert main(command(root, "export", f"export.out={root / 'exported'}")) == 0
    if stage == "features":
        write_manifest(root / "outputs" / "a" / "generate", "generate", ANSWERS)
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).write_text("of somebody")
    given = [item.format(root) for item in more]
    named = {item.split("=")[0] for item in given}
    common = [item for item in command(root, stage)[1:] if item.split("=")[0] not in named]
    if stage == "report":
        common = [item for item in common if item.startswith("run.")]
    assert main([stage, *common, *given]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert place in said and "Traceback" not in said and "should not happen" not in said
    assert (root / place).read_text() == "of somebody"


def test_every_group_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "bech.seed=1"]) == 2
    said = capsys.readouterr().err
    named = said[said.index("Allowed: ") :].removeprefix("Allowed: ").rstrip(".\n").split(", ")
    assert len(named) > 20 and len(named) == len(set(named))
