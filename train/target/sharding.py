"""A frozen target divided among the processes of a training (ZeRO-3 without gradients).

Every process keeps 1/N of each decoder layer. A layer is gathered just before it runs and released
right after it; meanwhile the next one is being gathered. Each process runs its own rows through the
whole target, so features are the same as with a whole target, to the last bit. Weights outside the
layers are whole in every process, since drafters share them. Memory per device: layers / N + two
layers + the rest. Only the main process reads the target from disk, into CPU memory.

If only the main process runs the target (measuring tau, the parity check), it announces each layer,
and the other processes, waiting in `main_alone`, send their pieces of it.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.target.loading import TargetConfig, checked_config, decoder_layers, load_model
from inference.target.model import TargetModel
from inference.target.shared import kept_tensors, text_name
from inference.target.taps import find_decoder, find_layers
from train.config import TrainingJob
from train.distributed import JOIN_TIMEOUT, World
from train.target.parts import empty_model, loader, replace_parameters

_DONE = -1


class TargetAccess:
    """How a training accesses its target. In this class: whole, in every process."""

    served: ClassVar[bool] = False
    """Whether the other processes serve the main one inside `main_alone`."""

    def decode(self, config: DecodeConfig) -> DecodeConfig:
        """`config`, changed to what this target supports."""
        return config

    def main_alone(self) -> AbstractContextManager[None]:
        """The context for work that only the main process does with the target. Collective."""
        return nullcontext()


def load_target(job: TrainingJob, world: World) -> tuple[TargetModel, TargetAccess]:
    """The target: whole, in parts or divided. Collective; raises `UserError` if that is
    impossible."""
    refuse_combinations(job)
    if job.engine.target_sharding == "none" or world.size == 1:
        return loader(job)(job.target), TargetAccess()
    model, parameters = share_model(job.target, world)
    divided = DividedLayers(_layers_of(model), world)
    target = TargetModel.load(job.target, model)
    target.info = replace(target.info, parameters=parameters)
    target.weights.state = DividedState(model, divided)
    return target, divided


def refuse_combinations(job: TrainingJob) -> None:
    """Raise `UserError` for settings that are impossible with a divided target."""
    if job.target.tensor_parallel:
        raise UserError(
            "target.tensor_parallel splits a target over processes that all read the same rows, "
            "but in training every process has rows of its own. Set "
            "target.tensor_parallel=false; engine.target_sharding=zero3 divides a large target "
            "in training."
        )
    if job.engine.target_sharding == "none":
        return
    for on, what in (
        (job.joint.on, "joint training changes the target's own weights (joint=none)"),
        (
            job.config.on_policy.share > 0,
            "train.on_policy runs it a different number of times in every process (share=0)",
        ),
        (job.decode.compiles, "a compiled pass holds no messages (decode.compile=false)"),
        (
            job.target.quantization not in ("auto", "none"),
            "packed weights cannot be divided (target.quantization=none)",
        ),
    ):
        if on:
            raise UserError(
                f"engine.target_sharding={job.engine.target_sharding} divides a frozen target, "
                f"but {what}."
            )


def share_model(config: TargetConfig, world: World) -> tuple[Any, int]:
    """The target's modules, with real weights only in the main process, and the number of their
    parameters. Collective."""
    described = checked_config(config)
    facts: list[Any] = [None, None, None, None]
    model = None
    if world.is_main:
        try:
            model = load_model(replace(config, device="cpu"))
            if getattr(model.config, "quantization_config", None) is not None:
                raise UserError(
                    f"target '{config.path}' has packed (quantised) weights, which "
                    "engine.target_sharding cannot divide. Use its unquantised checkpoint, or "
                    "engine.target_sharding=none."
                )
            ends = getattr(model.generation_config, "eos_token_id", None)
            facts = [_described(model.named_parameters()), _buffers_of(model), ends, None]
        except UserError as error:
            facts[3] = str(error)
    dist.broadcast_object_list(facts, group=world.group)
    named, buffers, ends, failure = facts
    if failure is not None:
        raise UserError(failure)
    if model is None:
        model = empty_model(config, described)
        if model.generation_config is not None:
            model.generation_config.eos_token_id = ends
    _place(model, named, buffers, world)
    return model, sum(prod(shape) for _, shape, _ in named)


Described = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a weight or buffer."""


def _described(tensors: Iterable[tuple[str, Tensor]]) -> list[Described]:
    return [(name, tuple(value.shape), value.dtype) for name, value in tensors]


def _buffers_of(model: Any) -> list[Described]:
    return _described(model.named_buffers(remove_duplicate=False))


def _place(model: Any, named: list[Described], buffers: list[Described], world: World) -> None:
    """Copy the weights that stay whole and all buffers to every process; layers' weights stay in
    the main process."""
    inside = {id(p) for p in _layers_of(model).parameters()}
    here = dict(model.named_parameters())
    names = [name for name, _, _ in named]
    assert list(here) == names, "the same class has other weights in another process"
    fresh: dict[int, nn.Parameter] = {}
    for name, shape, dtype in named:
        old = here[name]
        if id(old) in inside:
            if not world.is_main:
                empty = torch.empty(shape, dtype=dtype, device="meta")
                fresh[id(old)] = nn.Parameter(empty, requires_grad=False)
            continue
        value = torch.empty(shape, dtype=dtype, device=world.device)
        if world.is_main:
            value.copy_(old.detach())
        dist.broadcast(as_bytes(value), src=0, group=world.group)
        fresh[id(old)] = nn.Parameter(value, requires_grad=False)
    replace_parameters(model, fresh)
    own = [name for name, *_ in _buffers_of(model)]
    assert own == [name for name, *_ in buffers], "other buffers in another process"
    for name, shape, dtype in buffers:
        # Loading keeps some in float32, whatever the model's dtype; empty modules do not.
        value = torch.empty(shape, dtype=dtype, device=world.device)
        place, _, key = name.rpartition(".")
        kept = model.get_submodule(place)._buffers
        if world.is_main:
            value.copy_(kept[key])
        if value.numel():
            dist.broadcast(as_bytes(value), src=0, group=world.group)
        kept[key] = value


def _layers_of(model: Any) -> nn.ModuleList:
    return find_layers(find_decoder(model), decoder_layers(model.config.get_text_config()))


def as_bytes(tensor: Tensor) -> Tensor:
    """The same contiguous memory as [n] uint8, because every backend can transfer bytes."""
    return tensor.view(-1).view(torch.uint8)


@dataclass
class _Group:
    """The weights of one dtype in one layer, and this process's piece of them all."""

    parameters: list[nn.Parameter]
    shapes: list[tuple[int, ...]]
    piece: Tensor

    def point_into(self, whole: Tensor) -> None:
        at = 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = whole[at : at + prod(shape)].view(shape)
            at += prod(shape)

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.data = self.piece.new_empty(0)


class DividedLayers(TargetAccess):
    """The decoder layers of a frozen model, each divided among all processes and whole only while
    it runs.

    The constructor takes the main process's weights and installs hooks. It is collective, as is
    running: all processes run the model equally often, or only the main process does, inside
    `main_alone`.
    """

    served: ClassVar[bool] = True

    def __init__(self, layers: nn.ModuleList, world: World) -> None:
        self.world = world
        # A separate group, so that no other messages of the processes can come between.
        given: dict[str, Any] = {"timeout": JOIN_TIMEOUT, "use_local_synchronization": True}
        self.processes = dist.new_group(list(range(world.size)), **given)
        self.layers = layers
        self.units = [self._divide(layer) for layer in layers]
        self._coming: tuple[int, list[Tensor], list[Any]] | None = None
        self._leading = False
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._arrive(index))
            layer.register_forward_hook(
                lambda *_, index=index: self._release(index), always_call=True
            )

    def _divide(self, layer: nn.Module) -> list[_Group]:
        """Scatter the main process's weights of a layer."""
        parameters = sorted(layer.parameters(), key=lambda p: str(p.dtype))
        world, groups = self.world, []
        for dtype, alike in groupby(parameters, key=lambda p: p.dtype):
            chosen = list(alike)
            shapes = [tuple(p.shape) for p in chosen]
            size = -(-sum(map(prod, shapes)) // world.size)
            piece = torch.empty(size, dtype=dtype, device=world.device)
            pieces = None
            if world.is_main:
                flat = torch.cat([p.detach().flatten() for p in chosen])
                padded = torch.nn.functional.pad(flat, (0, size * world.size - flat.numel()))
                rows = padded.to(world.device).view(world.size, size)
                pieces = [as_bytes(part) for part in rows.unbind()]
            dist.scatter(as_bytes(piece), pieces, src=0, group=self.processes)
            fresh = {id(p): nn.Parameter(piece.new_empty(0), requires_grad=False) for p in chosen}
            replace_parameters(layer, fresh)
            groups.append(_Group([fresh[id(p)] for p in chosen], shapes, piece))
        return groups

    # All processes run the target

    def _start(self, index: int) -> tuple[int, list[Tensor], list[Any]]:
        """Start to gather layer `index`; returns its buffers and the work to wait for."""
        wholes, waits = [], []
        for group in self.units[index]:
            whole = group.piece.new_empty(group.piece.numel() * self.world.size)
            flat, piece = as_bytes(whole), as_bytes(group.piece)
            work = dist.all_gather_into_tensor(flat, piece, group=self.processes, async_op=True)
            waits.append(work)
            wholes.append(whole)
        return index, wholes, waits

    def _arrive(self, index: int, ahead: int = 1) -> None:
        """Before a layer runs: complete it, and start to gather the next one (`ahead` 0: none)."""
        if self._leading:
            self._announce(index)
            for group, whole in zip(self.units[index], self._collect(index), strict=True):
                group.point_into(whole)
            return
        coming = self._coming
        if coming is None or coming[0] != index:
            self._drop()
            coming = self._start(index)
        for wait in coming[2]:
            wait.wait()
        for group, whole in zip(self.units[index], coming[1], strict=True):
            group.point_into(whole)
        self._coming = self._start(index + 1) if ahead and index + 1 < len(self.units) else None

    def _drop(self) -> None:
        """Release a layer that is no longer needed after a pass ended early."""
        if self._coming is not None:
            for wait in self._coming[2]:
                wait.wait()
            self._coming = None

    def _release(self, index: int) -> None:
        for group in self.units[index]:
            group.release()

    @contextmanager
    def whole(self, index: int) -> Iterator[None]:
        """Layer `index` with its weights inside the block, outside a pass."""
        self._arrive(index, ahead=0)
        try:
            yield
        finally:
            self._release(index)

    # The main process alone does

    @contextmanager
    def main_alone(self) -> Iterator[None]:
        """The others serve the main process until its block ends, then run theirs."""
        self._drop()
        if not self.world.is_main:
            while (index := self._announce(_DONE)) != _DONE:
                self._collect(index)
            yield
            return
        self._leading = True
        try:
            yield
        finally:
            self._leading = False
            self._announce(_DONE)

    def decode(self, config: DecodeConfig) -> DecodeConfig:
        """Without captured steps, which could not hold messages: every operation is launched."""
        return replace(config, graph="off")

    def _announce(self, index: int) -> int:
        """Broadcast the requested layer from the main process; the others receive it."""
        message = torch.tensor([index], device=self.world.device)
        dist.broadcast(message, src=0, group=self.processes)
        return int(message)

    def _collect(self, index: int) -> list[Tensor]:
        """Gather layer `index` in the main process; the others only send their pieces."""
        wholes = []
        for group in self.units[index]:
            size, pieces = group.piece.numel(), None
            if self.world.is_main:
                whole = group.piece.new_empty(size * self.world.size)
                pieces = [as_bytes(part) for part in whole.view(self.world.size, size).unbind()]
                wholes.append(whole)
            dist.gather(as_bytes(group.piece), pieces, dst=0, group=self.processes)
        return wholes


class DividedState(UserDict[str, Tensor]):
    """The named weights of a target whose layers are divided, gathered on demand. Collective: all
    processes ask in the same order, or only the main process does, inside `main_alone`."""

    def __init__(self, model: nn.Module, divided: DividedLayers) -> None:
        super().__init__({text_name(name): value for name, value in kept_tensors(model).items()})
        self._divided = divided
        self._layer = {
            id(parameter): index
            for index, groups in enumerate(divided.units)
            for group in groups
            for parameter in group.parameters
        }

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.data[name]
        index = self._layer.get(id(parameter))
        if index is None:
            return parameter.detach()
        with self._divided.whole(index):
            return parameter.detach().clone()
