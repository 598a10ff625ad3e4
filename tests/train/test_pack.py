"""Packing: rows hold every document once, masks travel with them, shards are checked before they
are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.manifest import partial_of, read_manifest, write_manifest
from train.data import packed_file
from train.data.answers import PartWriter, StoredAnswer, merge_parts
from train.data.pack import PackedData, token_counts
from train.data.packed_file import best_fit

INFO = TargetInfo(
    id="t",
    revision="r",
    model_type="llama",
    tokenizer_hash="h",
    vocab_size=100,
    hidden_size=8,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    parameters=1,
)


def document(first, length, answer):
    """Tokens first, first+1, ... with the last `answer` of them supervised."""
    return list(range(first, first + length)), [(length - answer, length)]


@given(st.lists(st.integers(1, 16), max_size=40))
def test_best_fit_holds_every_document_once_within_capacity(lengths):
    rows = best_fit(lengths, 16)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= 16 for row in rows)
    # Any two rows together hold more than one row's worth, or the second would not have been
    # opened.
    loads = sorted(sum(lengths[number] for number in row) for row in rows)
    assert all(a + b > 16 for a, b in pairwise(loads))


def test_best_fit_prefers_the_fullest_row_that_has_room():
    assert best_fit([6, 8, 4, 2], 10) == [[1, 3], [0, 2]]


def test_rows_have_restarting_positions_numbered_segments_and_padding():
    data = PackedData(
        [document(10, 3, 1), document(20, 4, 2), document(30, 5, 2)], sequence_length=8
    )
    assert len(data) == 2
    row = data.row(0)
    assert row.tokens.tolist() == [30, 31, 32, 33, 34, 10, 11, 12]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert row.segments.tolist() == [1] * 5 + [2] * 3
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    last = data.row(1)
    assert last.segments.tolist() == [1] * 4 + [0] * 4
    assert last.tokens[4:].tolist() == last.positions[4:].tolist() == [0] * 4
    assert not last.loss_mask[4:].any()
    assert data.supervised.tolist() == [3, 2]
    assert data.report.padding_share == 4 / 16
    assert data.report.supervised_share == 5 / 12


def test_too_long_documents_are_cut_but_keep_something_supervised():
    documents = [
        document(0, 12, 8),
        document(20, 30, 4),
        (list(range(60, 90)), [(10, 29)]),
        ([1, 2, 3], []),
    ]
    data = PackedData(documents, sequence_length=8)
    rows = {int(data.row(i).tokens[0]): data.row(i) for i in range(len(data))}
    assert (
        rows[0].loss_mask.tolist() == [False] * 4 + [True] * 4
    )  # the answer begins inside: the beginning stays
    # the answer is the last four: the end stays
    assert rows[42].tokens.tolist() == list(range(42, 50))
    assert rows[42].loss_mask.tolist() == [False] * 4 + [True] * 4
    assert rows[66].tokens.tolist() == list(
        range(66, 74)
    )  # the answer begins later: half context, half answer
    assert rows[66].loss_mask.tolist() == [False] * 4 + [True] * 4
    assert all(row.positions.tolist() == list(range(8)) for row in rows.values())
    assert (data.report.documents, data.report.truncated, data.report.dropped) == (3, 3, 1)


def test_packing_is_deterministic():
    rng = np.random.default_rng(0)
    documents = [document(0, int(n), 2) for n in rng.integers(3, 30, 200)]
    one, two = PackedData(documents, 64), PackedData(documents, 64)
    assert [one.row(i).tokens.tolist() for i in range(len(one))] == [
        two.row(i).tokens.tolist() for i in range(len(two))
    ]
    assert one.report.padding_share < 0.05
    total = sum(int((one.row(i).segments > 0).sum()) for i in range(len(one)))
    assert total == sum(len(tokens) for tokens, _ in documents) == one.report.tokens


def rows_of(data):
    names = ("tokens", "positions", "segments", "loss_mask")
    return [[getattr(data.row(i), name).tolist() for name in names] for i in range(len(data))]


def test_packing_in_windows_holds_every_document_once(monkeypatch):
    """Windows bound the memory; they may cost padding, never a document."""
    rng = np.random.default_rng(1)
    documents = [document(100 * i, int(n), 2) for i, n in enumerate(rng.integers(3, 30, 60))]
    one = PackedData(documents, 32)
    packer = packed_file.Packer
    monkeypatch.setattr(packed_file, "Packer", lambda length, files: packer(length, files, 7, 100))
    windows = PackedData(documents, 32)
    assert len(windows) >= len(one)
    found = [
        row.tokens[row.segments == segment].tolist()
        for row in map(windows.row, range(len(windows)))
        for segment in range(1, int(row.segments.max()) + 1)
    ]
    assert sorted(found) == [tokens for tokens, _ in documents]
    assert windows.report.supervised_share == one.report.supervised_share
    assert windows.supervised.tolist() == [
        int(windows.row(i).loss_mask.sum()) for i in range(len(windows))
    ]


def test_packed_rows_are_kept_beside_the_answers_and_rebuilt_when_damaged(
    tmp_path, monkeypatch, caplog
):
    rng = np.random.default_rng(2)
    rows = [document(int(n), int(n), 2) for n in rng.integers(3, 30, 40)]
    generated(tmp_path, rows)
    first = PackedData.from_manifest(tmp_path, INFO, 32)
    (kept,) = (tmp_path / "packed").iterdir()
    reads = []
    monkeypatch.setattr(
        "train.data.pack.weighted_documents", lambda *arguments: reads.append(arguments)
    )
    again = PackedData.from_manifest(tmp_path, INFO, 32)
    assert not reads, "the second training reads what the first one packed"
    assert rows_of(first) == rows_of(again) == rows_of(PackedData(rows, 32))
    assert first.report == again.report
    monkeypatch.undo()

    expected = rows_of(first)
    content = bytearray((kept / "tokens.bin").read_bytes())
    content[5] ^= 1
    (kept / "tokens.bin").write_bytes(content)
    assert rows_of(PackedData.from_manifest(tmp_path, INFO, 32)) == expected
    assert "were damaged; they are built again" in caplog.text
    (kept / "lengths.bin").write_bytes(b"")
    assert rows_of(PackedData.from_manifest(tmp_path, INFO, 32)) == expected
    PackedData.from_manifest(tmp_path, INFO, 16)
    assert len(list((tmp_path / "packed").iterdir())) == 2, "another length has rows of its own"


def test_what_a_killed_packing_left_goes_with_the_next(tmp_path):
    generated(tmp_path, [document(10, 3, 1), document(20, 4, 2)])
    folder = tmp_path / "packed" / "0123456789abcdef"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living = partial_of(folder)
    dead = living.with_name(living.name.replace(f".{os.getpid()}-", f".{ended.pid}-"))
    for path in (living, dead):
        path.mkdir(parents=True)
        (path / "tokens.bin").write_bytes(b"half")
    PackedData.from_manifest(tmp_path, INFO, 8)
    assert living.is_dir() and not dead.exists()


def test_a_folder_that_cannot_be_written_is_packed_elsewhere(tmp_path, monkeypatch, caplog):
    rows = [document(10, 3, 1), document(20, 4, 2)]
    generated(tmp_path, rows)
    (tmp_path / "packed").write_text("a file where the folder should be")
    assert rows_of(PackedData.from_manifest(tmp_path, INFO, 8)) == rows_of(PackedData(rows, 8))
    assert "a temporary folder is used" in caplog.text


def test_one_row_may_hold_several_documents(tmp_path):
    with PartWriter(tmp_path, 100, 1000) as writer:
        writer.add(
            StoredAnswer("r0", 0, "chat", (1, 2, 3, 4, 5, 6, 7), ((1, 3), (5, 7)), parts=(3,))
        )
    merged = merge_parts(tmp_path, 1, shard_rows=2)
    write_manifest(
        tmp_path, "generate", {"target": INFO.to_dict(), "counts": {}, "shards": merged.shards}
    )
    expected = PackedData([([1, 2, 3], [(1, 3)]), ([4, 5, 6, 7], [(2, 4)])], 8)
    assert rows_of(PackedData.from_manifest(tmp_path, INFO, 8)) == rows_of(expected)


def test_nothing_supervised_or_too_short_rows_are_refused():
    with pytest.raises(UserError, match="0% of 0 tokens"):
        PackedData([([1, 2, 3], [])], 8)
    with pytest.raises(UserError, match="at least 2"):
        PackedData([document(0, 3, 1)], 1)


def generated(folder, rows, **target):
    """A finished generate stage with the given (tokens, spans) answers."""
    with PartWriter(folder, 100, 1000) as writer:
        for index, (tokens, spans) in enumerate(rows):
            writer.add(
                StoredAnswer(f"r{index}", index, "chat", tuple(tokens), tuple(spans), "stop")
            )
    merged = merge_parts(folder, len(rows), shard_rows=2)
    write_manifest(
        folder,
        "generate",
        {"target": {**INFO.to_dict(), **target}, "counts": {}, "shards": merged.shards},
    )


def test_shards_of_a_manifest_are_packed(tmp_path):
    rows = [document(10, 3, 1), document(20, 4, 2), document(30, 5, 2)]
    generated(tmp_path, rows)
    data, expected = PackedData.from_manifest(tmp_path, INFO, 8), PackedData(rows, 8)
    assert [data.row(i).tokens.tolist() for i in range(2)] == [
        expected.row(i).tokens.tolist() for i in range(2)
    ]
    assert data.report == expected.report


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_tokens_outside_answers_are_supervised_with_the_given_weight(tmp_path, weight):
    generated(tmp_path, [document(10, 3, 1), document(20, 4, 2), document(30, 5, 2)])
    plain = PackedData.from_manifest(tmp_path, INFO, 8)
    data = PackedData.from_manifest(tmp_path, INFO, 8, context_weight=weight)
    assert data.supervised.tolist() == [6, 3] and data.report.supervised == 9
    assert data.weighed == (weight < 1) and not plain.weighed
    for index in (0, 1):
        row, answers = data.row(index), plain.row(index)
        assert row.tokens.tolist() == answers.tokens.tolist()
        expected = [
            (position > 0 and segment > 0, 1.0 if mask or segment == 0 else weight)
            for position, segment, mask in zip(
                row.positions, row.segments, answers.loss_mask, strict=True
            )
        ]
        assert row.loss_mask.tolist() == [mask for mask, _ in expected]
        if weight < 1:
            assert row.weights.tolist() == [value for _, value in expected]
        else:
            assert row.weights is None
    # a draft vocabulary is chosen by what drafts are made of
    assert torch.equal(token_counts(data, 41), token_counts(plain, 41))


def test_changed_shards_other_tokenizers_and_foreign_ids_are_refused(tmp_path):
    generated(tmp_path / "other", [document(1, 4, 2)], tokenizer_hash="another", id="some/model")
    with pytest.raises(
        UserError, match="tokenised for target 'some/model', whose tokenizer differs"
    ):
        PackedData.from_manifest(tmp_path / "other", INFO, 8)
    generated(tmp_path / "big", [document(98, 4, 2)])
    with pytest.raises(UserError, match=r"token ids outside 0\.\.99"):
        PackedData.from_manifest(tmp_path / "big", INFO, 8)
    generated(tmp_path / "hit", [document(1, 4, 2)])
    shard = tmp_path / "hit" / "shards" / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(UserError, match="changed or damaged"):
        PackedData.from_manifest(tmp_path / "hit", INFO, 8)
    with pytest.raises(UserError, match="no finished 'generate' stage"):
        PackedData.from_manifest(tmp_path / "nothing", INFO, 8)


def test_documents_beyond_the_positions_of_the_target_are_refused(tmp_path):
    generated(tmp_path, [document(1, 70, 2)])
    with pytest.raises(UserError, match=r"documents of up to 70 tokens.* reads at most 64"):
        PackedData.from_manifest(tmp_path, INFO, 128)
    assert len(PackedData.from_manifest(tmp_path, INFO, 64)) == 1, "the training cuts it"


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    generated(tmp_path / "out", [document(1, 4, 2)])
    manifest = read_manifest(tmp_path / "out", "generate")
    manifest["shards"][0]["file"] = "../out/shards/shard-00000.parquet"
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="outside its folder"):
        PackedData.from_manifest(tmp_path / "out", INFO, 8)


def test_a_shard_without_our_columns_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from inference.manifest import file_entry

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    write_manifest(
        tmp_path,
        "generate",
        {
            "target": INFO.to_dict(),
            "counts": {},
            "shards": [file_entry(tmp_path, "a.parquet", rows=1)],
        },
    )
    with pytest.raises(UserError, match="not a shard of `headstart generate`"):
        PackedData.from_manifest(tmp_path, INFO, 8)
