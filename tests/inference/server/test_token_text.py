"""The bytes of single tokens, of tokenizers that work on bytes and of those that work on pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inference.server.token_text import TokenTexts

TEXT = "def größe(x): return '日本 ✓'  # €"


def test_bytes_of_a_text_are_those_of_its_tokens(repository: Path) -> None:
    """Some of the tokens are parts of characters."""
    tokenizer = AutoTokenizer.from_pretrained(repository / "assets" / "tiny-target")
    texts, tokens = TokenTexts(tokenizer), tokenizer.encode(TEXT)
    held = [texts.bytes_of(token) for token in tokens]
    assert b"".join(held).decode() == TEXT
    names = [texts.name(token) for token in tokens]
    parts = [name for name in names if name.startswith("bytes:\\x")]
    assert parts and len(set(parts)) == len({held[names.index(name)] for name in parts})
    assert texts.text(tokens[names.index(parts[0])]) == "\ufffd"
    end = tokenizer.eos_token_id
    assert texts.text(end) == tokenizer.eos_token
    assert texts.bytes_of(len(tokenizer) + 100) == b""


@pytest.fixture
def pieces() -> PreTrainedTokenizerFast:
    """SentencePiece's way: spaces within pieces, single bytes as tokens of their own."""
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "s": 3, "<0xE2>": 4, "<0x0A>": 5}
    inner = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_pieces_keep_their_spaces(pieces: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(pieces)
    assert [texts.text(token) for token in (1, 2, 3)] == [" Hello", " world", "s"]
    assert texts.bytes_of(4) == b"\xe2" and texts.name(4) == "bytes:\\xe2"
    assert texts.name(5) == "\n"
