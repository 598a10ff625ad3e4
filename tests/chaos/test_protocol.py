"""What the attack on both servers sends, and that it sees their failures."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.chaos import protocol
from tests.chaos.protocol import Sent, Server


def test_requests_follow_from_the_seed_and_are_of_every_kind() -> None:
    first, again = ([protocol.serve_request(random.Random(3)) for _ in range(9)] for _ in range(2))
    assert first == again
    order = random.Random(0)
    kinds = {protocol.serve_request(order).kind for _ in range(400)}
    assert kinds == set(protocol.SERVE_KINDS)


@contextmanager
def answering(answer: bytes) -> Iterator[Server]:
    """A server that answers every connection with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        process: Any = None
        yield Server(process, "127.0.0.1", listening.getsockname()[1])
        thread.join()


def test_a_failure_of_the_server_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself must be able to fail."""
    sent = Sent("kind", b"GET / HTTP/1.1\r\n\r\n")
    for answer, wrong in ((b"400 Bad Request", ""), (b"500 Oops", "kind: 500 to")):
        with answering(b"HTTP/1.1 " + answer + b"\r\n\r\n") as server:
            found = protocol.wrong_with(server, sent)
            assert found.startswith(wrong) and bool(found) == bool(wrong)
    monkeypatch.setattr(protocol, "LONGEST", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process: Any = None
        server = Server(process, "127.0.0.1", silent.getsockname()[1])
        assert "no answer within 0.2 s" in protocol.wrong_with(server, sent)
