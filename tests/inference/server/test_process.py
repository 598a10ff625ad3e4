"""`headstart serve` as a process of its own: it starts, says where, answers, ends on SIGTERM, and
keeps its token to itself."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inference.verifications import SEQUENCES, read_facts, read_table
from tests import forked
from tests.inference.server.running import MODEL
from tests.inference.tokenizers import save_micro_target

TOKEN = "a-very-secret-token-of-a-test"


def start(folder: Path, *overrides: str, **environment: str) -> forked.Process:
    target = save_micro_target(folder / "micro")
    return forked.start(
        "scripts.cli",
        "serve",
        "target=local",
        f"target.path={target}",
        "target.dtype=float32",
        "target.device=cpu",
        "serve.port=0",
        f"serve.name={MODEL}",
        f"run.root={folder / 'out'}",
        "decode.batch_size=2",
        *overrides,
        env={**os.environ, **environment},
    )


def address(process: forked.Process) -> tuple[str, list[str]]:
    """Where a started server says it listens, and all lines until then."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        found = re.search(r"at (http://\S+)/v1", line)
        if found:
            return found.group(1), lines
    raise AssertionError("".join(lines))


def test_a_process_serves_ends_on_a_signal_and_leaves_records(tmp_path: Path) -> None:
    process = start(
        tmp_path, "serve.drafter=ngram", "serve.log_rejections=true", HEADSTART_SERVE_TOKEN=TOKEN
    )
    base, lines = address(process)
    client = openai.OpenAI(base_url=f"{base}/v1", api_key=TOKEN, max_retries=0)
    assert httpx.post(f"{base}/v1/completions", json={}).status_code == 401
    stream = client.completions.create(
        model=MODEL,
        prompt="What is a list?",
        max_tokens=100,
        temperature=0,
        stream=True,
        extra_headers={"X-Headstart-Domain": "code"},
    )
    parts = [next(stream).choices[0]]

    def rest() -> None:
        parts.extend(part.choices[0] for part in stream)

    reader = threading.Thread(target=rest)
    reader.start()
    process.send_signal(signal.SIGTERM)  # in the middle of a stream
    reader.join(30)
    assert parts[-1].finish_reason in ("length", "stop")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert TOKEN not in "".join(lines) + out and "list" not in out
    records = tmp_path / "out" / "default" / "records"
    (row,) = read_table(records, SEQUENCES).to_pylist()
    assert (row["domain"], row["finish"]) == ("code", parts[-1].finish_reason)
    assert len(row["tokens"]) == row["prompt_length"] + row["answer_length"]
    assert read_facts(records)["drafter"]["kind"] == "ngram"


def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path) -> None:
    cases: list[tuple[list[str], str]] = [
        (["serve.host=0.0.0.0"], "can be reached from other machines"),
        (["serve.drafter=medusa"], "there is no drafter 'medusa'"),
        (["decode.rule=typical"], "keeps the target's distribution"),
    ]
    for overrides, words in cases:
        process = start(tmp_path, *overrides, HEADSTART_SERVE_TOKEN="")
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 2 and words in out, out
        assert len(out.strip().splitlines()) <= 3 and "Traceback" not in out


def test_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from heads.api.errors import UserError
    from inference.server.config import ServeConfig, read_secret
    from inference.server.front.secret import is_loopback
    from inference.server.front.server import bind

    monkeypatch.setenv("HEADSTART_SERVE_TOKEN", "")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"port": 70000}, r"lie in \[0, 65535\]"),
        ({"queue_seconds": 0}, r"serve.queue_seconds must lie in \[0.1, 1000000000.0\]; given: 0"),
        ({"domains": ()}, "1 to 64 domains"),
    ]
    for values, words in refused:
        with pytest.raises(UserError, match=words):
            ServeConfig(**values)
    assert read_secret(ServeConfig()) is None
    assert read_secret(ServeConfig(host="0.0.0.0", open=True)) is None
    with pytest.raises(UserError, match=r"serve.token_file .* cannot be read"):
        read_secret(ServeConfig(token_file=str(tmp_path / "absent")))
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    secret = read_secret(ServeConfig(host="0.0.0.0", token_file=str(file)))
    assert (
        secret is not None
        and secret.matches(f"Bearer {TOKEN}".encode())
        and not secret.matches(f"Bearer {TOKEN}x".encode())
    )
    assert not secret.matches(b"") and TOKEN not in repr(secret)
    file.write_text("short")
    with pytest.raises(UserError, match="has 5 characters; 16 are the least"):
        read_secret(ServeConfig(token_file=str(file)))
    assert [
        is_loopback(host)
        for host in ("127.0.0.1", "::1", "[::1]", "localhost", "0.0.0.0", "10.0.0.1", "example.org")
    ] == [True, True, True, True, False, False, False]
    listening = bind("serve", "127.0.0.1", 0)
    listening.listen()
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1"):
        bind("serve", "127.0.0.1", listening.getsockname()[1])
    listening.close()
