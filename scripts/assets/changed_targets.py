"""Makes changed versions of the embedded target, and prompts to evaluate them, for the staleness
report.

The target learns to write C++ headers, in all weights or through LoRA. The training does not repeat
earlier data, as in many fine-tunings, so the answers to the old questions change as well. The
prompts are held-out questions that neither target nor drafters have seen, from the old domains and
the new one.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference.cpu import multiplies_bfloat16
from inference.folders import put_new
from inference.manifest import write_json
from inference.target.chat import render_conversation
from scripts.assets import cpp_headers, python_sources
from scripts.assets.conversations import (
    Pair,
    PromptRow,
    is_askable,
    pairs_of,
    prompt_rows,
    read_rows,
    write_rows,
)
from scripts.assets.training import note

WINDOW = 512
IGNORED = -100
MADE_FILE = "finetuning.json"
HEADER_PROMPTS = {"training": 720, "validation": 48, "measuring": 192}
UNSEEN = 256
"""Prompts of each old domain, half for the reference and half as fresh traffic; domain `reference`
has fewer."""
MIXED = 720
"""Prompts of the old and of the new domains that the changed target answers for a full training."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One fine-tuning. tokens_per_step: positions, of which only the answers' tokens are learnt;
    lora_rank: 0 changes all weights."""

    steps: int = 150
    tokens_per_step: int = 4096
    lr: float = 5e-4
    lora_rank: int = 0
    seed: int = 0


RECIPES = {"finetuned": Recipe(), "lora": Recipe(steps=30, lr=2e-3, lora_rank=16)}
"""Folder name -> the fine-tuning of its target."""


def finetune(base: Path, out: Path, pairs: list[Pair], recipe: Recipe) -> None:
    """Write `out`: the target in `base`, trained on `pairs`, with LoRA merged into its weights. If
    `out` exists, nothing is done."""
    if (out / MADE_FILE).is_file():
        return
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if recipe.lora_rank:
        from peft import LoraConfig, get_peft_model  # imports accelerate, which takes seconds

        rank = recipe.lora_rank
        model = get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        )
    losses = _learn(model, supervised_windows(tokenizer, pairs, recipe.seed), recipe)
    if recipe.lora_rank:
        model = model.merge_and_unload()
    partial = out.with_name(out.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    last = sum(losses[-10:]) / len(losses[-10:])
    facts = {"rows": len(pairs), "first_loss": losses[0], "last_loss": last}
    write_json(partial / MADE_FILE, {**dataclasses.asdict(recipe), **facts})
    put_new(partial, out)


def supervised_windows(tokenizer: Any, pairs: list[Pair], seed: int) -> Tensor:
    """Return shuffled conversations cut into [windows, 2, WINDOW]: tokens, and labels that are
    IGNORED outside answers."""
    tokens: list[int] = []
    labels: list[int] = []
    for pair in random.Random(seed).sample(pairs, len(pairs)):
        ids, spans = render_conversation(tokenizer, pair.messages())
        supervised = [IGNORED] * len(ids)
        for start, end in spans:
            supervised[start:end] = ids[start:end]
        tokens += ids
        labels += supervised
    count = len(tokens) // WINDOW
    both = torch.tensor([tokens[: count * WINDOW], labels[: count * WINDOW]])
    return both.view(2, count, WINDOW).transpose(0, 1).contiguous()


def _learn(model: Any, windows: Tensor, recipe: Recipe) -> list[float]:
    """Train with AdamW, in bfloat16 autocast if the CPU multiplies bfloat16, while the learning
    rate falls to a tenth; return the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    per_step = recipe.tokens_per_step // WINDOW
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(recipe.seed))
    losses = []
    model.train()
    for step in range(recipe.steps):
        warmth = min(1.0, (step + 1) / 10) * (1.0 - 0.9 * step / recipe.steps)
        optimiser.param_groups[0]["lr"] = recipe.lr * warmth
        chosen = windows[order[torch.arange(step * per_step, (step + 1) * per_step) % len(order)]]
        with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16()):
            logits = model(input_ids=chosen[:, 0]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), chosen[:, 1, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 10 == 0:
            note(f"step {step} of {recipe.steps}: loss {losses[-1]:.3f}")
    return losses


def write_prompts(
    folder: Path, assets: Path, documents: Iterable[python_sources.Document] | None = None
) -> None:
    """Write all prompts of the report.

    reference.jsonl and fresh.jsonl: old domains, unseen; headers/: train, validation, measuring of
    the new domain; train.jsonl, validation.jsonl and measuring.jsonl: old and new domains in equal
    parts, shuffled. assets: the embedded target's prompts; documents: by default everything
    installed here.
    """
    pairs = cpp_headers.split_pairs(cpp_headers.operators())
    rng, counts = random.Random("0:watch"), HEADER_PROMPTS
    headers = cpp_headers.choose_training_prompts(
        pairs["A"], counts["training"], counts["validation"], "headers", rng
    )
    chosen = cpp_headers.choose_prompts(pairs["B"], counts["measuring"], "headers-bench", rng)
    headers["measuring"] = chosen
    for name, rows in headers.items():
        write_rows(folder / "headers" / f"{name}.jsonl", rows)
    if documents is None:  # everything installed here
        found = (python_sources.from_stdlib, python_sources.from_topics)
        documents = [
            document
            for source in (*found, python_sources.from_site_packages)
            for document in source()
        ]
    reference, fresh = deal_halves(unseen(assets, documents))
    write_rows(folder / "reference.jsonl", reference)
    write_rows(folder / "fresh.jsonl", fresh)
    rng = random.Random("mixed")
    for name, count in (("train", MIXED), ("validation", HEADER_PROMPTS["validation"])):
        old = read_rows(assets / "training" / f"{name}.jsonl")
        mixed = [*rng.sample(old, count), *headers[name]]
        rng.shuffle(mixed)
        write_rows(folder / f"{name}.jsonl", mixed)
    bench = [row for path in sorted(assets.glob("*.jsonl")) for row in read_rows(path)[:64]]
    write_rows(folder / "measuring.jsonl", [*bench, *headers["measuring"]])


def unseen(bench: Path, documents: Iterable[python_sources.Document]) -> list[PromptRow]:
    """Return prompts of the old domains that neither target nor drafters have seen: those of
    `bench`, and more from group B of `documents`."""
    found = [row for path in sorted(bench.glob("*.jsonl")) for row in read_rows(path)]
    known, sources = Counter(row["domain"] for row in found), {row["source"] for row in found}
    held_out = python_sources.deduplicate(
        document for document in documents if document.group == "B"
    )
    pairs = [pair for document in held_out for pair in pairs_of(document)]
    pairs = [pair for pair in pairs if is_askable(pair) and pair.source not in sources]
    random.Random(0).shuffle(pairs)
    for domain in known:
        more = [pair for pair in pairs if pair.domain == domain][: UNSEEN - known[domain]]
        found += prompt_rows(more, f"more-{domain}", random.Random("0:more"))
    # some wordings apply to several functions
    asked = {row["messages"][0]["content"]: row for row in found}
    return list(asked.values())


def deal_halves(rows: Sequence[PromptRow]) -> tuple[list[PromptRow], list[PromptRow]]:
    """Split the rows at random into two parts, with half of every domain in each."""
    rng = random.Random(0)
    parts: tuple[list[PromptRow], list[PromptRow]] = ([], [])
    for domain in dict.fromkeys(row["domain"] for row in rows):
        own = [row for row in rows if row["domain"] == domain]
        rng.shuffle(own)
        parts[0].extend(own[::2])
        parts[1].extend(own[1::2])
    return parts
