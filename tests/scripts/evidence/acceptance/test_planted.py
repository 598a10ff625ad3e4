"""A planted fault for every check of the acceptance parts that has a limit, at a size that takes
seconds: each is found by that check. What only CUDA can say is answered by a stand-in.

`test_stages.py` has the faults of kernels and gradients, and passes every part as things are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.eagle3 import Drafter as Eagle3
from inference import parity
from inference.decoding.buffers import Lanes
from inference.decoding.clock import StepClock
from inference.decoding.execution import graphs
from inference.decoding.execution.graphs import StepRunner
from inference.decoding.execution.layers import compile_layers
from inference.decoding.rules import match
from inference.kernels.reference.row_linear import InTiles
from inference.measure import roofline
from inference.report.model import BandwidthFacts
from inference.target.kv_cache import KVCache
from inference.target.model import TargetModel
from scripts.evidence import gpu
from scripts.evidence.acceptance import correctness, shapes, speed, training
from scripts.evidence.acceptance.parts import Setting, run_part
from scripts.tools.common import ROOT
from tests.inference.decoding.slow_device import SlowDevice, StaleDevice, every_engine_on
from train.engines.torch_engine import TorchEngine
from train.planning.devices import Peak

PARTS = {part.name: part for parts in gpu.STAGES.values() for part in parts}
CPU = torch.device("cpu")


def found(name: str, **changes: Any) -> dict[str, Any]:
    """What a part leaves at the smallest size."""
    sizes = replace(shapes.TINY, **{"texts": 1, "tokens": 8, "prompts": 1, **changes})
    return run_part(PARTS[name], Setting(CPU, torch.float32, sizes))


def failed(name: str, **changes: Any) -> set[str]:
    """The checks of a part that failed, without the arm behind the comma."""
    left = found(name, **changes)
    assert left["result"] != "error", left["failures"]
    return {check["name"].split(", ")[0] for check in left["checks"] if not check["passed"]}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small target writes the texts, and a busy machine fails no test."""
    monkeypatch.setattr(correctness, "TARGET", ROOT / "assets" / "tiny-target-small")
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(correctness.CLOCKS_APART, device, 0.9)
    monkeypatch.setattr("inference.decoding.clock.AGREEMENT", 0.9)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits that only hold on a GPU, on a CPU: what is asked of CUDA is answered here."""
    facts = SimpleNamespace(major=9, minor=0, total_memory=1 << 40, multi_processor_count=1)
    monkeypatch.setattr(Setting, "on_gpu", True)
    monkeypatch.setattr(Setting, "dtypes", (torch.float32,))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: facts)
    give_bandwidth(monkeypatch, 1.0)


def give_bandwidth(monkeypatch: pytest.MonkeyPatch, used: float) -> None:
    """Let the device have been probed with this bandwidth, in bytes per second."""
    names = ("copy_bytes_per_second", "gemv_bytes_per_second", "used_bytes_per_second")
    facts = BandwidthFacts(device="cpu", **dict.fromkeys(names, used))
    monkeypatch.setattr(speed, "_bandwidths", {CPU: facts})


def slow_down(monkeypatch: pytest.MonkeyPatch, before: Callable[[], Any]) -> None:
    """Let something happen before every step."""
    step = StepRunner.step

    def slowed(self: StepRunner, *given: Any, **more: Any) -> Any:
        before()
        return step(self, *given, **more)

    monkeypatch.setattr(StepRunner, "step", slowed)


# Correctness


@pytest.mark.usefixtures("as_gpu")
def test_kernels_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="`choose` names a kernel only where triton is installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HEADSTART_KERNELS", "triton")
    assert not failed("environment")
    monkeypatch.setenv("HEADSTART_KERNELS", "reference")
    assert failed("environment") == {"kernels that do not run"}


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize(
    ("device", "checks"),
    [
        (SlowDevice, set()),
        (lambda: SlowDevice(refuses="operation not permitted"), {"captured"}),
        (StaleDevice, {"texts that capture changes"}),
    ],
)
def test_steps_that_are_not_captured_or_replayed_wrongly(
    device: Callable[[], SlowDevice], checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One drafter stands for all of them."""
    monkeypatch.setattr(correctness, "new_head", lambda *_: None)
    monkeypatch.setattr(correctness, "product", lambda names, _: [("guesses", "chain")])
    with every_engine_on(device()):
        assert failed("captured", texts=2, tokens=20) == checks


def test_drafts_that_are_accepted_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule takes every draft for the target's own pick."""
    follow = match.follow

    def credulous(picks: Tensor, proposal: Proposal) -> Any:
        drafted = torch.cat([proposal.tokens[:, 1:], picks[:, -1:]], 1)
        return follow(drafted, proposal)

    monkeypatch.setattr(match, "follow", credulous)
    assert failed("padded") == {"texts that accepting changes"}


def test_sums_that_depend_on_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        InTiles, "__call__", lambda self, rows: (1 + len(rows) / 40) * self.call(rows)
    )
    assert failed("exact") == {"texts that differ"}


def test_branches_that_are_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetModel, "_check_against", lambda *given: None)
    monkeypatch.setattr(KVCache, "compact", lambda *given: None)
    names = {c["name"] for c in found("texts", tokens=24)["checks"] if not c["passed"]}
    assert names == {f"{check}, tree of 9, float32" for check in ("mismatches", "flips per 1,000")}


@pytest.mark.parametrize("name", ["clocks", "llama-8-rows"])
def test_a_clock_that_books_half_a_percent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = StepClock.mark

    def sparing(self: StepClock, phase: str) -> None:
        before = self.seconds[phase]
        mark(self, phase)
        self.seconds[phase] = before + 0.005 * (self.seconds[phase] - before)

    monkeypatch.setattr(StepClock, "mark", sparing)
    assert failed(name) == {"booked over wall seconds"}


@pytest.mark.slow
def test_a_test_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_it():\n    assert False\n")
    assert failed("tests", tests=(str(file),)) == {"exit status of pytest"}


# Speed


def test_a_probe_that_crawls(monkeypatch: pytest.MonkeyPatch) -> None:
    interleave = roofline.interleave

    def crawling(*given: Any, **more: Any) -> dict[str, list[float]]:
        return {name: [1e6 * x for x in each] for name, each in interleave(*given, **more).items()}

    monkeypatch.setattr(roofline, "interleave", crawling)
    monkeypatch.setattr(speed, "_bandwidths", {})
    assert failed("bandwidth") == {"bytes per second"}


def test_drafts_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule accepts nothing, so that the chain does not follow its trajectory."""
    follow = match.follow

    def refusing(picks: Tensor, proposal: Proposal) -> Any:
        none = torch.zeros(len(picks), dtype=torch.int64)
        return follow(picks, replace(proposal, limit=none))

    monkeypatch.setattr(match, "follow", refusing)
    assert failed("llama-8-rows") == {"trajectory followed"}


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize(("refuses", "checks"), [("", set()), ("not permitted", {"captured"})])
def test_steps_that_are_not_captured(refuses: str, checks: set[str]) -> None:
    with every_engine_on(SlowDevice(refuses)):
        assert failed("llama-8-rows") == checks


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize(
    ("bandwidth", "compiles", "checks"),
    [
        (1.0, True, set()),
        (1e15, True, {"share of the bandwidth"}),
        (1.0, False, {"layers compiled"}),
    ],
)
def test_a_plain_step_far_from_the_bandwidth_or_of_plain_layers(
    bandwidth: float, compiles: bool, checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is left out: layers run as they are."""

    def said_to_be(target: TargetModel, *_: int) -> None:
        target.compiled_attention = {0: torch.nn.Identity()} if compiles else {}

    monkeypatch.setattr(graphs, "compile_layers", said_to_be)
    give_bandwidth(monkeypatch, bandwidth)
    with every_engine_on(SlowDevice()):
        assert failed("llama-compiled") == checks


@pytest.mark.parametrize("wrong", [False, True])
def test_compiled_layers_that_compute_something_else(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass the check of `compile_layers` and are spoilt afterwards: every layer's output is a
    tenth too large."""

    def spoilt(target: TargetModel, *given: Any) -> bool:
        done = compile_layers(target, *given)
        for layer in target.taps.layers if wrong else ():
            layer.forward = partial(larger, layer.forward)
        return done

    def larger(forward: Callable[..., Tensor], *given: Any, **more: Any) -> Tensor:
        return 1.1 * forward(*given, **more)

    monkeypatch.setattr(correctness, "compile_layers", spoilt)
    assert failed("compiled") == ({"verified logits"} if wrong else set())


def test_layers_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "compile_layers", lambda *_: False)
    left = found("compiled")
    assert left["result"] == "error" and "are not compiled" in left["failures"][0]


@pytest.mark.usefixtures("as_gpu")
def test_rows_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(total_memory=10_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: facts)
    left = found("llama-8k-8-rows")
    assert left["result"] == "passed" and not left["checks"]
    assert left["facts"]["not measured"].endswith("the device has 0")
    assert (left["facts"]["context"], left["facts"]["rows"]) == (48, 2)


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("synchronises", [False, True])
def test_a_step_that_waits_for_the_device(
    synchronises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's debug mode is played by `Tensor.item`, which warns as CUDA does."""
    modes, item = ["default"], Tensor.item

    def watched(self: Tensor) -> Any:
        if modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return item(self)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(Tensor, "item", watched)
    if synchronises:
        slow_down(monkeypatch, lambda: torch.ones(1).item())
    checks = failed("synchronisations")
    assert checks == ({"synchronisations per step"} if synchronises else set())


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("late", [0, 200])
def test_a_host_that_launches_late(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler's trace is of a device with one kernel of 1,000 microseconds per step; the next
    one begins `late` microseconds after its end. A prompt takes ten kernels far apart, which are
    not traced."""
    now, spans, tracing = [0], list[tuple[int, int]](), list[object]()

    def launch(late: int) -> None:
        begin = now[0] + late
        now[0] = begin + 1000
        if tracing:
            spans.append((begin, now[0]))

    class Traced:
        def __init__(self, **given: Any) -> None:
            spans.clear()

        def __enter__(self) -> Traced:
            tracing.append(self)
            return self

        def __exit__(self, *raised: object) -> None:
            tracing.clear()

        def events(self) -> list[SimpleNamespace]:
            cuda = torch.autograd.DeviceType.CUDA
            ranges = [SimpleNamespace(start=first, end=last) for first, last in spans]
            return [SimpleNamespace(time_range=one, device_type=cuda) for one in ranges]

    prefill = Lanes.prefill

    def read(self: Lanes, *given: Any, **more: Any) -> Tensor:
        for _ in range(10):
            launch(5000)
        return prefill(self, *given, **more)

    monkeypatch.setattr(Lanes, "prefill", read)
    monkeypatch.setattr(speed, "profile", Traced)
    slow_down(monkeypatch, lambda: launch(late))
    left = found("trace")
    checks = {check["name"].split(", ")[0] for check in left["checks"] if not check["passed"]}
    assert checks == ({"share of the time without a kernel"} if late else set())
    assert [arm["kernels_per_step"] for arm in left["facts"].values()] == [1.0, 1.0]


@pytest.mark.usefixtures("as_gpu")
def test_plain_decoding_that_dawdles(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, lambda: time.sleep(0.2))
    assert failed("generate") == {"plain decoding over generate"}


# Training


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_training_that_climbs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = TorchEngine.step
    monkeypatch.setattr(TorchEngine, "step", lambda self, rate: step(self, -rate))
    assert failed(name) == {"last loss over the first"}


def test_a_parity_that_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "TrainableDrafter", int)
    assert failed("eagle3") == {"logits compared for parity"}


def test_a_drafter_that_drafts_what_it_was_not_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training computes other logits than decoding."""
    logits = Eagle3.train_logits
    monkeypatch.setattr(
        Eagle3, "train_logits", lambda self, *given: [1.5 * one for one in logits(self, *given)]
    )
    left = found("eagle3")
    assert left["result"] == "error" and left["failures"][0].startswith("ParityError")


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize(("flops", "checks"), [(1.0, set()), (1e18, {"utilisation"})])
def test_a_training_far_from_the_peak(
    flops: float, checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "find_peak", lambda *_: Peak(flops, "a made-up device"))
    assert failed("eagle3") == checks
