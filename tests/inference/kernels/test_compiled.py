"""All kernels compile to machine code for the oldest GPU that is supported and for Hopper, without
a GPU.

The interpreter takes Python that Triton's compiler refuses, and says nothing about what comes out.
Looked at here: that no kernel spills registers in bfloat16, that nothing computes in 64-bit floats,
what `launch_config` counts on for Hopper, and that the compaction's barrier stands between its loads
and its stores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from heads.kernels.dispatch import triton_version
from inference.kernels.registry import all_ops

pytest.importorskip("triton")

CAPABILITY = 80
COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = {}
for job in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(job["module"]), job["kernel"])
    types = {name: "constexpr" if name in job["constants"] else job["types"].get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=job["constants"])
    built = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[2]), 32))
    found[job["kernel"]] = {"ptx": built.asm["ptx"], "machine code": len(built.asm["cubin"])}
print(json.dumps(found))
"""
INT64, BF16 = "*i64", "*bf16"
PICK = {
    "logits": BF16,
    "positions": INT64,
    "seeds": INT64,
    "token_ids": INT64,
    "scores": "*i32",
    "columns": "*i32",
}
MOVE = {
    "keys": BF16,
    "values": BF16,
    "lengths": INT64,
    "path": INT64,
    "accepted": INT64,
    "key_layer": "i64",
    "value_layer": "i64",
}
WALK = {
    "tokens": INT64,
    "picks": INT64,
    "parents": INT64,
    "path": INT64,
    "accepted": INT64,
    "has_children": "*i1",
}
JOBS = [
    ("commit", "_walk_kernel", WALK, {"CHAIN": False, "NODES": 64, "PLACES": 8}),
    ("commit", "_compact_kernel", MOVE, {"ALL_MOVE": False, "PLACES": 8, "COLUMNS": 64}),
    (
        "noise_pick",
        "_pick_kernel",
        {**PICK, "temperature": "fp32"},
        {"NOISE": True, "NAMED": True, "BLOCK": 1024},
    ),
    (
        "noise_pick",
        "_merge_kernel",
        {"scores": "*i32", "columns": "*i32", "picks": INT64},
        {"SPLITS": 64},
    ),
    (
        "noise_pick",
        "_noise_kernel",
        {
            "positions": INT64,
            "seeds": INT64,
            "token_ids": INT64,
            "noise": "*fp32",
            "bits_out": "*i32",
        },
        {"BITS": True, "BLOCK": 1024},
    ),
    (
        "heads_gemm",
        "_residual_kernel",
        dict.fromkeys(("states", "weight", "bias", "out"), BF16),
        {"ROWS": 16, "OUTPUTS": 32, "INPUTS": 128, "UPCAST": False},
    ),
]


@pytest.mark.slow
def test_kernels_compile_without_a_gpu(tmp_path: Path, repository: Path) -> None:
    jobs = [
        {
            "module": f"inference.kernels.{module}",
            "kernel": kernel,
            "types": types,
            "constants": constants,
        }
        for module, kernel, types, constants in JOBS
    ]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(repository), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, json.dumps(jobs), str(CAPABILITY)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {kernel for _, kernel, _, _ in JOBS}
    for name, built in found.items():
        assert built["machine code"] > 1000, name
        assert ".f64" not in built["ptx"], f"{name} computes in 64-bit floats"
    assert re.search(r"mma\.sync", found["_residual_kernel"]["ptx"]), (
        "the product must run on the tensor cores"
    )
    order = re.findall(
        r"ld\.global\S*b16|bar\.sync|st\.global\S*b16", found["_compact_kernel"]["ptx"]
    )
    kinds = "".join({"l": "L", "b": "|", "s": "S"}[word[0]] for word in order)
    assert re.fullmatch(r"(L+\|S+){2}", kinds), (
        f"keys and values: loads, a barrier, stores; found {kinds}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_no_kernel_spills(capability: str, repository: Path, tmp_path: Path) -> None:
    """Every kernel of the project, called as decoding and training call it, in bfloat16."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(repository)
    command = [sys.executable, "-m", "tests.inference.kernels.hopper", capability]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    launches: dict[str, list[dict[str, Any]]] = {}
    for line in ran.stdout.splitlines():
        found = json.loads(line)
        launches.setdefault(found["kernel"], []).append(found)
        assert not found["float64"], f"{found['kernel']} computes in 64-bit floats"
    assert set(launches) == kernel_names()
    # triton 3.6 spills 8 bytes in one launch of this kernel
    allowed = {"_split_kernel": 8} if (triton_version() or "").startswith("3.6.") else {}
    for name, several in launches.items():
        spilled = [launch["spilled"] for launch in several]
        assert max(spilled) <= allowed.get(name, 0), (name, spilled)
    if capability == "90":
        # what `launch_config` counts on: two programs per SM, and Hopper's matrix instructions
        large = launches["_split_kernel"][0]
        assert large["wgmma"] and 2 * (large["shared"] + 1024) <= 228 * 1024


def kernel_names() -> set[str]:
    """The kernels in the modules of all operations; functions without this ending are called by
    kernels."""
    names = set()
    for module in {op.kernel.split(":")[0] for op in all_ops()}:
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        names |= set(re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", text, re.MULTILINE))
    return names
