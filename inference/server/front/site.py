"""What the front serves: an ASGI application, with its access rules and callbacks."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from inference.server.errors import ApiError
from inference.server.front.limits import Limits
from inference.server.front.secret import Secret

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI application. If it raises an `ApiError` before its answer begins, this is the answer."""


@dataclass(frozen=True)
class Site:
    """An application with its limits and access rules. open_paths: paths that need no token.
    refused: called for every request that the front refused, with its method (empty: its headers
    were not read), the error and its client."""

    app: App
    limits: Limits = field(default_factory=Limits)
    secret: Secret | None = None
    open_paths: frozenset[str] = frozenset()
    tls: ssl.SSLContext | None = None
    refused: Callable[[str, ApiError, str], None] = lambda method, error, client: None
