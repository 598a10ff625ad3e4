"""The open connections, and which one is ended if there are too many.

A connection without a complete request costs its client nothing, so it must not keep others out: at
a limit, the connection that has waited longest is ended for the new one. Connections whose request
is being answered are never ended for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from inference.server.front.limits import Limits


class Seat:
    """A connection's seat. end: ends the connection; set by the caller that took the seat."""

    def __init__(self, seats: Seats, client: str) -> None:
        self.client, self._seats = client, seats
        self.end: Callable[[], object] = lambda: None

    def answering(self) -> None:
        """Mark the connection's request as complete: it can no longer be displaced."""
        self._seats.settle(self)

    def waiting(self) -> None:
        """Mark the connection as waiting for its client from now on."""
        self._seats.unsettle(self)

    def leave(self) -> None:
        """Give the seat back; a second call does nothing."""
        self._seats.remove(self)


class Seats:
    """Seats for connections, within `limits`. Use it on the event loop's thread.

    displaced: connections ended for others so far; refused: new connections that were not admitted
    because all others were being answered.
    """

    def __init__(self, limits: Limits, connections: int) -> None:
        self.connections, self.of_address = connections, limits.connections_per_address
        self.displaced = self.refused = 0
        self._counts: dict[str, int] = {}
        self._settled: set[Seat] = set()
        # the connection that has waited longest comes first
        self._waiting: dict[Seat, None] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._settled)

    def take(self, client: str) -> Seat | None:
        """A seat for a new connection; None if no connection can be displaced for it."""
        fits = self._counts.get(client, 0) < self.of_address or self._displace(client)
        if not fits or (len(self) >= self.connections and not self.displace_one()):
            self.refused += 1
            return None
        seat = Seat(self, client)
        self._counts[client] = self._counts.get(client, 0) + 1
        self._waiting[seat] = None
        return seat

    def displace_one(self) -> bool:
        """End a waiting connection of the address with the most of them; returns whether there was
        one."""
        waiting = Counter(seat.client for seat in self._waiting)
        return bool(waiting) and self._displace(waiting.most_common(1)[0][0])

    def end_waiting(self) -> None:
        """End all waiting connections."""
        while self._waiting:
            self._end(next(iter(self._waiting)))

    def _displace(self, client: str) -> bool:
        oldest = next((seat for seat in self._waiting if seat.client == client), None)
        if oldest is not None:
            self.displace(oldest)
        return oldest is not None

    def displace(self, seat: Seat) -> None:
        """End this connection in favour of others."""
        self.displaced += 1
        self._end(seat)

    def _end(self, seat: Seat) -> None:
        self.remove(seat)
        seat.end()

    def settle(self, seat: Seat) -> None:
        if seat in self._waiting:
            del self._waiting[seat]
            self._settled.add(seat)

    def unsettle(self, seat: Seat) -> None:
        if seat in self._waiting or seat in self._settled:
            self._settled.discard(seat)
            self._waiting.pop(seat, None)
            self._waiting[seat] = None

    def remove(self, seat: Seat) -> None:
        """Remove a seat, if it is still taken."""
        if seat in self._waiting or seat in self._settled:
            self._waiting.pop(seat, None)
            self._settled.discard(seat)
            self._counts[seat.client] -= 1
            if not self._counts[seat.client]:
                del self._counts[seat.client]
