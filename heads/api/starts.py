"""Where a training starts: the weights of a checkpoint of the same kind, or of a kind that can be
converted to it.

A kind names the others that it can start from (`TrainableDrafter.starts_from`) and says there how
to convert their tensors. It imports none of them: it only knows the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Carry = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]
"""(initialised drafter, the checkpoint's tensors) -> tensors by the drafter's names: the given
objects where they carry over, new ones where a weight is converted. A given tensor that gets no
name of the drafter's is left out."""


@dataclass(frozen=True)
class OtherKind:
    """How a training starts from another kind's checkpoint. additions: patterns of the names, as
    `carry` returns them, that the drafter or the checkpoint may lack; any other difference means
    different settings and is an error."""

    carry: Carry
    additions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """The result of a start, as lists of parts: those carried over from the checkpoint, those
    converted from it, those left as initialised, and the checkpoint's parts that are left out."""

    carried: list[str]
    fitted: list[str]
    fresh: list[str]
    unused: list[str]

    @property
    def is_whole(self) -> bool:
        """Whether every weight carried over and none was left out."""
        return not (self.fitted or self.fresh or self.unused)

    def __str__(self) -> str:
        told = {
            "carry over": self.carried,
            "are made to fit them": self.fitted,
            "begin anew": self.fresh,
            "are left out": self.unused,
        }
        return "; ".join(f"{', '.join(names)} {what}" for what, names in told.items() if names)


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """The tensors, with the prefix `old` of their names replaced by `new`."""
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: value
        for name, value in tensors.items()
    }


def named_parts(names: Collection[str], among: Collection[str]) -> list[str]:
    """The fewest parts of a network that hold the weights `names` and no other ones of `among`."""
    others = set(among) - set(names)
    found = set()
    for name in names:
        places = [place for place, letter in enumerate(name) if letter == "."]
        parts = [name[:place] for place in places]
        whole = (part for part in parts if not any(o.startswith(f"{part}.") for o in others))
        found.add(next(whole, name.removesuffix(".weight")))
    return sorted(found)
