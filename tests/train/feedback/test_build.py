"""Feedback folders: weights are what the formulas say, have mean 1, and are read by a training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from heads.api.errors import UserError
from inference.manifest import read_manifest
from tests.train.feedback.recorded import KIND, decoded, target, write_answers, write_records
from train.data.config import DataConfig
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.data.sources import Row, Source
from train.feedback.build import build
from train.feedback.config import FeedbackConfig
from train.feedback.evidence import TokenEvidence, VerificationRecords, evidence_of


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        row
        for entry in read_manifest(folder, "generate")["shards"]
        for row in pq.read_table(folder / entry["file"]).to_pylist()
    ]


def evidence(answers: Path, records: Path) -> list[tuple[dict[str, Any], TokenEvidence]]:
    known = VerificationRecords(records, target().info)
    return [
        (row, evidence_of(np.array(row["tokens"], np.int32), known.of(row["id"])))
        for row in rows_of(answers)
    ]


def supervised(row: dict[str, Any]) -> list[int]:
    return [at for low, high in row["spans"] for at in range(low, high)]


def _at(row: dict[str, Any]) -> list[float]:
    return [row["weights"][at] for at in supervised(row)]


def costs(found: list[TokenEvidence]) -> list[float]:
    """v_d / v_1, by a plain count. costs[d], d from 1."""
    deepest = max(int(one.depth.max()) for one in found)
    tested = [sum(int((one.depth == d).sum()) for one in found) for d in range(deepest + 2)]
    passed = [
        sum(int(((one.depth == d) & ~one.failed).sum()) for one in found)
        for d in range(deepest + 2)
    ]

    def value(depth: int) -> float:
        further, chance = 1.0, 1.0
        for d in range(depth + 1, deepest + 1):
            chance *= passed[d] / tested[d] if tested[d] else 0.0
            further += chance
        return further

    return [0.0] + [value(d) / value(1) for d in range(1, deepest + 1)]


def test_without_switches_the_answers_stay_as_they_are(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    manifest = build([records], [answers], tmp_path / "out", FeedbackConfig())
    assert rows_of(tmp_path / "out") == rows_of(answers)
    assert manifest["round"] == 1 and manifest["feedback"]["mean_weight"] == 1.0
    assert manifest["feedback"]["errors"] > 0


def test_errors_weigh_by_how_unlikely_and_how_costly_they_were(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    config = FeedbackConfig(token_weights=True, error_weight=3.0)
    manifest = build([records], [answers], tmp_path / "out", config)
    known = evidence(answers, records)
    cost = costs([found for _, found in known])
    raw, got = [], []
    for (row, found), out in zip(known, rows_of(tmp_path / "out"), strict=True):
        assert out["tokens"] == row["tokens"] and len(out["weights"]) == len(row["tokens"])
        for at in supervised(row):
            missing = 1.0 - float(found.chance[at]) if found.failed[at] else 0.0
            raw.append(1.0 + 3.0 * missing * cost[int(found.depth[at])])
            got.append(out["weights"][at])
    assert max(raw) > 1.5
    np.testing.assert_allclose(got, np.array(raw) / np.mean(raw), rtol=1e-5)
    assert np.mean(got) == pytest.approx(1.0, abs=1e-5)
    assert manifest["feedback"]["mean_weight"] == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(manifest["feedback"]["cost"], cost[1:])
    for name, one in manifest["feedback"]["domains"].items():
        own = [
            weight
            for row in rows_of(tmp_path / "out")
            if row["domain"] == name
            for weight in _at(row)
        ]
        assert one["weight"] == pytest.approx(np.mean(own), rel=1e-5)


def test_roots_weigh_by_where_their_draft_failed(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    build(
        [records], [answers], tmp_path / "out", FeedbackConfig(anchor_weights=True, root_weight=5.0)
    )
    known = evidence(answers, records)
    cost = costs([found for _, found in known])
    raw, got = [], []
    for (row, found), out in zip(known, rows_of(tmp_path / "out"), strict=True):
        assert "weights" not in out
        for at in supervised(row):
            failed = int(found.roots[at])
            raw.append(1.0 + (5.0 * cost[failed] if failed > 0 else 0.0))
            got.append(out["anchors"][at])
    assert max(raw) == 6.0
    np.testing.assert_allclose(got, np.array(raw) / np.mean(raw), rtol=1e-5)


def test_replay_keeps_errors_and_their_surroundings(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    build(
        [records],
        [answers],
        tmp_path / "out",
        FeedbackConfig(replay=True, replay_before=1, replay_after=0),
    )
    kept, deepest = {row["id"]: row for row in rows_of(tmp_path / "out")}, 0
    for row, found in evidence(answers, records):
        errors = np.flatnonzero(found.failed).tolist()
        # from their roots on
        drafts = {
            at for error in errors for at in range(error - max(1, found.depth[error]), error + 1)
        }
        near = sorted(drafts & set(supervised(row)))
        deepest = max([deepest, *(int(found.depth[error]) for error in errors)])
        if not errors:
            assert row["id"] not in kept
            continue
        out = kept[row["id"]]
        assert supervised(out) == near
        assert out["tokens"] == row["tokens"][: near[-1] + 1], (
            "nothing is read behind the last error"
        )
    assert kept and deepest > 1
    info = target().info
    PackedData.from_manifest(tmp_path / "out", info, 64)
    with pytest.raises(UserError, match=r"context_weight=0.5 .* feedback.replay=true"):
        PackedData.from_manifest(tmp_path / "out", info, 64, context_weight=0.5)


def test_domains_weigh_by_the_passes_that_their_traffic_loses(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    config = FeedbackConfig(domain_weights=True, traffic={"code": 3.0, "chat": 1.0})
    manifest = build([records], [answers], tmp_path / "out", config)
    known, lost, tokens = evidence(answers, records), {}, {}
    deepest = max(int(found.depth.max()) for _, found in known)
    for name, share in (("code", 0.75), ("chat", 0.25)):
        own = [(row, found) for row, found in known if row["domain"] == name]
        passes, committed = sum(f.passes for _, f in own), sum(f.committed for _, f in own)
        tokens[name] = sum(len(supervised(row)) for row, _ in own)
        lost[name] = share * (passes / committed - 1 / (deepest + 1)) / (tokens[name] / 1.0)
    mean = sum(lost[name] * tokens[name] for name in lost) / sum(tokens.values())
    for row in rows_of(tmp_path / "out"):
        np.testing.assert_allclose(row["weights"], lost[row["domain"]] / mean, rtol=1e-5)
    assert manifest["feedback"]["domains"]["code"]["weight"] == pytest.approx(lost["code"] / mean)
    with pytest.raises(UserError, match=r"feedback.traffic names \['poetry'\]"):
        build([records], [answers], tmp_path / "else", replace(config, traffic={"poetry": 1.0}))


def test_hard_prompts_are_read_by_the_next_generation(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    manifest = build([records], [answers], tmp_path / "out", FeedbackConfig(hard_prompts=0.25))
    path = tmp_path / "out" / "hard_prompts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    known = {row["id"]: (row, found) for row, found in evidence(answers, records)}
    cost = {
        name: found.passes / found.committed for name, (_, found) in known.items() if found.passes
    }
    hardest = sorted(cost, key=lambda name: (-cost[name], name))[: round(0.25 * len(cost))]
    assert [line["id"] for line in lines] == hardest, "of equal costs, the first ids"
    assert manifest["feedback"]["hard_prompts"] == len(lines)
    rows = [
        row
        for row in Source(DataConfig(str(path), id_column="id", domain_column="domain"))
        if isinstance(row, Row)
    ]
    for line, row in zip(lines, rows, strict=True):
        assert row.tokens == tuple(
            known[line["id"]][0]["tokens"][: known[line["id"]][0]["spans"][0][0]]
        )
        assert row.domain == line["domain"]


def test_a_training_reads_the_weights_at_their_tokens(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    build(
        [records],
        [answers],
        tmp_path / "out",
        FeedbackConfig(token_weights=True, anchor_weights=True),
    )
    rows = rows_of(tmp_path / "out")
    for _ in range(2):  # packed, and read again from what was packed
        data = PackedData.from_manifest(tmp_path / "out", target().info, 64)
        batch = StepLoader(data, 2, 2, 1, 0, 0).step(0)[0]
        assert batch.weights is not None and batch.anchors is not None
        for row in range(2):
            for number in range(1, int(batch.segments[row].max()) + 1):
                at = (batch.segments[row] == number).nonzero().squeeze(1)
                own = next(one for one in rows if one["tokens"] == batch.tokens[row, at].tolist())
                assert batch.weights[row, at].tolist() == own["weights"]
                assert batch.anchors[row, at].tolist() == own["anchors"]
            padding = batch.segments[row] == 0
            assert (batch.weights[row, padding] == 1).all()
    plain = PackedData.from_manifest(answers, target().info, 64)
    assert StepLoader(plain, 2, 2, 1, 0, 0).step(0)[0].weights is None


def test_answers_without_records_weigh_one(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    fresh = write_answers(tmp_path / "fresh", decoded(KIND, 1.0))
    config = FeedbackConfig(token_weights=True)
    manifest = build([records], [answers, fresh], tmp_path / "out", config)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 16 and manifest["counts"]["input"] == 16
    (lightest,) = {weight for row in rows[8:] for weight in row["weights"]}
    assert lightest == min(weight for row in rows[:8] for weight in row["weights"]) < 1.0
    alone = build([], [fresh], tmp_path / "alone", config)
    assert alone["feedback"]["verifications"] == 0 and alone["feedback"]["mean_weight"] == 1.0


def test_the_same_again_is_left_alone_and_other_inputs_replace_it(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    out, config = tmp_path / "out", FeedbackConfig(token_weights=True)
    build([records], [answers], out, config)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    build([records], [answers], out, config)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == before
    changed = build([records], [answers], out, replace(config, error_weight=9.0))
    assert changed["feedback"]["key"]["settings"]["error_weight"] == 9.0
    (out / "manifest.json").unlink()  # a kill before the end
    assert (
        build([records], [answers], out, replace(config, error_weight=9.0))["shards"]
        == changed["shards"]
    )
    with pytest.raises(UserError, match="holds answers that are no feedback"):
        build([records], [answers], answers, config)


def test_what_a_training_has_read_is_not_replaced(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    out = tmp_path / "out"
    first = build([records], [answers], out, FeedbackConfig())
    assert build([records], [answers], out, FeedbackConfig(), reader=tmp_path) == first
    other = FeedbackConfig(error_weight=8.0)
    with pytest.raises(UserError, match=r"feedback\.error_weight was 4\.0, is 8\.0\. Give"):
        build([records], [answers], out, other, reader=tmp_path)
    with pytest.raises(UserError, match=r"inputs: other answers or records are given\."):
        build([], [answers], out, FeedbackConfig(), reader=tmp_path)
    assert read_manifest(out, "generate") == first


def test_traffic_alone_is_enough(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    config = FeedbackConfig(sequences=True, token_weights=True)
    build([records], [], tmp_path / "out", config, info=target().info)
    build([records], [answers], tmp_path / "same", replace(config, sequences=False))
    ours, theirs = rows_of(tmp_path / "out"), rows_of(tmp_path / "same")
    assert [(row["tokens"], row["spans"], row["weights"]) for row in ours] == [
        (row["tokens"], row["spans"], row["weights"]) for row in theirs
    ]
    hidden = write_records(tmp_path / "hidden", decoded(KIND), KIND, redact=True)
    with pytest.raises(UserError, match="are redacted: they hold no text"):
        build([hidden], [], tmp_path / "none", config, info=target().info)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"error_weight": -1.0}, r"feedback.error_weight must lie in \[0, "),
        ({"hard_prompts": 1.5}, r"feedback.hard_prompts must lie in \[0, 1\]"),
        ({"domain_weights": True, "traffic": {"code": 0.0}}, "feedback.traffic needs shares"),
        ({"traffic": {"code": 1.0}}, "feedback.domain_weights, which reads it, is off"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        FeedbackConfig(**changes)


def test_input_that_does_not_fit_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    with pytest.raises(UserError, match="there are no answers to make feedback of"):
        build([records], [], tmp_path / "out", FeedbackConfig())
    with pytest.raises(UserError, match="2 folders of records are given for 1 of answers"):
        build([records, records], [answers], tmp_path / "out", FeedbackConfig())
    with pytest.raises(UserError, match="takes documents from records"):
        build([records], [], tmp_path / "out", FeedbackConfig(sequences=True))


def test_nothing_to_replay_is_said(tmp_path: Path) -> None:
    completions = tuple(
        one
        for one in decoded("quantized_self")
        if not any(record.rejected for record in one.passes)
    )
    assert completions, "every answer has an error"
    answers = write_answers(tmp_path / "generate", completions)
    records = write_records(answers / "records", completions, "quantized_self")
    with pytest.raises(UserError, match="Without errors there is nothing to replay"):
        build([records], [answers], tmp_path / "out", FeedbackConfig(replay=True))
