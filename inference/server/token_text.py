"""The text and the bytes of single tokens, for log-probabilities.

A token may hold parts of characters. Its bytes are then derived from its name in the vocabulary:
byte-level tokenizers write every byte as a character (GPT-2), others have tokens for single bytes
(`<0xE2>`, SentencePiece).
"""

from __future__ import annotations

import re
from typing import Any

from inference.target.text_pieces import REPLACEMENT

ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""SentencePiece's character for a space."""


class TokenTexts:
    """See the module. Use it from one thread; results are cached."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes: UTF-8, or a part of it."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """The token's text, with a replacement character for parts of characters."""
        return self.bytes_of(token).decode(errors="replace")

    def name(self, token: int) -> str:
        """The token's text, or its bytes if they are not valid text. It is the key in a
        completion's `top_logprobs`, where the keys of tokens must differ."""
        held = self.bytes_of(token)
        try:
            return held.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in held)

    def prompt(self, tokens: tuple[int, ...]) -> str:
        """The text of a prompt, special tokens included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _find(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # rows of the LM head without a token
            return b""
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        if (found := ONE_BYTE.fullmatch(piece)) is not None:
            return bytes.fromhex(found[1])
        if REPLACEMENT in text and all(letter in BYTES for letter in piece):
            return bytes(BYTES[letter] for letter in piece)
        if piece.startswith(SPACE) and not text.startswith(" "):
            text = " " + text  # decoding drops it at the beginning of a text
        return text.encode(errors="replace")


def _byte_letters() -> dict[str, int]:
    """GPT-2's character for every byte: printable characters of Latin-1 stand for themselves, all
    other bytes are mapped to U+0100 and the following."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = _byte_letters()
