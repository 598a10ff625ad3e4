"""TLS by certificate files: who trusts the certificate is served, and files that are none are
refused in one sentence."""

from __future__ import annotations

import shutil
import ssl
import urllib.request
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.server.front.tls import client_context, server_context
from tests.inference.server.front.served import certificate, closed, served

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def test_a_certificate_is_shown_and_silence_is_no_handshake(tmp_path: Path) -> None:
    pair = certificate(tmp_path)
    tls = server_context("serve", *pair)
    with served(tls=tls, header_seconds=1.0) as front:
        url = f"https://127.0.0.1:{front.port}/"
        trusting = client_context("features.ssl_cafile", pair[0])
        with urllib.request.urlopen(url, context=trusting, timeout=20) as answer:
            assert answer.status == 200 and answer.read() == b"0"
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(url, context=ssl.create_default_context(), timeout=20)
        with front.connect() as silent:
            assert closed(silent)
        with front.connect() as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert closed(plain)


def test_handshakes_that_do_not_end_keep_nobody_out(tmp_path: Path) -> None:
    pair = certificate(tmp_path)
    with served(tls=server_context("serve", *pair), connections=20) as front:
        silent = [front.connect() for _ in range(60)]
        trusting = client_context("features.ssl_cafile", pair[0])
        url = f"https://127.0.0.1:{front.port}/"
        with urllib.request.urlopen(url, context=trusting, timeout=20) as answer:
            assert answer.status == 200
        assert len(front.front.seats) <= 20
        for connection in silent:
            connection.close()


def test_files_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    pair, other = certificate(tmp_path), certificate(tmp_path, "other")
    (tmp_path / "text").write_text("no certificate")
    cases = [
        (("", pair[1]), "serve.ssl_certfile is not"),
        ((pair[0], ""), "cannot be used for TLS"),
        ((pair[0], other[1]), "values mismatch"),
        ((str(tmp_path / "absent"), pair[1]), "No such file"),
        ((str(tmp_path / "text"), pair[1]), "PEM files of a certificate"),
    ]
    for given, words in cases:
        with pytest.raises(UserError, match=words):
            server_context("serve", *given)
    locked = tmp_path / "locked.key"
    import subprocess

    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", pair[1], "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    with pytest.raises(UserError, match="unencrypted"):  # and nobody is asked for a password
        server_context("serve", pair[0], str(locked))
    with pytest.raises(UserError, match=r"features.ssl_cafile '.*text' cannot be used"):
        client_context("features.ssl_cafile", str(tmp_path / "text"))
    assert server_context("serve", "", "") is None
