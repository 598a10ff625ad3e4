"""Clients share places and turns."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.server.front.fair import FairQueue, Place, Places
from inference.server.front.limits import Limits
from inference.server.front.seats import Seats
from inference.server.front.secret import Secret, client_of
from inference.server.front.workers import FairWorkers


def test_clients_take_turns_and_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.put(item[0], item)
    assert [queue.get() for _ in range(len(queue))] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(IndexError):
        queue.get()


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 8))
def test_places_are_never_more_than_there_are_and_end_fairly(asking: list[str], most: int) -> None:
    places, held = Places(most), []

    def ask(client: str) -> None:
        place = places.take(client)
        if place is not None:
            held.append(place)
            place.displace = lambda: held.remove(place) is None

    for client in asking:
        ask(client)
        assert len(places) == len(held) <= most
    counts, wanted = Counter(place.client for place in held), Counter(asking)
    for client, count in wanted.items():  # nobody has two more than one who was refused
        if counts[client] < count:
            assert max(counts.values()) <= counts[client] + 1


def test_work_that_has_begun_is_not_displaced() -> None:
    places = Places(2)
    first, second = places.take("a"), places.take("a")
    assert isinstance(first, Place) and isinstance(second, Place)
    second.displace = lambda: False
    assert places.take("b") is None
    displaced: list[str] = []
    first.displace = lambda: displaced.append("first") is None
    assert places.take("b") is not None and displaced == ["first"]
    first.leave()
    assert len(places) == 2


def test_a_clients_long_jobs_do_not_hold_up_anothers() -> None:
    workers, order, gate = FairWorkers(1, "test"), [], threading.Event()
    begun = threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(10)

    workers.submit("a", hold)
    begun.wait(10)
    jobs = [workers.submit("a", lambda n=n: order.append(f"a{n}")) for n in range(3)]
    jobs[1].cancel()
    last = workers.submit("b", lambda: order.append("b"))
    gate.set()
    last.result(10)
    jobs[2].result(10)
    assert order == ["a0", "b", "a2"] or order == ["b", "a0", "a2"]
    with pytest.raises(ZeroDivisionError):
        workers.submit("a", lambda: 1 // 0).result(10)
    workers.stop()


def test_the_oldest_waiting_connection_of_the_greediest_address_goes() -> None:
    seats, ended = Seats(Limits(connections_per_address=3), 4), []

    def enter(client: str, name: str) -> object:
        seat = seats.take(client)
        if seat is not None:
            seat.end = lambda: ended.append(name)
        return seat

    first = enter("a", "a1")
    enter("b", "b1")
    enter("a", "a2")
    assert first is not None
    first.answering()  # type: ignore[attr-defined]
    enter("a", "a3")
    enter("a", "a4")  # over the address's limit, and a1 is being answered
    assert ended == ["a2"]
    enter("c", "c1")
    assert ended == ["a2", "a3"] and len(seats) == 4
    assert (seats.displaced, seats.refused) == (2, 0)
    seats.end_waiting()
    assert len(seats) == 1
    first.waiting()  # type: ignore[attr-defined]
    first.leave()  # type: ignore[attr-defined]
    first.leave()  # type: ignore[attr-defined]
    assert len(seats) == 0


def test_a_network_of_ipv6_is_one_client() -> None:
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") != client_of("2001:db9::1")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1") == "10.0.0.1"
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth0")
    assert client_of("") == ""


def test_only_the_token_matches() -> None:
    secret = Secret(b"a-token")
    assert secret.matches(b"Bearer a-token") and secret.matches(b"bearer  a-token ")
    for wrong in (b"", b"a-token", b"Basic a-token", b"Bearer a-toke", b"Bearer a-token\xff"):
        assert not secret.matches(wrong)
    assert "a-token" not in repr(secret)
