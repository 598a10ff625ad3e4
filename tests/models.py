"""Tiny random target models of several families, for tests: weights large enough that greedy text is not constant."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from inference.loading import TargetConfig, describe, switch_attention
from inference.target import TargetModel

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
    "gemma3_text": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 7},
    "olmo2": {},
    "phi": {},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "cohere2": {"sliding_window": 9},
    "granite": {},
}


class TokenIds:
    """A stand-in tokenizer for targets that are only fed ids."""

    eos_token_id = 2
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(VOCAB)}


def random_model(family: str = "llama", seed: int = 3, **changes: Any) -> Any:
    """A random causal LM of a family, float64, with weights wide enough for varied greedy text."""
    settings = {k: v for k, v in {**SMALL, **FAMILIES[family], **changes}.items() if v is not None}
    if family == "gpt2":
        settings = {k: v for k, v in settings.items() if k.startswith("n_") or k == "vocab_size" or k.endswith("_id")}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.25)
    return model.requires_grad_(False)


def random_target(family: str = "llama", seed: int = 3, dtype: torch.dtype = torch.float64, **changes: Any) -> TargetModel:
    """A random target of a family, ready to decode."""
    model = random_model(family, seed, **changes).to(dtype)
    switch_attention(model)
    tokenizer = TokenIds()
    return TargetModel(model, tokenizer, describe(model, tokenizer, TargetConfig(path=f"random/{family}")))


def save_random_target(folder: Path, tokenizer: Any, family: str = "llama", **changes: Any) -> Path:
    """Write a random float32 model of a family with a real tokenizer to `folder`, as a user would have it."""
    model = random_model(family, vocab_size=len(tokenizer), **changes).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
