"""The processes of one training run: ranks and collective operations.

A single process needs no group, but DeepSpeed requires one (`always`). Under a launcher (torchrun,
deepspeed) rank and size come from the environment, and the group uses NCCL on CUDA and gloo on the
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heads.api.errors import UserError
from inference.leaving import leave_in_order

JOIN_TIMEOUT = timedelta(hours=2)
"""Longest wait for another process: rank 0 measures tau alone while the others wait."""


@dataclass(frozen=True)
class World:
    """This process's place in the run. group: the process group of those that train, None if all do
    (see train/features/group.py); helpers: number of further processes of the launch, not part of
    `size`, that run the target for them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    helpers: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def add(self, values: Tensor) -> Tensor:
        """Sum of `values` over all processes, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def from_main(self, values: Sequence[float]) -> list[float]:
        """The main process's numbers, in every process; all must pass equally many. Collective."""
        if self.size == 1:
            return list(values)
        carried = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(carried, src=0, group=self.group)
        return [float(value) for value in carried.tolist()]

    def gather(self, text: str) -> list[str]:
        """The short texts of all processes, in the order of ranks, in every process. Collective."""
        if self.size == 1:
            return [text]
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def wait(self) -> None:
        """Return once every process has called this. Collective."""
        if self.size > 1:
            dist.barrier(group=self.group)


def join_world(wanted: str | torch.device, *, always: bool = False) -> World:
    """This process's `World`, with a process group when there are several or `always` is set.
    wanted: cpu, cuda or cuda:N; if there are several processes, each uses the CUDA device of its
    LOCAL_RANK."""
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    device = torch.device(wanted)
    if device.type == "cuda":
        own = device.index if device.index is not None else torch.cuda.current_device()
        device = torch.device("cuda", _number("LOCAL_RANK", own) if size > 1 else own)
        torch.cuda.set_device(device)
    if size > 1 or always:
        _join_group(rank, size, "nccl" if device.type == "cuda" else "gloo")
    return World(rank, size, device)


def _join_group(rank: int, size: int, backend: str) -> None:
    """Start the process group unless an earlier stage has; leave it at exit in either case."""
    if not dist.is_initialized():
        own: dict[str, Any] = {"rank": rank, "world_size": size}
        if size > 1 and os.environ.get("GROUP_WORLD_SIZE") == "1":
            own |= {"store": restart_store(rank, size), "timeout": JOIN_TIMEOUT}
        elif size > 1:
            own = {"timeout": JOIN_TIMEOUT}
        else:
            # in memory: needs no port and cannot collide with another run on this machine
            own["store"] = dist.HashStore()
        dist.init_process_group(backend, **own)
    leave_in_order()


def restart_store(rank: int, size: int) -> dist.Store:
    """The launch's store, with separate keys for every restart by torchrun on one machine. torchrun
    (2.13) keeps one store over all restarts, which still holds the addresses of processes that
    died. Agents on several machines may count restarts differently; there the launch scripts set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every attempt a separate store."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=JOIN_TIMEOUT))
    return dist.PrefixStore(f"attempt_{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit():
        raise UserError(
            f"the environment variable {variable} is '{text}', which is not a number. Launchers "
            "set it; unset it otherwise."
        )
    return int(text)
