"""Datasets of every form become rows with stable ids, or skipped rows with a reason; nothing is
lost."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heads.api.errors import UserError
from train.data.config import DataConfig
from train.data.sources import Mixture, Row, SkippedRow, Source

ASK = [{"role": "user", "content": "Hello!"}]
TALK = [*ASK, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye?"}]
SHAREGPT = [
    {"from": "human", "value": "Hello!"},
    {"from": "gpt", "value": "Hi."},
    {"from": "human", "value": "Bye?"},
]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Keep what `datasets` converts out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def jsonl(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def contents(path, **options):
    return [row.messages or row.tokens for row in Source(DataConfig(path, **options))]


def test_every_local_form_gives_the_same_rows(tmp_path):
    rows = [{"messages": TALK}, {"messages": ASK}]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "parquet").mkdir()
    pq.write_table(table.slice(0, 1), tmp_path / "parquet" / "a.parquet")
    pq.write_table(table.slice(1, 1), tmp_path / "parquet" / "b.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as stream:
        stream.write_table(table)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(
        tmp_path / "splits"
    )
    forms = [
        jsonl(tmp_path / "rows.jsonl", rows),
        str(tmp_path / "rows.json"),
        str(tmp_path / "rows.arrow"),
        str(tmp_path / "parquet"),
        str(tmp_path / "parquet" / "*.parquet"),
        str(tmp_path / "saved"),
        str(tmp_path / "splits"),
    ]
    for form in forms:
        assert contents(form) == [tuple(TALK), tuple(ASK)], form
    ids = {tuple(row.id for row in Source(DataConfig(form))) for form in forms}
    assert len(ids) == 1, "content ids must not depend on the file format"


def test_sharegpt_conversations_are_mapped(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        [{"conversations": SHAREGPT}, {"conversations": [{"from": "alien", "value": "x"}]}],
    )
    first, second = Source(DataConfig(path))
    assert first.messages == tuple(TALK)
    assert isinstance(second, SkippedRow)
    assert "'alien' is not one of" in second.reason


def test_sharegpt_stored_as_a_mapping_of_lists_is_mapped(tmp_path):
    columns = {"from": [m["from"] for m in SHAREGPT], "value": [m["value"] for m in SHAREGPT]}
    assert contents(jsonl(tmp_path / "a.jsonl", [{"conversations": columns}])) == [tuple(TALK)]


def test_plain_prompts_and_pretokenised_rows(tmp_path):
    prompts = jsonl(tmp_path / "p.jsonl", [{"question": "Hello!"}])
    assert contents(prompts, column="question") == [tuple(ASK)]
    tokens = jsonl(
        tmp_path / "t.jsonl", [{"tokens": [1, 2, 3], "spans": [[1, 3]]}, {"tokens": [4]}]
    )
    assert [(r.tokens, r.spans) for r in Source(DataConfig(tokens))] == [
        ((1, 2, 3), ((1, 3),)),
        ((4,), None),
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "tool_calls": [1]},
        {"role": "assistant", "content": "x", "tool_calls": True},
        {"role": "tool", "content": "x", "name": "half \ud83d"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"q": "\\ud83d"}'}}],
        },
    ],
)
def test_a_row_with_an_impossible_message_is_skipped_alone(tmp_path, message):
    rows = [{"messages": [*ASK, message]}, {"messages": ASK}]
    skipped, kept = Source(DataConfig(jsonl(tmp_path / "a.jsonl", rows)))
    assert isinstance(skipped, SkippedRow) and isinstance(kept, Row)


def test_rows_with_strange_speakers_and_dates_in_tools_are_skipped_alone(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"conversations": [{"from": ["human"], "value": "x"}]}])
    (skipped,) = Source(DataConfig(path))
    assert isinstance(skipped, SkippedRow) and "is not one of" in skipped.reason
    when = datetime(2026, 1, 1, tzinfo=UTC)
    tools = [{"type": "function", "function": {"name": "f", "since": when}}]
    table = pa.Table.from_pylist([{"messages": ASK, "tools": tools}])
    pq.write_table(table, tmp_path / "a.parquet")
    (skipped,) = Source(DataConfig(str(tmp_path / "a.parquet")))
    assert isinstance(skipped, SkippedRow) and "JSON" in skipped.reason


def test_every_bad_row_is_reported_and_the_good_ones_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"prompt": "good"}),
        "{broken",
        json.dumps([1]),
        json.dumps({"prompt": ""}),
        json.dumps({"prompt": 7}),
        json.dumps({"text": "no prompt"}),
        json.dumps({"prompt": "half \ud83d"}),
        json.dumps({"prompt": "good"}),
        "",
        json.dumps({"prompt": "also good"}),
    ]
    path.write_text("\n".join(lines))
    rows = list(Source(DataConfig(str(path))))
    assert [row.index for row in rows] == list(range(9))
    assert [row.reason if isinstance(row, SkippedRow) else "" for row in rows] == [
        "",
        "the line is not valid JSON",
        "the line is not a JSON object",
        "the prompt is empty",
        "the prompt is int, not text",
        "column 'prompt' is missing or null",
        "the prompt is not valid Unicode",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tokens": []}, "tokens are empty"),
        ({"tokens": [1, -2]}, "non-negative integers"),
        ({"tokens": [1, 2.5]}, "non-negative integers"),
        ({"tokens": [1, 2], "spans": [[1, 3]]}, "ascending"),
        ({"tokens": [1, 2, 3], "spans": [[1, 2], [0, 1]]}, "ascending"),
        ({"tokens": [1, 2], "spans": [[1, 1]]}, "ascending"),
        ({"tokens": [1, 2], "spans": [1]}, "pairs"),
    ],
)
def test_bad_pretokenised_rows_are_reported(tmp_path, row, reason):
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": [1]}, row])
    assert reason in list(Source(DataConfig(path)))[1].reason


def test_ids_and_domains(tmp_path):
    rows = [
        {"name": "a", "prompt": "x", "kind": "code"},
        {"name": "a", "prompt": "y", "kind": None},
        {"name": "", "prompt": "z"},
    ]
    path = jsonl(tmp_path / "p.jsonl", rows)
    given = list(Source(DataConfig(path, id_column="name", domain_column="kind", domain="chat")))
    assert isinstance(given[0], Row)
    assert (given[0].id, given[0].domain) == ("a", "code")
    assert given[1].domain == "chat"
    assert "id) is empty" in given[2].reason
    hashed = [row.id for row in Source(DataConfig(path))]
    assert hashed == [row.id for row in Source(DataConfig(jsonl(tmp_path / "copy.jsonl", rows)))]
    assert len(set(hashed)) == 3


def test_shuffle_and_limit_are_fixed_by_the_seed(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": f"p{i}"} for i in range(50)])

    def texts(**options):
        return [row.messages[0]["content"] for row in Source(DataConfig(path, **options))]

    assert texts(limit=3) == ["p0", "p1", "p2"]
    assert texts(shuffle=True, seed=1) == texts(shuffle=True, seed=1) != texts(shuffle=True, seed=2)
    assert sorted(texts(shuffle=True)) == sorted(texts())
    assert texts(shuffle=True, limit=10) == texts(shuffle=True)[:10]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"column": "promt"}, "no column 'promt'.*Did you mean 'prompt'.*Allowed: other, prompt"),
        ({"id_column": "key"}, "no column 'key' .data.id_column"),
        (
            {"kind": "messages"},
            "none of the columns messages, conversations, conversation. Set data.column",
        ),
    ],
)
def test_unknown_columns_name_the_available_ones(tmp_path, options, problem):
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "other": 1}])
    with pytest.raises(UserError, match=problem):
        Source(DataConfig(path, **options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "message"}, "Did you mean 'messages'"),
        ({"turn": "middle"}, "Allowed: all, first, last"),
        ({"limit": 0}, r"data.limit must lie in \[1, "),
        ({"max_prompt_tokens": -1}, r"data.max_prompt_tokens must lie in \[1, "),
    ],
)
def test_wrong_settings_are_refused(options, problem):
    with pytest.raises(UserError, match=problem):
        DataConfig("x.jsonl", **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_shares_are_apart_and_together_the_whole(tmp_path, streaming):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"prompt {n}"} for n in range(20)])
    options = {"limit": 17, "shuffle": True, "streaming": streaming}
    whole = contents(path, **options)
    assert [contents(path, share=(part, 3), **options) for part in range(3)] == [
        whole[part::3] for part in range(3)
    ]

    def rows(data, place=None):
        mixture = Mixture(data)
        return [
            (row.index, row.messages, mixture.place(), mixture.report()[0]["rows"])
            for _, row in mixture.read(place)
        ]

    data = DataConfig(path, share=(1, 3), **options)
    full = rows(data)
    assert [index for index, *_ in full] == list(range(6)) and full[-1][3] == 6
    for at in range(6):  # continued from anywhere
        assert rows(data, full[at][2]) == full[at + 1 :]
    for share in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(
            UserError, match=r"data\.share(\[0\] must lie in| is \[part, number of parts\])"
        ):
            DataConfig(path, share=share)


def test_missing_empty_and_odd_sources_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "notes.md").write_text("x")
    mixed = tmp_path / "mixed"
    jsonl(mixed / "a.jsonl", [{"prompt": "x"}])
    pq.write_table(pa.table({"prompt": ["x"]}), mixed / "b.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    for path, problem in {
        tmp_path / "none.jsonl": "no dataset file, folder or match",
        tmp_path / "*.jsn": "no dataset file, folder or match",
        tmp_path / "empty.jsonl": "is empty: it has no rows",
        tmp_path / "notes.md": "must end in .parquet, .arrow, .json, .jsonl, .txt",
        tmp_path / "cache": "no dataset file|no files ending",
        mixed: r"mixes .jsonl, .parquet files",
        tmp_path / "broken.parquet": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=problem):
            Source(DataConfig(str(path)))
    with pytest.raises(UserError, match="holds neither text, token ids nor messages"):
        Source(DataConfig(jsonl(tmp_path / "n.jsonl", [{"prompt": 1.5}])))


def test_unknown_split_is_refused_with_the_existing_ones(tmp_path):
    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"prompt": "x"}])}).save_to_disk(
        tmp_path / "d"
    )
    with pytest.raises(UserError, match=r"no split 'train'.*Allowed: test"):
        Source(DataConfig(str(tmp_path / "d")))
    assert contents(str(tmp_path / "d"), split="test") == [({"role": "user", "content": "x"},)]


def test_an_unreachable_hub_dataset_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'nobody/nothing' is n(ot|either) a local path"):
        Source(DataConfig("nobody/nothing"))
    with pytest.raises(UserError, match="neither a local file or folder nor a Hub dataset id"):
        Source(DataConfig("what is this"))
