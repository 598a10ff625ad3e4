"""A loop of rounds on a micro target, small enough for tests: seconds for three rounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.config.stages import STAGES
from tests.inference.tokenizers import save_micro_target


def micro_loop(folder: Path) -> list[str]:
    """Overrides of `headstart loop` for a random target and a few prompts below `folder`, in three
    rounds."""
    target = save_micro_target(folder / "target")
    counts = {"train": 24, "valid": 6, "bench": 5}
    for name, count in counts.items():
        rows = [
            {"id": f"{name}{n}", "domain": "code", "prompt": f"Write {name} {n} and {n * n % 17}."}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"target.path={target}",
        "target.device=cpu",
        "run.threads=1",
        "data=jsonl",
        f"data.path={folder / 'train.jsonl'}",
        "data.id_column=id",
        "head=medusa",
        "engine=torch",
        "optim.lr=0.02",
        "train.max_steps=6",
        "train.global_batch=2",
        "train.micro_batch=1",
        "train.sequence_length=96",
        "train.save_every=3",
        "train.eval_every=6",
        "train.eval_prompts=3",
        "train.eval_tokens=8",
        "train.parity=false",
        "train.tracker.wandb=disabled",
        f"train.prompts=[{folder / 'valid.jsonl'}]",
        "decode.depth=2",
        "decode.max_new_tokens=16",
        "sampling.temperature=0",
        "sampling.max_new_tokens=24",
        "sampling.batch_size=1",
        "generate.flush_rows=3",
        "bench=jsonl",
        f"bench.prompts={folder / 'bench.jsonl'}",
        "bench.warmup_prompts=1",
        "bench.repeats=1",
        "bench.retries=0",
        "measure.kinds=[]",
        "loop.rounds=3",
        "loop.round.checked_answers=3",
        "loop.round.patience=0",
        "feedback.token_weights=true",
    ]


def read_by(stage: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of groups that a stage reads."""
    groups = STAGES[stage].groups
    return [item for item in overrides if item.split("=")[0].split(".")[0] in groups]
