"""Exercises whose answers follow from a definition by a rule: overviews, other styles, JSON.

`summarise` lists what a class or module offers, with the first sentence of each docstring;
`rewrite` turns the parameters of a docstring from one style into another (reStructuredText fields,
Google, NumPy); `json` describes a function's signature as a JSON object. Every answer is computed
from the source, which is parsed and never executed.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
MIN_MEMBERS, MAX_MEMBERS = 3, 9
MAX_SENTENCE = 110
JSON_SHARE = 4
"""One function in this many is described as JSON, although every function could be."""

FIELD = re.compile(r"^:(?:param|parameter|arg|argument|key)\s+(?:([^:]+?)\s+)?(\*{0,2}\w+)\s*:\s*")
FIELD_TYPE = re.compile(r"^:type\s+(\*{0,2}\w+)\s*:\s*(.*)$")
GOOGLE_ITEM = re.compile(r"^(\*{0,2}\w+)\s*(?:\(([^)]*)\))?:\s+(\S.*)$")
NUMPY_ITEM = re.compile(r"^(\*{0,2}\w+)\s*(?::\s*(.*))?$")
HEADING = re.compile(r"^(Args|Arguments|Parameters):$")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One documented parameter; `type` may be empty."""

    name: str
    type: str
    text: str


def docstring(node: Function | ast.ClassDef | ast.Module) -> str:
    """Return the docstring without its indentation, "" if there is none."""
    try:
        return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    except (AttributeError, ValueError):
        return ""


# Summaries


def overview(body: Sequence[ast.stmt]) -> tuple[str, str] | None:
    """Return (signatures, a list of their first sentences) of a body's documented public functions
    and classes; None if there are fewer than three."""
    shown, lines = [], []
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith(("_", "test")):
            continue
        sentence = first_sentence(docstring(node))
        if not sentence:
            continue
        head = f"class {node.name}" if isinstance(node, ast.ClassDef) else _call(node)
        shown.append(head)
        lines.append(f"- `{node.name}`: {sentence}")
        if len(shown) == MAX_MEMBERS:
            break
    if len(shown) < MIN_MEMBERS:
        return None
    return "\n".join(shown), "\n".join(lines)


def first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring on one line; "" if it is long or missing."""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]
    readable = sentence[:1].isalpha() and "::" not in sentence and ">>>" not in sentence
    return sentence if readable and 12 <= len(sentence) <= MAX_SENTENCE else ""


def _call(node: Function) -> str:
    arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    return f"def {node.name}({', '.join(arguments)})"


# Styles of parameters


def rewriting(doc: str, name: str) -> tuple[str, str, str] | None:
    """Return (the wanted style, the parameters as the docstring has them, the same in that style).

    name: chooses one of the two other styles reproducibly. Returns None if the docstring documents
    fewer than two parameters in a known style.
    """
    for style, read in READERS.items():
        parameters = read(doc.split("\n"))
        if len(parameters) >= 2 and all(p.text for p in parameters):
            others = [other for other in WRITERS if other != style]
            wanted = others[zlib.crc32(name.encode()) % 2]
            return wanted, WRITERS[style](parameters), WRITERS[wanted](parameters)
    return None


def _fields(lines: list[str]) -> list[Parameter]:
    """Return the parameters of `:param name:` fields."""
    found: list[Parameter] = []
    types: dict[str, str] = {}
    inside = False
    for line in lines:
        if match := FIELD.match(line):
            found.append(Parameter(match[2], match[1] or "", line[match.end() :].strip()))
            inside = True
        elif match := FIELD_TYPE.match(line):
            types[match[1]] = match[2].strip()
            inside = False
        elif inside and line.startswith(" ") and line.strip():
            last = found.pop()
            found.append(dataclasses.replace(last, text=f"{last.text} {line.strip()}".strip()))
        else:
            inside = False
    return [dataclasses.replace(p, type=p.type or types.get(p.name, "")) for p in found]


def _google(lines: list[str]) -> list[Parameter]:
    """Return the parameters below `Args:`."""
    found: list[Parameter] = []
    for line in _section(lines, lambda i: bool(HEADING.match(lines[i])), 1):
        match = GOOGLE_ITEM.match(line)
        if match:
            found.append(Parameter(match[1], match[2] or "", match[3]))
        elif line.startswith(" ") and found:
            last = found.pop()
            found.append(dataclasses.replace(last, text=f"{last.text} {line.strip()}"))
        elif line.strip():
            return []
    return found


def _numpy(lines: list[str]) -> list[Parameter]:
    """Return the parameters below an underlined `Parameters`."""

    def begins(index: int) -> bool:
        below = lines[index + 1 : index + 2]
        return lines[index] == "Parameters" and bool(below) and set(below[0]) == {"-"}

    found: list[Parameter] = []
    for line in _section(lines, begins, 2, indented=False):
        match = NUMPY_ITEM.match(line)
        if match:
            found.append(Parameter(match[1], match[2] or "", ""))
        elif line.startswith(" ") and found:
            last = found.pop()
            found.append(dataclasses.replace(last, text=f"{last.text} {line.strip()}".strip()))
        elif line.strip():
            return []
    return found


def _section(
    lines: list[str], begins: Callable[[int], bool], skip: int, indented: bool = True
) -> Iterator[str]:
    """Yield the lines of the first section that `begins`, without a common indentation; it ends
    with the next heading, or with the first line that is not indented."""
    start = next((index + skip for index in range(len(lines)) if begins(index)), len(lines))
    taken = []
    for index in range(start, len(lines)):
        line, below = lines[index], lines[index + 1] if index + 1 < len(lines) else ""
        if (indented and line and not line.startswith(" ")) or (below and set(below) == {"-"}):
            break
        taken.append(line)
    yield from textwrap.dedent("\n".join(taken)).rstrip().split("\n")


def _as_fields(parameters: list[Parameter]) -> str:
    rows = []
    for p in parameters:
        rows.append(f":param {p.name}: {p.text}")
        if p.type:
            rows.append(f":type {p.name}: {p.type}")
    return "\n".join(rows)


def _as_google(parameters: list[Parameter]) -> str:
    rows = ["Args:"]
    for p in parameters:
        rows.append(f"    {p.name} ({p.type}): {p.text}" if p.type else f"    {p.name}: {p.text}")
    return "\n".join(rows)


def _as_numpy(parameters: list[Parameter]) -> str:
    rows = ["Parameters", "----------"]
    for p in parameters:
        rows.append(f"{p.name} : {p.type}" if p.type else p.name)
        rows += textwrap.wrap(p.text, 88, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(rows)


READERS = {"reStructuredText": _fields, "Google": _google, "NumPy": _numpy}
WRITERS = {"reStructuredText": _as_fields, "Google": _as_google, "NumPy": _as_numpy}


# JSON


def described(node: Function, name: str) -> str | None:
    """Return the JSON description of a function's signature; None if it takes no arguments, and for
    three functions in four."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    if len(arguments) < 2 or zlib.crc32(name.encode()) % JSON_SHARE:
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    first = len(positional) - len(node.args.defaults)
    defaults: dict[str, ast.expr | None] = {
        argument.arg: default
        for argument, default in zip(positional[first:], node.args.defaults, strict=True)
    }
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    defaults |= {argument.arg: default for argument, default in pairs}

    def entry(argument: ast.arg) -> dict[str, object]:
        content: dict[str, object] = {"name": argument.arg}
        if argument.annotation is not None:
            content["type"] = ast.unparse(argument.annotation)
        default = defaults.get(argument.arg)
        content["required"] = default is None
        if default is not None:
            content["default"] = ast.unparse(default)
        return content

    content: dict[str, object] = {"name": name.rpartition(".")[2]}
    if sentence := first_sentence(docstring(node)):
        content["summary"] = sentence
    content["parameters"] = [entry(argument) for argument in arguments]
    if node.returns is not None:
        content["returns"] = ast.unparse(node.returns)
    if isinstance(node, ast.AsyncFunctionDef):
        content["async"] = True
    return _json(content)


def _json(content: dict[str, object]) -> str:
    """Return the object on several lines, with one parameter per line."""
    rows = []
    for key, value in content.items():
        if isinstance(value, list):
            items = ",\n".join(f"    {json.dumps(item)}" for item in value)
            rows.append(f'  "{key}": [\n{items}\n  ]')
        else:
            rows.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(rows) + "\n}"
