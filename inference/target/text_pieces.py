"""Text that arrives token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""A tokenizer's text for bytes that are not yet a whole character."""
WINDOW, KEPT = 48, 12
"""Only the last tokens are decoded again: if there are more than `WINDOW`, only the last `KEPT` are
kept."""


class TextPieces:
    """Turns tokens into text as they arrive; an incomplete character is held back.

    ends: token ids that end a text and are not shown. special: special tokens are shown. text: the
    text shown so far.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], special: bool = False) -> None:
        self.tokenizer, self.ends, self.special = tokenizer, frozenset(ends), special
        self.tokens: list[int] = []
        self.text = ""
        self._shown = 0  # characters shown of the text of `tokens`

    def add(self, new: Sequence[int]) -> str:
        """The text that `new` tokens complete."""
        self.tokens += [token for token in new if token not in self.ends]
        text = self._decoded(self.tokens)
        return "" if text.endswith(REPLACEMENT) else self._from_shown(text)

    def rest(self) -> str:
        """The text that was held back."""
        return self._from_shown(self._decoded(self.tokens))

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not self.special))

    def _from_shown(self, text: str) -> str:
        piece, self._shown = text[self._shown :], len(text)
        self.text += piece
        if len(self.tokens) > WINDOW:
            kept = self.tokens[-KEPT:]
            end = self._decoded(kept)
            # do not cut between the bytes of a character, nor where the tokenizer would decode the
            # same tokens differently
            if text.endswith(end) and not end.startswith(REPLACEMENT):
                self.tokens, self._shown = kept, len(end)
        return piece
