"""Limits on what a client may cost: seconds, bytes and connections."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

DESCRIPTORS_KEPT = 64
"""File descriptors that connections leave to everything else in the process."""


@dataclass(frozen=True)
class Limits:
    """Limits of one server; docs/server.md lists them."""

    connections: int = 1024
    """Connections in all."""
    connections_per_address: int = 512
    """Connections of one address (IPv6: of one /64 network)."""
    header_seconds: float = 10.0
    """From the first byte of a request to the end of its headers; a TLS handshake has as long."""
    idle_seconds: float = 30.0
    """From the connection, or the answer before, to the first byte of a request."""
    body_seconds: float = 20.0
    """From the end of the headers to the end of the body."""
    write_seconds: float = 30.0
    """Time a client takes to read a piece of the answer."""
    header_bytes: int = 32 * 1024
    """All headers of a request."""
    body_bytes: int = 1 << 20
    """The body of a request whose token was right. No other body is read."""
    bodies_bytes: int = 64 << 20
    """All bodies that are held at a time."""


def connections_within(wanted: int) -> int:
    """`wanted` connections, or as many as the process's file descriptors allow (`ulimit -n`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    used = 0
    with contextlib.suppress(OSError):  # no /proc: the number of open descriptors is not known
        used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return max(1, min(wanted, soft - used - DESCRIPTORS_KEPT))
