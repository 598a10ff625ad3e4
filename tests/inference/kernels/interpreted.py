"""Triton's interpreter with the products of a GPU's matrix cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def products_with_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are numpy's, whose sums depend on a row's place; those of a GPU's
    matrix cores do not."""
    from triton.runtime import interpreter  # triton is not installed everywhere

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        products = a.data[:, :, None].astype(np.float32) * b.data[None].astype(np.float32)
        total = d.data.astype(np.float32)
        for step in range(products.shape[1]):
            total = total + products[:, step]
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
