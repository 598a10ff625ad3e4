"""This process: its seeds and threads, and the code, versions and machine that a record of it
names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from scripts.config.compose import REPOSITORY
from scripts.config.own import RunConfig
from scripts.config.schema import Settings

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "hydra-core",
    "safetensors",
    "triton",
    "headstart",
)
LONGEST_DIFF = 200_000


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


def this_session(settings: Settings) -> Session:
    """The session of this process, with the device that the stage's settings choose."""
    return Session(
        started=now(),
        command=["headstart", *sys.argv[1:]],
        git=git_state(),
        python=platform.python_version(),
        packages=versions(),
        device=device(settings),
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Revision and uncommitted difference of this repository; empty outside one.

    A difference of more than `LONGEST_DIFF` characters is cut; `diff_cut` records that.
    """
    root = REPOSITORY
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        changes = subprocess.run(
            ["git", "diff", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    diff = changes.stdout
    return {
        "revision": revision.stdout.strip(),
        "diff": diff[:LONGEST_DIFF],
        "diff_cut": len(diff) > LONGEST_DIFF,
    }


def device(settings: Settings) -> dict[str, Any]:
    """The accelerator, or the processor and its threads: those that the stage computes with."""
    asked = str((settings.resolved.get("target") or {}).get("device", ""))
    if torch.cuda.is_available() and asked != "cpu":
        return {
            "kind": "cuda",
            "name": torch.cuda.get_device_name(),
            "count": torch.cuda.device_count(),
        }
    return {
        "kind": "cpu",
        "name": platform.processor() or platform.machine(),
        "threads": settings.run.threads or torch.get_num_threads(),
    }


def prepare_process(config: RunConfig) -> None:
    """Seed Python, numpy and torch, set torch's threads, and keep libraries' progress bars out of
    files."""
    random.seed(config.seed)
    np.random.seed(config.seed)  # libraries draw from the global state
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def is_main_process() -> bool:
    """True in the process that writes: rank 0 of a launched job, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def shown(path: Path) -> str:
    """A path as a person standing in the working directory would write it."""
    full, here = path.resolve(), Path.cwd().resolve()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
