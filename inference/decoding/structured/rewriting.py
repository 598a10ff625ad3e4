"""Schemas in the form in which the grammar compiler reads them as JSON Schema means them.

Without these changes it would take an object or array that lists nothing for an empty one, write
values of an `enum` that have another type than the schema, names of any type, and ignore formats
(`inference.decoding.structured.formats`). Patterns are given separately, as the compiler is wrong
about some of them (`inference.decoding.structured.patterns`).
"""

from __future__ import annotations

import json
from typing import Any

from inference.decoding.structured.formats import FORMATS
from inference.decoding.structured.keywords import (
    ALONE,
    give_names_a_type,
    has_type,
    inner_schemas,
    types_of,
)

LISTING = {
    "additionalProperties": (
        "object",
        ("properties", "patternProperties", "propertyNames", "additionalProperties"),
    ),
    "items": ("array", ("items", "prefixItems")),
}
"""Keyword that can allow any content -> its type, and the keywords that list content."""
NAME = "pattern_of_text_"
"""The beginning of the names of patterns."""


def rewritten(text: str) -> tuple[str, dict[str, str]]:
    """A schema that `check_schema` allows, for the compiler, with a name in place of every pattern;
    and the patterns -> names."""
    schema = json.loads(text)
    names: dict[str, str] = {}
    _rewrite(schema, names)
    return json.dumps(schema), names


def _rewrite(schema: Any, names: dict[str, str]) -> None:
    """Change a schema and those within it. names: see `rewritten`; those of new patterns are
    added."""
    if not isinstance(schema, dict):
        return
    give_names_a_type(schema)
    types = types_of(schema)
    if not schema.keys() & set(ALONE):
        for name, (kind, listing) in LISTING.items():
            if kind in types and not schema.keys() & set(listing):
                schema[name] = True
    if "enum" in schema:
        schema["enum"] = [value for value in schema["enum"] if has_type(value, types)]
    pattern = FORMATS.get(schema.get("format", ""))
    if pattern is not None:
        del schema["format"]
        schema["pattern"] = pattern
    if "pattern" in schema:
        schema["pattern"] = _name(schema["pattern"], names)
    if "patternProperties" in schema:
        held = schema["patternProperties"].items()
        schema["patternProperties"] = {_name(key, names): inner for key, inner in held}
    for _, inner in inner_schemas(schema):
        _rewrite(inner, names)


def _name(pattern: str, names: dict[str, str]) -> str:
    return names.setdefault(pattern, f"{NAME}{len(names)}")
