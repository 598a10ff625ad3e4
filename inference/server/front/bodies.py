"""The bytes of request bodies that a server holds. At the limit, connections whose body is still
arriving are ended for others."""

from __future__ import annotations

from inference.server.errors import ApiError
from inference.server.front.seats import Seat, Seats


class Bodies:
    """All held bodies, at most `most` bytes. Use it on the event loop's thread."""

    def __init__(self, most: int, seats: Seats) -> None:
        self.most, self.seats = most, seats
        self.held = 0
        # in the order in which they began
        self._arriving: dict[Seat, int] = {}
        self._complete: dict[Seat, int] = {}

    def add(self, seat: Seat, count: int) -> None:
        """Hold `count` more bytes of a connection's body. If needed, connections whose body is
        still arriving are ended, the oldest first. Raises `ApiError` if there are none."""
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
        """Mark a body as complete: it is held until it is released."""
        if seat in self._arriving:
            self._complete[seat] = self._arriving.pop(seat)

    def release(self, seat: Seat) -> None:
        """Stop holding a connection's body."""
        self.held -= self._arriving.pop(seat, 0) + self._complete.pop(seat, 0)
