"""A learner's samples: whole answers that fit their verifications, nothing of those who opt out,
nothing private, and a folder that keeps its size."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from inference.decoding.engine import Engine
from inference.server.recorder import Recorder
from inference.server.samples import (
    SampledAnswer,
    TrafficSamples,
    batch_bytes,
    batches,
    remove_batch,
)
from inference.verifications import SEQUENCES, VERIFICATIONS, read_table, record_facts
from tests.inference.server.running import MODEL, Running, serving
from tests.waiting import until


def ask(running: Running, number: int, **more: Any) -> Any:
    return running.client.completions.create(
        model=MODEL, prompt=[5, 6, 7, 8 + number], max_tokens=12, seed=987654321, **more
    )


@pytest.fixture
def answers(engine: Engine) -> list[SampledAnswer]:
    """Real answers with the details of their passes."""
    from inference.decoding.requests import Request
    from inference.decoding.session import Session

    found = []
    with Session(engine, 64, lambda *_: None, details=True) as session:
        for number in range(4):
            session.add(Request(number, (5, 6, 7, 8 + number), number, 12))
        while session.unfinished:
            found += session.step()
    return [
        SampledAnswer(
            f"s{n}", "code", "client", one.request.tokens, one.tokens, one.passes, 0.0, "x"
        )
        for n, one in enumerate(found)
    ]


def test_samples_hold_whole_answers_and_nothing_of_those_who_opt_out(
    engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "traffic"
    with serving(engine, samples=folder, records=tmp_path / "records") as running:
        kept = [ask(running, number, user="somebody") for number in range(3)]
        ask(running, 3, extra_body={"store": False})
        ask(running, 4, extra_headers={"X-Headstart-Store": "false"})
        ask(running, 5, extra_headers={"X-Headstart-Store": "maybe"})  # anything but true
        kept.append(ask(running, 6, extra_body={"store": True}))
    rows = read_table(folder, SEQUENCES).to_pylist()
    assert {row["sequence"] for row in rows} == {answer.id for answer in kept}
    assert all(row["seed"] is None and row["client"] for row in rows)
    assert len({row["client"] for row in rows}) == 1
    for row in read_table(folder, VERIFICATIONS).to_pylist():
        whole = next(one for one in rows if one["sequence"] == row["sequence"])["tokens"]
        start, accepted = row["position"] + 1, row["accepted"]
        assert row["drafted"][:accepted] == whole[start : start + accepted]
    recorded = read_table(tmp_path / "records", SEQUENCES).to_pylist()  # of these neither
    assert {row["sequence"] for row in recorded} == {answer.id for answer in kept}
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    content += str(rows).encode()
    for private in (b"127.0.0.1", b"somebody", b"987654321"):
        assert private not in content


def test_of_a_share_only_some_answers_are_sampled(engine: Engine, tmp_path: Path) -> None:
    samples = TrafficSamples(tmp_path, record_facts(engine, "d"), 10**9, 0.25)
    assert 150 < sum(samples.chosen() for _ in range(1000)) < 350


def test_the_oldest_batches_make_room_and_numbers_never_come_again(
    engine: Engine, answers: list[SampledAnswer], tmp_path: Path
) -> None:
    samples = TrafficSamples(tmp_path, record_facts(engine, "d"), 10**9, 1.0)

    def write(into: TrafficSamples) -> str:
        for answer in answers:
            into.add(answer)
        into.flush()
        return batches(tmp_path)[-1]

    names = [write(samples) for _ in range(3)]
    assert batches(tmp_path) == names == sorted(names)
    size = batch_bytes(tmp_path, names[0])
    small = TrafficSamples(tmp_path, record_facts(engine, "d"), 2 * size + size // 2, 1.0)
    names.append(write(small))  # as after a restart
    assert batches(tmp_path) == names[-2:] and small.dropped == 2
    assert sum(path.stat().st_size for path in tmp_path.glob("*.parquet")) <= small.max_bytes
    table = pq.read_table(tmp_path / f"sequences-{names[-1]}.parquet")
    assert table.num_rows == len(answers)


def test_a_clock_that_is_set_back_makes_no_batch_older(
    engine: Engine, answers: list[SampledAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner has read up to a batch, and removes older ones unread."""
    facts = record_facts(engine, "d")
    first = TrafficSamples(tmp_path, facts, 10**9, 1.0)
    first.add(answers[0])
    first.flush()
    (read,) = batches(tmp_path)
    remove_batch(tmp_path, read)
    monkeypatch.setattr("inference.server.samples.time.time_ns", lambda: int(read) - 10**12)
    for again in (False, True):  # by the same server, and by one that is started again
        samples = TrafficSamples(tmp_path, facts, 10**9, 1.0) if again else first
        samples.add(answers[1])
        samples.flush()
    assert len(batches(tmp_path)) == 2 and read < min(batches(tmp_path))


def test_an_error_of_one_batch_does_not_end_the_recorder(
    engine: Engine, answers: list[SampledAnswer], tmp_path: Path
) -> None:
    samples = TrafficSamples(tmp_path, record_facts(engine, "d"), 10**9, 1.0)
    recorder = Recorder(None, samples, None, seconds=0.01)
    recorder.start()
    samples.add(replace(answers[0], tokens=["not a token"]))
    until(lambda: not samples._waiting)
    samples.add(answers[1])
    until(lambda: bool(batches(tmp_path)))
    recorder.stop()
    assert read_table(tmp_path, SEQUENCES)["sequence"].to_pylist() == ["s1"]


@pytest.mark.parametrize("write", [1, 3])
def test_a_full_disk_loses_the_batch_that_it_met_and_no_other(
    engine: Engine,
    answers: list[SampledAnswer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: int,
) -> None:
    samples = TrafficSamples(tmp_path, record_facts(engine, "d"), 10**9, 1.0)
    samples.add(answers[0])
    samples.flush()
    before = batches(tmp_path)
    plain, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == write:  # the number, or between the two files of a batch
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file)

    samples.add(answers[1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            samples.flush()
    assert batches(tmp_path) == before and len(list(tmp_path.glob("*.parquet"))) == 2
    samples.add(answers[2])
    samples.flush()
    assert read_table(tmp_path, SEQUENCES)["sequence"].to_pylist() == ["s0", "s2"]


def test_samples_of_another_target_are_dropped(
    engine: Engine, answers: list[SampledAnswer], tmp_path: Path
) -> None:
    facts = record_facts(engine, "d")
    samples = TrafficSamples(tmp_path, facts, 10**9, 1.0)
    samples.add(answers[0])
    samples.flush()
    TrafficSamples(tmp_path, facts, 10**9, 1.0)
    assert len(batches(tmp_path)) == 1
    TrafficSamples(tmp_path, {**facts, "target": {"id": "other"}}, 10**9, 1.0)
    assert not batches(tmp_path)
