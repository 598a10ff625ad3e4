"""Blocks of the pages that say they are executed are executed, exactly as printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.newcomer.pages import PAGES, README, blocks, page_name
from tests.newcomer.reader import Reader

pytestmark = pytest.mark.slow
EXECUTED = [page for page in (README, *PAGES) if blocks(page, "bash test")]


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
