"""The fields of a request by which a server constrains its answer, and a check that it does.

Servers ignore fields that they do not know, so an answer by a schema is checked once: a measurement
of free text would look like one of structured output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from heads.api.errors import UserError
from inference.decoding.structured.constraint import Constraint
from inference.engines.client import TEXT, Answer, Served

LLAMA, SGLANG = "llamacpp", "sglang"
"""Engines with fields of their own, as they call themselves in /v1/models."""
STRUCTURED = ("vllm", "headstart")
"""Engines that take vLLM's `structured_outputs`."""
SGLANG_FIELDS = {"regex": "regex", "grammar": "ebnf"}
OPENINGS = {"object": "{", "array": "[", "string": '"'}
"""How a JSON value begins, by its type in a schema."""
ASKED = "Tell me in a few words what the sea looks like in the morning."
"""A question that is answered in JSON only by those who must."""
ASKED_TOKENS = 16


def constraint_fields(constraint: Constraint, api: str, served: Served) -> dict[str, Any]:
    """The fields that ask for an answer within `constraint`. Raises `UserError` for an engine that
    is not known to have one for this kind of constraint."""
    if constraint.kind == "json_schema":
        schema = json.loads(constraint.text)
        schema = schema if isinstance(schema, dict) else {}  # true: any value
        if served.owner == LLAMA and api == TEXT:
            return {"json_schema": schema}
        described = {"name": "answer", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    if served.owner == SGLANG:
        return {SGLANG_FIELDS[constraint.kind]: constraint.text}
    if served.owner in STRUCTURED:
        return {"structured_outputs": {constraint.kind: constraint.text}}
    raise UserError(
        f"an answer's {constraint.kind} can be asked of vLLM, SGLang and headstart serve; the "
        f"server of '{served.name}' is {f'{served.owner!r}' if served.owner else 'of no name'}. "
        "Give a JSON schema, or leave decode.structure out."
    )


def opening(constraint: Constraint | None) -> str:
    """The character with which every answer begins; empty if the constraint does not tell."""
    if constraint is None or constraint.kind != "json_schema":
        return ""
    schema = json.loads(constraint.text)
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return OPENINGS.get(kind, "") if isinstance(kind, str) else ""


def require_opening(answer: Answer, begins: str, where: str) -> None:
    """Raise `UserError` if the answer to `ASKED` does not begin as its schema demands. where: the
    server, for the message. Reasoning comes before the JSON, so such an answer tells nothing."""
    text = answer.text.lstrip()
    if not answer.reasoned and text and not text.startswith(begins):
        raise UserError(
            f"{where} does not follow a JSON schema (response_format): it answers {text[:40]!r}. "
            "Serve with structured output, or give prompts without a json_schema."
        )
