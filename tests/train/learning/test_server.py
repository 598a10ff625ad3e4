"""A learner's requests to a real server: trials, swaps, refusals, and a server that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.server.config import ADMIN_VARIABLE
from inference.server.front.secret import Secret
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.server.running import MODEL, Running, serving
from tests.train.learning.traffic import prepare
from train.learning.config import LearnConfig
from train.learning.server import HttpServer, ServerGoneError

ADMIN = "an-admin-token-for-tests"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def running(place: Path) -> Iterator[Running]:
    target = TargetModel.load(TargetConfig(str(place / "target"), device="cpu", dtype="float32"))
    drafter = load_drafter(place / "drafter", target.info, target.weights)
    decode = DecodeConfig(batch_size=4, depth=3, max_new_tokens=16, rule="match")
    with serving(
        Engine(target, drafter, decode),
        token="a-token-for-the-tests",
        admin=Secret(ADMIN.encode()),
        checkpoint=str(place / "drafter"),
        samples=place / "sampled",
    ) as found:
        yield found


@pytest.fixture
def server(running: Running, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    monkeypatch.setenv(ADMIN_VARIABLE, ADMIN)
    monkeypatch.setenv("HEADSTART_SERVE_TOKEN", "a-token-for-the-tests")
    return HttpServer(LearnConfig(server=running.base))


def test_a_trial_is_seen_as_the_server_has_it_and_ends_with_the_candidate(
    running: Running, server: HttpServer, place: Path
) -> None:
    drafter = place / "drafter"
    assert server.current() == str(drafter) and server.trial() is None
    assert (server.draft()["shape"], server.draft()["depth"]) == ("chain", 3)
    assert server.samples() == (place / "sampled").resolve()
    server.start_trial(drafter, 0.5)
    found = None
    for number in range(64):  # which of the two drafts is drawn under a key of the trial's
        running.client.completions.create(model=MODEL, prompt=[5, 6, 7 + number], seed=number)
        found = server.trial()
        assert found is not None and found == running.service.swaps.trial()
        if found.current.answers and found.candidate.answers:
            break
    assert found is not None
    assert found.current.answers and found.candidate.answers
    assert {one.client for one in (*found.current.answers, *found.candidate.answers)} == {0}
    with pytest.raises(UserError, match="trial"):
        server.install(drafter)
    server.end_trial(keep=True)
    assert server.trial() is None and Path(server.current()) == drafter.resolve()
    server.install(drafter)
    with pytest.raises(UserError, match="no folder"):
        server.install(place / "nothing")


@pytest.mark.parametrize(
    ("status", "content", "error", "words"),
    [
        (404, {"error": "not found"}, UserError, "not found"),
        (503, {"error": "busy"}, ServerGoneError, "busy"),
        (503, ["busy"], ServerGoneError, "busy"),
        (418, {}, UserError, "status 418"),
    ],
)
def test_errors_of_other_shapes_are_told(
    running: Running,
    server: HttpServer,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    content: Any,
    error: type[Exception],
    words: str,
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=content))
    other = httpx.Client(transport=transport, base_url=running.base)
    monkeypatch.setattr(server, "_client", other)
    with pytest.raises(error, match=words):
        server.current()


def test_a_wrong_token_is_a_mistake_and_silence_may_pass(
    running: Running, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, "another-token-for-tests")
    with pytest.raises(UserError, match="admin token"):
        HttpServer(LearnConfig(server=running.base)).current()
    with pytest.raises(ServerGoneError, match="does not answer"):
        HttpServer(LearnConfig(server="http://127.0.0.1:9", timeout=2.0)).current()
    with pytest.raises(UserError, match=r"learn\.server"):
        HttpServer(LearnConfig(server="somewhere"))
    monkeypatch.delenv(ADMIN_VARIABLE)
    with pytest.raises(UserError, match=ADMIN_VARIABLE):
        HttpServer(LearnConfig(server=running.base))
