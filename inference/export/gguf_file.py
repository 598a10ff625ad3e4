"""Writes tensors and metadata as GGUF files with llama.cpp's package `gguf`, and reads them back.

The tokenizer is the target's, so that the file is complete: tokens, their types, merges, the rule
by which text is split before merging (`PRE`), special tokens and the chat template. Matrices have
the drafter's number format; vectors (norms, biases) are float32, as llama.cpp requires.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.api.errors import UserError
from inference.export.layouts.folder import Json
from inference.target.quantization import Library

GGUF = Library("gguf", "gguf")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE = {
    rf"{_CONTRACTIONS}{_WORDS}\p{{N}}{_REST}": "qwen2",
    rf"{_CONTRACTIONS}{_WORDS}\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    "bytes": "gpt-2",
}
"""Patterns by which byte-level tokenizers split text (`split_pattern`), and llama.cpp's names."""
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def write_gguf(path: Path, keys: Json, tensors: Mapping[str, Tensor], tokenizer: Any) -> list[str]:
    """Write a file; returns notes. Raises `UserError` if the package is missing, and for a
    tokenizer of a kind that llama.cpp does not have."""
    GGUF.require("an export for llama.cpp")
    import gguf

    words, notes = tokenizer_keys(
        tokenizer, int(keys[f"{keys['general.architecture']}.vocab_size"])
    )
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    for name, value in {**keys, **words}.items():
        add_key(writer, name, value)
    formats = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
        torch.int64: gguf.GGMLQuantizationType.I64,
    }
    for name, value in tensors.items():
        vector = value.ndim == 1 and value.is_floating_point()
        stored = (value.float() if vector else value).detach().cpu().contiguous()
        kind = formats[stored.dtype]
        # numpy has no bfloat16: its bytes
        data = (
            stored.view(torch.uint8).numpy() if stored.dtype == torch.bfloat16 else stored.numpy()
        )
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return notes


def add_key(writer: Any, name: str, value: Any) -> None:
    """One key: whole numbers are uint32, others float32."""
    if name == "general.architecture":  # written with the header
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def tokenizer_keys(tokenizer: Any, size: int) -> tuple[Json, list[str]]:
    """The tokenizer's keys for a vocabulary of `size` tokens, and notes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise UserError(
            f"llama.cpp's file needs a tokenizer of byte pairs (BPE); the target's is of type "
            f"'{model.get('type', 'unknown')}'. Serve the drafter with vLLM."
        )
    added = tokenizer.added_tokens_decoder
    by_id = {place: token for token, place in tokenizer.get_vocab().items()}
    tokens = [by_id.get(place, f"[PAD{place}]") for place in range(size)]
    bytewise = bool(model.get("byte_fallback"))
    kinds = [_kind(place, by_id, added, bytewise) for place in range(size)]
    keys: Json = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    notes = []
    if bytewise:
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        keys["tokenizer.ggml.scores"] = [-float(place) for place in range(size)]
    else:
        name = PRE.get(split_pattern(content), "")
        if not name:
            notes.append(
                "llama.cpp has no name for the pattern by which the target's tokenizer splits "
                "text, so the file says 'default': give prompts as token ids"
            )
        keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name or "default"}
        merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        keys["tokenizer.ggml.merges"] = merges
    for ours, theirs in SPECIAL.items():
        place = getattr(tokenizer, f"{ours}_token_id", None)
        if place is not None:
            keys[f"tokenizer.ggml.{theirs}_token_id"] = int(place)
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    first = getattr(tokenizer, "bos_token_id", None)
    keys["tokenizer.ggml.add_bos_token"] = (
        first is not None and tokenizer("a").input_ids[0] == first
    )
    return keys, notes


def _kind(place: int, by_id: Mapping[int, str], added: Mapping[int, Any], bytewise: bool) -> int:
    if place not in by_id:
        return UNUSED
    if place in added:
        return CONTROL if added[place].special else USER
    token = by_id[place]
    return BYTE if bytewise and len(token) == 6 and token.startswith("<0x") else NORMAL


def split_pattern(content: Json) -> str:
    """The pattern of a byte-level tokenizer.json; "bytes" for GPT-2's own, empty for others."""
    found = content.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers") or [found]
    patterns = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    if patterns:
        return str(patterns[0]) if len(patterns) == 1 else ""
    return "bytes" if any(part.get("type") == "ByteLevel" for part in parts) else ""


class GgufContent:
    """A file's keys, and its tensors in torch's order of axes."""

    def __init__(self, path: Path) -> None:
        GGUF.require("a check of a GGUF file")
        import gguf

        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"'{path}' is no readable GGUF file ({error}). Export it again."
            ) from error
        self.keys: Json = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors: dict[str, Tensor] = {
            item.name: torch.from_numpy(
                np.array(
                    item.data
                    if item.tensor_type.name == "I64"
                    else gguf.dequantize(item.data, item.tensor_type)
                )
            ).reshape([int(size) for size in reversed(item.shape)])
            for item in reader.tensors
        }
