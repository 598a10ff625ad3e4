"""The embedded hybrid target in the shape of Qwen3-Next, which vLLM serves on a CPU; its Qwen3.5
needs packages for pictures.

The two differ in how a recurrent layer's inputs are stored, and in that every MLP of Qwen3-Next
chooses among experts: here one, of weight 1, beside a shared one of zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_types"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def as_qwen3_next(source: Path, out: Path) -> Path:
    """Write the model in `source`, a Qwen3.5 without experts, as a Qwen3-Next; bfloat16."""
    given = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = given.config
    rope = {**config.rope_parameters, "partial_rotary_factor": 0.25}
    made: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3_next",
            **{name: getattr(config, name) for name in SHARED},
            rope_parameters={k: v for k, v in rope.items() if not k.startswith("mrope")},
            tie_word_embeddings=False,  # vLLM's Qwen3-Next has an LM head of its own
            num_experts=1,
            num_experts_per_tok=1,
            norm_topk_prob=True,
            moe_intermediate_size=config.intermediate_size,
            shared_expert_intermediate_size=config.intermediate_size,
        )
    )
    weights = dict(given.state_dict())
    for name in made.state_dict():
        if name not in weights:
            weights[name] = _made(name, weights, config)
    made.load_state_dict({name: weights[name] for name in made.state_dict()})
    made.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return out


def _made(name: str, weights: dict[str, Tensor], config: Any) -> Tensor:
    """A tensor that Qwen3.5 stores otherwise or not at all."""
    place, _, last = name.rpartition(".mlp.")
    hidden, middle = config.hidden_size, config.intermediate_size
    if last == "gate.weight":
        return torch.zeros(1, hidden)
    if last == "experts.gate_up_proj":
        parts = [weights[f"{place}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        return torch.cat(parts)[None]
    if last == "experts.down_proj":
        return weights[f"{place}.mlp.down_proj.weight"][None]
    if last == "shared_expert_gate.weight":
        return torch.zeros(1, hidden)
    if last.startswith("shared_expert."):
        return torch.zeros((hidden, middle) if "down_proj" in last else (middle, hidden))
    place, _, last = name.rpartition(".in_proj_")
    heads = config.linear_num_key_heads
    ratio = config.linear_num_value_heads // heads
    key = heads * config.linear_key_head_dim
    inputs = {part: weights[f"{place}.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")}
    query, keys, values = inputs["qkv"].split(
        [key, key, ratio * heads * config.linear_value_head_dim]
    )
    by_head = (
        (query, keys, values, inputs["z"]) if last == "qkvz.weight" else (inputs["b"], inputs["a"])
    )
    return torch.cat([part.view(heads, -1, hidden) for part in by_head], dim=1).flatten(0, 1)
