"""Row-wise writes into drafter states, so that a finished row can be refilled while the others go on.

A state is a dataclass whose tensors all have leading size B (or are shared and marked so by living in a non-tensor field).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def write_rows(state: Any, rows: Tensor, new: Any) -> None:
    """Overwrite rows `rows` [R] int64 of every tensor in `state`, nested ones included, with the R rows of `new`, in place.

    A state may live on another device than `rows` (a drafter placed elsewhere).
    """
    assert is_dataclass(state) and type(state) is type(new), (
        f"{type(state)} and {type(new)} are not the same dataclass"
    )
    for item in fields(state):
        old_value, new_value = getattr(state, item.name), getattr(new, item.name)
        if isinstance(old_value, Tensor):
            old_value[rows.to(old_value.device)] = new_value
        elif isinstance(old_value, (list, tuple)):
            for old_part, new_part in zip(old_value, new_value, strict=True):
                if isinstance(old_part, Tensor):
                    old_part[rows.to(old_part.device)] = new_part
                elif is_dataclass(old_part) and not getattr(old_part, "shared_between_rows", False):
                    write_rows(old_part, rows, new_part)
        elif is_dataclass(old_value) and not getattr(old_value, "shared_between_rows", False):
            write_rows(old_value, rows, new_value)
