"""Faults in `headstart train`."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from tests.chaos.ground import (
    CONTINUED,
    REFUSED,
    REPOSITORY,
    RETRIED,
    SAVED,
    Damage,
    Ground,
    Outcome,
    fault,
    flip_bit,
    grow_disk,
    rank_of,
    small_disk,
    trained_steps,
    truncate,
)

TARGET = REPOSITORY / "assets" / "tiny-target"


def out(ground: Ground, name: str) -> Path:
    """A training's folder."""
    return ground.folder / "outputs" / name / "train" / "medusa"


def saved(folder: Path, step: int) -> bool:
    """Whether the state of a step is complete."""
    return (folder / "checkpoints" / f"step_{step:08d}").is_dir()


@fault("kill -9", "train, between steps")
def train_killed(ground: Ground) -> Outcome:
    """The newest state is continued."""
    command, folder = ground.train("run.name=train_killed"), out(ground, "train_killed")
    ground.strike(command, lambda: saved(folder, 4) and len(trained_steps(folder)) >= 5)
    ground.must(ground.run(command))
    return ground.compare_training(folder, CONTINUED)


@fault("kill -9", "train, while a state is written")
def train_killed_while_saving(ground: Ground) -> Outcome:
    """The half-written state is removed; the one before it is continued."""
    command, folder = ground.train("run.name=saving"), out(ground, "saving")
    partial = folder / "checkpoints"
    ground.strike(command, lambda: any(partial.glob("step_00000006*.partial/*")))
    ground.must(ground.run(command))
    return ground.compare_training(folder, CONTINUED)


@fault("kill -9", "train, while the best weights are written")
def train_killed_while_keeping_best(ground: Ground) -> Outcome:
    """Best weights are replaced whole or not at all."""
    command, folder = ground.train("run.name=best"), out(ground, "best")
    ground.strike(command, lambda: any(folder.glob("best.*.partial")))
    ground.must(ground.run(command))
    return ground.compare_training(folder, CONTINUED)


@fault("SIGTERM", "train")
def train_terminated(ground: Ground) -> Outcome:
    """See `asked_to_stop`."""
    return asked_to_stop(ground, signal.SIGTERM)


@fault("SIGUSR1 (SLURM's pre-emption)", "train")
def train_preempted(ground: Ground) -> Outcome:
    """See `asked_to_stop`."""
    return asked_to_stop(ground, signal.SIGUSR1)


def asked_to_stop(ground: Ground, number: signal.Signals) -> Outcome:
    """The state is saved and the exit status is 0; the same command goes on."""
    name = number.name.lower()
    command, folder = ground.train(f"run.name={name}", "train.save_every=0"), out(ground, name)
    ended = ground.strike(
        command,
        lambda: (folder / "log.jsonl").is_file() and len(trained_steps(folder)) >= 3,
        number,
    )
    ground.must(ended)
    ground.must(ground.run(command))
    return ground.compare_training(folder, SAVED, ended.words.strip().splitlines()[-1])


@fault("kill -9 of one rank of two", "train under torchrun, which starts it again")
def train_rank_killed(ground: Ground) -> Outcome:
    """torchrun begins again by itself; compared with two processes left in peace."""
    calm = ground.train("run.name=calm2")
    ground.must(ground.run(calm, processes=2))
    command, folder = ground.train("run.name=train_ranks"), out(ground, "train_ranks")
    ended = ground.strike(
        command,
        lambda: saved(folder, 4),
        victim=lambda pid: rank_of(pid, 1),
        processes=2,
        launch=["--max-restarts=1"],
    )
    ground.must(ended)
    return ground.compare_training(folder, RETRIED, calm=out(ground, "calm2"))


@fault("full disk", "train, while a state is written")
def train_full_disk(ground: Ground) -> Outcome:
    """One message, earlier states stay; with more room the same command continues."""
    with small_disk(ground.folder / "small", 1024) as disk:
        command = ground.train("run.name=full", f"run.root={disk}")
        ended = ground.must(ground.run(command), 2)
        grow_disk(disk, 200_000)
        ground.must(ground.run(command))
        return ground.compare_training(disk / "full/train/medusa", CONTINUED, ended.complaint)


@fault("truncated", "the newest state")
def state_truncated(ground: Ground) -> Outcome:
    """Found by its size."""
    return damaged_state(ground, "state_truncated", truncate)


@fault("flipped bit", "the newest state")
def state_flipped(ground: Ground) -> Outcome:
    """Found by its hash."""
    return damaged_state(ground, "state_flipped", flip_bit)


def damaged_state(ground: Ground, name: str, how: Damage) -> Outcome:
    """The state before it is used instead."""
    command, folder = ground.train(f"run.name={name}"), out(ground, name)
    ground.strike(command, lambda: saved(folder, 6))
    newest = max((folder / "checkpoints").glob("step_*"))
    how(max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size))
    ended = ground.must(ground.run(command))
    words = next(
        (line for line in ended.words.splitlines() if "Continuing from the state before" in line),
        "",
    )
    return ground.compare_training(folder, CONTINUED, words)


@fault("weights that do not load", "target")
def target_broken(ground: Ground) -> Outcome:
    """Refused in one message."""
    broken = ground.folder / "broken_target"
    shutil.copytree(TARGET, broken)
    truncate(next(broken.glob("*.safetensors")))
    command = ground.train("run.name=broken", f"target.path={broken}")
    ended = ground.must(ground.run(command), 2)
    return Outcome(REFUSED, words=ended.complaint)


NAN_AT_STEP_6 = """
import sys
from heads import medusa
from scripts.cli import main
plain, calls = medusa.Drafter.loss, iter(range(1, 10_000))
def loss(self, batch):
    found = plain(self, batch)
    if next(calls) == {call}:
        found.loss_sum = found.loss_sum * float("nan")
    return found
medusa.Drafter.loss = loss
sys.exit(main(sys.argv[1:]))
"""


@fault("NaN in a batch", "train")
def nan_in_a_batch(ground: Ground) -> Outcome:
    """The one fault that no one can cause from outside: the loss is spoilt once, as a faulty memory
    cell would."""
    command, folder = ground.train("run.name=not_a_number"), out(ground, "not_a_number")
    ended = ground.run(command, wrapper=["-c", NAN_AT_STEP_6.format(call=11)])
    if ended.status == 0:
        return ground.compare_training(folder, RETRIED, ended.words.strip().splitlines()[-1])
    ground.must(ended, 2)
    ground.must(ground.run(command))
    return ground.compare_training(folder, REFUSED, ended.complaint)
