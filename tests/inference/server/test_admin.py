"""The routes for whoever runs the server: they need a token of their own, and do what the Python
interface does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft_file import DRAFT_KEYS
from inference.decoding.engine import Engine
from inference.decoding.loading import load_drafter
from inference.server.admin import ADMIN_HEADER, DRAFTER_PATH, TRIAL_PATH
from inference.server.config import ADMIN_VARIABLE, ServeConfig, read_admin_secret
from inference.server.front.secret import Secret
from inference.target.model import TargetModel
from tests.inference.server.drafters import BAD, checkpoint
from tests.inference.server.running import Running, serving

TOKEN, ADMIN = "a-token-for-the-tests", "a-token-for-the-admin"


class Caller:
    """Calls a server's admin routes."""

    def __init__(self, running: Running, admin: str | None = ADMIN, token: str = TOKEN) -> None:
        self.base = running.base
        self.headers = {"Authorization": f"Bearer {token}"}
        if admin is not None:
            self.headers[ADMIN_HEADER] = admin

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        more = {} if body is None else {"json": body}
        found = httpx.request(method, self.base + path, headers=self.headers, timeout=60, **more)
        return found.status_code, found.json()


def engine_of(target: TargetModel) -> Engine:
    return Engine(
        target, load_drafter("ngram", target), DecodeConfig(batch_size=2, depth=3, max_new_tokens=8)
    )


def test_the_admin_token_is_needed_besides_the_servers(target: TargetModel) -> None:
    every = [
        ("GET", DRAFTER_PATH),
        ("POST", DRAFTER_PATH),
        ("GET", TRIAL_PATH),
        ("POST", TRIAL_PATH),
        ("DELETE", TRIAL_PATH),
    ]
    with serving(engine_of(target), TOKEN) as running:  # without an admin token
        for method, path in every:
            status, body = Caller(running)(method, path)
            assert (status, body["error"]["code"]) == (403, "no_admin_token")
    with serving(engine_of(target), TOKEN, admin=Secret(ADMIN.encode())) as running:
        for method, path in every:
            for given in (None, "", "a-token-for-somebody", TOKEN):
                status, body = Caller(running, given)(method, path)
                assert (status, body["error"]["code"]) == (401, "invalid_admin_token")
            assert Caller(running, ADMIN, "another-token-entirely")(method, path)[0] == 401
        assert running.service.swaps.current() == "test"
        assert running.metrics()['headstart_requests_total{outcome="invalid"}'] == 0


def test_a_drafter_is_changed_and_tried_over_http(target: TargetModel, tmp_path: Path) -> None:
    one = str(checkpoint(tmp_path / "one", target, "eagle3"))
    bad = str(BAD["not finite"](tmp_path / "bad", target))
    with serving(engine_of(target), TOKEN, admin=Secret(ADMIN.encode())) as running:
        call = Caller(running)
        status, body = call("GET", DRAFTER_PATH)
        draft = body["draft"]
        assert (draft["shape"], draft["depth"]) == ("chain", 3) and set(draft) == set(DRAFT_KEYS)
        nothing = {"drafter": "test", "draft": draft, "trial": None, "samples": None}
        assert (status, body) == (200, nothing)
        assert call("GET", TRIAL_PATH)[0] == 404
        assert call("POST", DRAFTER_PATH, {"checkpoint": one})[1]["drafter"] == one
        status, body = call("POST", DRAFTER_PATH, {"checkpoint": bad})
        assert (status, body["error"]["code"]) == (400, "refused")
        assert "not finite" in body["error"]["message"]
        status, body = call("POST", TRIAL_PATH, {"checkpoint": "ngram", "share": 0.5})
        assert status == 200 and body["trial"]["candidate"]["drafter"] == "ngram"
        for number in range(8):
            running.client.completions.create(model="micro", prompt="Write", seed=number)
        trial = call("GET", TRIAL_PATH)[1]
        state = running.service.swaps.trial()
        assert state is not None
        for name, arm in (("current", state.current), ("candidate", state.candidate)):
            assert trial["trial"][name]["passes"] == arm.passes
            own = [[one.domain, one.accepted, one.passes, 0] for one in arm.answers]
            assert trial["answers"][name] == own
        assert sum(trial["trial"][name]["rows"] for name in ("current", "candidate")) == 8
        assert call("POST", DRAFTER_PATH, {"checkpoint": one})[1]["error"]["code"] == "refused"
        assert call("DELETE", TRIAL_PATH + "?keep=true")[1] == nothing | {"drafter": "ngram"}
        assert call("DELETE", TRIAL_PATH)[1]["error"]["code"] == "refused"


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("POST", DRAFTER_PATH, {}, "'checkpoint' must be"),
        ("POST", DRAFTER_PATH, {"checkpoint": 3}, "'checkpoint' must be"),
        ("POST", DRAFTER_PATH, ["ngram"], "must be a JSON object"),
        ("POST", DRAFTER_PATH, {"checkpoint": "ngram", "share": 0.5}, "'share' is unknown"),
        ("POST", DRAFTER_PATH, {"checkpoint": "user/name"}, "no folder 'user/name'"),
        ("POST", TRIAL_PATH, {"checkpoint": "ngram", "share": "half"}, "'share' must be a number"),
        ("POST", TRIAL_PATH, {"checkpoint": "ngram", "share": 1}, "between 0 and 1"),
        ("DELETE", f"{TRIAL_PATH}?keep=maybe", None, "'keep' must be true or false"),
        ("GET", f"{DRAFTER_PATH}?all=true", None, "'all' is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(
    admin: Running, method: str, path: str, body: Any, words: str
) -> None:
    status, told = Caller(admin)(method, path, body)
    assert status == 400 and words in told["error"]["message"]
    assert admin.service.swaps.current() == "test"


@pytest.fixture(scope="module")
def admin(target: TargetModel) -> Any:
    with serving(engine_of(target), TOKEN, admin=Secret(ADMIN.encode())) as found:
        yield found


def test_the_admin_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_VARIABLE, raising=False)
    assert read_admin_secret(ServeConfig()) is None
    monkeypatch.setenv(ADMIN_VARIABLE, ADMIN)
    assert read_admin_secret(ServeConfig()) == Secret(ADMIN.encode())
    (tmp_path / "token").write_text("another-long-token\n")
    given = ServeConfig(admin_token_file=str(tmp_path / "token"))
    assert read_admin_secret(given) == Secret(b"another-long-token")
    monkeypatch.setenv(ADMIN_VARIABLE, "short")
    with pytest.raises(UserError, match="admin token has 5 characters"):
        read_admin_secret(ServeConfig())
    with pytest.raises(UserError, match="admin_token_file"):
        read_admin_secret(ServeConfig(admin_token_file=str(tmp_path / "nowhere")))
