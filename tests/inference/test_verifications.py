"""Records of verifications: they say what really happened, stop at their size, hide what is to be
hidden, and can be read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.pass_details import PassDetails
from inference.decoding.requests import PassRecord, Request
from inference.decoding.session import Session
from inference.verifications import (
    ROWS_PER_SHARD,
    SEQUENCES,
    VERIFICATIONS,
    VerificationLog,
    read_dataset,
    read_facts,
    read_table,
)
from tests.inference.decoding.test_lossless import SHAPES, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_model, random_target

FACTS = {"target": {"id": "t", "revision": "r"}, "drafter": {"kind": "k"}}


def decoded(
    kind: str, shape: str, temperature: float
) -> list[tuple[Request, list[int], PassRecord]]:
    """Verifications with the text before each: prompt and answer up to its root."""
    target = random_target()
    config = DecodeConfig(batch_size=3, temperature=temperature, **SHAPES[shape])  # type: ignore[arg-type]
    texts: dict[int, list[int]] = {}
    found = []

    def note(request: Request, tokens: list[int], record: PassRecord | None) -> None:
        text = texts.setdefault(request.index, list(request.tokens))
        if record is not None:
            found.append((request, list(text), record))
        text += tokens

    with Session(
        Engine(target, drafter_of(kind, target), config), 60, note, details=True
    ) as session:
        for item in requests(3):
            session.add(item)
        while session.unfinished:
            session.step()
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_details_say_what_was_drafted_and_how_likely_it_was(
    kind: str, shape: str, temperature: float
) -> None:
    """Against the model's own forward pass over the text and the drafted path."""
    model = random_model()
    found = decoded(kind, shape, temperature)
    assert any(record.rejected for _, _, record in found)
    for _, text, record in found[:25]:
        details = record.details
        assert details is not None
        drafted = list(details.drafted)
        logs = (
            model(input_ids=torch.tensor([text + drafted]), use_cache=False)
            .logits[0]
            .log_softmax(-1)
        )
        at = len(text) - 1
        expected = [float(logs[at + i, token]) for i, token in enumerate(drafted)]
        assert list(details.log_p) == pytest.approx(expected, abs=1e-4)
        assert details.pick_log_p == pytest.approx(
            float(logs[at + record.accepted, details.pick]), abs=1e-4
        )
        if record.rejected:
            assert drafted[record.accepted] != details.pick
        if temperature == 0 and record.committed == record.accepted + 1:
            assert details.pick == int(logs[at + record.accepted].argmax())
        if kind == "ngram":
            assert set(details.log_q) <= {None} and details.pick_log_q is None
        else:
            assert len(details.log_q) == len(drafted) and all(
                value is not None and value < 0 for value in details.log_q
            )


def test_what_is_recorded_changes_no_text() -> None:
    target, texts = random_target(), []
    for details in (False, True):
        with Session(
            Engine(target, drafter_of("medusa", target), DecodeConfig(batch_size=2)),
            60,
            details=details,
        ) as session:
            for item in requests(3):
                session.add(item)
            done = {}
            while session.unfinished:
                done |= {c.request.index: (c.tokens, c.passes) for c in session.step()}
        texts.append(done)
    assert texts[0] == texts[1]


# Files


def record(number: int = 0, rejected: bool = True) -> PassRecord:
    details = PassDetails(
        (5, 6, 7), (-0.5, None, -1.5), (-0.25, -2.0, -9.0), 40 + number, None, -0.125
    )
    return PassRecord(1, 2, rejected, 4, 3, details)


def filled(folder: Path, rows: int = 10, **more: Any) -> VerificationLog:
    log = VerificationLog(folder, FACTS, more.pop("max_bytes", 10**8), **more)
    for number in range(rows):
        log.verification(
            f"s{number // 4}", 100 + number, "code", record(number, number % 2 == 0), 0.5
        )
        if number % 4 == 3:
            log.sequence(f"s{number // 4}", "code", [1, 2, 3], [4, 5], 77, 0.5, "stop")
    log.flush()
    return log


def test_what_was_added_is_read_back(tmp_path: Path) -> None:
    log = filled(tmp_path)
    rows = read_table(tmp_path).to_pylist()
    assert len(rows) == 10 and log.written == 12 and log.dropped == 0
    first = rows[0]
    expected = {
        "sequence": "s0",
        "position": 100,
        "domain": "code",
        "drafted": [5, 6, 7],
        "accepted": 1,
        "error_depth": 2,
        "pick": 40,
        "temperature": 0.5,
    }
    assert {key: first[key] for key in expected} == expected
    assert first["log_q"] == [-0.5, None, -1.5] and first["log_p"] == [-0.25, -2.0, -9.0]
    assert first["pick_log_q"] is None and first["pick_log_p"] == -0.125 and first["time"] > 1.7e9
    assert rows[1]["error_depth"] == 0
    (one, two) = read_table(tmp_path, SEQUENCES).to_pylist()
    assert one["tokens"] == [1, 2, 3, 4, 5] and (
        one["prompt_length"],
        one["answer_length"],
        one["seed"],
    ) == (3, 2, 77)
    assert one["prompt_hash"] == two["prompt_hash"]
    assert read_facts(tmp_path) == {"format": 1, "redacted": False, **FACTS}
    loaded = read_dataset(tmp_path)
    assert loaded.num_rows == 10 and loaded[3]["position"] == 103


def test_redacted_records_hold_no_token(tmp_path: Path) -> None:
    filled(tmp_path / "open")
    filled(tmp_path / "redacted", redact=True)
    for row in read_table(tmp_path / "redacted").to_pylist():
        assert row["drafted"] is None and row["pick"] is None
        assert row["error_depth"] in (0, 2) and row["log_p"] == [-0.25, -2.0, -9.0]
    for row in read_table(tmp_path / "redacted", SEQUENCES).to_pylist():
        assert row["tokens"] is None and row["seed"] is None and row["prompt_length"] == 3
    hashes = [
        read_table(tmp_path / name, SEQUENCES)["prompt_hash"][0].as_py()
        for name in ("open", "redacted")
    ]
    assert hashes[0] != hashes[1]  # keyed anew by every process: no list of prompts can be tried


def test_recording_stops_at_its_size_and_counts_what_it_drops(tmp_path: Path) -> None:
    log = VerificationLog(tmp_path, FACTS, max_bytes=30_000)
    for part in range(40):
        for number in range(200):
            log.verification(f"s{part}-{number}", number * part, "code", record(number), 1.0)
        log.flush()
    size = sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))
    assert log.full and size == log.bytes <= 30_000
    assert read_table(tmp_path).num_rows == log.written
    assert log.written + log.dropped == 40 * 200 and log.written > 200
    again = VerificationLog(tmp_path, FACTS, max_bytes=30_000)
    assert again.bytes == size  # what another process wrote counts


def test_memory_is_bounded_when_nobody_flushes(tmp_path: Path) -> None:
    log = VerificationLog(tmp_path, FACTS, 10**9)
    for number in range(8 * ROWS_PER_SHARD + 5):
        log.verification("s", number, "code", record(), 1.0)
    assert log.due and log.dropped == 5
    log.flush()
    assert len(list(tmp_path.glob(f"{VERIFICATIONS}-*.parquet"))) == 8
    assert read_table(tmp_path)["position"].to_pylist() == list(range(8 * ROWS_PER_SHARD))


def test_a_folder_is_continued_by_the_same_and_refused_to_others(tmp_path: Path) -> None:
    filled(tmp_path)
    filled(tmp_path)
    assert read_table(tmp_path).num_rows == 20
    with pytest.raises(UserError, match=r"something else .drafter differ"):
        VerificationLog(tmp_path, {**FACTS, "drafter": {"kind": "other"}}, 10**8)
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine-1.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds .mine-1\.parquet., which is no file of records"):
        VerificationLog(own, FACTS, 10**8)
    assert [path.name for path in own.iterdir()] == ["mine-1.parquet"]
    VerificationLog(tmp_path, {**FACTS, "rule": "match"}, 10**8)  # what earlier versions meant
    with pytest.raises(UserError, match=r"\(rule differ"):
        VerificationLog(tmp_path, {**FACTS, "rule": "block"}, 10**8)
    with pytest.raises(UserError, match=r"something else .redacted differ"):
        VerificationLog(tmp_path, FACTS, 10**8, redact=True)
    with pytest.raises(UserError, match="holds no records"):
        read_table(tmp_path / "nowhere")
    shard = next(tmp_path.glob("verifications-*.parquet"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged shard of verifications"):
        read_table(tmp_path)
    (tmp_path / "records.json").write_text('{"format": 9}')
    with pytest.raises(UserError, match="reads format 1"):
        read_facts(tmp_path)


def test_shards_are_plain_parquet(tmp_path: Path) -> None:
    filled(tmp_path)
    table = pq.read_table(next(tmp_path.glob("verifications-*.parquet")))
    assert (
        table.num_rows == 10 and str(table.schema.field("drafted").type) == "list<element: int32>"
    )
