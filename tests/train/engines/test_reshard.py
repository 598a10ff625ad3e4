"""States that another number of processes, or another engine, continues: nothing of AdamW's state
is lost, doubled or moved."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from heads.api.errors import UserError
from tests.train import launch
from tests.train.engines.test_engine import difference, muon_reference, reference
from train.distributed import World
from train.engines.shards import (
    FilePart,
    Span,
    StatePart,
    collect,
    distribute,
    piece_spans,
    slice_spans,
    whole_spans,
)
from train.state import save_random_state, set_random_state

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}
WORKER = "tests.train.reshard_worker"
ENGINES = ["torch:0:float32", *(f"deepspeed:{stage}:float32" for stage in range(4))]
MUON = [f"muon-{name}" for name in ENGINES[:-1]]  # not ZeRO 3


def turned(by: int) -> list[str]:
    return [*(ENGINES[by:] + ENGINES[:by]), *(MUON[by:] + MUON[:by])]


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 1),
        pytest.param((1, 2, 4), marks=pytest.mark.slow),
        pytest.param((4, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_processes_continues_under_any_engine(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    """Each training passes through three engines and three launches, and ends where plain torch
    ends in one go."""
    for turn, processes in enumerate(sizes):
        output = launch.run(processes, WORKER, tmp_path, 2 * turn, 2 * turn + 2, *turned(2 * turn))
        assert "Error" not in output
    expected, _ = reference(6)
    for number in range(len(ENGINES) + len(MUON)):
        found = load_file(tmp_path / str(number) / "step_00000006" / "model.safetensors")
        if number < len(ENGINES):
            assert difference(found, expected) < 2e-5, number
        else:
            assert difference(found, muon_reference(6)) < 1e-3, number


# The same, by itself


def adam(named: dict[str, Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(named.values(), lr=0.1)


def trained() -> tuple[dict[str, Tensor], torch.optim.AdamW]:
    """Weights of all shapes after two updates."""
    torch.manual_seed(0)
    named: dict[str, Tensor] = {
        name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()
    }
    optimizer = adam(named)
    for _ in range(2):
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return named, optimizer


def divided(way: str, ranks: int) -> list[list[Span]]:
    """The spans of every process: whole, slices of one flat buffer (ZeRO 1, 2), or a piece of every
    weight (ZeRO 3)."""
    shapes = list(SHAPES.items())
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    if way == "whole":
        return [whole_spans({name: torch.zeros(shape) for name, shape in shapes})]
    if way == "slices":
        width = -(-sum(sizes) // ranks)
        offsets = np.cumsum([0, *sizes[:-1]]).tolist()
        return [
            slice_spans(shapes, offsets, rank * width, torch.zeros(width)) for rank in range(ranks)
        ]
    pieces = [-(-size // ranks) for size in sizes]
    return [piece_spans(shapes, pieces, rank, torch.zeros(sum(pieces))) for rank in range(ranks)]


def hold(spans: list[Span]) -> torch.optim.AdamW:
    """An optimiser over the tensors of `spans`, without state."""
    return torch.optim.AdamW(
        [{"params": list({id(s.tensor): s.tensor for s in spans}.values()) or [torch.zeros(1)]}]
    )


@settings(max_examples=40, deadline=None)
@given(
    ways=st.lists(
        st.tuples(st.sampled_from(["whole", "slices", "pieces"]), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    )
)
def test_through_any_divisions_and_back_every_bit_is_there(ways: list[tuple[str, int]]) -> None:
    named, optimizer = trained()
    parts = [collect(optimizer, whole_spans(named))]
    before = parts[0].tensors
    for way, ranks in [*ways, ("whole", 1)]:
        following = []
        for spans in divided(way, ranks):
            holder = hold(spans)
            distribute(holder, spans, SHAPES, parts)
            following.append(collect(holder, spans))
        # none twice, none missing
        assert sum(part.count(name) for part in following for name in part.runs) == 31
        parts = following
    assert parts[0].tensors.keys() == before.keys()
    assert all(torch.equal(parts[0].tensors[name], value) for name, value in before.items())


def test_on_disk_it_is_the_same(tmp_path: Path) -> None:
    named, optimizer = trained()
    part = collect(optimizer, whole_spans(named))
    part.save(tmp_path / "part.safetensors")
    found = FilePart(tmp_path / "part.safetensors")
    assert found.runs == part.runs
    assert all(found.count(name) == part.count(name) for name in SHAPES)
    assert torch.equal(found.read("a.exp_avg", 3, 9), part.read("a.exp_avg", 3, 9))
    assert torch.equal(found.read("a.step"), torch.tensor(2.0))


def test_a_state_from_before_the_first_update_changes_nothing() -> None:
    named = {"a": nn.Parameter(torch.zeros(2))}
    optimizer = adam(named)
    distribute(optimizer, whole_spans(named), {"a": (2,)}, [StatePart()])
    assert not optimizer.state


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    named, optimizer = trained()
    whole = whole_spans(named)
    part = collect(optimizer, whole)
    with pytest.raises(
        UserError, match=r"another drafter: unknown weights \['d'\], missing weights \[\]"
    ):
        distribute(optimizer, whole[:3], {name: SHAPES[name] for name in "abc"}, [part])
    with pytest.raises(UserError, match=r"unknown weights \[\], missing weights \['e'\]"):
        distribute(optimizer, whole, {**SHAPES, "e": (1,)}, [part])
    with pytest.raises(UserError, match=r"'b' is of a weight of another shape: \[7\], here \[8\]"):
        distribute(optimizer, whole, {**SHAPES, "b": (8,)}, [part])
    first, second = divided("slices", 2)
    holders = [hold(first), hold(second)]
    for holder, spans in zip(holders, (first, second), strict=True):
        distribute(holder, spans, SHAPES, [part])
    halves = [
        collect(holder, spans) for holder, spans in zip(holders, (first, second), strict=True)
    ]
    with pytest.raises(UserError, match=r"incomplete: of 'b' 1 of 7 elements"):
        distribute(
            optimizer,
            whole,
            SHAPES,
            [halves[0], StatePart(halves[1].tensors, {n: halves[1].runs[n] for n in "cd"})],
        )
    (tmp_path / "odd.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is no optimiser state"):
        FilePart(tmp_path / "odd.safetensors")


def test_generators_of_a_new_process_are_its_own_and_always_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_random_state(tmp_path, 0)

    def draws(rank: int) -> tuple[float, float, float]:
        set_random_state(tmp_path, rank, 1)
        return float(torch.rand(())), random.random(), float(np.random.rand())

    assert draws(0) == draws(0)
    assert draws(2) == draws(2)
    assert len({draws(0)[0], draws(1)[0], draws(2)[0]}) == 3


def test_a_world_of_one_gathers_its_own_text() -> None:
    assert World().gather("x") == ["x"]
