"""Error responses, in the shape of OpenAI's API."""

from __future__ import annotations

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error response. retry_after: seconds after which the client should try again."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        other = "server_error" if status >= 500 else "invalid_request_error"
        kind = TYPES.get(status, other)
        self.status = status
        self.kind = code or kind
        """A word for logs, without anything that a client sent."""
        # a message may quote half a character of what was sent
        message = message.encode("utf-8", "replace").decode()
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        """The JSON to send."""
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


class ClientGoneError(ConnectionError):
    """The client of an answer has left, or does not read the answer."""
