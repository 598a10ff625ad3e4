"""Cost curves: what is timed is what the decoder runs, interpolation is exact on planes, JSON keeps
everything.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.eagle3 import Config as Eagle3Config
from heads.medusa import Config as MedusaConfig
from heads.ngram import Config as NgramConfig
from inference.decoding import costs as cost_module
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import (
    Bench,
    CostConfig,
    CostCurves,
    CostPoint,
    interleave,
    interpolate,
    measure_costs,
    measure_grid,
)
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.model import TargetModel
from tests.inference.decoding.recorded_cuda import FIRST, SECOND, RecordedCuda
from tests.models import VOCAB, random_target

DECODE = DecodeConfig(depth=2, max_new_tokens=8)
TEXT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def arms(target: TargetModel) -> list[Arm]:
    kinds: dict[str, Any] = {
        "eagle3": Eagle3Config(),
        "medusa": MedusaConfig(num_heads=2),
        "ngram": NgramConfig(),
    }
    return [
        Arm(name, new_drafter(name, config, target.info, target.weights, seed=0), DECODE)
        for name, config in kinds.items()
    ]


CONFIG = CostConfig(nodes=(1, 4, 2), batches=(1, 3), lengths=(16, 48), repeats=3, warmup=1)


@pytest.fixture(scope="module")
def curves(target: TargetModel, arms: list[Arm]) -> CostCurves:
    return measure_costs(CONFIG, target, arms, TEXT)


def test_every_point_of_the_grid_is_measured(curves: CostCurves) -> None:
    places = [(p.rows, p.length, p.nodes) for p in curves.verify_points]
    assert sorted(places) == [
        (b, length, n) for b in (1, 3) for length in (16, 48) for n in (1, 2, 4)
    ]
    for name in ("eagle3", "medusa", "ngram"):
        assert {p.nodes for p in curves.draft_points[name]} == {2, 3}  # depths 1 and 2
        assert len(curves.commit_points[name]) == 2 * 2 * 2
    for point in curves.verify_points:
        assert 0 < point.low <= point.seconds <= point.high
    assert (curves.launch, curves.device, curves.dtype) == ("eager", "cpu", "float32")


def test_curves_survive_json_and_answer_as_before(curves: CostCurves) -> None:
    again = CostCurves.from_dict(json.loads(json.dumps(curves.to_dict())))
    assert again == curves
    assert again.verify(2, 1, 16) == next(
        p.seconds for p in curves.verify_points if (p.rows, p.length, p.nodes) == (1, 16, 2)
    )
    assert again.draft("eagle3", 1, 1) == 0.0
    assert again.draft("eagle3", 3, 3) == again.draft("eagle3", 3, 3, 16) > 0
    with pytest.raises(
        UserError, match=r"no cost curve of a drafter 'eagle'\. Measured: eagle3, medusa, ngram"
    ):
        again.draft("eagle", 2, 1)
    with pytest.raises(UserError, match="these are no cost curves"):
        CostCurves.from_dict({"target": "x"})


def plane(rows: int, length: int, nodes: int) -> float:
    return 1.0 + 0.5 * rows + 0.01 * length + 0.1 * nodes


def test_interpolation_is_exact_on_a_plane_inside_and_outside() -> None:
    points = [
        CostPoint(n, b, length, plane(b, length, n), 0, 9)
        for b in (1, 4)
        for length in (100, 300)
        for n in (1, 2, 8)
    ]
    for b, length, n in ((1, 100, 1), (2, 250, 5), (6, 900, 32), (4, 50, 8)):
        assert interpolate(points, n, b, length) == pytest.approx(plane(b, length, n))
    assert interpolate(points, 1, 1, 0) == pytest.approx(plane(1, 100, 1))  # 0: the shortest
    alone = [CostPoint(3, 1, 10, 0.25, 0.2, 0.3)]
    assert interpolate(alone, 1, 8, 999) == 0.25  # one point says nothing of slopes
    falling = [CostPoint(1, 1, 10, 0.2, 0, 1), CostPoint(2, 1, 10, 0.1, 0, 1)]
    assert interpolate(falling, 8, 1, 10) == 0.0  # never negative


def test_calls_are_timed_in_turns_and_slow_calls_look_slow() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            time.sleep(seconds)

        return run

    calls = {"fast": call("fast", 0.0), "slow": call("slow", 0.01)}
    found = interleave(calls, torch.device("cpu"), repeats=6, warmup=1, seed=1)
    assert len(found["fast"]) == len(found["slow"]) == 6
    assert min(found["slow"]) >= 0.01 > sorted(found["fast"])[2]
    rounds = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert all(set(pair) == {"fast", "slow"} for pair in rounds)
    assert len(set(rounds[1:])) == 2  # both orders occur


def test_the_timed_draft_is_the_one_that_decoding_makes(
    target: TargetModel, arms: list[Arm]
) -> None:
    """The state behind a timed `propose` equals the engine's after the same prompt, so the drafts
    are equal."""
    arm, prompt = arms[0], tuple(TEXT[:16])
    proposals: list[torch.Tensor] = []
    propose = arm.drafter.propose

    def spy(state: Any, noise: Any) -> Any:
        proposal = propose(state, noise)
        proposals.append(proposal.tokens.clone())
        return proposal

    arm.drafter.propose = spy
    try:
        bench = Bench(target, 1, 16, 3, TEXT)
        draft, _ = bench.step(arm, DECODE.tree())
        draft()
        draft()
        known = TEXT[16]  # what the bench says came after the prompt
        list(Engine(target, _Forced(arm.drafter, known), DECODE).run([Request(0, prompt, 1, 4)]))
    finally:
        del arm.drafter.propose
    assert torch.equal(proposals[0], proposals[1])  # timing a draft again does the same work
    assert torch.equal(proposals[0][:, 1:], proposals[2][:, 1:])


class _Forced:
    """A drafter that is told `first` as the token after its prompt, whatever the target picked."""

    kind = "forced"

    def __init__(self, drafter: Any, first: int) -> None:
        self.drafter, self.first, self.needs = drafter, first, drafter.needs
        self.propose, self.commit = drafter.propose, drafter.commit

    def start(self, seen: Any, tree: Any, capacity: int) -> Any:
        following = seen.next_tokens.clone()
        following[:, -1] = self.first
        return self.drafter.start(replace(seen, next_tokens=following), tree, capacity)


def test_settings_are_checked(target: TargetModel, arms: list[Arm]) -> None:
    with pytest.raises(UserError, match=r"bench\.costs\.lengths is empty"):
        CostConfig(lengths=())
    with pytest.raises(UserError, match=r"bench\.costs\.repeats must lie in \[1, "):
        CostConfig(repeats=0)
    with pytest.raises(UserError, match="with up to 4 nodes need 261 positions"):
        measure_costs(CostConfig(nodes=(4,), lengths=(256,)), target, arms, TEXT)
    assert cost_module.stopwatch(torch.device("cpu"))(lambda: time.sleep(0.005)) >= 0.005


# On a GPU that is not the current one, on stand-ins that record devices


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    return RecordedCuda().install(monkeypatch)


def test_calls_are_timed_by_events_of_their_device(cuda: RecordedCuda) -> None:
    where: list[torch.device] = []
    found = interleave({"call": lambda: where.append(cuda.device)}, SECOND, repeats=3, warmup=1)
    assert found == {"call": [0.001] * 3}
    assert where == [FIRST, *[SECOND] * 3]  # the warm-up is timed by nothing
    assert len(cuda.events) == 6 and {event.device for event in cuda.events} == {SECOND}
    assert cuda.device == FIRST


def grid(cuda: RecordedCuda, monkeypatch: pytest.MonkeyPatch, refuses: int) -> CostCurves:
    """Curves of a target on the second GPU. refuses: nodes of the verification that raises while it
    is captured, as Triton's compiler does, with an error of another type than torch's."""

    def verify(nodes: int) -> Callable[[], None]:
        def call() -> None:
            if cuda.capturing and nodes == refuses:
                raise LookupError("no such kernel\nin a module")

        return call

    bench = SimpleNamespace(verification=verify)
    monkeypatch.setattr(cost_module, "Bench", lambda *_: bench)
    info = SimpleNamespace(id="target")
    target: Any = SimpleNamespace(device=SECOND, dtype=torch.bfloat16, info=info)
    return measure_grid(target, [1, 4], [1, 3], [16], 4, TEXT, [], lambda _: {}, 5, 1)


def test_curves_of_a_second_gpu_are_captured_there(
    cuda: RecordedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = grid(cuda, monkeypatch, refuses=0)
    assert curves.launch == "graph" and len(curves.verify_points) == 4
    assert len(cuda.graphs) == 4 and all(graph.replays == 6 for graph in cuda.graphs)
    assert {graph.stream.device for graph in cuda.graphs} == {SECOND}
    assert {graph.mode for graph in cuda.graphs} == {"thread_local"}
    assert {event.device for event in cuda.events} == {SECOND}
    assert set(cuda.synchronised) == {SECOND} and cuda.device == FIRST


def test_curves_are_launched_if_one_call_cannot_be_captured(
    cuda: RecordedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        curves = grid(cuda, monkeypatch, refuses=4)
    assert curves.launch == "eager" and len(curves.verify_points) == 4
    assert not any(graph.replays for graph in cuda.graphs)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot be captured as a graph (LookupError: no such kernel); all calls" in said
