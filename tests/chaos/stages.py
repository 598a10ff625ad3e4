"""Every stage that leaves something, small: on a random target, in a second or so each.

A `Subject` is one stage: its command, what of a run it needs, what it leaves there, and what of
that must not depend on what happens to it. A `Site` is the folder in which they run. Every subject
has a calm run, made when it is first needed; what others need of it is copied from there.

Not here: chat, serve and feature servers (`tests.chaos.protocol`), and plan, pull and verify-export,
which leave nothing in a run. Feedback and rounds are part of the loop.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heads.api.checkpoint import WEIGHTS_FILE
from inference.folders import is_temporary
from inference.manifest import MANIFEST_FILE, file_sha256
from inference.writers import is_writer_file
from tests.chaos.ground import Ended, Ground, UnsurvivedError, figures
from tests.chaos.kill_loop import timeless
from tests.scripts.loops import micro_loop, read_by

Result = Callable[[Path], Any]
"""What must be equal, of the folder of a run."""
CALM = "calm-{}"


@dataclass(frozen=True)
class Subject:
    """A stage at work. more: further settings, in which {run} is the run's folder and {data} that
    of the target and the prompts; needs: subjects whose files it reads; makes: what it leaves, in
    the run's folder; exact: whether it trusts nothing that it reads without a check."""

    name: str
    stage: str
    makes: str
    result: Result
    needs: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    processes: int = 1
    exact: bool = True


@dataclass(frozen=True)
class Calm:
    """A run that nothing happened to."""

    folder: Path
    result: Any
    seconds: float


@dataclass
class Site:
    """A folder in which stages run."""

    folder: Path
    calms: dict[str, Calm] = field(default_factory=dict)

    @cached_property
    def ground(self) -> Ground:
        return Ground(self.folder)

    @cached_property
    def settings(self) -> list[str]:
        """The loop on a micro target, for every stage that reads them."""
        data = self.folder / "data"
        data.mkdir(parents=True)
        found = [text for text in micro_loop(data) if text != "engine=torch"]
        change(data / "target", data / "changed")
        rows = [
            {"timestamp": number / 50, "prompt": "What?", "answer_tokens": 1 + number % 9}
            for number in range(20)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (data / "requests.jsonl").write_text(lines, encoding="utf-8")
        return found

    def command(self, subject: Subject, run: Path) -> list[str]:
        """The subject's command line for a run."""
        places = {"run": str(run), "data": str(self.folder / "data")}
        more = [text.format(**places) for text in subject.more]
        given = {text.split("=")[0] for text in more}
        common = read_by(subject.stage, self.settings)
        common = [text for text in common if text.split("=")[0] not in given]
        return [subject.stage, *common, f"run.root={run.parent}", f"run.name={run.name}", *more]

    def calm(self, subject: Subject) -> Calm:
        """The subject's calm run; raises `UnsurvivedError` when that fails."""
        if subject.name not in self.calms:
            run = self.run(subject, CALM.format(re.sub(r"\W+", "-", subject.name)))
            begun = time.monotonic()
            ended = self.start(subject, run)
            seconds = time.monotonic() - begun
            if ended.status:
                raise UnsurvivedError(f"{subject.name} in peace: {ended.words[-600:]}")
            self.calms[subject.name] = Calm(run, subject.result(run), seconds)
        return self.calms[subject.name]

    def run(self, subject: Subject, name: str, root: Path | None = None) -> Path:
        """A new run with what the subject needs."""
        run = (root or self.folder / "runs") / name
        run.mkdir(parents=True)
        for need in subject.needs:
            other = SUBJECTS[need]
            shutil.copytree(self.calm(other).folder / other.makes, run / other.makes)
        return run

    def copy(self, other: Path, name: str) -> Path:
        """A new run that is a copy of another one."""
        return Path(shutil.copytree(other, self.folder / "runs" / name))

    def start(self, subject: Subject, run: Path, **options: Any) -> Ended:
        """Run the subject to its end."""
        command = self.command(subject, run)
        return self.ground.run(command, processes=subject.processes, **options)

    def finished(self, subject: Subject, run: Path, ended: Ended) -> str:
        """What is wrong with how the subject ended, which must have the calm run's result and leave
        nothing half-made; empty where nothing is."""
        if ended.status:
            return f"status {ended.status}: {brief(ended)}"
        left = [
            path.relative_to(run).as_posix()
            for path in run.rglob("*")
            if is_temporary(path.name) or is_writer_file(path.name)
        ]
        if left:
            return f"it has left {left[0]} behind"
        try:
            same = subject.result(run) == self.calm(subject).result
        except (OSError, ValueError, LookupError) as error:
            return f"its result cannot be read: {error!r}"
        return "" if same else "another result than in peace"


def spoken(ended: Ended) -> str:
    """What is wrong with how a stage that met a fault ended: it must have come to its end, or say
    in one message of its own why not. Empty where nothing is."""
    if ended.status not in (0, 2):
        return f"status {ended.status}: {brief(ended)}"
    if "Traceback" in ended.words or (ended.status and not ended.complaint):
        return f"no message for people: {brief(ended)}"
    return ""


def brief(ended: Ended) -> str:
    """The end of what a stage said."""
    return " ".join(ended.words.split())[-400:]


def change(target: Path, out: Path) -> None:
    """Write a target of the same sizes with other weights."""
    shutil.copytree(target, out)
    generator = torch.Generator().manual_seed(5)
    weights = load_file(out / WEIGHTS_FILE)
    for tensor in weights.values():
        tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, out / WEIGHTS_FILE, {"format": "pt"})


# What must be equal


def hashes(folder: Path, *beside: str) -> dict[str, str]:
    """File -> SHA-256, without those named `beside`."""
    return {
        path.relative_to(folder).as_posix(): file_sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in beside
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def answered(run: Path) -> Any:
    manifest = read(run / "generate" / MANIFEST_FILE)
    return manifest["shards"], manifest["counts"]


def trained(run: Path) -> Any:
    folder = run / "train" / "medusa"
    return figures(folder), file_sha256(folder / "best" / WEIGHTS_FILE)


def stored(run: Path) -> Any:
    return hashes(run / "features" / "fp32" / "shards")


def measured(run: Path) -> Any:
    report = read(run / "measure" / "report.json")
    keys = ("kind", "tau", "tau_ci95", "tokens", "verify_passes", "tar", "acceptance", "lossless")
    lines = (run / "measure" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: row.get(key) for key in keys} for row in report["drafters"]], len(lines)


def audited(run: Path) -> Any:
    content = read(run / "audit" / "audit.json")
    return content["comparisons"], content["verdict"]


def tuned(run: Path) -> Any:
    content = read(run / "tune" / "medusa" / "tune.json")
    assert (run / "train" / "medusa" / "best" / "decode.yaml").is_file()
    return [(row["batch_size"], row["temperature"]) for row in content["rows"]]


def simulated(run: Path) -> Any:
    return [
        (way["drafter"], way["draft"]) for way in read(run / "traffic" / "traffic.json")["ways"]
    ]


def watched(run: Path) -> Any:
    return read(run / "watch" / "watch.json")


def reported(run: Path) -> Any:
    names = ("report.md", "report.html", "report.json", "acceptance.png", "speedup.png")
    return [(run / name).is_file() for name in names], (run / "report.md").read_text("utf-8")


def exported(run: Path) -> Any:
    return hashes(run / "export" / "medusa" / "vllm", "headstart_export.json")


def imported(run: Path) -> Any:
    return hashes(run / "train" / "theirs" / "best", MANIFEST_FILE)


def pushed(run: Path) -> Any:
    return hashes(run / "push" / "medusa", MANIFEST_FILE)


def looped(run: Path) -> Any:
    summary = read(run / "loop.json")
    weights = sorted((run / "train").glob(f"*/best/{WEIGHTS_FILE}"))
    shown = re.sub(rf'"[^"]*\b{run.name}/', '"run/', json.dumps(timeless(summary)))
    return shown, [file_sha256(path) for path in weights]


def refreshed(run: Path) -> Any:
    content = read(run / "refresh" / "refresh.json")
    weights = sorted((run / "train").glob(f"*/best/{WEIGHTS_FILE}"))
    return content["after"]["tau"], [file_sha256(path) for path in weights]


AUDIT = (
    "audit.drafters=[medusa]",
    "audit.kinds=[]",
    "audit.prompts=2",
    "audit.max_new_tokens=8",
    "audit.checks=[invariance]",
    "audit.temperatures=[0]",
    "audit.shapes=[tree]",
    "audit.precisions=[float64]",
)
TUNE = (
    "tune.drafter=medusa",
    "tune.prompts={data}/valid.jsonl",
    "tune.prompts_per_domain=2",
    "tune.max_new_tokens=8",
    "tune.batches=[1,2]",
    "tune.depths=[1,2]",
    "tune.nodes=[4]",
    "tune.thresholds=[0.5]",
    "tune.repeats=2",
    "tune.finalists=1",
    "tune.rounds=1",
    "tune.close_rounds=0",
)
TRAFFIC = (
    "traffic.file={data}/requests.jsonl",
    "traffic.prompts={data}/valid.jsonl",
    "traffic.drafters=[medusa]",
    "traffic.depths=[1]",
    "traffic.rows=2",
    "traffic.repeats=2",
    "traffic.prompts_per_domain=2",
    "traffic.max_new_tokens=8",
)
REFRESH = (
    "target.path={data}/changed",
    "refresh.drafter={run}/train/medusa/best",
    "refresh.prompts=12",
    "refresh.until=budget",
    "data.benches=[]",
    "run.drafter=fresh",
)
WATCH = (
    "watch.drafter=medusa",
    "watch.learn=true",
    "watch.reference={run}/watch/watch.json",
    "bench.prompts={data}/train.jsonl",  # a reference needs some answers
)
STORE = (
    "features.format=fp32",
    "features.shard_mib=0.02",
    "features.verify=true",  # else content is checked by who reads it
)
SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("generate", "generate", "generate", answered, more=("generate.flush_rows=1",)),
        Subject("train", "train", "train", trained, ("generate",), ("engine=torch",)),
        Subject("features", "features", "features", stored, ("generate",), STORE),
        Subject("measure", "measure", "measure", measured, ("generate", "train")),
        Subject("audit", "audit", "audit", audited, ("train",), AUDIT),
        Subject("tune", "tune", "tune", tuned, ("train",), TUNE),
        Subject("traffic", "traffic", "traffic", simulated, ("train",), TRAFFIC),
        Subject("watch", "watch", "watch", watched, ("train",), WATCH),
        Subject("report", "report", "report.md", reported, ("train", "measure"), exact=False),
        Subject("export", "export", "export", exported, ("train",), ("export.overwrite=true",)),
        Subject(
            "import",
            "import",
            "train",
            imported,
            ("export",),
            (
                "import.source={run}/export/medusa/vllm",
                "import.overwrite=true",
                "run.drafter=theirs",
            ),
        ),
        Subject("push", "push", "push", pushed, ("train", "measure"), ("push.repo=some/one",)),
        Subject("refresh", "refresh", "", refreshed, ("train",), REFRESH),
        Subject("loop", "loop", "", looped, more=("engine=torch", "loop.rounds=2")),
        Subject("generate, two ranks", "generate", "generate", answered, processes=2),
        Subject(
            "train, two ranks of torchrun",
            "train",
            "train",
            trained,
            ("generate",),
            ("engine=torch",),
            processes=2,
        ),
        Subject(
            "train, two ranks of DeepSpeed",
            "train",
            "train",
            trained,
            ("generate",),
            ("engine=deepspeed", "engine.precision=float32"),
            processes=2,
        ),
    )
}


def alone() -> list[Subject]:
    """Those of one process."""
    return [subject for subject in SUBJECTS.values() if subject.processes == 1]
