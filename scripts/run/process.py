"""This process: its seeds and threads, and the code, versions and machine for its records."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from inference.terminal import make_console
from scripts.config.schema import Settings
from scripts.config.stage_configs import RunConfig
from scripts.config.stages import EMBEDDED
from scripts.run.revision import git_state
from train.memory import keep_freed_memory

PACKAGES = (
    "torch transformers accelerate datasets peft deepspeed hydra-core safetensors triton headstart"
).split()
PROGRAMS = ("headstart", "cli.py", "__main__.py")
"""Names of the files that start the command line."""
PROGRESS_SECONDS = 30.0
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "HEADSTART_RESTARTS")
"""Variables that count how often a command was started again: by torchrun, by SLURM, and by
scripts/launch/train.slurm."""


@dataclass(frozen=True)
class Session:
    """One process that worked on a folder: command, code, versions, machine."""

    started: str
    command: list[str] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    """revision, diff and diff_cut; empty outside a repository."""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    """Processes of the launch."""
    working_directory: str = ""
    """The folder that paths are relative to; empty in records of earlier versions."""
    launch: str = ""
    """See `launch`; empty in records of earlier versions."""


def this_session(settings: Settings) -> Session:
    """The record of this process, for the folder of a stage with these settings."""
    return Session(
        started=now(),
        command=command_line(settings),
        git=git_state(),
        python=platform.python_version(),
        packages=versions(),
        device=device(settings),
        processes=int(os.environ.get("WORLD_SIZE") or "1"),
        # a name that is not UTF-8 must not prevent the record of a run
        working_directory=str(Path.cwd()).encode("utf-8", "replace").decode(),
        launch=launch(),
    )


def launch() -> str:
    """The name of the launch that this process belongs to, which stays when the launcher starts the
    command again; empty without such a launcher."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether a launcher has started this command before, in the same launch."""
    return any(os.environ.get(name, "") not in ("", "0") for name in RESTARTS)


def command_line(settings: Settings) -> list[str]:
    """The command of this process; in another program (`headstart.train`), the command that the
    settings stand for."""
    own = Path(sys.argv[0]).name in PROGRAMS
    return ["headstart", *sys.argv[1:]] if own else settings.command


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device(settings: Settings) -> dict[str, Any]:
    """The accelerator, or the processor and its threads, that the stage computes with."""
    asked = (settings.resolved.get("target") or {}).get("device")
    if torch.cuda.is_available() and asked != "cpu":
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        return {"kind": "cuda", "name": name, "count": count}
    name, threads = platform.processor() or platform.machine(), settings.run.threads
    return {"kind": "cpu", "name": name, "threads": threads or torch.get_num_threads()}


def prepare_process(config: RunConfig) -> None:
    """Seed all generators, set torch's threads, let a CPU keep the memory that its tensors free,
    and disable the progress bars of libraries."""
    random.seed(config.seed)
    np.random.seed(config.seed)  # libraries draw from the global state
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    if not torch.cuda.is_available():
        keep_freed_memory()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read at its import


def say_what_debug_means(settings: Settings) -> None:
    """Print that the numbers of a run with `debug=fast` are meaningless."""
    chosen = settings.choices.get("debug") or ()
    if "fast" in ([chosen] if isinstance(chosen, str) else chosen):
        say(
            "debug=fast: a few training steps on a few prompts show that "
            "every stage works; they cannot teach a drafter. For numbers, leave debug out."
        )


def say_what_stays_embedded(settings: Settings) -> None:
    """Print which settings of the embedded target hold for another model, of which only the path
    was given. The line goes to stderr, because stdout may be read by a program."""
    given, target = settings.given, settings.choices.get("target")
    if target != EMBEDDED or given("target") or not given("target.path"):
        return
    kept = []
    if not given("target.dtype"):
        kept.append(f"target.dtype={settings.target.dtype}")
    if settings.choices.get("data") == EMBEDDED and not given("data") and not given("data.path"):
        kept.append("the data")
    if kept and is_main_process():
        print(
            f"target.path={settings.target.path}: {' and '.join(kept)} of the embedded target "
            "remain. For a model of your own add target=local (dtype auto) with data=jsonl "
            "data.path=<file>, or begin with experiment=own_model; target=embedded omits this "
            "line.",
            file=sys.stderr,
            flush=True,
        )


def is_main_process() -> bool:
    """Whether this is rank 0 of a launched job, or the only process."""
    return int(os.environ.get("RANK") or "0") == 0


def say(text: str) -> None:
    """Print in the main process."""
    if is_main_process():
        print(text, flush=True)


def console() -> Console:
    """The terminal; for other outputs, lines are not broken."""
    return make_console()


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress. On a terminal it replaces the last line;
    elsewhere it prints at most every `PROGRESS_SECONDS`."""
    screen, last = console(), -math.inf

    def print_some(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            print(text, flush=True)

    with screen.status(title) as status:
        yield status.update if screen.is_terminal else print_some


def result_facts(settings: Settings, target: TargetModel) -> dict[str, Any]:
    """The first entries of the result file of a stage that measures: format, command, target,
    device."""
    return {
        "format": 1,
        "command": shlex.join(["headstart", settings.stage.name, *settings.arguments]),
        "target": {
            "id": target.info.id,
            "revision": target.info.revision,
            **({"loading": target.loading} if target.loading else {}),
        },
        "device": device_facts(target.device),
    }


def shown(path: Path) -> str:
    """A path relative to the working directory, if it lies in it."""
    full, here = path.resolve(), Path.cwd().resolve()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
