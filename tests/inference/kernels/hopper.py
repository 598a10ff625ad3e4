"""Compiles every kernel for a GPU, Hopper (sm_90) unless told otherwise, on a machine without one:
the interpreter accepts much that the compiler does not.

`python -m tests.inference.kernels.hopper [CAPABILITY] [OPERATION ...]`, in a process with TRITON_INTERPRET=0, calls the kernels'
own host functions with CPU tensors and with launching taken out, so that what is compiled is what a
GPU would be given. Prints a line of JSON per kernel: operation, kernel, shared (bytes), spilled
(bytes of registers per thread that went to memory), wgmma (Hopper's matrix instructions are used),
float64 (something computes in 64-bit floats).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from heads.api.tree import TokenTree
from heads.kernels.dispatch import Op
from heads.kernels.reference.row_losses import NAMES
from inference.kernels import tree_attention
from inference.kernels.registry import all_ops


@dataclass(frozen=True)
class Pretended:
    """As much of a driver as compiling asks for; capability: 90 for sm_90."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(op: Op) -> None:
    """An 8B Llama's heads with 64 nodes; then a lone node with everything that models ask for at
    once."""
    for nodes, size, more in (
        (64, 128, {}),
        (1, 80, {"window": 500, "softcap": 30.0, "sinks": zeros(32, dtype=torch.bfloat16)}),
    ):
        tree = TokenTree.chain(nodes - 1)
        keys = zeros(2, 8, 1024, size, dtype=torch.bfloat16)
        query = zeros(2, 32, nodes, size, dtype=torch.bfloat16)
        op.triton()(query, keys, keys, zeros(2), tree.words(), tree.depth, scaling=1.0, **more)
    # a drafter's: a level of ten nodes, one of a chain, one with a window and smaller heads
    for nodes, asked, size, limits in (
        (40, 10, 128, {}),
        (5, 1, 128, {}),
        (7, 1, 64, {"window": 500}),
    ):
        tree = TokenTree.chain(nodes - 1)
        keys = zeros(2, 1000, 8, size, dtype=torch.bfloat16).transpose(1, 2)
        query = zeros(2, asked, 32, size, dtype=torch.bfloat16).transpose(1, 2)
        given = zeros(2), tree.words()[:, -asked:], tree.depth
        more = {"at": tree.depth[:, -asked:], **limits}
        op.triton()(query, keys, keys, *given, scaling=1.0, **more)


def cache(op: Op) -> None:
    keys = zeros(4, 2, 8, 128, 128, dtype=torch.bfloat16)
    op.triton()(keys, keys.clone(), zeros(2), zeros(2, 6))


def losses(op: Op) -> None:
    """What EAGLE-3, DSpark and a distilled model at a temperature ask for, and everything at once;
    with gradients."""
    logits = zeros(2, 3, 32000, dtype=torch.bfloat16).requires_grad_()
    target, labels = zeros(3, 32000, dtype=torch.bfloat16), zeros(2, 3)
    for names, temperature in (
        (("soft_cross_entropy",), 1.0),
        (("cross_entropy", "total_variation"), 1.0),
        (("forward_kl", "cross_entropy"), 0.7),
        (NAMES, 0.7),
    ):
        found = op.triton()(logits, target, labels, names, temperature)
        torch.stack([found[name] for name in names]).sum().backward()


SAMPLES: dict[str, Callable[[Op], Any]] = {
    "tree_attention": attention,
    "compact": cache,
    "accept_walk": lambda op: op.triton()(
        zeros(2, 64), zeros(2, 64), TokenTree.from_choices([[0], [1], [0, 0]])
    ),
    "gumbel_noise": lambda op: op.triton()(zeros(2), zeros(2, 64), zeros(1000)),
    "noise_pick": lambda op: op.triton()(
        zeros(2, 6, 1000, dtype=torch.bfloat16), zeros(2, 6), zeros(2), 0.7
    ),
    "write_slots": lambda op: op.triton()(
        *(zeros(2, 8, size, 128, dtype=torch.bfloat16) for size in (64, 64, 6, 6)), zeros(2, 6)
    ),
    "write_clock": lambda op: op.triton()(zeros(5), 2),
    "filter_logits": lambda op: op.triton()(
        zeros(2, 6, 1000, dtype=torch.float32),
        zeros(2),
        *(zeros(2, dtype=torch.float32) for _ in range(2)),
    ),
    "row_linear": lambda op: op.triton()(
        zeros(6, 4096, dtype=torch.bfloat16), zeros(1024, 4096, dtype=torch.bfloat16)
    ),
    "row_losses": losses,
    "residual_blocks": lambda op: op.triton()(
        *(zeros(*shape, dtype=torch.bfloat16) for shape in ((4, 5, 256), (4, 256, 256), (4, 256)))
    ),
}
"""A call of every operation; what its results are does not matter."""


SHARED = {80: 163 * 1024, 90: tree_attention.HOPPER_SHARED}
"""Most bytes of shared memory of a program, by capability."""


def compile_only(capability: int = 90) -> list[Any]:
    """From now on kernels are compiled when they are called, and kept in the returned list instead
    of being launched.
    """
    driver.set_active(Pretended(capability))
    tree_attention._shared_memory = lambda device: SHARED[capability]  # type: ignore[assignment]
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_it
    return compiled


def spilled(cubin: bytes) -> int:
    """Bytes of stack per thread, which these kernels have no other use for than registers that did
    not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", said.stdout + said.stderr))


def main() -> None:
    capability, *names = sys.argv[1:] or ["90"]
    compiled = compile_only(int(capability))
    for op in all_ops():
        if names and op.name not in names:
            continue
        SAMPLES[op.name](op)
        for kernel in compiled:
            ptx = kernel.asm["ptx"]
            row = {"operation": op.name, "kernel": kernel.metadata.name}
            row |= {"shared": kernel.metadata.shared, "spilled": spilled(kernel.asm["cubin"])}
            print(json.dumps({**row, "wgmma": "wgmma" in ptx, "float64": ".f64" in ptx}))
        compiled.clear()


if __name__ == "__main__":
    main()
