"""Structured output as clients request it: OpenAI's `response_format`, vLLM's `structured_outputs`
and its older `guided_...` fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from heads.api.errors import UserError
from inference.decoding.structured.constraint import Constraint
from inference.server.errors import ApiError

FIELDS: dict[str, type] = {
    "response_format": dict,
    "structured_outputs": dict,
    "guided_json": object,
    "guided_regex": str,
    "guided_choice": list,
    "guided_grammar": str,
}
"""Parameters of a request for structured output, and their types."""
FORMATS = ("text", "json_object", "json_schema")
WAYS = ("json", "regex", "choice", "grammar", "json_object")
"""Keys of `structured_outputs`, of which exactly one must be given."""
NEUTRAL_WAYS = ("disable_fallback", "disable_additional_properties")
"""Keys that have no effect here."""


def read_constraint(given: Mapping[str, Any]) -> tuple[str, Constraint] | None:
    """The parameter that constrains the answer, and its constraint; None if there is none. Raises
    `ApiError` (400) for invalid values, and for more than one such parameter."""
    found = [(name, _read(name, given[name])) for name in FIELDS if name in given]
    asked = [(name, constraint) for name, constraint in found if constraint is not None]
    if len(asked) > 1:
        names = " and ".join(f"'{name}'" for name, _ in asked)
        raise ApiError(400, f"{names} cannot be given together.", asked[1][0])
    return asked[0] if asked else None


def _read(name: str, value: Any) -> Constraint | None:
    try:
        if name == "response_format":
            return _response_format(value)
        if name == "structured_outputs":
            return _structured_outputs(value)
        return _way(name.removeprefix("guided_"), value, name, False)
    except UserError as error:
        raise ApiError(400, f"'{name}': {error}", name) from error


def _response_format(value: dict[str, Any]) -> Constraint | None:
    kind = value.get("type")
    if kind not in FORMATS:
        allowed = ", ".join(f"'{name}'" for name in FORMATS)
        message = f"'response_format' needs a 'type' of {allowed}."
        raise ApiError(400, message, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json_object()
    described = value.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        message = "'response_format' of type 'json_schema' needs 'json_schema': {'schema': ...}."
        raise ApiError(400, message, "response_format")
    return Constraint.schema(described["schema"])


def _structured_outputs(value: dict[str, Any]) -> Constraint | None:
    name = "structured_outputs"
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    tight = value.get("disable_any_whitespace") is not False
    unknown = sorted(set(given) - {*WAYS, *NEUTRAL_WAYS, "disable_any_whitespace"})
    if unknown:
        raise ApiError(400, f"'{name}' has no '{unknown[0]}' here.", name)
    ways = [key for key in given if key in WAYS]
    if len(ways) != 1:
        allowed = ", ".join(f"'{way}'" for way in WAYS)
        raise ApiError(400, f"'{name}' needs one of {allowed}.", name)
    return _way(ways[0], given[ways[0]], name, not tight)


def _way(way: str, value: Any, name: str, any_whitespace: bool) -> Constraint:
    """The constraint for one of `WAYS` and its value. name: the parameter that contained it."""
    if way == "json_object":
        return Constraint.json_object(any_whitespace)
    if way == "json":
        text = value if isinstance(value, str) else json.dumps(value)
        return Constraint("json_schema", text, any_whitespace)
    if way == "choice":
        if not (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
            raise ApiError(400, f"'{name}' needs a list of texts to choose from.", name)
        return Constraint.choice(value)
    if not isinstance(value, str):
        raise ApiError(400, f"'{way}' of '{name}' must be text.", name)
    return Constraint("regex" if way == "regex" else "grammar", value)
