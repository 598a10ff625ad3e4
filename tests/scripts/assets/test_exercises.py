"""Exercises: what is asked for follows from the source, and so does the answer."""

from __future__ import annotations

import ast
import json

import pytest

from scripts.assets.conversations import pairs_of
from scripts.assets.exercises import described, first_sentence, overview, rewriting
from scripts.assets.python_sources import Document

MODULE = '''"""Tools."""


def load(path, *, encoding: str = "utf-8", strict=False) -> list[str]:
    """Load the lines of a file. They keep their order.

    Args:
        path (Path): the file that is read,
            which must exist
        encoding: how its bytes are decoded
        strict (bool): whether damage is an error
    """
    return open(path, encoding=encoding).readlines()


async def fetch(url: str, timeout: float = 3.0):
    """Fetch an address and return its body."""


def _hidden():
    """Do what nobody may know about."""


class Store:
    """Keep what was loaded, by its name."""
'''
GOOGLE = """Args:
    path (Path): the file that is read, which must exist
    encoding: how its bytes are decoded
    strict (bool): whether damage is an error"""
FIELDS = """:param path: the file that is read, which must exist
:type path: Path
:param encoding: how its bytes are decoded
:param strict: whether damage is an error
:type strict: bool"""
NUMPY = """Parameters
----------
path : Path
    the file that is read, which must exist
encoding
    how its bytes are decoded
strict : bool
    whether damage is an error"""
ENDINGS = {
    "Google": "Returns:\n    it",
    "reStructuredText": ":returns: it",
    "NumPy": "Returns\n-------\nit",
}
STYLES = {"Google": GOOGLE, "reStructuredText": FIELDS, "NumPy": NUMPY}


def functions() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    body = ast.parse(MODULE).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in body if isinstance(node, kinds)}


def test_an_overview_has_the_first_sentence_of_what_is_public() -> None:
    assert overview(ast.parse(MODULE).body) == (
        "def load(path)\ndef fetch(url, timeout)\nclass Store",
        "- `load`: Load the lines of a file.\n"
        "- `fetch`: Fetch an address and return its body.\n"
        "- `Store`: Keep what was loaded, by its name.",
    )
    assert overview(ast.parse(MODULE).body[:3]) is None, "fewer than three"


@pytest.mark.parametrize(
    ("doc", "sentence"),
    [
        ("Return the sum. And more.", "Return the sum."),
        ("Return the\n    sum of all.\n\nMore.", "Return the sum of all."),
        (">>> print(1)", ""),
        ("", ""),
        ("word " * 60, ""),
    ],
)
def test_the_first_sentence_is_one_line_or_none(doc: str, sentence: str) -> None:
    assert first_sentence(doc) == sentence


@pytest.mark.parametrize("given", STYLES)
def test_parameters_are_written_in_either_other_style(given: str) -> None:
    wanted = set()
    for name in "abcdefgh":
        found = rewriting(f"Do it.\n\n{STYLES[given]}\n\n{ENDINGS[given]}", name)
        assert found is not None
        style, shown, answer = found
        assert shown == STYLES[given] and answer == STYLES[style]
        wanted.add(style)
    assert wanted == STYLES.keys() - {given}
    assert rewriting("Do it.\n\nArgs:\n    only: one", "a") is None


def test_a_signature_is_described_as_json() -> None:
    load = functions()["load"]
    texts = [text for text in (described(load, f"m{n}.load") for n in range(40)) if text]
    assert 3 <= len(texts) <= 20, "about one name in four"
    assert json.loads(texts[0]) == {
        "name": "load",
        "summary": "Load the lines of a file.",
        "parameters": [
            {"name": "path", "required": True},
            {"name": "encoding", "type": "str", "required": False, "default": "'utf-8'"},
            {"name": "strict", "required": False, "default": "False"},
        ],
        "returns": "list[str]",
    }
    fetch = functions()["fetch"]
    text = next(text for text in (described(fetch, f"m{n}.fetch") for n in range(40)) if text)
    assert json.loads(text)["async"] is True
    assert not any(described(functions()["_hidden"], f"m{n}") for n in range(40)), "no arguments"


def test_a_document_gives_all_domains_of_python_sources() -> None:
    pairs = pairs_of(Document("open", "tools.py", "python", "train", MODULE))
    found = {pair.domain for pair in pairs}
    assert {"explain", "summarise", "rewrite"} <= found
    rewrite = next(pair for pair in pairs if pair.domain == "rewrite")
    assert (
        rewrite.question() == f"Rewrite these parameters in the {rewrite.name} style.\n\n{GOOGLE}"
    )
