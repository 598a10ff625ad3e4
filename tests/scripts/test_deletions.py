"""Commands that delete or replace a folder: only their own, whatever name or place they are
given."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.decoding.decode_file import require_tuned
from inference.decoding.loading import load_drafter
from inference.integrity import require_unchanged
from inference.manifest import file_entry, write_json, write_manifest
from inference.report.model import write_report
from inference.staleness.reference import reference_path
from scripts.cli import main
from scripts.config.stages import STAGES
from scripts.run.drafters import at, load
from scripts.stages.loop.rounds import is_copy
from scripts.tools.common import PROMPTS
from tests.inference.example_report import example_report
from tests.inference.export.ground import load_target, save, save_target
from tests.inference.test_folders import contents, recorded
from train.data.ingest import require_own_input

ANSWERS = {"target": {}, "counts": {}, "shards": []}
"""What a manifest of answers has at least."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a trained drafter, its answers and a measurement, as the stages leave them."""
    root = tmp_path_factory.mktemp("made")
    target = load_target(save_target(root / "target"))
    run = root / "outputs" / "a"
    save(target, "medusa", run / "train" / "medusa" / "best")
    for stage, folder in (
        ("train", "train/medusa"),
        ("generate", "generate"),
        ("measure", "measure"),
    ):
        recorded(run / folder, stage)
    recorded(root / "outputs" / "b" / "train" / "eagle3", "train")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it, with somebody's thesis beside."""
    shutil.copytree(made, tmp_path / "r")
    (tmp_path / "r" / "p" / "sub").mkdir(parents=True)
    (tmp_path / "r" / "p" / "sub" / "thesis.txt").write_text("ten years")
    return tmp_path / "r"


def command(root: Path, stage: str, *arguments: str) -> list[str]:
    groups = STAGES[stage].groups
    return [
        stage,
        *(f"{group}=embedded" for group in ("data", "bench") if group in groups),
        "target=local",
        f"target.path={root / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        f"run.root={root / 'outputs'}",
        "run.name=a",
        *arguments,
    ]


def refused(
    root: Path, capsys: pytest.CaptureFixture[str], words: str, stage: str, *arguments: str
) -> None:
    """Run the command; it must end with an error for people and leave every file as it was."""
    before = contents(root)
    assert main(command(root, stage, *arguments)) == 2
    said = capsys.readouterr().err
    assert words in " ".join(said.split()) and "Traceback" not in said
    assert contents(root) == before


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize("name", ["train/medusa", "..", ".", "../b", "/elsewhere/x"])
@pytest.mark.parametrize("stage", ["measure", "audit", "watch"])
def test_a_name_with_a_path_in_it_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], stage: str, name: str, overwrite: str
) -> None:
    words = f"{stage}.name: '{name}' must be a plain folder name"
    refused(root, capsys, words, stage, f"{stage}.name={name}", f"run.overwrite={overwrite}")


@pytest.mark.parametrize("name", ["export", "train", "generate", "push"])
def test_a_measurement_is_not_called_as_another_stages_folder(
    root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = f"'{name}' is the folder of another stage in a run"
    refused(root, capsys, words, "measure", f"measure.name={name}")
    refused(root, capsys, words, "loop", f"+loop.measures={{{name}: []}}")


@pytest.mark.parametrize(
    ("stage", "override", "key"),
    [
        ("loop", "+loop.measures={../b: []}", "loop.measures"),
        ("loop", "+loop.sweep={../b: {rates: [0.1]}}", "loop.sweep"),
        ("train", "run.drafter=../measure", "run.drafter"),
        ("measure", "run.name=..", "run.name"),
        ("pull", "pull.what=../../b", "pull.what"),
        ("import", "import.source=/", "run.drafter"),
    ],
)
def test_every_other_name_of_a_folder_is_one_component(
    root: Path, capsys: pytest.CaptureFixture[str], stage: str, override: str, key: str
) -> None:
    before = contents(root)
    common = [] if stage == "pull" else command(root, stage)[1:]
    assert (
        main(
            [
                stage,
                *(item for item in common if not item.startswith(override.split("=")[0] + "=")),
                override,
            ]
        )
        == 2
    )
    assert (
        f"{key}: '" in (said := " ".join(capsys.readouterr().err.split()))
        and "must be a plain folder name" in said
    )
    assert contents(root) == before


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize(
    ("name", "words"), [("generate", "stage 'generate'"), ("train", "a/train' ")]
)
@pytest.mark.parametrize("stage", ["measure", "audit"])
def test_another_stages_folder_is_neither_deleted_nor_written_into(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    name: str,
    words: str,
    overwrite: str,
) -> None:
    more = ["run.accept_changes=true"] if overwrite == "false" else []
    if stage == "measure":  # these names are refused whatever the folders hold
        words = f"'{name}' is the folder of another stage in a run"
    refused(root, capsys, words, stage, f"{stage}.name={name}", f"run.overwrite={overwrite}", *more)


def test_a_measurement_that_holds_a_training_is_not_deleted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that was called train before anything was trained."""
    recorded(root / "outputs" / "a" / "train", "audit")
    words = "medusa' in it was written by stage 'train'"
    refused(root, capsys, words, "audit", "audit.name=train", "run.overwrite=true")


def test_an_export_replaces_an_export_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "is not a stage folder and is not deleted"
    refused(root, capsys, words, "export", f"export.out={root / 'p'}", "export.overwrite=true")
    refused(
        root,
        capsys,
        "is there already",
        "export",
        f"export.out={root / 'p' / 'sub' / 'thesis.txt'}",
    )
    refused(
        root,
        capsys,
        "not a folder but a link or a file",
        "export",
        f"export.out={root / 'p' / 'sub' / 'thesis.txt'}",
        "export.overwrite=true",
    )
    measured = root / "outputs" / "a" / "measure"
    refused(
        root,
        capsys,
        "stage 'measure' wrote it",
        "export",
        f"export.out={measured}",
        "export.overwrite=true",
    )
    out = root / "exported"
    shutil.copytree(root / "p", root / "exported.partial")
    assert main(command(root, "export", f"export.out={out}")) == 0
    assert (root / "exported.partial" / "sub" / "thesis.txt").read_text() == "ten years"
    (out / "model.safetensors").write_text("damaged")  # an export's own file, so it may go
    assert main(command(root, "export", f"export.out={out}", "export.overwrite=true")) == 0
    assert (out / "model.safetensors").stat().st_size > 100
    (out / "notes.txt").write_text("mine")
    assert main(command(root, "export", f"export.out={out}", "export.overwrite=true")) == 0
    assert not (out / "notes.txt").exists()
    assert [path.read_text() for path in root.glob("exported.aside-*/*")] == ["mine"]
    assert not list(root.glob("exported.*-*.partial"))


def test_an_import_replaces_an_import_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(root, "export", f"export.out={root / 'exported'}")) == 0
    source = f"import.source={root / 'exported'}"
    words = "is not a stage folder and is not deleted"
    refused(root, capsys, words, "import", source, "run.drafter=medusa", "import.overwrite=true")
    refused(
        root, capsys, words, "import", source, f"import.out={root / 'p'}", "import.overwrite=true"
    )
    assert main(command(root, "import", source, "run.drafter=theirs")) == 0
    best = root / "outputs" / "a" / "train" / "theirs" / "best"
    assert json.loads((best / "manifest.json").read_text())["stage"] == "import"
    (best / "decode.yaml").write_text("format: 1\n")  # tuning's, about these weights
    assert main(command(root, "import", source, "run.drafter=theirs", "import.overwrite=true")) == 0
    assert sorted(path.name for path in best.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    (best / "sub").mkdir()
    (best / "sub" / "notes.txt").write_text("mine")
    assert main(command(root, "import", source, "run.drafter=theirs", "import.overwrite=true")) == 0
    assert [path.read_text() for path in best.parent.glob("best.aside-*/sub/*")] == ["mine"]


def test_an_imported_drafter_is_not_trained_over(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(root, "export", f"export.out={root / 'exported'}")) == 0
    assert (
        main(command(root, "import", f"import.source={root / 'exported'}", "run.drafter=theirs"))
        == 0
    )
    capsys.readouterr()
    write_manifest(root / "outputs" / "a" / "generate", "generate", ANSWERS)
    for more in ([], ["run.overwrite=true"]):
        refused(root, capsys, "theirs'", "train", "head=medusa", "run.drafter=theirs", *more)


def test_files_of_people_are_not_replaced_by_tuning_watching_or_generating(tmp_path: Path) -> None:
    (tmp_path / "decode.yaml").write_text("# my own notes\n")
    (tmp_path / "watch.json").write_text('{"stage": "play"}')
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "rows-00000.parquet").touch()
    require_own_input(tmp_path / "input")
    (tmp_path / "input" / "thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="was not written by `headstart tune`"):
        require_tuned(tmp_path)
    with pytest.raises(UserError, match="is no reference, so it is not replaced"):
        reference_path(tmp_path / "watch.json")
    with pytest.raises(UserError, match="was not written by generation"):
        require_own_input(tmp_path / "input")
    (tmp_path / "watch.json").write_text('{"stage": "watch"}')
    reference_path(tmp_path / "watch.json")
    reference_path(tmp_path / "nowhere.json")
    require_tuned(tmp_path / "nowhere")


def test_rounds_replace_only_their_own_copy(tmp_path: Path) -> None:
    training = recorded(tmp_path / "train" / "medusa", "train")
    assert not is_copy(training, tmp_path)
    shutil.copy(Path(__file__).with_name("earlier") / "loop.json", tmp_path)
    assert not is_copy(training, tmp_path)
    write_json(
        training / "run.json",
        {"format": 1, "stage": "train", "copied_from": "round-1/train/medusa"},
    )
    assert is_copy(training, tmp_path)


def test_a_report_replaces_no_other_measurement_and_no_text_of_people(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = root / "outputs" / "a"
    write_report(example_report(), run / "measure" / "report.json")
    write_report(example_report(), recorded(run / "other", "measure") / "report.json")
    (root / "p" / "report.md").write_text("# My own report\n")
    common = [f"run.root={root / 'outputs'}", "run.name=a", f"report.reports=[{run / 'measure'}]"]
    for name in ("report.json", "speedup.png"):
        (root / name).mkdir()
        (root / name / name).write_text("of people")
    before = contents(root)
    for out, words in (
        (root / "p", "was not written by `headstart report`"),
        (run / "other", "was written by stage 'measure'"),
        (root / "report.json", "has no report.md of ours, but report.json, which would be"),
        (root / "speedup.png", "has no report.md of ours, but speedup.png, which would be"),
    ):
        assert main(["report", *common, f"report.out={out}"]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert contents(root) == before
    for _ in range(2):  # a report of its own is replaced
        assert main(["report", *common]) == 0
    assert (run / "report.md").is_file() and (run / "report.json").is_file()


def test_a_flipped_bit_in_a_trained_checkpoint_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = root / "outputs" / "a" / "train" / "medusa"
    weights = training / "best" / "model.safetensors"
    (training / "run.json").unlink()
    files = [file_entry(training, f"best/{name}") for name in ("config.json", weights.name)]
    write_manifest(training, "train", {"checkpoint": "best", "files": files})
    (training / "best" / "decode.yaml").write_text("format: 1\n")  # of a later stage
    require_unchanged(training / "best")
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    words = "best/model.safetensors' was changed or damaged since it was written"
    refused(root, capsys, words, "export", f"export.out={root / 'x'}")
    with pytest.raises(UserError, match=words):
        load(at(training), load_target(root / "target"))
    with pytest.raises(UserError, match=words):
        load_drafter(training, load_target(root / "target"))
    for damage in (b"[" * 100_000, b"\xff", b"[]"):
        (training / "manifest.json").write_bytes(damage)
        with pytest.raises(UserError, match=r"manifest\.json' is (not readable as JSON|broken)"):
            require_unchanged(training / "best")


@pytest.mark.parametrize("linked", ["best", "medusa"])
def test_a_link_in_the_place_of_a_checkpoint_hides_no_damage_and_is_not_published(
    root: Path, capsys: pytest.CaptureFixture[str], linked: str
) -> None:
    training = root / "outputs" / "a" / "train" / "medusa"
    weights = training / "best" / "model.safetensors"
    (training / "run.json").unlink()
    files = [file_entry(training, f"best/{name}") for name in ("config.json", weights.name)]
    write_manifest(training, "train", {"checkpoint": "best", "files": files})
    place = training if linked == "medusa" else training / "best"
    place.rename(root / "elsewhere")
    place.symlink_to(root / "elsewhere")
    assert at(training).name == at(training / "best").name == "medusa"
    before = contents(root)
    push = [f"run.root={root / 'outputs'}", "run.name=a", "push.repo=me/x", "push.license=mit"]
    assert main(["push", *push]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{linked}' is a link, which is not followed to what is published" in said
    assert contents(root) == before
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    words = {"best": "lies outside its folder", "medusa": "was changed or damaged since it was"}
    refused(root, capsys, words[linked], "export", f"export.out={root / 'x'}")


def test_a_changed_export_is_not_imported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = root / "exported"
    assert main(command(root, "export", f"export.out={out}")) == 0
    capsys.readouterr()
    weights = out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    given = [f"import.source={out}", "run.drafter=theirs"]
    words = "model.safetensors' was changed or damaged since it was written"
    refused(root, capsys, words, "import", *given)
    (out / "config.json").unlink()
    refused(root, capsys, "config.json", "import", *given)


@pytest.mark.parametrize(
    ("stage", "place", "more"),
    [
        ("generate", "generate/.writer.json", []),
        ("train", "train/medusa/.writer.json", ["head=medusa"]),
        ("measure", "measure/.writer.json", []),
        ("audit", "audit/.writer.json", []),
        ("tune", "tune/medusa/.writer.json", [f"tune.prompts={PROMPTS}"]),
        ("report", ".report.writer.json", []),
        ("loop", ".loop.writer.json", ["head=medusa"]),
        ("export", "export/medusa/.vllm.writer.json", []),
        ("import", "train/theirs/.best.writer.json", ["run.drafter=theirs"]),
        ("push", "push/.medusa.writer.json", ["push.repo=someone/x"]),
    ],
)
def test_a_second_process_is_refused_by_every_stage_that_writes(
    root: Path, capsys: pytest.CaptureFixture[str], stage: str, place: str, more: list[str]
) -> None:
    run = root / "outputs" / "a"
    write_manifest(run / "generate", "generate", ANSWERS)
    write_report(example_report(), run / "measure" / "report.json")
    if stage == "import":
        assert main(command(root, "export", f"export.out={root / 'exported'}")) == 0
        more = [*more, f"import.source={root / 'exported'}"]
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    other = {"host": socket.gethostname(), "pid": os.getppid(), "started": "then", "token": "x"}
    (run / place).write_text(json.dumps(other))
    given = (
        [*more, "run.accept_changes=true"] if stage in ("train", "generate", "measure") else more
    )
    words = f"process {os.getppid()} on {socket.gethostname()} since then"
    common = [f"run.root={root / 'outputs'}", "run.name=a"] if stage in ("report", "push") else None
    if common is None:
        refused(root, capsys, words, stage, *given)
        return
    before = contents(root)
    assert main([stage, *common, *given]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert contents(root) == before
