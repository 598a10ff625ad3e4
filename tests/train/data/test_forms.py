"""What people have is read by what it contains, and what was understood is said."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heads.api.errors import UserError
from train.data.config import DataConfig
from train.data.sources import Row, Source

USER, SAID = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}
TALK = (USER, SAID)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Keep what `datasets` converts out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def source(tmp_path, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(DataConfig(str(path), **options))


def only(found):
    (row,) = found
    return row


@pytest.mark.parametrize(
    ("row", "messages", "words"),
    [
        ({"messages": TALK}, TALK, "OpenAI messages (column 'messages')"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hello!"},
                    {"from": "gpt", "value": "Hi."},
                ]
            },
            TALK,
            "ShareGPT conversations (column 'conversations')",
        ),
        ({"prompt": "Hello!"}, (USER,), "prompts (column 'prompt')"),
        (
            {"prompt": "Hello!", "completion": "Hi."},
            TALK,
            "prompts (columns 'prompt', 'completion')",
        ),
        (
            {"prompt": [USER], "completion": [SAID]},
            TALK,
            "OpenAI messages (columns 'prompt', 'completion')",
        ),
        (
            {"instruction": "Hello!", "input": "", "output": "Hi."},
            TALK,
            "instructions (Alpaca) (columns 'instruction', 'input', 'output')",
        ),
        (
            {"system_prompt": "Be kind.", "question": "Hello!", "response": "Hi."},
            ({"role": "system", "content": "Be kind."}, *TALK),
            "questions (columns 'question', 'response', 'system_prompt')",
        ),
    ],
)
def test_conversations_of_every_form(tmp_path, row, messages, words):
    found = source(tmp_path, row)
    assert only(found).messages == messages
    assert found.describe() == words


def test_an_alpaca_input_follows_its_instruction(tmp_path):
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert only(source(tmp_path, row)).messages[0]["content"] == "Add.\n\n1 and 2"


def test_tools_stay_and_other_columns_are_named(tmp_path):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    found = source(tmp_path, {"messages": TALK, "tools": [tool], "id": 7, "lang": "en"})
    assert only(found).tools == (tool,)
    assert found.describe() == "OpenAI messages (column 'messages'); not read: columns 'id', 'lang'"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_of_a_table_has_no_keys_of_other_rows_tools(tmp_path, streaming):
    def row(key):
        properties = {key: {"type": "string", "enum": ["x"]}}
        described = {"name": key, "parameters": {"properties": properties}}
        call = {"function": {"name": key, "arguments": {"options": [{key: {key: 1}}]}}}
        talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": talk, "tools": [{"type": "function", "function": described}]}

    given = [row("city"), row("ticker")]
    pq.write_table(pa.Table.from_pylist(given), tmp_path / "rows.parquet")
    found = [*Source(DataConfig(str(tmp_path / "rows.parquet"), streaming=streaming))]
    assert [list(one.tools) for one in found] == [one["tools"] for one in given]
    calls = [one.messages[1]["tool_calls"][0]["function"] for one in found]
    assert calls == [one["messages"][1]["tool_calls"][0]["function"] for one in given]


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_later_rows_bring_are_read(tmp_path, streaming):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    more = {"tools": [tool], "system_prompt": "Be brief.", "domain": "code"}
    rows = [{"prompt": f"{number}?"} for number in range(101)]
    late = [*source(tmp_path, *rows, {"prompt": "x", **more, "response": "y"}, streaming=streaming)]
    assert [message["content"] for message in late[-1].messages] == ["Be brief.", "x", "y"]
    assert (late[0].domain, late[-1].domain, late[-1].tools) == ("general", "code", (tool,))
    rows = [{"tokens": [5, 6]}] * 101
    marked = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}
    spans = [row.spans for row in source(tmp_path, *rows, marked, streaming=streaming)]
    assert spans[-2:] == [None, ((1, 3),)]


def test_a_column_domain_is_used_unless_the_domain_is_given(tmp_path):
    rows = [{"prompt": "a", "domain": "support"}, {"prompt": "b", "domain": ""}]
    found = source(tmp_path, *rows)
    assert [row.domain for row in found] == ["support", "general"]
    assert found.describe().endswith("domains from 'domain'")
    assert {row.domain for row in source(tmp_path, *rows, domain="chat")} == {"chat"}


@pytest.mark.parametrize(
    ("column", "mask"),
    [
        ("loss_mask", [0, 1, 1, 0, 1]),
        ("assistant_masks", [0, 1, 1, 0, 1]),
        ("completion_mask", [0, 1, 1, 0, 1]),
        ("labels", [-100, 6, 7, -100, 9]),
    ],
)
@pytest.mark.parametrize("parquet", [True, False])
def test_masks_become_spans(tmp_path, column, mask, parquet):
    row = {"input_ids": [5, 6, 7, 8, 9], column: mask}
    if parquet:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
        found = Source(DataConfig(str(path)))
    else:
        found = source(tmp_path, row)
    assert only(found).spans == ((1, 3), (4, 5))
    assert found.describe() == f"token ids (column 'input_ids'), answers by '{column}'"


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([0, 1], "'loss_mask' does not have one entry per token"),
        ([0, 0, 0], "'loss_mask' marks no answer"),
        ([0, 2, 1], "'loss_mask' has entries that are neither 0 nor 1"),
        ("011", "'loss_mask' does not have one entry per token"),
    ],
)
def test_bad_masks_are_reported(tmp_path, mask, reason):
    assert only(source(tmp_path, {"input_ids": [5, 6, 7], "loss_mask": mask})).reason == reason


def test_token_ids_without_a_mask_are_said_to_be_prompts(tmp_path):
    found = source(tmp_path, {"input_ids": [5, 6]})
    assert only(found).spans is None
    assert found.describe().endswith("each row a whole prompt")


def test_plain_text_is_text_unless_its_column_is_named(tmp_path):
    row = {"text": "Once upon a time."}
    assert only(source(tmp_path, row)).text == "Once upon a time."
    assert only(source(tmp_path, row, column="text")).messages[0]["role"] == "user"
    assert only(source(tmp_path, row, column="text", kind="text")).text == "Once upon a time."


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_file_has_a_prompt_per_line(tmp_path, streaming):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfHello!\n\n Why? \n\xff\n")
    found = list(Source(DataConfig(str(tmp_path / "prompts.txt"), streaming=streaming)))
    said = [row.messages[0]["content"] for row in found if isinstance(row, Row)]
    assert said == ["Hello!", "Why?"]
    assert found[-1].reason == "the line is not UTF-8"


@pytest.mark.parametrize("value", [5, [5, 6], [[5]]])
def test_messages_that_are_none_are_rows_with_a_reason(tmp_path, value):
    found = source(tmp_path, {"messages": value}, kind="messages")
    (row,) = found
    assert "message" in row.reason and found.describe().startswith("OpenAI messages")


def test_unknown_columns_name_what_is_understood(tmp_path):
    with pytest.raises(
        UserError, match=r"none of the columns messages, .*instruction, .*text\. Set"
    ):
        source(tmp_path, {"body": "x"})
