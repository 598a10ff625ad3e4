"""Training side by side with vLLM's `speculators`: speed, memory, and tau after equally many steps.

    python -m scripts.evidence.speculators --python PYTHON --answers outputs/families/generate

PYTHON is one that has speculators. Same target, same answers (cut alike), same architecture, 2
threads; each side is a process of its own, all of them alive at once and timed in turns. One step
reads 4,096 positions on both sides: 8 rows of 512 here, one packed row there. That library packs
everything into one row, whose attention is dense on a CPU, so it is timed with shorter rows too,
and compared at its fastest. Memory is compared where both hold equally many positions at once:
4,096, and 512 (ours accumulates the gradients of 8 rows). Its features are made beforehand and not
timed with its steps; ours are made in the step, so that comparison is against us. What making
theirs costs with plain transformers is reported too.

`--only timing` or `--only tau` renews one half of the report: tau does not depend on the machine's
load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import torch

from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.folders import discard
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.measure.metrics import tau_estimate
from inference.measure.prompts import load_prompts, select_prompts
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from scripts.evidence import common
from scripts.evidence.common import Facts, family_recipe, read_json, settings_of
from scripts.evidence.foreign.speculators_worker import Channel, peak_bytes
from scripts.stages.train import job_of
from scripts.tools.common import PROMPTS, REPORTS, ROOT, TARGET, command, cpu_target
from train import setup
from train.data.pack import PackedData
from train.distributed import join_world
from train.loop import Trainer
from train.memory import keep_freed_memory
from train.stopping import StopRequest

MODULE = "scripts.evidence.speculators"
WORKER = ROOT / "scripts" / "evidence" / "foreign" / "speculators_worker.py"
VERSION = "0.9.0"
LENGTH, ROWS = 512, 8
PLACES = LENGTH * ROWS
SHORTER = (2048, 1024, 512)
"""Shorter rows of the library that are timed too, in tokens."""
STEPS, COUNT, NEW_TOKENS = 61, 24, 96
"""Of the comparison of tau: training steps, prompts, and new tokens per prompt."""
ROW_BY_ROW = "ours, one row at a time"
BLOCKS = "--num-layers 5 --full-attention-indices 0 1 2 3 4 --max-anchors 512".split()
EAGLE3 = (
    "--ttt-steps 4 --no-norm-before-residual --no-norm-before-fc --fc-norm --norm-output".split()
)
KINDS: dict[str, tuple[Sequence[str], float]] = {
    "eagle3": (EAGLE3, 1e-2),
    "dspark": ([*BLOCKS, "--block-size", "7"], 1e-3),
    "dflash": ([*BLOCKS, "--block-size", "8"], 1e-3),
}
"""Architecture -> the library's flags, and our learning rate (recipe: experiment=families)."""
RECIPES = {
    "as it comes": (),  # Muon at 1e-3, linear decay
    "AdamW 3e-3": ("--optimizer", "adamw", "--lr", "3e-3"),
}
"""The library's optimisers tried for tau; the best one counts. Timed with AdamW, the cheaper
one."""


class Side:
    """A process that trains, and prints answers as lines of JSON: about itself at first, then about
    each command."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        pipe = subprocess.PIPE
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=file, text=True, cwd=ROOT
            )

    def answer(self) -> Facts:
        """The next answer; raises `UserError` with the end of its log when the process has died."""
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
        """Take so many steps, write a checkpoint, and end. The first answer must have been read."""
        self.ask(do="steps", count=steps)
        self.ask(do="save", to=str(saved))
        self.end()


@dataclass(frozen=True)
class Setting:
    """What both sides of a comparison share."""

    python: str
    answers: Path
    target: Path
    work: Path
    threads: int
    shorter: tuple[int, ...] = SHORTER

    def ours(self, kind: str, name: str, steps: int, at_once: int = ROWS) -> Side:
        """Our side of a training of `steps` steps, `at_once` rows per forward pass."""
        out = fresh(self.work / f"ours-{name}")
        overrides = ["experiment=[families]", *family_recipe(kind), f"optim.lr={KINDS[kind][1]}"]
        overrides += [f"train.max_steps={steps}", "train.eval_every=0", "train.parity=false"]
        overrides += ["train.seed=0", f"train.micro_batch={at_once}"]
        overrides += ["train.save_every=0", "target=local", f"target.path={self.target}"]
        overrides += ["target.dtype=float32", "target.device=cpu"]
        job = {"overrides": overrides, "answers": str(self.answers), "out": str(out)}
        write_json(out / "job.json", {**job, "threads": self.threads})
        command = [sys.executable, "-m", MODULE, "--side", str(out / "job.json")]
        return Side(command, out / "log.txt")

    def theirs(
        self, kind: str, name: str, places: int, flags: tuple[str, ...], epochs: int
    ) -> Side:
        """The library's side; makes its data set first where there is none."""
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
            "seed": 0,
            "threads": self.threads,
            "flags": [*KINDS[kind][0], *flags],
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
        """Tokens and seconds that making the library's features took, with plain transformers."""
        return {**read_json(self.data(kind) / "made.json")}

    def data(self, kind: str) -> Path:
        """The library's data set: that of these documents, this target and these layers."""
        layers = "-".join(map(str, self.taps(kind)))
        rows = (self.work / "rows.jsonl").read_bytes() + self.model.info.revision.encode()
        return self.work / f"data-{layers}-{hashlib.sha256(rows).hexdigest()[:12]}"

    def converted(self, name: str) -> Path:
        """The checkpoint that the library's side `name` saved, as one of ours."""
        folder = self.work / f"theirs-{name}"
        import_folder(Folder.read(folder / "saved"), self.model, folder / "converted")
        return folder / "converted"

    def write_rows(self) -> int:
        """Write the documents for the other side, cut as in our training; returns their tokens."""
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


def name_of(places: int) -> str:
    return f"speculators, rows of {places}"


def fresh(folder: Path) -> Path:
    discard(folder)
    folder.mkdir(parents=True)
    return folder


def timing(setting: Setting, name: str, warm: int, rounds: int) -> Facts:
    """Tokens per second and peak memory of all sides, timed in turns; ratios are ours over theirs.

    One round is two steps of ours, and as many positions of theirs; `warm` rounds are not counted.
    """
    sides: dict[str, tuple[Side, int]] = {
        "ours": (setting.ours(name, name, 1000), 2),
        ROW_BY_ROW: (setting.ours(name, f"{name}-1", 1000, at_once=1), 2),
    }
    for places in (PLACES, *setting.shorter):
        side = setting.theirs(name, f"{name}-{places}", places, RECIPES["AdamW 3e-3"], 1000)
        sides[name_of(places)] = (side, 2 * PLACES // places)
    rows: dict[str, Facts] = {}
    for label, (side, _) in sides.items():
        weights = side.answer()["trained_weights"]
        rows[label] = {"trained_weights": weights, "tokens": 0, "seconds": 0.0}
    for turn in range(warm + rounds):
        for label, (side, count) in sides.items():
            found, row = side.ask(do="steps", count=count), rows[label]
            row["peak_bytes"] = found["peak_bytes"]
            if turn >= warm:
                row["tokens"] += found["tokens"]
                row["seconds"] += found["seconds"]
    for side, _ in sides.values():
        side.end()
    speeds = {}
    for label, row in rows.items():
        speeds[label] = row["tokens_per_second"] = row["tokens"] / row["seconds"]
    made = setting.making(name)
    fastest = max((x for x in speeds if not x.startswith("ours")), key=speeds.__getitem__)
    whole = 1 / (1 / speeds[fastest] + made["seconds"] / made["tokens"])
    return {
        "sides": rows,
        "their_features_tokens_per_second": made["tokens"] / made["seconds"],
        "their_fastest": fastest,
        "speed_ratio": speeds["ours"] / speeds[fastest],
        "speed_ratio_at_equal_steps": speeds["ours"] / speeds[name_of(PLACES)],
        "speed_ratio_with_their_features": speeds["ours"] / whole,
        "memory_ratio": {
            str(places): rows[label]["peak_bytes"] / rows[name_of(places)]["peak_bytes"]
            for places, label in ((PLACES, "ours"), (LENGTH, ROW_BY_ROW))
            if name_of(places) in rows
        },
    }


def tau(setting: Setting, name: str, prompts: Path) -> Facts:
    """tau of both sides after equally many steps, with one decoder on the same held-out prompts;
    difference: ours less the best of theirs."""
    decode = DecodeConfig(temperature=0.0, depth=4, max_new_tokens=NEW_TOKENS, batch_size=8)
    found = load_prompts(prompts)
    domains = len({prompt.domain for prompt in found})
    chosen = select_prompts(found, max(1, COUNT // domains), seed=0)
    counts = set[int]()

    def measure(folder: Path) -> Facts:
        totals = common.decode_totals(setting.model, folder, chosen, decode)
        counts.add(len(totals.prompts))
        return common.tau_facts(tau_estimate(totals))

    ours = setting.ours(name, name, STEPS)
    ours.answer()
    saved = setting.work / f"ours-{name}" / "saved"
    ours.train(STEPS, saved)
    rows = {"ours": measure(saved)}
    for number, (recipe, flags) in enumerate(RECIPES.items()):
        label = f"{name}-tau-{number}"
        steps = ("--scheduler-total-steps", str(STEPS))
        side = setting.theirs(name, label, PLACES, (*flags, *steps), 1000)
        side.answer()
        side.train(STEPS, setting.work / f"theirs-{label}" / "saved")
        rows[f"speculators, {recipe}"] = measure(setting.converted(label))
    best = max(row["tau"] for label, row in rows.items() if label != "ours")
    difference = rows["ours"]["tau"] - best
    return {"steps": STEPS, "prompts": max(counts), "sides": rows, "difference": difference}


def compare(given: argparse.Namespace) -> None:
    """Compare and write the report."""
    if given.side:
        job = read_json(given.side)
        torch.set_num_threads(job["threads"])
        follow_commands(job, Channel())
        return
    if not given.python or not given.answers:
        raise UserError(
            "give --python, one that has speculators, and --answers, a folder of generate."
        )
    answers, target, work = (x.resolve() for x in (given.answers, given.target, given.work))
    setting = Setting(given.python, answers, target, work, given.threads)
    report = {"format": 1, **(read_json(given.out) if given.only else {})}
    tokens = setting.write_rows()
    facts = {
        **process_facts(),
        "device": {**device_facts(torch.device("cpu")), "threads": given.threads},
        "command": f"python -m {MODULE} --python PYTHON --answers outputs/families/generate",
    }
    for part in [given.only] if given.only else ["timing", "tau"]:
        shared = {"facts": facts, "places_per_step": PLACES, "tokens": tokens}
        rows = {
            name: timing(setting, name, warm=1, rounds=4)
            if part == "timing"
            else tau(setting, name, given.prompts)
            for name in given.kinds
        }
        report[part] = {**report.get(part, {}), **shared, **rows}
        write_json(given.out, report)
    print(json.dumps(report, indent=1))


def follow_commands(job: Facts, channel: Channel) -> None:
    """Our side: `headstart train` with the job's overrides, whose trainer takes its steps on
    command, with the protocol of foreign/speculators_worker.py."""
    keep_freed_memory()
    inputs = replace(
        job_of(settings_of("train", *job["overrides"])),
        data=Path(job["answers"]),
        out=Path(job["out"]),
    )
    made = setup.Run(inputs, join_world(torch.device("cpu")))
    weights = sum(p.numel() for p in made.drafter.parameters() if p.requires_grad)
    epoch = made.loader.steps_per_epoch
    channel.say(ready=True, trained_weights=weights, steps_per_epoch=epoch)

    class Commanded(Trainer):
        """Takes as many steps as it is asked for, until there are no more commands."""

        def run(self) -> str:
            stream = self.loader.iterate(0, 1_000_000)
            with StopRequest() as request:
                for command in channel.commands():
                    if command["do"] == "save":
                        made.write_checkpoint(self.engine.weights(), Path(command["to"]))
                        channel.say(saved=command["to"])
                        continue
                    begun, before = time.perf_counter(), self.progress.tokens
                    for _ in range(command["count"]):
                        self.step(*next(stream), request)
                    seconds, tokens = time.perf_counter() - begun, self.progress.tokens - before
                    channel.say(seconds=seconds, tokens=tokens, peak_bytes=peak_bytes())
            return "there are no more commands"

    with patch.object(setup, "Trainer", Commanded):
        made.run(None)


main = command(
    compare,
    python={"help": f"a python that has speculators {VERSION}"},
    answers={"type": Path, "help": "folder of `headstart generate`"},
    target=TARGET,
    prompts=(PROMPTS, "held-out prompts for tau"),
    kinds={"nargs": "+", "choices": sorted(KINDS), "default": ["eagle3", "dspark"]},
    only={"choices": ("timing", "tau")},
    threads=2,
    work=ROOT / "outputs" / "speculators",
    out=REPORTS / "speculators.json",
    side={"type": Path, "help": argparse.SUPPRESS},
)

if __name__ == "__main__":
    sys.exit(main())
