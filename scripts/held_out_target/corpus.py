"""Operator declarations that come with torch, turned into conversations: text that the embedded target never saw.

The embedded target reads Python files and prose. These are C++ headers, generated from operator schemas, so that a small model
learns them in minutes where hand-written C++ takes it hours. Four ways to ask: `inline` (a schema, then the functions that call
it), `operator` (a schema, then its struct), `native` (a name, then the native functions of it) and `schema` (a function, then its
schema). Operators are split by name: group A gives prompts for training drafters, group B for measuring.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.tiny_target.groups import Group

MIN_ANSWER, MAX_ANSWER, MAX_ASKED = 60, 560, 400
DOMAINS = ("inline", "operator", "native", "schema")
ASKED = {
    "inline": "Inline functions of {asked}",
    "operator": "Operator struct of {asked}",
    "native": "Native functions of {asked}",
    "schema": "Schema of\n{asked}",
}
INLINE = re.compile(r"^// aten::(.+)\n((?:inline .+ \{\n(?: .*\n)+\}\n)+)", re.M)
STRUCT = re.compile(r"^struct TORCH_API \w+ \{\n.*?^\};\n", re.M | re.S)
SCHEMA = re.compile(r'schema_str = "(.+)";')
UNTOLD = re.compile(r"^ +(//.*|using ptr_schema.*|static constexpr const char\* (schema_str|name).*)\n", re.M)
Row = dict[str, str]
"""`domain`, `source`, `asked` (the user's message) and `answer`."""


@dataclass(frozen=True)
class Operator:
    """One operator: `name`, its `group`, and the `text` of its headers without what all of them share."""

    name: str
    group: Group
    text: str
    rows: tuple[tuple[str, str, str], ...]


def operators(root: Path | None = None) -> list[Operator]:
    """Return the operators of the installed torch, by name; `root`: another folder of such headers."""
    if root is None:
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None, "torch is a dependency"
        root = Path(spec.origin).parent / "include" / "ATen" / "ops"
    found = []
    for file in sorted(root.glob("*_native.h")):
        name = file.name.removesuffix("_native.h")
        parts = [file.with_name(name + ending) for ending in (".h", "_ops.h", "_native.h")]
        function, struct, native = (part.read_text(encoding="utf-8") if part.is_file() else "" for part in parts)
        rows = (*_inline(function), *_structs(struct), *_natives(name, native))
        if rows:
            found.append(Operator(name, group_of(name), "\n".join(answer for _, _, answer in rows), rows))
    return found


def group_of(name: str) -> Group:
    """Return the group of an operator: a quarter A, an eighth B, by the hash of its first word, so that `conv_tbc` and
    `conv_tbc_backward` stay together.
    """
    stem = next((word for word in name.lower().split("_") if len(word) > 1), name)
    bucket = hashlib.sha256(stem.encode()).digest()[0] % 8
    return "A" if bucket < 2 else "B" if bucket == 2 else "train"


def rows_of(operator: Operator) -> list[Row]:
    """Return what can be asked about one operator; equal answers once."""
    seen: set[str] = set()
    rows = []
    for domain, asked, answer in operator.rows:
        if MIN_ANSWER <= len(answer) <= MAX_ANSWER and len(asked) <= MAX_ASKED and answer not in seen:
            seen.add(answer)
            rows.append(
                {"domain": domain, "source": operator.name, "asked": ASKED[domain].format(asked=asked), "answer": answer}
            )
    return rows


def _inline(text: str) -> Iterator[tuple[str, str, str]]:
    for schema, functions in INLINE.findall(text):
        # One of the two, so that a question never holds another question's answer.
        if hashlib.sha256(functions.encode()).digest()[0] % 3:
            yield "inline", schema, functions.rstrip()
        else:
            yield "schema", functions.rstrip().partition(" {\n")[0], f"// aten::{schema}"


def _structs(text: str) -> Iterator[tuple[str, str, str]]:
    for struct in STRUCT.findall(text):
        schema = SCHEMA.search(struct)
        if schema:
            yield "operator", schema.group(1), UNTOLD.sub("", struct).rstrip()


def _natives(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    lines = [line for line in text.split("\n") if line.startswith("TORCH_API ")]
    if lines:
        yield "native", name, "\n".join(lines)[:MAX_ANSWER].rpartition(";")[0] + ";"
