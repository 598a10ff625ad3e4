"""Fair sharing of a server between clients: admission to a full server, and the order of work."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Place:
    """A request's place among those that a server holds. displace: ends a waiting request in favour
    of another client's; returns False if work on it has begun. None: work has begun."""

    def __init__(self, places: Places, client: str) -> None:
        self.client = client
        self.displace: Callable[[], bool] | None = None
        self._places = places

    def leave(self) -> None:
        """Give the place back; a second call does nothing."""
        self._places.remove(self)


class Places:
    """`most` places for requests. In a full server, a client with fewer requests takes the place of
    the newest waiting request of the client with the most. Use it on one thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[str, list[Place]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def count(self, client: str) -> int:
        """Places that a client has."""
        return len(self._of.get(client, ()))

    def take(self, client: str) -> Place | None:
        """A place; None if none is free and none can be freed."""
        if len(self) >= self.most and not self._make_room(self.count(client) + 1):
            return None
        place = Place(self, client)
        self._of.setdefault(client, []).append(place)
        return place

    def _make_room(self, least: int) -> bool:
        """Displace a request of a client with more than `least`; returns whether one was
        displaced."""
        for places in sorted(self._of.values(), key=len, reverse=True):
            if len(places) <= least:
                return False
            for place in reversed(places):
                if place.displace is not None and place.displace():
                    self.remove(place)
                    return True
        return False

    def remove(self, place: Place) -> None:
        """Remove a place, if it is still taken."""
        mine = self._of.get(place.client, [])
        if place in mine:
            mine.remove(place)
            if not mine:
                del self._of[place.client]


class FairQueue(Generic[Item]):
    """A queue in which clients take turns; one client's items keep their order. Use it on one
    thread, or under a lock."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, client: str, item: Item) -> None:
        """Add a client's item."""
        self._of.setdefault(client, deque()).append(item)

    def get(self) -> Item:
        """Take the next client's first item; raises `IndexError` if there is none."""
        if not self._of:
            raise IndexError("the queue is empty")
        client, items = self._of.popitem(last=False)
        item = items.popleft()
        if items:
            self._of[client] = items  # after the others
        return item

    def clear(self) -> None:
        self._of.clear()
