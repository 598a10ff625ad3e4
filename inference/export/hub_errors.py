"""What goes wrong between here and a Hub, in words for people, and never with a token in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from heads.api.errors import UserError


@dataclass(frozen=True)
class Exchange:
    """What is asked of a Hub. key: the configuration key that names the repository; verb: push or pull; rights: what the token is
    needed for; missing: what to do about a repository that is not there; kept: what a failure leaves, and how to go on.
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
        told = str(text).replace(self.token, "***") if self.token else str(text)
        return " ".join(told.split())


@contextmanager
def explained(what: Exchange) -> Iterator[None]:
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
        raise UserError(f"huggingface_hub is in offline mode (HF_HUB_OFFLINE=1). Unset it to {what.verb}.") from error
    except HFValidationError as error:
        raise UserError(f"{what.key} '{what.repo}' is not a name that the Hub accepts: {error}") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:  # the library reads fields that are not there
        lacks = "no JSON" if isinstance(error, json.JSONDecodeError) else f"{type(error).__name__}: {what.hide(error)}"
        raise UserError(f"{what.endpoint} does not answer like a Hub ({lacks}). Check HF_ENDPOINT. {what.kept}") from error
    except LocalEntryNotFoundError as error:  # its own text guesses; its cause knows
        raise _told(what, error.__cause__ or error) from None
    except (HTTPError, RuntimeError, OSError, ValueError) as error:
        raise _told(what, error) from None


def _told(what: Exchange, error: BaseException) -> UserError:
    """The status that someone answered with, or else the connection that broke, or else the error as it is."""
    from huggingface_hub.errors import HTTPError

    chain = list(_chain(error))
    answered = next((item for item in chain if _status(item)), None)
    if answered is not None:
        reason = getattr(answered, "server_message", None)
        return UserError(_explain(_status(answered), f" ({what.hide(reason)})" if reason else "", what))
    broken = next((item for item in chain if isinstance(item, (HTTPError, OSError))), None)
    if broken is not None:
        said = f"{type(broken).__name__}: {what.hide(broken)}"
        if isinstance(broken, OSError) and broken.errno is not None and not isinstance(broken, ConnectionError):
            return UserError(f"the {what.verb} stopped on this machine ({said}). {what.kept}")
        return UserError(f"the connection to {what.endpoint} broke ({said}). {what.kept}")
    return UserError(f"{what.endpoint} refused the {what.verb}: {what.hide(error)}. {what.kept}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it: transfers wrap what the connection raised."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _status(error: BaseException) -> int:
    """The HTTP status that an error came with; 0 where nobody answered."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _explain(status: int, said: str, what: Exchange) -> str:
    """A sentence or two about an HTTP status."""
    if status == 401:
        return (
            f"{what.endpoint} does not accept the access token{said}. It is wrong or has expired: run `hf auth login` or set "
            f"HF_TOKEN to a valid token with {what.rights} access. {what.kept}"
        )
    if status == 403:
        return (
            f"the access token has no {what.rights} access to '{what.repo}'{said}. Use a token that has, or a repository "
            f"under your own name. {what.kept}"
        )
    if status == 404:
        return f"there is no repository '{what.repo}' at {what.endpoint}{said}. {what.missing} {what.kept}"
    if status in (409, 412):
        return f"'{what.repo}' was changed by someone else during the {what.verb}{said}. {what.kept}"
    if status == 429:
        return f"{what.endpoint} limits how often it is asked{said}. Wait a few minutes. {what.kept}"
    if status >= 500:
        return f"{what.endpoint} failed with HTTP {status}{said}: the fault is on its side. {what.kept}"
    return f"{what.endpoint} refused the {what.verb} with HTTP {status}{said}. {what.kept}"
