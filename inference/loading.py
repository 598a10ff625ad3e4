"""Loading a target from a Hub id or a folder, and describing it: every way this can go wrong ends in one clear sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import inference.attention as attention
from heads.api.errors import UserError, suggest
from heads.api.target_info import TargetInfo

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLE_BYTES, _SAMPLE_EVERY, _HASH_WHOLE_BELOW = 1 << 16, 1 << 24, 1 << 28


@dataclass(frozen=True)
class TargetConfig:
    """Which target to load, and how."""

    path: str
    """Hub id or local folder of a Hugging Face causal LM with its tokenizer."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); None is the default branch. Ignored for folders."""
    dtype: str = "float32"
    """float64, float32, bfloat16 or float16."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: CUDA when there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""


def pick_device(name: str) -> torch.device:
    """The torch device for a configured name; raises `UserError` for an unknown one or for CUDA where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"target.device '{name}' is not a device. Allowed: auto, cpu, cuda, cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"target.device is '{name}', but no CUDA device is available. Use target.device=cpu.")
    return device


def load_model(config: TargetConfig) -> Any:
    """The frozen model on its device; raises `UserError` when it cannot be found, read, or is no causal LM."""
    if config.dtype not in DTYPES:
        raise UserError(f"target.dtype '{config.dtype}' is unknown.{suggest(config.dtype, DTYPES)}")
    _check_path(config.path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=DTYPES[config.dtype],
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(f"target '{config.path}' cannot be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"target '{config.path}' is incomplete: weights {missing[:4]} are missing from its files.")
    return model.requires_grad_(False).eval().to(pick_device(config.device))


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer; raises `UserError` when it has none."""
    try:
        return AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise UserError(f"target '{config.path}' has no readable tokenizer: {_first_line(error)}") from error


def switch_attention(model: Any) -> None:
    """Make every layer call our attention; raises `UserError` when the architecture does not allow it."""
    try:
        model.set_attn_implementation(attention.NAME)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise UserError(
            f"a {model.config.model_type} model cannot be a target: transformers does not let its attention be replaced "
            f"({_first_line(error)}). Use a model with standard attention (Llama, Qwen, Mistral, Gemma, OLMo, Phi, GPT-2, ...)."
        ) from error


def head_function(model: Any) -> Callable[[Tensor], Tensor]:
    """Post-final-norm states [..., H] -> logits [..., V] as the model itself computes them, with its scaling and soft-capping.

    The head is frozen, but gradients pass through it to the states: drafters that share it train through it.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"a {model.config.model_type} model has no LM head and cannot be a target.")
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    multiply = getattr(config, "logit_scale", None)
    divide = getattr(config, "logits_scaling", None)

    def logits(last_hidden: Tensor) -> Tensor:
        out: Tensor = head(last_hidden)
        if multiply is not None:
            out = out * multiply
        if divide is not None:
            out = out / divide
        return torch.tanh(out / softcap) * softcap if softcap is not None else out

    return logits


def describe(model: Any, tokenizer: Any, config: TargetConfig) -> TargetInfo:
    """The facts of a loaded target; attribute names that families spell differently are settled here."""
    text = model.config.get_text_config()

    def first(*names: str, default: Any = None) -> Any:
        return next((getattr(text, name) for name in names if getattr(text, name, None) is not None), default)

    hidden, heads = first("hidden_size"), first("num_attention_heads")
    if hidden is None or heads is None:
        raise UserError(f"a {text.model_type} model cannot be a target: it has no attention heads to verify drafts with.")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope and "rope_theta" not in rope:  # one entry per layer type
        rope = rope.get("full_attention") or next((part for part in rope.values() if isinstance(part, dict)), {})
    return TargetInfo(
        id=config.path,
        revision=revision_of(model, config),
        model_type=text.model_type,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=hidden,
        num_layers=text.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=hidden // heads),
        intermediate_size=first("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        rms_norm_eps=float(first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-5)),
        rope_theta=float(rope.get("rope_theta", first("rope_theta", default=10000.0))),
        max_position_embeddings=first("max_position_embeddings", default=2048),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of everything that decides how text becomes ids: vocabulary, special tokens."""
    content = [sorted(tokenizer.get_vocab().items()), {k: str(v) for k, v in sorted(tokenizer.special_tokens_map.items())}]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def revision_of(model: Any, config: TargetConfig) -> str:
    """The Hub commit, or a hash of a local folder's weights (whole below 256 MiB a file, sampled every 16 MiB above)."""
    folder = Path(config.path)
    if not folder.is_dir():
        return getattr(model.config, "_commit_hash", None) or config.revision or "unknown"
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= _HASH_WHOLE_BELOW:
                digest.update(file.read())
                continue
            for offset in range(0, size, _SAMPLE_EVERY):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return "sha256:" + digest.hexdigest()[:32]


def _check_path(path: str) -> None:
    """Refuse what can only be a mistyped folder before a Hub lookup turns it into a confusing message."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not path.strip():
        raise UserError("target.path is empty: give a Hub id such as Qwen/Qwen3-8B, or a folder.")
    if looks_local and not Path(path).is_dir():
        raise UserError(f"target folder '{path}' does not exist. Give a folder with config.json, or a Hub id (owner/name).")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(f"target folder '{path}' has no config.json: it is not a Hugging Face model folder.")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


