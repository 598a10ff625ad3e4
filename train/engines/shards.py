"""The optimiser's state by weight, in any division: its form on disk, and how any number of
processes reads it again.

ZeRO divides the state into flat pieces that depend on the stage and on the number of processes.
Here every piece is named by its content: a run of elements of one weight. A process writes the runs
it holds. A process that continues, in a launch of any size and under any engine, reads the runs it
needs from the files that have them. Nothing is gathered: a process never holds more than its own
part. Values are only copied, so a state is restored bit for bit.

A file is a safetensors file of `<weight>.exp_avg`, `<weight>.exp_avg_sq` (float32, flat: the run;
Muon's matrices have only the first) and `<weight>.step` (a scalar). Its metadata `runs` holds, for
each weight, the start of the run and the shape of the whole weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import parse_json
from heads.api.tensors import BROKEN, write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state per element; `step` is one number per weight."""


@dataclass(frozen=True)
class Span:
    """A run of one weight's elements that this process updates. shape: of the whole weight; start,
    count: the run; tensor: the one that the optimiser updates; at: where the run begins in the
    flattened `tensor`."""

    weight: str
    shape: tuple[int, ...]
    start: int
    count: int
    tensor: Tensor
    at: int = 0


@dataclass
class StatePart:
    """The optimiser's state of some runs, in memory. runs: weight -> (start, shape of the whole
    weight)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    runs: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def count(self, weight: str) -> int:
        return self.tensors[f"{weight}.{MOMENTS[0]}"].numel()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of a tensor, counted within its run; a scalar as it is."""
        value = self.tensors[name]
        return value if value.ndim == 0 else value[start:stop]

    def save(self, path: Path) -> None:
        write_tensors(self.tensors, path, {"runs": json.dumps(self.runs)})


class FilePart:
    """`StatePart` on disk, read on demand; raises `UserError` for any other file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(str(path), "pt")
            runs = parse_json((self._file.metadata() or {})["runs"], f"'{path}'").items()
            self.runs = {
                name: (int(start), tuple(map(int, shape))) for name, (start, shape) in runs
            }
            slices = {name: self._file.get_slice(f"{name}.{MOMENTS[0]}") for name in self.runs}
            self._counts = {name: int(part.get_shape()[0]) for name, part in slices.items()}
        except BROKEN as error:
            raise UserError(
                f"'{path}' is no optimiser state that this version reads ({type(error).__name__}: "
                f"{error})."
            ) from error

    def count(self, weight: str) -> int:
        return self._counts[weight]

    def has(self, name: str) -> bool:
        return name in self._file.keys()  # noqa: SIM118 - no mapping

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        view = self._file.get_slice(name)
        value: Tensor = view[start:stop] if view.get_shape() else self._file.get_tensor(name)
        return value


AnyPart = StatePart | FilePart


def collect(optimizer: torch.optim.Optimizer, spans: Iterable[Span]) -> StatePart:
    """Copies of the optimiser's state of `spans` on the CPU, without spans that have none yet."""
    part = StatePart()
    for span in spans:
        state = optimizer.state.get(span.tensor)
        if not state:
            continue
        part.runs[span.weight] = (span.start, span.shape)
        for name in (moment for moment in MOMENTS if moment in state):
            run = state[name].detach().flatten()[span.at : span.at + span.count]
            part.tensors[f"{span.weight}.{name}"] = run.to("cpu", copy=True).contiguous()
        step = torch.as_tensor(state["step"]).detach()
        part.tensors[f"{span.weight}.step"] = step.to("cpu", copy=True)
    return part


def distribute(
    optimizer: torch.optim.Optimizer,
    spans: Sequence[Span],
    whole: Mapping[str, tuple[int, ...]],
    parts: Sequence[AnyPart],
) -> None:
    """Give the optimiser the state of `spans` from `parts`; without parts nothing changes. whole:
    name and shape of every trained weight, of all processes. Raises `UserError` if the parts are of
    other weights or incomplete."""
    found: dict[str, list[AnyPart]] = {}
    for part in parts:
        for weight in part.runs:
            found.setdefault(weight, []).append(part)
    if not found:
        return
    _require_same_weights(found, whole)
    groups: dict[int, list[Span]] = {}
    for span in spans:
        groups.setdefault(id(span.tensor), []).append(span)
    for group in groups.values():
        tensor, first = group[0].tensor, group[0].weight
        names = [name for name in MOMENTS if found[first][0].has(f"{first}.{name}")]
        state = {name: torch.zeros_like(tensor, requires_grad=False) for name in names}
        step = torch.zeros((), dtype=torch.float32)
        for span in group:
            for name in names:
                target = state[name].view(-1)[span.at : span.at + span.count]
                _fill(target, name, span, found[span.weight])
            step = torch.maximum(step, found[span.weight][0].read(f"{span.weight}.step"))
        optimizer.state[tensor] = {"step": step.to(tensor.device, copy=True), **state}


def _require_same_weights(
    found: dict[str, list[AnyPart]], whole: Mapping[str, tuple[int, ...]]
) -> None:
    unknown, missing = sorted(set(found) - set(whole)), sorted(set(whole) - set(found))
    if unknown or missing:
        raise UserError(
            f"the saved optimiser state is of another drafter: unknown weights {unknown[:4]}, "
            f"missing weights {missing[:4]}. Train with the settings it was started with, or in "
            "another folder."
        )
    for weight, shape in whole.items():
        for saved in (part.runs[weight][1] for part in found[weight]):
            if saved != shape:
                raise UserError(
                    f"the saved optimiser state of '{weight}' is of a weight of another shape: "
                    f"{list(saved)}, here {list(shape)}. Train with the settings it was started "
                    "with, or in another folder."
                )


def _fill(target: Tensor, name: str, span: Span, parts: Sequence[AnyPart]) -> None:
    """Copy the span from the runs that overlap it; raises `UserError` if elements are missing."""
    filled = 0
    for part in parts:
        begin = part.runs[span.weight][0]
        first = max(begin, span.start)
        last = min(begin + part.count(span.weight), span.start + span.count)
        if first < last:
            values = part.read(f"{span.weight}.{name}", first - begin, last - begin)
            target[first - span.start : last - span.start].copy_(values)
            filled += last - first
    if filled != span.count:
        raise UserError(
            f"the saved optimiser state is incomplete: of '{span.weight}' {filled} of "
            f"{span.count} elements were found. A file of another process is missing; copy the "
            "whole folder."
        )


def whole_spans(named: Mapping[str, Tensor]) -> list[Span]:
    return [Span(name, tuple(p.shape), 0, p.numel(), p) for name, p in named.items()]


def slice_spans(
    named: Sequence[tuple[str, tuple[int, ...]]], offsets: Sequence[int], begin: int, tensor: Tensor
) -> list[Span]:
    """ZeRO 1 and 2: weights lie at `offsets`; this process updates the slice from `begin` on."""
    spans = []
    for (name, shape), offset in zip(named, offsets, strict=True):
        first = max(offset, begin)
        last = min(offset + prod(shape), begin + tensor.numel())
        if first < last:
            spans.append(Span(name, shape, first - offset, last - first, tensor, first - begin))
    return spans


def piece_spans(
    named: Sequence[tuple[str, tuple[int, ...]]], pieces: Sequence[int], rank: int, tensor: Tensor
) -> list[Span]:
    """ZeRO 3: every weight is divided into pieces, of which this process updates number `rank`;
    they are stored one after the other in `tensor`."""
    spans, at = [], 0
    for (name, shape), piece in zip(named, pieces, strict=True):
        start = rank * piece
        count = min(piece, prod(shape) - start)
        if count > 0:
            spans.append(Span(name, shape, start, count, tensor, at))
        at += piece
    return spans
