"""A random target with the embedded target's tokenizer, and constraints that a random model can
meet in few tokens, each with a check of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from inference.decoding.requests import Request
from inference.decoding.structured.constraint import Constraint
from inference.target.loading import TargetConfig, describe, prepare, switch_attention
from inference.target.model import TargetModel
from tests.models import random_model

TOKENIZER = Path(__file__).parents[4] / "assets" / "tiny-target"
END = 5

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[a-f]{1,3}"
SUM = 'root ::= number ("+" number){1,3}\nnumber ::= [0-9] [0-9]?'
CHOICES = ["yes", "no", "maybe", "I do not (yet) know."]


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 6
        and type(found["age"]) is int
        and 0 <= found["age"] <= 120
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"new", "old"}
    )


CONSTRAINTS: dict[str, tuple[Constraint, Callable[[str], object]]] = {
    "schema": (Constraint.schema(PERSON), is_person),
    "loose schema": (Constraint.schema(PERSON, any_whitespace=True), is_person),
    "regex": (Constraint("regex", DATE), lambda text: re.fullmatch(DATE, text)),
    "grammar": (
        Constraint("grammar", SUM),
        lambda text: re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2}){1,3}", text),
    ),
    "choice": (Constraint.choice(CHOICES), lambda text: text in CHOICES),
}
"""Constraints with the check that an answer has to pass."""


@cache
def structured_target() -> TargetModel:
    """A random Llama, float64, that reads and writes the embedded target's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = random_model(vocab_size=len(tokenizer), eos_token_id=END)
    model = prepare(model)
    model.generation_config.eos_token_id = END
    switch_attention(model)
    return TargetModel(model, tokenizer, describe(model, tokenizer, TargetConfig(path="random")))


def asked(
    names: Sequence[str | None], new: int = 40, seed: int = 0, prompt: int = 7
) -> list[Request]:
    """A request for every name of `CONSTRAINTS`; None: a free one."""
    return [
        Request(
            place,
            tuple(40 + (prompt * place + step) % 900 for step in range(3 + place % 5)),
            seed + 1 + place,
            new,
            constraint=None if name is None else CONSTRAINTS[name][0],
        )
        for place, name in enumerate(names)
    ]


def text_of(tokens: list[int]) -> str:
    """An answer's text, without its end."""
    target = structured_target()
    shown = [token for token in tokens if token != END]
    return str(target.tokenizer.decode(shown, skip_special_tokens=False))
