"""The data for the page's viewer of answers, token by token; script.js shows it.

The data is cut to the page's size limit. The fastest drafters come first, so that they are always
included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.measure.breakdown.observe import SOURCES
from inference.measure.breakdown.transcripts import Transcript
from inference.report.page.formats import to_json
from inference.report.page.gather import Run

MOST_BYTES = 1_500_000
"""Size limit of all transcripts of a page."""


@dataclass(frozen=True)
class Answers:
    """The answers of one measurement that the page holds."""

    packed: Sequence[Mapping[str, Any]]
    """See `pack`."""
    size: int
    """Bytes of their JSON."""
    left_out: int
    """Number of answers that did not fit."""

    def values(self, key: str) -> list[str]:
        """The different values of "arm" or "prompt", in their order."""
        return list(dict.fromkeys(answer[key] for answer in self.packed))


def select_answers(run: Run, room: int) -> Answers:
    """The answers of the fastest drafters that fit into `room` bytes of JSON."""
    order = {drafter.name: place for place, drafter in enumerate(run.drafters)}
    packed: list[Mapping[str, Any]] = []
    used = 0
    for answer in sorted(run.answers, key=lambda one: order.get(one["arm"], len(order))):
        small = pack(answer)
        size = len(to_json(small).encode())
        if used + size <= room:
            packed.append(small)
            used += size
    return Answers(packed, used, len(run.answers) - len(packed))


def pack(answer: Transcript) -> dict[str, Any]:
    """A compact form: tokens are [text, place in `SOURCES`, depth, pass, target's, drafter's]."""
    tokens = [
        [
            token["text"],
            SOURCES.index(token["by"]),
            token["depth"],
            token["pass"],
            token["target"],
            token["draft"],
        ]
        for token in answer["tokens"]
    ]
    names = {name: answer[name] for name in ("arm", "prompt", "domain", "question", "finish")}
    return {**names, "tokens": tokens}
