"""Makes the held-out target: prepared folder, training, export, prompts. Every step is skipped where its result stands already."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from heads.api.errors import UserError
from scripts.held_out_target import corpus
from scripts.held_out_target import tokenizer as tokens
from scripts.held_out_target.corpus import Operator, Row
from scripts.held_out_target.model import HeldOutShape, TinyQwen3
from scripts.tiny_target.atomic import write_bytes, write_json
from scripts.tiny_target.export import generation_config
from scripts.tiny_target.prepare import _compress
from scripts.tiny_target.progress import note
from scripts.tiny_target.settings import TrainSettings
from scripts.tiny_target.tokenizer import file_hash
from scripts.tiny_target.training import Intervals, Trainer

PER_DOCUMENT = 12
"""Most prompts that one operator gives."""
PROMPTS = {"training": 1440, "validation": 48, "measuring": 96}
"""How many prompts there are for what: drafters, choosing among their checkpoints, the report."""
WORTH_COMPILING = 100
"""Steps from which on compiling saves more time than it takes."""


class HeldOutTrainer(Trainer):
    """The embedded target's training loop with the held-out target's model."""

    architecture = TinyQwen3


def prepare(folder: Path, prompts: Mapping[str, int] = PROMPTS, seed: int = 0) -> None:
    """Write token streams, tokenizer, manifest and the prompt rows of groups A and B to `folder`."""
    if (folder / "manifest.json").is_file():
        return
    documents = corpus.operators()
    rows = {group: [row for d in documents if d.group == group for row in corpus.rows_of(d)] for group in ("train", "A", "B")}
    known = {row["answer"] for row in rows["train"]}
    rows["A"] = [row for row in rows["A"] if row["answer"] not in known]
    known |= {row["answer"] for row in rows["A"]}
    rows["B"] = [row for row in rows["B"] if row["answer"] not in known]
    trained = [d for d in documents if d.group == "train"]
    tokenizer = tokens.train_tokenizer(d.text for d in trained)
    tokens.wrap(tokenizer).save_pretrained(folder / "tokenizer")
    rng = random.Random(seed)
    rng.shuffle(trained)
    rng.shuffle(rows["train"])
    judged = rng.sample(rows["B"], min(len(rows["B"]), 1500))
    streams = {
        "raw": encode(tokenizer, [tokens.BOS + d.text for d in trained]),
        "chat": encode(tokenizer, [tokens.conversation(row["asked"], row["answer"]) for row in rows["train"]]),
        "heldout-raw": encode(tokenizer, [tokens.BOS + d.text for d in documents if d.group == "B"]),
        "heldout-chat": encode(tokenizer, [tokens.conversation(row["asked"], row["answer"]) for row in judged]),
    }
    for name, ids in streams.items():
        _compress((folder / f"{name}.bin.xz", ids.tobytes()))
    write_prompts(folder / "prompts", rows, seed, **prompts)
    write_json(folder / "manifest.json", describe(documents, rows, streams, tokenizer, folder))


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return [tokens] uint16 of the texts one after the other."""
    parts = []
    for start in range(0, len(texts), 512):
        parts += [np.array(encoded.ids, dtype="<u2") for encoded in tokenizer.encode_batch_fast(texts[start : start + 512])]
    return np.concatenate(parts)


def describe(
    documents: list[Operator], rows: dict[str, list[Row]], streams: dict[str, np.ndarray], tokenizer: Tokenizer, folder: Path
) -> dict[str, Any]:
    """Return the manifest of a prepared folder, in the form of scripts/tiny_target/prepare.py."""
    sizes = tokens.token_bytes(tokenizer)
    return {
        "format": 1,
        "documents": {group: sum(d.group == group for d in documents) for group in rows},
        "pairs": {group: len(found) for group, found in rows.items()},
        "streams": {
            name: {"files": [f"{name}.bin.xz"], "tokens": len(ids), "text_bytes": int(np.array(sizes)[ids].sum())}
            for name, ids in streams.items()
        },
        "token_bytes": sizes,
        "tokenizer_sha256": file_hash(folder / "tokenizer" / "tokenizer.json"),
    }


def choose(rows: list[Row], count: int, prefix: str, rng: random.Random) -> list[dict[str, Any]]:
    """Return `count` prompt rows, domains by turns, at most `PER_DOCUMENT` per operator; UserError where there are too few."""
    queues = {domain: [row for row in rows if row["domain"] == domain] for domain in corpus.DOMAINS}
    for queue in queues.values():
        rng.shuffle(queue)
    used: dict[str, int] = {}
    chosen: list[Row] = []
    while len(chosen) < count and any(queues.values()):
        for queue in queues.values():
            while queue and used.get(queue[-1]["source"], 0) >= PER_DOCUMENT:
                queue.pop()
            if queue and len(chosen) < count:
                row = queue.pop()
                used[row["source"]] = used.get(row["source"], 0) + 1
                chosen.append(row)
    if len(chosen) < count:
        raise UserError(f"the operators give {len(chosen)} prompts, {count} were asked for: install a torch with its headers.")
    return [
        {
            "id": f"{prefix}-{number:04d}",
            "domain": row["domain"],
            "messages": [{"role": "user", "content": row["asked"]}],
            "source": row["source"],
        }
        for number, row in enumerate(chosen)
    ]


def write_prompts(
    folder: Path, rows: dict[str, list[Row]], seed: int, training: int, validation: int, measuring: int
) -> None:
    """Write train.jsonl and validation.jsonl (group A) and `measuring`/<domain>.jsonl (group B)."""
    rng = random.Random(f"{seed}:prompts")
    mixed = choose(rows["A"], training + validation, "train", rng)
    rng.shuffle(mixed)
    files = {"train": mixed[validation:], "validation": mixed[:validation]}
    for row in choose(rows["B"], measuring, "bench", rng):
        files.setdefault(f"measuring/{row['domain']}", []).append(row)
    for name, found in files.items():
        write_bytes(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found).encode())


def train(folder: Path, state: Path, steps: int, seed: int = 0) -> None:
    """Train the target on a prepared folder for `steps` steps of 4,096 tokens; goes on where a stopped run ended."""
    record = state / "training.json"
    if record.is_file() and json.loads(record.read_text())["finished"]:
        return
    settings = TrainSettings(
        steps=steps, lr=4e-3, batch_tokens=4096, micro_tokens=4096, length=512, bf16=True, chat_share=0.8,
        final_chat_share=0.9, seed=seed,
    )  # fmt: skip
    trainer = HeldOutTrainer(
        folder, state, state, settings, HeldOutShape(), torch.device("cpu"), compiled=steps >= WORTH_COMPILING,
        intervals=Intervals(log=30.0, evaluate=240.0, save=120.0), eval_tokens=32_768, command="python -m scripts.evidence.held_out",
    )  # fmt: skip
    if not trainer.run():
        raise UserError("the target's training was stopped before its end; run the same command again to go on.")


def export(folder: Path, state: Path, out: Path) -> None:
    """Write the target's Hugging Face folder from the trained state."""
    if (out / "config.json").is_file():
        return
    write_bytes(out / "model.safetensors", (state / "model.safetensors").read_bytes())
    write_bytes(out / "training.json", (state / "training.json").read_bytes())
    write_json(out / "generation_config.json", generation_config())
    for file in sorted((folder / "tokenizer").iterdir()):
        write_bytes(out / file.name, file.read_bytes())
    write_json(out / "config.json", HeldOutShape().config())
    note(f"{out}: the held-out target")


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def make(work: Path, steps: int, prompts: Mapping[str, int] = PROMPTS) -> Path:
    """Make everything below `work`; return the target's folder (its prompts lie in `work`/data/prompts)."""
    prepare(work / "data", prompts)
    train(work / "data", work / "state", steps)
    export(work / "data", work / "state", work / "target")
    return work / "target"
