"""What engines take of tuned drafts: ranges of batch sizes, trees and lengths."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from inference.decoding.decode_file import Tuned, TunedRow
from inference.decoding.draft import NONE, Draft
from inference.engines.settings import (
    LENGTHS,
    N_MAX,
    P_MIN,
    TOKENS,
    engine_settings,
    greedy_drafts,
    known_least,
    length_at,
    llama_cpp_settings,
    ranges,
    vllm_settings,
)
from inference.export.check.live import Served, unused
from inference.measure.foreign.vllm_worker import ServedMode


def chain(depth: int) -> Draft:
    return Draft("chain", depth) if depth else NONE


@pytest.mark.parametrize(
    "depths", [{1: 5, 4: 3, 16: 1}, {1: 5, 8: 5, 32: 0}, {4: 2}, {1: 1, 2: 2, 3: 3}, {2: 4, 64: 1}]
)
def test_every_batch_size_has_the_length_of_the_nearest(depths: dict[int, int]) -> None:
    schedule = ranges(depths)
    assert schedule[0][0] == 1
    assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(schedule))
    rows = tuple(
        TunedRow(batch, 0.0, chain(depth), chain(depth), "match", {}, (1.0, 1.0))
        for batch, depth in depths.items()
    )
    tuned = Tuned({"id": "", "revision": ""}, {"kind": "cpu", "name": "", "threads": 1}, "", rows)
    for batch in range(1, 130):
        row = tuned.row(batch, 0.0)
        assert row is not None
        assert length_at(schedule, batch) == row.draft.depth, batch


def test_vllm_takes_lengths_and_one_where_they_are_equal() -> None:
    assert vllm_settings({1: chain(4), 16: NONE}) == {TOKENS: 4, LENGTHS: [[1, 4, 4], [5, 16, 0]]}
    assert vllm_settings({1: chain(3), 16: chain(3)}) == {TOKENS: 3}
    assert vllm_settings({1: NONE}) == {}


def test_sglang_takes_trees() -> None:
    static = Draft("tree", 2, choices=((0,), (1,), (0, 0), (0, 1), (0, 2)))
    drafts = {1: NONE, 2: static, 8: chain(1)}
    found = engine_settings(drafts, {1: NONE, 2: chain(3), 8: chain(1)}, {8: 0.5})
    assert found["sglang"] == {
        "--speculative-num-steps": 2,
        "--speculative-eagle-topk": 3,
        "--speculative-num-draft-tokens": 6,
    }
    # the best chain is longer than the tree is deep
    assert found["llama.cpp"] == {"--spec-draft-n-max": 3}
    assert found["vllm"] == {TOKENS: 3, LENGTHS: [[1, 1, 0], [2, 4, 3], [5, 8, 1]]}
    dynamic = Draft("dynamic", 5, nodes=20, width=4)
    assert engine_settings({1: dynamic}, {1: chain(2)}, {})["sglang"] == {
        "--speculative-num-steps": 5,
        "--speculative-eagle-topk": 4,
        "--speculative-num-draft-tokens": 20,
    }


def test_llama_cpp_takes_the_least_probability_of_the_length_it_takes() -> None:
    chains = {1: NONE, 2: chain(3), 8: chain(1)}
    least = known_least([(1, None), (2, 0.0), (8, 0.5)])
    assert llama_cpp_settings(chains, least) == {N_MAX: 3, P_MIN: 0.0}
    assert llama_cpp_settings({1: NONE, 8: chain(1)}, least) == {N_MAX: 1, P_MIN: 0.5}
    assert llama_cpp_settings({1: NONE}, least) == {}


def test_sglang_is_asked_for_no_more_nodes_than_it_grows() -> None:
    """From two nodes of a level it grows four, of which two go on."""
    paths = {()}
    for _ in range(6):  # all paths of ranks 0 and 1, with rank 1 at most once
        paths |= {(*path, rank) for path in paths for rank in (0, 1) if sum(path) + rank < 2}
    static = Draft("tree", 6, choices=tuple(sorted(paths - {()})))
    assert static.size > 23
    found = engine_settings({1: static}, {1: chain(2)}, {})["sglang"]
    assert found["--speculative-eagle-topk"] == 2
    assert found["--speculative-num-draft-tokens"] == 1 + 2 + 5 * 4


def test_the_greedy_rows_are_taken() -> None:
    rows = [(1, 0.0, chain(4)), (8, 0.0, chain(2)), (1, 1.0, chain(1))]
    assert greedy_drafts(rows) == {1: chain(4), 8: chain(2)}
    assert greedy_drafts(rows[2:]) == {1: chain(1)}


def test_a_live_check_sees_lengths_that_are_not_used() -> None:
    told = {TOKENS: 4, LENGTHS: [[1, 1, 4], [2, 8, 1]]}
    export = Served("x", "eagle3", None, None, told)
    assert (export.depths(1), export.depths(4)) == ((4, 4), (1, 4))

    def faults(taken: object, drafted: int, batch: int, steps: int = 10) -> list[str]:
        counts = {"drafts": steps, "draft_tokens": drafted}
        mode = ServedMode("x", "0", batch, acceptance=counts, taken={LENGTHS: taken})
        return list(unused(mode, export, batch))

    assert faults([(1, 1, 4), (2, 8, 1)], 40, 1) == []
    assert faults([(1, 1, 4), (2, 8, 1)], 23, 4) == []
    assert "configuration says" in faults(None, 40, 1)[0]
    assert "drafted 2.00 tokens per step" in faults([(1, 1, 4), (2, 8, 1)], 20, 1)[0]
    (silent,) = faults([(1, 1, 4), (2, 8, 1)], 0, 8, steps=0)
    assert "drafted nothing" in silent and "asks for 1 to 4 tokens per step" in silent
    told[LENGTHS] = [[1, 1, 4], [2, 8, 0]]
    assert faults(told[LENGTHS], 0, 8, steps=0) == [], "it was asked for none with two and more"
    plain = SimpleNamespace(**{**export.__dict__, "speculative": {TOKENS: 4}})
    assert list(unused(ServedMode("x", "0"), plain, 1)) == []  # type: ignore[arg-type]
