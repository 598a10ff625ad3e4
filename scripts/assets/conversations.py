"""Takes questions and answers from documents, phrases them as a user would, and writes files of
prompts.

`code` and `explain` come from Python sources through `ast`, `reference` from docstrings of modules
and from sections of prose, `summarise`, `rewrite` and `json` from exercises (exercises.py). Sources
are only parsed, never executed. Lengths are limited in characters here (about three to a token) and
in tokens where the conversations are encoded.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import random
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes
from scripts.assets.exercises import Function, described, docstring, overview, rewriting
from scripts.assets.python_sources import Document

Messages = list[dict[str, str]]
PromptRow = dict[str, Any]
"""`id`, `domain`, `messages`, `source`."""

DOMAINS = ("code", "explain", "reference", "summarise", "rewrite", "json")
SYSTEM = (
    "You are a helpful assistant for Python programmers.",
    "Answer questions about Python code and its documentation.",
    "You are a programming assistant. Be precise.",
)
# Each domain has a few plain phrasings: enough that a model does not memorise one sentence, few
# enough for some million parameters. The last four domains are those of C++ headers.
PHRASINGS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write the body of this function from `{where}`.\n\n{shown}",
        "Complete the following Python function:\n\n{shown}",
        "Implement `{name}`.\n\n{shown}",
    ),
    "explain": (
        "What does `{where}.{name}` do?\n\n{shown}",
        "Write the docstring of `{name}` in `{where}`.\n\n{shown}",
        "Explain `{name}` from `{where}`:\n\n{shown}",
    ),
    "reference": (
        'What does the documentation of {where} say about "{name}"?',
        'Explain "{name}" ({where}).',
        "Tell me about {name} in {where}.",
    ),
    "summarise": (
        "Summarise what `{where}` offers.\n\n{shown}",
        "Give an overview of `{where}`:\n\n{shown}",
        "List what is in `{where}`, a line each.\n\n{shown}",
    ),
    "rewrite": (
        "Rewrite these parameters in the {name} style.\n\n{shown}",
        "Turn this into {name} style:\n\n{shown}",
        "Convert to a {name} docstring.\n\n{shown}",
    ),
    "json": (
        "Describe this function as JSON.\n\n{shown}",
        "Give the signature of `{name}` as a JSON object.\n\n{shown}",
        "Return JSON with name, summary and parameters of `{where}.{name}`:\n\n{shown}",
    ),
    "inline": ("Inline functions of {shown}",),
    "operator": ("Operator struct of {shown}",),
    "native": ("Native functions of {shown}",),
    "schema": ("Schema of\n{shown}",),
}
MAX_SHOWN, MIN_ANSWER, MAX_ANSWER = 620, 60, 1250
MIN_SECTION, MAX_SECTION = 90, 1250
UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}$")
MARKDOWN = re.compile(r"^#{1,4} +(.*?)#* *$")
MARKUP = re.compile(r"[*`]+|:\w+:|\{#.*?\}|\[|\]\(.*?\)")
NOISE = re.compile(
    r"^\.\. (_[^:]*:|(index|module|currentmodule|highlight|meta|toctree|contents"
    r"|versionadded)::).*$|^(\[!\[|!\[|\.\. image::|\.\. figure::|\||<)"
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One question and its answer before phrasing.

    `module` is the file, topic or operator of its origin, `where` the user's name for that place,
    `name` the qualified name or heading, `shown` the code in the question; the last three may be
    empty.
    """

    domain: str
    module: str
    where: str
    name: str
    shown: str
    answer: str

    @property
    def source(self) -> str:
        """Return `module::name`, the origin in a prompt row."""
        return f"{self.module}::{self.name}" if self.name else self.module

    def question(self, phrasing: int = 0) -> str:
        """Return the user's message; `phrasing` counts modulo the domain's templates."""
        templates = PHRASINGS[self.domain]
        template = templates[phrasing % len(templates)]
        return template.format(where=self.where, name=self.name, shown=self.shown).strip()

    def messages(self, phrasing: int = 0) -> Messages:
        """Return question and answer as the two messages of a turn."""
        return [
            {"role": "user", "content": self.question(phrasing)},
            {"role": "assistant", "content": self.answer},
        ]


def dialogue(pairs: list[Pair], rng: random.Random) -> Messages:
    """Return a conversation with one turn for each of `pairs`; one in eight has a system
    message."""
    messages: Messages = []
    if rng.random() < 0.125:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    for pair in pairs:
        messages += pair.messages(rng.randrange(3))
    return messages


def pairs_of(document: Document) -> list[Pair]:
    """Return all pairs of a document, in the order of its text; none if it does not parse."""
    if document.kind == "prose":
        return list(_reference_pairs(document))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    path = re.sub(r"^(src|lib)/", "", document.path)
    where = re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".")
    pairs, lines = [], document.text.split("\n")
    answer = trim(docstring(tree), MAX_ANSWER)
    if len(answer) >= MIN_ANSWER + 40 and "test" not in document.path.lower():
        name = f"the module {where}"
        pairs.append(Pair("reference", document.name, document.source, name, "", answer))
    if "test" not in document.path.lower() and (found := overview(tree.body)):
        pairs += _fitting(Pair("summarise", document.name, where, "", *found))
    for name, node, owner in _definitions(tree.body, "", None):
        if isinstance(node, ast.ClassDef):
            shown = _class_line(node, lines)
        elif node.name.startswith("test"):
            continue
        else:
            shown = _signature(node, lines)
        pairs += _exercises(document.name, where, name, node, shown)
        answer = trim(docstring(node), MAX_ANSWER)
        if len(answer) >= MIN_ANSWER and 0 < len(shown) <= MAX_SHOWN:
            pairs.append(Pair("explain", document.name, where, name, shown, answer))
        if not isinstance(node, ast.ClassDef) and (found := _body(node, owner, shown, lines)):
            pairs.append(Pair("code", document.name, where, name, *found))
    return pairs


def _exercises(
    module: str, where: str, name: str, node: Function | ast.ClassDef, shown: str
) -> Iterator[Pair]:
    """Yield the exercises of one definition whose lengths fit."""
    doc = docstring(node)
    if isinstance(node, ast.ClassDef):
        if (listed := overview(node.body)) is not None:
            yield from _fitting(Pair("summarise", module, f"{where}.{name}", "", *listed))
    elif (content := described(node, name)) is not None and shown:
        yield from _fitting(Pair("json", module, where, name, shown, content))
    if (styles := rewriting(doc, f"{where}.{name}")) is not None:
        yield from _fitting(Pair("rewrite", module, where, *styles))


def _fitting(pair: Pair) -> Iterator[Pair]:
    if len(pair.shown) <= MAX_SHOWN and MIN_ANSWER <= len(pair.answer) <= MAX_ANSWER:
        yield pair


def _definitions(
    body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None
) -> Iterator[tuple[str, Function | ast.ClassDef, ast.ClassDef | None]]:
    """Yield (qualified name, definition, its class), without definitions inside functions."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node, owner
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.", node)


def _without_indent(lines: list[str], indent: int) -> str:
    return "\n".join(
        line[indent:] if not line[:indent].strip() else line for line in lines
    ).rstrip()


def _signature(node: Function, lines: list[str]) -> str:
    """Return the source from `def` to its colon."""
    taken = lines[node.lineno - 1 : max(node.lineno, node.body[0].lineno - 1)]
    if node.body[0].lineno > node.lineno:
        while taken and not taken[-1].rstrip().endswith(":"):  # remove comments and blank lines
            taken.pop()
    return _without_indent(taken, node.col_offset)


def _class_line(node: ast.ClassDef, lines: list[str]) -> str:
    """Return the first line of a class, and below it the signature of its `__init__`."""
    head = _without_indent(lines[node.lineno - 1 : node.lineno], node.col_offset)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return f"{head}\n{textwrap.indent(_signature(item, lines), '    ')}"
    return head


def _body(
    node: Function, owner: ast.ClassDef | None, signature: str, lines: list[str]
) -> tuple[str, str] | None:
    """Return (the shown code, the function's body), or None if the body is not suitable as an
    answer."""
    doc = docstring(node)
    body = node.body[1:] if doc else node.body
    first_line = (node.body[0].end_lineno or 0) if doc else node.lineno + signature.count("\n")
    if not body or not signature.endswith(":") or body[0].lineno <= first_line:
        return None
    answer = textwrap.dedent("\n".join(lines[first_line : node.end_lineno])).strip("\n")
    empty = answer.startswith((" ", "raise NotImplementedError"))
    if empty or not MIN_ANSWER <= len(answer) <= MAX_ANSWER:
        return None
    shown = signature
    if doc:
        short = trim(doc, MAX_SHOWN - len(signature))
        quoted = f'"""{short}\n"""' if "\n" in short else f'"""{short}"""'
        shown += "\n" + textwrap.indent(quoted, "    ")
    if owner is not None:
        shown = f"class {owner.name}:\n{textwrap.indent(shown, '    ')}"
    return (shown, answer) if len(shown) <= MAX_SHOWN + 120 else None


def trim(text: str, limit: int) -> str:
    """Return `text` cut to `limit` characters at a paragraph's end, "" if the first is longer."""
    text = text.strip()
    if len(text) <= limit:
        return text
    cut = text.rfind("\n\n", 0, limit + 1)
    return text[:cut].rstrip() if cut > 0 else ""


def _reference_pairs(document: Document) -> Iterator[Pair]:
    """Yield the sections of a prose document that have a real heading and enough text."""
    where = "the Python reference" if document.source == "topics" else document.source
    for heading, body in sections(document.text):
        heading = MARKUP.sub("", heading).strip().rstrip(":")
        lines = body.split("\n")
        kept = (line for line in lines if not NOISE.match(line) and not UNDERLINE.match(line))
        answer = trim(re.sub(r"\n{3,}", "\n\n", "\n".join(kept)), MAX_SECTION)
        named = 3 < len(heading) < 80 and re.match(r"[A-Za-z\"_]", heading)
        text = len(answer) >= MIN_SECTION and sum(map(str.isalpha, answer)) / len(answer) >= 0.55
        if named and text and not re.search(r"https?://\S{60,}", answer):
            yield Pair("reference", document.name, where, heading, "", answer)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, body) of a reStructuredText or Markdown text from its first heading on."""
    lines = [*text.split("\n"), ""]
    heading, body, fenced, underline = "", list[str](), False, False
    for line, below in itertools.pairwise(lines):
        if underline:
            underline = False
            continue
        fenced ^= line.startswith("```")
        title = None if fenced else MARKDOWN.match(line)
        underline = not fenced and title is None and _is_title(line, below)
        if title is None and not underline:
            body.append(line)
            continue
        if heading:
            yield heading, "\n".join(body)
        heading, body = (title.group(1) if title else line).strip(), []
    if heading:
        yield heading, "\n".join(body)


def _is_title(line: str, below: str) -> bool:
    """Return whether `below` underlines `line` as a reStructuredText title."""
    return (
        bool(UNDERLINE.match(below))
        and 2 < len(line) <= len(below) + 1
        and line[0] not in " .:=-*|+#>"
    )


# Prompt files


def is_askable(pair: Pair) -> bool:
    """Return whether a user would ask about a Python pair. It must be public and no test. A
    function whose body is asked for must have a docstring, since nothing else describes what the
    function does."""
    private = any(part.startswith("_") for part in pair.name.split("."))
    in_tests = "/test" in pair.module or "conftest" in pair.module
    return not private and not in_tests and (pair.domain != "code" or '"""' in pair.shown)


def choose(
    queues: Mapping[str, list[Pair]],
    count: int,
    per_module: int,
    used: Counter[str] | None = None,
    distinct: bool = True,
) -> list[Pair]:
    """Return `count` pairs, taken from the ends of `queues` in turn, at most `per_module` of a
    module; `used` counts these and is updated.

    distinct: no two pairs share a wording (two functions may differ only in the wording that names
    their module). Raises UserError if there are too few.
    """
    used = Counter() if used is None else used
    chosen: list[Pair] = []
    asked: set[str] = set()
    waiting = {name: list(queue) for name, queue in queues.items()}
    while waiting and len(chosen) < count:
        for name in list(waiting):
            while waiting[name]:
                pair = waiting[name].pop()
                wordings = {pair.question(number) for number in range(len(PHRASINGS[pair.domain]))}
                if used[pair.module] < per_module and not (distinct and asked & wordings):
                    used[pair.module] += 1
                    asked |= wordings
                    chosen.append(pair)
                    break
            else:
                del waiting[name]
    if len(chosen) < count:
        raise UserError(
            f"the held-out group gives {len(chosen)} prompts, {count} were asked for: ask for "
            "fewer, or prepare from more sources."
        )
    return chosen[:count]


def prompt_rows(
    pairs: Iterable[Pair], prefix: str, rng: random.Random | None = None
) -> list[PromptRow]:
    """Return the prompt rows of `pairs`, ids `prefix`-0000 and so on.

    rng: chooses one of the wordings; without it, the first is used.
    """
    return [
        {
            "id": f"{prefix}-{index:04d}",
            "domain": pair.domain,
            "messages": pair.messages(rng.randrange(3) if rng else 0)[:1],
            "source": pair.source,
        }
        for index, pair in enumerate(pairs)
    ]


def read_rows(path: Path) -> list[PromptRow]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_bytes(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
