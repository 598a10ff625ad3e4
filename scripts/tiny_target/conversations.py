"""Turns documents into question-answer pairs: `code` and `explain` from Python sources by `ast`, `reference` from prose.

Nothing is executed: sources are only parsed. Lengths are limited in characters here (about 3 characters to a token) and in tokens
where the conversations are encoded.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import warnings
from collections.abc import Iterator

from scripts.tiny_target.corpus import Document
from scripts.tiny_target.phrasing import Pair
from scripts.tiny_target.sections import reference_pairs, trim

MAX_SHOWN = 620
MIN_ANSWER = 60
MAX_ANSWER = 1250
Function = ast.FunctionDef | ast.AsyncFunctionDef


def pairs_of(document: Document) -> list[Pair]:
    """Return every pair that one document gives, in the order of the text; none for a file that does not parse."""
    if document.kind == "prose":
        return list(reference_pairs(document))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    where = module_name(document)
    pairs = list(_module_pair(document, tree, where))
    lines = document.text.split("\n")
    for qualified, node, owner in _definitions(tree.body, "", None):
        if isinstance(node, ast.ClassDef):
            pairs += _explain(document, where, qualified, _class_line(node, lines), node)
        elif not node.name.startswith("test"):
            header = _signature(node, lines)
            pairs += _explain(document, where, qualified, header, node)
            pairs += _code(document, where, qualified, node, owner, lines)
    return pairs


def module_name(document: Document) -> str:
    """Return the dotted module name that a user would write for a Python file."""
    path = re.sub(r"^(src|lib)/", "", document.path)
    path = re.sub(r"(/__init__)?\.py$", "", path)
    return path.replace("/", ".")


def _definitions(
    body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None
) -> Iterator[tuple[str, Function | ast.ClassDef, ast.ClassDef | None]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node, owner
            yield from _definitions(node.body, f"{prefix}{node.name}.", node)
        elif isinstance(node, Function):
            yield prefix + node.name, node, owner


def _docstring(node: Function | ast.ClassDef | ast.Module) -> str:
    try:
        return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    except (AttributeError, ValueError):
        return ""


def _without_indent(lines: list[str], indent: int) -> str:
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines).rstrip()


def _signature(node: Function, lines: list[str]) -> str:
    """Return the source from `def` to its colon, dedented; the body's first statement may share the last line."""
    end = node.body[0].lineno - 1
    if end < node.lineno:
        return _without_indent(lines[node.lineno - 1 : node.lineno], node.col_offset)
    taken = lines[node.lineno - 1 : end]
    while taken and not taken[-1].rstrip().endswith(":"):
        taken = taken[:-1]  # comments and blank lines between the signature and the first statement
    return _without_indent(taken, node.col_offset)


def _class_line(node: ast.ClassDef, lines: list[str]) -> str:
    head = _without_indent(lines[node.lineno - 1 : node.lineno], node.col_offset)
    inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return f"{head}\n{textwrap.indent(_signature(inits[0], lines), '    ')}" if inits else head


def _explain(
    document: Document, where: str, name: str, shown: str, node: Function | ast.ClassDef
) -> Iterator[Pair]:
    answer = trim(_docstring(node), MAX_ANSWER)
    if len(answer) >= MIN_ANSWER and 0 < len(shown) <= MAX_SHOWN:
        yield Pair("explain", document.name, where, name, shown, answer)


def _code(
    document: Document, where: str, name: str, node: Function, owner: ast.ClassDef | None, lines: list[str]
) -> Iterator[Pair]:
    doc = _docstring(node)
    body = node.body[1:] if doc else node.body
    signature = _signature(node, lines)
    first_line = (node.body[0].end_lineno or 0) if doc else node.lineno + signature.count("\n")
    if not body or not signature.endswith(":") or body[0].lineno <= first_line:
        return
    answer = textwrap.dedent("\n".join(lines[first_line : node.end_lineno])).strip("\n")
    if not MIN_ANSWER <= len(answer) <= MAX_ANSWER or answer.startswith((" ", "raise NotImplementedError")):
        return
    shown = signature
    if doc:
        short = trim(doc, MAX_SHOWN - len(signature))
        shown += "\n" + textwrap.indent(f'"""{short}\n"""' if "\n" in short else f'"""{short}"""', "    ")
    if owner is not None:
        shown = f"class {owner.name}:\n{textwrap.indent(shown, '    ')}"
    if len(shown) <= MAX_SHOWN + 120:
        yield Pair("code", document.name, where, name, shown, answer)


def _module_pair(document: Document, tree: ast.Module, where: str) -> Iterator[Pair]:
    answer = trim(_docstring(tree), MAX_ANSWER)
    if len(answer) >= MIN_ANSWER + 40 and "test" not in document.path.lower():
        yield Pair("reference", document.name, document.source, f"the module {where}", "", answer)
