"""The files that vLLM's connectors of hidden states leave: waiting for one, reading it and deleting
it.

A request's file `<id>.safetensors` has `hidden_states` [N, L, H] and `token_ids` [N] int64. The
connector `FP8HiddenStatesConnector` of speculators (package hs-connectors 0.9) writes the states as
float8_e4m3fn, with `hidden_states_scales` float32 [N, 1, 1] that they are multiplied with. The
engine holds an exclusive lock (flock) on `<id>.safetensors.lock` from the start of the request
until the file is written or writing has failed; a killed engine loses the lock. Files of a reader
are named after it (`NAME`), so that files of its abandoned requests are found and deleted.

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import refusing
from heads.api.tensors import BROKEN
from inference.target.memory import gib
from train.features.servers import FailureError

LOCK = ".lock"
SCALES = "hidden_states_scales"
NAME = "headstart-"
STALE_SECONDS = 3600.0
"""Age at which a file belongs to a reader that is gone, as readers wait far less for one."""
POLL_SECONDS, LONGEST_POLL = 0.002, 0.1


def read_states(path: Path, seconds: float, stopped: Callable[[], bool]) -> tuple[Tensor, Tensor]:
    """Read hidden_states [N, L, H] and token_ids [N] of a file and delete it; waits for its writer
    at most `seconds`. fp8 states become bfloat16. Raises `FailureError` if the file does not arrive
    complete."""
    try:
        if not await_lock(path, seconds, stopped):
            raise FailureError(f"'{path}' is not written within {seconds:g} s")
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise FailureError(missing(path)) from error
        except OSError as error:
            raise FailureError(f"'{path}' cannot be read ({error})") from error
    finally:
        evict(path)
    try:
        with refusing(f"'{path}'", "", *BROKEN):
            parts = load(content)
            states, tokens = parts["hidden_states"], parts["token_ids"]
            if SCALES in parts:
                states = (states.float() * parts[SCALES]).bfloat16()
            return states, tokens
    except UserError as error:
        raise FailureError(f"{error} {room(path.parent)}") from error


def await_lock(path: Path, seconds: float, stopped: Callable[[], bool]) -> bool:
    """Wait at most `seconds` for the writer of a file; returns whether it has ended. Without a lock
    file there is no writer to wait for."""
    import fcntl  # vLLM runs on Linux; this module is imported everywhere

    try:
        handle = os.open(f"{path}{LOCK}", os.O_RDONLY)
    except OSError:
        return True
    end, pause = time.monotonic() + seconds, POLL_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError as error:
                raise FailureError(f"'{path}{LOCK}' cannot be locked ({error})") from error
            if stopped() or time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
    finally:
        os.close(handle)


def evict(path: Path) -> None:
    """Delete a file and its lock."""
    for each in (path, Path(f"{path}{LOCK}")):
        with suppress(OSError):
            each.unlink()


def sweep(folder: Path, name: str) -> None:
    """Delete the files left by a reader's requests, and those of readers that are gone."""
    now = time.time()
    for path in folder.glob(f"*{NAME}*"):
        with suppress(OSError):
            if name in path.name or now - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def evict_of(folder: Path, name: str, requests: Collection[str]) -> set[str]:
    """Delete the files of a reader's requests, whose names contain their ids; returns the requests
    that had one. name: of the reader, with which the ids begin. Looks into the folder once, since
    most requests that fail never leave a file."""
    found: set[str] = set()
    if not requests:
        return found
    id_in = re.compile(re.escape(name) + r"\d+")
    for path in folder.glob(f"*{name}*"):
        of_request = id_in.search(path.name)
        if of_request and of_request[0] in requests and path.suffix != LOCK:
            evict(path)
            found.add(of_request[0])
    return found


def require_room(folder: Path, needed: int, setting: str, what: str) -> None:
    """Raise `UserError` if the folder has no room for the files that exist at the same time, of
    `needed` bytes. setting: its configuration group, features or sampling; what: it is asked
    for."""
    free = shutil.disk_usage(folder).free if folder.is_dir() else needed
    if free < needed:
        raise UserError(
            f"{setting}.states '{folder}' has {gib(free)} free, but the {what} that are asked for "
            f"at once may take {gib(needed)}. Make room, name another folder (also in the server's "
            f"shared_storage_path), or lower {setting}.concurrency."
        )


def missing(path: Path) -> str:
    """The reason why there is no file."""
    if path.parent.is_dir():
        return f"it answered, but wrote no '{path}'. {room(path.parent)}"
    return (
        f"it answered, but there is no folder '{path.parent}' on this machine: features.states "
        "must name the folder of the engine's shared_storage_path as it is mounted here"
    )


def room(folder: Path) -> str:
    """The free space in the folder, for errors that a full one may explain."""
    with suppress(OSError):
        return f"Its folder has {gib(shutil.disk_usage(folder).free)} free."
    return ""
