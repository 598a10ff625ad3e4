"""Pulling from a stand-in of the Hub on loopback: what arrives is what was pushed, whatever happens
on the way."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from rich.console import Console

from heads.api.errors import UserError
from inference.export.hub.config import PushConfig
from inference.export.hub.folder import Sources
from inference.export.hub.push import push
from inference.hub.config import PullConfig
from inference.hub.pull import PARTIAL_FILE, asked_by, partial_folder, pull
from inference.manifest import file_sha256, write_json
from tests.inference.export.hub.example_folder import write_checkpoint, write_export, write_measured
from tests.inference.export.hub.stand_in import COMMIT, CUT, GOOD_TOKEN, HubStandIn, loopback_hub

REPO = "someone/eagle3-for-target"
OURS = PullConfig(repo=REPO)
hub = pytest.fixture(loopback_hub)


@pytest.fixture
def pushed(hub: HubStandIn, tmp_path: Path) -> Path:
    """The folder that was pushed: a checkpoint and an export for vLLM."""
    digest = write_checkpoint(tmp_path / "best")
    report = write_measured(tmp_path, digest)
    sources = Sources(
        tmp_path / "best", [report], {"vllm": write_export(tmp_path / "made" / "vllm", digest)}
    )
    push(
        PushConfig(repo=REPO, license="mit", dry_run=False),
        sources,
        tmp_path / "hub",
        console=Console(quiet=True),
    )
    hub.repos[REPO][".gitattributes"] = b"*.safetensors filter=lfs"  # as the Hub adds it
    hub.repos[REPO]["LICENSE"] = b"added by hand"
    return tmp_path / "hub"


def fetched(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(config: PullConfig, out: Path) -> str:
    with pytest.raises(UserError) as caught:
        pull(config, out, console=Console(quiet=True))
    message = str(caught.value)
    assert "\n" not in message and "hf_" not in message
    assert not out.exists(), "a folder appears when it is complete"
    return message


@pytest.mark.parametrize("what", ["headstart", "vllm", "all"])
def test_what_arrives_is_what_was_pushed(pushed: Path, tmp_path: Path, what: str) -> None:
    out = pull(
        PullConfig(repo=REPO, what=what), tmp_path / "out" / "it", console=Console(quiet=True)
    )
    whole = fetched(pushed)
    kept = {
        name
        for name in whole
        if what == "all"
        or name == "manifest.json"
        or (name.startswith("vllm/") if what == "vllm" else "/" not in name)
    }
    assert fetched(out) == {name: whole[name] for name in kept}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["it"], (
        "nothing is left beside it"
    )


def test_after_a_cut_download_only_what_is_missing_is_fetched(
    hub: HubStandIn, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what is written at once: 10 MB otherwise
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut_download = "report.json"
    message = refused(OURS, tmp_path / "out")
    assert "connection" in message and "pull again to go on" in message
    assert hub.sent["report.json"] == CUT, "a connection that breaks is taken up where it ended"
    hub.cut_download = ""
    hub.sent.clear()
    pull(OURS, tmp_path / "out", console=Console(quiet=True))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        pushed / "model.safetensors"
    ).read_bytes()
    assert set(hub.sent) == {"report.json", "speedup.png", "step_time.png"}


@pytest.mark.parametrize("status", [401, 403, 429, 500])
@pytest.mark.parametrize("place", ["/api/models", "/resolve/"])
def test_a_hub_that_fails_leaves_no_folder(
    hub: HubStandIn, pushed: Path, tmp_path: Path, place: str, status: int
) -> None:
    hub.failures[place] = status
    message = refused(OURS, tmp_path / "out")
    wanted = {
        401: "does not accept",
        403: "no read access",
        429: "limits how often",
        500: "HTTP 500",
    }[status]
    assert wanted in message
    hub.failures.clear()
    pull(OURS, tmp_path / "out", console=Console(quiet=True))
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_file_that_is_not_what_was_published_is_refused(
    hub: HubStandIn, pushed: Path, tmp_path: Path
) -> None:
    weights = bytearray(hub.repos[REPO]["model.safetensors"])
    weights[-1] ^= 1
    hub.repos[REPO]["model.safetensors"] = bytes(weights)
    assert "was changed or damaged" in refused(OURS, tmp_path / "out")


def test_a_card_and_plots_that_were_edited_on_the_hub_do_not_matter(
    hub: HubStandIn, pushed: Path, tmp_path: Path
) -> None:
    hub.repos[REPO]["README.md"] += b"\nAdded on the web page.\n"
    hub.repos[REPO]["speedup.png"] += b"another plot"
    out = pull(OURS, tmp_path / "out", console=Console(quiet=True))
    assert (out / "README.md").read_bytes().endswith(b"Added on the web page.\n")
    hub.repos[REPO]["report.json"] += b" "
    message = refused(OURS, tmp_path / "other")
    assert "report.json' was changed or damaged" in message


def test_a_manifest_of_another_program_is_not_called_a_refusal_of_the_hub(
    hub: HubStandIn, pushed: Path, tmp_path: Path
) -> None:
    hub.repos[REPO]["manifest.json"] = b'{"name": "webapp"}'
    message = refused(OURS, tmp_path / "out")
    assert "has manifest format" in message and "refused the pull" not in message


def test_what_is_not_there_is_named(hub: HubStandIn, pushed: Path, tmp_path: Path) -> None:
    assert "there is no repository 'someone/other'" in refused(
        PullConfig(repo="someone/other"), tmp_path / "out"
    )
    assert "pull.revision=v9" in refused(PullConfig(repo=REPO, revision="v9"), tmp_path / "out")
    asked = PullConfig(repo=REPO, what="vlm")
    assert "holds no 'vlm'. Did you mean 'vllm'? Allowed: all, headstart, vllm." in refused(
        asked, tmp_path / "out"
    )
    hub.repos["someone/foreign"] = {"model.safetensors": b"", "config.json": b"{}"}
    assert "`headstart import`" in refused(PullConfig(repo="someone/foreign"), tmp_path / "out")
    with pytest.raises(UserError, match="must look like 'user/name'; given: 'eagle3'"):
        PullConfig(repo="eagle3")
    assert "pull.repo is not set" in refused(PullConfig(), tmp_path / "out")


def test_a_folder_that_exists_is_left_alone(pushed: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.md").write_text("years of work", encoding="utf-8")
    with pytest.raises(UserError, match=r"exists already\. Delete it"):
        pull(OURS, mine)
    assert fetched(mine) == {"thesis.md": b"years of work"}


def test_a_public_drafter_needs_no_token(
    hub: HubStandIn, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.public = True
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    out = pull(
        PullConfig(repo=REPO, revision=COMMIT), tmp_path / "out", console=Console(quiet=True)
    )
    listed = {
        entry["file"]: entry["sha256"]
        for entry in json.loads((out / "manifest.json").read_text())["files"]
    }
    assert file_sha256(out / "config.json") == listed["config.json"]
    assert GOOD_TOKEN not in "".join(hub.requests)


def test_what_arrived_of_another_drafter_is_not_kept(pushed: Path, tmp_path: Path) -> None:
    out = tmp_path / "it"
    plain = pull(OURS, tmp_path / "plain", console=Console(quiet=True))
    for begun in ({"repo": "someone/else", "commit": COMMIT}, {"repo": REPO, "commit": COMMIT}):
        partial = partial_folder(out)
        partial.mkdir()
        write_json(partial / PARTIAL_FILE, {"stage": "pull", **begun})
        (partial / "vllm").mkdir()
        (partial / "vllm" / "of_another_part.json").write_text("{}")
        if begun["repo"] != REPO:
            (partial / "config.json").write_text("{}")
        assert fetched(pull(OURS, out, console=Console(quiet=True))) == fetched(plain)
        shutil.rmtree(out)


def test_a_pull_that_was_killed_at_its_end_is_complete(
    hub: HubStandIn, pushed: Path, tmp_path: Path
) -> None:
    out = pull(OURS, tmp_path / "it", console=Console(quiet=True))
    whole = fetched(out)
    write_json(out / PARTIAL_FILE, {**asked_by(OURS), "commit": "0" * 40})
    for other in (
        PullConfig(repo="someone/else"),
        replace(OURS, what="all"),
        replace(OURS, revision="v1"),
    ):
        with pytest.raises(UserError, match="exists already"):
            pull(other, out)
    hub.requests.clear()
    assert fetched(pull(OURS, out, console=Console(quiet=True))) == whole
    assert hub.requests == []
    with pytest.raises(UserError, match="exists already"):
        pull(OURS, out)


def test_a_folder_of_others_is_not_filled_and_renamed(pushed: Path, tmp_path: Path) -> None:
    partial = tmp_path / "it.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("ten years")
    assert "was not made by `headstart pull`" in refused(PullConfig(repo=REPO), tmp_path / "it")
    assert fetched(partial) == {"thesis.txt": b"ten years"}
    with pytest.raises(UserError, match="is not a name for a new folder"):
        partial_folder(Path())
