"""Turns, reasoning, tools and cutting: what is supervised is what the target says after exactly the
tokens before it."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion
from inference.target.chat import check_messages, render_conversation, render_prompt
from tests.inference.tokenizers import CHATML, tiny_tokenizer
from train.data.config import DataConfig
from train.data.conversation import (
    apply_reasoning,
    fit_document,
    fit_prompt,
    places_to_answer,
    without_thinking,
)
from train.data.reserve import prompt_of
from train.data.sources import Row
from train.data.tables import BadRowError
from train.generate.turns import Talk, keep_answer

DECODE = DecodeConfig(max_new_tokens=20, seed=3)
TALK = (
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "<think>greet</think>\nHi there."},
    {"role": "user", "content": "Add?"},
    {"role": "assistant", "content": "<think>plus</think>a + b"},
)
TOOLS = (
    {"role": "user", "content": "Add."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Bye."},
)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think is defined and not think %}<no>{% endif %}{% endif %}"
)


def target(family, template=None, positions=400):
    tokenizer = tiny_tokenizer(family)
    if template is not None:
        tokenizer.chat_template = template
    info = SimpleNamespace(max_position_embeddings=positions, vocab_size=len(tokenizer))
    return SimpleNamespace(tokenizer=tokenizer, info=info)


def row(messages, **extra):
    return Row(0, "r", "chat", messages=tuple(messages), **extra)


def supervised(answer, tokenizer):
    return [tokenizer.decode(answer.tokens[start:end]) for start, end in answer.spans]


def documents(answer):
    edges = [0, *answer.parts, len(answer.tokens)]
    return [answer.tokens[a:b] for a, b in pairwise(edges)]


def converse(given, data, says, family="chatml", **options):
    """A row answered turn by turn with the given texts; the answer and the prompts, as text."""
    facts = target(family, **options)
    talk = Talk(given, facts, data, DECODE)
    prompts, seeds = [], set()
    while not talk.done:
        request = talk.request()
        prompts.append(facts.tokenizer.decode(request.tokens))
        seeds.add(request.seed)
        said = facts.tokenizer.encode(says[len(prompts) - 1], add_special_tokens=False)
        talk.take(Completion(request, [*said, facts.tokenizer.eos_token_id], "stop"))
    assert len(seeds) == len(prompts)
    return talk.answer(), prompts, facts.tokenizer


def test_reasoning_is_kept_dropped_or_left_in_the_last_turn():
    assert apply_reasoning(TALK, "keep") == list(TALK)
    assert [m["content"] for m in apply_reasoning(TALK, "drop")][1::2] == ["Hi there.", "a + b"]
    assert [m["content"] for m in apply_reasoning(TALK, "last")][1::2] == [
        "Hi there.",
        TALK[3]["content"],
    ]
    assert without_thinking("opened by the prompt</think>\n\nyes") == "yes"
    assert without_thinking("<think>hm</think>Close with </think>.") == "Close with </think>."
    assert without_thinking("hm</think>yes <think>hm</think>and no") == "yes and no"
    assert without_thinking("a < b and no thought") == "a < b and no thought"
    with pytest.raises(BadRowError, match="nothing but reasoning"):
        apply_reasoning([{"role": "assistant", "content": "<think>x</think>"}], "drop")


@pytest.mark.parametrize("ends", [1, 2])
def test_reasoning_before_the_answer_is_dropped_with_and_without_a_following_answer(ends):
    thought = {"role": "assistant", "content": "<think>hm</think>Yes."}
    asked = [{"role": "user", "content": "Is it?"}, thought, {"role": "user", "content": "And?"}]
    given = row([*asked, *[{"role": "assistant", "content": "No."}] * (ends - 1)])
    data = DataConfig("-", reasoning="last")
    expected = [asked[0], {"role": "assistant", "content": "Yes."}, asked[2]]
    assert Talk(given, target("chatml"), data, DECODE).messages == expected
    assert prompt_of(given, data).messages == tuple(expected)


def test_places_to_answer():
    assert places_to_answer(TALK, "first") == [1]
    assert places_to_answer(TALK, "last") == [3]
    assert places_to_answer(TALK, "all") == [1, 3]
    assert places_to_answer(TOOLS[:4], "last") == [3], (
        "the last to be answered is what the tool returned"
    )
    assert places_to_answer(TOOLS, "all") == [3, 5], "a call keeps the result that belongs to it"
    with pytest.raises(BadRowError, match="no user message"):
        places_to_answer([{"role": "system", "content": "x"}], "last")


def test_all_turns_are_answered_with_the_targets_own_words_before():
    answer, prompts, tokenizer = converse(
        row(TALK), DataConfig("-", turn="all"), ["Hi there.", "a + b"]
    )
    assert supervised(answer, tokenizer) == ["Hi there.<|im_end|>", "a + b<|im_end|>"]
    assert answer.parts == (), (
        "one document: the second prompt begins with the first answer, token by token"
    )
    assert prompts[1].startswith(
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHi there.<|im_end|>\n"
    )
    assert "greet" not in prompts[1]


def test_turns_that_a_template_rewrites_become_documents_of_their_own():
    says = ["<think>well</think>Hi there.", "a + b"]
    data = DataConfig("-", turn="all", reasoning="last")
    answer, prompts, tokenizer = converse(row(TALK), data, says)
    assert "well" not in prompts[1]
    first, second = documents(answer)
    assert tokenizer.decode(first).endswith("<think>well</think>Hi there.<|im_end|>")
    assert tokenizer.decode(second) == prompts[1] + "a + b<|im_end|>"
    assert supervised(answer, tokenizer) == [says[0] + "<|im_end|>", says[1] + "<|im_end|>"]


def test_an_unfinished_turn_ends_the_conversation():
    facts = target("chatml")
    talk = Talk(row(TALK), facts, DataConfig("-", turn="all"), DECODE)
    talk.take(Completion(talk.request(), [5, 6], "length"))
    assert talk.done
    assert (talk.answer().status, talk.answer().finish) == ("done", "length")


def test_kept_conversations_are_supervised_where_asked():
    facts = target("marked")
    for turns, expected in {"all": 2, "first": 1, "last": 1}.items():
        answer = keep_answer(row(TALK), facts, DataConfig("-", supervise=turns))
        said = supervised(answer, facts.tokenizer)
        assert len(said) == expected
        assert said[-1].startswith("<think>plus" if turns != "first" else "<think>greet")
    dropped = keep_answer(row(TALK), facts, DataConfig("-", reasoning="drop"))
    assert supervised(dropped, facts.tokenizer) == ["Hi there.<|end|>", "a + b<|end|>"]


def test_a_template_that_forgets_is_kept_turn_by_turn():
    facts = target("forgetful")
    answer = keep_answer(row(TALK), facts, DataConfig("-"))
    assert len(documents(answer)) == 2
    # The generation prompt comes first, then everything that the target would write, the template's
    # <think> included.
    assert all(said.startswith("<think></think>") for said in supervised(answer, facts.tokenizer))
    last = keep_answer(row(TALK), facts, DataConfig("-", supervise="last"))
    assert last.parts == ()
    assert len(last.spans) == 1


def test_tools_and_template_arguments_reach_the_template():
    facts = target("chatml", TOOL_TEMPLATE)
    tools = ({"type": "function", "function": {"name": "add"}},)
    ids = render_prompt(facts.tokenizer, TOOLS, tools, {"think": False})
    text = facts.tokenizer.decode(ids)
    assert text.startswith('<|im_start|>tools [{"type": "function"')
    assert 'call add {"a": 1}' in text
    assert text.endswith("assistant\n<no>")
    kept = keep_answer(row(TOOLS[:4], tools=tools), facts, DataConfig("-"))
    assert supervised(kept, facts.tokenizer) == [
        'call add {"a": 1}<|im_end|>',
        "It is 3.<|im_end|>",
    ]
    answer, prompts, tokenizer = converse(
        row(TOOLS, tools=tools),
        DataConfig("-", turn="all"),
        ["Three.", "So long."],
        template=TOOL_TEMPLATE,
    )
    assert supervised(answer, tokenizer) == ["Three.<|im_end|>", "So long.<|im_end|>"]
    assert 'call add {"a": 1}' in prompts[0]
    with pytest.raises(UserError, match="no chat template, so tools"):
        render_conversation(tiny_tokenizer("plain"), TOOLS[:4])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("x", "must be a mapping"),
        ({"name": "f", "arguments": "{"}, "not JSON"),
        ({"name": "f", "arguments": "[1]"}, "a mapping"),
    ],
)
def test_broken_tool_calls_are_refused(call, problem):
    with pytest.raises(UserError, match=problem):
        check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])


LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first question " * 5},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "opening " + "middle " * 20 + "end"},
]


@pytest.mark.parametrize(
    ("policy", "room", "holds", "lacks"),
    [
        ("left", 210, ["Be brief.", "opening", "end"], ["first"]),
        ("left", 60, ["Be brief.", "end"], ["first", "opening"]),
        ("right", 200, ["Be brief.", "first question", "opening"], ["end<"]),
        ("middle", 200, ["Be brief.", "first question", "opening", "end"], []),
    ],
)
def test_prompts_are_cut_where_asked(policy, room, holds, lacks):
    tokenizer = tiny_tokenizer("chatml")

    def render(messages):
        return render_prompt(tokenizer, messages)

    tokens, cut = fit_prompt(LONG, room, policy, render, tokenizer)
    text = tokenizer.decode(tokens)
    assert len(tokens) <= room
    assert cut == len(render(LONG)) - len(tokens) > 0
    assert text.endswith("<|im_start|>assistant\n")
    assert all(part in text for part in holds), text
    assert not any(part in text for part in lacks), text
    assert fit_prompt(LONG, 10_000, policy, render, tokenizer) == (render(LONG), 0)
    with pytest.raises(BadRowError, match=r"too long|cannot be cut"):
        fit_prompt(LONG, 12, policy, render, tokenizer)


def test_documents_are_cut_with_their_spans():
    tokens, spans = list(range(20)), [(2, 6), (10, 18)]
    assert fit_document(tokens, spans, 12, "right") == (list(range(12)), [(2, 6), (10, 12)], 8)
    assert fit_document(tokens, spans, 12, "left") == (list(range(8, 20)), [(2, 10)], 8)
    assert fit_document(tokens, spans, 12, "middle") == (
        [*range(6), *range(14, 20)],
        [(2, 6), (6, 10)],
        8,
    )
    assert fit_document(tokens, spans, 20, "skip") == (tokens, spans, 0)
    with pytest.raises(BadRowError, match=r"longer than data.max_tokens=12"):
        fit_document(tokens, spans, 12, "skip")
    with pytest.raises(BadRowError, match="no answer is left"):
        fit_document(tokens, [(15, 20)], 12, "right")


def test_kept_documents_fit_the_positions_of_the_target():
    facts = target("chatml", CHATML, positions=90)
    long = row([TALK[0], {"role": "assistant", "content": "word " * 100}])
    with pytest.raises(BadRowError, match="longer than the target's max_position_embeddings=90"):
        keep_answer(long, facts, DataConfig("-", max_tokens=100))
    answer = keep_answer(long, facts, DataConfig("-", truncate="left"))
    assert len(answer.tokens) == 90 and answer.cut > 0


def test_cut_rows_are_counted():
    facts = target("chatml", CHATML, positions=90)
    talk = Talk(row(LONG), facts, DataConfig("-", truncate="left"), DECODE)
    request = talk.request()
    assert len(request.tokens) <= 70
    talk.take(Completion(request, [5, 6], "length"))
    assert talk.answer().cut > 0
    with pytest.raises(BadRowError, match="may exceed the target's 90 positions"):
        Talk(row(LONG), facts, DataConfig("-"), DECODE).request()
    ready = Row(0, "r", "chat", tokens=tuple(range(100)))
    kept = Talk(ready, facts, DataConfig("-", truncate="middle", max_prompt_tokens=10), DECODE)
    assert kept.request().tokens == (0, 1, 2, 3, 4, 95, 96, 97, 98, 99)
