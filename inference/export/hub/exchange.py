"""An exchange with a Hub: address, token, transfer, and its errors, which never show the token."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from heads.api.errors import UserError

OFFICIAL = "https://huggingface.co"


@dataclass(frozen=True)
class Exchange:
    """A request to a Hub, as its errors describe it.

    key: the configuration key that names the repository; verb: push or pull; rights: what the token
    is needed for; missing: what to do about a missing repository; kept: what a failure leaves, and
    how to go on.
    """

    repo: str
    endpoint: str
    token: str
    key: str
    verb: str
    rights: str
    missing: str
    kept: str

    def hide(self, text: object) -> str:
        """A text on one line, without the token."""
        shown = str(text).replace(self.token, "***") if self.token else str(text)
        return " ".join(shown.split())


def hub_address() -> str:
    """The Hub's address: HF_ENDPOINT, or the official one."""
    return os.environ.get("HF_ENDPOINT", OFFICIAL).rstrip("/")


@contextmanager
def transfer_for(endpoint: str) -> Iterator[None]:
    """Use Xet transfer with the Hub itself only: all mirrors speak Git LFS, few speak Xet."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = before or endpoint != OFFICIAL
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


@contextmanager
def explain_errors(what: Exchange) -> Iterator[None]:
    """Turn what huggingface_hub raises inside the block into a `UserError` that says what to do."""
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"huggingface_hub is in offline mode (HF_HUB_OFFLINE=1). Unset it to {what.verb}."
        ) from error
    except HFValidationError as error:
        raise UserError(
            f"{what.key} '{what.repo}' is not a name that the Hub accepts: {error}"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:  # it reads fields unchecked
        no_json = isinstance(error, json.JSONDecodeError)
        lacks = "no JSON" if no_json else f"{type(error).__name__}: {what.hide(error)}"
        raise UserError(
            f"{what.endpoint} does not answer like a Hub ({lacks}). Check HF_ENDPOINT. {what.kept}"
        ) from error
    except LocalEntryNotFoundError as error:  # its own text guesses; its cause knows
        raise _explain(what, error.__cause__ or error) from None
    except (HTTPError, RuntimeError, OSError, ValueError) as error:
        raise _explain(what, error) from None


def _explain(what: Exchange, error: BaseException) -> UserError:
    """The status that a server answered with, else the connection that broke, else the error."""
    from huggingface_hub.errors import HTTPError

    chain = list(_chain(error))
    answered = next((item for item in chain if _status(item)), None)
    if answered is not None:
        reason = getattr(answered, "server_message", None)
        said = f" ({what.hide(reason)})" if reason else ""
        return UserError(_explain_status(_status(answered), said, what))
    broken = next((item for item in chain if isinstance(item, (HTTPError, OSError))), None)
    if broken is None:
        return UserError(
            f"{what.endpoint} refused the {what.verb}: {what.hide(error)}. {what.kept}"
        )
    said = f"{type(broken).__name__}: {what.hide(broken)}"
    local = isinstance(broken, OSError) and not isinstance(broken, ConnectionError)
    if local and getattr(broken, "errno", None) is not None:
        return UserError(f"the {what.verb} stopped on this machine ({said}). {what.kept}")
    return UserError(f"the connection to {what.endpoint} broke ({said}). {what.kept}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes: transfers wrap what the connection raised."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _status(error: BaseException) -> int:
    """The HTTP status of an error's response; 0 without one."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _explain_status(status: int, said: str, what: Exchange) -> str:
    """A sentence or two about an HTTP status."""
    if status == 401:
        return (
            f"{what.endpoint} does not accept the access token{said}. It is wrong or has expired: "
            f"run `hf auth login` or set HF_TOKEN to a valid token with {what.rights} access. "
            f"{what.kept}"
        )
    if status == 403:
        return (
            f"the access token has no {what.rights} access to '{what.repo}'{said}. Use a token "
            f"that has, or a repository under your own name. {what.kept}"
        )
    if status == 404:
        return (
            f"there is no repository '{what.repo}' at {what.endpoint}{said}. {what.missing} "
            f"{what.kept}"
        )
    if status in (409, 412):
        return (
            f"'{what.repo}' was changed by someone else during the {what.verb}{said}. {what.kept}"
        )
    if status == 429:
        return (
            f"{what.endpoint} limits how often it is asked{said}. Wait a few minutes. {what.kept}"
        )
    if status >= 500:
        return (
            f"{what.endpoint} failed with HTTP {status}{said}: the fault is on its side. "
            f"{what.kept}"
        )
    return f"{what.endpoint} refused the {what.verb} with HTTP {status}{said}. {what.kept}"
