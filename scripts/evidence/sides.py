"""The two sides of a comparison with vLLM's `speculators`: separate processes that train on the
same answers of the same target and take commands (foreign/speculators_worker.py has the
protocol)."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo
from inference.cpu import multiplies_bfloat16
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.folders import discard
from inference.manifest import write_json
from inference.target.model import TargetModel
from scripts.config.schema import HeadSettings
from scripts.evidence.common import Facts, family_recipe, read_json, settings_of
from scripts.tools.common import ROOT, cpu_target
from train.data.pack import PackedData

WORKER = ROOT / "scripts" / "evidence" / "foreign" / "speculators_worker.py"
VERSION = "0.9.0"
LENGTH = 512
"""Tokens of a row on our side, and most tokens of a document on both sides."""
FLAGS = (
    "--num-workers 0 --log-freq 1000000000 --loss-implementation eager --draft-attn-impl sdpa "
    "--on-missing raise --no-resume-from-checkpoint"
).split()
"""Flags of the library in every comparison: what a CPU needs, and no logging."""
SHALLOW = 6
"""Layers of a target with which two of the library's default taps are the same."""
Row = tuple[list[int], list[int]]
"""Tokens of a document, and 1 for each that the loss counts."""


def fast_dtype() -> str:
    """The dtype in which both sides compute, as conf/experiment/families.yaml chooses it
    (`fast_precision`): float32 on a CPU that emulates bfloat16."""
    return "bfloat16" if multiplies_bfloat16() else "float32"


def their_sizes(head: HeadSettings, info: TargetInfo, anchors: int) -> list[str]:
    """The sizes that both sides share, as flags of the library: layers, block or depths; and its
    anchors of a step, which is one row: for P-EAGLE the tokens of a step, since ours drops no
    position before the second depth."""
    with torch.device("meta"):
        drafter: Any = get_kind(head.kind).drafter_class(head.config, info)
    layers = range(len(getattr(drafter, "layers", [None])))
    words: list[object] = ["--num-layers", len(layers), "--full-attention-indices", *layers]
    if head.kind == "dflash":
        words += ["--block-size", head.config.block_size, "--max-anchors", anchors]
    if head.kind == "peagle":
        words += ["--num-depths", head.config.depths, "--max-anchors", anchors]
    return [str(word) for word in words]


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

    @cached_property
    def about(self) -> Facts:
        """The first answer."""
        return self.answer()

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

    def require_version(self) -> None:
        """End the process and raise `UserError` if it has another version of the library."""
        found = self.about["version"]
        if found != VERSION:
            self.end()
            raise UserError(
                f"--python has speculators {found}, and the comparison is with {VERSION}: its "
                f"flags and defaults differ. Install speculators=={VERSION} there."
            )

    def train(self, steps: int, saved: Path) -> Facts:
        """Take this many steps, validate, write a checkpoint, and end; returns the tokens, CPU
        seconds and the library's own validation figures. `about` must have been read before."""
        done = self.ask(do="steps", count=steps)
        validation = self.ask(do="validate")["validation"]
        self.ask(do="save", to=str(saved))
        self.end()
        return {"tokens": done["tokens"], "seconds": done["seconds"], "validation": validation}


@dataclass(frozen=True)
class Setting:
    """The settings that both sides of a comparison share. length: most tokens of a document; dtype:
    of the library's computation and of its features; own_taps: whether the library reads the layers
    that it reads by default, in place of ours; prompts_too: whether its loss counts the tokens of
    prompts, which it leaves out by itself."""

    python: str
    answers: Path
    target: Path
    work: Path
    threads: int
    length: int = LENGTH
    dtype: str = field(default_factory=fast_dtype)
    own_taps: bool = False
    prompts_too: bool = False

    def theirs(
        self, kind: str, name: str, places: int, flags: Sequence[str], epochs: int, seed: int = 0
    ) -> Side:
        """The library's side: steps of `places` tokens, all in one row; flags: of its command line
        besides `FLAGS`. Raises `UserError` if it has another version.

        Makes the data set first if there is none. `write_rows` must have run before.
        """
        out = fresh(self.work / f"theirs-{name}")
        data = self.data(kind)
        job = {
            "kind": kind,
            "target": str(self.target),
            "rows": str(self.work / "rows.jsonl"),
            "train_rows": read_json(self.work / "rows.json")["trained"],
            "data": str(data),
            "out": str(out),
            "taps": self.taps(kind),
            "dtype": self.dtype,
            "tokens_per_step": places,
            "epochs": epochs,
            "seed": seed,
            "threads": self.threads,
            "flags": [*FLAGS, *flags],
        }
        write_json(out / "job.json", job)
        command = [self.python, str(WORKER), str(out / "job.json")]
        if not (data / "made.json").is_file():
            maker = Side(command, out / "data.txt")
            maker.require_version()
            maker.end()
        side = Side(command, out / "log.txt")
        side.require_version()
        return side

    def taps(self, kind: str) -> list[int]:
        """The layers of the target that the library's drafter of this kind reads. Its own defaults
        (`resolve_target_layer_ids`) need a target of more than `SHALLOW` layers; otherwise they are
        ours."""
        layers = self.model.info.num_layers
        if self.own_taps and layers > SHALLOW:
            return [2, layers // 2, layers - 3]
        head = settings_of("train", "experiment=[families]", *family_recipe(kind)).head
        drafter = get_kind(head.kind).drafter_class(head.config, self.model.info)
        return list(drafter.needs.taps)

    @cached_property
    def model(self) -> TargetModel:
        """The target, in float32."""
        return cpu_target(self.target)

    def making(self, kind: str) -> Facts:
        """Tokens and CPU seconds of making the library's features with plain transformers."""
        return {**read_json(self.data(kind) / "made.json")}

    def data(self, kind: str) -> Path:
        """The library's data set for these documents, this target, these layers and this dtype."""
        layers = "-".join(map(str, self.taps(kind)))
        rows = (self.work / "rows.jsonl").read_bytes() + self.model.info.revision.encode()
        name = f"data-{self.dtype}-{layers}-{hashlib.sha256(rows).hexdigest()[:12]}"
        return self.work / name

    def saved(self, name: str) -> Path:
        """The folder that the library's side `name` saves after a training."""
        return self.work / f"theirs-{name}" / "saved"

    def converted(self, name: str) -> Path:
        """The checkpoint that the library's side `name` saved, converted to one of ours."""
        saved = self.saved(name)
        out = saved.with_name("converted")
        import_folder(Folder.read(saved), self.model, out)
        return out

    def write_rows(self, held_out: Sequence[Row] = ()) -> int:
        """Write the documents for the library's side, cut as in our training, and after them those
        of its validation (none given: the last document is not trained on); returns the tokens of
        the former."""
        data = PackedData.from_manifest(self.answers, self.model.info, self.length)
        rows: list[Row] = []
        for index in range(len(data)):
            row = data.row(index)
            for segment in range(1, int(row.segments.max()) + 1):
                inside = row.segments == segment
                mask = row.loss_mask[inside].astype(int).tolist()
                if self.prompts_too:
                    mask = [0] + [1] * (len(mask) - 1)  # nothing predicts the first token
                rows.append((row.tokens[inside].tolist(), mask))
        lines = [
            json.dumps({"tokens": tokens, "mask": mask}) + "\n"
            for tokens, mask in (*rows, *held_out)
        ]
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(self.work / "rows.json", {"trained": len(rows) if held_out else len(rows) - 1})
        return sum(len(tokens) for tokens, _ in rows)


def fresh(folder: Path) -> Path:
    """An empty folder of a side; what an earlier command left there is deleted."""
    discard(folder, ("train", "import"))  # our training, and their converted checkpoint
    folder.mkdir(parents=True)
    return folder
