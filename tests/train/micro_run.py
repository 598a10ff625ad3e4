"""A whole training in miniature for tests: a micro target on disk, its answers as `generate` leaves
them, prompts.

Run as a script it trains once, for tests that need a process of their own:
python -m tests.train.micro_run FOLDER OUT key=value ...  (keys as in `settings`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.manifest import file_entry, write_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import save_micro_target
from train.config import TrainConfig
from train.data.answers import SHARD_SCHEMA
from train.engines.base import EngineConfig
from train.features.config import FeaturesConfig
from train.joint.config import JointConfig
from train.loop import Trainer
from train.optim import OptimConfig, ScheduleConfig
from train.run import train
from train.tracking.energy import EnergyMeter
from train.tracking.tracker import TrackerConfig

ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 60, 5, 40


def prepare(folder: Path, **target: Any) -> Path:
    """Write target/, answers/ and prompts.jsonl into `folder`. The answers are a random target's
    own, greedy ones. target: what differs in it (`save_micro_target`)."""
    save_micro_target(folder / "target", **target)
    target = TargetModel.load(TargetConfig(str(folder / "target")))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(
        10, target.info.vocab_size, (ANSWERS + 6, PROMPT_TOKENS), generator=generator
    ).tolist()
    requests = [
        Request(i, tuple(prompt), i, ANSWER_TOKENS) for i, prompt in enumerate(drawn[:ANSWERS])
    ]
    rows = []
    for done in Engine(target, None, DecodeConfig(shape="none", batch_size=16)).run(requests):
        tokens = [*done.request.tokens, *done.tokens]
        rows.append(
            {
                "id": str(done.request.index),
                "index": done.request.index,
                "domain": "d",
                "tokens": tokens,
                "spans": [[PROMPT_TOKENS, len(tokens)]],
                "finish": done.finish,
                "seed": done.request.seed,
            }
        )
    rows.sort(key=lambda row: row["index"])
    answers = folder / "answers"
    answers.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=SHARD_SCHEMA), answers / "shard.parquet")
    shards = [file_entry(answers, "shard.parquet", rows=len(rows))]
    write_manifest(
        answers, "generate", {"target": target.info.to_dict(), "counts": {}, "shards": shards}
    )
    lines = [
        json.dumps({"id": f"p{i}", "domain": "d", "tokens": prompt})
        for i, prompt in enumerate(drawn[ANSWERS:])
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of `train` for a short run on `folder`.

    Changes: fields of TrainConfig, or kind, head, name, zero_stage, precision, dtype (of the
    target), lr, joint, features, engine (further fields of it).
    """
    kind = changes.pop("kind", "medusa")
    head = get_kind(kind).config_class(
        **changes.pop("head", {"num_heads": 3} if kind == "medusa" else {})
    )
    engine = EngineConfig(
        name=changes.pop("name", "torch"),
        zero_stage=changes.pop("zero_stage", 1),
        precision=changes.pop("precision", "float32"),
        **changes.pop("engine", {}),
    )
    plain = {
        "max_steps": 6,
        "global_batch": 4,
        "micro_batch": 2,
        "sequence_length": 64,
        "eval_every": 3,
        "save_every": 2,
        "prompts": (str(folder / "prompts.jsonl"),),
        "eval_prompts": 6,
        "eval_tokens": 12,
        "tracker": TrackerConfig(wandb="disabled"),
    }
    optim, joint = OptimConfig(lr=changes.pop("lr", 1e-2)), JointConfig(**changes.pop("joint", {}))
    features = FeaturesConfig(**changes.pop("features", {}))
    return {
        "kind": kind,
        "head": head,
        "target": TargetConfig(
            str(folder / "target"), device="cpu", dtype=changes.pop("dtype", "float32")
        ),
        "data": folder / "answers",
        "config": TrainConfig(**{**plain, **changes}),
        "features": features,
        "engine": engine,
        "optim": optim,
        "schedule": ScheduleConfig(),
        "decode": DecodeConfig(depth=3),
        "joint": joint,
    }


def watch_steps(slow: float, leave_at: int) -> None:
    """Let every step take `slow` seconds longer; send SIGTERM to the last process, and to it alone,
    in step `leave_at`."""
    plain = Trainer.step

    def step(self: Trainer, index: int, *rest: Any) -> bool:
        time.sleep(slow)
        if index + 1 == leave_at and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, index, *rest)

    Trainer.step = step  # type: ignore[method-assign]


def tell_energy() -> None:
    """Let the GPU that NVML would tell of use 100 ** rank joules between two readings."""
    rank = int(os.environ.get("RANK", "0"))
    EnergyMeter.available = property(lambda self: True)  # type: ignore[assignment,method-assign]
    EnergyMeter.take = lambda self: 100.0**rank  # type: ignore[method-assign]


def leave_waiting() -> Callable[[], None]:
    """Send this process SIGTERM as soon as it waits for features, or asks for them again; returns
    what undoes that."""

    class Struck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(("waiting for features", "feature server")):
                os.kill(os.getpid(), signal.SIGTERM)

    handler, loggers = (
        Struck(),
        [
            logging.getLogger(name)
            for name in ("train.features.store.reader", "train.features.servers")
        ],
    )
    for each in loggers:
        each.addHandler(handler)

    def undo() -> None:
        for each in loggers:
            each.removeHandler(handler)

    return undo


def main(arguments: list[str]) -> None:
    """Train once as the command line says; values are JSON."""
    folder, out, *pairs = arguments
    changes = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    torch.set_num_threads(1)
    if changes.pop("energy", False):
        tell_energy()
    if changes.pop("leave_waiting", False):
        leave_waiting()
    watch_steps(changes.pop("slow", 0.0), changes.pop("leave_at", 0))
    train(out=Path(out), **settings(Path(folder), **changes))


if __name__ == "__main__":
    main(sys.argv[1:])
