"""Answers token by token: who produced each, and what both models held likely there. `transcripts.json` beside a report.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes
from inference.measure.breakdown.observe import BONUS, CORRECTED, DRAFTED, FIRST, Candidates, Watched
from inference.measure.prompts import Prompt
from inference.target.text_pieces import TextPieces

FORMAT = 1
FILE = "transcripts.json"
PROMPT_CHARACTERS = 4000
"""Of a prompt, at most; its end is kept."""
SOURCES = (FIRST, DRAFTED, CORRECTED, BONUS)


def transcript(
    arm: str, prompt: Prompt, watched: Watched, tokenizer: Any, temperature: float
) -> dict[str, Any]:
    """One answer as JSON holds it."""
    pieces = TextPieces(tokenizer, ())
    tokens: list[dict[str, Any]] = []
    for state in watched.states:
        tokens.append(
            {
                "id": state.token,
                "text": pieces.add([state.token]),
                "by": state.by,
                "depth": state.depth,
                "pass": state.number,
                "target": _named(state.target, tokenizer),
                "draft": _named(state.draft, tokenizer),
            }
        )
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
    """What was asked: the last message, or the prompt's tokens as text."""
    if prompt.messages:
        text = str(prompt.messages[-1]["content"])
    else:
        text = str(tokenizer.decode(list(watched.request.tokens)))
    return text if len(text) <= PROMPT_CHARACTERS else "…" + text[-PROMPT_CHARACTERS:]


def _name(token: int, tokenizer: Any) -> str:
    return str(tokenizer.decode([token]))


def _named(candidates: Candidates, tokenizer: Any) -> list[list[Any]]:
    """[text, probability] of each."""
    return [[_name(token, tokenizer), round(share, 4)] for token, share in candidates]


def write_transcripts(folder: Path, target: str, candidates: int, answers: Sequence[dict[str, Any]]) -> Path:
    """Write `folder`/transcripts.json."""
    content = {"format": FORMAT, "target": target, "candidates": candidates, "answers": list(answers)}
    path = folder / FILE
    write_bytes(path, (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
    return path


def discard_transcripts(folder: Path) -> None:
    """Remove the transcripts of a measurement that is being replaced."""
    (folder / FILE).unlink(missing_ok=True)


def read_transcripts(folder: Path) -> list[dict[str, Any]]:
    """The answers of a report's folder; empty where none were kept. Raises `UserError` for a file that is none of ours."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        answers = [_checked(answer) for answer in content["answers"]]
        known = content["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' holds no transcripts ({error!r}). Measure again with bench.lost.enabled=true.") from error
    if not known:
        raise UserError(f"'{path}' has format {content['format']!r}; this version reads format {FORMAT}.")
    return answers


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with exactly the fields that are shown, of their types; ValueError, KeyError or TypeError otherwise."""
    tokens: list[dict[str, Any]] = []
    for token in answer["tokens"]:
        if token["by"] not in SOURCES:
            raise ValueError(f"a token by {token['by']!r}")
        sides = {
            side: [[str(text), float(share)] for text, share in token[side]] for side in ("target", "draft")
        }
        numbers = {name: int(token[name]) for name in ("id", "depth", "pass")}
        tokens.append({**numbers, "text": str(token["text"]), "by": token["by"], **sides})
    texts = {name: str(answer[name]) for name in ("arm", "prompt", "domain", "question", "finish")}
    return {**texts, "temperature": float(answer["temperature"]), "tokens": tokens}
