"""The whole state of a training run on disk, so that a killed run continues bit for bit.

    checkpoints/step_00000120/
      state.json                     step, best tau, counters, size and SHA-256 of all files
      model.safetensors              the drafter's weights, whole, float32
      average.safetensors            with `train.average`: their running mean
      optimizer-<rank>.safetensors   the optimiser's state by weight (train/engines/shards.py); one
                                     file, or one per process where it is divided
      random-<rank>.safetensors, random-<rank>.json   generators of torch, Python and numpy

A folder is written under a temporary name, flushed to disk and then renamed, so a folder with its
final name is complete. Nothing is pickled.

Any number of processes can continue a state, under any engine. With the same number as before, the
run continues bit for bit. With another number, process r restores the generators of process r if
there was one; a new process seeds its own from those of process 0 and its rank. Nothing in a
training depends on these generators: rows, losses and their random draws follow from step and row
alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import read_object
from heads.api.system_errors import explained
from heads.api.tensors import read_tensors, write_tensors
from inference.folders import discard, is_temporary, put
from inference.manifest import PARTIAL, file_sha256, safe_path, write_json
from train.distributed import World
from train.engines.base import TrainEngine
from train.engines.shards import FilePart, StatePart
from train.manifest import RunFacts

logger = logging.getLogger(__name__)

FORMAT = 2
STATE_FILE = "state.json"
DIGEST = "sha256"
"""Key of state.json: the hash of its other entries."""
WEIGHTS_FILE, AVERAGE_FILE = "model.safetensors", "average.safetensors"
SEEN_SECONDS = 10.0
"""Longest wait until a state that the main process lists is visible in another process."""
_NAME = re.compile(r"step_(\d{8,})")


FileFacts = tuple[int, str]
"""Size in bytes and SHA-256."""


class StateContent(TypedDict):
    """state.json. step: updates done; record: the loop's progress; run: the run's facts."""

    format: int
    step: int
    processes: int
    sharded: bool
    record: dict[str, object]
    run: RunFacts
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class Snapshot:
    """A readable state on disk. step: updates done; record: the loop's progress; run: the run's
    facts."""

    directory: Path
    step: int
    record: dict[str, object]
    run: RunFacts
    processes: int
    sharded: bool

    def weights(self) -> dict[str, Tensor]:
        return read_tensors(self.directory / WEIGHTS_FILE)

    def average(self) -> dict[str, Tensor]:
        """The running mean of the weights; empty if there is none."""
        path = self.directory / AVERAGE_FILE
        return read_tensors(path) if path.is_file() else {}

    def restore(self, engine: TrainEngine, world: World) -> None:
        """Restore the optimiser and random generators; raises `UserError` for a state of other
        weights."""
        ranks = range(self.processes if self.sharded else 1)
        files = [self.directory / _optimizer_file(rank) for rank in ranks]
        engine.load_optimizer_state([FilePart(file) for file in files])
        set_random_state(self.directory, world.rank, self.processes)


class StateStore:
    """The `checkpoints` folder of one run: saves, finds, and keeps the newest `keep` states."""

    def __init__(self, directory: Path, keep: int, world: World) -> None:
        self.directory, self.keep, self.world = directory, keep, world

    def save(
        self,
        step: int,
        engine: TrainEngine,
        record: Mapping[str, object],
        run: RunFacts,
        average: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write the state after `step` updates and return its folder. average: the running mean of
        the weights, if there is one. Collective."""
        final = self.directory / f"step_{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        if self.world.is_main:
            with suppress(OSError):
                discard(partial)
        self.world.wait()
        weights, optimizer = engine.weights(), engine.optimizer_state()
        tensors = {WEIGHTS_FILE: weights} | ({AVERAGE_FILE: dict(average)} if average else {})
        own, failure = self._write_own(partial, tensors, optimizer, engine.sharded)
        outcomes = [json.loads(text) for text in self.world.gather(json.dumps([own, failure]))]
        self._require_written([text for _, text in outcomes], partial)
        content: StateContent = {
            "format": FORMAT,
            "step": step,
            "processes": self.world.size,
            "sharded": engine.sharded,
            "record": dict(record),
            "run": run,
            "files": {name: entry for files, _ in outcomes for name, entry in files.items()},
        }
        self._require_written(self.world.gather(self._complete(partial, final, content)), partial)
        return final

    def _write_own(
        self,
        partial: Path,
        tensors: Mapping[str, dict[str, Tensor]],
        optimizer: StatePart,
        sharded: bool,
    ) -> tuple[dict[str, FileFacts], str]:
        """Write this process's files; returns size and SHA-256 of each, and what went wrong.
        tensors: by file, of the main process."""
        rank = self.world.rank
        names = [f"random-{rank}.safetensors", f"random-{rank}.json"]
        try:
            partial.mkdir(parents=True, exist_ok=True)
            if self.world.is_main:
                for name, content in tensors.items():
                    _save_tensors(content, partial / name)
                names += tensors
            if self.world.is_main or sharded:
                optimizer.save(partial / _optimizer_file(rank))
                _flush_file(partial / _optimizer_file(rank))
                names.append(_optimizer_file(rank))
            save_random_state(partial, rank)
            paths = [partial / name for name in names]
            return {path.name: (path.stat().st_size, file_sha256(path)) for path in paths}, ""
        except (OSError, SafetensorError) as error:
            return {}, f"process {rank}: {explained(error)}"

    def _complete(self, partial: Path, final: Path, content: StateContent) -> str:
        """Write state.json and give the folder its name; returns what went wrong."""
        if not self.world.is_main:
            return ""
        try:
            write_json(partial / STATE_FILE, {**content, DIGEST: digest(content)})
            _flush_folder(partial)
            put(partial, final)  # may replace a damaged state, whose steps this run has repeated
            _flush_folder(self.directory)
            # states of later steps are damaged ones that this run has passed over
            own = [path for path in self._folders() if path.name <= final.name]
            for folder in own[: -self.keep]:
                discard(folder)
        except OSError as error:
            return f"process 0: {explained(error)}"
        return ""

    def _require_written(self, failures: list[str], partial: Path) -> None:
        found = [text for text in failures if text]
        if not found:
            return
        if self.world.is_main:
            with suppress(OSError):
                discard(partial)
        raise UserError(
            f"the state cannot be written to '{self.directory}' ({'; '.join(found[:3])}) Earlier "
            "states are kept; the same command goes on from the last of them."
        )

    def newest(self) -> Snapshot | None:
        """The newest complete state, or None if there are no states. Damaged states are skipped,
        with a warning; half-written ones are removed. Raises `UserError` if there are states, but
        none can be used. Collective: every process reads its share of the files of the states that
        the main process lists."""
        if self.world.is_main and self.directory.is_dir():
            for leftover in self.directory.iterdir():
                if leftover.is_dir() and is_temporary(leftover.name):
                    discard(leftover)
        # On a shared file system, listings may differ from machine to machine for some seconds.
        own = [path.name for path in self._folders()] if self.world.is_main else []
        listed: list[str] = json.loads(self.world.gather(json.dumps(own))[0])
        unusable: list[str] = []
        for folder in [self.directory / name for name in reversed(listed)]:
            snapshot, damage = None, ""
            try:
                if not self.world.is_main:
                    self._require_seen(folder)
                snapshot = read_snapshot(folder, self.world.rank, self.world.size)
            except UserError as error:
                damage = str(error)
            damages = [text for text in self.world.gather(damage) if text]
            if snapshot is not None and not damages:
                if self.world.is_main:
                    for reason in unusable:
                        logger.warning("%s Continuing from the state before it.", reason)
                return snapshot
            unusable.append(damages[0])
        if unusable:
            raise UserError(
                f"no state in '{self.directory}' can be continued: {' '.join(unusable)} Restore "
                "one from a copy, or continue with the version that wrote them. "
                "run.overwrite=true deletes what this training has written and starts again."
            )
        return None

    def _require_seen(self, folder: Path) -> None:
        """Wait until a state that the main process lists is visible here; raises `UserError` if it
        is not in time."""
        end = time.monotonic() + SEEN_SECONDS
        while not (folder / STATE_FILE).is_file():
            if time.monotonic() > end:
                raise UserError(
                    f"process {self.world.rank} does not see '{folder}', which process 0 lists. "
                    "run.root must be a folder on a file system that all machines share."
                )
            time.sleep(SEEN_SECONDS / 20)

    def _folders(self) -> list[Path]:
        """Folders of complete states, oldest first."""
        if not self.directory.is_dir():
            return []
        named = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def read_snapshot(folder: Path, share: int = 0, shares: int = 1) -> Snapshot:
    """Check a state folder and describe it; raises `UserError` saying what is damaged. The check
    covers the sizes of all files, and the contents of every `shares`-th file from number `share`
    on."""
    try:
        content = read_object(folder / STATE_FILE)
        if content["format"] != FORMAT:
            raise UserError(
                f"'{folder}' has format {content['format']}; this version reads format {FORMAT}."
            )
        stored = content.pop(DIGEST, None)  # states of earlier versions have none
        if stored is not None and stored != digest(content):
            raise UserError(f"'{folder / STATE_FILE}' is damaged: it is not what was written.")
        for place, (name, (size, sha256)) in enumerate(sorted(content["files"].items())):
            path = safe_path(folder, name)
            if path.stat().st_size != size:
                raise UserError(
                    f"'{path}' is damaged: it has another size than when it was written."
                )
            if place % shares == share and file_sha256(path) != sha256:
                raise UserError(f"'{path}' is damaged: its contents are not what was written.")
        fields = {key: content[key] for key in ("step", "record", "run", "processes", "sharded")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{folder}' is damaged ({type(error).__name__}: {error}).") from error
    return Snapshot(folder, **fields)


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a state.json's content, as it reads after a round trip through JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def save_random_state(folder: Path, rank: int) -> None:
    """Write the generators of torch (CPU and current CUDA device), Python and numpy."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    _save_tensors(states, folder / f"random-{rank}.safetensors")
    version, words, gauss = random.getstate()
    # deliberately the global generator
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [str(name), np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)]
    content = {"python": [version, list(words), gauss], "numpy": numpy_state}
    write_json(folder / f"random-{rank}.json", content)


def set_random_state(folder: Path, rank: int, processes: int) -> None:
    """Restore what `save_random_state` wrote. A process that was not among the `processes` seeds
    its generators from those of process 0 and its rank."""
    if rank >= processes:
        known = (folder / "random-0.safetensors").read_bytes()
        seed = int.from_bytes(hashlib.sha256(f"{rank}:".encode() + known).digest()[:4], "big")
        random.seed(seed)
        np.random.seed(seed)  # deliberately the global generator
        torch.manual_seed(seed)
        return
    states = read_tensors(folder / f"random-{rank}.safetensors")
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    plain = read_object(folder / f"random-{rank}.json")
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, place, has_gauss, cached = plain["numpy"]
    # deliberately the global generator
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, cached))


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank}.safetensors"


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    write_tensors(tensors, path)
    _flush_file(path)


def _flush_file(path: Path) -> None:
    """Flush a file's contents to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
