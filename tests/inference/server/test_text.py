"""Text as it arrives: whole characters only, stop strings withheld until decided, the same for any
way the tokens come in."""

from __future__ import annotations

import random

import pytest

from inference.server.text import StopText
from inference.target.text_pieces import REPLACEMENT, WINDOW, TextPieces
from tests.inference.tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer("marked")
TEXTS = [
    "Hello! Hi there. Bye now.",
    "naïve café: 日本語のテキスト 🙂🙃 Привет",
    "def add(a, b):\n    return a + b\n" * 9,
]


def chunks(tokens: list[int], seed: int) -> list[list[int]]:
    """Tokens in runs of random length, as verifications commit them."""
    generator, parts, start = random.Random(seed), [], 0
    while start < len(tokens):
        size = generator.randint(1, 6)
        parts.append(tokens[start : start + size])
        start += size
    return parts


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_together_are_the_text_and_never_half_a_character(text: str, seed: int) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = TextPieces(TOKENIZER, ())
    found = [pieces.add(part) for part in chunks(tokens, seed)]
    assert all(REPLACEMENT not in piece for piece in found)
    assert "".join(found) + pieces.rest() == text == pieces.text


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_give_what_decoding_all_of_them_gives(seed: int) -> None:
    generator = random.Random(seed)
    tokens = [generator.randrange(10, len(TOKENIZER)) for _ in range(200)]
    pieces = TextPieces(TOKENIZER, (12,))
    found = "".join(pieces.add(part) for part in chunks(tokens, seed)) + pieces.rest()
    shown = [token for token in tokens if token != 12]
    assert found == TOKENIZER.decode(shown, skip_special_tokens=True)


def test_long_texts_are_not_decoded_again_and_again() -> None:
    pieces = TextPieces(TOKENIZER, ())
    for token in TOKENIZER.encode(TEXTS[0] * 40, add_special_tokens=False):
        pieces.add([token])
        assert len(pieces.tokens) <= WINDOW + 1
    assert pieces.text == TEXTS[0] * 40


@pytest.mark.parametrize(
    "stops",
    [("Bye",), ("there", "Hi"), (". B",), ("zzz", "now."), ("o! H", "o! X"), ("!",), ("absent",)],
)
@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_against_looking_at_the_whole_text(stops: tuple[str, ...], seed: int) -> None:
    text = TEXTS[0]
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    expected = text[: min(places)] if places else text
    stopper = StopText(TOKENIZER, (), stops)
    shown = ""
    for part in chunks(tokens, seed):
        shown += stopper.add(part)
        assert expected.startswith(shown), "something was shown that the stop string takes back"
        if stopper.stopped:
            break
    shown += stopper.rest()
    assert shown == expected and stopper.stopped == bool(places)
    one_by_one = StopText(TOKENIZER, (), stops)
    for token in tokens:
        one_by_one.add([token])
    # the count does not depend on how many tokens came together
    assert one_by_one.tokens == stopper.tokens


def test_what_cannot_be_a_stop_string_is_not_withheld() -> None:
    stopper = StopText(TOKENIZER, (), ("Bye now",))
    shown = [
        stopper.add([token])
        for token in TOKENIZER.encode("Hello! Bye, Hi", add_special_tokens=False)
    ]
    assert "".join(shown) + stopper.rest() == "Hello! Bye, Hi"
    assert "".join(shown).startswith("Hello! Bye")


def test_a_stop_string_may_begin_before_the_least_tokens_and_end_behind_them() -> None:
    tokens = TOKENIZER.encode("Hello! Bye now.", add_special_tokens=False)
    texts = [TOKENIZER.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    # the first tokens end within "ye no"
    least = next(count for count, text in enumerate(texts) if text.endswith("ye"))
    stopper = StopText(TOKENIZER, (), ("ye no",), least)
    shown = "".join(stopper.add([token]) for token in tokens)
    assert stopper.stopped and shown + stopper.rest() == "Hello! B"
    # one that they complete is ignored, and the text is shown whole
    early = StopText(TOKENIZER, (), ("Bye",), least)
    shown = "".join(early.add([token]) for token in tokens)
    assert not early.stopped and shown + early.rest() == "Hello! Bye now."
