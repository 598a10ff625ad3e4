"""A drafter's step without its memory: the real loss on fake tensors, forward and backward.

Token ids, segments and masks are real, because the losses choose positions by them; floats have
only a shape and a dtype. So every kind is counted by the code that will train it. Fake tensors
claim to be on the CPU, so callers set the chunks in which the planned device computes losses
(`heads.nn.losses.chunks_of`); if a kind has another path on CUDA (flex attention of block
drafters), that path needs less.

Legend: B rows, T positions.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads.api.batch import TrainBatch
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from train.engines.base import EngineConfig, Objective
from train.planning.footprint import Footprint
from train.planning.target import PlannedTarget


@dataclass(frozen=True)
class DryStep:
    """The cost of one micro-batch: FLOPs of the drafter's passes and of the target's logits, bytes
    at the peak without weights and their gradients, and the largest tensor.
    """

    flops: int
    peak: int
    largest: int
    largest_shape: tuple[int, ...]


def plan_drafter(kind: str, head: Any, target: PlannedTarget) -> TrainableDrafter:
    """The drafter with fake float32 weights, bound; raises `UserError` for untrained kinds."""
    if not get_kind(kind).trainable:
        raise UserError(
            f"a drafter of kind '{kind}' has no weights of its own, so there is no training to "
            "plan."
        )
    with target.mode:
        drafter: TrainableDrafter = get_kind(kind).drafter_class(head, target.info)
    drafter.bind(target.weights)
    # Falling counts: any choice of a draft vocabulary costs the same.
    drafter.choose_vocabulary(torch.arange(target.info.vocab_size).flip(0))
    return drafter


class _Asked(UserDict[str, Tensor]):
    """A target's named weights, and the names of those that were read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return self.data[name]


def held_in_parts(kind: str, head: Any, target: PlannedTarget) -> int:
    """Bytes of a target in parts (train/target/parts.py): embedding, LM head, and the layers'
    weights that the drafter continues to use."""
    asked = _Asked(target.weights.state)
    plan_drafter(kind, head, replace(target, weights=replace(target.weights, state=asked)))
    # only one if they are tied
    ends = {id(each): each.nbytes for each in (target.weights.embedding, target.weights.lm_head)}
    return sum(ends.values()) + sum(asked.data[name].nbytes for name in asked.names)


def dry_step(
    drafter: TrainableDrafter,
    target: PlannedTarget,
    engine: EngineConfig,
    rows: int,
    length: int,
    supervised: float,
) -> DryStep:
    """Count one micro-batch of B x T positions, a share `supervised` of them answers. Gradients
    exist already, as in every micro-batch except a step's first."""
    batch = dry_batch(drafter, target, engine.dtype, rows, length, supervised)
    objective = Objective(drafter, engine, "cpu")
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.grad = fake(target, *parameter.shape, dtype=parameter.dtype)
    with warnings.catch_warnings(), Footprint() as count, _ByNumber():
        # fake tensors take the plain path through a norm in two number formats, and warn about it
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        (objective(batch) / 100).backward()
    drafter.zero_grad(set_to_none=True)
    return DryStep(count.flops, count.peak, count.largest, count.largest_shape)


def dry_batch(
    drafter: TrainableDrafter,
    target: PlannedTarget,
    dtype: torch.dtype,
    rows: int,
    length: int,
    supervised: float,
) -> TrainBatch:
    """Rows of one document each, whose last tokens are supervised. This is the costliest case,
    since packed documents are attended to one by one (`heads.nn.packing`)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.info.vocab_size, (rows, length), generator=generator)
    positions = torch.arange(length).expand(rows, -1)
    mask = positions >= round((1.0 - supervised) * length)
    needs, shape, hidden = drafter.needs, (rows, length), target.info.hidden_size
    last = needs.last_hidden or needs.logits
    return TrainBatch(
        tokens,
        positions,
        torch.ones(shape, dtype=torch.int32),
        mask,
        fake(target, *shape, len(needs.taps), hidden, dtype=dtype) if needs.taps else None,
        fake(target, *shape, hidden, dtype=dtype) if last else None,
        target.weights.logits if needs.logits else None,
        seeds=torch.arange(rows),
    )


def fake(target: PlannedTarget, *shape: int, dtype: torch.dtype) -> Tensor:
    with target.mode:
        return torch.empty(*shape, dtype=dtype)


class _ByNumber(TorchDispatchMode):
    """Indexes fake values by a real mask: fake tensors would not count how many are chosen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            indices: list[Tensor | None] = []
            for each in args[1]:
                real = each is not None and not isinstance(each, FakeTensor)
                chosen = real and each.dtype == torch.bool
                indices += each.nonzero().unbind(1) if chosen else [each]
            args = (args[0], indices)
        return func(*args, **(kwargs or {}))
