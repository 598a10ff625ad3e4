"""report.json is checked key by key; report.md, the plots and the terminal show what it holds."""

from __future__ import annotations

import copy
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from heads.api.errors import UserError
from inference.report import claims
from inference.report import markdown as report_module
from inference.report.model import Report, parse_report, read_report, write_report
from inference.report.page.render import write_page
from inference.report.quoting import code
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


def test_what_is_quoted_is_text() -> None:
    """Names of drafters, domains and devices neither break a table nor become HTML."""
    name = "a|b <img src=x onerror=alert(1)> ](http://x)\n# c"
    report = example_report({"draft": {"name": name}}, device={"name": name}, command="x `y`")
    text = report_module.markdown({name: parse_report(report)}, [])
    assert "- command: `` x `y` ``" in text
    assert "<img" not in text and "](http" not in text and "\n# c" not in text
    assert "a\\|b &lt;img src=x onerror=alert(1)> ]\\(http://x) # c" in text
    rows = report_module.main_table(parse_report(report))
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {10}
    console = Console(file=io.StringIO(), width=200)
    report_module.print_table(
        parse_report(example_report({"draft": {"name": "[/red] x"}})), console
    )
    assert isinstance(console.file, io.StringIO)
    assert "[/red] x" in console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "span"),
    [("a", "`a`"), ("a`b", "`` a`b ``"), ("a``|b", "``` a``\\|b ```"), ("a\nb", "`a b`")],
)
def test_code_spans_hold_any_text(text: str, span: str) -> None:
    assert code(text) == span


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
    assert (
        "| medusa | 2.80 [2.60, 3.00], 0.73, 1.90 [1.75, 2.05] | "
        "2.40 [2.10, 2.70], 0.66, 1.10 [0.95, 1.25], no difference shown |"
    ) in text
    for name in ("acceptance.png", "by_context.png", "speedup.png", "step_time.png"):
        assert f"({name})" in text
        image = imread(tmp_path / "out" / name)
        assert image.shape[0] > 200
        assert image.std() > 0.05  # something was drawn
        assert image.shape[1] < min(1500, 2 * image.shape[0])  # labels are read at 800 pixels
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "acceptance.png",
        "by_context.png",
        "report.md",
        "speedup.png",
        "step_time.png",
    ]


def test_every_markdown_row_has_as_many_cells_as_its_header(tmp_path: Path) -> None:
    text = report_module.render(two_reports(tmp_path), tmp_path / "out").read_text(encoding="utf-8")
    widths = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    starts = [i for i, line in enumerate(text.splitlines()) if line.startswith("|---")]
    assert len(starts) == 11
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
    *lines, headline = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 120
    assert headline == (
        "eagle3, the fastest trained drafter, makes assets/tiny-target 1.80 times as fast at "
        "temperature 0 (95% interval 1.70 to 1.90), drafting chains of 4: 2.75 tokens per "
        "verification."
    )
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


UNTRAINED = {"kind": "ngram", "path": "", "draft": {"name": "ngram", "weights_sha256": None}}
UNCERTAIN = {"speedup": 1.4, "speedup_ci95": [0.82, 2.31]}


def outputs(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """What report.md, report.html and the terminal say of a report."""
    write_report(report, folder / "measure" / "report.json")
    console = Console(width=160, file=io.StringIO(), record=True)
    report_module.print_table(parse_report(report), console)
    page = write_page([("measure", folder / "measure")], folder / "out").read_text("utf-8")
    return {
        "report.md": report_module.render([folder / "measure"], folder / "out").read_text("utf-8"),
        "report.html": html.unescape(re.sub("<[^>]*>", "", page.split("<body>")[1])),
        "terminal": console.export_text(),
    }


def test_an_interval_that_holds_one_is_no_gain_in_any_output(tmp_path: Path) -> None:
    report = example_report({**UNCERTAIN, "domains": {"code": {"speedup": 2.0}}})
    report["run"]["arms"]["eagle3"]["speedup_ci95_by_domain"]["code"] = [0.9, 2.2]
    for place, text in outputs(report, tmp_path).items():
        assert "times as fast" not in text, place
        assert (
            "eagle3: no difference shown against plain decoding at temperature 0 (1.40 times its "
            "speed, 95% interval 0.82 to 2.31)"
        ) in text.replace("**", ""), place
    page, text = (outputs(report, tmp_path)[name] for name in ("report.html", "report.md"))
    assert "| 1.40 [0.82, 2.31], no difference shown |" in text
    assert "2.00x (no difference shown)" in text and "1.60x |" in text  # by domain
    assert "0.82 to 2.31, no difference shown" in page
    assert "0.90 to 2.20, no difference shown" in page


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((1.01, 1.2), ""),
        ((0.5, 0.99), ""),
        ((1.0, 1.3), "no difference shown"),
        ((0.9, 1.0), "no difference shown"),
        ((1.2, 1.2), "no difference shown"),  # one prompt
    ],
)
def test_a_ratio_is_claimed_where_its_interval_excludes_one(
    interval: tuple[float, float], words: str
) -> None:
    assert claims.verdict(interval) == words


def test_a_slower_drafter_is_called_slower(tmp_path: Path) -> None:
    report = example_report({"speedup": 0.7, "speedup_ci95": [0.6, 0.8]})
    for place, text in outputs(report, tmp_path).items():
        assert "is slower than plain decoding at temperature 0 (0.70 times its speed" in text, place
        assert "times as fast" not in text, place


def test_the_best_trained_drafter_comes_first_and_a_faster_lookup_beside_it(tmp_path: Path) -> None:
    medusa = {"kind": "medusa", "speedup": 1.2, "speedup_ci95": [1.1, 1.3]}
    medusa["draft"] = {"name": "medusa"}
    lookup = {**UNTRAINED, "speedup": 2.3, "speedup_ci95": [2.1, 2.6], "tau": 3.3}
    report = example_report(lookup, medusa, {})
    for place, text in outputs(report, tmp_path).items():
        plain = text.replace("**", "")
        first = plain.index("eagle3, the fastest trained drafter, makes")
        assert first < plain.index("ngram, the fastest without training, makes"), place
    rows = [line.split(" | ")[0] for line in outputs(report, tmp_path)["report.md"].splitlines()]
    assert [row for row in rows if row in ("| eagle3", "| medusa", "| ngram", "| no drafter")][
        :4
    ] == ["| eagle3", "| medusa", "| ngram", "| no drafter"]
    found = parse_report(example_report(lookup))  # nothing is trained
    assert [one.name for one in claims.leaders(found)] == ["ngram"]


def test_a_drafter_that_has_learned_nothing_is_said(tmp_path: Path) -> None:
    report = example_report({"tau": 1.0, "tau_ci95": [1.0, 1.0], **UNCERTAIN}, {**UNTRAINED})
    for place, text in outputs(report, tmp_path).items():
        assert "accepts practically no draft (tau 1.00): it has not learned to draft yet" in text
        assert text.count("practically no draft") == 1, place


def test_the_table_folds_into_a_narrow_terminal() -> None:
    console = Console(width=60, force_terminal=True, color_system=None)
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
        "| eagle3 | 8 | 90 | 0 | chain 2 | 2.50 | 720.0 | 800.0 | 0.90 [0.80, 1.00], "
        "no difference shown |",
        "| call | rows | cached | n=1 | n=2 | n=8 |",
        "| verify | 1 | 128 | 3.12 |  | 4.81 |",
        "| draft: eagle3 | 1 | 128 |  | 0.55 |  |",
        "| drafter | MB per step | step ms | of 9.0 GB/s | efficiency | split |",
        "| eagle3 | 20.0 | 3.10 | 72% | 82% | draft 16%, verify 74%, commit 6%, other 4% |",
    ):
        assert line in page, line
    assert "speedup_by_batch.png" in page
    assert imread(tmp_path / "out" / "speedup_by_batch.png").ndim == 3


def test_contexts_are_shown_where_they_differ(tmp_path: Path) -> None:
    report = example_report()
    for entry in report["drafters"]:
        del entry["contexts"][1:]
    write_report(report, tmp_path / "measure" / "report.json")
    page = report_module.render([tmp_path / "measure"], tmp_path / "out").read_text(
        encoding="utf-8"
    )
    assert report_module.CONTEXTS not in page and "by_context" not in page
    assert not (tmp_path / "out" / "by_context.png").exists()


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


def test_what_drafting_ahead_hid_stands_beside_the_phases(tmp_path: Path) -> None:
    ahead = {"ahead": {"kept": 0.625, "hidden_ms": 1.5}}
    write_report(example_report(ahead), tmp_path / "measure" / "report.json")
    page = report_module.render([tmp_path / "measure"], tmp_path / "out").read_text(
        encoding="utf-8"
    )
    assert "| KV MB | hidden | kept ahead |" in page and "| 1.50 | 62% |" in page
    with pytest.raises(UserError, match=r"drafters\.0\.ahead\.hidden_ms"):
        parse_report(example_report({"ahead": {"kept": 0.5}}), "a report")
