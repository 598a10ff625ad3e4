"""The README: its table is that of the committed report, its links lead somewhere, what it names
exists. tests/newcomer/ runs its commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from heads.api.errors import UserError
from scripts.tools import readme_table
from scripts.tools.docs_site import EXAMPLE
from tests.newcomer.pages import DOCS, PAGES, README, ROOT, blocks

PAPERS = [README, ROOT / "CONTRIBUTING.md", *PAGES, *sorted(DOCS.glob("reports/*.md"))]


def test_the_two_commands_are_in_the_makefile() -> None:
    (commands,) = [block for block in blocks(README, "bash") if "make demo" in block]
    targets = re.findall(r"^make (\w+)", commands, flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130


def test_the_recipes_in_the_readme_exist() -> None:
    for name in re.findall(r"experiment=(\w+)", README.read_text()):
        assert (ROOT / "conf" / "experiment" / f"{name}.yaml").is_file(), name


def test_the_table_is_that_of_the_committed_report() -> None:
    text = README.read_text()
    assert readme_table.REPORT.is_file(), "docs/reports/demo.json is committed"
    assert readme_table.RESULTS.put(text, readme_table.table(readme_table.REPORT)) == text
    assert readme_table.main(["--check"]) == 0
    report = json.loads(readme_table.REPORT.read_text())
    assert f"{report['drafters'][0]['tau']:.2f}" in text
    assert "headstart loop" in report["command"]


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(UserError, match="the page needs the lines"):
        readme_table.RESULTS.put("# no markers", "| table |")
    text = f"before\n{readme_table.RESULTS.begin}\nold\n{readme_table.RESULTS.end}\nafter"
    assert readme_table.RESULTS.put(text, "new") == text.replace("old", "new")


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_links_lead_somewhere(paper: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", paper.read_text()):
        if "://" not in link and link != EXAMPLE:  # which the site's build makes
            assert (paper.parent / link).exists(), f"{paper.name} links to {link}"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_named_files_exist(paper: Path) -> None:
    for name in re.findall(
        r"`((?:heads|inference|train|scripts|conf|tests|docs|assets)/[\w./-]*)`", paper.read_text()
    ):
        if "<" not in name and name not in ("heads/bigram.py", "conf/head/bigram.yaml"):
            assert (ROOT / name).exists(), f"{paper.name} names {name}"
