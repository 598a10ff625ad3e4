"""A random target with the embedded target's tokenizer, constraints that a random model can meet in
few tokens, each with a check of its own, and what a constraint's grammar allows: texts that follow
it, and random ones, with a validator of JSON schemas to judge them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import torch
from transformers import AutoTokenizer

from inference.decoding.requests import Request
from inference.decoding.structured.constraint import Constraint
from inference.decoding.structured.grammars import Grammars, token_texts
from inference.decoding.structured.matcher import Matcher
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


@cache
def token_of() -> dict[bytes, int]:
    """The target's token of every text."""
    return {text: token for token, text in enumerate(token_texts(structured_target())) if text}


def allowed(matcher: Matcher) -> list[int]:
    """The tokens that may come next."""
    words = torch.zeros(1, structured_target().info.vocab_size // 32, dtype=torch.int32)
    matcher.masks(words, [0], [[]])
    bits = (words[0, :, None] >> torch.arange(32)) & 1
    return bits.flatten().nonzero().flatten().tolist()  # type: ignore[no-any-return]


def follows(constraint: Constraint, text: str) -> bool:
    """Whether the grammar allows this whole answer, byte by byte."""
    matcher = Grammars.of(structured_target()).matcher(constraint)
    for byte in text.encode():
        token = token_of()[bytes([byte])]
        if token not in allowed(matcher):
            return False
        matcher.accept([token])
    return END in allowed(matcher)


def sampled(constraint: Constraint, count: int, most: int = 60) -> list[str]:
    """Answers of random tokens that the grammar allows, without those that do not end within `most`
    tokens. They tend to close what they open, as few would end otherwise."""
    draw, texts = random.Random(count), token_texts(structured_target())
    found = []
    for _ in range(count):
        matcher, answer = Grammars.of(structured_target()).matcher(constraint), b""
        for _ in range(most):
            ready = allowed(matcher)
            if END in ready and draw.random() < 0.5:
                break
            closing = [token for token in ready if texts[token][:1] in (b'"', b"}", b"]", b",")]
            token = draw.choice(closing if closing and draw.random() < 0.4 else ready)
            if token == END:
                break
            matcher.accept([token])
            answer += texts[token]
        else:
            continue
        found.append(answer.decode())
    return found


TYPES: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
    "number": (int, float),
    "integer": int,
}
FORMS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "uuid": UUID,
    "uri": lambda text: urlsplit(text).scheme[0],
    "uri-reference": urlsplit,
    "email": lambda text: re.fullmatch(r"[^@\s\"]+@[\w.-]+", text)[0],  # type: ignore[index]
    "hostname": lambda text: text.encode("idna"),
    "duration": lambda text: re.fullmatch(r"P(?=.)[\dYMWD]*(T[\dHMS]+)?", text)[0],  # type: ignore[index]
}
"""Format -> a reader that fails for other texts."""


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """Whether a value is one of a JSON schema with any of the keywords that are kept."""
    if isinstance(schema, bool):
        return schema
    checks = (
        _meets_choices(value, schema, root),
        _has_type(value, schema.get("type", list(TYPES))),
        not isinstance(value, str) or _is_text(value, schema),
        isinstance(value, bool) or not isinstance(value, (int, float)) or _is_number(value, schema),
        not isinstance(value, list) or _is_list(value, schema, root),
        not isinstance(value, dict) or _is_object(value, schema, root),
    )
    return all(checks)


def _has_type(value: Any, given: str | list[str]) -> bool:
    names = [given] if isinstance(given, str) else given
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, TYPES[name]) for name in names)


def _meets_choices(value: Any, schema: dict[str, Any], root: Any) -> bool:
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return is_valid(value, target, root)
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [value])
    options = schema.get("anyOf", schema.get("oneOf", [True]))
    return (
        any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in listed)
        and any(is_valid(value, option, root) for option in options)
        and all(is_valid(value, each, root) for each in schema.get("allOf", []))
    )


def _is_text(value: str, schema: dict[str, Any]) -> bool:
    try:
        FORMS.get(schema.get("format", ""), str)(value)
    except (ValueError, TypeError, IndexError):
        return False
    long = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return long and bool(re.search(schema.get("pattern", ""), value))


def _is_number(value: float, schema: dict[str, Any]) -> bool:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    inside = (above is None or value > above) and (below is None or value < below)
    return bool(inside and low <= value <= high)


def _is_list(value: list[Any], schema: dict[str, Any], root: Any) -> bool:
    first = schema.get("prefixItems", [])
    inner = [*first, *[schema.get("items", True)] * len(value)]
    long = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return long and all(map(lambda item, each: is_valid(item, each, root), value, inner))


def _is_object(value: dict[str, Any], schema: dict[str, Any], root: Any) -> bool:
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items():
        own = [known[name]] if name in known else []
        own += [inner for pattern, inner in patterns.items() if re.search(pattern, name)]
        for inner in own or [schema.get("additionalProperties", True)]:
            if not is_valid(item, inner, root):
                return False
    many = schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
    named = all(is_valid(name, schema.get("propertyNames", True), root) for name in value)
    return many and named and set(schema.get("required", [])) <= set(value)
