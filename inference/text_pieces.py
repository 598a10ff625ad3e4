"""Text that arrives token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What a tokenizer gives for bytes that are not yet a whole character."""


class TextPieces:
    """Turns tokens into text as they arrive; a character whose bytes are not all there yet waits.

    ends: token ids that end a text and are not shown.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self.tokens: list[int] = []
        self.text = ""

    def add(self, new: Sequence[int]) -> str:
        """The text that `new` tokens complete."""
        self.tokens += [token for token in new if token not in self.ends]
        text = self._decoded()
        return "" if text.endswith(REPLACEMENT) else self._from_shown(text)

    def rest(self) -> str:
        """What was held back."""
        return self._from_shown(self._decoded())

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def _from_shown(self, text: str) -> str:
        piece, self.text = text[len(self.text) :], text
        return piece
