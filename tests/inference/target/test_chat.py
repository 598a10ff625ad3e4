"""Chat rendering: golden text and spans per template family, and the refusals."""

from __future__ import annotations

import logging

import pytest

from heads.api.errors import UserError
from inference.target import chat
from tests.inference.tokenizers import tiny_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "Add?"},
    {"role": "assistant", "content": " a + b"},
]

GOLDEN_CONVERSATION = {
    "marked": "<s><|system|>\nBe brief.<|end|>\n<|user|>\nHello!<|end|>\n<|assistant|>\n[Hi there.<|end|>]\n"
    "<|user|>\nAdd?<|end|>\n<|assistant|>\n[ a + b<|end|>]\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
    "<|im_start|>assistant\n[Hi "
    "there.<|im_end|>]\n<|im_start|>user\nAdd?<|im_end|>\n<|im_start|>assistant\n[ a + b<|im_end|>]\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "[Hi there.<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nAdd?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[a + b<|eot_id|>]",
    "plain": "<s>Be brief.\n\nHello![\n\nHi there.</s>]\n\nAdd?[\n\n a + b</s>]",
    "bare": "Be brief.\n\nHello![\n\nHi there.]\n\nAdd?[\n\n a + b]",
}

GOLDEN_PROMPT = {
    "marked": "<s><|user|>\nHello!<|end|>\n<|assistant|>\n",
    "chatml": "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "plain": "<s>Hello!",
    "bare": "Hello!",
}


def bracketed(tokenizer, ids, spans):
    """The text with its assistant spans in square brackets."""
    pieces, place = [], 0
    for start, end in spans:
        pieces += [tokenizer.decode(ids[place:start]), "[", tokenizer.decode(ids[start:end]), "]"]
        place = end
    return "".join([*pieces, tokenizer.decode(ids[place:])])


@pytest.mark.parametrize("family", GOLDEN_CONVERSATION)
def test_golden_conversation_with_assistant_spans(family):
    tokenizer = tiny_tokenizer(family)
    ids, spans = chat.render_conversation(tokenizer, TALK)
    assert bracketed(tokenizer, ids, spans) == GOLDEN_CONVERSATION[family]


@pytest.mark.parametrize("family", GOLDEN_PROMPT)
def test_golden_prompt(family):
    tokenizer = tiny_tokenizer(family)
    assert tokenizer.decode(chat.render_prompt(tokenizer, [TALK[1]])) == GOLDEN_PROMPT[family]


@pytest.mark.parametrize("family", GOLDEN_CONVERSATION)
def test_every_span_starts_where_its_prompt_ends(family):
    """What training supervises is what the target would write after the prompt that serving
    renders."""
    tokenizer = tiny_tokenizer(family)
    ids, spans = chat.render_conversation(tokenizer, TALK)
    for (start, _), turns in zip(spans, (2, 4), strict=True):
        assert chat.render_prompt(tokenizer, TALK[:turns]) == ids[:start]


def test_marked_and_unmarked_template_give_the_same_spans():
    marked = tiny_tokenizer("marked")
    expected = chat.render_conversation(marked, TALK)
    for marker in ("{% generation %}", "{% endgeneration %}"):
        marked.chat_template = marked.chat_template.replace(marker, "")
    assert not chat.has_markers(marked)
    assert chat.render_conversation(marked, TALK) == expected


def test_all_tokens_of_a_last_character_are_the_assistants():
    tokenizer = tiny_tokenizer("marked")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    said = "Hi \N{LLAMA}"
    assert len(tokenizer.encode("\N{LLAMA}", add_special_tokens=False)) > 1
    talk = [TALK[1], {"role": "assistant", "content": said}, TALK[3], TALK[4]]
    ids, spans = chat.render_conversation(tokenizer, talk)
    assert bracketed(tokenizer, ids, spans) == f"Hello![{said}]Add?[ a + b]"


def test_values_that_are_nested_too_deeply_are_refused():
    deep: dict[str, object] = {}
    for _ in range(2000):
        deep = {"a": deep}
    call = {"function": {"name": "f", "arguments": deep}}
    with pytest.raises(UserError, match="nested too deeply"):
        chat.check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_beginning_of_text_is_written_once_even_by_a_tokenizer_that_adds_it_itself():
    from tokenizers import processors

    tokenizer = tiny_tokenizer("llama3")
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[bos]
    )
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    assert chat.render_prompt(tokenizer, TALK[:2]).count(tokenizer.bos_token_id) == 1
    assert chat.render_conversation(tokenizer, TALK)[0].count(tokenizer.bos_token_id) == 1


def test_template_that_rewrites_earlier_turns_is_refused_but_its_last_turn_works():
    tokenizer = tiny_tokenizer("forgetful")
    with pytest.raises(UserError, match="renders earlier turns differently"):
        chat.render_conversation(tokenizer, TALK)
    ids, spans = chat.render_conversation(tokenizer, TALK[1:3])
    assert bracketed(tokenizer, ids, spans).endswith(
        "assistant\n[<think></think>Hi there.<|im_end|>]\n"
    )


def test_a_templates_own_refusal_is_passed_on():
    tokenizer = tiny_tokenizer("alternating")
    with pytest.raises(UserError, match="roles must alternate"):
        chat.render_prompt(tokenizer, [TALK[1], TALK[3]])


def test_markers_that_mark_nothing_are_refused():
    tokenizer = tiny_tokenizer("marked")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(UserError, match="marks nothing"):
        chat.render_conversation(tokenizer, TALK)


def test_a_conversation_that_starts_with_the_assistant_has_no_prompt():
    with pytest.raises(UserError, match="starts with an assistant"):
        chat.render_conversation(tiny_tokenizer("chatml"), TALK[2:])


def test_plain_form_warns_once(caplog):
    tokenizer = tiny_tokenizer("plain")
    tokenizer.name_or_path = "a-target-without-template"
    with caplog.at_level(logging.WARNING):
        chat.render_prompt(tokenizer, [TALK[1]])
        chat.render_prompt(tokenizer, [TALK[1]])
    assert caplog.text.count("no chat template") == 1


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one"),
        ("Hello", "must be a list"),
        ([{"role": "user"}], "'role' and 'content'"),
        (
            [{"role": "human", "content": "x"}],
            "'human' is not one of system, user, assistant, tool",
        ),
        ([{"role": "user", "content": " \n"}], "role 'user' is empty"),
        ([{"role": "user", "content": None}], "must be text"),
        ([{"role": "user", "content": "half a \ud83d pair"}], "not valid Unicode"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}], "must be text"),
    ],
)
def test_malformed_messages_are_refused(messages, problem):
    with pytest.raises(UserError, match=problem):
        chat.render_prompt(tiny_tokenizer("chatml"), messages)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    tokenizer = tiny_tokenizer("chatml")
    assert chat.render_prompt(
        tokenizer, [{"role": "user", "content": parts}]
    ) == chat.render_prompt(tokenizer, [TALK[1]])


def test_a_prompt_must_not_end_with_the_assistant():
    with pytest.raises(UserError, match="must not end with an assistant"):
        chat.render_prompt(tiny_tokenizer("marked"), TALK)


def test_a_conversation_without_assistant_is_refused():
    with pytest.raises(UserError, match="no assistant message"):
        chat.render_conversation(tiny_tokenizer("marked"), TALK[:2])
