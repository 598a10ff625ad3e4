"""Continues toy trainings in as many processes as it was started with, under other engines than
those that saved them.

torchrun ... -m tests.train.reshard_worker FOLDER FIRST LAST CONFIG ...   (configurations as in
tests.train.toy)

The state of a training lies in FOLDER/<its place among the configurations>. Before going on, it is
checked that what was loaded is what would be saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.train.toy import Toy, gather_everything, optimiser, parse, train_steps
from train.distributed import World, join_world
from train.engines.make import make_engine
from train.engines.shards import FilePart
from train.state import StateStore


def assemble(folder: Path) -> dict[str, Tensor]:
    """AdamW's whole state of a saved one, put together the slow way: every run to its place."""
    whole: dict[str, Tensor] = {}
    for path in sorted(folder.glob("optimizer-*.safetensors")):
        part = FilePart(path)
        for weight, (start, shape) in part.runs.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if not part.has(f"{weight}.{moment}"):
                    continue  # a matrix of Muon's
                values = part.read(f"{weight}.{moment}")
                name = f"{weight}.{moment}"
                whole.setdefault(name, torch.full(shape, float("nan")).flatten())[
                    start : start + len(values)
                ] = values
            whole[f"{weight}.step"] = part.read(f"{weight}.step")
    return whole


def carry_on(folder: Path, world: World, loaded: str, first: int, last: int) -> None:
    """From the newest state in `folder`, or from the start, to step `last`; saved there."""
    store = StateStore(folder, 5, world)
    snapshot = store.newest()
    toy = Toy()
    if snapshot is not None:
        toy.load_state_dict(snapshot.weights())
    engine = make_engine(toy, parse(loaded), optimiser(loaded), world)
    if snapshot is not None:
        assert snapshot.step == first
        snapshot.restore(engine, world)
        again = StateStore(folder.with_name(folder.name + "-again"), 1, world).save(
            first, engine, {}, {}
        )
        if world.is_main:
            saved, found = assemble(snapshot.directory), assemble(again)
            assert saved.keys() == found.keys()
            assert all(torch.equal(value, found[name]) for name, value in saved.items()), loaded
            assert all(torch.isfinite(value).all() for value in found.values())
        world.wait()
    train_steps(engine, world, 1, first, last)
    store.save(last, engine, {}, {})
    engine.close()


def main(folder: str, first: str, last: str, *configs: str) -> None:
    """Every configuration once."""
    gather_everything()
    torch.set_num_threads(1)
    world = join_world("cpu")
    for number, config in enumerate(configs):
        carry_on(Path(folder) / str(number), world, config, int(first), int(last))
    world.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
