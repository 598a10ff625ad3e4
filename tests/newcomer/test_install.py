"""The first block of the quickstart in a fresh copy of the repository: installing, and the demo at
a small size.

What `make install` downloads is resolved from the public index by tests/test_install.py; here pip
finds the packages of this Python, and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.newcomer.environments import SHARED, call, copy_of_the_repository
from tests.newcomer.pages import ROOT, blocks, lines
from tests.newcomer.reader import Reader

PAGE = ROOT / "docs" / "quickstart.md"


@pytest.mark.slow
def test_the_install_and_the_demo(tmp_path: Path) -> None:
    home = copy_of_the_repository(tmp_path, "Makefile", "constraints.txt")
    call(sys.executable, "-m", "venv", ".venv", cwd=home)
    # Python 3.11 gives an environment an old one, which would hide the one that is shared
    call(home / ".venv" / "bin" / "pip", "uninstall", "-q", "-y", "setuptools", cwd=home)
    (site,) = (home / ".venv" / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in SHARED))
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": "/dev/null"}
    reader = Reader(home, home / "nothing", offline)
    block = blocks(PAGE, "bash long")[0]
    assert [line.split()[0] for line in lines(block)] == ["make", ".", "headstart"]
    said = reader.run(f"{block}\ntype -P headstart")
    assert said.splitlines()[-1] == str(home / ".venv" / "bin" / "headstart")
    report = reader.json("outputs/demo/report.json")
    kinds = {one["kind"] for one in report["drafters"]}
    assert {"medusa", "eagle3", "distilled", "ngram"} <= kinds
    assert (home / "outputs" / "demo" / "report.html").is_file()
    demo = reader.run("make -n demo")
    assert lines(block)[-1].removeprefix("headstart ") in demo, "make demo does the same"
