"""What a constraint may be, what its grammar then allows, and what is said about others."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.session import Session
from inference.decoding.structured import grammars
from inference.decoding.structured.constraint import LONGEST, Constraint
from inference.decoding.structured.formats import FORMATS
from inference.decoding.structured.grammars import Grammars
from tests.inference.decoding.structured.parts import (
    PERSON,
    asked,
    follows,
    is_valid,
    sampled,
    structured_target,
)

REFUSED: dict[str, Any] = {
    "'uniqueItems'": {"type": "array", "uniqueItems": True},
    "'not'": {"not": {"type": "string"}},
    "'if'": {"if": {}, "then": {}},
    "'multipleOf'": {"type": "integer", "multipleOf": 5},
    "'maximum' beside": {"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": {"type": "integer"}}},
    "more than one schema": {"allOf": [{"type": "integer"}, {"type": "number"}]},
    "keeps only one": {"type": "string", "pattern": "a", "maxLength": 3},
    "without type": {"minimum": 3},
    "'(?'": {"type": "string", "pattern": "(?=a)b"},
    "null characters": {"type": "string", "pattern": r"a\0b"},
    "contains '^' or '$' within": {"type": "string", "pattern": "a(b$|c)d"},
    "none of its properties": {"type": "object", "required": ["a"]},
    "only '#/...'": {"$ref": "http://example.com/schema"},
    "'#anchor'": {"$ref": "#anchor"},
    "'#/$defs/x', where there is no schema": {"$ref": "#/$defs/x"},
    "'minItems' without type": {"minItems": 2},
    "'maxItems' without type": {"maxItems": 2},
    "'minProperties' without type": {"minProperties": 1},
    "'maxProperties' without type": {"maxProperties": 1},
    "'patternProperties' without type": {"patternProperties": {"a": True}},
    "'propertyNames' without type": {"propertyNames": {"maxLength": 2}},
    "'patternProperties' beside 'propertyNames'": {
        "type": "object",
        "propertyNames": {"maxLength": 2},
        "patternProperties": {"a": True},
    },
    "'patternProperties' beside 'properties'": {
        "properties": {"xa": {"type": "string"}},
        "patternProperties": {"^x": {"type": "integer"}},
    },
    "'propertyNames' beside 'properties'": {
        "properties": {"abc": True},
        "propertyNames": {"maxLength": 2},
    },
    "'additionalProperties' beside 'patternProperties'": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": True,
    },
    "no name is possible": {
        "type": "object",
        "propertyNames": {"maxLength": 2},
        "additionalProperties": False,
    },
    "may match more than one": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}, "y$": {"type": "string"}},
    },
    "may repeat": {"type": "object", "minProperties": 2},
    "other values than texts": {"type": "object", "propertyNames": {"enum": ["a", 1]}},
    "no value of its type in 'enum'": {"type": "string", "enum": [1, None]},
    "no value of its type in 'const'": {"type": "string", "const": 1},
    "'type' beside 'anyOf'": {"type": "string", "anyOf": [{"const": "a"}, {"type": "integer"}]},
    "'type' beside 'oneOf'": {"type": "object", "oneOf": [{"type": "string"}]},
    "'type' beside 'allOf'": {"type": "integer", "allOf": [{"type": "number"}]},
    "'type' beside '$ref'": {"type": "string", "$ref": "#/$defs/unknown"},
    "empty 'type'": {"type": []},
    "empty 'anyOf'": {"anyOf": []},
    "the format 'json-pointer'": {"type": "string", "format": "json-pointer"},
    "Did you mean 'date'?": {"type": "string", "format": "dates"},
    "no number of 6 decimals": {"type": "number", "minimum": 1e-8, "exclusiveMaximum": 1e-6},
    "'minimum' of": {"type": "number", "minimum": "9"},
    "must be a number, it is of type array": {"type": ["number", "null"], "maximum": [9]},
    "must be a number, it is of type boolean": {"type": "number", "exclusiveMinimum": True},
    "must be a number, it is NaN": {"type": "number", "exclusiveMaximum": math.nan},
    "must be an object": {"properties": {"a": 3}},
    "must be a list": {"anyOf": {}},
}
"""What a refusal says -> a schema."""


@pytest.mark.parametrize("words", REFUSED)
def test_schemas_that_cannot_be_kept_are_refused(words: str) -> None:
    for schema in (REFUSED[words], {"type": "array", "items": REFUSED[words]}):
        with pytest.raises(UserError) as raised:
            Constraint.schema(schema)
        assert words in str(raised.value)


MANY: dict[str, Any] = {
    "$defs": {"word": {"type": "string", "pattern": "^[a-z]+$"}},
    "title": "all of it",
    "type": "object",
    "properties": {
        "not": {"$ref": "#/$defs/word"},  # a property's name is no keyword
        "n": {"type": ["number", "null"], "minimum": 0},
        "d": {"type": "string", "format": "date"},
        "one": {"oneOf": [{"const": 1}, {"type": "boolean"}]},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["not", "n"],
}
KEPT: list[tuple[Any, list[Any], list[Any]]] = [
    (
        MANY,
        [
            {"not": "a", "n": None},
            {"not": "a", "n": 1.5, "one": True, "pair": [1], "map": {"b": 2}},
        ],
        [{"not": "A", "n": 1}, {"not": "a", "n": -1}, {"n": 1}, {"not": "a", "n": 1, "x": 1}],
    ),
    (True, [1, {"a": [None]}], []),
    ({"type": "object"}, [{}, {"a": [1]}], [[]]),
    ({"type": "array"}, [[], [1, {"a": "b"}]], [{}]),
    ({"$id": "x", "type": "object"}, [{"a": 1}], [1]),
    ({"$defs": {"a": {"type": "null"}}, "type": "array"}, [["a", 1]], [1]),
    ({"type": ["object", "null"], "title": "t"}, [{"a": 1}, None], [1]),
    ({"type": "array", "maxItems": 2}, [[], [1, "a"]], [[1, 2, 3]]),
    ({"type": "array", "minItems": 1}, [[1], [1, {}]], [[]]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"items": {"type": "integer"}, "minItems": 2}, [[1, 2]], [[1], ["a", "b"]]),
    ({"properties": {"a": True, "b": True}, "minProperties": 1}, [{"b": 1}], [{}]),
    (
        {"properties": {"a": True}, "additionalProperties": {"type": "null"}, "minProperties": 1},
        [{"a": 1}, {"b": None}],
        [{}, {"b": 1}],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, [{"aa": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {}}, [{"b": [1]}], []),
    (
        {"type": "object", "patternProperties": {"^x+$": {"type": "integer"}}},
        [{}, {"xx": 1}],
        [{"x": "a"}, {"y": 1}],
    ),
    ({"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
    ({"type": ["number", "null"], "enum": ["a", 1, None]}, [1, None], ["a"]),
    ({"type": "string", "anyOf": [{"const": "a"}, {"type": "string", "maxLength": 1}]}, ["b"], [1]),
    ({"type": "object", "oneOf": [{"properties": {"a": True}}]}, [{"a": 1}], [{"b": 1}]),
    ({"type": "number", "$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, [1], ["a"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, [0.25, 1.5], [0, 1.75]),
    ({"type": "integer", "minLength": 3, "minimum": 7}, [7], [6, "abcd"]),
    ({"type": "string", "pattern": r"^v[0-9](\.[0-9]+)?$"}, ["v1", "v1.25"], ["v12", "v1."]),
    ({"type": "string", "pattern": "^a(b|)$|^a$"}, ["a", "ab"], ["abb", "b"]),
    (
        {"type": "string", "pattern": r'^"[^"]\\[\n\t]\n.$'},
        ['"x\\\t\n"', '"\\\\\n\né'],
        ['"x\\a\nb'],
    ),
    ({"type": "string", "pattern": r"^[^a-y\s]root_1\]$"}, ["zroot_1]", "\\root_1]"], ["aroot_1]"]),
]
"""Schemas, values that are allowed and values that are not."""


@pytest.mark.parametrize(
    ("schema", "good", "bad"), KEPT, ids=[str(schema)[:60] for schema, *_ in KEPT]
)
def test_the_grammar_of_a_schema_keeps_it(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """It is not empty either: values that a validator allows can be written."""
    constraint = Constraint.schema(schema)
    for value in (*good, *bad):
        assert follows(constraint, json.dumps(value, ensure_ascii=False)) == (value in good), value
    texts = sampled(constraint, 12)
    assert texts
    for text in texts:
        assert is_valid(json.loads(text), schema, schema), text


EXAMPLES: dict[str, tuple[str, str]] = {
    "date": ("2024-02-29", "2023-02-29"),
    "time": ("23:59:00.5Z", "23:59:60Z"),
    "date-time": ("1999-12-31T00:00:00+01:00", "1999-11-31T00:00:00Z"),
    "duration": ("P1DT2H", "1D"),
    "email": ("a.b@c-d.org", '"a b"@c.org'),
    "hostname": ("a-1.example", "-a"),
    "ipv4": ("10.0.0.255", "10.0.0.01"),
    "ipv6": ("1:2::a", "1::2::3"),
    "uri": ("http://a/b?c#d", "a b"),
    "uri-reference": ("../a", "a b"),
    "uuid": ("12345678-1234-1234-1234-123456789abc", "12345678"),
}
"""Format -> a text that has it, and one that has not."""


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_kept(name: str) -> None:
    schema = {"type": "string", "format": name}
    constraint, (good, bad) = Constraint.schema(schema), EXAMPLES[name]
    assert follows(constraint, json.dumps(good)) and not follows(constraint, json.dumps(bad))
    texts = sampled(constraint, 12, most=120)
    assert texts and all(is_valid(json.loads(text), schema, schema) for text in texts), texts


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "(("), "parenthesis"),
        (Constraint("grammar", 'root ::= "a" b'), "not defined"),
        (Constraint.schema({"type": "thing"}), "JSON schema"),
        (Constraint.schema({"type": "string", "pattern": "\ud800"}), "surrogates"),
        (Constraint("regex", "\ud800"), "surrogates"),
    ],
)
def test_what_does_not_compile_is_refused(constraint: Constraint, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        Grammars.of(structured_target()).compile(constraint)
    assert ".cc" not in str(raised.value)


def test_texts_that_are_no_constraint_are_refused() -> None:
    with pytest.raises(UserError, match="not JSON"):
        Constraint("json_schema", "{")
    with pytest.raises(UserError, match=str(LONGEST)):
        Constraint("grammar", "a" * (LONGEST + 1))
    with pytest.raises(UserError, match="word boundaries"):
        Constraint("regex", r"\bfoo")
    schema: Any = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UserError, match="levels deep"):
        Constraint.schema(schema)
    with pytest.raises(UserError, match="where there is no schema"):
        Constraint.schema({"$ref": "#/default", "default": {"not": {}}})
    chain = {f"n{step}": {"$ref": f"#/$defs/n{step + 1}"} for step in range(1500)}
    with pytest.raises(UserError, match="too many levels"):
        Constraint.schema({"type": "string", "$ref": "#/$defs/n0", "$defs": chain})
    with pytest.raises(UserError, match="wrong type or size"):
        Constraint("json_schema", '{"type": "number", "minimum": 1e999}')


def test_a_file_says_by_its_ending_what_it_holds(tmp_path: Path) -> None:
    for name, content in (("a.json", json.dumps(PERSON)), ("a.regex", "[ab]\n"), ("a.ebnf", "x")):
        (tmp_path / name).write_text(content)
    kinds = {"a.json": "json_schema", "a.regex": "regex", "a.ebnf": "grammar"}
    for name, kind in kinds.items():
        found = Constraint.read(str(tmp_path / name))
        assert found is not None and found.kind == kind
    assert found == Constraint("grammar", "x") and Constraint.read("") is None
    assert Constraint.read("json") == Constraint.json_object()
    (tmp_path / "bad.json").write_text("{")
    for structure, words in (("a.txt", "must be 'json'"), (str(tmp_path / "b.json"), "b.json")):
        with pytest.raises(UserError, match=words):
            Constraint.read(structure)
    with pytest.raises(UserError, match=r"bad\.json"):
        Engine(structured_target(), None, DecodeConfig(structure=str(tmp_path / "bad.json")))


def test_what_does_not_go_with_a_grammar_is_refused() -> None:
    target, (request,) = structured_target(), asked(["choice"])
    engine = Engine(target, None, DecodeConfig(shape="none"))
    endless = replace(request, ignore_eos=True)
    with pytest.raises(UserError, match="ignore_eos"):
        list(engine.run([endless]))
    with Session(engine, 64) as session, pytest.raises(UserError, match="ignore_eos"):
        session.add(endless)
    wordless = Engine(target, None, DecodeConfig(shape="none", bad_words=((7,),)))
    with pytest.raises(UserError, match="bad_words"):
        list(wordless.run([request]))


def test_without_xgrammar_a_constraint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = asked(["choice"])
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(grammars, "_known", type(grammars._known)())
    engine = Engine(structured_target(), None, DecodeConfig(shape="none"))
    with pytest.raises(UserError, match="its extra `structured`"):
        list(engine.run([request]))
    (done,) = engine.run([replace(request, constraint=None)])
    assert done.tokens


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Grammars(structured_target())
    monkeypatch.setattr(grammars, "MOST_KEPT", 2)
    one, two, three = (Constraint("regex", text) for text in "abc")
    first = own.compile(one)
    assert own.compile(two) is not first and own.compile(one) is first
    own.compile(three)  # `two` is the one used longest ago
    assert own.compile(one) is first and two not in own._compiled


def test_a_grammar_in_an_unknown_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = grammars._xgrammar().Grammar

    class Printed:
        """xgrammar's grammars, printed as another version might."""

        @staticmethod
        def from_json_schema(*given: Any, **options: Any) -> str:
            return str(own.from_json_schema(*given, **options)).replace("Regex(", "Pattern(")

    monkeypatch.setattr(grammars, "_xgrammar", lambda: SimpleNamespace(Grammar=Printed))
    schema = json.dumps({"type": "string", "pattern": "a+"})
    with pytest.raises(UserError, match=r"this version of xgrammar .* Install xgrammar==0\.2\.8"):
        grammars._json_grammar(Constraint("json_schema", schema))
