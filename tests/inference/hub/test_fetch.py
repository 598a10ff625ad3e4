"""Published drafters by name, from a stand-in of the Hub: fetched once, checked, kept."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.decoding.loading import load_drafter
from inference.export.hub.config import PushConfig
from inference.export.hub.folder import Sources
from inference.export.hub.push import push
from inference.hub.fetch import fetch, is_published_name
from inference.manifest import file_sha256
from tests.inference.export.hub.example_folder import write_checkpoint, write_measured
from tests.inference.export.hub.stand_in import COMMIT, HubStandIn, loopback_hub
from tests.models import random_target

REPO = "someone/eagle3-for-target"
hub = pytest.fixture(loopback_hub)


@pytest.fixture
def weights(hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pushed drafter, and an empty cache; the hash of its weights."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    digest = write_checkpoint(tmp_path / "best")
    sources = Sources(tmp_path / "best", [write_measured(tmp_path, digest)], {})
    push(PushConfig(repo=REPO, license="mit", dry_run=False), sources, tmp_path / "hub")
    return digest


def downloads(hub: HubStandIn) -> int:
    return sum("/resolve/" in request for request in hub.requests)


def test_a_drafter_is_fetched_once_and_is_what_was_pushed(
    hub: HubStandIn, weights: str, tmp_path: Path
) -> None:
    folder = fetch(REPO)
    assert folder == tmp_path / "home" / "headstart" / "someone--eagle3-for-target" / COMMIT
    assert file_sha256(folder / "model.safetensors") == weights
    before = downloads(hub)
    assert before > 0
    assert fetch(REPO) == folder == fetch(f"{REPO}@{COMMIT}")
    assert downloads(hub) == before
    with pytest.raises(UserError, match=r"pull\.revision=nothing"):
        fetch(f"{REPO}@nothing")


def test_the_copy_counts_where_no_hub_answers(
    hub: HubStandIn, weights: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fetch(REPO)
    hub.failures["/api/models/"] = 401  # an answer, if not a friendly one
    with pytest.raises(UserError, match="does not accept the access token"):
        fetch(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetch(REPO) == folder
    assert "the Hub cannot be reached; using the copy" in caplog.text
    with pytest.raises(UserError, match=r"the connection to http://127\.0\.0\.1:9 broke"):
        fetch("someone/else")


def test_without_a_connection_another_revision_is_no_substitute(
    hub: HubStandIn, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetch(f"{REPO}@{COMMIT}") == folder
    for revision in ("b" * 40, "v1"):
        with pytest.raises(UserError):
            fetch(f"{REPO}@{revision}")
    (folder.parent / "revisions.json").write_text(f'{{"v1": "{COMMIT}"}}')
    assert fetch(f"{REPO}@v1") == folder


def test_what_was_swapped_is_refused_and_not_kept(
    hub: HubStandIn, weights: str, tmp_path: Path
) -> None:
    hub.repos[REPO]["config.json"] = b'{"kind": "other"}'
    with pytest.raises(UserError, match="was changed or damaged"):
        fetch(REPO)
    cache = tmp_path / "home" / "headstart" / "someone--eagle3-for-target"
    assert [path.suffix for path in cache.iterdir()] == [".partial"]


def test_engines_and_programs_take_the_name(hub: HubStandIn, weights: str) -> None:
    """The pushed example is of no real target: what is refused was fetched and read."""
    target = random_target("llama")
    with pytest.raises(UserError, match="stored target description"):
        load_drafter(REPO, target)
    with pytest.raises(UserError, match="stored target description"):
        Engine.load(target, REPO)
    with pytest.raises(
        UserError, match="no checkpoint folder 'someone/else', and there is no repo"
    ):
        load_drafter("someone/else", target)
    for name in ("./someone/else", "eagle33", "a/b/c"):
        with pytest.raises(UserError, match="it is neither a name on the Hub"):
            load_drafter(name, target)
    with pytest.raises(UserError, match="has to be trained"):
        load_drafter("eagle3", target)


def test_names_on_the_hub() -> None:
    assert all(map(is_published_name, ("user/name", "user/na.me-2_b", "user/name@v1")))
    assert not any(map(is_published_name, ("name", "./user", "/user/name", "a/b/c", "~/x")))
