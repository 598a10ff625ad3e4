"""Makes the held-out target: a small Qwen3 with its own tokenizer, trained on C++ headers.

It serves to check that results of the embedded target hold elsewhere
(scripts/evidence/held_out.py). Every step is skipped if its result exists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from heads.api.errors import UserError
from inference.cpu import multiplies_bfloat16
from scripts.assets import cpp_headers
from scripts.assets.conversations import Pair, write_rows
from scripts.assets.export import export
from scripts.assets.prepared import (
    TokenizerSpec,
    encode_dialogues,
    encode_documents,
    write_prepared,
)
from scripts.assets.training import Intervals, Trainer, TrainSettings, llama_config

TOKENIZER = TokenizerSpec(
    size=2048,
    special=("<pad>", "<text>", "<ask>", "<say>", "<rule>", "</turn>"),
    template=(
        "{{- '<text>' }}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'assistant' %}"
        "{{- '<say>' }}{% generation %}{{- message['content'] + '</turn>' }}"
        "{% endgeneration %}{{- '\\n' }}"
        "{%- else %}"
        "{{- ('<ask>' if message['role'] == 'user' else '<rule>')"
        " + message['content'] + '</turn>\\n' }}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<say>' }}{% endif %}"
    ),
)
CONFIG = llama_config(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=TOKENIZER.size,
    hidden_size=160,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    intermediate_size=448,
    rope_theta=100_000.0,
    rms_norm_eps=1e-6,
    use_sliding_window=False,
    sliding_window=None,
)
"""2.48 million parameters; queries are wider than the model, as in Qwen3's small sizes."""
PROMPTS = {"training": 1440, "validation": 48, "measuring": 96}
"""Prompts for drafters, for choosing among their checkpoints, and for the report."""
HELDOUT_PAIRS = 1500
WORTH_COMPILING = 100
"""Steps from which compiling saves more time than it takes."""


def make(
    work: Path, steps: int, prompts: Mapping[str, int] = PROMPTS, config: Mapping[str, Any] = CONFIG
) -> Path:
    """Make everything below `work`, with the prompts in data/prompts; return the target's
    folder."""
    data, state, target = (work / name for name in ("data", "state", "target"))
    if not (data / "manifest.json").is_file():
        prepare(data, cpp_headers.operators(), prompts)
    record = state / "training.json"
    if not record.is_file() or not json.loads(record.read_text())["finished"]:
        train(data, state, steps, config)
    if not (target / "config.json").is_file():
        export(data, state, target, with_card=False)
    return target


def prepare(
    folder: Path, operators: list[cpp_headers.Operator], prompts: Mapping[str, int], seed: int = 0
) -> None:
    """Write a prepared folder and, below it, the prompts of groups A and B."""
    pairs = cpp_headers.split_pairs(operators)
    trained = [operator.text for operator in operators if operator.group == "train"]
    tokenizer = TOKENIZER.train(trained)
    rng = random.Random(seed)
    rng.shuffle(trained)
    rng.shuffle(pairs["train"])
    judged = rng.sample(pairs["B"], min(len(pairs["B"]), HELDOUT_PAIRS))
    streams = {
        "raw": encode_documents(tokenizer, trained),
        "chat": encode_dialogues(tokenizer, [pair.messages() for pair in pairs["train"]]),
        "heldout-raw": encode_documents(tokenizer, (o.text for o in operators if o.group == "B")),
        "heldout-chat": encode_dialogues(tokenizer, [pair.messages() for pair in judged]),
    }
    write_prompts(folder / "prompts", pairs, seed, **prompts)
    facts = {
        "documents": {group: sum(o.group == group for o in operators) for group in pairs},
        "pairs": {group: len(found) for group, found in pairs.items()},
    }
    write_prepared(folder, tokenizer, streams, facts)


def write_prompts(
    folder: Path,
    pairs: Mapping[str, list[Pair]],
    seed: int,
    training: int,
    validation: int,
    measuring: int,
) -> None:
    """Write train.jsonl and validation.jsonl (group A) and `measuring`/<domain>.jsonl (group B)."""
    rng = random.Random(f"{seed}:prompts")
    files = cpp_headers.choose_training_prompts(pairs["A"], training, validation, "train", rng)
    for row in cpp_headers.choose_prompts(pairs["B"], measuring, "bench", rng):
        files.setdefault(f"measuring/{row['domain']}", []).append(row)
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)


def train(
    folder: Path, state: Path, steps: int, config: Mapping[str, Any] = CONFIG, seed: int = 0
) -> None:
    """Train on a prepared folder for `steps` steps of 4,096 tokens, or continue the training."""
    settings = TrainSettings(
        steps=steps,
        lr=4e-3,
        batch_tokens=4096,
        micro_tokens=4096,
        length=512,
        bf16=multiplies_bfloat16(),
        chat_share=0.8,
        final_chat_share=0.9,
        seed=seed,
    )
    trainer = Trainer(
        folder,
        state,
        state,
        settings,
        config,
        torch.device("cpu"),
        compiled=steps >= WORTH_COMPILING,
        intervals=Intervals(log=30.0, evaluate=240.0, save=120.0),
        eval_tokens=32_768,
        command="python -m scripts.evidence.held_out",
    )
    if not trainer.run():
        raise UserError(
            "the target's training was stopped before its end; run the same command again."
        )
