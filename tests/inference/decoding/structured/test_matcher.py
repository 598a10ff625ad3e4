"""The masks of a draft's nodes are those of grammars that were led to each node alone, and what is
forced is what must follow."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from inference.decoding.rules.accept import children_lists
from inference.decoding.structured.constraint import Constraint
from inference.decoding.structured.grammars import Grammars, token_texts
from inference.decoding.structured.matcher import allows
from inference.decoding.structured.rows import forbid
from tests.inference.decoding.structured.parts import CONSTRAINTS, END, structured_target

VOCAB = 4096
WORDS = VOCAB // 32


def grammars() -> Grammars:
    return Grammars.of(structured_target())


def mask_after(constraint: Constraint, tokens: list[int]) -> torch.Tensor | None:
    """The slow way: a fresh grammar, token by token; None where it does not allow one, and behind
    the end."""
    if END in tokens:
        return None
    matcher = grammars().matcher(constraint)
    words = torch.zeros(1, WORDS, dtype=torch.int32)
    for token in tokens:
        matcher.masks(words, [0], [[]])
        if not allows(words[0], token):
            return None
        matcher.accept([token])
    matcher.masks(words, [0], [[]])
    return words[0]


def draft(
    constraint: Constraint, begun: list[int], draw: random.Random, nodes: int
) -> tuple[list[int], list[int]]:
    """A random tree behind `begun`: parents, and tokens of which most are allowed where they
    stand."""
    parents, tokens = [0], [0]
    paths: list[list[int]] = [[]]
    for _ in range(1, nodes):
        parent = draw.randrange(len(parents))
        after = mask_after(constraint, [*begun, *paths[parent]])
        token = draw.randrange(6, VOCAB)
        if after is not None and draw.random() < 0.8:
            token = draw.choice([t for t in range(VOCAB) if allows(after, t)])
        parents.append(parent)
        tokens.append(token)
        paths.append([*paths[parent], token])
    return parents, tokens


@pytest.mark.parametrize("name", ["schema", "regex", "grammar", "choice"])
def test_masks_of_a_tree_are_those_of_each_path_alone(name: str) -> None:
    constraint, draw = CONSTRAINTS[name][0], random.Random(3)
    matcher, checked = grammars().matcher(constraint), 0
    begun: list[int] = []
    for _ in range(5):
        parents, tokens = draft(constraint, begun, draw, 9)
        words = torch.zeros(9, WORDS, dtype=torch.int32)
        matcher.masks(words, tokens, children_lists(parents))
        for node in range(9):
            path: list[int] = []
            above = node
            while above:
                path.insert(0, tokens[above])
                above = parents[above]
            expected = mask_after(constraint, [*begun, *path])
            checked += expected is not None
            wanted = torch.full((WORDS,), -1, dtype=torch.int32) if expected is None else expected
            assert torch.equal(words[node], wanted)
        follow = mask_after(constraint, begun)
        assert follow is not None
        token = draw.choice([t for t in range(VOCAB) if allows(follow, t)])
        if token == END:
            break
        matcher.accept([token])
        begun.append(token)
    assert checked > 5


def test_the_end_is_allowed_where_the_grammar_accepts_and_nowhere_else() -> None:
    texts = token_texts(structured_target())
    digit = {text: token for token, text in enumerate(texts)}[b"1"]
    constraint = Constraint("regex", "1{2,3}")
    ends = [mask_after(constraint, [digit] * count) for count in range(4)]
    assert [allows(mask, END) for mask in ends if mask is not None] == [False, False, True, True]
    last = ends[3]
    assert last is not None
    assert [t for t in range(VOCAB) if allows(last, t)] == [END]


def test_special_tokens_are_no_text() -> None:
    mask = mask_after(Constraint("regex", ".*"), [])
    assert mask is not None
    special = structured_target().tokenizer.all_special_ids
    assert [token for token in special if allows(mask, token)] == [END]


def test_strings_of_json_hold_no_control_characters() -> None:
    """xgrammar lets them into strings of bounded length."""
    texts = token_texts(structured_target())
    quote = {text: token for token, text in enumerate(texts)}[b'"']
    short = Constraint.schema({"type": "string", "maxLength": 5})
    mask = mask_after(short, [quote])
    assert mask is not None
    assert not [t for t in range(VOCAB) if allows(mask, t) and min(texts[t], default=32) < 32]


def test_forced_tokens_spell_what_must_follow() -> None:
    texts = token_texts(structured_target())
    constraint = CONSTRAINTS["schema"][0]
    matcher = grammars().matcher(constraint)
    found = matcher.forced(32)
    assert b"".join(texts[token] for token in found) == b'{"name": "'
    assert mask_after(constraint, found) is not None
    assert matcher.forced(1) == found[:1]
    matcher.accept(found)
    assert matcher.forced(32) == []


def test_forced_text_may_end_within_a_character() -> None:
    texts = token_texts(structured_target())
    options = ["да", "нет"]  # of which the first bytes are one
    found = grammars().matcher(Constraint.choice(options)).forced(8)
    assert b"".join(texts[token] for token in found) == options[0].encode()[:1]


def test_masks_take_only_what_they_forbid() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.randn(2, 3, 70, generator=generator).to(dtype)
        words = torch.full((2, 3, 3), -1, dtype=torch.int32)
        assert torch.equal(forbid(logits, words), logits)
        words[1, 2] = torch.tensor([1, -(1 << 31), 4], dtype=torch.int32)
        found = forbid(logits, words)
        assert found.dtype == dtype and torch.equal(found[0], logits[0])
        kept = (found[1, 2] > float("-inf")).nonzero().flatten().tolist()
        assert kept == [0, 63, 66]


def test_a_token_that_the_grammar_forbids_is_an_error() -> None:
    matcher: Any = grammars().matcher(CONSTRAINTS["choice"][0])
    with pytest.raises(Exception, match="does not allow"):
        matcher.accept([4000])
