"""The documentation: every command composes (tests/newcomer/ runs what can be run), tables agree
with reports, pages are in the navigation."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from scripts.config.flags import read_flags
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.tools.docs_site import BLOCK, OUTSIDE, TITLES, on_page_markdown, repository_page
from tests.newcomer.pages import DOCS, README, ROOT, commands, page_name

PRINTED = [(page, line) for page in (README, *DOCS) for line in commands(page)]


def test_every_bash_block_says_who_has_run_it() -> None:
    unmarked = [
        page.name
        for page in DOCS
        if re.search(r"^```(bash|sh|shell|console)\s*$", page.read_text(), re.MULTILINE)
    ]
    assert not unmarked, "mark the block: " + ", ".join(f"```bash {mark}" for mark in TITLES)
    assert {mark for page in DOCS for mark in BLOCK.findall(page.read_text())} <= set(TITLES)
    assert len(PRINTED) > 20


@pytest.mark.parametrize(
    ("page", "line"), PRINTED, ids=[f"{page_name(page)}-{line}" for page, line in PRINTED]
)
def test_every_command_composes(page: Path, line: str) -> None:
    """Unknown stages, groups, options and keys are refused; what needs the file or the server is
    not started."""
    words = shlex.split(line)
    if "|" in words:
        words = words[words.index("|") + 1 :]
    start = next(
        i
        for i, word in enumerate(words)
        if word in ("headstart", "scripts.cli") or "launch/" in word
    )
    rest = words[start + 1 :]
    stage = "train" if "launch/" in words[start] else rest.pop(0)
    if stage in ("--help", "-sc"):  # completion: tests/scripts/test_completion.py
        return
    if stage == "train" and "--plan" in rest:
        stage = "plan"
    assert stage in STAGES, f"{page_name(page)}: there is no stage '{stage}'"
    flags = read_flags(rest, (*STAGES[stage].groups, "all"))
    if "--help" in flags or "--multirun" in flags:
        return
    overrides = flags.overrides
    settings = load_settings(STAGES[stage], STAGES[stage].expand_short(overrides))
    assert settings.stage.name == stage


def test_the_table_for_choosing_holds_the_reports_numbers() -> None:
    report = json.loads((ROOT / "docs" / "reports" / "families.json").read_text(encoding="utf-8"))
    measured = {row["name"]: row["measured"] for row in report["rows"]}
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) > 10
    for name, chain, tree, speedup in rows:
        found = measured[name]
        expected = (found["chain"]["tau"], found["tree"]["tau"], found["chain"]["speedup"])
        assert (chain, tree, speedup) == tuple(f"{value:.2f}" for value in expected), name


def test_every_page_is_in_the_navigation() -> None:
    told = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = set(re.findall(r"[\w/]+\.md", json.dumps(told["nav"])))
    assert {page.relative_to(ROOT / "docs").as_posix() for page in DOCS} <= named
    assert all((ROOT / "docs" / name).is_file() for name in named)


def test_the_sites_hooks() -> None:
    page = "```bash gpu\nx\n```\n[`a.py`](../train/a.py) and [the loader](../train/loader.py) and [here](data.md)"
    shown = on_page_markdown(page)
    assert f'```bash title="{TITLES["gpu"]}"' in shown
    assert "`a.py` and the loader (`train/loader.py`) and [here](data.md)" in shown
    assert not OUTSIDE.search(shown)
    picture = on_page_markdown("![the loop](../assets/loop.svg) and [card](../assets/card.md)")
    assert picture == "![the loop](assets/loop.svg) and card (`assets/card.md`)"


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("git@github.com:some/headstart.git", "https://github.com/some/headstart"),
        ("https://github.com/some/headstart.git", "https://github.com/some/headstart"),
        ("https://token@git.example.org/some/headstart", "https://git.example.org/some/headstart"),
        ("/srv/headstart.git", ""),
        ("", ""),
    ],
)
def test_the_site_links_the_repository_it_is_cloned_from(remote: str, page: str) -> None:
    assert repository_page(remote) == page


def test_the_comparison_with_speculators_holds_the_reports_numbers() -> None:
    timing = json.loads(
        (ROOT / "docs" / "reports" / "speculators.json").read_text(encoding="utf-8")
    )["timing"]
    page = " ".join((ROOT / "docs" / "scale.md").read_text(encoding="utf-8").split())
    for label, kind in (("EAGLE-3, 4 unrolled steps", "eagle3"), ("DSpark", "dspark")):
        sides, fastest = timing[kind]["sides"], timing[kind]["their_fastest"]
        for side in ("ours", "ours, one row at a time", fastest):
            speed, best = sides[side]["tokens_per_second"], sides[fastest]["tokens_per_second"]
            memory = sides[side]["peak_bytes"] / 1e9
            assert (
                f"| {label} | {side} | {speed:,.0f} | {speed / best:.2f} | {memory:.2f} |" in page
            )
        bytes_of = {
            side: sides[side]["peak_bytes"] / sides[fastest]["peak_bytes"]
            for side in ("ours", "ours, one row at a time")
        }
        told = {
            "eagle3": "{:.2f} times as much with eight rows at once and {:.2f} times with one",
            "dspark": "{:.2f} times with eight rows at once; with one row at a time it is below "
            "({:.2f})",
        }
        assert told[kind].format(*bytes_of.values()) in page
    ours, theirs = (
        timing["eagle3"]["sides"][side]["trained_weights"]
        for side in ("ours", "speculators, rows of 512")
    )
    assert (
        ours - theirs == 4096 * 256
        and f"(4096 x 256, of {ours:,} trained weights)" in page
        and f"({theirs:,})" in page
    )
