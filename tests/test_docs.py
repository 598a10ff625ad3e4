"""The documentation: every command composes (tests/newcomer/ runs what can be run), every training
that can be is planned, tables agree with reports, pages are in the navigation."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.config.flags import read_flags
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.stages import plan
from scripts.tools.docs_site import (
    BLOCK,
    EXAMPLE,
    TITLES,
    example_report,
    repository_page,
    site_markdown,
)
from tests.newcomer.pages import DOCS, PAGES, README, ROOT, commands, page_name

SIZES = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
}
"""Target on the Hub -> the folder of assets/configs with its config.json. Nothing is downloaded
here, so that trainings for other targets are composed and not planned."""
GIB = 2**30
PRINTED = [(page_name(page), line) for page in (README, *PAGES) for line in commands(page)]
"""(page, line) of every `headstart` command on any page."""


def read_command(line: str) -> tuple[str, list[str]]:
    """Stage and arguments of a line; a launcher's stage is train."""
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
    return ("plan" if stage == "train" and "--plan" in rest else stage), rest


def trainings() -> list[tuple[str, str]]:
    """The commands for a GPU that train or plan, each set of settings once."""
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    for page, line in PRINTED:
        stage, rest = read_command(line)
        if stage == "plan" or (stage == "train" and line in gpu_lines(page)):
            same = {word for word in rest if not word.startswith(("run.", "train.tracker"))}
            found.setdefault((str(processes(line)), *sorted(same)), (page, line))
    return list(found.values())


def gpu_lines(page: str) -> list[str]:
    """The commands in the GPU blocks of a page."""
    return commands(ROOT / page, "bash gpu")


def processes(line: str) -> int:
    """How many the command starts: by its launcher, one without."""
    for pattern in (r"GPUS=(\d+)", r"--nproc-per-node[= ](\d+)"):
        if given := re.search(pattern, line):
            return int(given[1])
    if nodes := re.search(r"--nodes=(\d+)", line):
        return 8 * int(nodes[1])
    return 8 if "launch/" in line else 1


def test_every_bash_block_says_who_has_run_it() -> None:
    unmarked = [
        page.name
        for page in PAGES
        if re.search(r"^```(bash|sh|shell|console)\s*$", page.read_text(), re.MULTILINE)
    ]
    assert not unmarked, "mark the block: " + ", ".join(f"```bash {mark}" for mark in TITLES)
    assert {mark for page in PAGES for mark in BLOCK.findall(page.read_text())} <= set(TITLES)
    assert len(PRINTED) > 20


@pytest.mark.parametrize(("page", "line"), PRINTED)
def test_every_command_composes(page: str, line: str) -> None:
    """Unknown stages, groups, options and keys are refused; what needs the file or the server is
    not started."""
    stage, rest = read_command(line)
    if stage == "-sc" or stage.startswith("--"):  # tests/scripts/test_completion.py, test_cli.py
        return
    assert stage in STAGES, f"{page}: there is no stage '{stage}'"
    flags = read_flags(rest, (*STAGES[stage].groups, "all"))
    if "--help" in flags or "--multirun" in flags:
        return
    overrides = flags.overrides
    settings = load_settings(STAGES[stage], STAGES[stage].expand_short(overrides))
    assert settings.stage.name == stage


def planned(line: str, root: Path) -> dict[str, Any]:
    """The plan of a training command on as many GPUs as it starts, an H100 unless it says.

    Skips the test where the target's sizes are not known here.
    """
    stage, rest = read_command(line)
    given = list(read_flags(rest, (*STAGES["plan"].groups, "all")).overrides)
    if not any(word.startswith(("experiment=", "data")) for word in given):
        given.append("data.path=prompts.jsonl")  # a training reads the run's responses instead
    own = load_settings(STAGES["plan"], given).target.path
    sizes = ROOT / "assets" / "configs" / SIZES.get(own, Path(own).name)
    if not Path(own).is_dir() and not sizes.is_dir():
        pytest.skip(f"the sizes of '{own}' are not known here: composed, not planned")
    more = [f"run.root={root}"]
    if sizes.is_dir():
        more.append(f"target.path={sizes}")
    if stage != "plan":
        more += ["plan.gpu=h100", f"plan.count={processes(line)}", "plan.tokens=10000000"]
    settings = load_settings(STAGES["plan"], [*given, *more])
    plan.run(settings)
    (path,) = root.glob("*/plan/*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), trainings())
def test_every_training_for_a_gpu_fits(page: str, line: str, tmp_path: Path) -> None:
    content = planned(line, tmp_path)
    assert content["fits"], f"{page}: {line}"


@pytest.mark.slow
def test_the_page_about_one_gpu_has_the_plans_memory(tmp_path: Path) -> None:
    page = " ".join((DOCS / "howto" / "one_gpu.md").read_text(encoding="utf-8").split())
    line = "headstart train --plan experiment=llama31_8b_eagle3 engine=torch plan.gpu=h100"
    assert line in page
    memory = {name: size / GIB for name, size in planned(line, tmp_path)["memory_bytes"].items()}
    head = sum(size for name, size in memory.items() if name.startswith("drafter"))
    total, target, rest = (round(memory[name]) for name in ("total", "target", "activations"))
    assert (
        f"counts {total} GiB of the GPU's memory: the target {target}, the head with its gradients "
        f"and AdamW's state {round(head)}, the activations of a row of 4,096 tokens {rest}."
    ) in page


NAMED_APART = ("eagle3_copied", "distilled_layers", "distilled_fresh", "lilicorr_convolution")
"""Rows whose settings docs/choosing.md gives."""


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
        assert (ROOT / "conf" / "head" / f"{name}.yaml").is_file() or name in NAMED_APART, name


def test_every_page_is_in_the_navigation_or_linked_for_contributors() -> None:
    told = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = set(re.findall(r"[\w/]+\.md", json.dumps(told["nav"])))
    apart = {name.lstrip("/") for name in told["not_in_nav"].split()}
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert pages <= named | apart
    assert not named & apart
    assert all((DOCS / name).is_file() for name in named | apart)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert apart == {"decisions.md", "log.md"}
    assert all(f"(docs/{name})" in contributing for name in apart)


PRIVATE = re.compile(
    r"(?i:\b(methods\.md|serving-formats|takeover|dearer|dearest|drafts kept|somebody else's|"
    r"the target's noise)\b)|\bDESIGN\b"
)
"""Words that have a standard term (docs/vocabulary.md), and documents that are not here."""


def test_texts_use_the_vocabulary_and_name_only_documents_that_are_here() -> None:
    folders = ("docs", "conf", "headstart", "heads", "inference", "train", "scripts")
    endings = (".md", ".py", ".yaml", ".j2", ".js")
    files = [README, ROOT / "CONTRIBUTING.md"]
    for folder in folders:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in files
        for found in PRIVATE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_the_sites_hooks() -> None:
    page = "```bash gpu\nx\n```\n[`a.py`](../train/a.py) and [the loader](../train/loader.py) and [here](data.md)"
    shown = site_markdown(page, "index.md")
    assert f'```bash title="{TITLES["gpu"]}"' in shown
    assert "`a.py` and the loader (`train/loader.py`) and [here](data.md)" in shown
    picture = site_markdown("![the loop](../assets/loop.svg) and [card](../assets/card.md)", "a.md")
    assert picture == "![the loop](assets/loop.svg) and card (`assets/card.md`)"
    nested = "[data](../data.md#a), ![loop](../../assets/loop.svg), [here](../../README.md)"
    expected = "[data](../data.md#a), ![loop](../assets/loop.svg), here (`README.md`)"
    assert site_markdown(nested, "howto/one_gpu.md") == expected


def test_the_site_has_the_page_of_the_committed_report() -> None:
    shown = example_report()
    report = json.loads((DOCS / "reports" / "demo.json").read_text(encoding="utf-8"))
    assert shown.lower().startswith("<!doctype html>")
    assert all(entry["kind"] in shown for entry in report["drafters"])
    assert not re.findall(r'(?:src|href)="https?://', shown)
    assert f"({EXAMPLE})" in (DOCS / "example_report.md").read_text(encoding="utf-8")


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
