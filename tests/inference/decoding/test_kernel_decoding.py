"""The whole decoder with every kernel in place, under Triton's interpreter: the same tokens as with
the references.

In a process of its own, because the interpreter must be asked for before triton is first imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import os, sys
import torch
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from heads.kernels import dispatch
from inference.kernels.registry import all_ops
from tests.inference.decoding.test_lossless import SHAPES, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target, texts_of

family, shape = sys.argv[1:]
target = random_target(family, dtype=torch.float32)
config = DecodeConfig(batch_size=2, lag=1, temperature=1.0, **SHAPES[shape])
texts, used = [], set()
for mode in ("reference", "triton"):
    os.environ[dispatch.VARIABLE] = mode
    for op in all_ops():
        original = op.triton()
        def watched(*args, _original=original, _name=op.name, **kwargs):
            used.add((mode, _name))
            return _original(*args, **kwargs)
        op._loaded[op.kernel] = watched
    engine = Engine(target, drafter_of("medusa", target), config)
    texts.append(texts_of(engine, requests(2, new=4)))
assert texts[0] == texts[1], texts
assert not any(mode == "reference" for mode, _ in used)
print("kernels:", *sorted(name for _, name in used))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape", "kernels"),
    [
        (
            "llama",
            "tree",
            {
                "tree_attention",
                "accept_walk",
                "compact",
                "gumbel_noise",
                "noise_pick",
                "residual_blocks",
            },
        ),
        ("gemma2", "chain", {"tree_attention", "noise_pick"}),
    ],
)
def test_decoding_with_kernels_gives_the_same_tokens(
    family: str, shape: str, kernels: set[str], repository: Path
) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(repository),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, family, shape],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert kernels <= set(ran.stdout.split())
