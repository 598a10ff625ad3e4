"""Stage folders: provenance on record; the same command continues or skips, another is refused;
nothing is deleted by mistake."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from heads.api.errors import UserError
from inference.manifest import write_json
from scripts.config.fields import REPOSITORY
from scripts.config.schema import Settings, load_settings
from scripts.config.stage_configs import RunConfig
from scripts.config.stages import STAGES
from scripts.run.folder import (
    StageFolder,
    changes,
    named_file,
    open_folder,
    other_inputs,
    read_config,
    read_record,
)
from scripts.run.process import (
    is_main_process,
    say_what_debug_means,
    say_what_stays_embedded,
    this_session,
)
from scripts.run.prompts import prompt_files
from scripts.stages.loop.facts import LoopRecord
from scripts.stages.loop.plan import RoundPlan
from scripts.stages.refresh.record import RefreshRecord


def settings(run: RunConfig, **groups: Any) -> Settings:
    """Settings of a stage that reads `run` and whatever else is given as plain values."""
    return Settings(STAGES["report"], {"run": asdict(run), **groups}, {"head": "medusa"})


def test_a_folder_records_what_made_it(in_folder: Path) -> None:
    Path("input.json").write_text("{}")
    folder = open_folder(
        settings(RunConfig(seed=5), optim={"lr": 0.1}), Path("out"), [Path("input.json")]
    )
    assert not folder.complete
    record = json.loads(Path("out/run.json").read_text())
    assert record["state"] == "running"
    assert record["seed"] == 5
    assert list(record["inputs"]) == ["input.json"]
    session = record["sessions"][0]
    assert session["command"][0] == "headstart"
    assert {"torch", "transformers"} <= set(session["packages"])
    assert session["device"]["kind"] in ("cpu", "cuda")
    assert len(session["git"]["revision"]) == 40
    assert isinstance(session["git"]["diff"], str)
    assert read_config(Path("out"))["optim"] == {"lr": 0.1}
    assert not list(Path("out").glob("*.partial"))


def test_a_folder_records_defaults_too(in_folder: Path) -> None:
    given = load_settings(STAGES["train"], ["head=eagle3", "optim.lr=0.5"])
    open_folder(given, Path("out"))
    kept = read_config(Path("out"))
    assert kept == yaml.safe_load(yaml.safe_dump(given.with_defaults))
    assert kept["optim"]["eps"] == 1e-8  # in no YAML file
    assert kept["head"]["kind"] == "eagle3"
    assert kept["train"]["keep"] == given.train.keep
    (Path("out") / "part").write_text("x")  # the same settings are no change
    assert not open_folder(given, Path("out")).complete


def test_a_record_names_the_threads_and_the_device_that_the_stage_computes_with(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written before the process sets its threads, and where there is a GPU that the
    stage does not use."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some GPU")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    given = settings(RunConfig(threads=7), target={"device": "cpu"})
    found = open_folder(given, Path("out")).record.sessions[0].device
    assert (found["kind"], found["threads"]) == ("cpu", 7)
    found = (
        open_folder(settings(RunConfig(), target={"device": "auto"}), Path("other"))
        .record.sessions[0]
        .device
    )
    assert found == {"kind": "cuda", "name": "some GPU", "count": 1}


def test_another_stages_folder_is_refused_whatever_is_accepted(in_folder: Path) -> None:
    open_folder(settings(RunConfig()), Path("out")).finish()
    record = json.loads(Path("out/run.json").read_text())
    Path("out/run.json").write_text(json.dumps(record | {"stage": "train"}))
    for run in (RunConfig(), RunConfig(accept_changes=True)):
        with pytest.raises(
            UserError, match=r"'out' was written by stage 'train'; 'report' does not write into it"
        ):
            open_folder(settings(run), Path("out"), stage_decides=True)
    with pytest.raises(UserError, match="stage 'train' wrote it, not 'report'"):
        open_folder(settings(RunConfig(overwrite=True)), Path("out"))
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="holds files, but no record of stage 'report'"):
        open_folder(settings(RunConfig()), Path("mine"))


def test_the_same_settings_continue_and_then_skip(in_folder: Path) -> None:
    given = settings(RunConfig(), optim={"lr": 0.1})
    open_folder(given, Path("out"))
    again = open_folder(given, Path("out"))
    assert not again.complete
    assert len(again.record.sessions) == 2
    again.finish()
    assert open_folder(given, Path("out")).complete
    # skipping leaves no trace
    assert len(json.loads(Path("out/run.json").read_text())["sessions"]) == 2
    # a process that was killed when all was done may have left its file
    left = Path("out/.writer.json")
    left.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "token": "x"}))
    assert open_folder(given, Path("out")).complete
    assert not left.exists()


@pytest.mark.parametrize("complete", [False, True])
def test_other_settings_are_refused_by_name(in_folder: Path, complete: bool) -> None:
    folder = open_folder(
        settings(RunConfig(), optim={"lr": 0.1, "betas": [0.9, 0.95]}), Path("out")
    )
    Path("out/result").write_text("something")
    if complete:
        folder.finish()
    other = {"optim": {"lr": 0.2, "betas": [0.9, 0.95]}}
    with pytest.raises(UserError, match=r"optim\.lr was 0\.1, is 0\.2\. Choose another run\.name"):
        open_folder(settings(RunConfig(), **other), Path("out"))
    with pytest.raises(UserError, match=r"run\.seed was 0, is 1"):
        open_folder(
            settings(RunConfig(seed=1), optim={"lr": 0.1, "betas": [0.9, 0.95]}), Path("out")
        )
    continued = open_folder(settings(RunConfig(accept_changes=True), **other), Path("out"))
    assert continued.complete == complete
    if not complete:
        assert read_config(Path("out"))["optim"]["lr"] == 0.2


def test_accepted_changes_do_not_reach_a_complete_folder_which_is_said(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_folder(settings(RunConfig(), optim={"lr": 0.1}), Path("out"))
    Path("out/result").write_text("something")
    folder.finish()
    other = settings(RunConfig(accept_changes=True), optim={"lr": 0.2})
    assert open_folder(other, Path("out")).skip()
    said = " ".join(capsys.readouterr().out.split())
    assert "complete and stays as it is: optim.lr was 0.1, is 0.2" in said
    # a stage that decides by itself works on it
    assert not open_folder(other, Path("out"), stage_decides=True).complete


def test_a_target_with_other_weights_is_a_change(in_folder: Path) -> None:
    """As after fine-tuning in the same folder."""
    weights = Path("model/model.safetensors")
    weights.parent.mkdir()
    weights.write_bytes(b"first")
    given = load_settings(STAGES["audit"], ["target=local", "target.path=model"])
    folder = open_folder(given, Path("out"))
    Path("out/result").write_text("something")
    folder.finish()
    assert open_folder(given, Path("out")).complete
    weights.write_bytes(b"second")
    with pytest.raises(UserError, match="the target's weights have changed"):
        open_folder(given, Path("out"))
    assert not open_folder(given, Path("out"), stage_decides=True).complete
    # records of earlier versions do not say which weights they had
    record = json.loads(Path("out/run.json").read_text())
    weights.write_bytes(b"first")
    del record["target"]
    Path("out/run.json").write_text(json.dumps({**record, "state": "complete"}))
    weights.write_bytes(b"second")
    assert open_folder(given, Path("out")).complete


def test_where_figures_are_shown_may_change(in_folder: Path) -> None:
    """A tracker that is not installed, or not wanted any more, does not hold a training up."""
    for trackio in (True, False):
        given = {"kind": "medusa", "tracker": {"trackio": trackio}}
        open_folder(settings(RunConfig(), train=given), Path("out"))
        Path("out/result").write_text("something")
    assert read_config(Path("out"))["train"]["tracker"] == {"trackio": False}
    with pytest.raises(UserError, match=r"train\.kind was"):
        open_folder(settings(RunConfig(), train={"kind": "eagle"}), Path("out"))


def test_a_start_that_wrote_nothing_does_not_block_the_corrected_one(in_folder: Path) -> None:
    open_folder(settings(RunConfig(), optim={"lr": 0.1}), Path("out"))
    Path("out/log.jsonl").touch()
    assert not open_folder(settings(RunConfig(), optim={"lr": 0.2}), Path("out")).complete
    assert read_config(Path("out"))["optim"]["lr"] == 0.2


def test_changed_inputs_are_refused(in_folder: Path) -> None:
    Path("a.json").write_text("1")
    open_folder(settings(RunConfig()), Path("out"), [Path("a.json")])
    Path("out/result").write_text("something")
    Path("a.json").write_text("2")
    with pytest.raises(UserError, match=r"a\.json has changed"):
        open_folder(settings(RunConfig()), Path("out"), [Path("a.json")])


def test_a_stage_that_decides_itself_gets_the_changed_folder(in_folder: Path) -> None:
    open_folder(settings(RunConfig(), optim={"lr": 0.1}), Path("out")).finish()
    Path("out/result").write_text("something")
    assert open_folder(
        settings(RunConfig(), optim={"lr": 0.1}), Path("out"), stage_decides=True
    ).complete
    assert not open_folder(
        settings(RunConfig(), optim={"lr": 0.2}), Path("out"), stage_decides=True
    ).complete


def test_a_stage_that_is_repeated_holds_its_complete_folder_again(in_folder: Path) -> None:
    given, out = settings(RunConfig()), Path("out")
    open_folder(given, out).finish()
    (out / "result").write_text("of the first time")
    again = open_folder(given, out, repeats=True)
    assert not again.complete and again.held is not None
    record = read_record(out)
    assert record is not None and not record.complete and len(record.sessions) == 1
    again.finish()
    assert open_folder(given, out).complete


def test_a_stage_that_may_still_refuse_writes_its_record_itself(in_folder: Path) -> None:
    out, decides = Path("out"), {"stage_decides": True, "may_refuse": True}
    first, other = (settings(RunConfig(), optim={"lr": rate}) for rate in (0.1, 0.2))
    folder = open_folder(first, out, **decides)
    assert (out / "run.json").is_file(), "there is nothing that it could refuse"
    (out / "result").write_text("something")
    folder.finish()
    before = [(out / name).read_bytes() for name in ("run.json", "config.yaml")]
    refusing = open_folder(other, out, **decides)
    assert not refusing.complete
    assert before == [(out / name).read_bytes() for name in ("run.json", "config.yaml")]
    refusing.released()
    assert open_folder(first, out, **decides).complete
    accepting = open_folder(other, out, **decides)
    accepting.write()
    record = read_record(out)
    assert record is not None and not record.complete
    assert read_config(out)["optim"]["lr"] == 0.2
    accepting.finish()
    assert open_folder(other, out, **decides).complete


def test_overwrite_starts_again_but_deletes_only_our_folders(in_folder: Path) -> None:
    open_folder(settings(RunConfig(), optim={"lr": 0.1}), Path("out")).finish()
    Path("out/old.txt").write_text("old")
    fresh = open_folder(settings(RunConfig(overwrite=True), optim={"lr": 0.2}), Path("out"))
    assert not fresh.complete
    assert not Path("out/old.txt").exists()
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="is not a stage folder and is not deleted"):
        open_folder(settings(RunConfig(overwrite=True)), Path("mine"))
    assert Path("mine/thesis.txt").exists()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("SLURM_JOB_ID", "HEADSTART_RESTARTS"),
    ],
)
def test_a_launch_overwrites_once_however_often_it_is_restarted(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: str
) -> None:
    given = settings(RunConfig(overwrite=True))

    def begun(launch: str, restarts: str) -> bool:
        """Whether the work of the launch before is still there when this one has begun."""
        monkeypatch.setenv(name, launch)
        monkeypatch.setenv(count, restarts)
        open_folder(given, Path("out")).released()
        kept = Path("out/state").exists()
        Path("out/state").write_text("of an hour")
        return kept

    assert not begun("first", "0")
    assert begun("first", "1")
    assert not begun("first", "0"), "the same command by hand, in the same allocation"
    # its first start has ended before it came to this folder
    assert not begun("second", "1")
    assert begun("second", "2")


@pytest.mark.parametrize(("rank", "main"), [("", True), ("0", True), ("1", False)])
def test_a_rank_without_a_value_is_that_of_the_main_process(
    monkeypatch: pytest.MonkeyPatch, rank: str, main: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "")
    assert is_main_process() == main
    assert this_session(load_settings(STAGES["measure"], [])).processes == 1


@pytest.mark.parametrize(
    ("chosen", "said"), [("fast", True), ("cpu", False), ("[fast,cpu]", True), ("[]", False)]
)
def test_only_the_smallest_sizes_give_meaningless_numbers(
    capsys: pytest.CaptureFixture[str], chosen: str, said: bool
) -> None:
    say_what_debug_means(load_settings(STAGES["measure"], [f"debug={chosen}"]))
    assert ("debug=fast: a few training steps" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("", ""),
        ("target.path=mine", "target.dtype=float32 and the data of"),
        ("target.path=mine data.path=mine.jsonl", ": target.dtype=float32 of"),
        ("target.path=mine target.dtype=bfloat16", ": the data of"),
        ("target.path=mine target.dtype=bfloat16 data=jsonl data.path=mine.jsonl", ""),
        ("target=local target.path=mine data=jsonl data.path=mine.jsonl", ""),
        ("target=embedded target.path=mine", ""),
        ("experiment=own_model target.path=mine data.path=mine.jsonl", ""),
    ],
)
def test_a_model_of_ones_own_is_told_what_it_keeps_of_the_embedded_target(
    capsys: pytest.CaptureFixture[str], words: str, kept: str
) -> None:
    say_what_stays_embedded(load_settings(STAGES["generate"], words.split()))
    said = capsys.readouterr().err
    assert kept in said and bool(said) == bool(kept)


def test_only_the_main_process_writes(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    open_folder(settings(RunConfig()), Path("out")).finish()
    assert not Path("out").exists()


def test_a_broken_record_is_one_clear_error(in_folder: Path) -> None:
    Path("out").mkdir()
    Path("out/run.json").write_text('{"format": 1')
    with pytest.raises(UserError, match=r"run\.json' is not readable as JSON"):
        open_folder(settings(RunConfig()), Path("out"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds None in place of keys"),
        (b"5", "holds 5 in place of keys"),
        (b"[[1]]", "in place of keys"),
        (b"run: {name: a\n  x", "no YAML of plain values"),
        (b"a: !!python/object/apply:os.system [ls]", "no YAML of plain values"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"a\0b: 1", "no YAML of plain values"),
        (b"run: 5", r"config\.yaml': run is broken: it holds 5 in place of keys"),
        (b"run: [1]", r"config\.yaml': run is broken"),
        (b'run: {name: "a\\0b"}', "holds a character that no text may"),
        (b"run: {name: 1.5}", r"made with other settings"),
        (b"run: {}\nhead: 5", r"config\.yaml': head is broken: it holds 5"),
        (b"run: {}\nhead: {kind: [1]}", "made with other settings"),
        (b'run: {}\nhead: {kind: "\\0"}', "made with other settings"),
        (b"run: {}\noptim: 5", r"config\.yaml': optim is broken: it holds 5"),
        (b'run: {}\ntarget: {path: "a\\0b"}', "made with other settings"),
    ],
)
def test_an_edited_config_is_one_clear_error(in_folder: Path, content: bytes, words: str) -> None:
    stage = load_settings(STAGES["train"], ["debug=fast"])
    open_folder(stage, Path("out"))
    Path("out/result").write_text("of an hour")
    Path("out/config.yaml").write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_folder(stage, Path("out"))
    assert Path("out/result").read_text() == "of an hour"


@pytest.mark.parametrize("way", ["cut between two keys", "cut in the seal", "another number"])
def test_a_config_that_is_still_yaml_is_found_damaged(in_folder: Path, way: str) -> None:
    given = settings(RunConfig(), optim={"lr": 1e-3, "name": "adamw"})
    open_folder(given, Path("out")).released()
    Path("out/result").write_text("of an hour")
    file = Path("out/config.yaml")
    whole = file.read_bytes()
    if way == "another number":
        file.write_bytes(whole.replace(b"0.001", b"0.002"))
    else:
        file.write_bytes(whole[: whole.index(b"  name: adamw") if "keys" in way else -9])
    assert isinstance(yaml.safe_load(file.read_text()), dict)
    with pytest.raises(UserError, match=r"config\.yaml' is damaged: .* Restore it, or choose"):
        open_folder(given, Path("out"))
    file.write_bytes(whole)
    assert not open_folder(given, Path("out")).complete  # not refused


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", r"run\.json' is not readable as JSON"),
        (b"[1]", r"run\.json' is broken: it holds \[1\] in place of keys"),
        (
            b'{"format": 1, "stage": "report", "inputs": {"a\\u0000b": "x"}}',
            "holds a character that no text",
        ),
        (b'{"format": 1, "stage": "report", "inputs": 5}', "run.json.inputs: expected keys"),
    ],
)
def test_an_edited_record_is_one_clear_error(in_folder: Path, content: bytes, words: str) -> None:
    open_folder(settings(RunConfig()), Path("out")).finish()
    Path("out/run.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_folder(settings(RunConfig()), Path("out"))


def test_settings_survive_the_round_trip_through_yaml(in_folder: Path) -> None:
    values = {"optim": {"lr": 1e-05, "betas": [0.9, 0.95], "name": "1e3", "none": None, "on": True}}
    given = settings(RunConfig(), **values)
    open_folder(given, Path("out"))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["optim"] == values["optim"]
    assert not open_folder(given, Path("out")).complete  # not refused


@pytest.mark.parametrize("name", ["a/b", "..", "", "a\\b"])
def test_a_run_name_is_a_plain_folder_name(name: str) -> None:
    with pytest.raises(UserError, match=r"run\.name: .* must be a plain folder name"):
        RunConfig(name=name)


# Folders of earlier versions

EARLIER = Path(__file__).with_name("earlier")
"""Files of a round's training and of its loop, written before settings were handed on as
objects."""
LOOP = ["debug=fast", "experiment=embedded_loop", "head=eagle3", "run.name=r", "train.max_steps=4"]
LOOP += ["train.micro_batch=2", "decode.depth=3"]  # what debug=fast set then
# the recipe's then
LOOP += ["optim=adamw", "train.save_every=20", "engine.precision=bfloat16", "head.initial_std=0"]


def test_a_folder_of_an_earlier_version_is_continued_and_not_refused(in_folder: Path) -> None:
    folder = Path("outputs/r/round-1/train/eagle3")
    folder.mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        text = (EARLIER / name).read_text().replace("@REPOSITORY@", str(REPOSITORY))
        (folder / name).write_text(text)
    (folder / "best").write_text("something")
    record = read_record(folder)
    assert record is not None and record.complete and record.sessions[0].packages["torch"]
    plan = RoundPlan(load_settings(STAGES["loop"], LOOP))
    start = LoopRecord.read(EARLIER).rounds[1].start
    step = plan.training_step(1, Path("outputs/r/round-1/feedback"), start, on_policy=False)
    assert changes(folder, record, step.settings, record.inputs) == []
    other = plan.training_step(1, Path("outputs/r/round-1/feedback"), "elsewhere", on_policy=False)
    assert changes(folder, record, other.settings, record.inputs) == [
        f"train.refresh.init_from was '{start}', is 'elsewhere'"
    ]


def test_a_loop_file_of_an_earlier_version_is_read_and_written_alike(in_folder: Path) -> None:
    record = LoopRecord.read(EARLIER)
    assert len(record.rounds) == 3 and record.rounds[1].answers == 1080
    record.write(Path())
    assert json.loads(Path("loop.json").read_text()) == json.loads(
        (EARLIER / "loop.json").read_text()
    )


def test_a_refresh_file_of_an_earlier_version_is_read_and_written_alike(in_folder: Path) -> None:
    record = RefreshRecord.read(EARLIER)
    assert (record.ended_by, record.cost.answers) == ("goal", 32)
    record.write(Path())
    written, before = Path("refresh.json").read_text(), (EARLIER / "refresh.json").read_text()
    assert written == before


def test_a_run_that_was_moved_or_copied_continues(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs are compared by content, those of its own by their place in it."""
    place = Path("outputs/default")
    write_json(place / "generate" / "manifest.json", {"format": 1, "stage": "generate"})
    Path("prompts.jsonl").write_text("one")

    def opened(root: Path) -> StageFolder:
        run = RunConfig(root=str(root / "outputs"))
        inputs = [run.directory / "generate" / "manifest.json", root / "prompts.jsonl"]
        return open_folder(settings(run), run.directory / "train" / "medusa", inputs)

    folder = opened(Path())
    assert list(folder.record.inputs) == ["../../generate/manifest.json", "prompts.jsonl"]
    (place / "train" / "medusa" / "result").write_text("something")
    folder.released()
    Path("elsewhere").mkdir()
    shutil.copytree("outputs", "elsewhere/outputs")
    shutil.copy("prompts.jsonl", "elsewhere")
    monkeypatch.chdir("/")
    moved = in_folder / "elsewhere"
    opened(moved).finish()
    assert opened(moved).complete
    record = read_record(moved / "outputs" / "default" / "train" / "medusa")
    assert record is not None
    found = named_file("../../generate/manifest.json", moved / "outputs/default/train/medusa")
    assert found == moved / "outputs" / "default" / "generate" / "manifest.json"
    (moved / "prompts.jsonl").write_text("two")
    with pytest.raises(UserError, match=r"prompts\.jsonl has changed"):
        opened(moved)


def test_records_of_earlier_versions_name_inputs_as_seen_from_where_the_command_ran() -> None:
    before = {"outputs/a/generate/manifest.json": "1", "outputs/a/train/x/best/w": "2"}
    after = {"../../generate/manifest.json": "1", "../train/x/best/w": "2"}
    assert other_inputs(before, after) == []
    assert other_inputs(before, after | {"../train/x/best/w": "3"}) == ["../train/x/best/w"]
    assert other_inputs(before, {"../../generate/manifest.json": "1"}) == [
        "outputs/a/train/x/best/w"
    ]


def test_the_files_of_prompts_are_inputs(in_folder: Path) -> None:
    assert prompt_files("", "org/dataset", "missing.jsonl") == []
    Path("set").mkdir()
    for name in ("set/b.jsonl", "set/a.jsonl", "set/notes.md", "c.jsonl"):
        Path(name).write_text("{}")
    found = prompt_files("c.jsonl", "set", "set/a.jsonl")
    assert found == [Path("c.jsonl"), Path("set/a.jsonl"), Path("set/b.jsonl")]


def test_other_servers_are_no_other_settings(in_folder: Path) -> None:
    """A training may go on with another server in the place of one that is gone."""

    def opened(**features: Any) -> StageFolder:
        return open_folder(settings(RunConfig(), features=features), Path("out"))

    folder = opened(servers=[], format="bf16")
    (folder.path / "result").write_text("something")
    folder.released()
    opened(servers=["http://other:8000"], format="bf16", retries=9).released()
    with pytest.raises(UserError, match=r"features\.format was 'bf16', is 'fp32'"):
        opened(servers=["http://other:8000"], format="fp32")


def test_a_round_is_moved_with_the_rounds_that_it_reads(in_folder: Path) -> None:
    def opened(run: str, drafter: str) -> StageFolder:
        own = RunConfig(root=run, name="round-1")
        given = settings(own, train={"refresh": {"init_from": drafter}})
        return open_folder(given, own.directory / "train" / "medusa")

    folder = opened("outputs/a", "outputs/a/round-0/train/medusa/best")
    (folder.path / "result").write_text("something")
    folder.released()
    Path("outputs/a").rename("outputs/b")
    opened("outputs/b", "outputs/b/round-0/train/medusa/best").released()
    with pytest.raises(UserError, match=r"train\.refresh\.init_from was"):
        opened("outputs/b", "outputs/b/round-2/train/medusa/best")


def test_what_is_complete_may_lie_where_nothing_can_be_written(in_folder: Path) -> None:
    open_folder(settings(RunConfig()), Path("out")).finish()
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    assert open_folder(settings(RunConfig()), Path("out")).complete
    assert {path: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before
    assert not Path("out/.writer.json").exists()


def test_settings_with_paths_are_compared_by_what_they_name(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file seen from another folder, and a file of a run that was moved."""

    def opened(root: Path, prompts: list[str], target: str) -> StageFolder:
        run = RunConfig(root=str(root))
        given = settings(run, train={"prompts": prompts}, target={"path": target})
        return open_folder(given, run.directory / "train" / "medusa")

    folder = opened(Path("outputs"), ["p.jsonl", "outputs/default/generate/v.jsonl"], "t/tiny")
    (folder.path / "result").write_text("something")
    folder.released()
    Path("outputs").rename("moved")
    Path("other").mkdir()
    monkeypatch.chdir("other")
    own = str(in_folder / "moved" / "default" / "generate" / "v.jsonl")
    opened(Path("../moved"), ["../p.jsonl", own], "../t/tiny").released()
    with pytest.raises(UserError, match=r"target\.path was '\.\./t/tiny', is 't/tiny'"):
        opened(Path("../moved"), ["../p.jsonl", own], "t/tiny")
