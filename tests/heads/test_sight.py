"""What queries see of a drafter's cache: bits and masks say the same.

Legend: B rows, Q queries, R rows behind the committed slots, S slots.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.api.tree import TokenTree
from heads.nn.attention import cache_attention
from heads.nn.drafting import sight as sight_module
from heads.nn.drafting.places import CachePlace, GrowingFrame, Memory, static_places
from heads.nn.drafting.plan import TreePlan
from heads.nn.drafting.sight import Sight, UpTo, attend_cache, cache_kernel
from heads.nn.rope import Rope
from tests.heads.micro import micro_target
from tests.heads.recipes import build
from train.planning.footprint import Footprint

SLOTS = 90
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [0, 1, 0, 0], [2, 0, 0, 0]]


def told(sight: Sight, rows: int, window: int = 0) -> list[list[list[int]]]:
    """The slots that each query of each row sees, by the words, one bit at a time."""
    words, found = sight.words, []
    for row, base in enumerate(sight.base.tolist()):

        def of(value: Tensor, row: int = row) -> Tensor:
            return value[row if value.shape[0] > 1 else 0]

        depth, at = of(sight.depth).tolist(), of(sight.at).tolist()
        seen = []
        for query, bits in enumerate(of(words).tolist()):
            drafted = [j for j in range(rows) if bits[j // 32] >> (j % 32) & 1]
            stands = {slot: slot for slot in range(base)}
            stands |= {base + j: base + depth[j] for j in drafted}
            here = base + at[query]
            near = [s for s, where in stands.items() if not window or here - where < window]
            seen.append(sorted(near))
        found.append(seen)
    return found


def masked(sight: Sight, window: int = 0) -> list[list[list[int]]]:
    """The same by the mask."""
    mask = sight.mask(SLOTS, torch.float64, window)
    assert bool(((mask == 0) | (mask == float("-inf"))).all())
    return [[query.isfinite().nonzero()[:, 0].tolist() for query in row] for row in mask]


def check(sight: Sight) -> None:
    rows = sight.depth.shape[1]
    assert sight.words.dtype == torch.int32 and 32 * sight.words.shape[2] >= rows
    assert sight.words.shape[1] == sight.at.shape[1]
    for window in (0, 1, 3, 40):
        assert masked(sight, window) == told(sight, rows, window)
        part, whole = slice(sight.at.shape[1] // 2, sight.at.shape[1]), (SLOTS, torch.float64)
        assert torch.equal(sight.mask(*whole, window, part), sight.mask(*whole, window)[:, part])


def memory(base: Tensor) -> Memory:
    return Memory(base, Rope(8, 10000.0).table(SLOTS, base.device, torch.float64))


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 64, 70])
def test_a_run_sees_everything_up_to_itself(length: int) -> None:
    slots = torch.tensor([[3], [0], [17]]) + torch.arange(length)
    sight = UpTo.run(slots)
    check(sight)
    assert masked(sight) == [[list(range(end + 1)) for end in row] for row in slots.tolist()]
    wanted = torch.tensor([[0], [length // 2], [length - 1]])
    some = UpTo.run(slots, wanted)
    check(some)
    assert masked(some) == [
        [list(range(int(row[at]) + 1))] for row, at in zip(slots, wanted, strict=True)
    ]


def test_what_is_committed_is_seen_by_its_last() -> None:
    sight = UpTo.committed(torch.tensor([3, 1, 40]))
    check(sight)
    assert masked(sight) == [[list(range(end))] for end in (3, 1, 40)]
    assert masked(sight, window=2) == [[[1, 2]], [[0]], [[38, 39]]]


@pytest.mark.parametrize("depth", [1, 2, 40])
def test_chains(depth: int) -> None:
    base = torch.tensor([3, 0, 17])
    plan = TreePlan.of(TokenTree.chain(depth))
    place = static_places(plan, memory(base))
    for level in plan.levels[1:]:
        at = place.at(level)
        check(at.sight)
        assert at.slots.tolist() == (base[:, None] + level.depth - 2).tolist()


def test_static_trees() -> None:
    plan = TreePlan.of(TokenTree.from_choices(CHOICES))
    place = static_places(plan, memory(torch.tensor([3, 0])))
    check(place.sight)
    for level in plan.levels[1:]:
        part = place.at(level).sight
        check(part)
        assert part.depth.shape[1] == level.span.stop  # no row behind the level is read


def test_growing_trees() -> None:
    generator, width = torch.Generator().manual_seed(0), 9
    frame = GrowingFrame(memory(torch.tensor([3, 0])), width, levels=5)
    for level in range(5):
        above = torch.randint(width, (2, width), generator=generator)
        sight = frame.next(above).sight
        check(sight)
        assert sight.depth.shape[1] == (level + 1) * width


def test_masks_are_made_once() -> None:
    plan = TreePlan.of(TokenTree.from_choices(CHOICES))
    place = static_places(plan, memory(torch.tensor([3, 0])))
    first, second = (place.at(level).sight for level in plan.levels[1:3])
    whole = place.sight.mask(SLOTS, torch.float64)
    for part in (first, second):
        assert part.mask(SLOTS, torch.float64).data_ptr() >= whole.data_ptr()
        assert part.mask(SLOTS, torch.float64)._base is whole
    assert place.sight.mask(SLOTS, torch.float64, 3) is not whole


def test_a_kernel_is_asked_first_and_within_its_block_alone() -> None:
    query, key, value = (torch.randn(1, size, 2, 8) for size in (2, 5, 5))
    sight = CachePlace.run(torch.tensor([[3, 4]]), torch.zeros(5, 2, 8)).sight
    expected = cache_attention(query, key, value, sight.mask(5, torch.float32))
    asked: list[int] = []

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int
    ) -> Tensor | None:
        asked.append(window)
        return None if window else torch.full_like(expected, 7.0)

    with cache_kernel(kernel):
        assert bool((attend_cache(query, key, value, sight) == 7).all())
        near = attend_cache(query, key, value, sight, 100)  # refused: torch's attention
    assert torch.equal(near, expected) and asked == [0, 100]
    assert torch.equal(attend_cache(query, key, value, sight), expected)


def prompt(drafter: Any, length: int) -> TargetStates:
    """A prompt with made-up states of the micro target."""
    generator, hidden = torch.Generator().manual_seed(length), 16
    tokens = torch.randint(41, (1, length), generator=generator)
    taps = torch.randn(1, length, len(drafter.needs.taps), hidden, generator=generator)
    last = torch.randn(1, length, hidden, generator=generator)
    positions = torch.arange(length)[None]
    return TargetStates(tokens, tokens, positions, positions >= 0, taps, last)


@pytest.mark.parametrize("name", ["distilled", "pard", "peagle", "native_mtp", "mtp"])
def test_the_memory_for_a_prompt_grows_with_its_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its square; and the stretches that a long prompt is read in change nothing."""
    drafter = build(name, micro_target(torch.float32)).eval()
    largest, states = [], []
    with torch.no_grad():
        for length, most in ((256, 1 << 13), (512, 1 << 13), (512, sight_module.MASK_ELEMENTS)):
            monkeypatch.setattr(sight_module, "MASK_ELEMENTS", most)
            with Footprint() as footprint:
                states.append(
                    drafter.start(prompt(drafter, length), TokenTree.chain(3), length + 64)
                )
            largest.append(footprint.largest)
    assert largest[1] <= 2 * largest[0] < largest[2]
    stretches, dense = states[1:]
    torch.testing.assert_close(stretches.output, dense.output)
    for found, expected in zip(stretches.keys, dense.keys, strict=True):
        torch.testing.assert_close(found, expected)
