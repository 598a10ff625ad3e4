"""One process of a divided target: compares it with the whole one, which it also holds.

torchrun ... -m tests.train.sharding_worker DTYPE TARGET ...
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.train.micro_run import settings
from train.config import TrainingJob
from train.distributed import World, join_world
from train.engines.base import EngineConfig
from train.target.sharding import DividedLayers, load_target

DTYPE = sys.argv[1]
REQUESTS = [Request(i, (3, 4 + i, 5), i, 8) for i in range(2)]


def target_of(folder: str) -> TargetConfig:
    return TargetConfig(folder, device="cpu", dtype=DTYPE)


def job_of(folder: str, sharding: str) -> TrainingJob:
    """A training of the target in `folder`, of which only the target matters."""
    given = {**settings(Path(folder)), "target": target_of(folder)}
    return (
        TrainingJob(**{**given, "out": Path(folder)})
        if sharding == "none"
        else replace(job_of(folder, "none"), engine=EngineConfig(target_sharding=sharding))
    )


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes behind the model's parameters right now."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


def features(target: TargetModel, seed: int) -> list[Tensor]:
    """Taps and last hidden states of two rows of two documents each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.info.vocab_size, (2, 24), generator=generator)
    segments = torch.ones_like(tokens, dtype=torch.int32)
    segments[:, 10:] = 2
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    layers = target.info.num_layers
    found = target.features(
        tokens, positions, segments, FeatureSpec(taps=(0, 1, layers), last_hidden=True)
    )
    return [part for part in found if part is not None]


def answers(target: TargetModel) -> list[tuple[int, ...]]:
    """What it says to `REQUESTS`."""
    done = Engine(target, None, DecodeConfig(shape="none", batch_size=2)).run(REQUESTS)
    return [tuple(item.tokens) for item in sorted(done, key=lambda item: item.request.index)]


def compare(folder: str, world: World) -> None:
    """Features, weights, decoding and memory of a divided target against the whole one."""
    whole = TargetModel.load(target_of(folder))
    target, access = load_target(job_of(folder, "zero3"), world)
    assert isinstance(access, DividedLayers)
    assert target.info == whole.info
    assert target.eos_token_ids == whole.eos_token_ids
    for seed in (world.rank, world.rank + 10):  # every process has rows of its own
        for found, expected in zip(features(target, seed), features(whole, seed), strict=True):
            assert torch.equal(found, expected), "other features"
    assert set(target.weights.state) == set(whole.weights.state)
    for name, value in whole.weights.state.items():
        assert torch.equal(target.weights.state[name], value), name
    buffers = dict(whole.model.named_buffers())
    for name, value in target.model.named_buffers():
        assert value.dtype == buffers[name].dtype and torch.equal(value, buffers[name]), name
    with access.main_alone():
        if world.is_main:
            assert answers(target) == answers(whole)
            name = next(name for name in whole.weights.state if ".layers.1." in name)
            assert torch.equal(target.weights.state[name], whole.weights.state[name])
    with access.main_alone():
        pass
    assert torch.equal(features(target, 5)[0], features(whole, 5)[0]), (
        "other features after the main process ran alone"
    )
    outside = held_bytes(target.model)
    layers = sum(p.numel() * p.element_size() for p in whole.model.parameters()) - outside
    pieces = sum(group.piece.nbytes for unit in access.units for group in unit)
    assert layers / world.size <= pieces <= layers / world.size + 64 * len(access.units)
    print(f"{Path(folder).name}: same; layers {layers} bytes, held {pieces}")


def stop_early(folder: str, world: World) -> None:
    """A pass that ends in the middle leaves a layer on its way; the next pass begins all the
    same."""
    target, access = load_target(job_of(folder, "zero3"), world)
    expected = features(target, 1)

    class EnoughError(Exception):
        pass

    def stop(*_: object) -> None:
        raise EnoughError

    handle = target.taps.layers[0].register_forward_hook(stop)
    try:
        features(target, 1)
    except EnoughError:
        pass
    else:
        raise AssertionError("not stopped")
    handle.remove()
    target.taps.want(())
    assert all(torch.equal(a, b) for a, b in zip(features(target, 1), expected, strict=True))
    with access.main_alone():
        pass
    world.wait()


def main(_: str, *folders: str) -> None:
    """Every target once."""
    torch.set_num_threads(1)
    world = join_world("cpu")
    for folder in folders:
        compare(folder, world)
        gc.collect()
    stop_early(folders[0], world)


if __name__ == "__main__":
    main(*sys.argv[1:])
