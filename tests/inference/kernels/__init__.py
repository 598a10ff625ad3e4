"""Kernels run compiled where there is a GPU, and under Triton's interpreter where there is none.

The interpreter must be asked for before triton is first imported, hence here, before any test module is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
