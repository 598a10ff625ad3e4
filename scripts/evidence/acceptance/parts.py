"""Parts of an acceptance run. Each part measures something, judges it by limits, and writes a
separate file as soon as it ends, so a run that is cut short loses only its current part."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from heads.api.reading import read_object
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.target.hardware import device_facts, release_unused
from inference.target.model import TargetModel
from scripts.evidence.acceptance.shapes import Sizes
from scripts.run.revision import git_state, without_diff

Facts = dict[str, Any]
"""The measured values of a part, as JSON values."""
CALL_SECONDS = 570.0
"""A call's time: ten minutes, less the start of Python. No more is planned for the parts of a
command together."""


@dataclass(frozen=True)
class Check:
    """A measured value and its limits. A value that is NaN or outside of the limits has failed."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the value is within its limits."""
        low = self.least is None or self.value >= self.least
        high = self.most is None or self.value <= self.most
        return bool(low and high and self.value == self.value)

    def __str__(self) -> str:
        limits = [("at least", self.least), ("at most", self.most)]
        asked = " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)
        return f"{self.name} {self.value:g}, allowed is {asked}"


@dataclass(frozen=True)
class Found:
    """The result of a part."""

    facts: Facts
    checks: Sequence[Check] = ()


@dataclass
class Setting:
    """The device and the sizes of the parts. dtype: of the large targets; targets: those that were
    built, by the name of their sizes; a part that needs another one drops them first."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    targets: dict[str, TargetModel] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes for comparisons: only one on a CPU, which may emulate bfloat16."""
        return (torch.float32, torch.bfloat16) if self.on_gpu else (self.dtype,)

    def release(self) -> None:
        """Drop the targets, so that the next part has the memory."""
        self.targets.clear()
        if self.on_gpu:
            release_unused()


@dataclass(frozen=True)
class Part:
    """A named piece of work. seconds: its longest duration on a GPU of the H100 class, as planned;
    the part is not begun with less time left. timed: it measures time, so it runs alone."""

    name: str
    work: Callable[[Setting], Found]
    seconds: float
    timed: bool = False


def run_parts(
    stage: str,
    parts: Sequence[Part],
    setting: Setting,
    out: Path,
    seconds: float,
    command: str,
    say: Callable[[str], None] = print,
    jobs: int = 1,
    alone: Callable[[Part, float], Sequence[str]] | None = None,
) -> bool:
    """Run all parts and write `<stage>-<part>.json` for each, and `<stage>.json`; returns whether
    every part ran and passed. A part that raises has failed, and the others continue.

    jobs: number of untimed parts that run at once, each by the command `alone(part, seconds)` in a
    separate process; 1: all run in this process.
    """
    begin, results = time.perf_counter(), dict[str, str]()
    code = without_diff(git_state())
    known = {"device": device_facts(setting.device), **process_facts(), "command": command}

    def write(name: str, content: Mapping[str, Any]) -> None:
        write_json(out / f"{name}.json", {**known, "git": code, **content})

    here = list(parts)
    if jobs > 1 and alone is not None:
        beside = [part for part in parts if not part.timed]
        here = [part for part in parts if part.timed]
        with ThreadPoolExecutor(jobs) as pool:
            run = partial(run_beside, stage, begin=begin, seconds=seconds, alone=alone, out=out)
            for part, (result, lines) in zip(beside, pool.map(run, beside), strict=True):
                results[part.name] = result
                for line in lines:
                    say(line)
    for part in here:
        left = seconds - (time.perf_counter() - begin)
        if left < part.seconds:
            results[part.name] = "not run"
            say(f"{stage} {part.name}: not run, {left:.0f} s are left of {seconds:.0f}")
            continue
        content = run_part(part, setting)
        results[part.name] = content["result"]
        write(f"{stage}-{part.name}", {"stage": stage, **content})
        say(f"{stage} {part.name}: {content['result']} ({content['seconds']:.1f} s)")
        for line in content["failures"]:
            say(f"  {line}")
    passed = bool(results) and set(results.values()) == {"passed"}
    write(stage, {"stage": stage, "passed": passed, "parts": results})
    return passed


def run_beside(
    stage: str,
    part: Part,
    begin: float,
    seconds: float,
    alone: Callable[[Part, float], Sequence[str]],
    out: Path,
) -> tuple[str, list[str]]:
    """Run a part in a separate process, which ends at the common time limit; returns its result and
    its output."""
    left = seconds - (time.perf_counter() - begin)
    if left < part.seconds:
        return "not run", [f"{stage} {part.name}: not run, {left:.0f} s are left of {seconds:.0f}"]
    file = out / f"{stage}-{part.name}.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, *alone(part, left)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=left)
        said = [line for line in done.stdout.splitlines() if line.startswith((stage, "  "))][:-1]
        failed = [f"  {line}" for line in done.stderr.strip().splitlines()[-20:]]
    except subprocess.TimeoutExpired:
        said, failed = [], [f"  it did not end in {left:.0f} s"]
    if not file.is_file():  # it ended before it could write a reason
        return "error", [f"{stage} {part.name}: error", *failed]
    return str(read_object(file, "")["result"]), said


def run_part(part: Part, setting: Setting) -> Facts:
    """A part's result in the form of its file: "passed", "failed" or "error", and the reason."""
    begin = time.perf_counter()
    try:
        found, error = part.work(setting), ""
    except Exception as raised:  # noqa: BLE001  this code exists to report faults
        found, error = Found({}), f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    failures = [str(check) for check in found.checks if not check.passed]
    result = "error" if error else "failed" if failures else "passed"
    return {
        "part": part.name,
        "result": result,
        "seconds": time.perf_counter() - begin,
        "failures": [error] if error else failures,
        "checks": [{**asdict(check), "passed": check.passed} for check in found.checks],
        "facts": found.facts,
    }
