"""A reader with a kind of drafter in a package of its own: the files of docs/adding_a_drafter.md,
installed beside the wheel, without a clone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.newcomer.environments import SHARED, environment_with
from tests.newcomer.pages import ROOT, blocks, file_block
from tests.newcomer.reader import Reader

PAGE = ROOT / "docs" / "adding_a_drafter.md"
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "my-drafters"
version = "1.0"
[tool.setuptools]
packages = ["my_drafters", "my_drafters.conf"]
package-data = {"*" = ["**/*.yaml"]}
"""


def package_of(page: Path, folder: Path) -> Path:
    """The page's kind as a package, with the page's entry points."""
    (entries,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    recipes = folder / "my_drafters" / "conf" / "head"
    recipes.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT + entries)
    (folder / "my_drafters" / "__init__.py").write_text("")
    (folder / "my_drafters" / "bigram.py").write_text(file_block(page, "heads/bigram.py"))
    (recipes / "bigram.yaml").write_text(file_block(page, "conf/head/bigram.yaml"))
    return folder


@pytest.mark.slow
def test_a_kind_of_ones_own_is_trained_measured_and_chatted_with(
    wheel: Path, tmp_path: Path
) -> None:
    package = package_of(PAGE, tmp_path / "package")
    programs = environment_with(tmp_path / "environment", wheel, package, shared=SHARED)
    reader = Reader(tmp_path / "home", programs)
    reader.home.mkdir()
    assert "start_std" in reader.run("headstart train head=bigram --help head")
    assert "Did you mean 'bigram'" in reader.run("headstart train head=bigrm", status=2)
    (tried,) = blocks(PAGE, "bash example")
    said = reader.run(f'headstart generate\n(\n{tried}) <<< "What is a list?"')
    assert "bigram" in said.splitlines()[-1] or "accepted" in said
    report = reader.json("outputs/default/measure/report.json")
    (mine,) = [one for one in report["drafters"] if one["kind"] == "bigram"]
    assert mine["lossless"]["mismatches"] == 0
