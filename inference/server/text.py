"""An answer's text as it arrives, cut at stop strings. Text that could be the beginning of a stop
string is withheld until this is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.target.text_pieces import TextPieces


class StopText:
    """Converts tokens to text. tokens: tokens taken so far, up to the one that completed a stop
    string. least: no stop string that the first `least` tokens complete ends the text."""

    def __init__(
        self, tokenizer: Any, ends: Sequence[int], stops: tuple[str, ...], least: int = 0
    ) -> None:
        self.pieces, self.stops, self.least = TextPieces(tokenizer, ends), stops, least
        self.tokens = 0
        self.stopped = False
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is decided after more tokens. After a stop string (`stopped`), further
        tokens are ignored."""
        if not self.stops:
            self.tokens += len(tokens)
            return self.pieces.add(tokens)
        shown = ""
        # one by one, so that the count does not depend on the size of the call
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            piece = self.pieces.add([token])
            shown += self._decide(piece, self.tokens > self.least)
        return shown

    def rest(self) -> str:
        """The withheld text, once no more tokens come."""
        if self.stopped:
            return ""
        shown = self._decide(self.pieces.rest())
        if not self.stopped:
            shown, self._held = shown + self._held, ""
        return shown

    def _decide(self, piece: str, search: bool = True) -> str:
        """The part of the withheld text and `piece` that can be shown. search: stop strings may end
        here; otherwise text with which one may begin is withheld all the same."""
        if not piece:
            return ""
        text = self._held + piece
        stops = self.stops if search else ()
        found = [place for stop in stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_begun(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
