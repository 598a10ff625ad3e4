"""Pushing: against a stand-in of the Hub on loopback, when everything works and when it does
not."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from rich.console import Console

from heads.api.errors import UserError
from inference.decoding.decode_file import NUMBERS, read_tuned, write_tuned
from inference.decoding.draft import Draft
from inference.export.hub import private
from inference.export.hub.config import PushConfig
from inference.export.hub.folder import Sources, check_folder, name_start, read_export
from inference.export.hub.push import push, upload
from inference.folders import EXPORT_FILE
from inference.manifest import file_entry, file_sha256, write_manifest
from inference.report.model import read_report
from inference.target.hardware import Device
from tests.inference.example_report import BLOCKS, LOOP, profile_point
from tests.inference.export.hub.example_folder import (
    CONFIG,
    build,
    write_checkpoint,
    write_export,
    write_measured,
)
from tests.inference.export.hub.stand_in import GOOD_TOKEN, READ_TOKEN, HubStandIn, loopback_hub
from tests.loopback import free_port

REPO = "someone/eagle3-for-target"
FILES = [
    "README.md",
    "acceptance.png",
    "by_context.png",
    "config.json",
    "manifest.json",
    "model.safetensors",
    "report.json",
    "speedup.png",
    "step_time.png",
]
REAL = PushConfig(repo=REPO, license="apache-2.0", dry_run=False)
hub = pytest.fixture(loopback_hub)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint folder, report.json)."""
    folder = tmp_path_factory.mktemp("measured")
    return folder / "best", write_measured(folder, write_checkpoint(folder / "best"))


@pytest.fixture(scope="module")
def built(measured: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(measured[0], [measured[1]], tmp_path_factory.mktemp("built") / "hub", REAL)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(hub: HubStandIn, folder: Path, config: PushConfig = REAL) -> str:
    """The message of an upload that fails; the repository must hold nothing, the token must not be
    told."""
    with pytest.raises(UserError) as caught:
        upload(config, folder)
    assert not any(hub.repos.values()), "something was published"
    message = str(caught.value)
    assert "hf_" not in message and "\n" not in message
    return message


def test_a_dry_run_builds_and_tells_but_sends_nothing(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")  # a dry run needs none
    console = Console(width=120)
    with console.capture() as capture:
        result = push(
            PushConfig(repo=REPO),
            Sources(measured[0], [measured[1]], {}),
            tmp_path / "hub",
            console=console,
        )
    shown = capture.get()
    assert hub.requests == []
    assert sorted(result.files) == FILES
    assert result.files["model.safetensors"] == (measured[0] / "model.safetensors").stat().st_size
    assert result.url == ""
    for text in (
        *FILES,
        REPO,
        hub.url,
        "created (private) if it does not exist",
        "Dry run: nothing was sent",
    ):
        assert text in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hub"
    ]  # no half-built folder beside it


def test_a_push_puts_the_whole_folder_online_in_one_commit(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    result = push(
        REAL, Sources(measured[0], [measured[1]], {}), tmp_path / "hub", console=Console(quiet=True)
    )
    assert hub.repos[REPO] == contents(tmp_path / "hub")
    assert hub.repos[REPO]["model.safetensors"] == (measured[0] / "model.safetensors").read_bytes()
    assert hub.visibility[REPO] == "private"
    assert result.url.startswith(f"{hub.url}/{REPO}/commit/")
    assert sum("/commit/" in request for request in hub.requests) == 1
    assert "/commit/" in hub.requests[-1]


def test_pushing_again_sends_no_large_file_twice(hub: HubStandIn, built: Path) -> None:
    upload(REAL, built)
    before = hub.uploads_started
    upload(REAL, built)
    assert hub.uploads_started == before > 0


@pytest.mark.parametrize("token", ["hf_" + "w" * 34, "not even a token"])
def test_a_wrong_token(
    hub: HubStandIn,
    built: Path,
    token: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with caplog.at_level(logging.DEBUG):
        message = refused(hub, built)
    assert (
        "does not accept the access token" in message and "Invalid username or password" in message
    )
    assert token not in message + caplog.text
    assert REPO not in hub.repos


def test_a_token_that_may_not_write(
    hub: HubStandIn, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    message = refused(hub, built)
    assert f"has no write access to '{REPO}'" in message and "don't have the rights" in message


def test_no_token(hub: HubStandIn, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "there is no Hub access token" in refused(hub, built)
    assert hub.requests == []


def test_a_repository_that_must_exist_but_does_not(hub: HubStandIn, built: Path) -> None:
    message = refused(hub, built, PushConfig(repo=REPO, create=False, dry_run=False))
    assert f"there is no repository '{REPO}'" in message and "push.create=true" in message


def test_an_upload_that_is_cut_off_publishes_nothing_and_can_be_repeated(
    hub: HubStandIn, built: Path
) -> None:
    hub.cut_uploads = True
    before = contents(built)
    message = refused(hub, built)
    assert "the connection" in message and "Push again" in message
    assert hub.uploads_started > 1  # it was retried before giving up
    assert not any("/commit/" in request for request in hub.requests)
    assert contents(built) == before
    hub.cut_uploads = False
    upload(REAL, built)
    assert hub.repos[REPO] == before


@pytest.mark.parametrize("place", ["/commit/", "/preupload/", "info/lfs", "repos/create"])
def test_a_hub_that_fails_publishes_nothing(hub: HubStandIn, built: Path, place: str) -> None:
    hub.failures[place] = 503
    message = refused(hub, built)
    assert (
        "failed with HTTP 503" in message
        and "the fault is on its side" in message
        and "Push again" in message
    )
    hub.failures.clear()
    upload(REAL, built)
    assert hub.repos[REPO] == contents(built)


def test_someone_else_pushed_meanwhile(hub: HubStandIn, built: Path) -> None:
    hub.failures["/commit/"] = 412
    assert "changed by someone else" in refused(hub, built)


def test_a_card_that_the_hub_does_not_take(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    config = PushConfig(repo=REPO, license="nonsense", dry_run=False)
    folder = build(measured[0], [measured[1]], tmp_path / "hub", config)
    assert '"license" must be one of the known ones' in refused(hub, folder, config)


def test_something_that_is_no_hub(hub: HubStandIn, built: Path) -> None:
    hub.no_json = True
    assert "does not answer like a Hub" in refused(hub, built)


def test_nobody_listens(hub: HubStandIn, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError, match=f"the connection to {address} broke"):
        upload(REAL, built)


def test_offline_mode_is_named(
    hub: HubStandIn, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert "offline mode" in refused(hub, built)


def test_the_environment_alone_decides_where_a_push_goes(hub: HubStandIn, built: Path) -> None:
    """A fresh process, as the command line is one: HF_ENDPOINT and HF_TOKEN, nothing else."""
    code = (
        "import sys; from pathlib import Path; from inference.export.hub.config import "
        "PushConfig; from inference.export.hub.push import upload; "
        "print(upload(PushConfig(repo=sys.argv[1]), Path(sys.argv[2])))"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }
    done = subprocess.run(
        [sys.executable, "-c", code, REPO, str(built)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hub.repos[REPO] == contents(built)
    assert GOOD_TOKEN not in done.stdout + done.stderr


# What is not even built


def test_a_drafter_without_a_measured_report_is_refused(
    measured: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no measured report"):
        build(measured[0], [], tmp_path / "hub", REAL)
    with pytest.raises(UserError, match=r"holds no report\.json"):
        build(measured[0], [tmp_path], tmp_path / "hub", REAL)
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_other_weights_is_refused(measured: tuple[Path, Path], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "retrained", seed=1)
    with pytest.raises(
        UserError, match=r"did not measure this drafter.*it measured: eagle3, ngram"
    ):
        build(tmp_path / "retrained", [measured[1]], tmp_path / "hub", REAL)
    assert not (tmp_path / "hub").exists()


def test_a_report_with_another_target_is_refused(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "best")
    report = write_measured(tmp_path, digest, target={"id": "someone/other", "revision": "fff"})
    with pytest.raises(
        UserError,
        match=r"measured with target 'someone/other' \(revision fff\), but the drafter belongs",
    ):
        build(tmp_path / "best", [report], tmp_path / "hub", REAL)


def test_weights_that_changed_after_building_are_refused(
    hub: HubStandIn, built: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    for name, content in contents(built).items():
        (folder / name).write_bytes(content)
    write_checkpoint(folder, seed=1)
    assert "did not measure this drafter" in refused(hub, folder)
    (folder / "report.json").unlink()
    assert "lacks a measured report" in refused(hub, folder)
    assert hub.requests == []


def test_a_drafter_that_changed_the_text_is_refused_unless_labelled(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "best")
    report = write_measured(tmp_path, digest, {"lossless": {"identical": 61, "mismatches": 3}})
    with pytest.raises(UserError, match="3 measured sequences differ"):
        build(tmp_path / "best", [report], tmp_path / "hub", REAL)
    labelled = PushConfig(repo=REPO, allow_mismatches=True)
    folder = build(tmp_path / "best", [report], tmp_path / "hub", labelled)
    assert "**Not lossless.** 3 measured sequences differ" in (folder / "README.md").read_text(
        encoding="utf-8"
    )


def test_a_kind_without_weights_is_refused(measured: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "kind": "ngram"}), encoding="utf-8")
    with pytest.raises(UserError, match="kind 'ngram' has no weights"):
        build(tmp_path, [measured[1]], tmp_path / "hub", REAL)


def test_a_token_in_the_recorded_command_does_not_leave(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "best")
    report = write_measured(tmp_path, digest, command=f"HF_TOKEN={GOOD_TOKEN} headstart measure")
    with pytest.raises(UserError, match="looks like a Hub access token") as caught:
        build(tmp_path / "best", [report], tmp_path / "hub", REAL)
    assert GOOD_TOKEN not in str(caught.value)
    assert not (tmp_path / "hub").exists()


SECRETS = {
    "an API key": "sk-proj-" + "aB3_" * 8,
    "a GitHub token": "ghp_" + "a1B2" * 9,
    "an AWS access key": "AKIA" + "A1B2" * 4,
    "a Weights & Biases key": "WANDB_API_KEY=" + "0a1b" * 10,
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
}


def test_a_token_of_any_usual_service_does_not_leave(
    measured: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = write_export(tmp_path / "vllm", file_sha256(measured[0] / "model.safetensors"))
    path = folder / "notes.txt"
    for kind, secret in SECRETS.items():
        path.write_text(f"x={secret}")
        assert private.find_secret(path) == kind
    with pytest.raises(
        UserError, match=r"notes\.txt' holds what looks like a private key\. Revoke"
    ):
        build(measured[0], [measured[1]], tmp_path / "hub", REAL, {"vllm": folder})
    path.write_text("task-" + "a" * 40 + " sk-learn AKIA ghp_ wandb 0a1b")
    assert private.find_secret(path) == ""


def test_a_token_between_two_pieces_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(private, "PIECE", 64)
    path = tmp_path / "x"
    for place in range(0, 128, 7):
        path.write_bytes(b"." * place + GOOD_TOKEN.encode() + b"." * 99)
        assert private.find_secret(path) == "a Hub access token"


def test_private_folders_and_passwords_do_not_leave(tmp_path: Path) -> None:
    home, best, target = "/srv/alice/acme", tmp_path / "best", "/srv/alice/models/target"
    digest = write_checkpoint(best)
    header = json.loads((best / "config.json").read_text(encoding="utf-8"))
    header["target"]["id"] = target
    (best / "config.json").write_text(json.dumps(header), encoding="utf-8")
    leaks: Any = {
        "trained_on": {"eagle3": [f"{home}/generate"]},
        "unknown": [],
        "left_out": ["a/b/c"],
    }
    leaks |= dict.fromkeys(("rows", "prompts", "exact", "near"), 1)
    report = write_measured(
        tmp_path / "measure",
        digest,
        {"path": f"{home}/my heads/best"},
        command=f"headstart measure run.root={home} 'bench.prompts=[{home}/my own.jsonl,a/b/c]' "
        "bench.server=http://alice:s3cretpw@host/v1?key=s3cretpw head=owner/name",
        target={"id": target},
        run={"leaks": leaks, "bench": {"prompts": f"{home}/prompts"}},
    )
    command = f"headstart tune tune.drafter={home}/eagle3"
    numbers = dict.fromkeys(NUMBERS, 1.0)
    chain = Draft("chain", 3).plain()
    row: Any = {"batch_size": 1, "temperature": 0.0, "draft": chain, "chain": chain, **numbers}
    row |= {"least_probability": None, "rule": "match", "speedup_ci95": [0.9, 1.1]}
    device: Device = {"kind": "cpu", "name": "x", "threads": 1}
    write_tuned(best, digest, {"id": target, "revision": "abc123"}, device, [row], command)
    export = write_export(tmp_path / "export", digest)
    config = json.dumps({"speculators_config": {"verifier": {"name_or_path": target}}})
    (export / "config.json").write_text(config, encoding="utf-8")
    told = json.loads((export / EXPORT_FILE).read_text(encoding="utf-8"))
    told["files"] = {
        name: file_sha256(export / name) for name in ("config.json", "model.safetensors")
    }
    told["notes"] = [f"the serving command has what {home}/tune.json says for this engine"]
    (export / EXPORT_FILE).write_text(json.dumps(told), encoding="utf-8")

    folder = build(best, [report], tmp_path / "hub", REAL, {"vllm": export})
    for name, content in contents(folder).items():
        assert b"alice" not in content and b"s3cretpw" not in content, name
    found = read_report(folder)
    assert found.command is not None and "bench.server=http://host/v1 head=owner/name" in (
        found.command
    )
    assert "'bench.prompts=[my own.jsonl,c]'" in found.command
    assert found.target.id == "target" and found.drafters[0].path == "best"
    assert found.run.leaks == leaks | {"trained_on": {"eagle3": ["generate"]}}
    tuned = folder / "decode.yaml"
    assert tuned.read_text().splitlines()[0].endswith(": headstart tune tune.drafter=eagle3")
    kept = read_tuned(folder)
    assert kept is not None and kept.target == {"id": "target", "revision": "abc123"}
    assert replace(kept, target={"id": target, "revision": "abc123"}) == read_tuned(best)
    notes = json.loads((folder / "vllm" / EXPORT_FILE).read_text(encoding="utf-8"))
    assert notes["files"]["config.json"] == file_sha256(folder / "vllm" / "config.json")
    assert "vllm serve target " in (folder / "README.md").read_text(encoding="utf-8")


def test_other_drafters_of_a_report_stay_out(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "best")
    point = profile_point(1, 2, 1.5)
    blocks = json.loads(json.dumps(BLOCKS))
    blocks["profile"]["points"].append(point | {"arm": "ngram"})
    blocks["roofline"]["arms"]["ngram"] = blocks["roofline"]["arms"]["eagle3"]
    blocks["baselines"]["ngram"] = LOOP
    for part in ("draft", "commit"):
        blocks["costs"][part]["ngram"] = blocks["costs"][part]["eagle3"]
    spread = {"baseline": 0.02, "eagle3": 0.03, "ngram": 0.34}
    report = write_measured(
        tmp_path,
        digest,
        **blocks,
        repeats={
            "measured": 4,
            "kept": [0, 2],
            "limit": 0.1,
            "spread": spread,
            "above_tau": ["ngram"],
        },
        run={
            "arms": {"eagle3": {"flips": 1}, "ngram": {"flips": 2}},
            "leaks": {"trained_on": {"ngram": ["x"]}, "unknown": ["ngram"], "left_out": []},
        },
    )
    folder = build(tmp_path / "best", [report], tmp_path / "hub", REAL)
    assert b"ngram" not in (folder / "report.json").read_bytes().replace(b"vllm_ngram", b"")
    found = read_report(folder)
    assert found.repeats is not None and found.repeats.disturbed, "it was for all of them"
    assert found.repeats.spread == {"baseline": 0.02, "eagle3": 0.03, "another drafter": 0.34}
    assert found.baseline == read_report(report).baseline
    assert found.profile is not None and [p.batch for p in found.profile.points] == [1, 1, 8]


def test_a_continued_training_is_not_called_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that continued a round that continued a head of others."""
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs" / "best"
    write_manifest(theirs, "import", {"source": "/srv/alice/downloads/Qwen3-8B_eagle3"})
    first, last = tmp_path / "round-1" / "eagle3" / "best", tmp_path / "round-2" / "eagle3" / "best"
    digest = write_checkpoint(last)
    best = {"tau": None}
    for folder, start, steps in ((first, str(theirs), 500), (last, "round-1/eagle3/best", 20)):
        head = {"refresh": {"init_from": start}}
        facts = {"steps": steps, "tokens": 100 * steps, "seconds": 36.0, "best": best, "head": head}
        write_manifest(folder.parent, "train", facts)
    report = write_measured(tmp_path / "measure", digest)
    card = (build(last, [report], tmp_path / "hub", REAL) / "README.md").read_text("utf-8")
    assert card.split("## Where it comes from\n\n")[1].split("\n\n")[0].splitlines() == [
        "Continued from `eagle3` with Headstart: 20 steps, 2,000 tokens, 0.01 hours; the last "
        "checkpoint was kept. These numbers are of the continuation alone.",
        "`eagle3` was continued from `Qwen3-8B_eagle3` with Headstart: 500 steps, 50,000 tokens, "
        "0.01 hours.",
        "How `Qwen3-8B_eagle3` was trained is not known here.",
    ]


def test_a_start_from_the_hub_has_its_name_there(tmp_path: Path) -> None:
    cached = tmp_path / "models--someone--eagle3" / "snapshots" / "0a1b"
    assert name_start(cached) == "someone/eagle3"
    write_manifest(tmp_path / "pulled", "push", {"repo": "someone/else"})
    assert name_start(tmp_path / "pulled") == "someone/else"
    for start, name in (("outputs/x/train/medusa/best", "medusa"), ("/srv/alice/heads/a", "a")):
        assert name_start(Path(start)) == name


def test_several_reports_go_along(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "best")
    reports = [
        write_measured(tmp_path / "greedy", digest),
        write_measured(tmp_path / "sampled", digest, settings={"temperature": 1.0}),
    ]
    folder = build(tmp_path / "best", reports, tmp_path / "hub", REAL)
    assert read_report(folder / "report_2.json").settings.temperature == 1.0
    assert read_report(folder).settings == read_report(reports[0]).settings
    assert len(check_folder(folder)) == len(FILES) + 1


def test_a_push_removes_what_an_earlier_one_left_and_nothing_else(
    hub: HubStandIn, tmp_path: Path
) -> None:
    digest = write_checkpoint(tmp_path / "best")
    reports = [write_measured(tmp_path / name, digest) for name in ("first", "second")]
    upload(REAL, build(tmp_path / "best", reports, tmp_path / "both", REAL))
    hub.repos[REPO]["LICENSE"] = b"added by hand"
    folder = build(tmp_path / "best", reports[:1], tmp_path / "one", REAL)
    upload(REAL, folder)
    assert hub.repos[REPO] == {**contents(folder), "LICENSE": b"added by hand"}


def test_building_again_replaces_only_what_was_built(
    measured: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "hub"
    build(measured[0], [measured[1]], out, REAL)
    build(measured[0], [measured[1]], out, PushConfig(repo="someone/renamed"))
    assert "# renamed" in (out / "README.md").read_text(encoding="utf-8")
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.md").write_text("years of work", encoding="utf-8")
    with pytest.raises(UserError, match="is not a stage folder and is not deleted"):
        build(measured[0], [measured[1]], mine, REAL)
    (out / "chapter2.md").write_text("more of it", encoding="utf-8")
    build(measured[0], [measured[1]], out, REAL)
    assert not (out / "chapter2.md").exists()
    assert [path.read_text() for path in tmp_path.glob("hub.aside-*/chapter2.md")] == ["more of it"]
    assert (mine / "chapter1.md").read_text(encoding="utf-8") == "years of work"


def test_nothing_is_published_without_a_licence(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    """The error and the dry run name the target's own licence, by the card in its folder."""
    target = tmp_path / "target"
    target.mkdir()
    shutil.copytree(measured[0], tmp_path / "best")
    header = json.loads((tmp_path / "best" / "config.json").read_text(encoding="utf-8"))
    header["target"]["id"] = str(target)
    (tmp_path / "best" / "config.json").write_text(json.dumps(header), encoding="utf-8")
    sources = Sources(tmp_path / "best", [measured[1]], {})
    unlicensed, out = PushConfig(repo=REPO, dry_run=False), tmp_path / "hub"
    for card, words in (
        (None, "is not known here"),
        ("# No front matter", "is not known here"),
        ("---\nlicense: [broken\n---\n", "is not known here"),
        ("---\nlicense: llama3.1\n---\n# Target", "has push.license=llama3.1, by its card"),
    ):
        if card is not None:
            (target / "README.md").write_text(card, encoding="utf-8")
        with pytest.raises(UserError, match=r"push\.license is not set") as caught:
            push(unlicensed, sources, out)
        assert words in str(caught.value)
    assert not out.exists()
    assert hub.requests == []
    console = Console(width=120)
    with console.capture() as capture:
        push(replace(unlicensed, dry_run=True), sources, out, console=console)
    assert "push.license=llama3.1" in " ".join(capture.get().split())


def test_repository_names_are_checked(measured: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"push\.repo must look like 'user/name'; given: 'just-a-name'"
    ):
        PushConfig(repo="just-a-name")
    with pytest.raises(UserError, match=r"push\.repo is not set"):
        push(PushConfig(), Sources(measured[0], [measured[1]], {}), tmp_path / "hub")


# Engines' folders, collections


def test_an_engines_folder_goes_along_and_the_card_says_how_to_serve_it(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    digest = file_sha256(measured[0] / "model.safetensors")
    engines = {name: write_export(tmp_path / name, digest, name) for name in ("vllm", "sglang")}
    push(
        REAL,
        Sources(measured[0], [measured[1]], engines),
        tmp_path / "hub",
        console=Console(quiet=True),
    )
    pushed = hub.repos[REPO]
    assert pushed["vllm/model.safetensors"] == (engines["vllm"] / "model.safetensors").read_bytes()
    listed = {entry["file"] for entry in json.loads(pushed["manifest.json"])["files"]}
    assert listed == set(pushed) - {"manifest.json"}
    card = pushed["README.md"].decode()
    for engine, start in (
        ("vllm", "vllm serve someone/target-1b "),
        ("sglang", "python -m sglang.launch_server "),
    ):
        fetch, line = card.split(f"\n{engine}:\n\n```bash\n")[1].splitlines()[:2]
        assert fetch == f"hf download {REPO} --include '{engine}/*' --local-dir ."
        assert line.startswith(start) and f'"{engine}"' in line.replace(
            f"path {engine} ", f'"{engine}"'
        )
        assert str(tmp_path) not in pushed[f"{engine}/headstart_export.json"].decode(), (
            "paths of this machine stay here"
        )


def test_a_pushed_command_is_that_of_the_export_whatever_its_folder_is_called(
    tmp_path: Path,
) -> None:
    folder, digest = write_export(tmp_path / "vllm-int8", "0" * 64), "0" * 64
    told = json.loads((folder / EXPORT_FILE).read_text())
    lengths = {"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 64, 1]]}
    told |= {"engine": "vllm", "decode_settings": lengths}
    told["speculative_config"]["method"] = "medusa"
    told["serve_as_custom_class"] = f"PYTHONPATH={tmp_path} vllm serve {tmp_path}"
    (folder / EXPORT_FILE).write_text(json.dumps(told))
    notes = read_export("vllm-int8", folder, digest, "someone/target-1b")
    assert notes.serve.startswith("vllm serve someone/target-1b ")
    assert '"model": "vllm-int8"' in notes.serve and "per_batch_size" in notes.serve
    assert "custom_class" in notes.serve_as_custom_class
    assert str(tmp_path) not in json.dumps(asdict(notes))


def test_an_export_of_other_weights_is_refused(measured: tuple[Path, Path], tmp_path: Path) -> None:
    stale = write_export(tmp_path / "vllm", "0" * 64)
    with pytest.raises(UserError, match=r"was exported from other weights \(000000000000\.\.\.\)"):
        build(measured[0], [measured[1]], tmp_path / "hub", REAL, {"vllm": stale})
    (stale / "headstart_export.json").unlink()
    with pytest.raises(UserError, match="is no folder of `headstart export`"):
        build(measured[0], [measured[1]], tmp_path / "hub", REAL, {"vllm": stale})
    assert not (tmp_path / "hub").exists()


def test_what_an_export_did_not_write_and_links_are_not_published(
    measured: tuple[Path, Path], tmp_path: Path
) -> None:
    """A link in an engine's folder would publish what it leads to."""
    digest = file_sha256(measured[0] / "model.safetensors")
    folder, private = write_export(tmp_path / "vllm", digest), tmp_path / "private.txt"
    private.write_text("mine")
    notes = json.loads((folder / "headstart_export.json").read_text())
    notes["files"] = {
        name: file_sha256(folder / name) for name in ("config.json", "model.safetensors")
    }
    (folder / "headstart_export.json").write_text(json.dumps(notes))
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_text("of an engine that looked at it")

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            build(measured[0], [measured[1]], tmp_path / "hub", REAL, {"vllm": folder})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["private.txt", "vllm"]

    (folder / "notes.txt").symlink_to(private)
    refused(r"notes\.txt' is not a plain file but a link")
    (folder / "notes.txt").unlink()
    (folder / "notes.txt").write_text("to do")
    refused(r"notes\.txt' was not written by `headstart export`")
    (folder / "notes.txt").unlink()
    kept = (folder / "config.json").read_text()
    (folder / "config.json").write_text(kept.replace("llama", "lloma"))
    refused(r"vllm/config\.json' was changed or damaged since it was written")
    (folder / "config.json").unlink()
    refused(r"lacks config\.json, which was exported")
    (folder / "config.json").write_text(kept)
    out = build(measured[0], [measured[1]], tmp_path / "hub", REAL, {"vllm": folder})
    assert sorted(path.name for path in (out / "vllm").iterdir()) == [
        "config.json",
        "headstart_export.json",
        "model.safetensors",
    ]
    weights = measured[0] / "model.safetensors"
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_bytes((measured[0] / "config.json").read_bytes())
    (linked / "model.safetensors").symlink_to(weights)
    with pytest.raises(UserError, match="is a link, which is not followed"):
        build(linked, [measured[1]], tmp_path / "other", REAL)
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["medusa.py", "tokenizer.model", "notes.TXT", "LICENSE"])
def test_a_token_in_any_file_does_not_leave(
    measured: tuple[Path, Path], tmp_path: Path, name: str, encoding: str
) -> None:
    digest = file_sha256(measured[0] / "model.safetensors")
    folder = write_export(tmp_path / "vllm", digest)
    (folder / name).write_bytes(b"\x00\xff = '" + f"'{GOOD_TOKEN}'\n".encode(encoding))
    with pytest.raises(UserError, match="looks like a Hub access token") as caught:
        build(measured[0], [measured[1]], tmp_path / "hub", REAL, {"vllm": folder})
    assert GOOD_TOKEN not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]


def test_a_damaged_checkpoint_is_not_pushed(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "best")
    files = [file_entry(tmp_path, f"best/{name}") for name in ("config.json", "model.safetensors")]
    facts = {"files": files, "steps": 1, "tokens": 1, "seconds": 1.0, "best": {"tau": None}}
    write_manifest(tmp_path, "train", facts)
    report = write_measured(tmp_path / "measure", digest)
    build(tmp_path / "best", [report], tmp_path / "hub", REAL)
    (tmp_path / "best" / "config.json").write_text(json.dumps({**CONFIG, "needs": {"x": 1}}))
    with pytest.raises(UserError, match=r"best/config\.json' was changed or damaged"):
        build(tmp_path / "best", [report], tmp_path / "hub", REAL)


def test_heads_of_one_target_meet_in_one_collection(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    sources = Sources(measured[0], [measured[1]], {})
    for name in ("someone/a", "someone/b", "someone/a"):
        config = replace(REAL, repo=name, collection="Drafters for target-1b")
        push(config, sources, tmp_path / "hub", console=Console(quiet=True))
    (only,) = hub.collections.values()
    assert only["items"] == ["someone/a", "someone/b"] and only["private"]


def test_a_collection_that_fails_leaves_the_push(
    hub: HubStandIn, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    hub.failures["/api/collections"] = 503
    config = replace(REAL, collection="Drafters")
    with pytest.raises(UserError, match="is pushed and stays; only the collection lacks it"):
        push(
            config,
            Sources(measured[0], [measured[1]], {}),
            tmp_path / "hub",
            console=Console(quiet=True),
        )
    assert hub.repos[REPO] == contents(tmp_path / "hub")


@pytest.mark.parametrize(
    ("place", "status"),
    [
        *(("/commit/", status) for status in (401, 403, 409, 429, 500, 502)),
        *(
            (place, status)
            for place in ("repos/create", "/preupload/", "info/lfs")
            for status in (409, 429)
        ),
    ],
)
def test_whatever_breaks_the_repository_is_untouched_and_one_line_says_why(
    hub: HubStandIn, built: Path, place: str, status: int
) -> None:
    hub.failures[place] = status
    assert len(refused(hub, built)) < 500
    hub.failures.clear()
    upload(REAL, built)
    assert hub.repos[REPO] == contents(built)
