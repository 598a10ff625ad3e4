"""Which implementation of a kernel runs, what is said about it, and that none of it needs
triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from heads.api.errors import UserError
from heads.kernels import dispatch
from heads.kernels.dispatch import FLOATS, VARIABLE, Choice, Op, choose
from tests.heads.kernels.devices import ON_CPU


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No override, and nothing remembered about devices that a test pretends to have."""
    monkeypatch.delenv(VARIABLE, raising=False)
    dispatch._obstacle.cache_clear()
    yield
    dispatch._obstacle.cache_clear()


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Op:
    """An operation whose implementations tell themselves apart: the reference takes the absolute
    value, the kernel negates.
    """
    monkeypatch.setattr(dispatch, "OPS", {})
    return Op("fake", torch.abs, "torch:neg", FLOATS)


def with_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str = "3.6.0"
) -> None:
    """Pretend that there is a GPU of this compute capability, and this triton."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(dispatch, "triton_version", lambda: version)


def test_the_reference_runs_on_a_cpu_and_says_so(op: Op) -> None:
    choice = choose(op, "cpu")
    assert choice.implementation == "reference" and choice.why.startswith("CPU: the reference runs")
    assert op(torch.tensor([-2.0])) == 2.0


def test_the_kernel_runs_on_a_gpu(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, (9, 0))
    assert choose(op, "cuda:0") == Choice("triton", "CUDA device with triton 3.6.0")


def test_a_kernel_is_launched_on_the_device_of_its_first_argument(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, (9, 0))
    current: list[torch.device] = []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", guard)
    where: list[torch.device] = []
    op._loaded[op.kernel] = lambda first: where.extend(current)
    other = torch.device("cuda:1")
    op(SimpleNamespace(device=other, dtype=torch.float32))  # type: ignore[arg-type]
    assert where == [other] and not current


def test_a_gpu_too_old_for_triton_gets_the_reference(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, (7, 5))
    assert choose(op, "cuda").implementation == "reference"
    assert "7.5" in choose(op, "cuda").why


def test_gpus_of_amd_get_the_reference(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch names them cuda too; a kernel's PTX does not compile there."""
    with_gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    why = "ROCm: the kernels are written for NVIDIA GPUs"
    assert choose(op, "cuda:0") == Choice("reference", why)
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(UserError, match=f"fake cannot run on cuda: {why}"):
        choose(op, "cuda")


def test_other_devices_get_the_reference(op: Op) -> None:
    assert choose(op, "mps") == Choice("reference", "Triton has no mps devices")


def test_float64_is_for_the_reference_even_where_triton_is_demanded(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, (9, 0))
    for mode in ("auto", "triton"):
        monkeypatch.setenv(VARIABLE, mode)
        assert choose(op, "cuda", torch.float64).implementation == "reference"
        assert choose(op, "cuda", torch.bfloat16).implementation == "triton"


def test_the_reference_can_be_demanded(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, (9, 0))
    monkeypatch.setenv(VARIABLE, "reference")
    assert choose(op, "cuda") == Choice("reference", f"{VARIABLE}=reference")


@ON_CPU
def test_the_kernel_can_be_demanded_under_the_interpreter(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    assert choose(op, "cpu").implementation == "triton"
    assert op(torch.tensor([3.0])) == -3.0


def test_a_demand_that_cannot_be_met_says_what_to_do(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.delenv(dispatch.INTERPRET, raising=False)
    with pytest.raises(
        UserError, match=r"fake cannot run on cpu: CPU: .*Use HEADSTART_KERNELS=auto"
    ):
        op(torch.tensor([3.0]))


def test_an_unknown_override_is_refused(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "trition")
    with pytest.raises(
        UserError, match="Did you mean 'triton'\\? Allowed: auto, reference, triton"
    ):
        choose(op, "cpu")


def test_two_operations_of_one_name_are_our_mistake(op: Op) -> None:
    with pytest.raises(AssertionError, match="fake"):
        Op("fake", torch.abs, "torch:neg")
