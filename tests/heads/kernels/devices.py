"""Where kernels are tested: interpreted on the CPU, compiled on a GPU, never the other way
round."""

from __future__ import annotations

import pytest

from heads.kernels.dispatch import is_interpreted

ON_CPU = pytest.mark.skipif(
    not is_interpreted(), reason="on the CPU kernels need TRITON_INTERPRET=1"
)
ON_CUDA = pytest.mark.skipif(
    is_interpreted(), reason="TRITON_INTERPRET=1 would interpret the kernel on a GPU too"
)
DEVICES = [
    pytest.param("cpu", marks=ON_CPU),
    pytest.param("cuda", marks=[pytest.mark.gpu, ON_CUDA]),
]
