"""Bearer tokens, and the addresses that need one."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class Secret:
    """A bearer token. It is compared in constant time and never printed."""

    value: bytes

    def __repr__(self) -> str:
        return "Secret(...)"

    def matches(self, header: bytes) -> bool:
        """Whether the value of an Authorization header has the token."""
        scheme, _, given = header.partition(b" ")
        same = hmac.compare_digest(given.strip(), self.value)
        return same and scheme.lower() == b"bearer"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def client_of(host: str) -> str:
    """The client of an address: the address itself; for IPv6 its /64 network, as one machine can
    have all addresses of it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
