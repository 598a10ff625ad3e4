"""The report about domains says what a real measurement with bench=domains found, and refuses
another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import cli
from scripts.evidence import domains


def measure(root: Path, *overrides: str) -> int:
    where = [f"run.root={root}", "run.name=run", "measure.name=domains", "measure.kinds=[jacobi]"]
    small = ["bench.prompts_per_domain=1", "bench.warmup_prompts=1", "bench.repeats=1"]
    return cli.main(["measure", *where, *small, "decode.max_new_tokens=8", *overrides])


@pytest.mark.slow
def test_the_tables_are_of_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(tmp_path, "bench=domains") == 0
    out = tmp_path / "domains"
    assert domains.main([str(tmp_path / "run"), "--out", str(out)]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    (row,) = content["rows"]
    measured = json.loads((tmp_path / "run/domains/report.json").read_text())
    asked = measured["run"]["prompts"]["domains"]
    assert set(asked.values()) == set(row["domains"]) == set(domains.PUBLISHED)
    assert sum(name.startswith("domain-chat") for name in asked) == 3  # turns of one conversation
    found = content["jacobi_iterations"]
    assert set(found) == set(domains.PUBLISHED)
    assert all(0 <= one["passes"] <= 4 and one["blocks"] == 2 for one in found.values())
    text = out.with_suffix(".md").read_text()
    assert "| published | highest | 75-85% |" in text
    assert f"| jacobi | {100 * row['tar']:.0f}% | {row['tau']:.2f} [" in text


def test_another_measurement_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert domains.main([str(tmp_path / "run")]) == 2
    assert "is missing. Run `headstart measure experiment=families" in capsys.readouterr().err
    assert measure(tmp_path, "bench.domains=[code]", "bench.prompts_per_domain=2") == 0
    capsys.readouterr()
    assert domains.main([str(tmp_path / "run")]) == 2
    assert "was not measured with bench=domains" in capsys.readouterr().err
