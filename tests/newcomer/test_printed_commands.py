"""Blocks of the pages that say they are executed are executed, exactly as printed; so are the
commands of other blocks that only plan, show or explain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.newcomer.pages import DOCS, README, blocks, commands, page_name
from tests.newcomer.reader import Reader

pytestmark = pytest.mark.slow
EXECUTED = [page for page in (README, *DOCS) if blocks(page, "bash test")]
PLANS = list(
    dict.fromkeys(
        line
        for page in (README, *DOCS)
        for line in commands(page, "bash", "bash long", "bash gpu")
        if line.startswith("headstart") and {"--plan", "--show", "--help"} & set(line.split())
    )
)


@pytest.mark.parametrize("page", EXECUTED, ids=page_name)
def test_the_blocks_of_a_page_run(page: Path, reader: Reader) -> None:
    said = reader.run("\n".join(blocks(page, "bash test")), small=False)
    if page.stem == "README":
        look_at_the_readmes_run(reader)
    if page.stem == "quickstart":
        assert "a few training steps" in said and "cannot teach" in said
        assert "| medusa |" in said, "the table of report.md"


def look_at_the_readmes_run(reader: Reader) -> None:
    run = reader.home / "outputs" / "readme"
    report = reader.json("outputs/readme/report.json")
    assert {entry["kind"] for entry in report["drafters"]} == {"medusa", "ngram"}
    assert all(entry["lossless"]["mismatches"] == 0 for entry in report["drafters"])
    pages = ("report.md", "report.html", "acceptance.png", "speedup.png")
    for file in (*pages, "push/medusa/model.safetensors", "train/medusa/log.jsonl"):
        assert (run / file).is_file(), file
    for stage in ("generate", "train/medusa", "measure"):
        record = reader.json(f"outputs/readme/{stage}/run.json")
        assert record["state"] == "complete"
        assert record["sessions"][0]["packages"]["torch"]
        assert (run / stage / "config.yaml").is_file()
    again = reader.run("headstart loop debug=fast run.name=readme")
    assert again.count("is complete") == 3  # nothing is done twice


def test_pages_print_plans() -> None:
    assert any("$" not in line and "--plan experiment=" in line for line in PLANS)


@pytest.mark.parametrize("line", PLANS)
def test_plans_and_shown_settings(line: str, reader: Reader) -> None:
    said = reader.run(line, small=False)
    assert len(said.splitlines()) > 5
    if "--plan" in line:
        assert "GiB" in said and "hours" in said
    assert not (reader.home / "outputs").exists()
