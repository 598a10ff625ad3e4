"""A small random target on disk, and drafters of every exportable kind for it, with weights that
all matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from heads.nn.block.lattice import CorrelatorConfig
from inference.export.config import ExportConfig
from inference.export.engine_folder import export, prepare
from inference.export.layouts.base import Target
from inference.export.layouts.folder import ExportNotes
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import tiny_tokenizer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BLOCK = {
    "block_size": 5,
    "num_layers": 3,
    "taps": (1, 3, 4),
    "dependency_rank": 6,
    "conv_group_size": 8,
    "selector_top_k": 5,
}
LILICORR = {
    "dependency": "lilicorr",
    "selector_top_k": 4,
    "correlator": CorrelatorConfig(size=12, heads=2, scale=6.0),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {"taps": (1, 3, 4), "ttt_steps": 3}),
    "eagle3_plain": (
        "eagle3",
        {"tap_norm": False, "post_norm_recurrence": False, "draft_vocab_size": 40, "head_dim": 16},
    ),
    "eagle3_llama_cpp": (
        "eagle3",
        {
            "tap_norm": False,
            "post_norm_recurrence": False,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "taps": (1, 3, 4),
            "draft_vocab_size": 40,
        },
    ),
    "eagle3_taps": ("eagle3", {"taps": (1, 2, 4, 6)}),
    "peagle": ("peagle", {"num_layers": 2, "depths": 4, "draft_vocab_size": 40}),
    "peagle_whole": ("peagle", {"num_layers": 1, "depths": 3, "tap_norm": False}),
    "eagle_bias": ("eagle", {"fc_bias": True}),
    "eagle3_other": (
        "eagle3",
        {"tap_norm": False, "norm_before_fc": True, "norm_before_residual": True, "qk_norm": True},
    ),
    "peagle_other": (
        "peagle",
        {
            "tap_norm": False,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "qk_norm": True,
            "own_embedding": True,
            "num_layers": 2,
        },
    ),
    "eagle3_shortlist": ("eagle3", {"shortlist": 8}),
    "peagle_shortlist": ("peagle", {"shortlist": 8}),
    "fastmtp": ("mtp", {"shared": True, "depths": 3}),
    "fastmtp_wide": ("mtp", {"shared": True, "depths": 3, "intermediate_size": 96}),
    "dflash": ("dflash", BLOCK),
    "dflash_token": ("dflash", {**BLOCK, "mask_token_id": 3}),
    "dflash_last": ("dflash", {**BLOCK, "taps": (1, 3, 6), "mask_token_id": 3}),
    "jetspec": ("dflash", {**BLOCK, "in_block": "causal"}),
    "dflash2": ("dflash", {**BLOCK, "dependency": "selector", "convolution": True}),
    "dflash2_token": (
        "dflash",
        {
            **BLOCK,
            "dependency": "selector",
            "convolution": True,
            "mask_token_id": 3,
            "num_layers": 2,
        },
    ),
    "dspark": (
        "dflash",
        {**BLOCK, "dependency": "markov", "confidence": True, "sample_from_anchor": True},
    ),
    "dspark_shifted": ("dflash", {**BLOCK, "dependency": "markov", "mask_token_id": 3}),
    "dspark_gated": (
        "dflash",
        {**BLOCK, "dependency": "gated", "mask_token_id": 3, "sample_from_anchor": True},
    ),
    "dspark_rnn": (
        "dflash",
        {**BLOCK, "dependency": "rnn", "mask_token_id": 3, "sample_from_anchor": True},
    ),
    "domino": ("dflash", {**BLOCK, "dependency": "gru", "mask_token_id": 3}),
    "lilicorr": ("dflash", {**BLOCK, **LILICORR}),
    "lilicorr_convolution": (
        "dflash",
        {
            **BLOCK,
            **LILICORR,
            "correlator": CorrelatorConfig(layers=1, heads=2),
            "convolution": True,
            "mask_token_id": 3,
        },
    ),
    "medusa": ("medusa", {"num_heads": 3, "num_layers": 2}),
    "medusa_heads": ("medusa", {"num_heads": 2, "own_lm_head": True}),
    "medusa_reduced": ("medusa", {"num_heads": 2, "draft_vocab_size": 40}),
    "medusa_reduced_heads": (
        "medusa",
        {"num_heads": 2, "own_lm_head": True, "draft_vocab_size": 40},
    ),
    "distilled": (
        "distilled",
        {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    ),
    "distilled_layers": ("distilled", {"from_target_layers": (0, 3)}),
    "distilled_shared": ("distilled", {"num_layers": 1, "share_embeddings": True}),
    "distilled_tied": (
        "distilled",
        {"num_layers": 1, "tie_embeddings": True, "rope_theta": 5000.0},
    ),
    "distilled_qwen2": ("distilled", {"num_layers": 1, "attention_bias": True}),
    "distilled_wide_heads": (
        "distilled",
        {"num_layers": 1, "attention_bias": True, "head_dim": 12},
    ),
    "distilled_qwen3": ("distilled", {"num_layers": 1, "qk_norm": True, "attention_bias": True}),
    "distilled_scaled": ("distilled", {"num_layers": 1, "rope_scaling": (4.0, 1.0, 4.0, 32.0)}),
    "pard": ("pard", {"num_layers": 2, "depth": 3, "pard_token": 7}),
    "uno": ("uno", {"rank": 4, "alpha": 8.0, "block_size": 4}),
    "uno_attention": (
        "uno",
        {"rank": 3, "alpha": 4.5, "modules": ("q_proj", "o_proj"), "noise_tokens": 40},
    ),
    "uno_mask": ("uno", {"rank": 4, "slots": "mask"}),
}
"""Name -> kind and configuration: every option that changes what an engine must compute."""
WAYS = {
    **dict.fromkeys(VARIANTS, ("vllm",)),
    "eagle": ("vllm", "sglang"),
    "eagle3": ("vllm", "sglang", "speculators"),
    "eagle3_plain": ("vllm", "sglang", "speculators"),
    "peagle": ("vllm", "speculators"),
    "eagle_bias": ("sglang",),
    "eagle3_other": ("vllm", "speculators"),
    "peagle_other": ("vllm", "speculators"),
    "fastmtp": ("vllm", "sglang"),
    "fastmtp_wide": ("sglang",),
    "dflash_token": ("vllm", "sglang", "speculators", "transformers"),
    "dflash2_token": ("sglang", "speculators"),
    "dspark_shifted": ("vllm", "speculators"),
    "dspark_gated": ("sglang",),
    "eagle3_shortlist": (),
    "peagle_shortlist": (),
    "medusa_reduced_heads": (),
    "dspark_rnn": ("sglang",),
    "domino": ("sglang",),
    "lilicorr_convolution": ("vllm", "sglang"),
    "distilled": ("vllm", "sglang", "transformers"),
    "uno": ("sglang",),
    "uno_attention": ("sglang",),
    "uno_mask": (),
}
"""Name -> the engines that it is exported for."""
EXPORTS = [(name, engine) for name, engines in WAYS.items() for engine in engines]


def save_target(folder: Path, seed: int = 5, **changes: Any) -> Path:
    """A random six-layer Llama whose embedding has rows behind the tokenizer's last token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer("marked")
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "rope_theta": 20000.0,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    LlamaForCausalLM(LlamaConfig(**(values | changes))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_target(folder: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(folder), dtype="float32", device="cpu"))


def target_config(target: TargetModel) -> TargetConfig:
    """How `load_target` loaded it."""
    return TargetConfig(target.info.id, dtype="float32", device="cpu")


def drafter_of(target: TargetModel, name: str, seed: int = 1) -> Any:
    """A drafter of a variant whose weights have all been moved by noise, so that none can be
    forgotten unnoticed."""
    kind, values = VARIANTS[name]
    counts = torch.arange(target.info.vocab_size).flip(0) % 7
    config = get_kind(kind).config_class(**values)
    drafter = new_drafter(kind, config, target.info, target.weights, seed, counts)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        if getattr(drafter, "confidence_head", None) is not None:
            drafter.confidence_head.temperatures.copy_(torch.linspace(0.5, 2.0, drafter.depths))
    return drafter.eval()


def save(target: TargetModel, name: str, folder: Path, seed: int = 1) -> Path:
    """The checkpoint of a variant."""
    save_drafter(drafter_of(target, name, seed), folder, target.info)
    return folder


def write(
    target: TargetModel, checkpoint: Path, out: Path, engine: str, **options: Any
) -> ExportNotes:
    """Export a checkpoint."""
    read = prepare(checkpoint, engine)
    facts = Target.of(target_config(target), read.info)
    return export(ExportConfig(engine=engine, **options), read, facts, out)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names, formats and bits."""
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
