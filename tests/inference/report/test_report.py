"""report.json is checked key by key; report.md, the plots and the terminal show what it holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from heads.api.errors import UserError
from inference.report import markdown as report_module
from inference.report.model import Report, parse_report, read_report, write_report
from tests.inference.example_report import BLOCKS, example_report, merged

REPORTS = Path(__file__).parents[3] / "docs" / "reports"


def without(report: dict[str, Any], dotted: str) -> dict[str, Any]:
    """The report without the value at a dotted key."""
    *path, last = dotted.split(".")
    place: Any = report
    for key in path:
        place = place[int(key)] if isinstance(place, list) else place[key]
    del place[last]
    return report


def test_a_complete_report_passes_and_survives_the_disk(tmp_path: Path) -> None:
    write_report(example_report(), tmp_path / "report.json")
    assert read_report(tmp_path) == read_report(tmp_path / "report.json")
    assert read_report(tmp_path).to_dict() == example_report()
    assert [file.name for file in tmp_path.iterdir()] == [
        "report.json"
    ]  # no temporary file is left


@pytest.mark.parametrize("name", ["demo", "demo_sampled"])
def test_a_report_of_an_earlier_version_is_read_and_written_byte_for_byte(
    name: str, tmp_path: Path
) -> None:
    """The committed reports are by the version of their day; every key keeps its value and
    place."""
    committed = REPORTS / f"{name}.json"
    write_report(read_report(committed), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == committed.read_bytes()


def test_every_block_survives_the_disk_in_the_order_of_the_schema(tmp_path: Path) -> None:
    """Optional blocks stand before the provenance, and keys that were not given are not written."""
    report = {**example_report(), **copy.deepcopy(BLOCKS)}
    write_report(report, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == report
    assert list(written) == [name for name in Report.model_fields if name in report]


def test_provenance_is_optional() -> None:
    report = example_report()
    for key in ("command", "versions", "git", "run"):
        del report[key]
    for key in ("name", "noise", "weights_sha256"):
        del report["drafters"][0]["draft"][key]
    assert parse_report(report).to_dict() == report


@pytest.mark.parametrize(
    "dotted",
    [
        "target.dtype",
        "baseline.seconds",
        "drafters.0.lossless.mismatches",
        "drafters.0.domains.code.tar",
        "format",
    ],
)
def test_a_missing_key_is_named(dotted: str) -> None:
    with pytest.raises(UserError, match=rf"{dotted} is missing"):
        parse_report(without(example_report(), dotted))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tau": "2.3"}, r"drafters\.0\.tau must be a finite number; given: '2\.3'"),
        ({"tau": float("nan")}, r"drafters\.0\.tau must be a finite number; given: nan"),
        ({"parameters": True}, r"drafters\.0\.parameters must be a whole number"),
        ({"speedup_ci95": [2.0, 1.0]}, r"drafters\.0\.speedup_ci95 must be \[low, high\]"),
        (
            {"acceptance": {"conditional": None}},
            r"drafters\.0\.acceptance\.conditional must be a list; given: None",
        ),
        ({"domains": {"code": {"tau": None}}}, r"drafters\.0\.domains\.code\.tau must be"),
        ({"step_ms": {"sampling": 1.0}}, r"drafters\.0\.step_ms\.sampling is not part of a report"),
        ({"lossless": {"identical": 60}}, r"drafters\.0\.lossless does not add up"),
    ],
)
def test_a_wrong_value_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_report(example_report(entry))


def test_other_formats_and_double_names_are_refused() -> None:
    with pytest.raises(UserError, match="format is 2; this version reads format 1"):
        parse_report(example_report(format=2))
    with pytest.raises(UserError, match=r"\['eagle3'\] more than once"):
        parse_report(example_report({}, {}))


def test_unreadable_reports(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no report\.json"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"format": 1,', encoding="utf-8")
    with pytest.raises(UserError, match="not readable as JSON"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="the whole file must be an object"):
        read_report(tmp_path)


def two_reports(folder: Path) -> list[Path]:
    """A greedy report with two drafters and a sampled one with a third arm."""
    medusa = {
        "kind": "medusa",
        "tau": 1.9,
        "tau_ci95": [1.8, 2.0],
        "draft": {"name": "medusa", "shape": "tree", "nodes": 12},
        "acceptance": {"unconditional": [0.6, 0.3, 0.0, 0.0], "conditional": [0.6, 0.5, 0.0, 0.0]},
        "lossless": {"identical": 60, "near_ties": 1, "mismatches": 3},
    }
    own = {
        "draft": {"name": "eagle3 (own noise)", "noise": "none"},
        "tau": 1.42,
        "tau_ci95": [1.37, 1.48],
    }
    for name, report in {
        "greedy": example_report({}, medusa),
        "sampled": example_report({}, own, settings={"temperature": 1.0}),
    }.items():
        write_report(report, folder / name / "report.json")
    return [folder / "greedy", folder / "sampled" / "report.json"]


def test_render_writes_markdown_and_plots(tmp_path: Path) -> None:
    path = report_module.render(two_reports(tmp_path), tmp_path / "out")
    text = path.read_text(encoding="utf-8")
    assert "| medusa | tree 4 (12 nodes) | 1.90 [1.80, 2.00] |" in text
    assert "60/64, 1 near tie, 3 MISMATCHES" in text
    assert "| eagle3 (own noise) | chain 4 | 1.42 [1.37, 1.48] |" in text
    assert "| temperature | 0.0 | 0.0 | 1.0 | 1.0 |" in text
    assert (
        "| medusa | 1.90 [1.80, 2.00] | 1.80 [1.70, 1.90] | - | - |" in text
    )  # took part in one report only
    assert "- command: `headstart measure`" in text
    assert report_module.DEFINITIONS in text
    for name in ("acceptance.png", "speedup.png", "step_time.png"):
        assert f"({name})" in text
        image = imread(tmp_path / "out" / name)
        assert image.shape[0] > 200
        assert image.std() > 0.05  # something was drawn
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "acceptance.png",
        "report.md",
        "speedup.png",
        "step_time.png",
    ]


def test_every_markdown_row_has_as_many_cells_as_its_header(tmp_path: Path) -> None:
    text = report_module.render(two_reports(tmp_path), tmp_path / "out").read_text(encoding="utf-8")
    widths = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    starts = [i for i, line in enumerate(text.splitlines()) if line.startswith("|---")]
    assert len(starts) == 9
    table: list[int] = []
    for line in text.splitlines():
        if line.startswith("|"):
            table.append(line.count("|"))
            assert table[0] == table[-1], line
        else:
            table = []
    assert widths


def test_render_needs_a_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no report was given"):
        report_module.render([], tmp_path)
    broken = example_report()
    del broken["baseline"]
    (tmp_path / "report.json").write_text(json.dumps(broken), encoding="utf-8")
    with pytest.raises(UserError, match="baseline is missing"):
        report_module.render([tmp_path], tmp_path)


def test_the_table_shows_every_drafter_and_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "draft": {"name": "eagle3 (own noise)", "noise": "none"},
        "lossless": {"identical": 63, "near_ties": 1},
    }
    report_module.print_table(parse_report(example_report({}, own)))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 120
    row = next(line for line in lines if line.strip().startswith("eagle3 (own noise)"))
    for text in ("chain 4", "2.75 [2.60, 2.90]", "0.72", "900.0", "1.80 [1.70, 1.90]"):
        assert text in row
    shown = "\n".join(lines)
    for text in (
        "no drafter",
        "64/64",
        "63/64, 1 near tie",
        "tokens/s",
        "speedup",
        "lossless",
        "temperature 0",
    ):
        assert text in shown


def test_the_table_folds_into_a_narrow_terminal() -> None:
    console = Console(width=60)
    with console.capture() as capture:
        report_module.print_table(parse_report(example_report()), console)
    assert max(len(line) for line in capture.get().splitlines()) <= 60
    assert "…" not in capture.get()


def test_optional_blocks_are_checked_and_shown(tmp_path: Path) -> None:
    report = {**example_report(), **copy.deepcopy(BLOCKS)}
    write_report(report, tmp_path / "measure" / "report.json")
    page = report_module.render([tmp_path / "measure"], tmp_path / "out").read_text(
        encoding="utf-8"
    )
    for line in (
        "| transformers_generate | 250.0 | 0.50 [0.45, 0.55] | 200.0 | 0.41 | 1.00 | 63/64 |",
        "| vllm_ngram (not interleaved) | 250.0 | 0.50 [0.45, 0.55] | 200.0 | 0.41 | 1.00 | "
        "63/64 |",
        "| eagle3 | 1 | 90 | 0 | chain 2 | 2.50 | 150.0 | 100.0 | 1.50 [1.40, 1.60] |",
        "| eagle3 | 1 | 90 | 0 | **chain 4** | 2.50 | 180.0 | 100.0 | 1.80 [1.70, 1.90] |",
        "| eagle3 | 8 | 90 | 0 | chain 2 | 2.50 | 720.0 | 800.0 | 0.90 [0.80, 1.00] |",
        "| call | rows | cached | n=1 | n=2 | n=8 |",
        "| verify | 1 | 128 | 3.12 |  | 4.81 |",
        "| draft: eagle3 | 1 | 128 |  | 0.55 |  |",
        "| drafter | MB per step | step ms | of 9.0 GB/s | efficiency | split |",
        "| eagle3 | 20.0 | 3.10 | 72% | 82% | draft 16%, verify 74%, commit 6%, other 4% |",
    ):
        assert line in page, line
    assert "speedup_by_batch.png" in page
    assert imread(tmp_path / "out" / "speedup_by_batch.png").ndim == 3


def test_without_blocks_nothing_of_them_is_shown(tmp_path: Path) -> None:
    write_report(example_report(), tmp_path / "measure" / "report.json")
    page = report_module.render([tmp_path / "measure"], tmp_path / "out").read_text(
        encoding="utf-8"
    )
    assert "beside ours" not in page and "GB/s" not in page
    assert not (tmp_path / "out" / "speedup_by_batch.png").exists()


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        (
            "baselines",
            {"x": {"ratio": "1"}},
            r"baselines\.x\.\w+ is missing|baselines\.x\.ratio must be",
        ),
        ("profile", {"blocks": -1}, r"profile\.blocks must be a whole number"),
        ("costs", {"launch": True}, r"costs\.launch must be text"),
        (
            "roofline",
            {"arms": {"eagle3": {"bytes": 1}}},
            r"roofline\.arms\.eagle3\.bytes is not part of a report",
        ),
    ],
)
def test_wrong_blocks_are_named(block: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_report({**example_report(), block: merged(BLOCKS[block], change)})


def test_a_gap_between_steps_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    write_report(example_report({"step_ms": {"gap": 0.25}}), tmp_path / "measure" / "report.json")
    page = report_module.render([tmp_path / "measure"], tmp_path / "out").read_text(
        encoding="utf-8"
    )
    assert "| drafter | draft | verify | commit | other | gap | target MB |" in page
    assert "| eagle3 | 0.50 | 2.30 | 0.20 | 0.10 | 0.25 |" in page
