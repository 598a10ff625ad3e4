"""One stage's folder: what was run, with which settings, on what; and whether it may be continued.

A stage folder holds `config.yaml` (the resolved settings) and `run.json` (command, git revision and difference, package versions,
seed, device, inputs and state). The same command continues an interrupted folder and skips a complete one; other settings or other
inputs are refused, never mixed in silently.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from heads.api.errors import UserError
from inference.folders import RUN_FILE, delete_own, require_folder_name, stage_of
from inference.manifest import PARTIAL, file_sha256, remove_leftovers, write_bytes, write_json

if TYPE_CHECKING:
    from scripts.config import Settings

FORMAT = 1
CONFIG_FILE = "config.yaml"
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
FREE_GROUPS = ("run", "loop")
"""Settings that may change between the commands that fill one folder: where it is, and how the loop calls."""


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes and what it starts from."""

    name: str = "default"
    """The run: all stages of one loop share <root>/<name>/."""
    root: str = "outputs"
    """Folder of all runs."""
    drafter: str = ""
    """Name of the drafter's folder below <root>/<name>/train/; empty: the chosen head's name."""
    answers: str = ""
    """Folder of generated answers to train on; empty: <root>/<name>/generate."""
    seed: int = 0
    """Seed of everything random. The other groups' seeds follow it unless they are set themselves."""
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice."""
    overwrite: bool = False
    """Delete this stage's folder first and start again."""
    accept_changes: bool = False
    """Continue in a folder although its settings or inputs have changed since."""

    def __post_init__(self) -> None:
        require_folder_name("run.name", self.name)
        require_folder_name("run.drafter", self.drafter, empty=True)

    @property
    def directory(self) -> Path:
        """<root>/<name>, the parent of the stages' folders."""
        return Path(self.root) / self.name


@dataclass
class StageFolder:
    """An opened stage folder. `complete` says that there is nothing left to do in it."""

    path: Path
    complete: bool
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def session(self) -> dict[str, Any]:
        """Command, code, versions and machine of this process, for manifests. The code's difference is in run.json alone."""
        found = dict(self.record["sessions"][-1])
        git = found["git"]
        found["git"] = {"revision": git["revision"], "changed": bool(git["diff"])} if git else {}
        return found

    def finish(self) -> None:
        """Mark the stage complete."""
        if is_main_process():
            self.record |= {"state": "complete", "finished": now()}
            write_json(self.path / RUN_FILE, self.record)


def open_folder(
    settings: Settings, path: Path, inputs: Sequence[Path] = (), *, stage_decides: bool = False
) -> StageFolder:
    """Open `path` for the stage in `settings`, which reads the files `inputs`.

    Raises `UserError` when it belongs to another run or another stage, or holds files that no stage of ours wrote.

    Writes run.json and config.yaml (main process only) before the stage starts, so that an interrupted run is on record as well.
    stage_decides: the stage knows itself which changes matter, so a changed folder is handed to it instead of being refused.
    """
    config = settings.run
    hashes = {shown(file): file_sha256(file) for file in inputs}
    if is_main_process():
        if config.overwrite:
            delete_own(path, settings.stage.name, "run.overwrite")
        require_free(path, settings.stage.name)
        remove_leftovers(path)
    previous = read_record(path)
    if previous is not None and not config.overwrite:
        accepted = config.accept_changes or not holds_results(path)
        changed = [] if accepted else changes(path, previous, settings, hashes)
        if changed and not stage_decides:
            raise refusal(path, changed)
        if previous.get("state") == "complete" and not changed:
            return StageFolder(path, True, previous)
    record = {
        "format": FORMAT,
        "stage": settings.stage.name,
        "state": "running",
        "inputs": hashes,
        "choices": settings.choices,
        "seed": config.seed,
        "sessions": [*(previous or {}).get("sessions", []), session(settings)],
    }
    if is_main_process():
        path.mkdir(parents=True, exist_ok=True)
        write_bytes(path / CONFIG_FILE, yaml.safe_dump(settings.resolved, sort_keys=False).encode())
        write_json(path / RUN_FILE, record)
    return StageFolder(path, False, record)


def holds_results(path: Path) -> bool:
    """Whether a stage got as far as writing something: a start that was refused must not block the corrected one."""
    return any(
        file.name not in (RUN_FILE, CONFIG_FILE) and file.suffix != PARTIAL and file.is_file() and file.stat().st_size
        for file in path.rglob("*")
    )


def require_free(path: Path, stage: str) -> None:
    """Raise `UserError` for a folder that another stage, or somebody else, has written to."""
    found = stage_of(path)
    if found and found != stage:
        raise UserError(
            f"'{path}' was written by stage '{found}'; '{stage}' does not write into it. Choose another name (run.name, "
            "run.drafter, or the stage's own)."
        )
    if not found and holds_results(path):
        raise UserError(
            f"'{path}' holds files, but no record of stage '{stage}', which does not write between other files. Choose another "
            "name (run.name, run.drafter, or the stage's own), or move the files away."
        )


def read_record(path: Path) -> dict[str, Any] | None:
    """The run.json of a folder, or None where no run has started."""
    file = path / RUN_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"'{file}' is broken ({error}). Remove '{path}' yourself, or choose another name.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"'{file}' is not a run record of format {FORMAT}. Choose another run.name.")
    return content


def read_config(path: Path) -> dict[str, Any]:
    """The resolved settings that a stage folder was made with; raises `UserError` when there are none."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"'{path}' is not a stage folder: it has no {CONFIG_FILE}.")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(content, dict), f"{file} was not written by us"
    return content


def changes(
    path: Path, previous: Mapping[str, Any], settings: Settings, hashes: Mapping[str, str]
) -> list[str]:
    """What differs between the settings and inputs that a folder was made with and the present ones, in words."""
    before, after = compared(read_config(path)), compared(settings.resolved)
    before["run.seed"], after["run.seed"] = previous.get("seed"), settings.run.seed
    found = [
        f"{key} was {before.get(key)!r}, is {after.get(key)!r}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    known = previous.get("inputs", {})
    return found + [
        f"{name} has changed" for name in sorted({*known, *hashes}) if known.get(name) != hashes.get(name)
    ]


def compared(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a folder holds, by dotted path."""
    return {key: value for key, value in flatten(resolved) if key.split(".")[0] not in FREE_GROUPS}


def refusal(path: Path, changed: Sequence[str]) -> UserError:
    """The error for a folder that was made with other settings."""
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    return UserError(
        f"'{path}' was made with other settings: {'; '.join(changed[:5])}{more}. Choose another run.name (or run.drafter), "
        "start again with run.overwrite=true, or continue all the same with run.accept_changes=true."
    )


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of nested settings; lists are values."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values


def session(settings: Settings | None = None) -> dict[str, Any]:
    """What this process is: command, code, versions, and the device that the stage's `settings` choose."""
    return {
        "started": now(),
        "command": ["headstart", *sys.argv[1:]],
        "git": git_state(),
        "python": platform.python_version(),
        "packages": versions(),
        "device": device(settings),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


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
    """Revision and uncommitted difference of this repository; empty outside one. A long difference is cut, and says so."""
    root = Path(__file__).resolve().parents[1]
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=20
        )
        changes = subprocess.run(
            ["git", "diff", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    diff = changes.stdout
    return {
        "revision": revision.stdout.strip(),
        "diff": diff[:LONGEST_DIFF],
        "diff_cut": len(diff) > LONGEST_DIFF,
    }


def device(settings: Settings | None = None) -> dict[str, Any]:
    """The accelerator, or the processor and its threads: those that a stage with `settings` computes with."""
    import torch

    asked = str((settings.resolved.get("target") or {}).get("device", "")) if settings else ""
    if torch.cuda.is_available() and asked != "cpu":
        return {"kind": "cuda", "name": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    return {
        "kind": "cpu",
        "name": platform.processor() or platform.machine(),
        "threads": (settings.run.threads if settings else 0) or torch.get_num_threads(),
    }


def prepare_process(config: RunConfig) -> None:
    """Seed Python, numpy and torch, set torch's threads, and keep progress bars of libraries out of files and pipes."""
    import numpy as np
    import torch
    import transformers

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
