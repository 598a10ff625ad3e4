"""A toy drafter and toy rows for engine tests, and the worker that trains it under every engine in
several processes.

The toy reads weights in every way a kind may: through modules, directly, twice in one pass, frozen,
and as a buffer.

Worker: torchrun ... -m tests.train.toy OUT MICRO [muon-]NAME:STAGE:PRECISION[:OFFLOAD] ...
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.drafter import TrainableDrafter
from heads.nn.matrices import set_matrix
from train.distributed import World, join_world
from train.engines.base import EngineConfig, TrainEngine
from train.engines.make import make_engine
from train.optim import OptimConfig

VOCAB, HIDDEN, ROWS, LENGTH = 50, 24, 4, 12
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip=0.5)


class Toy(TrainableDrafter):
    """Predicts the token it reads, over a detour."""

    kind = "toy"
    broken = False
    """Whether gradients are no numbers, though the loss is one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.direct = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN) * 0.2)
        set_matrix(self.direct, True)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.out = nn.Linear(HIDDEN, VOCAB)
        set_matrix(self.out.weight, False)
        self.shift = nn.Parameter(torch.zeros(1))  # an odd number of weights in all
        self.frozen = nn.Parameter(torch.full((HIDDEN,), 0.5), requires_grad=False)
        self.register_buffer("ids", torch.arange(5))

    def loss(self, batch: TrainBatch) -> LossOutput:
        states = self.embedding(batch.tokens) + self.shift
        for _ in range(2):
            states = states + torch.tanh(self.linear(states)) * self.scale
        states = states @ self.direct[0] + (states @ self.direct[1]) * self.frozen
        logits = self.out(states).float()
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.tokens.flatten(), reduction="none"
        )
        mask = batch.loss_mask.flatten()
        correct = (logits.argmax(-1).flatten() == batch.tokens.flatten()) & mask
        total = (losses * mask).sum()
        if self.broken:
            total = total + torch.sqrt((self.shift * 0).sum())
        return LossOutput(total, {"accuracy": (correct.sum(), mask.sum())})


def rows(step: int, first: int, count: int) -> TrainBatch:
    """Rows `first` ... of a step, each with another number of supervised tokens."""
    made = []
    for row in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + row)
        tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        made.append((tokens, torch.rand(LENGTH, generator=generator) < 0.2 * (row + 1)))
    tokens, masks = torch.stack([t for t, _ in made]), torch.stack([m for _, m in made])
    positions = torch.arange(LENGTH).expand(count, -1)
    return TrainBatch(tokens, positions, torch.ones_like(tokens, dtype=torch.int32), masks)


def supervised(step: int) -> int:
    """Supervised tokens of all rows of a step."""
    return int(rows(step, 0, ROWS).loss_mask.sum())


def train_steps(
    engine: TrainEngine, world: World, micro: int, first: int, last: int
) -> list[float]:
    """Train steps first ... last - 1 with micro-batches of `micro` rows; returns the gradient
    norms."""
    norms = []
    for step in range(first, last):
        starts = range(world.rank * micro, ROWS, world.size * micro)
        for start in starts:
            engine.forward_backward(rows(step, start, micro), supervised(step), start == starts[-1])
        norms.append(engine.step(1e-2 / (step + 1)))
    return norms


def parse(text: str) -> EngineConfig:
    """[muon-]NAME:STAGE:PRECISION[:OFFLOAD]."""
    name, stage, precision, *offload = text.removeprefix("muon-").split(":")
    return EngineConfig(name, int(stage), precision, offload=offload[0] if offload else "none")


def optimiser(text: str) -> OptimConfig:
    """OPTIM, with Muon where the configuration begins with `muon-`."""
    return replace(OPTIM, kind="muon") if text.startswith("muon-") else OPTIM


def gather_everything() -> None:
    """Let ZeRO-3 divide even the smallest weight, which it normally leaves whole."""
    import train.engines.deepspeed as module

    plain = module.make_settings

    def settings(*arguments: object) -> dict[str, object]:
        made = plain(*arguments)  # type: ignore[arg-type]
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    module.make_settings = settings


def main(out: str, micro: str, *configs: str) -> None:
    """Train a fresh toy under each configuration, halfway continued in a second engine; the main
    process writes the weights."""
    gather_everything()
    torch.set_num_threads(1)
    world = join_world("cpu")
    for text in configs:
        toy = Toy()
        engine = make_engine(toy, parse(text), optimiser(text), world)
        norms = train_steps(engine, world, int(micro), 0, 3)
        weights, state = engine.weights(), engine.optimizer_state()
        norms_on = train_steps(engine, world, int(micro), 3, 6)
        final = engine.weights()
        toy.broken = True
        (norm,) = train_steps(engine, world, int(micro), 6, 7)
        assert not math.isfinite(norm), f"{text}: a norm of {norm} from gradients that are none"
        same = (torch.equal(value, final[name]) for name, value in engine.weights().items())
        assert all(same), f"{text}: gradients that are none have changed weights"
        engine.close()

        again = Toy()
        if world.size == 1:  # only the main process is given the weights
            again.load_state_dict(weights)
            engine = make_engine(again, parse(text), optimiser(text), world)
            engine.load_optimizer_state([state])
            assert train_steps(engine, world, int(micro), 3, 6) == norms_on, (
                f"{text}: other norms after resuming"
            )
            resumed = engine.weights()
            assert all(torch.equal(resumed[name], value) for name, value in final.items()), (
                f"{text}: other weights"
            )
            engine.close()
        if world.is_main:
            content: dict[str, Tensor] = {**final, "norms": torch.tensor([*norms, *norms_on])}
            save_file(content, str(Path(out) / f"{text.replace(':', '-')}.safetensors"))
    world.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
