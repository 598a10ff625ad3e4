"""Every operation with a kernel is found, in any process, and none needs triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heads.kernels import dispatch
from heads.kernels.dispatch import VARIABLE
from inference.kernels.registry import all_ops, report
from tests.heads.kernels.devices import ON_CPU


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    dispatch._obstacle.cache_clear()


def test_the_report_names_every_operation() -> None:
    rows = report("cpu")
    assert [row["op"] for row in rows] == [op.name for op in all_ops()]
    assert {"tree_attention", "row_losses"} <= {row["op"] for row in rows}
    assert all(row["implementation"] == "reference" and row["why"] for row in rows)


@ON_CPU
def test_every_declared_kernel_exists() -> None:
    assert all(callable(op.triton()) for op in all_ops())


def test_a_fresh_process_finds_every_operation(repository: Path) -> None:
    program = (
        "from inference.kernels.registry import all_ops; print(*(op.name for op in all_ops()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, timeout=120
    )
    names = ["accept_walk", "compact", "filter_logits", "gumbel_noise", "noise_pick"]
    assert ran.stdout.split() == [
        *names,
        "residual_blocks",
        "row_linear",
        "row_losses",
        "tree_attention",
        "write_clock",
        "write_slots",
    ], ran.stderr


WITHOUT_TRITON = """
import sys
import inference.kernels.reference.attention as module
assert "triton" not in sys.modules, "importing a declaration imports triton"
sys.modules["triton"] = None  # from here on importing it fails, as where it is not installed
import torch
from heads.kernels.dispatch import choose
from inference.kernels.registry import all_ops
from heads.api.tree import TokenTree
tree = TokenTree.chain(2)
x = torch.ones(1, 2, 3, 4)
out = module.TREE_ATTENTION(x, x, x, torch.tensor([0]), tree.words(), tree.depth, scaling=1.0)
assert out.shape == (1, 3, 2, 4) and torch.equal(out, torch.ones_like(out))
print(*sorted({choose(op, device).why for op in all_ops() if op.by_default for device in ("cpu", "cuda")}))
"""


def test_without_triton_the_references_work(repository: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    environment.pop(VARIABLE, None)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "no triton installed"
