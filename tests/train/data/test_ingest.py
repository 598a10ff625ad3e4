"""Reading in and judging: what repeats goes, what is new stays, an interrupted reading leaves what
an undisturbed one does."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from inference.measure.prompts import Prompt
from train.data import ingest
from train.data.config import DataConfig, ReserveConfig
from train.data.dedup import duplicates
from train.data.dedup.shingles import PRIME, band_keys, normalise, shingles, signature
from train.data.held_out import HeldOutIndex, load_held_out, texts_of
from train.data.permute import mix
from train.data.sources import Row

WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nrstxz"]


def text(seed, count=40):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words_of(tokens):
    return " ".join(map(str, tokens))


def read(data, folder, held_out=None, **more):
    """Reads in and returns the summary and what became of every row."""
    found = ingest.ingest(data, folder, held_out, words_of, **more)
    rows = list(ingest.read_rows(folder, 0, 1, np.zeros(found.total, dtype=bool)))
    return found, ["" if isinstance(row, Row) else row.reason for row in rows], rows


def test_shingles_are_those_of_a_slow_loop():
    content = normalise("Some text, with SIGNS; and more of it!")
    assert content.tobytes() == b"sometextwithsignsandmoreofit"
    windows = [content[begin : begin + 12].tolist() for begin in range(len(content) - 11)]
    slow = [
        sum((byte + 1) * PRIME**place for place, byte in enumerate(window)) % 2**64
        for window in windows
    ]
    assert shingles(content, 12).tolist() == mix(np.array(slow, dtype=np.uint64)).tolist()
    assert len(shingles(content[:5], 12)) == 0


def test_signatures_estimate_the_common_share():
    one = text(1, 200)
    for kept in (190, 150, 60):
        other = " ".join([*one.split()[:kept], *text(2, 200 - kept).split()])
        sets = [set(shingles(normalise(each), 12).tolist()) for each in (one, other)]
        share = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        agree = float((signature(normalise(one)) == signature(normalise(other))).mean())
        assert abs(agree - share) < 0.17, "three standard deviations of 64 values"
    keys = band_keys(np.stack([signature(normalise(one))] * 2))
    assert (keys[0] == keys[1]).all()
    assert len(set(keys[0].tolist())) == keys.shape[1]


def test_the_first_of_several_equal_rows_is_kept(tmp_path):
    rows = [
        {"name": "a", "prompt": text(1)},
        {"name": "b", "prompt": text(2)},
        {"name": "a", "prompt": text(3)},
        {"name": "c", "prompt": text(1).upper() + "!"},
        {"name": "d", "prompt": "?!"},
        {"name": "e", "prompt": "!?"},
    ]
    path = jsonl(tmp_path / "p.jsonl", rows)
    _, reasons, _ = read(DataConfig(path, id_column="name"), tmp_path / "exact")
    assert [reason[:30] for reason in reasons] == [
        "",
        "",
        "the id or the content is that ",
        "the text is that of an earlier",
        "",
        "",
    ]
    found, reasons, _ = read(
        DataConfig(path, id_column="name", deduplicate="none"), tmp_path / "none"
    )
    assert [bool(reason) for reason in reasons] == [False, False, True, False, False, False]
    assert found.report["left_out"] == {duplicates.REASONS[duplicates.SAME_ID]: 1}


@pytest.mark.parametrize("compared", ["exact", "near"])
def test_rows_with_other_tools_or_tool_calls_are_no_duplicates(tmp_path, compared):
    def row(tool, city, answered=True):
        said = {"function": {"name": "weather", "arguments": {"city": city}}}
        call = {"role": "assistant", "content": "", "tool_calls": [said]}
        asked = {"role": "user", "content": "And now?" if answered else text(1)}
        described = {"name": tool, "description": text(2)}
        tools = [{"type": "function", "function": described}]
        return {"messages": [asked, *[call] * answered], "tools": tools}

    calls = [row("weather", f"Rome {text(3)}"), row("weather", f"Paris {text(4)}")]
    rows = [*calls, row("search", "", False), row("weather", "", False), calls[1]]
    data = DataConfig(jsonl(tmp_path / "p.jsonl", rows), deduplicate=compared)
    _, reasons, _ = read(data, tmp_path / "in")
    assert [bool(reason) for reason in reasons] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("turn", "same"),
    [
        ("last", [False, True, False, True]),
        ("first", [False, True, True, True]),
        ("all", [False, True, False, True]),
    ],
)
def test_rows_that_the_target_answers_are_compared_by_what_it_reads(tmp_path, turn, same):
    ask, more = {"role": "user", "content": text(1)}, {"role": "user", "content": text(2)}
    said = [{"role": "assistant", "content": text(number)} for number in (3, 4)]
    talks = [[ask, said[0]], [ask, said[1]], [ask, said[0], more], [ask, said[0], more, said[1]]]
    path = jsonl(tmp_path / "p.jsonl", [{"messages": talk} for talk in talks])
    _, reasons, _ = read(DataConfig(path, turn=turn), tmp_path / "in", sampled=True)
    assert [bool(reason) for reason in reasons] == same
    _, reasons, _ = read(DataConfig(path, turn=turn), tmp_path / "own")
    assert not any(reasons)
    plain = [{"tokens": [5, 6, 7], "spans": [[2, 3]]}, {"tokens": [5, 6, 8], "spans": [[2, 3]]}]
    data = DataConfig(jsonl(tmp_path / "t.jsonl", plain), turn=turn)
    _, reasons, _ = read(data, tmp_path / "tokens", sampled=True)
    assert [bool(reason) for reason in reasons] == [False, True]


def test_similar_rows_are_found_among_many(tmp_path, monkeypatch):
    """Judged by estimates, compared with the true share of common shingles, over all pairs."""
    monkeypatch.setattr(ingest, "BLOCK", 64)
    draw = random.Random(3)
    texts = []
    for number in range(150):
        words = text(number, 60).split()
        texts.append(words)
        if number % 5 == 0:
            changed = draw.choice([1, 2, 12, 40])
            texts.append([*words[: 60 - changed], *text(1000 + number, changed).split()])
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": " ".join(words)} for words in texts])
    found, reasons, _ = read(DataConfig(path, deduplicate="near", near_share=0.7), tmp_path / "in")
    sets = [set(shingles(normalise(" ".join(words)), 12).tolist()) for words in texts]
    for late, reason in enumerate(reasons):
        nearest = max(
            (len(sets[late] & sets[e]) / len(sets[late] | sets[e]) for e in range(late)), default=0
        )
        if nearest > 0.9:
            assert "most of the text" in reason
        if nearest < 0.5:
            assert reason == ""
    assert found.report["left_out"][duplicates.REASONS[duplicates.NEAR]] >= 15
    assert not (tmp_path / "in" / "signatures.bin").exists()


def test_held_out_prompts_are_found_whole_or_in_part():
    question = text(5, 30)
    short = "What is it?"
    template = text(6, 20)
    prompts = [("bench", f"t{n}", [f"{template} {text(100 + n, 20)}"]) for n in range(20)]
    prompts += [("bench", "long", [question]), ("bench", "short", [short])]
    index = HeldOutIndex(prompts)
    assert index.find([text(7)]) is None
    part = " - ".join(question.upper().split()[5:25])
    found = index.find(["hello", f"{text(8)} {part} {text(9)}"])
    assert (found.source, found.prompt) == ("bench", "long")
    assert found.text in normalise(question).tobytes().decode()
    assert index.find(["what IS it"]).prompt == "short"
    assert index.find(["What is it? Tell me more."]) is None, (
        "a short prompt counts as a whole only"
    )
    assert index.find([f"{template} and something else"]) is None, (
        "what many prompts share is their template"
    )
    talk = HeldOutIndex([("bench", "talk", ["Hi", question])])
    assert talk.find(["hi"]) is None, "a short message of several is nothing of its own"
    assert talk.find([question]).prompt == "talk"
    exact = HeldOutIndex(prompts, exact=True)
    assert exact.find([f"before {question}"]) is None
    assert exact.find([question.upper()]).prompt == "long"


def test_a_run_has_as_many_letters_in_every_script():
    russian = "Пожалуйста, объясни подробно, как работает алгоритм Дейкстры на графе"
    chinese = "请用中文详细解释下面这段代码的作用：计算斐波那契数列的第二十项的递归实现"
    index = HeldOutIndex([("bench", "russian", [russian]), ("bench", "chinese", [chinese])])
    assert index.find(["Пожалуйста, объясни подробно, что такое фотосинтез"]) is None
    assert index.find(["请用中文详细解释下面这段代码的作用：快速排序"]) is None
    assert index.find([f"Вопрос. {russian} Ответ."]).prompt == "russian"
    found = index.find([f"问题：{chinese}。谢谢"])
    assert (found.prompt, found.text) == ("chinese", chinese.replace("：", "")[:25])


def test_a_prompt_that_its_source_repeats_is_no_template():
    index = HeldOutIndex([("bench", str(number), [text(5, 30)]) for number in range(20)])
    assert index.find([f"{text(8)} {text(5, 30)}"]).prompt == "0"


def test_prompts_of_every_form_are_held_out():
    message = {"role": "user", "content": "a question"}
    assert texts_of(Prompt("p", "d", text="plain text"), str) == ["plain text"]
    assert texts_of(Prompt("p", "d", messages=(message,), turns=("more",)), str) == [
        "a question",
        "more",
    ]
    assert texts_of(Prompt("p", "d", tokens=(1, 2)), str) == ["(1, 2)"]


def test_prompts_of_token_ids_are_held_out(tmp_path):
    """Prompts and rows as text or token ids, compared as text."""

    def letters(tokens):
        return "".join(map(chr, tokens))

    question = text(5, 30)
    held = jsonl(tmp_path / "held.jsonl", [{"id": "q", "tokens": list(map(ord, question))}])
    paths = [
        jsonl(tmp_path / "text.jsonl", [{"prompt": text(1)}, {"prompt": f"Please: {question}"}]),
        jsonl(
            tmp_path / "tokens.jsonl",
            [{"tokens": list(map(ord, said))} for said in (text(1), f"Please: {question}")],
        ),
    ]
    for number, path in enumerate(paths):
        data = DataConfig(path, held_out=(held,))
        index = load_held_out(data, letters)
        found = ingest.ingest(data, tmp_path / str(number), index, letters)
        assert found.report["left_out"] == {"it repeats a held-out prompt": 1}


def test_rows_with_held_out_prompts_are_left_out_and_reported(tmp_path):
    question = text(5, 30)
    held = jsonl(tmp_path / "held.jsonl", [{"id": "q", "prompt": question}])
    path = jsonl(
        tmp_path / "p.jsonl",
        [{"prompt": text(1)}, {"prompt": f"Please: {question}"}, {"prompt": text(2)}],
    )
    data = DataConfig(path, held_out=(held,))
    found, reasons, _ = read(data, tmp_path / "in", load_held_out(data, str))
    assert reasons == ["", "it repeats a held-out prompt", ""]
    assert found.report["held_out"]["counts"] == {held: 1}
    (example,) = found.report["held_out"]["examples"]
    assert (example["prompt"], example["source"]) == ("q", held)
    assert load_held_out(DataConfig(path, held_out=(held,), decontaminate="none"), str) is None


class StopError(Exception):
    """Ends a reading in the middle."""


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_an_interrupted_reading_continues_to_the_same_end(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(ingest, "BLOCK", 8)
    rows = [{"prompt": text(number % 30, 30)} for number in range(45)]
    rows[20] = {"prompt": text(5, 29) + " nan"}
    held = jsonl(tmp_path / "held.jsonl", [{"id": "q", "prompt": text(7, 30)}])
    path = jsonl(tmp_path / "p.jsonl", rows)
    data = DataConfig(
        path, deduplicate="near", held_out=(held,), streaming=True, shuffle=True, buffer=10
    )
    index = load_held_out(data, str)
    whole, reasons, expected = read(data, tmp_path / "whole", index)
    assert len(set(reasons)) == 4

    def progress(count):
        if count >= stop * 8:
            # What the next block would have begun to write:
            keys = duplicates.KeyFiles(tmp_path / "in" / "keys")
            keys.add("text", np.array([5], dtype=np.uint64), np.array([count]))
            with (tmp_path / "in" / "signatures.bin").open("ab") as file:
                file.write(b"half")
            raise StopError

    with pytest.raises(StopError):
        ingest.ingest(data, tmp_path / "in", index, str, progress=progress)
    again, _, found = read(data, tmp_path / "in", index)
    assert (again, found) == (whole, expected)
    monkeypatch.setattr(ingest.Reader, "read", None)
    assert read(data, tmp_path / "in", index)[0] == whole, "what was read is not read again"


@pytest.mark.parametrize(
    "short", ["signatures.bin", "held_out.bin", "conversations.bin", "keys/id-*", "keys/text-*"]
)
def test_a_reading_whose_files_are_shorter_than_its_state_says_begins_again(
    tmp_path, monkeypatch, caplog, short
):
    """As after a power failure, of which state.json alone came to the disk."""
    monkeypatch.setattr(ingest, "BLOCK", 8)
    rows = [{"prompt": text(number % 30, 30)} for number in range(45)]
    held = jsonl(tmp_path / "held.jsonl", [{"id": "q", "prompt": text(7, 30)}])
    reserve = ReserveConfig(validation=2, bench=2)
    data = DataConfig(
        jsonl(tmp_path / "p.jsonl", rows), deduplicate="near", held_out=(held,), reserve=reserve
    )
    index = load_held_out(data, str)
    whole, _, expected = read(data, tmp_path / "whole", index)

    def progress(count):
        if count >= 16:
            raise StopError

    with pytest.raises(StopError):
        ingest.ingest(data, tmp_path / "in", index, str, progress=progress)
    file = next((tmp_path / "in").glob(short))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 8)
    again, _, found = read(data, tmp_path / "in", index)
    assert (again, found) == (whole, expected)
    assert "read again from the first" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_what_a_reading_appends_is_on_the_disk_before_its_state(tmp_path, monkeypatch):
    written: list[Path] = []
    plain, state = os.fsync, ingest.write_json
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (written.append(Path(f"/proc/self/fd/{fd}").readlink()), plain(fd))[1],
    )

    def stated(path, content):
        if path.name == "state.json":
            assert {*path.parent.rglob("*.bin"), *path.parent.rglob("*.keys")} <= {*written}
        state(path, content)

    monkeypatch.setattr(ingest, "write_json", stated)
    rows = [{"prompt": text(number)} for number in range(5)]
    data = DataConfig(jsonl(tmp_path / "p.jsonl", rows), deduplicate="near")
    read(data, tmp_path / "in")
    assert any(path.suffix == ".keys" for path in written)


def test_processes_share_the_rows_and_skip_what_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(ingest, "BLOCK", 4)
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": text(number)} for number in range(19)])
    found, _, rows = read(DataConfig(path), tmp_path / "in")
    done = np.zeros(found.total, dtype=bool)
    done[[0, 5, 6, 7, 8]] = True
    shares = [list(ingest.read_rows(tmp_path / "in", rank, 3, done)) for rank in range(3)]
    assert all(row.index % 3 == rank for rank, share in enumerate(shares) for row in share)
    merged = sorted((row for share in shares for row in share), key=lambda row: row.index)
    assert merged == [row for row in rows if not done[row.index]]


def test_pretokenised_rows_and_tools_survive_the_disk(tmp_path):
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "add"},
    ]
    path = jsonl(
        tmp_path / "m.jsonl", [{"messages": talk, "tools": json.dumps([{"type": "function"}])}]
    )
    _, _, (row,) = read(DataConfig(path), tmp_path / "in")
    assert row.tools == ({"type": "function"},)
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": [1, 2, 3], "spans": [[1, 3]]}])
    _, _, (row,) = read(DataConfig(path), tmp_path / "tokens")
    assert (row.tokens, row.spans) == ((1, 2, 3), ((1, 3),))
