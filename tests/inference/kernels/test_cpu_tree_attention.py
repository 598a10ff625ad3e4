"""Tree attention in compiled steps: the C++ function against the reference, through inductor.

Legend: B rows, N nodes, S slots, h key/value heads, G query heads per key/value head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from heads.kernels.dispatch import choose, traced_for_cpu
from inference.decoding.execution.inductor import compile_graph
from inference.kernels.reference.attention import TREE_ATTENTION
from tests.inference.kernels.test_tree_attention import Case, Inputs, in_float32, inputs

NEVER_READ = float("nan")


def compiled(arguments: Inputs) -> Any:
    """The operation for arguments of these shapes, compiled."""
    positional, named = arguments

    def call(*tensors: Tensor) -> tuple[Tensor]:
        return (TREE_ATTENTION(*tensors, **named),)

    with torch.no_grad(), traced_for_cpu():
        graph = make_fx(call)(*positional)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["headstart.tree_attention.default"]
    function = compile_graph(graph, positional)
    return lambda *tensors: function(*tensors)[0]


def run(arguments: Inputs) -> Tensor:
    return compiled(arguments)(*arguments[0])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(case: Case) -> None:
    arguments = inputs(case)
    found, expected = run(arguments), in_float32(arguments)
    assert found.dtype == torch.float32 and found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_equals_the_reference() -> None:
    limits: dict[str, Any] = {"sinks": True, "softcap": 3.0, "window": 20}
    check(Case(size=80, value_size=48, nodes=40, asked=33, capacity=97, **limits))


CASES = {
    "lone root": Case(shape="chain", nodes=1),
    "nothing committed": Case(nodes=1, lengths=(0,), capacity=1),
    "33 nodes": Case(nodes=33, capacity=90),
    "65 nodes of one tree": Case(shape="static", nodes=65, lengths=(30, 64), capacity=130),
    "siblings": Case(shape="siblings", nodes=33, lengths=(40, 41), capacity=80),
    "heads of 64": Case(shape="chain", nodes=4, groups=2, key_heads=2, size=64),
    "heads of 128": Case(size=128, groups=1, key_heads=3),
    "odd sizes": Case(size=21, value_size=37, groups=3),
    "several splits": Case(lengths=(1500, 17, 511, 512), capacity=1600, size=64, key_heads=2),
    "several splits, sinks": Case(lengths=(1100, 3), capacity=1200, sinks=True, softcap=2.0),
    "window shorter than the tree": Case(shape="chain", nodes=33, window=7, capacity=90),
    "window in the last of several splits": Case(lengths=(1400, 62), capacity=1500, window=40),
    "a level": Case(nodes=40, asked=10, lengths=(50, 9, 600), capacity=650, size=64, key_heads=2),
    "a level in a window": Case(nodes=33, asked=8, window=7, lengths=(50, 3), capacity=85),
    "a level of a static tree": Case(shape="static", nodes=37, asked=5, capacity=90, words=1),
    "window over two splits": Case(lengths=(1050, 520), capacity=1100, window=200, sinks=True),
}


@pytest.mark.slow  # some seconds of C++ each
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_reference_in_every_shape(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_lengths_and_trees_are_read_when_it_runs() -> None:
    arguments = inputs(Case(nodes=33, lengths=(60, 40), capacity=100))
    function = compiled(arguments)
    (query, keys, values, _, words, depth), named = arguments
    for buffer in (keys, values):
        buffer.nan_to_num_(0.5)
    words = words.clone()
    words[0, 20, 0] ^= 1  # node 20 of row 0 no longer sees the root
    other = [query, keys, values, torch.tensor([3, 67]), words, depth]
    expected = in_float32((other, named))
    torch.testing.assert_close(function(*other), expected, rtol=1e-5, atol=1e-5)
    words[0, 20, 0] ^= 1
    changed = (function(*other) - expected).abs().amax((2, 3)) > 1e-3
    assert changed.nonzero().tolist() == [[0, 20]]


@pytest.mark.slow
def test_rows_that_see_nothing_give_zeros() -> None:
    (query, keys, values, lengths, words, depth), named = inputs(Case(lengths=(40, 0)))
    words = words.clone()
    words[1] = 0
    found = run(([query, keys, values, lengths, words, depth], named))
    assert torch.equal(found[1], torch.zeros_like(found[1])) and bool(found[0].isfinite().all())


@pytest.mark.slow
def test_slots_before_the_window_are_not_read() -> None:
    arguments = inputs(Case(lengths=(1210,), capacity=1240, window=20))
    expected = in_float32(arguments)
    keys, values = arguments[0][1:3]
    keys[:, :, :1191] = values[:, :, :1191] = NEVER_READ
    torch.testing.assert_close(run(arguments), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_row_comes_out_the_same_alone_in_any_capacity_and_with_any_threads() -> None:
    """Bit by bit: neither the batch nor the capacity nor the threads change the order of a sum."""
    case = Case(lengths=(1300, 700), capacity=1400, size=64, key_heads=2)
    (query, keys, values, lengths, words, depth), named = inputs(case)
    with threads(1):
        batch = run(([query, keys, values, lengths, words, depth], named))
    short = keys[:, :, :1320], values[:, :, :1320]
    alone = [x[:1] for x in (query, *short, lengths, words, depth)]
    with threads(4):
        assert torch.equal(run((alone, named)), batch[:1])


@pytest.mark.slow
def test_a_node_comes_out_the_same_in_a_shorter_chain() -> None:
    """Bit by bit: how many tokens are verified with it does not change a token's attention."""
    case = Case(shape="chain", nodes=5, lengths=(300,), capacity=400, size=64)
    (query, keys, values, lengths, words, depth), named = inputs(case)
    five = run(([query, keys, values, lengths, words, depth], named))
    part = [query[:, :, :2], keys, values, lengths, words[:, :2], depth[:, :2]]
    assert torch.equal(run((part, named)), five[:, :2])


def test_only_traces_for_a_cpu_in_float32_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(dtype: torch.dtype, device: str = "cpu") -> str:
        return choose(TREE_ATTENTION, device, dtype).implementation

    assert chosen(torch.float32) != "cpp"
    with traced_for_cpu():
        assert chosen(torch.float32) == "cpp"
        assert chosen(torch.bfloat16) != "cpp" and chosen(torch.float32, "meta") != "cpp"
        monkeypatch.setenv("HEADSTART_KERNELS", "reference")
        assert chosen(torch.float32) == "reference"


def test_outside_of_compiled_code_the_operation_is_the_reference() -> None:
    arguments = inputs(replace(Case(), window=9))
    with traced_for_cpu():
        found = TREE_ATTENTION(*arguments[0], **arguments[1])
    assert torch.equal(found, in_float32(arguments))
