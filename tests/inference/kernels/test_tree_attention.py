"""Tree attention: the reference against loops over single nodes, the kernels against the reference.

Legend: B rows, N nodes, Q queries, S slots, h key/value heads, G query heads per key/value head, D
head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads.api.tree import TokenTree, ancestor_words
from heads.kernels.dispatch import is_interpreted
from inference.kernels.reference.attention import TREE_ATTENTION, tree_attention, workspace_bytes
from tests.heads.kernels.devices import DEVICES, ON_CPU, ON_CUDA

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """What an attention is asked; `inputs` makes it up from the seed."""

    shape: str = "random"
    nodes: int = 12
    lengths: tuple[int, ...] = (50, 9)
    capacity: int = 75
    key_heads: int = 1
    groups: int = 4
    size: int = 16
    value_size: int = 0
    """0: that of the keys."""
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0
    split: int = 32
    asked: int = 0
    """Queries: the last so many nodes; 0: all."""
    words: int = 0
    """Words of bits that are there besides those of the nodes."""


Inputs = tuple[list[Tensor], dict[str, Any]]


def tree_of(case: Case) -> TokenTree:
    """A chain or a fan for all rows, one random tree for all rows ("static"), or one of its own for
    each ("random").
    """
    if case.shape == "chain":
        return TokenTree.chain(case.nodes - 1)
    parents = torch.zeros(
        1 if case.shape != "random" else len(case.lengths), case.nodes, dtype=torch.int64
    )
    if case.shape != "siblings":
        for node in range(1, case.nodes):
            for row in range(parents.shape[0]):
                parents[row, node] = int(torch.randint(max(0, node - 5), node, ()))
    return TokenTree.from_parents(parents, case.nodes - 1)


def inputs(case: Case, device: str = "cpu") -> Inputs:
    """Positional and named arguments; slots that nobody has written hold NaN, buffers are strided
    as layers of one storage are.
    """
    torch.manual_seed(case.seed)
    tree, rows = tree_of(case), len(case.lengths)
    heads, value_size = case.key_heads * case.groups, case.value_size or case.size
    # as models have it: nodes before heads in memory; wide enough scores that a softcap bends them
    queries = case.asked or case.nodes
    query = (2 * torch.randn(rows, queries, heads, case.size)).transpose(1, 2)
    keys = torch.randn(rows, 2, case.key_heads, case.capacity, case.size)[:, 1]
    values = torch.randn(rows, case.key_heads, case.capacity, value_size)
    for row, length in enumerate(case.lengths):
        for buffer in (keys, values):
            buffer[row, :, length + case.nodes :] = float("nan")
    sinks = 4 * torch.randn(heads) if case.sinks else None  # some above all scores, some below
    floats = [x.to(case.dtype).to(device) for x in (query, keys, values)]
    words = torch.nn.functional.pad(tree.words()[:, -queries:], (0, case.words), value=-1)
    whole = [torch.tensor(case.lengths).to(device), words.to(device), tree.depth.to(device)]
    named: dict[str, Any] = {"scaling": case.size**-0.5, "window": case.window}
    named["softcap"] = case.softcap
    named["at"] = tree.depth[:, -queries:].to(device) if case.asked else None
    named["sinks"] = None if sinks is None else sinks.to(case.dtype).to(device)
    return floats + whole, named


def run_kernels(arguments: Inputs, split: int) -> Tensor:
    """Under the interpreter with large blocks, of which fewer are slow; on a GPU as it is used,
    with the smallest split.
    """
    from inference.kernels.tree_attention import Launch

    positional, named = arguments
    launch = Launch(128, 16, 4, 2, 128) if is_interpreted() else None
    return TREE_ATTENTION.triton()(
        *positional,
        **named,
        split_size=split if is_interpreted() else max(split, 64),
        launch=launch,
    )


def in_float32(arguments: Inputs) -> Tensor:
    """The reference, computed and returned in float32 from the very numbers that the kernel
    gets."""
    (query, keys, values, *whole), named = arguments
    return tree_attention(query.float(), keys.float(), values.float(), *whole, **named)


def check(case: Case, device: str) -> None:
    arguments = inputs(case, device)
    found = run_kernels(arguments, case.split)
    expected = in_float32(arguments)
    assert found.dtype == case.dtype and found.is_contiguous()
    assert found.shape == expected.shape and bool(torch.isfinite(expected).all())
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


# The reference


def node_by_node(arguments: Inputs) -> Tensor:
    """Every query alone, over a list of the keys on its path, in float64."""
    (query, keys, values, lengths, words, depth), named = arguments
    rows, heads, queries, _ = query.shape
    groups, nodes = heads // keys.shape[1], depth.shape[1]
    at = depth if named["at"] is None else named["at"]
    out = torch.zeros(rows, queries, heads, values.shape[-1], dtype=torch.float64)
    for row in range(rows):
        length, tree = int(lengths[row]), row if words.shape[0] > 1 else 0
        for node in range(queries):
            bits = [int(words[tree, node, j // 32]) >> (j % 32) & 1 for j in range(nodes)]
            path = [(length + j, length + int(depth[tree, j])) for j in range(nodes) if bits[j]]
            seen = [(slot, slot) for slot in range(length)] + path
            if named["window"] is not None:
                here = length + int(at[tree, node])
                seen = [
                    (slot, position) for slot, position in seen if here - position < named["window"]
                ]
            for head in range(heads):
                slots = [slot for slot, _ in seen]
                one = (
                    keys[row, head // groups, slots].double()
                    @ query[row, head, node].double()
                    * named["scaling"]
                )
                if named["softcap"] is not None:
                    one = named["softcap"] * torch.tanh(one / named["softcap"])
                weights = one.exp()
                total = weights.sum()
                if named["sinks"] is not None:
                    total = total + named["sinks"][head].double().exp()
                if total > 0:
                    out[row, node, head] = (
                        weights @ values[row, head // groups, slots].double() / total
                    )
    return out


REFERENCE = {
    "random": Case(nodes=7, lengths=(5, 2), capacity=14),
    "static": Case(shape="static", nodes=34, lengths=(3, 0), capacity=40, groups=2, value_size=8),
    "window and sinks": Case(
        shape="chain", nodes=6, lengths=(4, 9), capacity=16, window=3, sinks=True
    ),
    "window and softcap": Case(
        nodes=19, lengths=(4, 9), capacity=30, window=3, softcap=2.0, key_heads=2, groups=1
    ),
    "lone root": Case(nodes=1, lengths=(0,), capacity=1),
    "a level": Case(nodes=11, asked=4, lengths=(5, 2), capacity=18, window=4),
    "a level of a static tree": Case(
        shape="static", nodes=40, asked=3, lengths=(4, 0), capacity=44, words=1
    ),
}


@pytest.mark.parametrize("case", REFERENCE.values(), ids=REFERENCE.keys())
def test_the_reference_equals_every_node_alone(case: Case) -> None:
    arguments = inputs(replace(case, dtype=torch.float64))
    positional, named = arguments
    expected = node_by_node(arguments)
    torch.testing.assert_close(
        tree_attention(*positional, **named), expected, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(in_float32(arguments), expected.float(), rtol=1e-5, atol=1e-5)


# The kernels

CASES = {
    "float16": Case(nodes=33, dtype=torch.float16, capacity=85),
    "bfloat16": Case(nodes=33, dtype=torch.bfloat16, capacity=85),
    "lone root": Case(shape="chain", nodes=1),
    "33 nodes": Case(nodes=33, capacity=90),
    "64 nodes in one tree": Case(shape="static", nodes=64, lengths=(30, 64), capacity=128),
    "65 nodes": Case(nodes=65, lengths=(21,), capacity=100, groups=1),
    "siblings": Case(shape="siblings", nodes=33, lengths=(40, 41), capacity=80),
    "chain": Case(shape="chain", nodes=33, lengths=(32, 31), capacity=65),
    "empty prefix": Case(lengths=(0, 0), capacity=40),
    "window shorter than the tree": Case(shape="chain", nodes=33, window=7, capacity=90),
    "window shorter than the branches": Case(nodes=33, window=4, capacity=85, groups=2),
    "window over several splits": Case(lengths=(110, 62), capacity=130, window=40),
    "window longer than the text": Case(lengths=(20, 5), capacity=40, window=1000),
    "one query head per key head": Case(groups=1, key_heads=2),
    "one key head for all": Case(groups=8, lengths=(17, 33)),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True, dtype=torch.bfloat16),
    "all at once": Case(
        sinks=True, softcap=3.0, window=20, size=80, value_size=48, nodes=33, capacity=97
    ),
    "80 columns": Case(size=80, dtype=torch.float16),
}
LEVELS = {
    "of a dynamic tree": Case(nodes=40, asked=10, lengths=(50, 9, 33), capacity=95),
    "of a static tree": Case(shape="static", nodes=37, asked=5, capacity=90, words=1),
    "of a chain": Case(shape="chain", nodes=6, asked=1, lengths=(64, 0), capacity=80),
    "the first behind an empty prefix": Case(nodes=3, asked=3, lengths=(0, 30), capacity=40),
    "heads of 64, in bfloat16": Case(
        nodes=20, asked=10, key_heads=2, groups=4, size=64, dtype=torch.bfloat16
    ),
    "heads of 128": Case(nodes=12, asked=4, key_heads=2, groups=2, size=128),
    "a committed run's last token": Case(shape="chain", nodes=6, asked=1, size=128, groups=8),
    "in a window": Case(nodes=33, asked=8, window=7, lengths=(50, 3), capacity=85),
    "values of another size": Case(nodes=9, asked=3, size=24, value_size=16),
}
"""Some of the nodes ask, as a level of a draft does."""


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_reference(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LEVELS.values(), ids=LEVELS.keys())
def test_a_level_equals_the_reference(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_level_comes_out_as_among_all_nodes(device: str) -> None:
    """But for rounding, since a GPU's tiles follow the number of queries."""
    for window in (None, 9):
        case = Case(nodes=33, groups=2, window=window)
        (query, keys, values, lengths, words, depth), named = inputs(case, device)
        every = run_kernels(([query, keys, values, lengths, words, depth], named), 32)
        level = [query[:, :, 25:], keys, values, lengths, words[:, 25:], depth]
        found = run_kernels((level, named | {"at": depth[:, 25:]}), 32)
        torch.testing.assert_close(found, every[:, 25:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_see_nothing_give_zeros(device: str) -> None:
    """A row that takes no part: no text and no ancestors. The other row is not disturbed."""
    (query, keys, values, lengths, words, depth), named = inputs(Case(lengths=(40, 0)), device)
    words = words.clone()
    words[1] = 0
    arguments: Inputs = ([query, keys, values, lengths, words, depth], named)
    found, expected = run_kernels(arguments, 32), in_float32(arguments)
    assert torch.equal(found[1], torch.zeros_like(found[1])) and torch.equal(expected[1], found[1])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_before_the_window_are_not_read(device: str) -> None:
    arguments = inputs(Case(lengths=(210,), capacity=240, window=20), device)
    expected = in_float32(arguments)
    keys, values = arguments[0][1:3]
    keys[:, :, :128] = float(
        "nan"
    )  # the window of the root begins at 191: the tile of 64 slots from 128 on may be read
    values[:, :, :128] = float("nan")
    torch.testing.assert_close(run_kernels(arguments, 256), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_flipped_ancestor_bit_shows(device: str) -> None:
    """The control of all the comparisons above: one bit of one node changes this node, by far more
    than they tolerate.
    """
    (query, keys, values, lengths, words, depth), named = inputs(Case(nodes=33), device)
    before = run_kernels(([query, keys, values, lengths, words, depth], named), 32)
    words = words.clone()
    words[0, 20, 0] ^= 1  # node 20 of row 0 no longer sees the root
    after = run_kernels(([query, keys, values, lengths, words, depth], named), 32)
    changed = (before - after).abs().amax((2, 3)) > 0
    assert changed.nonzero().tolist() == [[0, 20]]
    assert float((before - after)[0, 20].abs().max()) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_comes_out_the_same_alone_and_in_any_capacity(device: str) -> None:
    """Bit by bit: splits have a fixed size, so neither the batch nor the capacity changes the order
    of a sum.
    """
    (query, keys, values, lengths, words, depth), named = inputs(Case(capacity=100), device)
    batch = run_kernels(([query, keys, values, lengths, words, depth], named), 32)
    alone = [x[:1] for x in (query, keys[:, :, :64], values[:, :, :64], lengths, words, depth)]
    assert torch.equal(run_kernels((alone, named), 32), batch[:1])


@pytest.mark.rotated
@ON_CPU
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(
    "limits", [{}, {"window": 21}, {"window": 9, "softcap": 3.0}, {"sinks": True}]
)
def test_programs_take_splits_in_turn(
    monkeypatch: pytest.MonkeyPatch, parts: int, limits: dict[str, Any]
) -> None:
    """Texts of six, two and one splits among fewer programs, the last split only begun."""
    monkeypatch.setattr("inference.kernels.reference.attention.MOST_PARTS", parts)
    check(Case(lengths=(90, 20, 0), nodes=7, capacity=110, split=16, **limits), "cpu")


@ON_CPU
def test_the_launch_that_a_gpu_gets_gives_the_same() -> None:
    """The other interpreted tests take large blocks; here they are those of `launch_config`."""
    positional, named = arguments = inputs(
        Case(nodes=5, groups=7, lengths=(70,), capacity=80, dtype=torch.float16)
    )
    found = TREE_ATTENTION.triton()(*positional, **named, split_size=64)
    torch.testing.assert_close(found.float(), in_float32(arguments), rtol=2e-3, atol=2e-3)


@ON_CPU
def test_slots_beyond_32_bits_are_found(tmp_path: Path) -> None:
    """Few slots far apart, as the many of a wide drafter are; most of the file is never written."""
    slots, apart, size = 18, 1 << 27, 16
    there = str(tmp_path / "cache")
    memory = torch.from_file(there, True, (slots - 1) * apart + size, dtype=torch.float16)
    keys = memory.as_strided((1, 1, slots, size), (0, 0, apart, 1))
    keys.copy_(torch.randn(1, 1, slots, size))
    tree = TokenTree.chain(1)
    query = torch.randn(1, 1, 2, size).half()
    positional = [query, keys, keys, torch.tensor([slots - 2]), tree.words(), tree.depth]
    arguments: Inputs = positional, {"scaling": 0.25}
    found = run_kernels(arguments, 32).float()
    torch.testing.assert_close(found, in_float32(arguments), rtol=2e-3, atol=2e-3)


@ON_CPU
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shared", [99 * 1024, 163 * 1024, 227 * 1024], ids=["4090", "A100", "H100"]
)
def test_tiles_fit_into_the_shared_memory_of_smaller_gpus(
    shared: int, dtype: torch.dtype, size: int
) -> None:
    from inference.kernels.tree_attention import launch_config

    for rows in (1, 32, 256):
        launch = launch_config(rows, size, dtype, shared)
        padded = 1 << (size - 1).bit_length()
        keys_and_values = 2 * launch.num_stages * launch.block_n * padded * dtype.itemsize
        assert launch.block_m * padded * dtype.itemsize + keys_and_values <= shared
        assert 256 % launch.block_n == 0 and min(launch.block_m, launch.block_n) >= 16


@ON_CPU
def test_the_scratch_memory_is_what_planning_is_told() -> None:
    class Scratch(TorchDispatchMode):
        taken = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.new_empty.default and made.dtype == torch.float32:
                self.taken += made.nbytes
            return made

    arguments = inputs(Case(value_size=24, dtype=torch.float16))
    with Scratch() as scratch:
        run_kernels(arguments, 32)
    assert scratch.taken == workspace_bytes(2, 4, 12, 24, capacity=75, split_size=32)
    # beyond 32 splits it no longer grows
    assert workspace_bytes(2, 4, 12, 24, 131_072) == workspace_bytes(2, 4, 12, 24, 8_192)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything that is allowed, small."""
    lengths = tuple(draw(st.lists(st.integers(0, 70), min_size=1, max_size=2)))
    nodes = draw(st.integers(1, 40))
    return Case(
        shape=draw(st.sampled_from(["random", "static", "chain", "siblings"])),
        nodes=nodes,
        lengths=lengths,
        capacity=max(lengths) + nodes + draw(st.integers(0, 20)),
        groups=draw(st.integers(1, 3)),
        size=draw(st.integers(1, 40)),
        value_size=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.floats(1.0, 10.0)),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        split=draw(st.sampled_from([16, 32, 64])),
        asked=draw(st.integers(0, nodes)),
    )


@ON_CPU
@settings(max_examples=6, deadline=None, derandomize=True)
@given(case=cases())
def test_random_cases_on_a_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@ON_CUDA
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_random_cases_on_a_gpu(case: Case) -> None:
    check(case, "cuda")


# On a GPU, and for one


@pytest.mark.gpu
@ON_CUDA
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("nodes", [1, 7, 64, 256])
def test_sizes_of_real_models_on_a_gpu(nodes: int, size: int) -> None:
    for window in (None, 700):
        case = Case(
            nodes=nodes, lengths=(1500, 17), capacity=2048, key_heads=8, size=size, window=window
        )
        check(replace(case, dtype=torch.bfloat16, split=256), "cuda")


@pytest.mark.gpu
@ON_CUDA
def test_one_captured_graph_serves_every_length() -> None:
    """Lengths, trees and entries change in place between replays; the host says nothing."""
    case = Case(
        nodes=33,
        lengths=(700, 3),
        capacity=1024,
        key_heads=2,
        size=64,
        dtype=torch.bfloat16,
        window=500,
    )
    positional, named = inputs(case, "cuda")
    positional = [torch.nan_to_num(x) if x.is_floating_point() else x.clone() for x in positional]
    for _ in range(2):  # compiled before it is captured
        TREE_ATTENTION(*positional, **named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = TREE_ATTENTION(*positional, **named)
    for seed, lengths in enumerate([(0, 0), (991, 256), (64, 800)]):
        fresh, _ = inputs(replace(case, lengths=lengths, seed=seed), "cuda")
        for buffer, value in zip(positional, fresh, strict=True):
            buffer.copy_(torch.nan_to_num(value) if value.is_floating_point() else value)
        graph.replay()
        torch.testing.assert_close(
            out.float(), in_float32((positional, named)), rtol=2e-2, atol=2e-2
        )


@pytest.mark.gpu
@ON_CUDA
def test_nothing_waits_for_the_device() -> None:
    arguments, named = inputs(Case(dtype=torch.bfloat16), "cuda")
    TREE_ATTENTION(*arguments, **named)
    torch.cuda.set_sync_debug_mode("error")
    try:
        TREE_ATTENTION(*arguments, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_words_match_the_tree() -> None:
    """What the cases hand over is what trees make: a bit per ancestor, in words of 32."""
    tree = tree_of(Case(shape="chain", nodes=65))
    words = ancestor_words(tree.ancestors)
    assert words.shape == (1, 65, 3) and words[0, 64].tolist() == [-1, -1, 1]
