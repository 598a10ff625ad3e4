"""From answer spans to loss masks, and a report that shows them.

The mask is True where the token AT a position belongs to an answer; a drafter's loss looks ahead
from the position before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from heads.api.errors import UserError
from inference.target.chat import Span

Tokens = Sequence[int] | NDArray[np.int32]

SUPERVISED_STYLE = "green"
CONTEXT_STYLE = "dim"
SHOWN_TOKENS = 240


@dataclass(frozen=True)
class MaskReport:
    """The coverage of loss masks: supervised / all tokens, and rich markup of one document."""

    documents: int
    tokens: int
    supervised: int
    share: float
    sample: str

    def __str__(self) -> str:
        style = f"[{SUPERVISED_STYLE}]{SUPERVISED_STYLE}[/]"
        return (
            f"loss mask: {self.supervised} of {self.tokens} tokens supervised ({self.share:.1%}) "
            f"in {self.documents} documents; a sample, what is learned in {style}:\n{self.sample}"
        )


def mask_of(spans: Iterable[Span], length: int) -> NDArray[np.bool_]:
    """Loss mask [length] bool of answer spans [start, end). The first token is never supervised:
    nothing before it could predict it."""
    mask = np.zeros(length, dtype=bool)
    for start, end in spans:
        assert 0 <= start < end <= length, (
            f"span [{start}, {end}) outside a document of {length} tokens"
        )
        mask[start:end] = True
    mask[:1] = False
    return mask


def mask_report(documents: Sequence[tuple[Tokens, Sequence[Span]]], tokenizer: Any) -> MaskReport:
    """Measure and show the masks of (tokens, spans) documents, with the first that has an answer as
    a sample; raises `UserError` if nothing is supervised."""
    masks = [mask_of(spans, len(tokens)) for tokens, spans in documents]
    tokens = sum(len(mask) for mask in masks)
    supervised = int(sum(mask.sum() for mask in masks))
    require_supervised(supervised, tokens)
    shown = next(place for place, mask in enumerate(masks) if mask.any())
    sample = colour(documents[shown][0], masks[shown], tokenizer)
    return MaskReport(len(masks), tokens, supervised, supervised / tokens, sample)


def require_supervised(supervised: int, tokens: int) -> None:
    if not supervised:
        raise UserError(
            f"0% of {tokens} tokens are supervised: no document has an answer, so there is "
            "nothing to learn. Generate answers first, or check the chat template's {% "
            "generation %} markers or the data's spans."
        )


def colour(tokens: Tokens, mask: NDArray[np.bool_], tokenizer: Any) -> str:
    """Rich markup of at most `SHOWN_TOKENS` around the first answer, supervised runs in green."""
    first = int(mask.argmax())
    begin = max(0, first - SHOWN_TOKENS // 3)
    end = min(len(tokens), begin + SHOWN_TOKENS)
    edges = [begin, *(np.flatnonzero(np.diff(mask[begin:end])) + 1 + begin).tolist(), end]
    pieces = ["..."] if begin else []
    for start, stop in pairwise(edges):
        text = escape(tokenizer.decode(list(tokens[start:stop]), skip_special_tokens=False))
        pieces.append(f"[{SUPERVISED_STYLE if mask[start] else CONTEXT_STYLE}]{text}[/]")
    return "".join(pieces) + ("..." if end < len(tokens) else "")
