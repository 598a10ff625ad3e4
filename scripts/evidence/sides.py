"""The two sides of a comparison with vLLM's `speculators`: separate processes that train on the
same answers of the same target and take commands (foreign/speculators_worker.py has the
protocol)."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.folders import discard
from inference.manifest import write_json
from inference.target.model import TargetModel
from scripts.evidence.common import Facts, family_recipe, read_json, settings_of
from scripts.tools.common import ROOT, cpu_target
from train.data.pack import PackedData

WORKER = ROOT / "scripts" / "evidence" / "foreign" / "speculators_worker.py"
VERSION = "0.9.0"
LENGTH = 512
"""Tokens of a row on our side, and most tokens of a document on both sides."""


class Side:
    """A process that trains and prints answers as JSON lines: first about itself, then about each
    command."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        pipe = subprocess.PIPE
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=file, text=True, cwd=ROOT
            )

    def answer(self) -> Facts:
        """The next answer; raises `UserError`, with the end of the process's log, if the process
        has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text(encoding="utf-8")[-1500:]
            raise UserError(f"a side of the comparison ended early ({self.log}):\n{tail}")
        found: Facts = json.loads(line)
        return found

    def ask(self, **command: str | int) -> Facts:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)

    def train(self, steps: int, saved: Path) -> None:
        """Take this many steps, write a checkpoint, and end. The first answer must have been read
        before."""
        self.ask(do="steps", count=steps)
        self.ask(do="save", to=str(saved))
        self.end()


@dataclass(frozen=True)
class Setting:
    """The settings that both sides of a comparison share."""

    python: str
    answers: Path
    target: Path
    work: Path
    threads: int

    def theirs(
        self, kind: str, name: str, places: int, flags: Sequence[str], epochs: int, seed: int = 0
    ) -> Side:
        """The library's side: steps of `places` tokens, all in one row; flags: of its command line.

        Makes the data set first if there is none.
        """
        out = fresh(self.work / f"theirs-{name}")
        data = self.data(kind)
        job = {
            "kind": kind,
            "target": str(self.target),
            "rows": str(self.work / "rows.jsonl"),
            "data": str(data),
            "out": str(out),
            "taps": self.taps(kind),
            "tokens_per_step": places,
            "epochs": epochs,
            "seed": seed,
            "threads": self.threads,
            "flags": [*flags],
        }
        write_json(out / "job.json", job)
        command = [self.python, str(WORKER), str(out / "job.json")]
        if not (data / "made.json").is_file():
            maker = Side(command, out / "data.txt")
            maker.answer()
            maker.end()
        return Side(command, out / "log.txt")

    def taps(self, kind: str) -> list[int]:
        """The layers that our drafter of this kind reads by default."""
        head = settings_of("train", "experiment=[families]", *family_recipe(kind)).head
        drafter = get_kind(head.kind).drafter_class(head.config, self.model.info)
        return list(drafter.needs.taps)

    @cached_property
    def model(self) -> TargetModel:
        """The target, in float32."""
        return cpu_target(self.target)

    def making(self, kind: str) -> Facts:
        """Tokens and seconds of making the library's features with plain transformers."""
        return {**read_json(self.data(kind) / "made.json")}

    def data(self, kind: str) -> Path:
        """The library's data set for these documents, this target and these layers."""
        layers = "-".join(map(str, self.taps(kind)))
        rows = (self.work / "rows.jsonl").read_bytes() + self.model.info.revision.encode()
        return self.work / f"data-{layers}-{hashlib.sha256(rows).hexdigest()[:12]}"

    def converted(self, name: str) -> Path:
        """The checkpoint that the library's side `name` saved, converted to one of ours."""
        folder = self.work / f"theirs-{name}"
        import_folder(Folder.read(folder / "saved"), self.model, folder / "converted")
        return folder / "converted"

    def write_rows(self) -> int:
        """Write the documents for the library's side, cut as in our training; returns their
        tokens."""
        data = PackedData.from_manifest(self.answers, self.model.info, LENGTH)
        lines, tokens = [], 0
        for index in range(len(data)):
            row = data.row(index)
            for segment in range(1, int(row.segments.max()) + 1):
                inside = row.segments == segment
                tokens += int(inside.sum())
                mask = row.loss_mask[inside].astype(int).tolist()
                line = {"tokens": row.tokens[inside].tolist(), "mask": mask}
                lines.append(json.dumps(line) + "\n")
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        return tokens


def fresh(folder: Path) -> Path:
    discard(folder)
    folder.mkdir(parents=True)
    return folder
