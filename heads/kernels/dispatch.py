"""The choice of a kernel's implementation: Triton on an NVIDIA GPU, the plain-torch reference
elsewhere.

An operation is declared once, with its reference, in `heads.kernels.reference` if training computes
it and in `inference.kernels.reference` if only decoding does:

    COMPACT = Op("compact", compact, "inference.kernels.commit:compact")

and is called like a function; the device and the dtype of its first argument (a tensor) decide.
Modules with Triton kernels import triton at their top and are imported only when their kernel is
called, so nothing here needs triton to be installed. HEADSTART_KERNELS=auto|reference|triton
overrides the choice. Steps that are traced to be compiled for a CPU (`traced_for_cpu`) may have a
third implementation, in C++. For tests, TRITON_INTERPRET=1, set before triton is first imported,
lets HEADSTART_KERNELS=triton run the kernels on a CPU, slowly.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from heads.api.errors import UserError, suggest

VARIABLE = "HEADSTART_KERNELS"
INTERPRET = "TRITON_INTERPRET"
MODES = ("auto", "reference", "triton")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of kernels that accumulate in float32; float64 is for references."""
OLDEST_GPU = (8, 0)
"""Compute capability that Triton requires of NVIDIA GPUs."""

OPS: dict[str, Op] = {}
"""Every operation by its name, if its module was imported (`inference.kernels.registry` imports
them all)."""


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and the reason in a few words."""

    implementation: Literal["triton", "cpp", "reference"]
    why: str


@dataclass(frozen=True)
class Op:
    """An operation with implementations of one signature, registered under `name`.

    reference: plain torch, which defines the operation. kernel: "module:function", imported when it
    first runs. dtypes: those of the first argument that the kernel supports; empty: any.
    by_default: whether the kernel runs wherever it can, or only with HEADSTART_KERNELS=triton. cpp:
    as `kernel`, for steps that are traced for a CPU, in float32; None if there is none.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str
    dtypes: tuple[torch.dtype, ...] = ()
    by_default: bool = True
    cpp: str | None = None
    _loaded: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.name not in OPS, f"two kernels are called {self.name}"
        OPS[self.name] = self

    def triton(self) -> Callable[..., Any]:
        """The kernel's function; imports triton."""
        return self._load(self.kernel)

    def _load(self, place: str) -> Callable[..., Any]:
        if place not in self._loaded:
            module, function = place.split(":")
            self._loaded[place] = getattr(importlib.import_module(module), function)
        return self._loaded[place]

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation that `choose` names for the device and dtype of `first`."""
        implementation = choose(self, first.device, first.dtype).implementation
        if implementation == "triton":
            with on_device(first.device):
                return self.triton()(first, *args, **kwargs)
        if implementation == "cpp":
            assert self.cpp is not None
            return self._load(self.cpp)(first, *args, **kwargs)
        return self.reference(first, *args, **kwargs)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block, `device` is CUDA's current one: Triton launches on it, whatever the device
    of its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_TRACED: ContextVar[bool] = ContextVar("headstart_traced_for_cpu", default=False)


@contextmanager
def traced_for_cpu() -> Iterator[None]:
    """Operations within the block are recorded, and compiled for a CPU later."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


def choose(op: Op, device: torch.device | str, dtype: torch.dtype | None = None) -> Choice:
    """Which implementation of `op` runs on `device` for a first argument of `dtype` (or any).

    Raises `UserError` for an unknown HEADSTART_KERNELS, or one that cannot run.
    """
    mode = os.environ.get(VARIABLE, "auto")
    if mode not in MODES:
        raise UserError(f"{VARIABLE} is '{mode}'.{suggest(mode, MODES)}")
    if mode == "reference":
        return Choice("reference", f"{VARIABLE}=reference")
    on_cpu = torch.device(device).type == "cpu"
    if mode == "auto" and op.cpp and _TRACED.get() and on_cpu and dtype == torch.float32:
        return Choice("cpp", "compiled for the CPU")
    if mode == "auto" and not op.by_default:
        return Choice("reference", f"not shown to be faster; {VARIABLE}=triton runs the kernel")
    if dtype is not None and op.dtypes and dtype not in op.dtypes:
        # also with HEADSTART_KERNELS=triton: a float64 audit of a model must be computed in float64
        name = str(dtype).removeprefix("torch.")
        return Choice("reference", f"{name}: the kernel does not compute in it")
    device = torch.device(device)
    obstacle = _obstacle(device.type, device.index, mode == "triton" and is_interpreted())
    if obstacle is None:
        on_cuda = device.type == "cuda"
        place = "CUDA device" if on_cuda else f"{device.type.upper()} under {INTERPRET}=1"
        return Choice("triton", f"{place} with triton {triton_version()}")
    if mode == "triton":
        raise UserError(
            f"{VARIABLE}=triton, but the kernel {op.name} cannot run on {device}: {obstacle}. "
            f"Use {VARIABLE}=auto, a CUDA device with triton installed, or {INTERPRET}=1 for tests."
        )
    return Choice("reference", obstacle)


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "on", "yes", "y")


@cache
def triton_version() -> str | None:
    """The installed triton's version, without importing it; None if there is none."""
    if importlib.util.find_spec("triton") is None:
        return None
    for name in ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


@cache
def _obstacle(kind: str, index: int | None, interpret: bool) -> str | None:
    """The reason why Triton kernels do not run on such a device, or None; called per layer and
    step."""
    if triton_version() is None:
        return "no triton installed"
    if kind == "cuda":
        if torch.version.hip is not None:
            return "ROCm: the kernels are written for NVIDIA GPUs"
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST_GPU:
            found, needed = (".".join(map(str, pair)) for pair in (capability, OLDEST_GPU))
            return f"compute capability {found}; Triton needs {needed}"
        return None
    if kind == "cpu":
        why = f"CPU: the reference runs ({INTERPRET}=1 runs kernels here for tests)"
        return None if interpret else why
    return f"Triton has no {kind} devices"
