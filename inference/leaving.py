"""Leaving the process group when the interpreter exits."""

from __future__ import annotations

import atexit
import gc
import time

import torch.distributed as dist

_HANDOVER_SECONDS, _HANDOVERS = 0.02, 5


def leave_in_order() -> None:
    """Register `leave_world` to run once, when the interpreter exits."""
    atexit.unregister(leave_world)
    atexit.register(leave_world)


def leave_world() -> None:
    """Leave the process group, so that the interpreter can end; runs at exit.

    The pauses are needed because gloo's worker thread drops its references to the tensors after a
    collective, and takes Python's lock for that. If the interpreter begins to exit while a worker
    waits for the lock, Python ends the thread inside a C++ destructor and the process aborts
    ("terminate called without an active exception") although all its work is done. A pause releases
    the lock.
    """
    gc.collect()
    for _ in range(_HANDOVERS):
        time.sleep(_HANDOVER_SECONDS)
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_HANDOVER_SECONDS)
