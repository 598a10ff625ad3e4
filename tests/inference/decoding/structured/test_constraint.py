"""What a constraint may be, and what is said about others."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.session import Session
from inference.decoding.structured import grammars
from inference.decoding.structured.constraint import LONGEST, Constraint
from inference.decoding.structured.grammars import Grammars
from tests.inference.decoding.structured.parts import PERSON, asked, structured_target

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
    "quotes": {"type": "string", "pattern": '"'},
    "control characters": {"type": "string", "pattern": r"a\nb"},
    "none of its properties": {"type": "object", "required": ["a"]},
    "only '#...'": {"$ref": "http://example.com/schema"},
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


def test_a_schema_may_use_everything_that_is_kept() -> None:
    schema = {
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
    Grammars.of(structured_target()).compile(Constraint.schema(schema))


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "(("), "parenthesis"),
        (Constraint("grammar", 'root ::= "a" b'), "not defined"),
        (Constraint.schema({"type": "thing"}), "JSON schema"),
        (Constraint.schema({"$ref": "#/$defs/x"}), "JSON schema"),
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
    with pytest.raises(UserError, match=r"headstart\[structured\]"):
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
