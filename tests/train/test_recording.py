"""Records of a generation: what is recorded is what the decoder did; an interruption doubles
nothing and loses nothing."""

from __future__ import annotations

import json
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from heads.api.checkpoint import WEIGHTS_FILE, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.medusa import Config
from inference.decoding.config import DecodeConfig
from inference.manifest import file_sha256, read_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.verifications import SEQUENCES, VERIFICATIONS, RecordsConfig, read_table
from tests.inference.tokenizers import save_micro_target
from train.data import answers as answers_module
from train.data.answers import HELD
from train.data.config import DataConfig
from train.generate.config import GenerateConfig
from train.generate.run import generate
from train.recording import PartLog

DECODE = DecodeConfig(
    temperature=1.0, max_new_tokens=12, batch_size=4, seed=5, shape="chain", depth=2
)
ROWS = 14


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A micro target, a random drafter of it, prompts (one of them a conversation of two turns)."""
    folder = tmp_path_factory.mktemp("recording")
    config = TargetConfig(str(save_micro_target(folder / "target")), dtype="float64", device="cpu")
    target = TargetModel.load(config)
    drafter = new_drafter("medusa", Config(num_heads=2), target.info, target.weights, 0).to(
        target.dtype
    )
    save_drafter(drafter, folder / "drafter", target.info)
    asked = [[{"role": "user", "content": f"Say {n} and {n * n % 17}."}] for n in range(ROWS)]
    rows = [
        {"id": f"p{n}", "domain": ["code", "chat"][n % 2], "messages": asked[n]}
        for n in range(ROWS)
    ]
    asked[3] += [{"role": "assistant", "content": "Well?"}, {"role": "user", "content": "Go on."}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        str(folder / "prompts.jsonl"), id_column="id", domain_column="domain", turn="all"
    )
    return {
        "target": config,
        "data": data,
        "drafter": str(folder / "drafter"),
        "vocab": target.info.vocab_size,
    }


def recording(given: dict[str, Any], **more: Any) -> GenerateConfig:
    return GenerateConfig(
        **{
            "drafter": given["drafter"],
            "flush_rows": 3,
            "records": RecordsConfig(enabled=True),
            **more,
        }
    )


def run(
    given: dict[str, Any], out: Path, config: GenerateConfig, decode: DecodeConfig = DECODE
) -> dict[str, Any]:
    return generate(config, given["data"], decode, given["target"], out)


@pytest.fixture(scope="module")
def calm(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calm")
    run(given, out, recording(given))
    return out


def answered(out: Path) -> dict[str, dict[str, Any]]:
    shards = read_manifest(out, "generate")["shards"]
    return {
        row["id"]: row for shard in shards for row in pq.read_table(out / shard["file"]).to_pylist()
    }


def rows_of(out: Path, table: str = VERIFICATIONS) -> list[dict[str, Any]]:
    """Rows in an order of their own, without what differs from process to process."""
    rows = read_table(out / "records", table).to_pylist()
    for row in rows:
        del row["time"]
        row.pop("prompt_hash", None)
    return sorted(rows, key=lambda row: (row["sequence"], row.get("position", 0)))


def names_of(out: Path, table: str) -> list[str]:
    """The sequence of every row."""
    return sorted(read_table(out / "records", table).column("sequence").to_pylist())


def test_records_retell_every_answer(calm: Path) -> None:
    """Kept drafts and picks, laid out by position, are the answer itself; and every refused draft
    differs from it."""
    found, passes = answered(calm), defaultdict(list)
    for row in rows_of(calm):
        passes[row["sequence"]].append(row)
    assert sum(len(rows) for rows in passes.values()) > ROWS
    assert any(row["error_depth"] == 1 for rows in passes.values() for row in rows)
    assert any(row["accepted"] for rows in passes.values() for row in rows)
    for name, answer in found.items():
        tokens = answer["tokens"]
        covered = []
        for row in passes[name]:
            kept, at = row["accepted"], row["position"]
            assert tokens[at + 1 : at + 1 + kept] == row["drafted"][:kept]
            covered += range(at + 1, at + 1 + kept)
            if row["error_depth"]:
                assert (
                    row["error_depth"] == kept + 1
                    and row["drafted"][kept] != tokens[at + 1 + kept] == row["pick"]
                )
            if row["error_depth"] or at + 1 + kept < len(tokens):
                covered.append(at + 1 + kept)
            assert row["domain"] == answer["domain"] and row["temperature"] == 1.0
        # first tokens come from reading the prompt
        spans = [range(start + 1, end) for start, end in answer["spans"]]
        assert set(covered) >= {place for span in spans for place in span}
        assert len(covered) == len(set(covered))


def test_sequences_and_the_manifest_say_what_is_on_record(
    calm: Path, given: dict[str, Any]
) -> None:
    found = answered(calm)
    for row in rows_of(calm, SEQUENCES):
        answer = found[row["sequence"]]
        assert row["tokens"] == answer["tokens"] and row["prompt_length"] == answer["spans"][0][0]
        assert (row["seed"], row["finish"], row["temperature"]) == (
            answer["seed"],
            answer["finish"],
            1.0,
        )
    entry = read_manifest(calm, "generate")["records"]
    assert entry == {
        "folder": "records",
        "verifications": len(rows_of(calm)),
        "sequences": ROWS,
        "missing": 0,
    }
    facts = json.loads((calm / "records" / "records.json").read_text())
    assert (facts["drafter"], facts["draft"]["depth"]) == (
        {
            "name": given["drafter"],
            "kind": "medusa",
            "weights_sha256": file_sha256(Path(given["drafter"]) / WEIGHTS_FILE),
        },
        2,
    )


def test_recording_changes_no_answer(calm: Path, given: dict[str, Any], tmp_path: Path) -> None:
    run(
        given,
        tmp_path / "plain",
        GenerateConfig(),
        DecodeConfig(**{**vars(DECODE), "shape": "none"}),
    )
    assert answered(tmp_path / "plain") == answered(calm)
    assert "records" not in read_manifest(tmp_path / "plain", "generate")


@pytest.mark.parametrize("before_part", [True, False])
def test_interrupted_anywhere_nothing_is_doubled_or_lost(
    calm: Path,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before_part: bool,
) -> None:
    """The process ends just before, or just behind, the third part file is written, twice; then the
    generation is completed."""
    real, written = answers_module.write_bytes, []

    def fails(path: Path, content: bytes) -> None:
        if before_part and len(written) == 2:
            raise OSError("ended here")
        real(path, content)
        written.append(path)
        if len(written) == 3:
            raise OSError("ended here")

    monkeypatch.setattr(answers_module, "write_bytes", fails)
    for _ in range(2):
        written.clear()
        with pytest.raises(OSError, match="ended here"):
            run(given, tmp_path / "out", recording(given))
    monkeypatch.undo()
    run(given, tmp_path / "out", recording(given))
    for table in (VERIFICATIONS, SEQUENCES):
        calm_rows, rows = rows_of(calm, table), rows_of(tmp_path / "out", table)
        for row in rows:  # in another batch they may round differently
            for name in ("log_q", "log_p", "pick_log_q", "pick_log_p"):
                if name in row:
                    row[name] = pytest.approx(row[name], abs=1e-5)
        assert rows == calm_rows
    assert (
        read_manifest(tmp_path / "out", "generate")["records"]
        == read_manifest(calm, "generate")["records"]
    )


def test_signals_wait_for_a_part_also_if_another_thread_takes_them(
    calm: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a part's records are gathered, and while other threads run."""
    plain, coming = PartLog.sequence, []
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)

    def interrupted(self: PartLog, *given: Any) -> None:
        plain(self, *given)
        if coming and self.written:
            signal.pthread_kill(other.ident, coming.pop())
            for _ in range(1000):  # the handler runs in this thread
                pass

    monkeypatch.setattr(PartLog, "sequence", interrupted)
    out, former = tmp_path / "out", [signal.getsignal(number) for number in HELD]
    other.start()
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            coming.append(number)
            with pytest.raises(SystemExit):
                run(given, out, recording(given))
        run(given, out, recording(given))
    finally:
        ended.set()
        other.join()
    assert [signal.getsignal(number) for number in HELD] == former
    assert names_of(out, SEQUENCES) == names_of(calm, SEQUENCES)
    assert names_of(out, VERIFICATIONS) == names_of(calm, VERIFICATIONS)


def test_records_that_were_gathered_and_not_written_are_not_written_twice(
    calm: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = PartLog.sequence, []

    def fails(self: PartLog, *given: Any) -> None:
        plain(self, *given)
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError

    monkeypatch.setattr(PartLog, "sequence", fails)
    with pytest.raises(MemoryError):
        run(given, tmp_path / "out", recording(given))
    run(given, tmp_path / "out", recording(given))
    for table in (SEQUENCES, VERIFICATIONS):
        assert names_of(tmp_path / "out", table) == names_of(calm, table)


def test_redacted_records_hold_no_token(given: dict[str, Any], tmp_path: Path) -> None:
    run(given, tmp_path / "out", recording(given, records=RecordsConfig(enabled=True, redact=True)))
    rows, sequences = rows_of(tmp_path / "out"), rows_of(tmp_path / "out", SEQUENCES)
    assert {row["drafted"] for row in rows} == {row["pick"] for row in rows} == {None}
    assert {row["tokens"] for row in sequences} == {row["seed"] for row in sequences} == {None}
    assert len(sequences) == ROWS and all(row["log_p"] for row in rows)


def test_recording_ends_at_its_size_and_says_what_is_missing(
    given: dict[str, Any], tmp_path: Path
) -> None:
    manifest = run(
        given,
        tmp_path / "out",
        recording(given, records=RecordsConfig(enabled=True, max_megabytes=0.02)),
    )
    size = sum(path.stat().st_size for path in (tmp_path / "out" / "records").glob("*.parquet"))
    assert manifest["counts"]["done"] == ROWS
    assert 0 < size <= 20_000
    assert 0 < manifest["records"]["missing"] == ROWS - manifest["records"]["sequences"]


def test_recording_without_drafts_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    plain = DecodeConfig(**{**vars(DECODE), "shape": "none"})
    for config, decode in ((recording(given, drafter=None), DECODE), (recording(given), plain)):
        with pytest.raises(
            UserError, match=r"generate\.records\.enabled records what a drafter drafts"
        ):
            run(given, tmp_path / "out", config, decode)
    with pytest.raises(UserError, match=r"records\.max_megabytes must lie in \[1e-09, "):
        RecordsConfig(max_megabytes=0)
