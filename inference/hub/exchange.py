"""A connection to a Hub: address, token, transfer, and errors, which never contain the token."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import huggingface_hub
from huggingface_hub import HfApi, constants, errors

from heads.api.errors import UserError

OFFICIAL = "https://huggingface.co"
STATUS = {
    401: "{endpoint} does not accept the access token{reason}. It is wrong or has expired: run "
    "`hf auth login` or set HF_TOKEN to a valid token with {rights} access.",
    403: "the access token has no {rights} access to '{repo}'{reason}. Use a token that has, or a "
    "repository under your own name.",
    404: "there is no repository '{repo}' at {endpoint}{reason}. {missing}",
    409: "'{repo}' was changed by someone else during the {verb}{reason}.",
    412: "'{repo}' was changed by someone else during the {verb}{reason}.",
    429: "{endpoint} limits how often it is asked{reason}. Wait a few minutes.",
}
"""HTTP status -> the advice in the error message."""


@dataclass(frozen=True)
class Exchange:
    """A request to a Hub, as its errors describe it.

    verb: push or pull; rights: what the token is needed for; missing: what to do about a missing
    repository; kept: what remains after a failure, and how to continue.
    """

    repo: str
    endpoint: str
    token: str
    verb: str
    rights: str
    missing: str
    kept: str

    @contextmanager
    def connect(self) -> Iterator[HfApi]:
        """The Hub's interface in a block; its errors become `UserError`s that say what to do. Xet
        transfer is used only with the official Hub: all mirrors support Git LFS, few support
        Xet."""
        before = constants.HF_HUB_DISABLE_XET
        constants.HF_HUB_DISABLE_XET = before or self.endpoint != OFFICIAL
        token = self.token or False
        try:
            yield HfApi(endpoint=self.endpoint, token=token, library_name="headstart")
        except UserError:  # a ValueError, but of ours: it says what to do
            raise
        except errors.OfflineModeIsEnabled as error:
            raise UserError(
                f"huggingface_hub is in offline mode (HF_HUB_OFFLINE=1). Unset it to {self.verb}."
            ) from error
        except errors.HFValidationError as error:
            raise UserError(
                f"{self.verb}.repo '{self.repo}' is not a name that the Hub accepts: {error}"
            ) from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:  # it does not check fields
            no_json = isinstance(error, json.JSONDecodeError)
            lacks = "no JSON" if no_json else f"{type(error).__name__}: {self.hide(error)}"
            raise UserError(
                f"{self.endpoint} does not answer like a Hub ({lacks}). Check HF_ENDPOINT. "
                f"{self.kept}"
            ) from error
        except errors.LocalEntryNotFoundError as error:  # its message guesses; its cause is exact
            raise UserError(f"{self.explain(error.__cause__ or error)} {self.kept}") from None
        except (errors.HTTPError, RuntimeError, OSError, ValueError) as error:
            raise UserError(f"{self.explain(error)} {self.kept}") from None
        finally:
            constants.HF_HUB_DISABLE_XET = before

    def explain(self, error: BaseException) -> str:
        """Describe the status that the server answered with, otherwise the broken connection,
        otherwise the error."""
        chain = list(causes(error))
        for item in chain:
            status = int(getattr(getattr(item, "response", None), "status_code", 0))
            if status:
                message = getattr(item, "server_message", None)
                reason = f" ({self.hide(message)})" if message else ""
                failed = "{endpoint} failed with HTTP {status}{reason}: the fault is on its side."
                refused = "{endpoint} refused the {verb} with HTTP {status}{reason}."
                text = STATUS.get(status, failed if status >= 500 else refused)
                return text.format(**vars(self), status=status, reason=reason)
        broken = next((one for one in chain if isinstance(one, (errors.HTTPError, OSError))), None)
        if broken is None:
            return f"{self.endpoint} refused the {self.verb}: {self.hide(error)}."
        reason = f"({type(broken).__name__}: {self.hide(broken)})"
        local = isinstance(broken, OSError) and not isinstance(broken, ConnectionError)
        if local and getattr(broken, "errno", None) is not None:
            return f"the {self.verb} stopped on this machine {reason}."
        return f"the connection to {self.endpoint} broke {reason}."

    def hide(self, text: object) -> str:
        """A text on one line, without the token."""
        shown = str(text).replace(self.token, "***") if self.token else str(text)
        return " ".join(shown.split())


def hub_address() -> str:
    """The Hub's address: HF_ENDPOINT, or the official one."""
    return os.environ.get("HF_ENDPOINT", OFFICIAL).rstrip("/")


def hub_token() -> str:
    """The token from the environment or from the Hub's own login; empty if there is none."""
    return huggingface_hub.get_token() or ""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes: transfers wrap the connection's errors."""
    while error is not None:
        yield error
        error = error.__cause__
