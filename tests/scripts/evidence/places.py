"""A small target's place on disk for the reports about recipes: a random target, its answers to a
few prompts in its chat template, prompts for validation and measuring."""

from __future__ import annotations

from pathlib import Path

from scripts.evidence.common import run_on_target
from scripts.evidence.small_targets import Place
from tests.inference.tokenizers import save_micro_target
from tests.scripts.loops import micro_loop


def micro_place(folder: Path) -> Place:
    """A place below `folder`, with 24 answers."""
    micro_loop(folder)  # writes the prompts
    target = save_micro_target(folder / "target", positions=1024)
    words = ["data=jsonl", f"data.path={folder / 'train.jsonl'}", "data.id_column=id"]
    words += ["data.reserve.validation=0", "data.reserve.bench=0", "data.decontaminate=none"]
    words += ["sampling.max_new_tokens=24", "sampling.batch_size=8", "run.threads=1"]
    run_on_target("generate", target, folder / "run", *words)
    return Place(
        target, folder / "run" / "generate", folder / "valid.jsonl", folder / "bench.jsonl"
    )
