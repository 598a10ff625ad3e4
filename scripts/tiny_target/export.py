"""Writes the embedded target's folder: weights, configuration, tokenizer, chat template, training record, card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heads.api.errors import UserError
from scripts.tiny_target.atomic import write_bytes, write_json
from scripts.tiny_target.card import card
from scripts.tiny_target.data import load_manifest
from scripts.tiny_target.model import ModelShape, TinyLlama
from scripts.tiny_target.progress import note
from scripts.tiny_target.tokenizer import CHAT_TEMPLATE, file_hash
from scripts.tiny_target.vocabulary import (
    ASSISTANT,
    BOS,
    BOS_ID,
    END,
    END_ID,
    MAX_LENGTH,
    PAD,
    PAD_ID,
    SYSTEM,
    USER,
)

MAX_WEIGHT_BYTES = 16_000_000


def export(data: Path, run: Path, out: Path) -> None:
    """Write `out` from a prepared folder `data` and the training run in `run`.

    Everything is checked before the first file is written. Raises UserError where the run is missing, used another tokenizer,
    or left weights that do not fit its shape or the size limit.
    """
    manifest, record = load_manifest(data), _record(run)
    tokenizer = data / "tokenizer" / "tokenizer.json"
    hashes = {record["settings"]["tokenizer_sha256"], manifest["tokenizer_sha256"], file_hash(tokenizer)}
    if len(hashes) != 1:
        raise UserError(f"{run} was not trained with the tokenizer in {data}: name the --data folder it was trained on.")
    shape = ModelShape(**record["settings"]["shape"])
    weights = run / "model.safetensors"
    check_weights(weights, shape)

    write_bytes(out / "model.safetensors", weights.read_bytes())
    write_json(out / "config.json", shape.config())
    write_json(out / "generation_config.json", generation_config())
    write_bytes(out / "tokenizer.json", tokenizer.read_bytes())
    write_json(out / "tokenizer_config.json", tokenizer_config())
    write_bytes(out / "chat_template.jinja", CHAT_TEMPLATE.encode())
    write_json(out / "training.json", record)
    write_bytes(out / "README.md", card(record, manifest, weights.stat().st_size).encode())
    note(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB")


def _record(run: Path) -> dict[str, Any]:
    """Return the run's training record; UserError where there is none or nothing was measured."""
    path = run / "training.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist. `train` writes it; name the folder of a training run with --run.")
    record: dict[str, Any] = json.loads(path.read_text())
    if not record["evaluations"] or record["evaluations"][-1]["step"] != record["steps"]:
        raise UserError(f"{path} has no held-out figures for its last step {record['steps']}: let `train` end by itself.")
    return record


def check_weights(path: Path, shape: ModelShape) -> None:
    """Raise UserError unless the file has exactly the shape's tensors in bfloat16, finite, within the size limit."""
    if not path.is_file():
        raise UserError(f"{path} does not exist. `train` writes it beside training.json.")
    if path.stat().st_size > MAX_WEIGHT_BYTES:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes, {MAX_WEIGHT_BYTES:,} are allowed: choose a smaller shape.")
    found = load_file(path)
    wanted = {name: tensor.shape for name, tensor in TinyLlama(shape).state_dict().items()}
    wrong = sorted(
        name
        for name in wanted.keys() | found.keys()
        if name not in wanted or name not in found or found[name].shape != wanted[name]
    )
    if wrong:
        raise UserError(f"{path} does not hold the tensors of its shape: {', '.join(wrong[:4])} ({len(wrong)} in all) differ.")
    bad = sorted(n for n, tensor in found.items() if tensor.dtype != torch.bfloat16 or not tensor.isfinite().all())
    if bad:
        raise UserError(f"{path} must hold finite bfloat16 values; {', '.join(bad[:4])} ({len(bad)} in all) do not.")


def generation_config() -> dict[str, Any]:
    """Return `generation_config.json`: greedy, stops at the end of a turn."""
    return {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": False}


def tokenizer_config() -> dict[str, Any]:
    """Return `tokenizer_config.json`, in the names that every transformers 5 reads."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
    }
