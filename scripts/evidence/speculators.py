"""Compares the cost of training with vLLM's `speculators`: CPU seconds and memory.

    python -m scripts.evidence.speculators --python PYTHON --answers outputs/families/generate

PYTHON is an interpreter that has speculators. Both sides have the same target, the same answers
(cut in the same way), one thread and one dtype. A step is one row of 1,024 tokens on both sides,
with equal layers, blocks or depths, anchors and unrolled steps, and Muon at the same rate. The
library reads the target's states from a store. Headstart does so too, and is measured online as
well, where its steps include the target's passes. Each side is a separate process; all are alive at
once and take their steps in turns. Times are CPU seconds of the process, so that other work on the
machine enters them little. The cost of making the library's states with plain transformers is
reported too. scripts.evidence.peers compares quality.

Writes docs/reports/speculators.{json,md}; kinds may be measured one at a time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.report.markdown import markdown_table
from inference.target.hardware import device_facts
from scripts.evidence.common import (
    Facts,
    family_rate,
    family_recipe,
    read_json,
    settings_of,
    write_report,
)
from scripts.evidence.foreign.speculators_worker import Channel, peak_bytes
from scripts.evidence.sides import VERSION, Setting, Side, fresh, their_sizes
from scripts.evidence.small_targets import Bench, Place, earlier, put_rows, require_same
from scripts.stages.train import job_of
from scripts.tools.common import PROMPTS, REPORTS, ROOT, TARGET, VALIDATION, command
from train import setup
from train.distributed import join_world
from train.loop import Trainer
from train.memory import keep_freed_memory
from train.stopping import StopRequest

MODULE = "scripts.evidence.speculators"
TOKENS = 1024
"""Tokens of a step: one row on both sides."""
ANCHORS = 128
"""Blocks of a step from which a block drafter learns."""
WARM_UP, ROUNDS, STEPS = 1, 4, 8
"""Rounds that are not counted, rounds that are, and steps of each side in a round."""
ONLINE, STORED, THEIRS = "ours, online", "ours, from a store", "speculators, from a store"
ROW = [f"train.sequence_length={TOKENS}", "train.global_batch=1", "train.micro_batch=1"]
OURS: dict[str, list[str]] = {
    # the library's side neither trains on prompts nor has the feature loss
    "eagle3": ["train.context_weight=0", "head.feature_weight=0"],
    "dspark": [f"head.num_anchors={ANCHORS}"],
    "dflash": [f"head.num_anchors={ANCHORS}"],
    "peagle": ["head.num_layers=4", "head.depths=8"],
}
"""Kind -> overrides of its recipe in experiment=families."""
FORMATS = {"float32": "fp32", "bfloat16": "bf16"}
"""dtype of the library's states -> features.format."""
NORMS = "--no-norm-before-residual --no-norm-before-fc --fc-norm --norm-output".split()
"""The library's EAGLE-3 with a norm per tap, as ours."""


def recipe(kind: str) -> list[str]:
    """The overrides of our side."""
    return [*family_recipe(kind), f"optim.lr={family_rate(kind):g}", *ROW, *OURS[kind]]


def their_flags(setting: Setting, kind: str) -> list[str]:
    """The flags of the library's side: sizes, optimiser and rate are those of ours."""
    found = settings_of("train", "experiment=[families]", *recipe(kind))
    anchors = TOKENS if kind == "peagle" else ANCHORS
    words = their_sizes(found.head, setting.model.info, anchors)
    if kind == "eagle3":
        words += [*NORMS, "--ttt-steps", str(found.head.config.ttt_steps)]
    optim = found.optim
    words += ["--optimizer", optim.kind, "--lr", str(optim.lr), "--muon-lr", str(optim.lr)]
    words += ["--muon-momentum", str(optim.momentum)]
    words += ["--weight-decay", str(optim.weight_decay)]
    return [*words, "--muon-weight-decay", str(optim.weight_decay)]


def our_side(setting: Setting, kind: str, name: str, steps: int, store: Sequence[str] = ()) -> Side:
    """Our side of a training of `steps` steps. store: the overrides that read one; none: the target
    runs in the training."""
    out = fresh(setting.work / f"ours-{name}")
    overrides = ["experiment=[families]", *recipe(kind), *store]
    overrides += [f"train.max_steps={steps}", "train.eval_every=0", "train.parity=false"]
    overrides += ["train.seed=0", "train.save_every=0", "target=local"]
    overrides += [f"target.path={setting.target}", "target.dtype=float32", "target.device=cpu"]
    job = {"overrides": overrides, "answers": str(setting.answers), "out": str(out)}
    write_json(out / "job.json", {**job, "threads": setting.threads})
    command = [sys.executable, "-m", MODULE, "--side", str(out / "job.json")]
    return Side(command, out / "log.txt")


def our_store(setting: Setting, kind: str) -> list[str]:
    """The overrides with which our side reads a store, which is made now if it is missing; raises
    `UserError` if the disk has no room for it."""
    place = Place(setting.target, setting.answers, VALIDATION, PROMPTS)
    bench = Bench(place, setting.work, setting.threads, 1, [kind])
    words = ["experiment=[families]", *recipe(kind), f"features.format={FORMATS[setting.dtype]}"]
    found = bench.features(settings_of("train", *words), setting.answers)
    if not found:
        raise UserError(
            f"the disk of '{setting.work}' has no room for our store. Give --work on another disk."
        )
    return found


def timing(
    sides: Mapping[str, Side], warm: int = WARM_UP, rounds: int = ROUNDS, steps: int = STEPS
) -> dict[str, Facts]:
    """Label -> trained weights, tokens, CPU seconds and peak memory of a side. The sides take their
    steps in turns; `warm` rounds are not counted."""
    rows: dict[str, Facts] = {
        label: {
            "trained_weights": side.about["trained_weights"],
            "settings": side.about.get("settings", {}),
            "steps": 0,
            "tokens": 0,
            "cpu_seconds": 0.0,
        }
        for label, side in sides.items()
    }
    for turn in range(warm + rounds):
        for label, side in sides.items():
            found, row = side.ask(do="steps", count=steps), rows[label]
            row["peak_bytes"] = found["peak_bytes"]
            if turn >= warm:
                row["steps"] += steps
                row["tokens"] += found["tokens"]
                row["cpu_seconds"] += found["seconds"]
    for side in sides.values():
        side.end()
    for row in rows.values():
        row["tokens_per_cpu_second"] = row["tokens"] / row["cpu_seconds"]
    return rows


def summary(rows: Mapping[str, Facts], made: Facts) -> Facts:
    """The row of a kind. made: tokens and CPU seconds of making the library's states; ratios are
    ours over theirs."""
    speed = {label: row["tokens_per_cpu_second"] for label, row in rows.items()}
    making = made["tokens"] / made["seconds"]
    whole = 1 / (1 / speed[THEIRS] + 1 / making)
    return {
        "sides": rows,
        "their_states_tokens_per_cpu_second": making,
        "speed_ratio": {
            STORED: speed[STORED] / speed[THEIRS],
            ONLINE: speed[ONLINE] / speed[THEIRS],
            f"{ONLINE}, theirs with the making of its states": speed[ONLINE] / whole,
        },
        "memory_ratio": {
            label: rows[label]["peak_bytes"] / rows[THEIRS]["peak_bytes"]
            for label in (STORED, ONLINE)
        },
    }


def compare(given: argparse.Namespace) -> None:
    """Compare, and write the report after every kind."""
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
    setting = Setting(given.python, answers, target, work, given.threads, TOKENS)
    shared: Facts = {"speculators": VERSION, "tokens_per_step": TOKENS, "anchors": ANCHORS}
    shared |= {"threads": given.threads, "dtype": setting.dtype, "steps": ROUNDS * STEPS}
    shared |= {"target": setting.model.info.revision, "tokens": setting.write_rows()}
    content = earlier(given.out)
    require_same(given.out, content, shared)
    device = device_facts(torch.device("cpu"))
    for kind in given.kinds:
        count = (WARM_UP + ROUNDS) * STEPS
        store = our_store(setting, kind)
        sides = {
            ONLINE: our_side(setting, kind, f"{kind}-online", count),
            STORED: our_side(setting, kind, f"{kind}-store", count, store),
            # so many passes that its schedule does not end before the last step
            THEIRS: setting.theirs(kind, kind, TOKENS, their_flags(setting, kind), epochs=100),
        }
        found = summary(timing(sides), setting.making(kind))
        put_rows(content, [{"kind": kind, "overrides": recipe(kind), **found}], ("kind",))
        content["settings"] = {**process_facts(), "device": device, **shared}
        content["command"] = given.command
        write_report(given.out, content, markdown(content))
    print("\n".join(markdown(content)))


def follow_commands(job: Facts, channel: Channel) -> None:
    """Our side: `headstart train` with the job's overrides. Its trainer takes its steps on command,
    with the protocol of foreign/speculators_worker.py."""
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
        """Takes as many steps as are requested, until there are no more commands."""

        def run(self) -> str:
            """Obey the commands of `channel`, and return why there are no more steps. A turn is
            answered with its CPU seconds, tokens and peak bytes."""
            stream = self.loader.iterate(0, 1_000_000)
            with StopRequest() as request:
                for command in channel.commands():
                    if command["do"] == "save":
                        made.write_checkpoint(self.engine.weights(), Path(command["to"]))
                        channel.say(saved=command["to"])
                        continue
                    begun, before = time.process_time(), self.progress.tokens
                    for _ in range(command["count"]):
                        self.step(*next(stream), request)
                    seconds, tokens = time.process_time() - begun, self.progress.tokens - before
                    channel.say(seconds=seconds, tokens=tokens, peak_bytes=peak_bytes())
            return "there are no more commands"

    with patch.object(setup, "Trainer", Commanded):
        made.run(None)


def markdown(content: Facts) -> list[str]:
    """The lines of speculators.md."""
    settings = content["settings"]
    lines = [
        [
            row["kind"],
            label,
            f"{side['trained_weights'] / 1e6:.2f} M",
            f"{side['cpu_seconds'] / side['steps']:.2f}",
            f"{side['tokens_per_cpu_second']:,.0f}",
            f"{row['speed_ratio'][label]:.2f}" if label in row["speed_ratio"] else "1",
            f"{side['peak_bytes'] / 1e9:.2f}",
        ]
        for row in content["rows"]
        for label, side in row["sides"].items()
    ]
    making = [
        [row["kind"], f"{row['their_states_tokens_per_cpu_second']:,.0f}"]
        for row in content["rows"]
    ]
    header = ["kind", "side", "trained weights", "CPU s a step", "tokens per CPU s"]
    return [
        "# The cost of a training step: Headstart and speculators",
        "",
        f"speculators {settings['speculators']}, the same target and documents, "
        f"{settings['threads']} thread(s), {settings['dtype']}, steps of one row of "
        f"{settings['tokens_per_step']:,} tokens; equal layers, blocks or depths, unrolled steps, "
        f"anchors ({settings['anchors']} blocks a step; P-EAGLE: all) and optimiser (Muon). "
        f"{settings['steps']} steps of each side, in turns, after {STEPS} that warm up. Times are "
        "CPU seconds of the process; memory is its peak. Steps of ours online include the "
        f"target's passes. Made by `{content['command']}`; all figures: speculators.json.",
        "",
        *markdown_table([*header, "of speculators", "peak memory, GB"], lines),
        "",
        "Making the states that the library reads, once, with plain transformers:",
        "",
        *markdown_table(["kind", "tokens per CPU s"], making),
        "",
    ]


main = command(
    compare,
    python={"help": f"a python that has speculators {VERSION}"},
    answers={"type": Path, "help": "folder of `headstart generate`"},
    target=TARGET,
    kinds={"nargs": "+", "choices": sorted(OURS), "default": ["eagle3", "dspark"]},
    threads=1,
    work=ROOT / "outputs" / "speculators",
    out=(REPORTS / "speculators", "without its ending"),
    side={"type": Path, "help": argparse.SUPPRESS},
)

if __name__ == "__main__":
    sys.exit(main())
