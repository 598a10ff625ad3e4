"""The bytes of requests that a server holds: those that still arrive give way to others."""

from __future__ import annotations

from inference.server.errors import ApiError
from inference.server.front.seats import Seat, Seats


class Bodies:
    """All bodies that are held, `most` bytes. On the event loop's thread."""

    def __init__(self, most: int, seats: Seats) -> None:
        self.most, self.seats = most, seats
        self.held = 0
        # the one that began first comes first
        self._arriving: dict[Seat, int] = {}
        self._complete: dict[Seat, int] = {}

    def add(self, seat: Seat, count: int) -> None:
        """Hold `count` more bytes of a connection's body. Connections whose body still arrives are
        ended for them where needed, the oldest first; raises `ApiError` when there are none."""
        while self.held + count > self.most:
            oldest = next((other for other in self._arriving if other is not seat), None)
            if oldest is None:
                message = f"the server holds {self.held} bytes of requests. Ask again later."
                raise ApiError(503, message, code="overloaded", retry_after=1)
            self.release(oldest)
            self.seats.displace(oldest)
        self.held += count
        self._arriving[seat] = self._arriving.get(seat, 0) + count

    def complete(self, seat: Seat) -> None:
        """A body is here: it is held until it is released."""
        if seat in self._arriving:
            self._complete[seat] = self._arriving.pop(seat)

    def release(self, seat: Seat) -> None:
        """A connection's body is held no more."""
        self.held -= self._arriving.pop(seat, 0) + self._complete.pop(seat, 0)
