"""What a client may cost before it has shown the token, and after; over real sockets."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time

import pytest

from inference.server.front.limits import DESCRIPTORS_KEPT, connections_within
from tests.inference.server.front.served import answer, closed, served
from tests.waiting import until

TOKEN = "a-token-for-the-tests"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: bytes, *headers: bytes, path: bytes = b"/", length: bytes | None = None) -> bytes:
    """A request with a body, of which another length may be claimed."""
    size = str(len(body)).encode() if length is None else length
    lines = (b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: " + size, *headers)
    return b"\r\n".join((*lines, b"", body))


def test_answers_come_in_order_on_one_connection() -> None:
    with served() as front, front.connect() as connection:
        connection.sendall(post(b"abc") + post(b"abcd"))  # the second one before its turn
        assert answer(connection) == (200, 3)
        assert answer(connection) == (200, 4)
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n")
        assert answer(connection) == (200, 5)
        connection.sendall(post(b"a" * 10, b"Expect: 100-continue", length=b"10")[:-10])
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(b"a" * 10)
        assert answer(connection) == (200, 10)


def test_headers_that_do_not_end_are_given_up_and_nobody_waits_for_them() -> None:
    """Of 300 half-sent requests no more are kept than may be, and a whole one is answered at once;
    the connections that stay are ended in time."""
    half = b"POST /v1/completions HTTP/1.1\r\nX-a: "
    with served(connections=100, connections_per_address=80, header_seconds=3.0) as front:
        half_sent = [front.connect() for _ in range(300)]
        for connection in half_sent:
            try:
                connection.sendall(half)
            except OSError:  # it had to go already
                continue
        begun = time.monotonic()
        assert front.ask(post(b"abc")) == (200, 3)
        assert time.monotonic() - begun < 2.5
        assert len(front.front.seats) <= 80
        assert front.front.seats.displaced >= 220
        assert answer(half_sent[-1]) == (
            408,
            {
                "error": {
                    "message": "the headers did not arrive within 3 s.",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "request_timeout",
                }
            },
        )
        for connection in half_sent:
            assert closed(connection)
            connection.close()
        assert set(front.refused) == {("", 408, "127.0.0.1")}


def test_an_address_may_have_so_many_connections_and_others_are_answered() -> None:
    with served(connections=10, connections_per_address=3) as front:
        slow = [front.connect("127.0.0.2") for _ in range(3)]
        for connection in slow:
            connection.sendall(post(b"", path=b"/slow"))
        until(lambda: len(front.bodies) == 3)
        status, body = front.ask(GET, "127.0.0.2")  # none of the three can go: all are answered
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert "are being answered" in body["error"]["message"]
        assert front.ask(GET, "127.0.0.3") == (200, 0)
        front.open_gate()
        for connection in slow:
            assert answer(connection) == (200, 0)
        # an answer is read a moment before its connection counts as idle
        until(lambda: front.ask(GET, "127.0.0.2")[0] == 200)
        idle = [front.connect("127.0.0.2") for _ in range(5)]  # now older ones can
        idle[-1].sendall(GET)
        assert answer(idle[-1]) == (200, 0)
        for connection in (*slow, *idle):
            connection.close()


def test_who_shows_no_token_gives_way_to_others_and_has_no_body_on_open_paths() -> None:
    with served(TOKEN, connections=2) as front:
        right = b"Authorization: Bearer " + TOKEN.encode()
        strangers = [front.connect("127.0.0.2") for _ in range(2)]
        for connection in strangers:
            connection.sendall(GET.replace(b"/ ", b"/open "))
        until(lambda: len(front.bodies) == 2)
        assert front.ask(post(b"abc", right), "127.0.0.3") == (200, 3)
        assert closed(strangers[0])
        until(lambda: len(front.front.seats) == 1)  # the one that was answered has left
        known = []
        for number in (4, 5):
            known.append(front.connect("127.0.0.2"))
            known[-1].sendall(post(b"abc", right, path=b"/open"))
            until(lambda number=number: len(front.bodies) == number)
        assert front.ask(post(b"abc", right), "127.0.0.3")[0] == 503
        front.open_gate()
        for connection in known:
            assert answer(connection) == (200, 3)
        # an answer is read a moment before its connection counts as idle and can give way
        until(lambda: front.ask(post(b"a", path=b"/health"))[0] == 413)
        until(lambda: front.ask(post(b"", path=b"/health")) == (200, 0))
        for connection in (*strangers, *known):
            connection.close()


def test_an_idle_connection_is_ended_and_so_is_one_that_says_nothing() -> None:
    with served(idle_seconds=0.3, header_seconds=0.3) as front, front.connect() as connection:
        assert closed(connection)
        with front.connect() as second:
            second.sendall(GET)
            assert answer(second) == (200, 0)
            assert closed(second)
        assert front.refused == []


def test_no_body_is_read_before_the_token_was_right() -> None:
    with served(TOKEN, body_bytes=1 << 20) as front:
        wrong = post(b"a" * 4096, b"Authorization: Bearer no", length=b"1048576")
        with front.connect() as connection:
            connection.sendall(wrong)  # a part of what is announced
            status, body = answer(connection)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert front.front.bodies.held == 0 and front.bodies == []
        right = b"Authorization: Bearer " + TOKEN.encode()
        assert front.ask(post(b"abc", right)) == (200, 3)
        twice = post(b"abc", b"Authorization: Bearer no", right)
        assert front.ask(twice)[0] == 401
        assert front.ask(GET.replace(b"/ ", b"/health "))[0] == 200
        assert front.ask(GET.replace(b"/ ", b"/%68ealth "))[0] == 401
        assert front.ask(post(b"", right, length=b"1048577"))[0] == 413


def test_a_large_body_is_refused_and_its_sender_can_read_why() -> None:
    with served(body_bytes=1000) as front:
        with front.connect() as connection:
            connection.sendall(post(b"a" * 4_000_000))
            assert answer(connection)[0] == 413
        chunks = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert front.ask(chunks + b"3e8\r\n" + b"a" * 1000 + b"\r\n1\r\nb")[0] == 413
        assert front.bodies == []


def test_half_a_body_gives_way_to_a_whole_one() -> None:
    with served(body_bytes=1000, bodies_bytes=3000, body_seconds=20.0) as front:
        half = [front.connect() for _ in range(3)]
        for number, connection in enumerate(half):
            connection.sendall(post(b"a" * 900, length=b"1000"))
            until(lambda number=number: front.front.bodies.held >= 900 * (number + 1))
        assert front.ask(post(b"b" * 1000)) == (200, 1000)
        assert closed(half[0])
        half[1].sendall(b"a" * 100)
        assert answer(half[1]) == (200, 1000)
        for connection in half:
            connection.close()


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with served(body_seconds=0.3) as front:
        status, body = front.ask(post(b"a", length=b"10"))
        assert (status, body["error"]["message"]) == (
            408,
            "the request did not arrive within 0.3 s.",
        )


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (post(b"", length=b"\xb2"), 400, "bad Content-Length"),
        (post(b"", length=b"-1"), 400, "bad Content-Length"),
        (post(b"", length=b"9" * 5000), 400, "bad Content-Length"),
        (post(b"a", b"Content-Length: 2"), 400, "conflicting Content-Length"),
        (b"nonsense\r\n\r\n", 400, "not HTTP"),
        (b"{} %s {0} }\r\n\r\n", 400, "illegal request line: bytearray(b'{} %s {0} }')"),
        (b"\x16\x03\x01\x02\x00\x01" * 20 + b"\r\n\r\n", 400, "not HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000, 431, "more than 32768 bytes"),
        (post(b"", b"Transfer-Encoding: gzip"), 501, "Transfer-Encoding"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "not HTTP",
        ),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_what_is_not_http_is_refused_with_the_reason(sent: bytes, status: int, words: str) -> None:
    with served() as front:
        found, body = front.ask(sent)
        assert found == status and words in body["error"]["message"]
        assert [status for _, status, _ in front.refused] == [status]  # counted once
        assert front.bodies == []


def test_a_failure_shows_no_insides_and_ends_one_request() -> None:
    with served() as front:
        for path in (b"/fail", b"/fail/file"):
            status, body = front.ask(post(b"", path=path))
            assert status == 500 and "secret" not in str(body)
        assert front.ask(post(b"", path=b"/refuse")) == (
            409,
            {
                "error": {
                    "message": "no.",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": None,
                }
            },
        )
        assert [status for _, status, _ in front.refused] == [500, 500, 409]
        assert front.ask(GET) == (200, 0)


def test_who_leaves_is_noticed_and_who_does_not_read_is_ended() -> None:
    with served(write_seconds=0.5) as front:
        with front.connect() as connection:
            connection.sendall(post(b"", path=b"/watch"))
            until(lambda: front.bodies)
        assert front.left.wait(5)
        with front.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(post(b"", path=b"/large"))
            until(lambda: not len(front.front.seats))


def test_a_large_answer_arrives_whole() -> None:
    with served() as front, front.connect() as connection:
        connection.sendall(post(b"", b"Connection: close", path=b"/large"))
        received = 0
        while data := connection.recv(1 << 20):
            received += len(data)
        assert received > 8 << 20


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), served(connections=1) as front:
        begun = time.monotonic()
        held = [front.connect() for _ in range(100)]
        assert front.ask(GET) == (200, 0)
        seconds = time.monotonic() - begun
        for connection in held:
            connection.close()
        lines = [line for line in caplog.messages if "ended for a new one" in line]
        assert 1 <= len(lines) <= 1 + seconds


def test_connections_leave_descriptors_to_others() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, before[1]), before[1]))
        found = connections_within(1024)
        assert 1 <= found <= 200 - DESCRIPTORS_KEPT
        assert connections_within(5) == min(5, found)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_running_out_of_descriptors_ends_no_server_and_floods_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def take_all() -> list[socket.socket]:
        found: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while True:
                found.append(socket.socket())
        return found

    with caplog.at_level(logging.WARNING), served() as front:
        clients = [front.connect()]
        taken: list[socket.socket] = []
        begun = time.monotonic()

        def refusals() -> int:
            return sum("cannot be accepted" in line for line in caplog.messages)

        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
            # again if something else in this process freed a descriptor, by which it was accepted
            while not refusals() and time.monotonic() - begun < 30:
                taken += take_all()
                taken.pop().close()
                clients.append(front.connect())  # the last descriptor: the front cannot accept it
                time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for item in taken:
                item.close()
        clients[-1].sendall(GET)
        assert answer(clients[-1]) == (200, 0)
        for client in clients:
            client.close()
        assert 1 <= refusals() <= 2 + (time.monotonic() - begun)
