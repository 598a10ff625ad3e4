"""Operations on rows of drafter states (overwrite some while others continue, copy them, decode
with some alone) and on whole states (restore them).

A state is a dataclass whose tensors all have leading size B, or are marked as shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def write_rows(state: Any, rows: Tensor, new: Any) -> None:
    """Overwrite rows [R] int64 of every tensor in `state`, nested or not, with those of `new`.

    A state may live on another device than `rows` (a drafter placed elsewhere).
    """
    assert is_dataclass(state) and type(state) is type(new), (
        f"{type(state)} and {type(new)} are not the same dataclass"
    )
    for item in fields(state):
        _write(getattr(state, item.name), rows, getattr(new, item.name))


def _write(old: Any, rows: Tensor, new: Any) -> None:
    if isinstance(old, Tensor):
        old[rows.to(old.device)] = new
    elif isinstance(old, (list, tuple)):
        for old_part, new_part in zip(old, new, strict=True):
            _write(old_part, rows, new_part)
    elif _has_rows(old):
        write_rows(old, rows, new)


def first_rows(state: Any, count: int) -> Any:
    """The first `count` rows of a state as views: writes to them change the state."""
    return _over(state, lambda tensor: tensor[:count])


def read_rows(state: Any, rows: Tensor) -> Any:
    """Copies of the rows `rows` [R] int64 of a state, in the form that `write_rows` takes."""
    return _over(state, lambda tensor: tensor[rows.to(tensor.device)])


def write_back(state: Any, part: Any, count: int) -> None:
    """Copy tensors that a step replaced in `part` (made by `first_rows`) into the first `count`
    rows of `state`, and make them views again. Tensors that were written in place cost nothing."""
    for item in fields(state):
        whole, own = getattr(state, item.name), getattr(part, item.name)
        if isinstance(whole, Tensor):
            if own.data_ptr() != whole.data_ptr() or own.shape[1:] != whole.shape[1:]:
                whole[:count] = own
                setattr(part, item.name, whole[:count])
        elif isinstance(whole, (list, tuple)):
            for number, (whole_part, own_part) in enumerate(zip(whole, own, strict=True)):
                if isinstance(whole_part, Tensor):
                    if own_part.data_ptr() != whole_part.data_ptr():
                        whole_part[:count] = own_part
                        own[number] = whole_part[:count]
                elif _has_rows(whole_part):
                    write_back(whole_part, own_part, count)
        elif _has_rows(whole):
            write_back(whole, own, count)
        elif own is not whole:
            setattr(state, item.name, own)


def _over(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`state` with `change` applied to all its tensors; parts that rows share stay the same
    object."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, (list, tuple)):
        return [_over(part, change) for part in state]
    if not _has_rows(state):
        return state
    changed = copy(state)
    for item in fields(state):
        setattr(changed, item.name, _over(getattr(state, item.name), change))
    return changed


def _has_rows(state: Any) -> bool:
    """Whether a part of a state is a dataclass with separate rows."""
    shared = isinstance(state, type) or getattr(state, "shared_between_rows", False)
    return is_dataclass(state) and not shared


# Whole states


class Snapshot:
    """A copy of a state's present content, from which the state can be restored in place.

    A state may name fields in a class attribute `behind_root`: caches indexed by position, of which
    nothing behind the root is read before it is written again. Those are not copied.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._saved = [(value, value.clone()) for value in state_tensors(state)]

    def restore(self) -> None:
        """Restore the state, which must hold the same tensor objects as it did then."""
        now = state_tensors(self._state)
        for (value, before), held in zip(self._saved, now, strict=True):
            assert held is value, "a drafter must update its state in place to have it put back"
            value.copy_(before)


@contextmanager
def scratch(state: Any) -> Iterator[None]:
    """Restore every tensor of a drafter's state at the end of the block; see `Snapshot`."""
    saved = Snapshot(state)
    yield
    saved.restore()


def state_tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state that a commit changes and that must be restored, also those that rows
    share (the texts that lookups remember), but no constants (frozen dataclasses)."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from state_tensors(item)
    elif _has_rows(state) or (is_dataclass(state) and not _is_constant(state)):
        left_out = getattr(type(state), "behind_root", ())
        for item in fields(state):
            if item.name not in left_out:
                yield from state_tensors(getattr(state, item.name))


def _is_constant(state: Any) -> bool:
    """Whether a dataclass is frozen, or is a class instead of an instance."""
    return isinstance(state, type) or bool(type(state).__dataclass_params__.frozen)
