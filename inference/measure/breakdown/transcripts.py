"""Answers token by token: the source of each token, and both models' candidates there.

They are written to `transcripts.json` next to a report.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from heads.api.errors import UserError
from heads.api.reading import read_bytes
from inference.manifest import write_bytes
from inference.measure.breakdown.observe import Candidates, Source, Watched
from inference.measure.prompts import Prompt
from inference.target.text_pieces import TextPieces

FORMAT = 1
FILE = "transcripts.json"
PROMPT_CHARACTERS = 4000
"""Characters kept of a prompt, from its end."""

TokenTranscript = TypedDict(
    "TokenTranscript",
    {
        "id": int,
        "text": str,
        "by": Source,
        "depth": int,
        "pass": int,
        "target": list[tuple[str, float]],  # candidates with their probabilities
        "draft": list[tuple[str, float]],
    },
)
"""One committed token; see `inference.measure.breakdown.observe.State`."""


class Transcript(TypedDict):
    """One answer of one drafter."""

    arm: str
    prompt: str
    domain: str
    temperature: float
    question: str
    finish: str
    tokens: list[TokenTranscript]


class TranscriptFile(TypedDict):
    """The content of transcripts.json."""

    format: int
    target: str
    candidates: int
    answers: list[Transcript]


def transcript(
    arm: str, prompt: Prompt, watched: Watched, tokenizer: Any, temperature: float
) -> Transcript:
    """The answer `watched` of one drafter to one prompt."""
    pieces = TextPieces(tokenizer, ())
    tokens: list[TokenTranscript] = [
        {
            "id": state.token,
            "text": pieces.add([state.token]),
            "by": state.by,
            "depth": state.depth,
            "pass": state.number,
            "target": _texts(state.target, tokenizer),
            "draft": _texts(state.draft, tokenizer),
        }
        for state in watched.states
    ]
    tokens[-1]["text"] += pieces.rest()
    return {
        "arm": arm,
        "prompt": prompt.id,
        "domain": prompt.domain,
        "temperature": float(temperature),
        "question": _question(prompt, watched, tokenizer),
        "finish": watched.finish,
        "tokens": tokens,
    }


def _question(prompt: Prompt, watched: Watched, tokenizer: Any) -> str:
    """The last message, or the prompt's tokens as text."""
    last = prompt.messages[-1]["content"] if prompt.messages else None
    text = str(tokenizer.decode(list(watched.request.tokens)) if last is None else last)
    return text if len(text) <= PROMPT_CHARACTERS else "…" + text[-PROMPT_CHARACTERS:]


def _texts(candidates: Candidates, tokenizer: Any) -> list[tuple[str, float]]:
    return [(str(tokenizer.decode([token])), round(share, 4)) for token, share in candidates]


def write_transcripts(
    folder: Path, target: str, candidates: int, answers: Sequence[Transcript]
) -> None:
    """Write `folder`/transcripts.json."""
    content = TranscriptFile(
        format=FORMAT, target=target, candidates=candidates, answers=list(answers)
    )
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    write_bytes(folder / FILE, (text + "\n").encode())


def discard_transcripts(folder: Path) -> None:
    """Remove the transcripts of a measurement that is being replaced."""
    (folder / FILE).unlink(missing_ok=True)


def read_transcripts(folder: Path) -> list[Transcript]:
    """A folder's answers, empty where none were kept; raises `UserError` for a broken file."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        content = TypeAdapter(TranscriptFile).validate_json(read_bytes(path))
    except ValidationError as error:
        raise UserError(
            f"'{path}' holds no transcripts ({error.errors()[0]['msg']}). Measure again with "
            "bench.lost.enabled=true."
        ) from error
    if content["format"] != FORMAT:
        found = content["format"]
        raise UserError(f"'{path}' has format {found!r}; this version reads format {FORMAT}.")
    return content["answers"]
