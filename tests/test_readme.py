"""The README's commands, executed; its table, compared with the committed report; its links,
followed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from heads.api.errors import UserError
from scripts.tools import readme_table
from scripts.tools.docs_site import EXAMPLE

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAPERS = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    *sorted([*DOCS.glob("*.md"), *DOCS.glob("howto/*.md"), *DOCS.glob("reports/*.md")]),
]


def blocks(info: str) -> list[str]:
    """The README's code blocks with this info string."""
    return re.findall(
        rf"^```{re.escape(info)}\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE
    )


@pytest.mark.slow  # a loop on micro targets: tests/scripts/test_rounds.py
def test_the_readmes_commands_run(tmp_path: Path, environment: dict[str, str]) -> None:
    scripts = blocks("bash test")
    assert len(scripts) >= 2
    for script in scripts:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    run = tmp_path / "outputs" / "readme"
    report = json.loads((run / "report.json").read_text())
    assert {entry["kind"] for entry in report["drafters"]} == {"medusa", "ngram"}
    assert all(entry["lossless"]["mismatches"] == 0 for entry in report["drafters"])
    pages = ("report.md", "report.html", "acceptance.png", "speedup.png")
    for name in (*pages, "push/medusa/model.safetensors", "train/medusa/log.jsonl"):
        assert (run / name).is_file(), name
    for stage in ("generate", "train/medusa", "measure"):
        record = json.loads((run / stage / "run.json").read_text())
        assert record["state"] == "complete"
        assert record["sessions"][0]["packages"]["torch"]
        assert (run / stage / "config.yaml").is_file()

    again = subprocess.run(
        ["headstart", "loop", "debug=fast", "run.name=readme"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout.count("is complete") == 3  # nothing is done twice


def test_the_two_commands_are_in_the_makefile() -> None:
    (commands,) = [block for block in blocks("bash") if "make demo" in block]
    targets = re.findall(r"^make (\w+)", commands, flags=re.MULTILINE)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130


def test_the_recipes_in_the_readme_exist() -> None:
    for name in re.findall(r"experiment=(\w+)", README.read_text()):
        assert (REPOSITORY / "conf" / "experiment" / f"{name}.yaml").is_file(), name


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
            assert (REPOSITORY / name).exists(), f"{paper.name} names {name}"
