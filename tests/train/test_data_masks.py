"""Loss masks from spans, and the report a person looks at."""

from __future__ import annotations

import pytest
from rich.text import Text

from heads.api.errors import UserError
from inference.target.chat import render_conversation
from tests.inference.tokenizers import tiny_tokenizer
from train.data.masks import SHOWN_TOKENS, mask_of, mask_report

TALK = [
    {"role": "user", "content": "Add [two] numbers?"},
    {"role": "assistant", "content": "a + b"},
]


def test_mask_covers_spans_but_never_the_first_token():
    assert mask_of([(1, 3), (4, 5)], 6).tolist() == [False, True, True, False, True, False]
    assert mask_of([(0, 2)], 3).tolist() == [False, True, False]
    with pytest.raises(AssertionError, match="outside"):
        mask_of([(2, 7)], 6)


@pytest.mark.parametrize("family", ["marked", "chatml", "llama3", "plain"])
def test_report_measures_and_colours_what_is_supervised(family):
    tokenizer = tiny_tokenizer(family)
    tokens, spans = render_conversation(tokenizer, TALK)
    report = mask_report([([5, 6, 7], []), (tokens, spans)], tokenizer)
    supervised = spans[0][1] - spans[0][0]
    assert (report.documents, report.tokens, report.supervised) == (2, len(tokens) + 3, supervised)
    assert report.share == supervised / (len(tokens) + 3)
    text = Text.from_markup(report.sample)
    assert text.plain == tokenizer.decode(tokens)
    green = "".join(
        text.plain[span.start : span.end] for span in text.spans if span.style == "green"
    )
    assert green == tokenizer.decode(tokens[slice(*spans[0])])
    assert f"{supervised} of {len(tokens) + 3} tokens supervised" in str(report)


def test_a_long_document_is_cut_around_its_first_answer():
    tokenizer = tiny_tokenizer("plain")
    tokens = tokenizer.encode("x" * 2000, add_special_tokens=False)
    report = mask_report([(tokens, [(1000, 1001)])], tokenizer)
    shown = Text.from_markup(report.sample)
    assert shown.plain.startswith("...")
    assert shown.plain.endswith("...")
    assert len(shown.plain) == SHOWN_TOKENS + 6
    assert [span.style for span in shown.spans] == ["dim", "green", "dim"]


def test_nothing_supervised_is_an_error():
    with pytest.raises(UserError, match="0% of 4 tokens are supervised"):
        mask_report([([1, 2], []), ([3, 4], [(0, 1)])], tiny_tokenizer("plain"))
