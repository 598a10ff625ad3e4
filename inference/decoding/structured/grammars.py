"""Constraints as grammars over a target's tokens, each compiled once. Only this module imports
xgrammar, and only if there is a constraint."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from heads.api.errors import UserError
from inference.decoding.structured.constraint import Constraint
from inference.decoding.structured.matcher import Matcher
from inference.decoding.structured.patterns import string_rules
from inference.decoding.structured.rewriting import rewritten
from inference.target.model import TargetModel

KNOWN = "0.2.8"
"""The version of xgrammar by which the text of its grammars is known."""
MOST_KEPT = 256
"""Most compiled grammars that are kept; the least recently used one is dropped first."""
CONTROL = frozenset(range(0x20)) - {*b"\n\r"}
"""Bytes that JSON does not need."""
_known: WeakKeyDictionary[TargetModel, Grammars] = WeakKeyDictionary()
_lock = threading.Lock()


class Grammars:
    """The grammars of one target's requests. Threads may share it.

    Raises `UserError` if xgrammar is not installed.
    """

    def __init__(self, target: TargetModel) -> None:
        self._ends = tuple(target.eos_token_ids)
        texts = token_texts(target)
        self._tokens = {text: token for token, text in enumerate(texts) if text}
        self._text_compiler = self._compiler(texts)
        # JSON strings contain no control characters, but xgrammar allows them in strings of bounded
        # length; between values, \n and \r are enough
        self._json_compiler = self._compiler([b"" if CONTROL & {*t} else t for t in texts])
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def _compiler(self, texts: list[bytes]) -> Any:
        """A compiler for tokens with these bytes. It caches nothing, as the schemas of many clients
        would add up."""
        info = _xgrammar().TokenizerInfo(
            texts, vocab_size=len(texts), stop_token_ids=list(self._ends)
        )
        return _xgrammar().GrammarCompiler(info, max_threads=1, cache_enabled=False)

    @classmethod
    def of(cls, target: TargetModel) -> Grammars:
        """The grammars of `target`, made on first use."""
        with _lock:
            if target not in _known:
                _known[target] = cls(target)
            return _known[target]

    def compile(self, constraint: Constraint) -> Any:
        """xgrammar's compiled grammar; raises `UserError` for an invalid constraint."""
        known = self._known(constraint)
        if known is None:
            with self._compiling:  # look-ups of known grammars do not wait for this lock
                known = self._known(constraint) or self._compile(constraint)
            with self._lock:
                self._compiled[constraint] = known
                if len(self._compiled) > MOST_KEPT:
                    self._compiled.popitem(last=False)
        return known

    def _known(self, constraint: Constraint) -> Any:
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
            return self._compiled.get(constraint)

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of an answer that follows `constraint`."""
        return Matcher(
            _xgrammar().GrammarMatcher(self.compile(constraint)), self._ends, self._tokens
        )

    def _compile(self, constraint: Constraint) -> Any:
        compiler, text = self._text_compiler, constraint.text
        try:
            if constraint.kind == "regex":
                return compiler.compile_regex(text)
            if constraint.kind == "grammar":
                return compiler.compile_grammar(text)
            return self._json_compiler.compile_grammar(_json_grammar(constraint))
        except (RuntimeError, UnicodeEncodeError) as error:  # half a surrogate pair
            words = {"json_schema": "JSON schema", "regex": "regular expression"}
            what = words.get(constraint.kind, constraint.kind)
            raise UserError(f"the {what} cannot be used: {_reason(error)}") from error


def _json_grammar(constraint: Constraint) -> str:
    """The grammar of a JSON schema. Its patterns are replaced by rules that xgrammar makes of them
    alone. Raises `UserError` if xgrammar prints the patterns' places in another way: their names
    would be written in place of a text."""
    schema, names = rewritten(constraint.text)
    make = _xgrammar().Grammar
    grammar = str(make.from_json_schema(schema, any_whitespace=constraint.any_whitespace))
    for pattern, name in names.items():
        place = f'Regex("{name}", json_string=true)'
        if grammar.count(place) != len(re.findall(rf"{name}\b", grammar)):
            raise UserError(
                "this version of xgrammar writes the patterns of a schema in a form that is not "
                f"known here. Install xgrammar=={KNOWN}, or leave 'pattern' and 'format' out."
            )
        grammar = grammar.replace(place, name)
        grammar += string_rules(str(make.from_regex(pattern)), name)
    return grammar


def token_texts(target: TargetModel) -> list[bytes]:
    """The bytes of every token [V]; empty for special tokens, which are not text, and for rows of
    the LM head without a token."""
    size = target.info.vocab_size
    found: Sequence[bytes] = (
        _xgrammar().TokenizerInfo.from_huggingface(target.tokenizer, vocab_size=size).decoded_vocab
    )
    special = set(target.tokenizer.all_special_ids) | set(target.eos_token_ids)
    return [b"" if token in special else text for token, text in enumerate(found)]


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise UserError(
            "structured output needs xgrammar, which is not installed: pip install "
            "xgrammar, or install Headstart with its extra `structured`."
        ) from error
    return xgrammar


def _reason(error: Exception) -> str:
    """xgrammar's message without its place in xgrammar's sources; the error's name if it has no
    message."""
    said = str(error).strip().split(": ", 1)[-1].partition("\n")[0]
    return said or type(error).__name__
