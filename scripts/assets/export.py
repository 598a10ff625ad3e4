"""Writes a target's Hugging Face folder: weights, configuration, tokenizer, record, card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heads.api.errors import UserError
from inference.manifest import file_sha256, write_bytes, write_json
from scripts.assets.prepared import BOS_ID, END_ID, PAD_ID, load_manifest
from scripts.assets.training import build_model, note

MAX_WEIGHT_BYTES = 32_000_000
FAMILIES = {
    "llama": "A Llama",
    "qwen3_5_text": "A hybrid of gated delta rules and attention in the shape of Qwen3.5",
}
"""The card's name for a model of each type."""


def export(data: Path, run: Path, out: Path, with_card: bool = True) -> None:
    """Write `out` from a prepared folder `data` and the training run in `run`.

    Everything is checked before the first file is written; config.json is written last. Raises
    UserError if the run is missing, used another tokenizer, or left weights that do not fit its
    configuration or the size limit.
    """
    manifest, record = load_manifest(data), _read_record(run)
    settings, tokenizer = record["settings"], data / "tokenizer"
    hashes = {settings["tokenizer_sha256"], manifest["tokenizer_sha256"]}
    if hashes != {file_sha256(tokenizer / "tokenizer.json")}:
        raise UserError(
            f"{run} was not trained with the tokenizer in {data}: name its own --data folder."
        )
    weights = check_weights(run / "model.safetensors", settings["config"])

    for file in (run / "model.safetensors", run / "training.json", *sorted(tokenizer.iterdir())):
        write_bytes(out / file.name, file.read_bytes())
    stops = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    write_json(out / "generation_config.json", {**stops, "do_sample": False})
    if with_card:
        parameters = sum(tensor.numel() for tensor in weights.values())
        write_bytes(out / "README.md", render_card(out.name, record, manifest, parameters).encode())
    write_json(out / "config.json", settings["config"])
    size = sum(file.stat().st_size for file in out.iterdir())
    note(f"{out}: {size / 1e6:.1f} MB")


def _read_record(run: Path) -> dict[str, Any]:
    """Return the run's training record; raises UserError if there is none or nothing was
    measured."""
    path = run / "training.json"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist. `train` writes it; name the folder of a training run."
        )
    record: dict[str, Any] = json.loads(path.read_text())
    if not record["evaluations"] or record["evaluations"][-1]["step"] != record["steps"]:
        raise UserError(
            f"{path} has no held-out figures for its last step {record['steps']}: let `train` end "
            "by itself."
        )
    return record


def check_weights(path: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights; UserError unless they are the configuration's tensors in bfloat16,
    finite, within the size limit."""
    if not path.is_file():
        raise UserError(f"{path} does not exist. `train` writes it beside training.json.")
    size = path.stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes, {MAX_WEIGHT_BYTES:,} are allowed: choose a smaller shape."
        )
    found = load_file(path)
    shapes = {name: tensor.shape for name, tensor in build_model(config).named_parameters()}
    wrong = shapes.keys() ^ found.keys() | {
        name
        for name, tensor in found.items()
        if tensor.shape != shapes.get(name)
        or tensor.dtype != torch.bfloat16
        or not tensor.isfinite().all()
    }
    if wrong:
        raise UserError(
            f"{path} must hold its configuration's tensors as finite bfloat16 values; "
            f"{', '.join(sorted(wrong)[:4])} ({len(wrong)} in all) do not."
        )
    return found


def _start(record: Mapping[str, Any]) -> str:
    """Return a sentence about the weights that the training began with, if these were trained."""
    given = record.get("started_from")
    if not given:
        return ""
    return (
        f" It began with the weights of a model of {given['layers']} layers, which had seen "
        f"{given['tokens_seen']:,} tokens in {given['training_seconds']:,.0f} s.{_start(given)}"
    )


def render_card(
    folder: str, record: Mapping[str, Any], manifest: Mapping[str, Any], parameters: int
) -> str:
    """Return the card of the model in `assets/<folder>` in Markdown: card.md with the figures of
    the training record, the corpus manifest and the number of weights."""
    settings, last, calls = record["settings"], record["evaluations"][-1], record["calls"]
    config, limit = settings["config"], record.get("eval_tokens")
    pairs = manifest["pairs"]["train"]
    trained = [entry for name, entry in manifest["sources"].items() if name.startswith("train:")]
    ended = (
        "used up its budget, and the learning rate reached its end."
        if record["finished"]
        else "was ended before its budget was used up: the learning rate had not reached its end."
    )
    heldout = [
        f"| {last['step']:,} | {name} | {last[f'{name}_bits_per_byte']:.3f} "
        f"| {last[f'{name}_loss']:.3f} | {last[f'{name}_top1']:.1%} |"
        for name in ("code", "chat")
    ]
    figures = {
        "folder": folder,
        "family": FAMILIES[config["model_type"]],
        "parameters": parameters,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "positions": config["max_position_embeddings"],
        "megabytes": 2 * parameters / 1e6,
        "state": f"The run {ended}",
        "start": _start(record),
        "devices": ", ".join(dict.fromkeys(call["device"] for call in calls)),
        "torch": ", ".join(dict.fromkeys(call["torch"] for call in calls)),
        "seconds": record["training_seconds"],
        "rate": record["tokens_seen"] / max(record["training_seconds"], 1e-9),
        "commands": "\n".join(dict.fromkeys(call["command"] for call in calls)),
        "heldout": "\n".join(heldout),
        "limit": f" Measured on the first {limit:,} tokens of each stream." if limit else "",
        "sources": len(trained),
        "bytes": sum(entry["bytes"] for entry in trained) / 1e6,
        "raw_tokens": manifest["streams"]["raw"]["tokens"],
        "chat_tokens": manifest["streams"]["chat"]["tokens"],
        "domains": ", ".join(f"`{name}` ({n:,} answers)" for name, n in pairs.items()),
        "dropped": len(manifest["dropped_for_overlap"]),
    }
    for group, held in manifest["heldout"].items():
        figures[f"{group.lower()}_packages"] = ", ".join(held["packages"])
        figures[f"{group.lower()}_stdlib"] = len(held["stdlib"])
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return template.format_map({**settings, **record, **manifest, **figures})
