"""The whole state of a training run on disk, so that a killed run continues bit for bit.

    checkpoints/step_00000120/
      state.json                  step, best tau and early-stop counters, who wrote it, the sizes of all files
      model.safetensors           the drafter's weights, whole, float32
      optimizer-<rank>.safetensors   AdamW's state; one file, or one per process where it is sharded
      random-<rank>.safetensors, random-<rank>.json   generators of torch (CPU, CUDA), Python and numpy

A folder is written under another name, flushed to the disk and then renamed: what bears the name is complete. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.api.errors import UserError
from inference.manifest import write_json
from train.distributed import World
from train.engine import TrainEngine

logger = logging.getLogger(__name__)

FORMAT = 1
STATE_FILE = "state.json"
WEIGHTS_FILE = "model.safetensors"
PARTIAL = ".partial"
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Snapshot:
    """A readable state on disk. step: updates done; record: what the loop remembers; run: what was being trained."""

    directory: Path
    step: int
    record: dict[str, Any]
    run: dict[str, Any]
    processes: int
    sharded: bool

    def weights(self) -> dict[str, Tensor]:
        """The drafter's weights, float32 on the CPU."""
        return load_file(str(self.directory / WEIGHTS_FILE))

    def restore(self, engine: TrainEngine, world: World) -> None:
        """Put AdamW's state and the random generators back; raises `UserError` for another number of processes.

        Without sharding the number of processes may change (every generator but the first then starts from the first's state).
        """
        if (self.sharded or engine.sharded) and self.processes != world.size:
            raise UserError(
                f"'{self.directory}' was saved by {self.processes} processes, each with its own part of the optimiser's state; "
                f"{world.size} cannot continue it. Start as many as before, or train anew in another folder."
            )
        engine.load_optimizer_state(
            load_file(str(self.directory / _optimizer_file(self.sharded, world.rank)))
        )
        set_random_state(self.directory, world.rank if self.processes == world.size else 0)


class StateStore:
    """The `checkpoints` folder of one run: saves, finds, and keeps the newest `keep` states."""

    def __init__(self, directory: Path, keep: int, world: World) -> None:
        self.directory, self.keep, self.world = directory, keep, world

    def save(self, step: int, engine: TrainEngine, record: Mapping[str, Any], run: Mapping[str, Any]) -> Path:
        """Write the state after `step` updates and return its folder. Collective."""
        final = self.directory / f"step_{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        if self.world.is_main:
            for leftover in (partial, final):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir(parents=True)
        self.world.wait()
        weights, optimizer = engine.weights(), engine.optimizer_state()
        if self.world.is_main:
            _save_tensors(weights, partial / WEIGHTS_FILE)
        if self.world.is_main or engine.sharded:
            _save_tensors(optimizer, partial / _optimizer_file(engine.sharded, self.world.rank))
        save_random_state(partial, self.world.rank)
        self.world.wait()
        if self.world.is_main:
            content = {
                "format": FORMAT, "step": step, "processes": self.world.size, "sharded": engine.sharded, "record": dict(record),
                "run": dict(run), "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
            }  # fmt: skip
            write_json(partial / STATE_FILE, content)
            _flush_folder(partial)
            partial.rename(final)
            _flush_folder(self.directory)
            self._prune()
        self.world.wait()
        return final

    def newest(self) -> Snapshot | None:
        """The newest complete state, or None; a damaged one is passed over with a warning. Half-written folders are removed."""
        if self.world.is_main and self.directory.is_dir():
            for leftover in self.directory.glob(f"*{PARTIAL}"):
                shutil.rmtree(leftover)
        self.world.wait()
        for folder in reversed(self._folders()):
            try:
                return read_snapshot(folder)
            except UserError as error:
                if self.world.is_main:
                    logger.warning("%s Continuing from the state before it.", error)
        return None

    def _folders(self) -> list[Path]:
        """Folders of complete states, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [
            (int(match[1]), path)
            for path in self.directory.iterdir()
            if (match := _NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]

    def _prune(self) -> None:
        for folder in self._folders()[: -self.keep]:
            shutil.rmtree(folder)


def read_snapshot(folder: Path) -> Snapshot:
    """Check a state folder and describe it; raises `UserError` saying what is damaged."""
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(f"'{folder}' has format {content['format']}; this version reads format {FORMAT}.")
        for name, size in content["files"].items():
            if (folder / name).stat().st_size != size:
                raise UserError(
                    f"'{folder / name}' is damaged: it has another size than when it was written."
                )
            if name.endswith(".safetensors"):
                with safe_open(str(folder / name), "pt"):
                    pass
        fields = {key: content[key] for key in ("step", "record", "run", "processes", "sharded")}
    except (
        OSError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise UserError(f"'{folder}' is damaged ({type(error).__name__}: {error}).") from error
    return Snapshot(folder, **fields)


# ---- random generators -------------------------------------------------------------------------------------------------


def save_random_state(folder: Path, rank: int) -> None:
    """Write this process's generators: torch's (CPU and current CUDA device), Python's and numpy's global ones."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    _save_tensors(states, folder / f"random-{rank}.safetensors")
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # the global generator is meant
    numpy_state = [str(name), np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)]
    write_json(
        folder / f"random-{rank}.json", {"python": [version, list(words), gauss], "numpy": numpy_state}
    )


def set_random_state(folder: Path, rank: int) -> None:
    """Put back what `save_random_state` wrote."""
    states = load_file(str(folder / f"random-{rank}.safetensors"))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    plain = json.loads((folder / f"random-{rank}.json").read_text(encoding="utf-8"))
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, place, has_gauss, cached = plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, cached))  # as above


# ---- files -------------------------------------------------------------------------------------------------------------


def _optimizer_file(sharded: bool, rank: int) -> str:
    return f"optimizer-{rank if sharded else 0}.safetensors"


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, str(path))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
