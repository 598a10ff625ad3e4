"""Operator declarations that come with torch, as questions and answers: text new to the embedded
target.

The embedded target was trained on Python files and prose. These texts are C++ headers, generated
from operator schemas. A small model learns them in minutes; hand-written C++ would take hours.
There are four domains: `inline` (a schema, then the functions that call it), `operator` (a schema,
then its struct), `native` (a name, then its native functions) and `schema` (a function, then its
schema). Operators are split by name: group A gives prompts for training drafters, group B prompts
for measuring.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.assets.conversations import Pair, PromptRow, choose, prompt_rows
from scripts.assets.python_sources import Group

MIN_ANSWER, MAX_ANSWER, MAX_SHOWN = 60, 560, 400
PER_OPERATOR = 12
"""Most prompts from one operator."""
DOMAINS = ("inline", "operator", "native", "schema")
INLINE = re.compile(r"^// aten::(.+)\n((?:inline .+ \{\n(?: .*\n)+\}\n)+)", re.M)
STRUCT = re.compile(r"^struct TORCH_API \w+ \{\n.*?^\};\n", re.M | re.S)
SCHEMA = re.compile(r'schema_str = "(.+)";')
LEFT_OUT = re.compile(
    r"^ +(//.*|using ptr_schema.*|static constexpr const char\* (schema_str|name).*)\n", re.M
)


@dataclass(frozen=True)
class Operator:
    """One operator: its name, its group, and everything that can be asked about it."""

    name: str
    group: Group
    found: tuple[Pair, ...]

    @property
    def text(self) -> str:
        """Return the declarations without the parts that all operators share."""
        return "\n".join(pair.answer for pair in self.found)

    @property
    def pairs(self) -> list[Pair]:
        """Return the pairs of acceptable length, with equal answers once."""
        kept: dict[str, Pair] = {}
        for pair in self.found:
            if MIN_ANSWER <= len(pair.answer) <= MAX_ANSWER and len(pair.shown) <= MAX_SHOWN:
                kept.setdefault(pair.answer, pair)
        return list(kept.values())


def operators(root: Path | None = None) -> list[Operator]:
    """Return the operators of the installed torch, by name; root: another folder of headers."""
    if root is None:
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None, "torch is a dependency"
        root = Path(spec.origin).parent / "include" / "ATen" / "ops"
    found = []
    for file in sorted(root.glob("*_native.h")):
        name = file.name.removesuffix("_native.h")
        parts = [file.with_name(name + ending) for ending in (".h", "_ops.h", "_native.h")]
        texts = [part.read_text(encoding="utf-8") if part.is_file() else "" for part in parts]
        pairs = tuple(_declarations(name, *texts))
        if pairs:
            found.append(Operator(name, group_of(name), pairs))
    return found


def group_of(name: str) -> Group:
    """Return the group of an operator: a quarter A, an eighth B, by the hash of its first word, so
    that `conv_tbc` and `conv_tbc_backward` stay together."""
    stem = next((word for word in name.lower().split("_") if len(word) > 1), name)
    bucket = hashlib.sha256(stem.encode()).digest()[0] % 8
    return "A" if bucket < 2 else "B" if bucket == 2 else "train"


def _declarations(name: str, function: str, struct: str, native: str) -> Iterator[Pair]:
    """Yield the pairs of an operator from the texts of its three headers."""

    def pair(domain: str, shown: str, answer: str) -> Pair:
        return Pair(domain, name, "", "", shown, answer)

    for schema, functions in INLINE.findall(function):
        # Only one of the two, so that a question never contains another question's answer.
        if hashlib.sha256(functions.encode()).digest()[0] % 3:
            yield pair("inline", schema, functions.rstrip())
        else:
            shown = functions.rstrip().partition(" {\n")[0]
            yield pair("schema", shown, f"// aten::{schema}")
    for found in STRUCT.findall(struct):
        if match := SCHEMA.search(found):
            yield pair("operator", match.group(1), LEFT_OUT.sub("", found).rstrip())
    lines = [line for line in native.split("\n") if line.startswith("TORCH_API ")]
    if lines:
        yield pair("native", name, "\n".join(lines)[:MAX_ANSWER].rpartition(";")[0] + ";")


def split_pairs(documents: Sequence[Operator]) -> dict[str, list[Pair]]:
    """Return the pairs by group: `train` for the target, A for drafters, B for measuring; no answer
    is in two groups."""
    pairs: dict[str, list[Pair]] = {}
    known: set[str] = set()
    for group in ("train", "A", "B"):
        found = [pair for item in documents if item.group == group for pair in item.pairs]
        pairs[group] = [pair for pair in found if pair.answer not in known]
        known |= {pair.answer for pair in found}
    return pairs


def choose_prompts(
    pairs: list[Pair], count: int, prefix: str, rng: random.Random
) -> list[PromptRow]:
    """Return `count` prompt rows, alternating between domains; raises UserError if there are too
    few."""
    queues = {domain: [pair for pair in pairs if pair.domain == domain] for domain in DOMAINS}
    for queue in queues.values():
        rng.shuffle(queue)
    return prompt_rows(choose(queues, count, PER_OPERATOR, distinct=False), prefix)


def choose_training_prompts(
    pairs: list[Pair], training: int, validation: int, prefix: str, rng: random.Random
) -> dict[str, list[PromptRow]]:
    """Return prompt rows of group A for the files `train` and `validation`."""
    mixed = choose_prompts(pairs, training + validation, prefix, rng)
    rng.shuffle(mixed)
    return {"train": mixed[validation:], "validation": mixed[:validation]}
