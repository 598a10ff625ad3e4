"""`headstart measure bench.server` and `headstart watch watch.metrics=<address>` from the command
line."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest

from inference.report.model import read_report
from scripts.cli import main
from tests.inference.engines.stub import serving


def write_prompts(path: Path) -> Path:
    rows = [
        {"id": f"{domain}-{number}", "domain": domain, "prompt": f"{domain} number {number}"}
        for domain in ("code", "prose")
        for number in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_running_server_is_measured_and_reported(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(in_folder / "prompts.jsonl")
    with serving() as stub:
        given = ["measure", "run.name=out", "bench=jsonl", f"bench.prompts={prompts}"]
        given += [f"bench.server={stub.base}/v1", "decode.max_new_tokens=16", "bench.repeats=1"]
        assert main(given) == 0
        assert "vLLM with 1 client" in capsys.readouterr().out
        asked = len(stub.bodies)
        assert main(given) == 0 and len(stub.bodies) == asked  # it is complete
        assert main([*given, "bench.serving.retries=-1"]) == 2
        kept = [Path("outputs/out/measure", name) for name in ("run.json", "config.yaml")]
        before = [file.read_bytes() for file in kept]
        assert main([*given, "bench.serving.model=another"]) == 2
    assert "does not serve 'another'" in capsys.readouterr().err
    assert before == [file.read_bytes() for file in kept]
    report = read_report(Path("outputs/out/measure"))
    assert report.server is not None and report.server.speculative.engine == "vLLM"
    assert main(["report", "run.name=out"]) == 0
    assert Path("outputs/out/server.png").is_file()
    assert "nobody else may use it" in Path("outputs/out/report.html").read_text()


def test_a_measurement_whose_server_stays_away_is_continued(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(in_folder / "prompts.jsonl")
    with serving(faults=deque([None, None, None, 503, 503])) as stub:
        given = ["measure", "run.name=out", "bench=jsonl", f"bench.prompts={prompts}"]
        given += [f"bench.server={stub.base}", "decode.max_new_tokens=16", "bench.repeats=1"]
        assert main([*given, "bench.serving.retries=1", "bench.serving.backoff=0.01"]) == 2
        assert "What was measured is kept: repeat the command" in " ".join(
            capsys.readouterr().err.split()
        )
        asked = len(stub.bodies)
        assert main(given) == 0  # with other patience
        assert len(stub.bodies) - asked == 1 + 3  # the last prompt warms up, two are measured
    report = read_report(Path("outputs/out/measure"))
    assert report.server is not None
    assert [cell.requests for cell in report.server.speculative.overall()] == [5]


def test_schemas_are_sent_and_contexts_refused(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(in_folder / "prompts.jsonl")
    row = {
        "id": "own",
        "domain": "code",
        "prompt": "code as JSON",
        "json_schema": {"type": "object"},
    }
    with prompts.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with serving() as stub:
        given = ["measure", "run.name=out", f"bench.server={stub.base}", "decode.max_new_tokens=16"]
        assert main([*given, "bench=jsonl", f"bench.prompts={prompts}", "bench.repeats=1"]) == 0
        asked = [body for body in stub.bodies if "response_format" in body]
        assert {str(body["messages"]) for body in asked if "code as JSON" in str(body)}
        before = len(stub.bodies)
        assert main([*given, "bench=embedded_long", "measure.name=long"]) == 2
        assert len(stub.bodies) == before
    assert "only bench.serving.api=completions does" in capsys.readouterr().err
