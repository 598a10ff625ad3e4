"""Which JSON schemas can be kept. A schema with a keyword that its grammar would ignore is refused,
and the message names the keyword: an answer that does not validate is worse than none.

`oneOf` counts as `anyOf` (they mean the same if the options exclude each other). Objects that list
their properties have no others unless `additionalProperties` allows them, and arrays that list
`prefixItems` have no other items unless `items` allows them. What the compiler would read otherwise
than JSON Schema, `inference.decoding.structured.rewriting` writes in a form that it reads as meant.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from heads.api.errors import UserError, suggest
from inference.decoding.structured.formats import FORMATS

NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment "
    "$defs definitions".split()
)
"""Keywords that do not constrain anything."""
CHOICES = ("anyOf", "oneOf", "allOf")
ALONE = ("$ref", "enum", "const", *CHOICES)
"""Keywords that can be combined only with `type` and notes."""
STRING = ("pattern", "format", "minLength", "maxLength")
NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OBJECT = (
    "properties required additionalProperties patternProperties propertyNames minProperties "
    "maxProperties"
).split()
ARRAY = ("items", "prefixItems", "minItems", "maxItems")
KEPT = frozenset((*NOTES, *ALONE, "type", *STRING, *NUMBER, *OBJECT, *ARRAY))
IMPLIED = {
    "object": frozenset(("properties", "additionalProperties")),
    "array": frozenset(("items", "prefixItems")),
}
"""Type -> keywords by which the compiler takes a schema without a type for one of that type."""
NEED_TYPE = {
    **dict.fromkeys(STRING, "string"),
    **dict.fromkeys(NUMBER, "number"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
    **dict.fromkeys(
        ("patternProperties", "propertyNames", "minProperties", "maxProperties"), "object"
    ),
}
"""Keyword -> type. The compiler ignores the keyword in a schema that has and implies no type."""
ANY = frozenset("string number integer boolean null object array".split())
UNKEPT_PATTERN = re.compile(r"\(\?(?!:)|\\[bB]|\\[1-9]|\\(?:0|x00|u0000)(?!-)")
"""Lookaround, named and inline groups, word boundaries, backreferences, null characters."""
LETTERS = re.compile(r"\\.|.", re.DOTALL)
"""A character of a pattern, or an escape."""
DECIMALS = 6
"""Decimals of the numbers that the compiler writes between bounds."""
CLASHES = (
    ("patternProperties", "properties", "write the names as one pattern"),
    ("patternProperties", "propertyNames", "write what 'propertyNames' says into the pattern"),
    ("propertyNames", "properties", "leave 'propertyNames' out, or list no properties"),
)
"""Pairs of an object's keywords of which one would be ignored, and what to do."""
DEEPEST = 64


def check_schema(text: str) -> None:
    """Raise `UserError` unless `text` is a JSON schema whose keywords are all kept."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is not JSON ({error}).") from error
    try:
        _Check(schema).run()
    except RecursionError as error:
        raise UserError(f"the JSON schema has too many levels ({DEEPEST} are allowed).") from error
    except (TypeError, OverflowError) as error:  # a list of objects where names belong, 1e999
        raise UserError(
            "a keyword of the JSON schema has a value of the wrong type or size."
        ) from error


def check_pattern(pattern: str, where: str = "the regular expression") -> None:
    """Raise `UserError` for parts of a pattern that its grammar would ignore."""
    found = UNKEPT_PATTERN.search(pattern)
    if found is not None:
        raise UserError(
            f"{where} contains '{found[0]}', which cannot be kept: lookaround, named groups, word "
            "boundaries, references back and null characters are not supported. Write it without "
            "them."
        )
    if _has_inner_anchor(pattern):
        raise UserError(
            f"{where} contains '^' or '$' within, where they cannot be kept: write them only at "
            "the beginning and the end, outside of groups."
        )


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """The types that a schema without `ALONE` keywords has or implies; empty: any type."""
    given = schema.get("type")
    if given is not None:
        return frozenset(given if isinstance(given, list) else [given])
    return frozenset([kind for kind, names in IMPLIED.items() if names & schema.keys()][:1])


def has_type(value: Any, types: frozenset[str]) -> bool:
    """Whether a value has one of `types`; if these are empty, every value has."""
    return not types or _within(frozenset([_type_of(value)]), types)


def give_names_a_type(schema: dict[str, Any]) -> None:
    """Give the schema of an object's names the type that they have, if it has none: the compiler
    would write names of any type."""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and not names.keys() & {"type", *ALONE}:
        names["type"] = "string"


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, by name."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        held = schema.get(name, {})
        if not isinstance(held, dict):
            raise UserError(f"'{name}' of a JSON schema must be an object.")
        yield from held.items()
    for name in (*CHOICES, "prefixItems"):
        held = schema.get(name, [])
        if not isinstance(held, list):
            raise UserError(f"'{name}' of a JSON schema must be a list.")
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(held))
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in schema:
            yield name, schema[name]


class _Check:
    """The check of one schema. Raises `UserError`, or `TypeError` for values of wrong types."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._checked: set[int] = set()
        """Ids of the objects that are schemas."""
        self._references: dict[str, str] = {}
        """What the schema refers to, and where."""
        self._referred: dict[str, frozenset[str]] = {}
        """What the schema refers to, and the types of its values."""

    def run(self) -> None:
        """Check the whole schema."""
        self._check(self._root, "the schema", 0)
        for reference, where in self._references.items():
            target = self._target(reference)
            if not isinstance(target, bool) and id(target) not in self._checked:
                raise UserError(
                    f"{where} refers to '{reference}', where there is no schema: write the schema "
                    "under '$defs' and refer to it there."
                )

    def _check(self, schema: Any, where: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise UserError(f"{where} must be an object (or true, false).")
        if depth > DEEPEST:
            raise UserError(f"{where} lies more than {DEEPEST} levels deep.")
        self._checked.add(id(schema))
        unknown = sorted(set(schema) - KEPT)
        if unknown:
            raise UserError(
                f"{where} uses the keyword '{unknown[0]}', which cannot be kept. Supported are "
                f"{', '.join(sorted(KEPT - NOTES))}."
            )
        for name in ("type", *CHOICES):
            if schema.get(name) == []:
                raise UserError(f"{where} has an empty '{name}', which no value meets.")
        give_names_a_type(schema)
        self._check_alone(schema, where)
        _check_values(schema, where)
        _check_names(schema, where)
        if "propertyNames" in schema and self._types(schema["propertyNames"]) != {"string"}:
            raise UserError(
                f"{where} has 'propertyNames' that allow other values than texts, which no name "
                "is: give them the type string, or texts in 'enum'."
            )
        for name, inner in inner_schemas(schema):
            self._check(inner, f"'{name}' of {where}" if depth < 2 else f"'{name}'", depth + 1)

    def _check_alone(self, schema: dict[str, Any], where: str) -> None:
        """Check the keywords beside which the compiler ignores others, and those that need a
        type."""
        asserts = [name for name in schema if name not in NOTES and name != "type"]
        alone = next((name for name in ALONE if name in schema), None)
        if alone is not None:
            self._check_only(alone, schema, where, asserts)
        elif not types_of(schema):
            for name in asserts:
                if name in NEED_TYPE:
                    raise UserError(
                        f"{where} has '{name}' without type, where it has no effect: add the type "
                        f'that it is for, such as "type": "{NEED_TYPE[name]}".'
                    )

    def _check_only(
        self, alone: str, schema: dict[str, Any], where: str, asserts: list[str]
    ) -> None:
        """Check a schema with the keyword `alone`, one of `ALONE`."""
        leads = alone == "$ref" or alone in CHOICES
        instead = f"write it into the schemas to which '{alone}' leads" if leads else "leave it out"
        others = [name for name in asserts if name != alone]
        if others:
            raise UserError(
                f"{where} has '{others[0]}' beside '{alone}', where it cannot be kept: {instead}."
            )
        if len(schema.get("allOf", [])) > 1:
            raise UserError(
                f"{where} has 'allOf' of more than one schema, which cannot be kept: write one "
                "schema with the keywords of all."
            )
        if alone == "$ref":
            reference = schema[alone]
            if not (isinstance(reference, str) and f"{reference}/".startswith("#/")):
                raise UserError(
                    f"{where} refers to '{reference}'; only '#/...' is looked up, such as "
                    "'#/$defs/name'."
                )
            self._references[reference] = where
        if schema.get("type") is None:
            return
        if leads and not _within(self._types({alone: schema[alone]}), types_of(schema)):
            raise UserError(
                f"{where} has 'type' beside '{alone}', where it cannot be kept: {instead}."
            )
        if not self._types(schema):
            raise UserError(f"{where} has no value of its type in '{alone}': change one of them.")

    def _types(self, schema: Any) -> frozenset[str]:
        """The types of the values that the compiler writes for a schema."""
        if not isinstance(schema, dict):
            return ANY
        if "$ref" in schema:
            return self._types_referred(str(schema["$ref"]))
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            types = types_of(schema)
            return frozenset(_type_of(value) for value in values if has_type(value, types))
        for name in CHOICES:
            if name in schema:
                return frozenset().union(*map(self._types, schema[name]))
        return types_of(schema) or ANY

    def _types_referred(self, reference: str) -> frozenset[str]:
        if reference not in self._referred:
            self._referred[reference] = ANY  # if it leads to itself
            self._referred[reference] = self._types(self._target(reference))
        return self._referred[reference]

    def _target(self, reference: str) -> Any:
        """What '#/...' refers to; None if there is nothing."""
        found = self._root
        for name in reference.split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _check_values(schema: dict[str, Any], where: str) -> None:
    """Check the keywords of texts and numbers."""
    for pattern in (*schema.get("patternProperties", ()), schema.get("pattern", "")):
        check_pattern(pattern, f"a pattern of {where}")
    if schema.get("format", "date") not in FORMATS:
        raise UserError(
            f"{where} has the format '{schema['format']}', which cannot be kept: leave it out, or "
            f"write a 'pattern'.{suggest(str(schema['format']), FORMATS)}"
        )
    lengths = any(name in schema for name in ("minLength", "maxLength"))
    if ("pattern" in schema) + ("format" in schema) + lengths > 1:
        raise UserError(
            f"{where}: of pattern, format and length a string keeps only one; write the length "
            "into the pattern, such as '^[a-z]{2,5}$'."
        )
    if "number" in types_of(schema) and not _has_room(schema, where):
        raise UserError(
            f"{where} has bounds with no number of {DECIMALS} decimals between them, and the "
            "grammar has no others: widen the bounds, or list the values in 'enum'."
        )


def _has_room(schema: dict[str, Any], where: str) -> bool:
    """Whether a number that the compiler can write lies between a schema's bounds. Raises
    `UserError` for a bound that is no number."""
    bounds = {name: schema[name] for name in NUMBER if name in schema}
    for name, bound in bounds.items():
        # checked before it is multiplied, as a text or list would be repeated
        if type(bound) not in (int, float) or bound != bound:
            raise UserError(
                f"'{name}' of {where} must be a number, it is {_shown(bound)}: give one, or leave "
                f"'{name}' out."
            )
    scaled = {name: round(bound * 10**DECIMALS, 3) for name, bound in bounds.items()}
    low = max(
        math.ceil(scaled.get("minimum", -sys.float_info.max)),
        math.floor(scaled.get("exclusiveMinimum", -sys.float_info.max)) + 1,
    )
    high = min(
        math.floor(scaled.get("maximum", sys.float_info.max)),
        math.ceil(scaled.get("exclusiveMaximum", sys.float_info.max)) - 1,
    )
    return low <= high


def _shown(value: Any) -> str:
    """A value for a message: NaN, or its type, as texts and lists may be long."""
    return "NaN" if isinstance(value, float) else f"of type {_type_of(value)}"


def _check_names(schema: dict[str, Any], where: str) -> None:
    """Check the keywords that limit the names of an object, or their number."""
    required = set(schema.get("required", ()))
    missing = sorted(required - set(schema.get("properties", ())))
    if missing:
        raise UserError(
            f"{where} requires '{missing[0]}', which is none of its properties: add it to "
            "'properties', where true allows any value."
        )
    for name, other, instead in CLASHES:
        if name in schema and other in schema:
            raise UserError(
                f"{where} has '{name}' beside '{other}', which cannot be kept together: {instead}."
            )
    closed = schema.get("additionalProperties", "properties" not in schema) is False
    if "patternProperties" in schema and not closed and "additionalProperties" in schema:
        raise UserError(
            f"{where} has 'additionalProperties' beside 'patternProperties', where it cannot be "
            "kept: leave it out or make it false; other names than the pattern's are not written."
        )
    if "propertyNames" in schema and closed:
        raise UserError(
            f"{where} has 'propertyNames' where 'additionalProperties' is false, so that no name "
            "is possible: leave one of them out."
        )
    patterns = list(schema.get("patternProperties", {}).values())
    if any(inner != patterns[0] for inner in patterns):
        raise UserError(
            f"{where} has several 'patternProperties' with different schemas, which cannot be "
            "kept, as a name may match more than one: give one pattern, or the same schema to all."
        )
    sure = len(required) + 1
    repeatable = not closed or "patternProperties" in schema
    if repeatable and schema.get("minProperties", 0) > sure:
        raise UserError(
            f"{where} has 'minProperties' of {schema['minProperties']}, of which {sure} can be "
            "kept, since names that are not listed may repeat: list them in 'properties' and "
            "'required'."
        )


def _has_inner_anchor(pattern: str) -> bool:
    """Whether '^' is not at the beginning, or '$' not at the end, of a pattern or of one of its
    options outside of groups."""
    letters = LETTERS.findall(pattern)
    depth, in_class = 0, False
    for place, letter in enumerate(letters):
        if in_class or letter == "[":
            in_class = letter != "]"
        elif letter in ("(", ")"):
            depth += 1 if letter == "(" else -1
        elif letter in ("^", "$"):
            beside = letters[place - 1 : place] if letter == "^" else letters[place + 1 : place + 2]
            if depth or beside not in ([], ["|"]):
                return True
    return False


def _type_of(value: Any) -> str:
    """The type of a JSON value; of a number without fraction, integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _within(types: frozenset[str], allowed: frozenset[str]) -> bool:
    """Whether `allowed` has all of `types`; number includes integer."""
    return types <= allowed | ({"integer"} if "number" in allowed else frozenset())
