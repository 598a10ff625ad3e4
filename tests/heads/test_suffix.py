"""Suffix lookup against a trie in Python dicts: match length, counts, drafts and confidences; and
what is remembered between requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.drafter import Proposal, forget
from heads.api.errors import UserError
from heads.api.state import read_rows, write_rows
from heads.api.tree import DraftShape, DynamicShape, TokenTree
from heads.cascade import Config as CascadeConfig
from heads.ngram import Config as LookupConfig
from heads.ngram import Drafter as Lookup
from heads.suffix import Config, Drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.placement import PlacedDrafter
from inference.decoding.requests import Request
from tests.heads.micro import PlainNoise, micro_target
from tests.heads.test_ngram import run
from tests.models import VOCAB, random_target

TREE = TokenTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SHAPES: dict[str, DraftShape] = {
    "chain": TokenTree.chain(4),
    "tree": TREE,
    "dynamic": DynamicShape(9, 3, 3),
    "wide": DynamicShape(12, 2, 6),
}


def new(**settings: Any) -> Drafter:
    return Drafter(Config(**settings), micro_target().info)


# The slow and obvious one


class Trie:
    """Nested dicts: the continuations of the occurrences, each node with its weight and the best
    occurrence through it."""

    def __init__(self) -> None:
        self.weight, self.first, self.children = 0.0, 1 << 60, dict[int, Trie]()

    def add(self, path: list[int], weight: float, number: int) -> None:
        self.weight += weight
        self.first = min(self.first, number)
        if path:
            self.children.setdefault(path[0], Trie()).add(path[1:], weight, number)

    def ranked(self, total: float, config: Config) -> list[tuple[int, Trie]]:
        alive = [
            item
            for item in self.children.items()
            if item[1].weight >= config.min_probability * total
        ]
        return sorted(alive, key=lambda item: (-item[1].weight, item[1].first))


def match_length(text: Sequence[int | None], end: int, newest: list[int], most: int) -> int:
    """How many tokens up to and including text[end] equal the last of `newest`."""
    count = 0
    while count < min(most, len(newest), end + 1) and text[end - count] == newest[-1 - count]:
        count += 1
    return count


class Ring:
    """Everything a row wrote, in order, None between answers; `written` of it belong to the present
    answer."""

    def __init__(self, slots: int) -> None:
        self.slots, self.tokens, self.written = slots, list[int | None](), 0

    def write(self, before: list[int], tokens: list[int], context: int) -> None:
        """An answer's tokens; the first ones come with a gap and the `context` tokens before
        them."""
        if self.written == 0:
            lead = [None] * context + before
            tokens = [None, *lead[len(lead) - context :], *tokens]  # type: ignore[list-item]
        self.tokens = (self.tokens + tokens)[-(self.slots - 1) :]
        self.written += len(tokens)


def slow_trie(
    config: Config, text: list[int], rings: list[Ring], row: int, depth: int
) -> tuple[int, Trie]:
    """The longest match and the trie of what followed."""
    found: list[tuple[int, tuple[int, ...], list[int]]] = []
    last = len(text) - 1
    for end in range(last):
        follows = [text[end + 1 + k % (last - end)] for k in range(depth)]
        found.append((match_length(text, end, text, config.max_n), (0, -end), follows))
    for number, ring in enumerate(rings):
        for end, token in enumerate(
            ring.tokens[: len(ring.tokens) - (ring.written if number == row else 0)]
        ):
            answer = ring.tokens[end + 1 :]
            answer = answer[: answer.index(None)] if None in answer else answer
            if token is not None and answer:
                place = (1, len(ring.tokens) - end, -number)
                length = match_length(ring.tokens, end, text, config.max_n)
                found.append((length, place, answer[:depth]))  # type: ignore[arg-type]
    found = sorted((f for f in found if f[0] >= config.min_n), key=lambda f: (-f[0], f[1]))[
        : config.occurrences
    ]
    longest = found[0][0] if found else 0
    trie = Trie()
    for number, (length, _, follows) in enumerate(found):
        weight = config.backoff ** (longest - length)
        if weight:
            trie.add(follows, weight, number)
    return longest, trie


Drafts = dict[tuple[int, ...], float]
"""Paths of drafted tokens behind the root, each with its share of the parent's weight."""


def slow_drafts(trie: Trie, shape: DraftShape, config: Config, longest: int) -> Drafts:
    """What the definition drafts in a shape."""
    deepest = shape.max_depth
    if config.per_match:
        deepest = min(deepest, int(longest * config.per_match))
    found: Drafts = {}
    if isinstance(shape, DynamicShape):
        ready: list[tuple[float, int, int, tuple[int, ...], Trie, float]] = []

        def offer(node: Trie, path: tuple[int, ...]) -> None:
            for token, child in node.ranked(trie.weight, config) if len(path) < deepest else ():
                share = child.weight / node.weight
                ready.append((-child.weight, len(path), child.first, (*path, token), child, share))

        offer(trie, ())
        while ready and len(found) < shape.nodes - 1:
            best = min(ready, key=lambda item: item[:3])
            ready.remove(best)
            found[best[3]] = best[5]
            offer(best[4], best[3])
        return found
    nodes: dict[int, tuple[tuple[int, ...], Trie]] = {0: ((), trie)}
    taken: dict[int, int] = {}
    for node in range(1, shape.num_nodes):
        parent = int(shape.parents[0, node])
        rank = taken[parent] = taken.get(parent, -1) + 1
        if parent not in nodes or len(nodes[parent][0]) >= deepest:
            continue
        path, above = nodes[parent]
        children = above.ranked(trie.weight, config)
        if rank < len(children):
            token, child = children[rank]
            nodes[node] = (*path, token), child
            found[*path, token] = child.weight / above.weight
    return found


def drafts(proposal: Proposal, row: int) -> Drafts:
    """What a proposal drafts in a row; nodes without confidence are dead and must repeat the
    root."""
    assert proposal.confidence is not None and proposal.limit is not None
    tree, found = proposal.tree, Drafts()
    parents = tree.parents.expand(proposal.tokens.shape[0], -1)[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[parents[node]], int(proposal.tokens[row, node])))
        share = float(proposal.confidence[row, node])
        if share > 0:
            assert paths[node] not in found, "the same path twice"
            found[paths[node]] = share
        else:
            assert proposal.tokens[row, node] == proposal.tokens[row, 0]
    assert int(proposal.limit[row]) == max((len(path) for path in found), default=0)
    return found


# What is found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_n": 2, "min_probability": 0.0},
        {"min_n": 2, "min_probability": 0.5},
        {"occurrences": 3},
        {"per_match": 0.5, "min_probability": 0.3},
        {"backoff": 0.5, "min_probability": 0.05},
        {"backoff": 1.0, "occurrences": 7},
        {"history_tokens": 20, "min_probability": 0.0},
        {"history_tokens": 0},
    ],
    ids=str,
)
def test_lookup_equals_the_trie_over_a_growing_ragged_batch(
    shape: str, settings: dict[str, Any]
) -> None:
    """Three rows write answers and are refilled on the way; everything drafted is checked at every
    step."""
    generator = torch.Generator().manual_seed(5)

    def random(length: int) -> list[int]:
        return torch.randint(0, 3, (length,), generator=generator).tolist()

    context, draft = 2, SHAPES[shape]
    drafter = new(**{"context": context, "history_tokens": 200, **settings})
    budget = drafter.config.history_tokens
    texts = [random(length) for length in (4, 9, 13)]
    rings = [Ring(budget) for _ in texts]
    state = drafter.start(run(texts, [0, 0, 0]), draft, capacity=64)
    checked = 0
    for step in range(16):
        proposal = drafter.propose(state, PlainNoise())
        for row, text in enumerate(texts):
            longest, trie = slow_trie(
                drafter.config, text, rings if budget else [], row, draft.max_depth
            )
            expected = slow_drafts(trie, draft, drafter.config, longest)
            assert drafts(proposal, row) == pytest.approx(expected), (step, row)
            checked += len(expected)
        grown = [random(1 + row) for row in range(3)]
        runs = [t[-1:] + g for t, g in zip(texts, grown, strict=True)]
        state = drafter.commit(state, run(runs, [len(t) - 1 for t in texts]))
        for text, ring, tokens in zip(texts, rings, runs, strict=True):
            ring.write(text[:-1], tokens[:-1], context)
        texts = [t + g for t, g in zip(texts, grown, strict=True)]
        if step in (4, 7, 9):
            row = {4: 2, 7: 1, 9: 0}[step]
            texts[row], rings[row].written = random(2 + step % 4), 0
            fresh = drafter.start(run([texts[row]], [0]), draft, capacity=64)
            write_rows(state, torch.tensor([row]), fresh)
    assert checked > 25


def test_a_row_that_has_ended_is_written_once() -> None:
    """Rows that wait for a refill tell their root again at every step."""
    drafter = new(context=0)
    state = drafter.start(run([[5, 6, 7], [5, 6, 7]], [0, 0]), TokenTree.chain(2), capacity=32)
    drafter.commit(state, run([[7, 8, 9], [7, 8, 9]], [2, 2]))
    for _ in range(3):
        drafter.commit(state, run([[9, 4], [9, 4]], [4, 4]))
    assert state.archive is not None
    assert state.archive.ring[:, :5].tolist() == [[-2, 7, 8, 9, -2]] * 2


def test_a_row_that_was_moved_begins_again_in_its_new_ring() -> None:
    drafter = new(context=0)
    state = drafter.start(run([[5, 6, 7], [1, 2, 3]], [0, 0]), TokenTree.chain(2), capacity=32)
    drafter.commit(state, run([[7, 8, 9], [3, 11, 12]], [2, 2]))
    write_rows(state, torch.tensor([0]), read_rows(state, torch.tensor([1])))
    assert state.writing.written.tolist() == [0, 3]  # what ring 0 holds is another answer
    drafter.commit(state, run([[12, 13, 14], [12, 13, 14]], [4, 4]))
    assert state.archive is not None
    found = state.archive.ring.tolist()
    assert found[0][:7] == [-2, 7, 8, -2, 12, 13, -2]
    assert found[1][:6] == [-2, 3, 11, 12, 13, -2]
    assert state.writing.written.tolist() == [3, 5]


def test_the_most_frequent_continuation_wins_and_the_share_is_its_confidence() -> None:
    text = [1, 2, 9, 1, 2, 8, 1, 2, 9, 1, 2, 8, 1, 2, 9, 5, 1, 2]
    drafter = new(max_n=2)
    proposal = drafter.propose(drafter.start(run([text], [0]), TREE, capacity=32), PlainNoise())
    assert proposal.confidence is not None
    assert proposal.tokens.tolist() == [[2, 9, 8, 1, 5, 1, 2]]
    assert proposal.confidence.tolist() == [pytest.approx([1, 3 / 5, 2 / 5, 2 / 3, 1 / 3, 1, 1])]


def test_a_draft_ends_where_its_path_becomes_rare() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2, 3, 6, 1]
    limits = []
    for least in (0.0, 0.5, 0.8):
        drafter = new(min_probability=least)
        proposal = drafter.propose(
            drafter.start(run([text], [0]), TokenTree.chain(4), 32), PlainNoise()
        )
        assert proposal.limit is not None
        limits.append(int(proposal.limit[0]))
    # 2 followed always, 3 three times of four, what came then once each
    assert limits == [4, 2, 1]


def test_without_memory_a_batch_and_its_refills_draft_what_single_rows_draft() -> None:
    target, requests = random_target(), repeated(2)
    drafter = Drafter(Config(history_tokens=0), target.info)
    found = [
        {
            c.request.index: c.passes
            for c in Engine(target, drafter, DecodeConfig(batch_size=size)).run(requests)
        }
        for size in (1, 3)
    ]
    assert found[0] == found[1]


# Across requests


def tau(drafter: Any, target: Any, requests: list[Request], **settings: Any) -> float:
    engine = Engine(target, drafter, DecodeConfig(depth=4, **settings))
    plain = {c.request.index: c.tokens for c in Engine(target, None, engine.decode).run(requests)}
    passes = []
    for completion in engine.run(requests):
        assert completion.tokens == plain[completion.request.index]
        passes += completion.passes
    return sum(item.committed for item in passes) / len(passes)


def repeated(copies: int) -> list[Request]:
    """Traffic that comes again: few prompts, each asked several times, with one seed each."""
    generator = torch.Generator().manual_seed(9)
    prompts = [tuple(torch.randint(3, VOCAB, (6,), generator=generator).tolist()) for _ in range(4)]
    return [Request(i, prompts[i % 4], seed=i % 4, max_new_tokens=24) for i in range(4 * copies)]


@pytest.mark.parametrize(("batch_size", "temperature"), [(1, 0.0), (3, 1.0)])
def test_repeated_traffic_is_drafted_from_earlier_answers(
    batch_size: int, temperature: float
) -> None:
    target, requests = random_target(), repeated(3)
    settings: dict[str, Any] = {"batch_size": batch_size, "temperature": temperature}
    shared = tau(Drafter(Config(), target.info), target, requests, **settings)
    alone = tau(Drafter(Config(history_tokens=0), target.info), target, requests, **settings)
    lookup = tau(Lookup(LookupConfig(), target.info), target, requests, **settings)
    assert alone > lookup - 0.1
    assert shared > 1.5 * max(alone, lookup)


def test_a_wider_batch_takes_over_what_was_known_and_forgetting_empties_it() -> None:
    target, requests = random_target(), repeated(1)
    drafter = Drafter(Config(), target.info)
    first = tau(drafter, target, requests, batch_size=1)
    again = tau(drafter, target, requests, batch_size=4)
    assert again > 2 * first
    drafter.forget()
    assert tau(drafter, target, requests, batch_size=1) == first


@pytest.mark.parametrize(
    "place", ["in a cascade", "on another device", "in a cascade on another device"]
)
def test_forgetting_reaches_a_drafter_within_another(place: str) -> None:
    target, requests = random_target(), repeated(1)
    drafter: Any = Drafter(Config(), target.info)
    if "cascade" in place:
        config = CascadeConfig(mode="join", parts=({"kind": "suffix"}, {"kind": "ngram"}))
        drafter = new_drafter("cascade", config, target.info, target.weights, 0)
    if "device" in place:
        drafter = PlacedDrafter(drafter, torch.device("cpu"), torch.device("cpu"))
    first = tau(drafter, target, requests)
    assert tau(drafter, target, requests) > 1.2 * first
    forget(drafter)
    assert tau(drafter, target, requests) == first


def test_the_oldest_answers_go_first() -> None:
    """A ring of 40 tokens holds the last answer and not the one before it."""
    target, requests = random_target(), repeated(1)
    small, large = (
        Drafter(Config(history_tokens=tokens, context=2), target.info) for tokens in (40, 400)
    )
    for drafter in (small, large):
        tau(drafter, target, requests)
    assert tau(large, target, requests[:1]) > 2
    assert tau(small, target, requests[:1]) < 1.5
    # what `small` has just answered again is what it knows
    assert tau(small, target, requests[:1]) > 2


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_n": 3, "max_n": 2}, "min_n=3, max_n=2"),
        ({"occurrences": 0}, r"head\.occurrences must lie in \[1, 65536\]; given: 0"),
        ({"min_probability": 1.5}, r"head\.min_probability must lie in \[0, 1\]; given: 1\.5"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**settings)


def test_rings_too_small_for_a_step_are_refused() -> None:
    drafter = new(history_tokens=29)
    with pytest.raises(
        UserError,
        match=r"head\.history_tokens=29 is too small: .* 4 deep .* head\.context=8 needs 30",
    ):
        drafter.start(run([[1, 2]] * 3, [0] * 3), TokenTree.chain(4), capacity=32)
