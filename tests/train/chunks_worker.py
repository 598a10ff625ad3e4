"""Trains real drafters on a row each of which another share is supervised, so that their losses run
different numbers of chunks: `... tests.train.chunks_worker OUT CONFIG RECIPE[+KEY=VALUE] ...`
(configurations as in tests.train.toy). The main process writes the weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from heads.api.batch import TrainBatch
from heads.nn import losses
from tests.heads.micro import MicroTarget, micro_target, packed_batch
from tests.heads.recipes import build
from tests.train.toy import OPTIM, gather_everything, parse
from train.distributed import join_world
from train.engines.make import make_engine

ROWS, LENGTH, STEPS = 2, 40, 3
PROMPTS = [[4, 33], [33, 4], [20, 36]]
"""Unsupervised tokens by step and row."""


def row_batch(target: MicroTarget, needs: Any, step: int, row: int) -> TrainBatch:
    """Row `row` of a step; its random numbers do not depend on the process."""
    tokens = [(7 * at + 3 * row + 5 * step) % target.info.vocab_size for at in range(LENGTH)]
    batch = packed_batch(target, needs, [[tokens]], PROMPTS[step][row])
    return replace(batch, seeds=torch.tensor([ROWS * step + row]), progress=step / STEPS)


def drafter_of(recipe: str, target: MicroTarget) -> Any:
    """A fresh drafter of RECIPE[+KEY=VALUE], where the value is True or an integer."""
    name, *changes = recipe.split("+")
    given = (change.split("=") for change in changes)
    values = {key: True if value == "True" else int(value) for key, value in given}
    return build(name, target, changes=values)


def main(out: str, config: str, *recipes: str) -> None:
    """Train every recipe for some steps."""
    gather_everything()
    torch.set_num_threads(1)
    losses.CHUNK_ELEMENTS = 1000
    world, target = join_world("cpu"), micro_target(torch.float32)
    for recipe in recipes:
        drafter = drafter_of(recipe, target)
        engine = make_engine(drafter, parse(config), OPTIM, world)
        found = {}
        for step in range(STEPS):
            supervised = sum(LENGTH - prompt for prompt in PROMPTS[step])
            own = range(world.rank, ROWS, world.size)
            for row in own:
                batch = row_batch(target, drafter.needs, step, row)
                engine.forward_backward(batch, supervised, row == own[-1])
            found[f"norm{step}"] = torch.tensor(engine.step(1e-2))
        found |= {name: value.float() for name, value in engine.weights().items()}
        engine.close()
        if world.is_main:
            save_file(found, str(Path(out) / f"{config.split(':')[0]}-{recipe}.safetensors"))
    world.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
