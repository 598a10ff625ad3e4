"""Prompts from files, their selection, and their requests."""

from __future__ import annotations

import json
import logging

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.measure.prompts import (
    Prompt,
    behind_others,
    load_prompts,
    prompt_seed,
    select_prompts,
    to_requests,
)
from tests.inference.tokenizers import tiny_tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def many(domain, count):
    return [Prompt(f"{domain}-{i}", domain, tokens=(1, 2, i)) for i in range(count)]


def test_a_folder_has_one_file_per_domain(tmp_path):
    write(
        tmp_path / "explain.jsonl",
        [{"id": "e1", "messages": [{"role": "user", "content": "Why?"}]}],
    )
    write(
        tmp_path / "code.jsonl",
        [{"prompt": "Add."}, {"id": "c2", "domain": "math", "tokens": [3, 4]}],
    )
    assert load_prompts(tmp_path) == [
        Prompt("code-1", "code", messages=({"role": "user", "content": "Add."},)),
        Prompt("c2", "math", tokens=(3, 4)),
        Prompt("e1", "explain", messages=({"role": "user", "content": "Why?"},)),
    ]
    assert load_prompts([tmp_path / "explain.jsonl"]) == load_prompts(tmp_path)[2:]


def test_an_id_of_null_is_none(tmp_path):
    rows = [{"id": None, "prompt": "a"}, {"id": None, "prompt": "b"}, {"id": 0, "prompt": "c"}]
    found = load_prompts(write(tmp_path / "x.jsonl", rows))
    assert [prompt.id for prompt in found] == ["x-1", "x-2", "0"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "line 1 is not readable as JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"id": "a"}', "exactly one of messages, prompt, tokens, text; found: none"),
        ('{"prompt": "x", "tokens": [1]}', "found: prompt, tokens"),
        ('{"prompt": ""}', "role 'user' is empty"),
        ('{"tokens": [1, -1]}', "non-negative integers"),
        ('{"tokens": []}', "non-empty list"),
        ('{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}', "'1' occurs twice"),
        ("", "no prompts"),
    ],
)
def test_wrong_files_are_refused_with_their_line(tmp_path, row, problem):
    (tmp_path / "p.jsonl").write_text(row)
    with pytest.raises(UserError, match=problem):
        load_prompts(tmp_path / "p.jsonl")


def test_missing_sources_are_refused(tmp_path):
    with pytest.raises(UserError, match="no prompt file or folder"):
        load_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match=r"no \.jsonl files"):
        load_prompts(tmp_path)


def test_selection_takes_the_first_of_each_domain_in_order():
    prompts = [*many("b", 3), *many("a", 5)]
    assert [p.id for p in select_prompts(prompts, 2)] == ["b-0", "b-1", "a-0", "a-1"]
    with pytest.raises(UserError, match="at least 1"):
        select_prompts(prompts, 0)


def test_random_selection_depends_on_the_seed_alone():
    prompts = many("a", 40)
    chosen = {p.id for p in select_prompts(prompts, 10, seed=1)}
    assert len(chosen) == 10
    assert chosen == {p.id for p in select_prompts(prompts[::-1], 10, seed=1)}
    assert chosen != {p.id for p in select_prompts(prompts, 10, seed=2)}
    assert chosen != {p.id for p in prompts[:10]}
    grown = {p.id for p in select_prompts([*prompts, *many("a", 50)[40:]], 10, seed=1)}
    assert all(int(name.split("-")[1]) >= 40 for name in grown - chosen)


def test_seeds_are_stable_and_fit_64_bits():
    assert prompt_seed(0, "code-1") == prompt_seed(0, "code-1") != prompt_seed(1, "code-1")
    assert prompt_seed(0, "code-1") == 2492553711545831955  # must never change: answers would
    assert all(0 <= prompt_seed(s, str(s)) < 2**63 for s in range(200))


def test_requests_carry_prompt_seed_and_budget():
    tokenizer = tiny_tokenizer("marked")
    prompts = [
        Prompt("a", "x", messages=({"role": "user", "content": "Hello!"},)),
        Prompt("b", "x", tokens=(5, 6)),
    ]
    requests = to_requests(prompts, tokenizer, DecodeConfig(max_new_tokens=7, seed=3))
    assert tokenizer.decode(requests[0].tokens) == "<s><|user|>\nHello!<|end|>\n<|assistant|>\n"
    assert requests[1].tokens == (5, 6)
    assert [r.index for r in requests] == [0, 1]
    assert [r.seed for r in requests] == [prompt_seed(3, "a"), prompt_seed(3, "b")]
    assert {r.max_new_tokens for r in requests} == {7}


def test_overlong_prompts_are_refused_or_skipped_with_a_count(caplog):
    prompts = [Prompt("long", "x", tokens=tuple(range(30))), Prompt("short", "x", tokens=(1, 2))]
    decode = DecodeConfig(max_new_tokens=8)
    with pytest.raises(UserError, match="'long' has 30 tokens"):
        to_requests(prompts, None, decode, capacity=37)
    assert len(to_requests(prompts, None, decode, capacity=38)) == 2
    with caplog.at_level(logging.WARNING):
        kept = to_requests(prompts, None, decode, capacity=37, overlong="skip")
    assert [r.index for r in kept] == [1]
    assert "1 of 2 prompts skipped" in caplog.text


def asking(domain, count):
    words = "one two three four five six seven eight nine ten".split()
    return [
        Prompt(f"{domain}-{i}", domain, messages=({"role": "user", "content": words[i] * 4},))
        for i in range(count)
    ]


def test_prompts_behind_others_fill_a_length_with_their_own_domain():
    tokenizer = tiny_tokenizer("marked")
    everything = [*asking("a", 8), *asking("b", 3)]
    sizes = {one.id: len(one.render(tokenizer)) for one in everything}
    room = sizes["a-6"] + sizes["a-7"] + sizes["a-0"]
    longer = behind_others([everything[6], everything[9]], everything, tokenizer, (room, 4096))
    assert [one.id for one in longer] == [*(f"a-6@{room}", f"b-1@{room}", "a-6@4096", "b-1@4096")]
    # those that come next in the file, the question last; each at most once, none of another domain
    assert longer[0].asked == "\n\n".join(everything[i].asked for i in (7, 0, 6))
    assert longer[2].asked == "\n\n".join(everything[i].asked for i in (7, 0, 1, 2, 3, 4, 5, 6))
    assert longer[3].asked == "\n\n".join(everything[i].asked for i in (10, 8, 9))
    assert len(longer[0].render(tokenizer)) <= room
    assert {one.domain for one in longer} == {"a", "b"}
    assert behind_others(everything, everything, tokenizer, ()) == everything


def test_a_prompt_longer_than_the_length_stays_alone_and_keeps_its_other_messages():
    system = {"role": "system", "content": "Be short."}
    first = Prompt("s", "a", messages=(system, {"role": "user", "content": "Why? " * 9}))
    (same,) = behind_others([first], [*asking("a", 2), first], tiny_tokenizer("marked"), (5,))
    assert (same.id, same.messages) == ("s@5", first.messages)
    (longer,) = behind_others([first], [*asking("a", 2), first], tiny_tokenizer("marked"), (4096,))
    assert longer.messages[0] == system
    assert longer.messages[1]["content"].endswith("\n\n" + first.messages[1]["content"])


def test_a_text_is_put_behind_texts_and_token_ids_are_refused():
    texts = [Prompt("x", "a", text="once upon"), Prompt("y", "a", text="a time")]
    (longer,) = behind_others(texts[1:], texts, tiny_tokenizer("marked"), (99,))
    assert longer.text == "once upon\n\na time"
    with pytest.raises(UserError, match="prompt 'a-1' is given as token ids"):
        behind_others(many("a", 2)[:1], many("a", 2), tiny_tokenizer("marked"), (99,))
