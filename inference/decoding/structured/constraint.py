"""Constraints on an answer, given by a request or a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heads.api.errors import UserError
from heads.api.reading import read_text
from inference.decoding.structured.keywords import check_pattern, check_schema

LONGEST = 65_536
"""Most characters of a schema, an expression or a grammar."""
ANY_OBJECT = "json"
"""The value of `decode.structure` for any JSON object."""
SUFFIXES = {".json": "json_schema", ".regex": "regex", ".ebnf": "grammar"}


@dataclass(frozen=True)
class Constraint:
    """What an answer must follow from its first token to its end.

    kind: json_schema, regex (the whole answer matches) or grammar (EBNF as xgrammar reads it, with
    root as its first rule). text: the schema as JSON, the expression, or the grammar.
    any_whitespace: JSON may be laid out freely; otherwise it is on one line, as `json.dumps` writes
    it, so that more tokens are forced and `jump_forward` can draft them. Raises `UserError` for
    texts that are too long, and for schemas with keywords that cannot be kept.
    """

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    any_whitespace: bool = False

    def __post_init__(self) -> None:
        if len(self.text) > LONGEST:
            raise UserError(
                f"a schema, expression or grammar may have {LONGEST} characters; given: "
                f"{len(self.text)}."
            )
        if self.kind == "json_schema":
            check_schema(self.text)
        elif self.kind == "regex":
            check_pattern(self.text)

    @classmethod
    def schema(cls, schema: Any, any_whitespace: bool = False) -> Constraint:
        """A JSON schema given as a Python value (a mapping, or True)."""
        return cls("json_schema", json.dumps(schema), any_whitespace)

    @classmethod
    def json_object(cls, any_whitespace: bool = False) -> Constraint:
        """Any JSON object."""
        return cls.schema({"type": "object"}, any_whitespace)

    @classmethod
    def choice(cls, options: list[str]) -> Constraint:
        """One of these texts."""
        # without escapes, of which a character beyond U+FFFF has two
        texts = [json.dumps(option, ensure_ascii=False) for option in options]
        return cls("grammar", "root ::= " + " | ".join(texts))

    @classmethod
    def read(cls, structure: str) -> Constraint | None:
        """The constraint that `decode.structure` names; None if it is empty. Raises `UserError` for
        invalid values."""
        if not structure:
            return None
        if structure == ANY_OBJECT:
            return cls.json_object()
        path = Path(structure).expanduser()
        kind = SUFFIXES.get(path.suffix)
        if kind is None:
            raise UserError(
                f"decode.structure must be '{ANY_OBJECT}' (any JSON object) or a file: .json (a "
                f"JSON schema), .regex (a regular expression), .ebnf (a grammar); given: "
                f"'{structure}'."
            )
        text = read_text(path, "Give a text file.", 4 * LONGEST)
        try:
            return cls(kind, text.rstrip("\n"))  # type: ignore[arg-type]
        except UserError as error:
            raise UserError(f"decode.structure '{structure}': {error}") from error
