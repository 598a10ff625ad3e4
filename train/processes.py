"""Coordination of several processes, and an orderly exit when a scheduler requests it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from heads.api.errors import UserError
from inference.leaving import leave_in_order
from inference.target.loading import TargetConfig, pick_device

# the fastest process waits for the slowest, which may have hours left
JOIN_TIMEOUT = timedelta(days=7)
Result = TypeVar("Result")


def join_processes(target: TargetConfig) -> PartialState:
    """This process's place in the launch; small objects are exchanged through gloo. On GPUs, nccl
    is set up too, so that a later stage in the same processes can train with it."""
    if pick_device(target.device).type == "cpu":
        state = PartialState(cpu=True, timeout=JOIN_TIMEOUT)
    else:
        backend = "cpu:gloo,cuda:nccl" if "LOCAL_RANK" in os.environ else None
        state = PartialState(backend=backend, timeout=JOIN_TIMEOUT)
    if state.num_processes > 1:
        # gloo's threads must be done before the interpreter ends, or a finished run aborts
        leave_in_order()
    return state


def on_main(state: PartialState, work: Callable[[], Result]) -> Result:
    """Run `work` in the main process; its result is returned, or its `UserError` raised, in all."""
    box: list[Any] = [None, None]
    if state.is_main_process:
        try:
            box[0] = work()
        except UserError as error:
            box[1] = str(error)
    broadcast_object_list(box)
    if box[1] is not None:
        raise UserError(box[1])
    result: Result = box[0]
    return result


def own_device(target: TargetConfig, state: PartialState) -> TargetConfig:
    """Give every process of a launch its own GPU unless one was named."""
    several = state.num_processes > 1 and state.device.type == "cuda"
    if several and target.device in ("auto", "cuda"):
        return replace(target, device=str(state.device))
    return target


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM and SIGUSR1 raise `SystemExit` with status 0, as Ctrl-C raises
    `KeyboardInterrupt`, so that answers are written before the process exits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
