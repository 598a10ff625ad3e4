"""What all faults share: a folder, stages as processes of their own, and comparisons with calm
runs.

A stage is killed, starved of disk or given broken files from outside; nothing inside it is
replaced. Its result is compared with that of the same stage without a fault: answers by their ids
and bytes, trainings by the steps in their log and the bytes of their best weights.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests import forked

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS, STEPS, BATCH = 24, 10, 2
LONGEST = 300.0
"""Seconds after which a stage counts as hanging."""
CONTINUED, SAVED, RETRIED, REFUSED, FAILED = "continued", "saved", "retried", "refused", "FAILED"
QUOTA_DISK_BYTES = 1 << 29
"""Of a file that is as large as what is written into it; Btrfs needs 109 MiB."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class UnsurvivedError(Exception):
    """A stage did not do what it must after a fault; the text says what was seen."""


@dataclass(frozen=True)
class Ended:
    """How a process ended. words: the last lines it printed."""

    status: int
    words: str

    @property
    def complaint(self) -> str:
        """The error message: the last line that a stage printed in its own name, without the path
        of the test folder."""
        lines = [
            line
            for line in self.words.replace("\r", "\n").splitlines()
            if line.startswith("headstart")
        ]
        return lines[-1] if lines else ""


@dataclass
class Outcome:
    """How a fault ended. lost, doubled: samples, against the calm run; identical: whether the bytes
    of the result are the same.
    """

    outcome: str
    lost: int = 0
    doubled: int = 0
    identical: bool | None = None
    words: str = ""

    @property
    def ok(self) -> bool:
        """Survived or refused cleanly, with nothing lost or doubled."""
        return (
            self.outcome != FAILED
            and not self.lost
            and not self.doubled
            and self.identical is not False
        )


Case = Callable[["Ground"], Outcome]
Damage = Callable[[Path], None]
"""Damages a file in its place: `flip_bit`, `truncate`."""


@dataclass(frozen=True)
class Fault:
    """A fault by name: what happens, and where."""

    what: str
    where: str
    case: Case


FAULTS: dict[str, Fault] = {}


def fault(what: str, where: str) -> Callable[[Case], Case]:
    """Register a case under its function's name."""

    def add(case: Case) -> Case:
        FAULTS[case.__name__] = Fault(what, where, case)
        return case

    return add


@dataclass
class Ground:
    """A folder in which faults happen. Calm runs are made once, when first asked for."""

    folder: Path

    @cached_property
    def prompts(self) -> Path:
        """Prompts for generate."""
        rows = [
            {"id": str(n), "domain": "code", "prompt": f"Write function number {n}."}
            for n in range(PROMPTS)
        ]
        return write_lines(self.folder / "prompts.jsonl", rows)

    def generate(self, *more: str) -> list[str]:
        """The command line of a short generate."""
        return [
            "generate",
            "data=jsonl",
            f"data.path={self.prompts}",
            "run.threads=1",
            "sampling.max_new_tokens=24",
            "sampling.temperature=0.0",
            "sampling.batch_size=2",
            "generate.flush_rows=2",
            *more,
        ]

    def train(self, *more: str) -> list[str]:
        """The command line of a short training on the calm answers."""
        return [
            "train",
            "head=medusa",
            "engine=torch",
            "engine.precision=float32",
            "run.threads=1",
            f"run.answers={self.answers}",
            f"train.max_steps={STEPS}",
            f"train.global_batch={BATCH}",
            "train.micro_batch=1",
            "train.sequence_length=96",
            "train.save_every=2",
            "train.eval_every=5",
            "train.eval_prompts=3",
            "train.eval_tokens=8",
            "decode.depth=2",
            "train.tracker.wandb=disabled",
            *more,
        ]

    @cached_property
    def answers(self) -> Path:
        """The calm generate's folder."""
        self.must(self.run(self.generate("run.name=calm")))
        return self.folder / "outputs" / "calm" / "generate"

    @cached_property
    def trained(self) -> Path:
        """The calm training's folder."""
        self.must(self.run(self.train("run.name=calm")))
        return self.folder / "outputs" / "calm" / "train" / "medusa"

    # Processes

    def start(
        self,
        command: Sequence[str],
        processes: int = 1,
        launch: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ) -> subprocess.Popen[str] | forked.Process:
        """Start a stage; several processes under torchrun, with further options `launch`. wrapper:
        what python runs in place of a stage's module."""
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            *launch,
        ]
        environment = {
            name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
        }
        environment |= {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if processes == 1:
            words = wrapper or ["scripts.cli"]
            return forked.start(*words, *command, env=environment, cwd=self.folder)
        return subprocess.Popen(
            [sys.executable, *launcher, *(wrapper or ["-m", "scripts.cli"]), *command],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, command: Sequence[str], **options: Any) -> Ended:
        """Run a stage to its end."""
        return self.end(self.start(command, **options))

    def end(self, process: subprocess.Popen[str] | forked.Process) -> Ended:
        """Wait for a process; raises `UnsurvivedError` when it hangs."""
        try:
            words, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too, which hold the pipe open
            words, _ = process.communicate()
            raise UnsurvivedError(f"hung for {LONGEST:.0f} s: {words[-400:]}") from None
        return Ended(process.returncode, words)

    def strike(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        number: signal.Signals = signal.SIGKILL,
        victim: Callable[[int], int] = lambda pid: pid,
        **options: Any,
    ) -> Ended:
        """Start a stage and send it a signal as soon as `ready`; raises `UnsurvivedError` when it
        ends before that.

        victim: from the started process's id to that of the one that is hit.
        """
        process = self.start(command, **options)
        deadline = time.monotonic() + LONGEST
        while not ready():
            if process.poll() is not None:
                raise UnsurvivedError(
                    f"ended before the fault came: {self.end(process).words[-600:]}"
                )
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                raise UnsurvivedError("did not get to the point where the fault was to come")
            time.sleep(0.002)
        os.kill(victim(process.pid), number)
        return self.end(process)

    def must(self, ended: Ended, status: int = 0) -> Ended:
        """`ended`, if it ended with `status` and without a traceback; raises `UnsurvivedError`
        otherwise."""
        if ended.status != status or (status and "Traceback" in ended.words):
            raise UnsurvivedError(f"ended with {ended.status}, not {status}: {ended.words[-600:]}")
        return ended

    def refused(self, command: Sequence[str], name: str) -> Ended:
        """Run a stage that must refuse what it is given, with `name` in its words; raises
        `UnsurvivedError` otherwise."""
        ended = self.must(self.run(command), 2)
        if name not in ended.words:
            raise UnsurvivedError(f"the message does not name '{name}': {ended.words[-400:]}")
        return ended

    # What is left

    def compare_answers(self, folder: Path, outcome: str, words: str = "") -> Outcome:
        """A finished generate folder against the calm one."""
        ids, calm = answer_ids(folder), answer_ids(self.answers)
        shards = [
            json.loads((at / "manifest.json").read_text())["shards"]
            for at in (folder, self.answers)
        ]
        return Outcome(
            outcome,
            len(set(calm) - set(ids)),
            len(ids) - len(set(ids)),
            shards[0] == shards[1],
            words,
        )

    def compare_training(
        self, folder: Path, outcome: str, words: str = "", calm: Path | None = None
    ) -> Outcome:
        """A finished training folder against a calm one: by default the single-process one."""
        calm = calm or self.trained
        steps = trained_steps(folder)
        lost = (STEPS - len(set(steps))) * BATCH
        doubled = (len(steps) - len(set(steps))) * BATCH
        weights = [(at / "best" / "model.safetensors").read_bytes() for at in (folder, calm)]
        same = weights[0] == weights[1] and figures(folder) == figures(calm)
        return Outcome(outcome, lost, doubled, same, words)


def answer_ids(folder: Path) -> list[str]:
    """Ids of all answers in a finished generate folder."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return [
        str(name)
        for shard in manifest["shards"]
        for name in pq.read_table(folder / shard["file"])["id"].to_pylist()
    ]


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def trained_steps(folder: Path) -> list[int]:
    """The steps in a training's log, in order."""
    return [line["step"] for line in log_lines(folder) if "loss" in line]


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """(step, loss or None, tau or None) of every line: what must not depend on interruptions."""
    return [(line["step"], line.get("loss"), line.get("tau")) for line in log_lines(folder)]


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as .jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rank_of(launcher: int, rank: int) -> int:
    """The process id of a rank below torchrun's `launcher`."""
    for entry in Path("/proc").iterdir():
        try:
            if (
                not entry.name.isdigit()
                or f"PPid:\t{launcher}\n" not in (entry / "status").read_text()
            ):
                continue
            if f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:  # it ended meanwhile
            continue
    raise UnsurvivedError(f"there is no process of rank {rank}")


def flip_bit(path: Path, place: float = 0.6) -> None:
    """Flip one bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x10
    path.write_bytes(bytes(content))


def truncate(path: Path, share: float = 0.5) -> None:
    """Cut a file to a share of its length."""
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


@contextmanager
def small_disk(at: Path, kib: int) -> Iterator[Path]:
    """A file system of `kib` KiB in memory, mounted at `at`; raises `UnsurvivedError` where
    mounting is not allowed."""
    at.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        raise UnsurvivedError(
            f"no small disk can be mounted here ({mounted.stderr.strip()}); this fault needs root"
        )
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)


@contextmanager
def quota_disk(at: Path) -> Iterator[Path]:
    """A part of a file system of its own, mounted at `at`, that can be given a quota (`limit_disk`).
    Btrfs counts what its parts hold, also for root; raises `UnsurvivedError` where it cannot be made."""
    at.mkdir(parents=True, exist_ok=True)
    image, part = at.with_name(f"{at.name}.img"), at / "part"
    with image.open("wb") as file:
        file.truncate(QUOTA_DISK_BYTES)
    steps = (
        ("mkfs.btrfs", "-q", image),
        ("mount", "-o", "loop", image, at),
        ("btrfs", "quota", "enable", at),
        ("btrfs", "subvolume", "create", part),
    )
    try:
        for step in steps:
            words = [str(word) for word in step]
            if shutil.which(words[0]) is None:
                raise UnsurvivedError(f"no quota can be set here: {words[0]} is not installed")
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UnsurvivedError(f"no quota can be set here ({done.stderr.strip()[:200]})")
        yield part
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False, capture_output=True)
        image.unlink()


def limit_disk(part: Path, kib: int | None) -> None:
    """Set the quota of what `quota_disk` gave; None: none."""
    limit = "none" if kib is None else f"{kib}K"
    subprocess.run(["btrfs", "qgroup", "limit", limit, str(part)], check=True)


def grow_disk(at: Path, kib: int) -> None:
    """Give a small disk more room."""
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(at)], check=True)
