"""A server's records: every verification is there, fits the sequence it belongs to, and holds no
token when redacted."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.decoding.engine import Engine
from inference.verifications import SEQUENCES, read_table
from tests.inference.server.running import MODEL, serving


@pytest.mark.parametrize("redact", [False, True])
def test_a_servers_records_tell_what_it_decoded(
    engine: Engine, tmp_path: Path, redact: bool
) -> None:
    with serving(
        engine, records=tmp_path / "records", records_redact=redact, domains=("code",)
    ) as running:
        answers = [
            running.client.completions.create(
                model=MODEL,
                prompt=[5, 6, 7, 8 + number],
                max_tokens=20,
                temperature=number % 2,
                seed=number,
                extra_body={"return_token_ids": True},
                extra_headers={"X-Headstart-Domain": "code"},
            )
            for number in range(4)
        ]
        passes = running.metrics()['headstart_verify_passes_total{domain="code"}']
    rows = read_table(tmp_path / "records").to_pylist()
    found = {
        row["sequence"]: row for row in read_table(tmp_path / "records", SEQUENCES).to_pylist()
    }
    assert len(rows) == passes > 0 and set(found) == {answer.id for answer in answers}
    for number, answer in enumerate(answers):
        whole = found[answer.id]
        assert (whole["prompt_length"], whole["temperature"], whole["domain"]) == (
            4,
            number % 2,
            "code",
        )
        assert whole["answer_length"] == len(answer.choices[0].token_ids)  # type: ignore[attr-defined]
        if redact:
            assert whole["tokens"] is None and whole["seed"] is None
            continue
        assert whole["tokens"] == [5, 6, 7, 8 + number, *answer.choices[0].token_ids]  # type: ignore[attr-defined]
    for row in rows:
        if redact:
            assert row["drafted"] is None and row["pick"] is None
            continue
        text = found[row["sequence"]]["tokens"]
        start, kept = row["position"] + 1, row["accepted"]
        assert row["drafted"][:kept] == text[start : start + kept]
        if row["error_depth"]:
            assert row["error_depth"] == kept + 1
            assert row["pick"] == text[start + kept] != row["drafted"][kept]
