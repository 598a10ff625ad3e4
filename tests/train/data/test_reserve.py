"""Prompts that are held out of the data are not trained on, nor is what repeats them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.measure.prompts import load_prompts
from tests.train.data.test_ingest import jsonl, text
from train.data import ingest
from train.data.answers import USES
from train.data.config import DataConfig, ReserveConfig
from train.data.sources import Row

SOME = ReserveConfig(validation=4, bench=6)


def read(data, folder, **more):
    """Reads in; returns the summary, and the rows' content or reason."""
    found = ingest.ingest(data, folder, None, lambda tokens: " ".join(map(str, tokens)), **more)
    rows = list(ingest.read_rows(folder, 0, 1, np.zeros(found.total, dtype=bool)))
    return found, rows


def said(row):
    return row.messages[0]["content"]


def prompts_of(folder, use):
    return load_prompts(folder / f"{use}.jsonl")


def test_prompts_are_held_out_and_the_rest_is_kept(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": text(number)} for number in range(100)])
    found, rows = read(DataConfig(path, reserve=SOME), tmp_path / "in")
    kept = {said(row) for row in rows if isinstance(row, Row)}
    held = {use: {said(one) for one in prompts_of(tmp_path / "in", use)} for use in USES}
    assert {use: len(texts) for use, texts in held.items()} == {"validation": 4, "bench": 6}
    assert len(kept) == 90
    assert not kept & (held["validation"] | held["bench"])
    assert not held["validation"] & held["bench"]
    assert sum(found.report["left_out"].values()) == 10


def test_the_same_conversations_are_chosen_in_any_order(tmp_path):
    rows = [{"prompt": text(number)} for number in range(60)]
    chosen = []
    for name in ("one", "two"):
        data = DataConfig(jsonl(tmp_path / f"{name}.jsonl", rows), reserve=SOME)
        read(data, tmp_path / name)
        chosen.append({said(one) for one in prompts_of(tmp_path / name, "bench")})
        random.Random(1).shuffle(rows)
    assert chosen[0] == chosen[1]
    other = DataConfig(str(tmp_path / "one.jsonl"), reserve=ReserveConfig(4, 6, seed=1))
    read(other, tmp_path / "other")
    assert chosen[0] != {said(one) for one in prompts_of(tmp_path / "other", "bench")}


def test_rows_of_one_conversation_are_never_on_both_sides(tmp_path):
    """A row per turn, each with what came before; near copies; and copies that are not dropped."""
    rows = []
    for number in range(40):
        messages = []
        for turn in range(3):
            messages = [*messages, {"role": "user", "content": text(100 * number + turn)}]
            rows.append({"messages": messages})
            messages = [*messages, {"role": "assistant", "content": "Yes."}]
        words = text(100 * number).split()
        rows.append({"messages": [{"role": "user", "content": " ".join([*words[:-1], "else"])}]})
    data = DataConfig(jsonl(tmp_path / "p.jsonl", rows), reserve=SOME, deduplicate="none")
    _, found = read(data, tmp_path / "in")
    number_of = {text(100 * number): number for number in range(40)}
    near = {" ".join([*first.split()[:-1], "else"]): number for first, number in number_of.items()}
    known = number_of | near
    kept = {known[said(row)] for row in found if isinstance(row, Row)}
    held = {known[said(one)] for use in USES for one in prompts_of(tmp_path / "in", use)}
    assert held
    assert not kept & held
    assert kept | held == set(range(40))


def test_a_template_around_all_prompts_holds_nothing_else_out(tmp_path):
    template = text(0, 120)
    rows = [{"prompt": f"{template} {text(number, 20)}"} for number in range(1, 61)]
    _, found = read(DataConfig(jsonl(tmp_path / "p.jsonl", rows), reserve=SOME), tmp_path / "in")
    assert sum(isinstance(row, Row) for row in found) == 50


def test_short_prompts_are_only_compared_as_a_whole(tmp_path):
    rows = [{"prompt": f"Sum up text {number}"} for number in range(30)]
    rows += [{"prompt": f"Sum up text {number}: {text(number)}"} for number in range(30)]
    _, found = read(DataConfig(jsonl(tmp_path / "p.jsonl", rows), reserve=SOME), tmp_path / "in")
    assert sum(isinstance(row, Row) for row in found) == 50


def test_small_data_gives_a_tenth(tmp_path):
    many = ReserveConfig(validation=64, bench=128)
    rows = [{"prompt": text(number)} for number in range(30)]
    read(DataConfig(jsonl(tmp_path / "p.jsonl", rows), reserve=many), tmp_path / "in")
    assert len(prompts_of(tmp_path / "in", "bench")) == 3


@pytest.mark.parametrize(
    ("count", "reserve", "held"),
    [
        (8, ReserveConfig(64, 128), (2, 2)),
        (7, ReserveConfig(64, 128), (1, 2)),
        (4, ReserveConfig(64, 128), (1, 2)),
        (3, ReserveConfig(0, 128), (0, 2)),
        (2, ReserveConfig(64, 0), (1, 0)),
    ],
)
def test_few_conversations_give_what_a_measurement_cannot_do_without(
    tmp_path, count, reserve, held
):
    rows = [{"prompt": text(number)} for number in range(count)]
    data = DataConfig(jsonl(tmp_path / "p.jsonl", rows), reserve=reserve)
    _, found = read(data, tmp_path / "in")
    files = [tmp_path / "in" / f"{use}.jsonl" for use in ("validation", "bench")]
    assert tuple(len(load_prompts(path)) if path.exists() else 0 for path in files) == held
    assert sum(isinstance(row, Row) for row in found) == count - sum(held)


@pytest.mark.parametrize(
    ("count", "reserve"),
    [(3, ReserveConfig(64, 128)), (2, ReserveConfig(0, 128)), (1, ReserveConfig(64, 0))],
)
def test_nothing_is_held_out_of_data_that_would_leave_nothing_to_train_on(tmp_path, count, reserve):
    rows = [{"prompt": text(number)} for number in range(count)]
    data = DataConfig(jsonl(tmp_path / "few.jsonl", rows), reserve=reserve)
    with pytest.raises(UserError, match=rf"the data has {count} usable conversations: too few"):
        read(data, tmp_path / "few")


def test_prompts_that_the_target_cannot_answer_are_not_chosen(tmp_path):
    rows = [{"prompt": text(number, 10 + number)} for number in range(40)]
    data = DataConfig(jsonl(tmp_path / "p.jsonl", rows), reserve=SOME)
    read(data, tmp_path / "in", fits=lambda prompt: len(said(prompt)) < 150)
    found = [one for use in USES for one in prompts_of(tmp_path / "in", use)]
    assert len(found) == 8
    assert all(len(said(one)) < 150 for one in found)


def test_few_prompts_that_the_target_can_answer_are_shared_by_both_uses(tmp_path):
    path = jsonl(
        tmp_path / "p.jsonl", [{"prompt": text(number, 10 + number)} for number in range(40)]
    )
    by_length = sorted((text(number, 10 + number) for number in range(40)), key=len)

    def held(most):
        folder = tmp_path / str(most)
        read(DataConfig(path, reserve=SOME), folder, fits=lambda one: said(one) in by_length[:most])
        return [len(prompts_of(folder, use)) for use in ("validation", "bench")]

    assert (held(4), held(7)) == ([1, 2], [1, 2])
    for few in (0, 3):
        with pytest.raises(UserError, match=rf"has {few} usable conversations, of 40, whose prom"):
            held(few)


def test_what_an_earlier_reading_held_out_is_left_out_again(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": text(number)} for number in range(60)])
    _, first = read(DataConfig(path, reserve=SOME), tmp_path / "one")
    files = tuple(str(tmp_path / "one" / f"{use}.jsonl") for use in USES)
    again = DataConfig(path, reserve=ReserveConfig(prompts=files), shuffle=True, seed=3)
    _, second = read(again, tmp_path / "two")
    kept = [{said(row) for row in rows if isinstance(row, Row)} for rows in (first, second)]
    assert kept[0] == kept[1]
    assert not (tmp_path / "two" / "bench.jsonl").exists()


def test_every_form_of_rows_can_be_held_out(tmp_path):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    forms = {
        "tools": [
            {"messages": [{"role": "user", "content": text(number)}], "tools": [tool]}
            for number in range(20)
        ],
        "tokens": [
            {"input_ids": [number, 1, 2, 3], "loss_mask": [0, 0, 1, 1]} for number in range(20)
        ],
        "text": [{"text": text(number)} for number in range(20)],
    }
    found = {}
    for name, rows in forms.items():
        data = DataConfig(jsonl(tmp_path / f"{name}.jsonl", rows), reserve=SOME)
        _, read_rows = read(data, tmp_path / name)
        assert sum(isinstance(row, Row) for row in read_rows) == 16
        found[name] = prompts_of(tmp_path / name, "bench")
    assert all(one.tools == (tool,) for one in found["tools"])
    assert all(one.tokens[1:] == (1,) for one in found["tokens"])
    whole = {row["text"] for row in forms["text"]}
    assert all(any(row.startswith(one.text) for row in whole) for one in found["text"])


@pytest.mark.parametrize("stop", [1, 3])
def test_an_interrupted_reading_holds_out_the_same(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(ingest, "BLOCK", 16)
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": text(number)} for number in range(80)])
    data = DataConfig(path, reserve=SOME)
    whole, _ = read(data, tmp_path / "whole")
    blocks = []

    def kill(rows):
        blocks.append(rows)
        if len(blocks) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(data, tmp_path / "cut", progress=kill)
    again, _ = read(data, tmp_path / "cut")
    assert again.left_out == whole.left_out
    lines = [(tmp_path / name / "bench.jsonl").read_text() for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert all(json.loads(line) for line in lines[0].splitlines())
