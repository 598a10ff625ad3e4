"""The learner's interface to the running server: the drafter in use and the trial of a candidate,
through the routes of `inference.server.admin`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import httpx

from heads.api.errors import UserError
from inference.server.admin import ADMIN_HEADER, DRAFTER_PATH, TRIAL_PATH
from inference.server.config import ADMIN_VARIABLE
from inference.server.trial import ArmAnswer, ArmState, TrialState
from train.learning.config import LearnConfig

PASSING = frozenset({408, 429, 500, 502, 503, 504})
REFUSED, NO_TRIAL = "refused", "no_trial"
"""Codes of the server's errors."""


class ServerGoneError(Exception):
    """The server does not answer now."""


class Server(Protocol):
    """The drafters of a running server (`inference.server.swapping`). All methods raise `UserError`
    for a refused request, and `ServerGoneError` if the server does not answer. tries: whether it
    can try candidates."""

    tries: bool

    def current(self) -> str:
        """The folder of the drafter, or its kind."""

    def install(self, checkpoint: Path) -> None:
        """Use another drafter."""

    def describe(self) -> dict[str, str]:
        """Further facts of the drafter for the journal."""

    def start_trial(self, checkpoint: Path, share: float) -> None:
        """Try a candidate on a share of the rows."""

    def trial(self) -> TrialState | None:
        """The state of the running trial; None without one."""

    def end_trial(self, keep: bool) -> None:
        """End the trial, with the candidate as drafter or without it."""


class HttpServer:
    """A server at an address. Tokens come from environment variables and appear in no message.
    Raises `UserError` for an invalid address."""

    tries = True

    def __init__(self, config: LearnConfig, transport: httpx.BaseTransport | None = None) -> None:
        url = httpx.URL(config.server or "none")
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(
                "learn.server must be the address of a running server, such as "
                f"http://127.0.0.1:8000; given: '{config.server}'."
            )
        token, admin = os.environ.get(config.key_variable, ""), os.environ.get(ADMIN_VARIABLE, "")
        if not admin:
            raise UserError(
                f"learning changes the server's drafter, which needs its admin token: set "
                f"{ADMIN_VARIABLE} as for `headstart serve`."
            )
        headers = {ADMIN_HEADER: admin}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self.base = str(url).rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.base,
            headers=headers,
            timeout=config.timeout,
            verify=config.verify,
            trust_env=False,
            transport=transport,
        )

    def current(self) -> str:
        return str(self._ask("GET", DRAFTER_PATH)["drafter"])

    def samples(self) -> Path | None:
        """The folder into which the server samples answers; None if it samples none."""
        found = self._ask("GET", DRAFTER_PATH).get("samples")
        return Path(found) if found else None

    def draft(self) -> dict[str, Any]:
        """The settings of the server's draft by name; empty if it does not say them."""
        return dict(self._ask("GET", DRAFTER_PATH).get("draft") or {})

    def install(self, checkpoint: Path) -> None:
        self._ask("POST", DRAFTER_PATH, {"checkpoint": str(checkpoint.resolve())})

    def describe(self) -> dict[str, str]:
        return {}

    def start_trial(self, checkpoint: Path, share: float) -> None:
        body = {"checkpoint": str(checkpoint.resolve()), "share": share}
        self._ask("POST", TRIAL_PATH, body)

    def trial(self) -> TrialState | None:
        """The server's trial with its present observations; None if none runs."""
        found = self._ask("GET", TRIAL_PATH, missing=NO_TRIAL)
        if not found:
            return None
        trial, answers = found["trial"], found["answers"]

        def arm(name: str) -> ArmState:
            sums = {
                key: value for key, value in trial[name].items() if key not in ("answers", "tau")
            }
            return ArmState(**sums, answers=tuple(ArmAnswer(*one) for one in answers[name]))

        return TrialState(
            arm("current"), arm("candidate"), trial["share"], trial["most"], trial["depth"]
        )

    def end_trial(self, keep: bool) -> None:
        self._ask("DELETE", f"{TRIAL_PATH}?keep={str(keep).lower()}")

    def _ask(
        self, method: str, path: str, body: object = None, missing: str = ""
    ) -> dict[str, Any]:
        """The server's answer; empty for an error with the code `missing`."""
        try:
            answer = self._client.request(method, path, json=body)
            content = answer.json() if answer.content else {}
        except (httpx.HTTPError, ValueError) as error:
            words = f"{type(error).__name__} {error}".strip()
            raise ServerGoneError(f"the server at {self.base} does not answer ({words})") from error
        if answer.is_success:
            return dict(content)
        told = content.get("error") if isinstance(content, dict) else content
        told = told if isinstance(told, dict) else {"message": str(told or "")}
        if missing and told.get("code") == missing:
            return {}
        words = f"{told.get('message') or f'status {answer.status_code}'}"
        if answer.status_code in PASSING:
            raise ServerGoneError(f"the server at {self.base} cannot answer now: {words}")
        if told.get("code") == REFUSED:
            raise UserError(words)
        raise UserError(f"learn.server: the server at {self.base} says: {words}")
