"""Tiny random target models of several families, for tests: weights large enough that greedy text
is not constant."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.loading import TargetConfig, describe, prepare, switch_attention
from inference.target.model import TargetModel

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
"""The families that every test of the decoder runs over."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
SEEING = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 8,
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
    "gemma": {"head_dim": 16},
    "gemma4_text": {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "phi3": {"sliding_window": 9},
    "olmo": {},
    "olmo3": {"sliding_window": 9},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        **EXPERTS,
        **LATENT,
    },
    "stablelm": {},
    "starcoder2": {"sliding_window": 9},
    "cohere": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "exaone4": {"sliding_window": 9, "sliding_window_pattern": 2},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "nemotron": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 64,
        "no_rope_layer_interval": 2,
    },
    "longcat_flash": {
        **LATENT,
        "num_hidden_layers": None,
        "intermediate_size": None,
        "num_layers": 2,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 64,
        "head_dim": 8,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "minicpm3": {"num_key_value_heads": 4, **LATENT},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "dbrx": {
        **dict.fromkeys(
            "hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads max_position_embeddings".split()
        ),
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "phi4_multimodal": {
        "head_dim": 8,
        "vision_config": {**SEEING, "crop_size": 8},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
        },
    },
}
"""Families that are held against their own forward pass and greedy loop in test_families.py
only."""
ALL_FAMILIES = FAMILIES | MORE_FAMILIES
SIZES = {
    **EXPERTS,
    **LATENT,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 9,
    "head_dim": 16,
}
"""Small values of what families count experts, latents and windows by."""
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS}
PLAIN = (
    "afmoe arcee aria_text axk1 beam biogpt bitnet cohere2_moe cwm diffllama ernie4_5 "
    "ernie4_5_moe exaone_moe flex_olmo flint fuyu gemma4_unified_text glm4_moe "
    "glm4_moe_lite granite_swa granitemoe_swa granitemoeshared hy_v3 hyperclovax "
    "internlm3 iquestcoder jais2 jetmoe kolibri1 laguna mellum mimo_v2_flash minimax_m2 "
    "minimax_m3_vl_text ministral3 nanochat persimmon phimoe seed_oss solar_open "
    "vaultgemma youtu"
)
SIZED_FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in PLAIN.split()},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "deepseek_v2": {**ROUTED, "n_group": 1, "topk_group": 1},
    "dots1": {**ROUTED, "n_group": 1, "topk_group": 1},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
}
"""Families with the settings of `SIZES` that their config has, and what they need beside."""
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
KIMI = {
    **DELTA,
    **LATENT,
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_local_experts": 4,
    "topk_group": 1,
    **EXPERTS,
}
SSD = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
SCAN = {"mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "tie_word_embeddings": True,
}
WITHOUT_ATTENTION = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "state_size": 6,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "expand": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {
        **DELTA,
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {**DELTA, "head_dim": None, "linear_num_value_heads": 2},
    "kimi_linear": {**KIMI, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "bailing_hybrid": {**KIMI, "n_group": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "mamba", "attention"],
        "num_hidden_layers": 4,
        "head_dim": 8,
        "ssm_state_size": 6,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "time_step_min": 1e-4,
        **EXPERTS,
    },
    "falcon_h1": {**SSD, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {
        **SSD,
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "mamba", "full_attention", "mamba"],
        "position_embedding_type": "rope",
    },
    "bamba": {**SSD, "attn_layer_indices": [2]},
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 6,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "time_step_min": 1e-4,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "jamba": {
        **SCAN,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "zamba": {
        **SCAN,
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 5,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
    },
    "mamba2": {**WITHOUT_ATTENTION, "n_groups": 2, "num_heads": 8, "head_dim": 8, "chunk_size": 8},
    "mamba": {**WITHOUT_ATTENTION, "time_step_rank": 4},
    "falcon_mamba": {**WITHOUT_ATTENTION, "time_step_rank": 4},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_experts": 4, "num_dense_layers": 1},
    "lfm3": {**CONVOLUTIONS, "conv_L_cache": 5, "head_dim": 8},
    "minimax": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "block_size": 4,
        "head_dim": 8,
        "linear_attn_alpha_factor": 1.5,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 4,
        "block_types": ["recurrent", "attention", "recurrent"],
        "attention_window_size": 9,
        "lru_width": 32,
        "logits_soft_cap": 5.0,
    },
    "zaya": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "router_hidden_size": 16,
        "cca_time0": 3,
    },
}
"""Families with recurrent layers: tests/inference/target/recurrent."""
DSA = {
    **LATENT,
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "index_topk": 6,
    "index_head_dim": 8,
    "index_n_heads": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
SHARED = {**DSA, "indexer_types": ["full", "shared", "full", "shared"]}
INDEXED_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": DSA,
    "glm_moe_dsa": SHARED,
    "axk2": DSA,
    "hy_v4": SHARED,
    "dots3_note_text": {
        **DSA,
        "head_dim": 16,
        "n_shared_experts": 1,
        "sliding_window": 9,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        **{
            f"swa_{name}": size
            for name, size in {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "q_lora_rank": 8,
                "kv_lora_rank": 12,
                "head_dim": 16,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            }.items()
        },
    },
}
"""Families whose attention chooses keys by an indexer, fewer than the tests' prompts have; with few
heads, so that scores tie at 0: test_indexed.py."""
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
}
COMPOSITE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {"vision_config": QWEN_VISION}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"vision_config": QWEN_VISION}),
    "gemma3": ("gemma3_text", {"vision_config": {**SEEING, "model_type": "siglip_vision_model"}}),
    "gemma4": ("gemma4_text", {"vision_config": SEEING}),
    "gemma4_unified": ("gemma4_unified_text", {"vision_config": SEEING}),
    "llama4": ("llama4_text", {"vision_config": {**SEEING, "vision_output_dim": 16}}),
    "mistral3": ("mistral", {"vision_config": {**SEEING, "model_type": "pixtral"}}),
    "got_ocr2": (
        "qwen2",
        {"vision_config": {**SEEING, "mlp_dim": 16, "output_channels": 8, "image_size": 64}},
    ),
    "moss_transcribe_diarize": (
        "qwen3",
        {
            "audio_config": {
                "d_model": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
            }
        },
    ),
    "dots3_note": (
        "dots3_note_text",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "moe_intermediate_size": 8,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "adapter_in_dim": 16,
                "adapter_out_dim": 32,
            },
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "downsample_hidden_size": 8,
                "adapter_input_size": 16,
                "adapter_out_dim": 32,
            },
        },
    ),
}
"""Composite family -> its text family, and settings of its other parts."""
LONGROPE = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 24,
    },
}
"""Settings that give a phi3 model the two sets of rotary frequencies of the 128k Phi models."""


class TokenIds:
    """A stand-in tokenizer for targets that are only fed ids."""

    eos_token_id = 2
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(VOCAB)}


def random_model(
    family: str = "llama", seed: int = 3, recurrent: bool = False, **changes: Any
) -> Any:
    """A random causal LM of a family, float64, with weights wide enough for varied greedy text.

    recurrent: with the settings of `RECURRENT_FAMILIES`.
    """
    if family in SIZED_FAMILIES:
        own = sized(family)
    else:
        own = RECURRENT_FAMILIES[family] if recurrent else (ALL_FAMILIES | INDEXED_FAMILIES)[family]
    given = {**({} if "state_size" in own else SMALL), **own, **changes}
    settings = {k: v for k, v in given.items() if v is not None}
    if "n_embd" in settings:
        settings = {
            k: v
            for k, v in settings.items()
            if k.startswith("n_") or k == "vocab_size" or k.endswith("_id")
        }
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    # "eager" experts: the grouped product of transformers takes no float64
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.endswith("A_log"):
            parameter.data.normal_(0, 0.25)
    return model.requires_grad_(False)


def sized(family: str) -> dict[str, Any]:
    """The settings of one of `SIZED_FAMILIES`."""
    usual = CONFIG_MAPPING[family]().to_dict()
    found = {key: size for key, size in SIZES.items() if usual.get(key) is not None}
    if "kv_lora_rank" in found:  # as many keys as queries, and head sizes of their own
        found |= {"num_key_value_heads": 4, "head_dim": None}
    return found | SIZED_FAMILIES[family]


def random_target(
    family: str = "llama",
    seed: int = 3,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    recurrent: bool = False,
    **changes: Any,
) -> TargetModel:
    """A random target of a family, ready to decode: the same weights as `random_model` with the
    same arguments."""
    model = prepare(random_model(family, seed, recurrent, **changes).to(device=device, dtype=dtype))
    switch_attention(model)
    tokenizer = TokenIds()
    return TargetModel(
        model, tokenizer, describe(model, tokenizer, TargetConfig(path=f"random/{family}"))
    )


def plain_texts(
    requests: Iterable[Request], family: str = "llama", recurrent: bool = False, **settings: Any
) -> dict[int, list[int]]:
    """What a random target of a family writes without a drafter, request by request: what every
    lossless way of decoding must write. Each is computed once."""
    return dict(_plain_texts(tuple(requests), family, recurrent, tuple(settings.items())))


@cache
def _plain_texts(requests: tuple[Request, ...], family: str, recurrent: bool, settings: Any) -> Any:
    target = random_target(family, recurrent=recurrent)
    return texts_of(Engine(target, None, DecodeConfig(**dict(settings))), requests)


def texts_of(engine: Engine, requests: Iterable[Request]) -> dict[int, list[int]]:
    """The tokens of an engine's answers, by the index of their requests."""
    return {done.request.index: done.tokens for done in engine.run(requests)}


def save_random_target(folder: Path, tokenizer: Any, family: str = "llama", **changes: Any) -> Path:
    """Write a random float32 model of a family with a real tokenizer to `folder`, as a user would
    have it."""
    model = random_model(family, vocab_size=len(tokenizer), **changes).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
