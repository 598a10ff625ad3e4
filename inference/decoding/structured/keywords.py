"""Which JSON schemas can be kept. A schema with a keyword that its grammar would ignore is refused,
and the message names the keyword: an answer that does not validate is worse than none.

`oneOf` counts as `anyOf` (they mean the same if the options exclude each other). Objects that list
their properties have no others unless `additionalProperties` allows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from heads.api.errors import UserError

NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment "
    "$defs definitions".split()
)
"""Keywords that do not constrain anything."""
ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords that can be combined only with `type` and notes."""
STRING = ("pattern", "format", "minLength", "maxLength")
NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OBJECT = (
    "properties required additionalProperties patternProperties propertyNames minProperties "
    "maxProperties"
).split()
ARRAY = ("items", "prefixItems", "minItems", "maxItems")
KEPT = frozenset((*NOTES, *ALONE, "type", *STRING, *NUMBER, *OBJECT, *ARRAY))
NEED_TYPE = {**dict.fromkeys(STRING, ("string",)), **dict.fromkeys(NUMBER, ("number", "integer"))}
UNKEPT_PATTERN = re.compile(r"\(\?(?!:)|\\[bB]|\\[1-9]")
"""Lookaround, named and inline groups, word boundaries, backreferences."""
UNQUOTED = re.compile(r'"|\\[\\nrtfv0cxu]')
"""What a string's pattern must not contain, since JSON escapes it."""
DEEPEST = 64


def check_schema(text: str) -> None:
    """Raise `UserError` unless `text` is a JSON schema whose keywords are all kept."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is not JSON ({error}).") from error
    try:
        _check(schema, "the schema", 0)
    except TypeError as error:  # a list of objects where names belong, and the like
        raise UserError("a keyword of the JSON schema has a value of the wrong type.") from error


def check_pattern(pattern: str, where: str = "the regular expression") -> None:
    """Raise `UserError` for parts of a pattern that its grammar would ignore."""
    found = UNKEPT_PATTERN.search(pattern)
    if found is not None:
        raise UserError(
            f"{where} contains '{found[0]}', which cannot be kept: lookaround, named groups, word "
            "boundaries and references back are not supported. Write it without them."
        )


def _check_string_pattern(pattern: str, where: str) -> None:
    check_pattern(pattern, where)
    found = UNQUOTED.search(pattern)
    if found is not None:
        raise UserError(
            f"{where} contains '{found[0]}': quotes, backslashes and control characters are "
            "written otherwise in JSON and cannot be kept in a pattern."
        )


def _check(schema: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise UserError(f"{where} must be an object (or true, false).")
    if depth > DEEPEST:
        raise UserError(f"{where} lies more than {DEEPEST} levels deep.")
    unknown = sorted(set(schema) - KEPT)
    if unknown:
        raise UserError(
            f"{where} uses the keyword '{unknown[0]}', which cannot be kept. Supported are "
            f"{', '.join(sorted(KEPT - NOTES))}."
        )
    _check_together(schema, where)
    if "pattern" in schema:
        _check_string_pattern(str(schema["pattern"]), f"'pattern' of {where}")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        raise UserError(f"{where} refers to '{reference}'; only '#...' is looked up.")
    for name, inner in _inner(schema):
        _check(inner, f"'{name}' of {where}" if depth < 2 else f"'{name}'", depth + 1)


def _check_together(schema: dict[str, Any], where: str) -> None:
    """Raise `UserError` for combinations of keywords of which one would be ignored."""
    asserts = [name for name in schema if name not in NOTES and name != "type"]
    for name in ALONE:
        if name in schema and len(asserts) > 1:
            other = next(item for item in asserts if item != name)
            raise UserError(f"{where} has '{other}' beside '{name}', where it cannot be kept.")
    if len(schema.get("allOf", [])) > 1:
        raise UserError(f"{where} has 'allOf' of more than one schema, which cannot be kept.")
    lengths = any(name in schema for name in ("minLength", "maxLength"))
    if ("pattern" in schema) + ("format" in schema) + lengths > 1:
        raise UserError(f"{where}: of pattern, format and length a string keeps only one.")
    required, known = schema.get("required", []), schema.get("properties", {})
    if isinstance(required, list) and isinstance(known, dict) and set(required) - set(known):
        name = sorted(set(required) - set(known))[0]
        raise UserError(f"{where} requires '{name}', which is none of its properties.")
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    for name in asserts:
        if name in NEED_TYPE and not set(types) & set(NEED_TYPE[name]):
            wanted = " or ".join(NEED_TYPE[name])
            raise UserError(f"{where} has '{name}' without type {wanted}, where it has no effect.")


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, by name."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        held = schema.get(name, {})
        if not isinstance(held, dict):
            raise UserError(f"'{name}' of a JSON schema must be an object.")
        yield from held.items()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        held = schema.get(name, [])
        if not isinstance(held, list):
            raise UserError(f"'{name}' of a JSON schema must be a list.")
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(held))
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in schema:
            yield name, schema[name]
