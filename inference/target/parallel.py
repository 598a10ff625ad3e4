"""A target that is too large for one device, split over several by tensor parallelism.

Each process (started by torchrun, one per device) holds a slice of every large matrix, by
transformers' plan for the family: some heads of each attention, some columns of each MLP. An
all-reduce adds the partial results, so that hidden states and logits are whole and equal in all
processes. Attention and cache see only the local heads and need no changes.

Every process runs the same decoding loop. The processes stay in step without communicating about
it, because nothing in a step depends on the process: the results of an all-reduce are equal bit for
bit, and the sampling noise is keyed. Each process also keeps the whole embedding and LM head for
the drafter, which runs independently in each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from heads.api.errors import UserError
from inference.leaving import leave_in_order

JOIN_TIMEOUT = timedelta(hours=2)
"""Longest wait for another process, for example one that is still loading a large target."""


@dataclass(frozen=True)
class Ranks:
    """The number of processes that share the target, and the device of this one."""

    size: int
    device: torch.device


def join_ranks(wanted: str) -> Ranks:
    """Join the processes that share a target, in a process group (NCCL on CUDA, gloo on the CPU).

    wanted: target.device. Raises `UserError` outside a launcher, for a single process, and for a
    device type other than the one that transformers splits over (CUDA if it is available).
    """
    rank, local, size = (_number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank is None or local is None or size is None or size < 2:
        raise UserError(
            "target.tensor_parallel=true needs one process per device; this is a single one. "
            "Start with torchrun --nproc-per-node <devices> --no-python headstart ..., or set "
            "target.tensor_parallel=false."
        )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted not in ("auto", kind):
        raise UserError(
            f"target.device is '{wanted}', but target.tensor_parallel=true gives every process a "
            f"device of its own, here of type {kind}. Use target.device=auto."
        )
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"target.tensor_parallel=true has {local + 1} or more processes on this machine, "
                f"but it has {torch.cuda.device_count()} CUDA devices. Start as many processes as "
                "there are devices."
            )
        torch.cuda.set_device(local)
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=JOIN_TIMEOUT)
        leave_in_order()
    return Ranks(size, device)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def require_divisible(config: Any, size: int) -> None:
    """Raise `UserError` unless the number of processes divides a text config's heads."""
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    named = {"attention heads": heads, "key/value heads": key_heads}
    counts = {name: count for name, count in named.items() if isinstance(count, int)}
    common = math.gcd(*counts.values())
    for name, count in counts.items():
        if count % size:
            allowed = [n for n in range(2, common + 1) if not common % n]
            possible = f"possible: {', '.join(map(str, allowed))}"
            raise UserError(
                f"a {config.model_type} target with {count} {name} cannot be split over {size} "
                f"processes; {possible if allowed else 'it cannot be split at all'}."
            )


def split_settings(size: int) -> Any:
    """transformers' distributed_config: the family's own plan over `size` processes."""
    from transformers import DistributedConfig

    return DistributedConfig(tp_size=size, tp_plan="auto")


def is_divided(tensor: Tensor) -> bool:
    """Whether every process has only a part of the tensor."""
    return isinstance(tensor, DTensor)


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole parameter: gathered from all processes if split (a collective), or itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class GatheredState(Mapping[str, Tensor]):
    """A target's named weights and buffers, each gathered from all processes on access.

    All processes must access the same names in the same order.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        return gather_whole(self._parameters[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
