"""Makes changed targets: the embedded one, taught to write C++ headers (scripts/held_out_target/corpus.py), wholly or through LoRA.

Nothing of what it knew is repeated in the training, as in many fine-tunings; so its answers to the old questions change as well.
Every folder that stands already is left alone.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.manifest import write_bytes
from inference.target.chat import render_conversation
from scripts.held_out_target import corpus
from scripts.held_out_target.corpus import Row
from scripts.held_out_target.making import choose

WINDOW = 512
IGNORED = -100
MADE_FILE = "finetuning.json"
PER_OPERATOR_PROMPTS = {"training": 720, "validation": 48, "measuring": 192}


@dataclass(frozen=True)
class Recipe:
    """One fine-tuning. tokens_per_step: positions, all answers' tokens are learnt; lora_rank 0 changes all weights."""

    steps: int = 150
    tokens_per_step: int = 4096
    lr: float = 5e-4
    lora_rank: int = 0
    seed: int = 0


RECIPES = {"finetuned": Recipe(), "lora": Recipe(steps=30, lr=2e-3, lora_rank=16)}
"""Folder name -> how its target is made."""


def rows_by_group() -> dict[str, list[Row]]:
    """What can be asked about operators: "train" for the fine-tuning, A for drafters, B for measuring; no answer in two groups."""
    documents = corpus.operators()
    rows: dict[str, list[Row]] = {}
    known: set[str] = set()
    for group in ("train", "A", "B"):
        found = [row for document in documents if document.group == group for row in corpus.rows_of(document)]
        rows[group] = [row for row in found if row["answer"] not in known]
        known |= {row["answer"] for row in found}
    return rows


def write_prompts(folder: Path, rows: dict[str, list[Row]], seed: int = 0) -> None:
    """Write train.jsonl and validation.jsonl (group A) and measuring.jsonl (group B) of the new domain."""
    rng = random.Random(f"{seed}:watch")
    count = PER_OPERATOR_PROMPTS
    mixed = choose(rows["A"], count["training"] + count["validation"], "headers", rng)
    rng.shuffle(mixed)
    files = {
        "train": mixed[count["validation"] :],
        "validation": mixed[: count["validation"]],
        "measuring": choose(rows["B"], count["measuring"], "headers-bench", rng),
    }
    for name, found in files.items():
        write_bytes(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in found).encode())


def finetune(base: Path, out: Path, rows: list[Row], recipe: Recipe) -> None:
    """Write `out`: the target in `base` after a training on `rows`, with LoRA merged into its weights."""
    if (out / MADE_FILE).is_file():
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if recipe.lora_rank:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=recipe.lora_rank, lora_alpha=2 * recipe.lora_rank, target_modules="all-linear")
        model = get_peft_model(model, settings)
    windows = supervised_windows(tokenizer, rows, recipe.seed)
    losses = learn(model, windows, recipe)
    if recipe.lora_rank:
        model = model.merge_and_unload()
    partial = out.with_name(out.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    tail = sum(losses[-10:]) / len(losses[-10:])
    facts = {**recipe.__dict__, "rows": len(rows), "first_loss": losses[0], "last_loss": tail}
    write_bytes(partial / MADE_FILE, json.dumps(facts, indent=2).encode())
    os.replace(partial, out)


def supervised_windows(tokenizer: Any, rows: list[Row], seed: int) -> Tensor:
    """Conversations one after the other, cut into [windows, 2, WINDOW]: tokens, and labels that are IGNORED outside answers."""
    shuffled = random.Random(seed).sample(rows, len(rows))
    tokens: list[int] = []
    labels: list[int] = []
    for row in shuffled:
        messages = [{"role": "user", "content": row["asked"]}, {"role": "assistant", "content": row["answer"]}]
        ids, spans = render_conversation(tokenizer, messages)
        told = [IGNORED] * len(ids)
        for start, end in spans:
            told[start:end] = ids[start:end]
        tokens += ids
        labels += told
    count = len(tokens) // WINDOW
    both = torch.tensor([tokens[: count * WINDOW], labels[: count * WINDOW]])
    return both.view(2, count, WINDOW).transpose(0, 1).contiguous()


def learn(model: Any, windows: Tensor, recipe: Recipe) -> list[float]:
    """AdamW in bfloat16 autocast, the rate falling to a tenth; returns the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    per_step = recipe.tokens_per_step // WINDOW
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(recipe.seed))
    losses = []
    model.train()
    for step in range(recipe.steps):
        warmth = min(1.0, (step + 1) / 10) * (1.0 - 0.9 * step / recipe.steps)
        for group in optimiser.param_groups:
            group["lr"] = recipe.lr * warmth
        chosen = windows[order[torch.arange(step * per_step, (step + 1) * per_step) % len(order)]]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=chosen[:, 0]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), chosen[:, 1, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if step % 10 == 0:
            print(f"step {step} of {recipe.steps}: loss {losses[-1]:.3f}", flush=True)
    return losses
