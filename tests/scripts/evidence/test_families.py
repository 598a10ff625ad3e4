"""The families' table: it shows what the reports say, names the best learning rate, and says what
is missing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.manifest import write_manifest
from inference.report.model import write_report
from scripts.evidence import families
from tests.inference.example_report import REPORT


def run_folder(at: Path) -> Path:
    """Four measurements of two drafters, and the trainings of one."""
    for number, (folder, _) in enumerate(families.MEASURES.values()):
        report: dict[str, Any] = copy.deepcopy(REPORT)
        first = report["drafters"][0]
        second = copy.deepcopy(first)
        first["draft"]["name"], second["draft"]["name"] = "slow", "good"
        second |= {"tau": 2.8 + 0.01 * number, "tau_ci95": [2.7, 2.95]}
        report["drafters"] = [first, second]
        (at / folder).mkdir(parents=True)
        write_report(report, at / folder / "report.json")
    for rate, tau in (("0.001", 1.5), ("0.01", 2.5), ("0.1", 2.0)):
        (at / "train" / f"good@{rate}").mkdir(parents=True)
        done = {"steps": 7, "tokens": 1000, "seconds": 2.0, "best": {"tau": tau, "step": 7}}
        write_manifest(at / "train" / f"good@{rate}", "train", done)
    (at / "train" / "good@9").mkdir()  # interrupted
    return at


def test_the_table_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "REPORTS", tmp_path / "reports")
    (tmp_path / "reports").mkdir()
    speeds: dict[str, Any] = {"rows": [{"name": "good", "tokens_per_second": 1234.5}]}
    speeds["settings"] = {"rows": 8}  # as in reports of earlier versions
    monkeypatch.setattr(families, "experiment_rows", lambda: ["good", "absent", "slow"])
    (tmp_path / "reports" / "throughput.json").write_text(json.dumps(speeds))
    assert families.main([str(run_folder(tmp_path / "run"))]) == 0
    content = json.loads((tmp_path / "reports" / "families.json").read_text())
    good = next(row for row in content["rows"] if row["name"] == "good")
    assert [training["rate"] for training in good["trainings"]] == [0.01, 0.1, 0.001]
    text = (tmp_path / "reports" / "families.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("| good", "| slow"))]
    assert lines[0].startswith(
        "| good | 1.20 M | 7 | 1,234 | 2.80 [2.70, 2.95] | 2.81 [2.70, 2.95]"
    )
    assert lines[1].startswith("| slow | 1.20 M | - | - | 2.75 [2.60, 2.90]")
    assert "0.75 | 0.69 | 1.80 [1.70, 1.90] | 82% | 256/256 |" in lines[0]
    assert "| good | 0.001: 1.50, 0.01: 2.50, 0.1: 2.00 |" in text
    assert "\nNot measured: absent.\n" in text
    assert "throughput.json, online, 8 rows a step" in text
    assert (tmp_path / "reports" / "families.png").stat().st_size > 10_000
    speeds["rows"][0]["tokens_per_second"] = 999.0
    (tmp_path / "reports" / "throughput.json").write_text(json.dumps(speeds))
    assert families.main(["--page"]) == 0
    again = (tmp_path / "reports" / "families.md").read_text()
    assert again == text.replace("| 7 | 1,234 |", "| 7 | 999 |")


def test_a_speedup_whose_interval_holds_1_is_not_claimed(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    report = json.loads((run / "measure" / "report.json").read_text())
    report["drafters"][0] |= {"speedup": 1.02, "speedup_ci95": [0.9, 1.2]}
    (run / "measure" / "report.json").write_text(json.dumps(report))
    lines = families.markdown(families.collect(run))
    (slow,) = [line for line in lines if line.startswith("| slow | 1")]
    (good,) = [line for line in lines if line.startswith("| good | 1")]
    assert "| 1.02 [0.90, 1.20], no difference shown |" in slow
    assert "no difference shown" not in good


def test_a_missing_measurement_is_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (run / "sampled" / "report.json").unlink()
    with pytest.raises(UserError, match=r"sampled/report\.json' \(chain, T=1\) is missing"):
        families.collect(run)


def test_trees_of_one_pass_stand_beside_dynamic_ones(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert families.collect(run) and families.grown_trees(run) == {}
    for shape, tau in (("dynamic", 3.0), ("dartree", 3.25)):
        report = json.loads((run / "tree" / "report.json").read_text())
        for number, row in enumerate(report["drafters"]):
            row["draft"] |= {"shape": shape, "nodes": 26, "depth": 4}
            row |= {"tau": tau + number, "tau_ci95": [tau, tau + 1.5]}
        (run / shape).mkdir()
        write_report(report, run / shape / "report.json")
    found = families.grown_trees(run)
    page = "\n".join(families.markdown({**families.collect(run), "grown_trees": found}))
    assert "both of 26 nodes and depth 4" in page
    _, table = page.split("## Trees grown from one drafting pass")
    first, second = [line for line in table.splitlines() if line.startswith("| ")][1:3]
    assert first == "| good | 4.00 [3.00, 4.50] | 4.25 [3.25, 4.75] |"
    assert second == "| slow | 3.00 [3.00, 4.50] | 3.25 [3.25, 4.75] |"
    former = {**found, "rows": {"good": {}, "earlier": {}}}
    kept = families.keep_grown(found, former)
    assert kept == {**found, "rows": {**found["rows"], "earlier": {}}}
    assert families.keep_grown(found, {**former, "settings": {"prompts": 1}}) == found
    assert families.keep_grown({}, former) == {}
    report["drafters"].pop()
    (run / "dartree" / "report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match="different drafters or settings"):
        families.grown_trees(run)


def test_columns_above_temperature_0_name_their_rule() -> None:
    used = {"temperature": 0.0, "rule": "match"}
    settings = {"chain": used, "tree": used}
    for name, rule in (("sampled", "block"), ("sampled_tree", "traversal")):
        settings[name] = {"temperature": 1.0, "rule": rule}
    assert families.titles({"settings": settings}) == [
        "tau chain, T=0",
        "tau tree, T=0",
        "tau chain, T=1 (rule block)",
        "tau tree, T=1 (rule traversal)",
    ]


def test_rows_that_were_trained_otherwise_than_most_are_marked(tmp_path: Path) -> None:
    content = families.collect(run_folder(tmp_path))
    (good,) = (row for row in content["rows"] if row["name"] == "good")
    training = good["trainings"][0]
    before = {key: value for key, value in training.items() if key != "optimiser"}
    training["optimiser"] = "adamw"
    rows = [
        good | {"name": "alike"},
        good | {"name": "alike too"},
        good | {"name": "unknown", "trainings": [before]},  # of a report without the optimiser
        good | {"name": "shorter", "trainings": [training | {"steps": 3}]},
        good | {"name": "other", "trainings": [training | {"optimiser": "muon"}]},
        good | {"name": "exact", "trainings": [training | {"precision": "float32"}]},
    ]
    found = families.keep(content, {**content, "rows": [*content["rows"], *rows]})
    families.mark_others(found["rows"])
    marks = {row["name"]: row.get("trained_otherwise", False) for row in found["rows"]}
    assert [name for name, marked in marks.items() if marked] == ["shorter", "other"]
    page = "\n".join(families.markdown(found))
    assert "| shorter | 1.20 M | 3 * |" in page and "| alike | 1.20 M | 7 |" in page
    assert "do not compare with the other rows: shorter, other." in page
    assert "Trained in float32, on a CPU without bfloat16: exact." in page


def test_rows_of_an_earlier_run_are_kept_beside_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(families, "experiment_rows", lambda: ["good", "slow"])
    (tmp_path / "reports").mkdir()
    run = run_folder(tmp_path / "run")
    assert families.main([str(run)]) == 0
    before = json.loads((tmp_path / "reports" / "families.json").read_text())
    for folder, _ in families.MEASURES.values():  # only "good" is measured again, and is better
        path = run / folder / "report.json"
        report = json.loads(path.read_text())
        report["drafters"] = [
            row | {"tau": 3.5} for row in report["drafters"] if row["draft"]["name"] == "good"
        ]
        path.write_text(json.dumps(report))
    assert families.main([str(run), "--keep"]) == 0
    after = json.loads((tmp_path / "reports" / "families.json").read_text())
    old, new = ({row["name"]: row for row in found["rows"]} for found in (before, after))
    assert new["good"]["measured"]["chain"]["tau"] == 3.5 and "device" not in new["good"]
    assert new["slow"] == {**old["slow"], "device": before["device"], "git": before["git"]}
    text = (tmp_path / "reports" / "families.md").read_text()
    chain = old["slow"]["measured"]["chain"]
    plain = f"plain decoding reached {chain['tokens_per_second'] / chain['speedup']:.1f} tokens/s"
    device = before["device"]["name"]
    assert f"Measured in an earlier run ({device}), in which {plain}: slow." in text
    content = families.collect(run)
    with pytest.raises(UserError, match="another target than this run"):
        families.keep(content, {**before, "target": {**before["target"], "id": "other"}})


def test_dollar_signs_in_names_of_drafters_are_no_formula(tmp_path: Path) -> None:
    no_formula = "$_{$"
    families.draw({no_formula: {no_formula: 2.0, "speedup": 1.5}}, tmp_path / "families.png")
    assert (tmp_path / "families.png").is_file()
