"""Clients that share a server fairly: who may come in when it is full, and who is next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Place:
    """A request's place among those that a server holds. displace: ends a request that waits, for
    another client's; returns False where work on it has begun. None: it has."""

    def __init__(self, places: Places, client: str) -> None:
        self.client = client
        self.displace: Callable[[], bool] | None = None
        self._places = places

    def leave(self) -> None:
        """Give the place back; again does nothing."""
        self._places.remove(self)


class Places:
    """`most` places for requests. In a full server a client with fewer requests takes the place of
    the newest waiting one of the client with the most. On one thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[str, list[Place]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def count(self, client: str) -> int:
        """Places that a client has."""
        return len(self._of.get(client, ()))

    def take(self, client: str) -> Place | None:
        """A place, None where none is free and none can be made."""
        if len(self) >= self.most and not self._make_room(self.count(client) + 1):
            return None
        place = Place(self, client)
        self._of.setdefault(client, []).append(place)
        return place

    def _make_room(self, least: int) -> bool:
        """Displace a request of a client that has more than `least`; returns whether one was."""
        for places in sorted(self._of.values(), key=len, reverse=True):
            if len(places) <= least:
                return False
            for place in reversed(places):
                if place.displace is not None and place.displace():
                    self.remove(place)
                    return True
        return False

    def remove(self, place: Place) -> None:
        """Forget a place, if it still is one."""
        mine = self._of.get(place.client, [])
        if place in mine:
            mine.remove(place)
            if not mine:
                del self._of[place.client]


class FairQueue(Generic[Item]):
    """Items of clients, which take turns; one client's items keep their order. On one thread, or
    under a lock."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, client: str, item: Item) -> None:
        """Add a client's item."""
        self._of.setdefault(client, deque()).append(item)

    def get(self) -> Item:
        """Take the next client's first item; raises `IndexError` when there is none."""
        if not self._of:
            raise IndexError("the queue is empty")
        client, items = self._of.popitem(last=False)
        item = items.popleft()
        if items:
            self._of[client] = items  # behind the others
        return item

    def clear(self) -> None:
        self._of.clear()
