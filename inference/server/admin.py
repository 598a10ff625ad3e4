"""The admin routes: showing and changing the drafter.

They need the admin token in the header `X-Headstart-Admin-Token`, besides the token that all
requests need. If no admin token is configured, they refuse every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from heads.api.errors import UserError
from inference.server.errors import ApiError
from inference.server.front.body import read_json
from inference.server.front.secret import Secret
from inference.server.swapping import DrafterSwaps
from inference.server.trial import ArmState, TrialState

Given = dict[str, Any]
Told = dict[str, object]
Work = Callable[[Given], Told]
ADMIN_HEADER = "x-headstart-admin-token"
DRAFTER_PATH = "/admin/drafter"
TRIAL_PATH = "/admin/drafter/trial"


def add_admin(
    app: FastAPI, swaps: DrafterSwaps, secret: Secret | None, samples: Path | None = None
) -> None:
    """Add the routes to an application. Their work runs on separate threads, as loading takes time.
    samples: folder of the sampled answers, if the server samples any."""
    admin = Admin(swaps, samples)
    for method, path, work in (
        ("GET", DRAFTER_PATH, admin.state),
        ("POST", DRAFTER_PATH, admin.install),
        ("GET", TRIAL_PATH, admin.answers),
        ("POST", TRIAL_PATH, admin.start_trial),
        ("DELETE", TRIAL_PATH, admin.end_trial),
    ):
        app.add_api_route(path, _endpoint(work, secret), methods=[method])


def _endpoint(work: Work, secret: Secret | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            require_admin(request, secret)
            given: object = dict(request.query_params)
            if request.method == "POST":
                given = read_json(await request.body())
            if not isinstance(given, dict):
                raise ApiError(400, "the body must be a JSON object.")
            return JSONResponse(await asyncio.to_thread(work, given))
        except UserError as error:
            refused = ApiError(400, str(error), code="refused")
            return JSONResponse(refused.body, refused.status)
        except ApiError as error:  # metrics count only requests for answers
            return JSONResponse(error.body, error.status, error.headers)

    return endpoint


class Admin:
    """The work of the routes. given: the body of a POST, or the query of other methods."""

    def __init__(self, swaps: DrafterSwaps, samples: Path | None) -> None:
        self.swaps = swaps
        self.samples = str(samples.resolve()) if samples else None

    def state(self, given: Given) -> Told:
        """The drafter, its draft, the sums of a trial, and the folder of samples."""
        require_keys(given)
        return self._state(self.swaps.trial())

    def install(self, given: Given) -> Told:
        """Change the drafter; raises `UserError`."""
        require_keys(given, "checkpoint")
        self.swaps.install(checkpoint_of(given))
        return self._state(None)

    def start_trial(self, given: Given) -> Told:
        """Start a trial; raises `UserError`."""
        require_keys(given, "checkpoint", "share")
        share = given.get("share", 0.5)
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise ApiError(400, "'share' must be a number between 0 and 1.", "share")
        self.swaps.start_trial(checkpoint_of(given), float(share))
        return self._state(self.swaps.trial())

    def answers(self, given: Given) -> Told:
        """A trial with the observations of both drafters, each as [domain, accepted, passes,
        client]."""
        require_keys(given)
        found = self.swaps.trial()
        if found is None:
            raise ApiError(404, "no trial runs.", code="no_trial")
        told = {
            name: [[one.domain, one.accepted, one.passes, one.client] for one in arm.answers]
            for name, arm in (("current", found.current), ("candidate", found.candidate))
        }
        return {**self._state(found), "answers": told}

    def end_trial(self, given: Given) -> Told:
        """End a trial; raises `UserError`."""
        require_keys(given, "keep")
        keep = given.get("keep", "false")
        if keep not in ("true", "false"):
            raise ApiError(400, "'keep' must be true or false.", "keep")
        self.swaps.end_trial(keep == "true")
        return self._state(None)

    def _state(self, found: TrialState | None) -> Told:
        trial: Told | None = None
        if found is not None:
            trial = {"share": found.share, "most": found.most, "depth": found.depth}
            trial |= {"current": sums(found.current), "candidate": sums(found.candidate)}
        known = {"drafter": self.swaps.current(), "draft": self.swaps.draft()}
        return {**known, "trial": trial, "samples": self.samples}


def require_admin(request: Request, secret: Secret | None) -> None:
    """Raise `ApiError` unless the request has the admin token."""
    if secret is None:
        message = "this server was started without an admin token, so nobody may change it."
        raise ApiError(403, message, code="no_admin_token")
    given = request.headers.get(ADMIN_HEADER, "")
    if not secret.matches(b"Bearer " + given.encode("latin-1")):
        message = f"the header {ADMIN_HEADER} does not have this server's admin token."
        raise ApiError(401, message, code="invalid_admin_token")


def require_keys(given: Given, *allowed: str) -> None:
    """Raise `ApiError` for a parameter that does not exist."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        names = ", ".join(allowed) or "none"
        raise ApiError(400, f"'{unknown[0]}' is unknown; allowed: {names}.", unknown[0])


def checkpoint_of(given: Given) -> str:
    """The checkpoint that a body names; raises `ApiError`."""
    name = given.get("checkpoint")
    if not isinstance(name, str) or not name or "\0" in name:
        message = "'checkpoint' must be a folder on the server's machine or a kind without weights."
        raise ApiError(400, message, "checkpoint")
    return name


def sums(arm: ArmState) -> Told:
    """The sums of one drafter of a trial, without the single answers."""
    counted = {"rows": arm.rows, "passes": arm.passes, "committed": arm.committed}
    found = {"drafter": arm.drafter, **counted, "accepted": arm.accepted, "tau": arm.tau}
    return {**found, "answers": len(arm.answers)}
