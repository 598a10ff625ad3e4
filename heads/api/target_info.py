"""The target as a drafter sees it: facts (`TargetInfo`) and frozen weights (`TargetWeights`).

`inference.target.model` fills in the values. A checkpoint stores the facts, so that a drafter
refuses another target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.config import build
from heads.api.errors import UserError

UNKNOWN_REVISION = "unknown"
"""Revision of a Hub model of which no commit is known."""


@dataclass(frozen=True)
class TargetInfo:
    """Facts of one target model, as stored in drafter checkpoints and manifests."""

    id: str
    """Hub id or the path it was loaded from."""
    revision: str
    """Commit hash on the Hub (`UNKNOWN_REVISION` if none is known), or `sha256:` of the weights'
    headers and sizes for a local folder."""
    model_type: str
    tokenizer_hash: str
    """Hash of vocabulary and special tokens: with the same hash, token ids mean the same."""
    vocab_size: int
    """Rows of the LM head (may exceed the tokenizer's length)."""
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    """For a model without attention: the number that its drafters get."""
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TargetInfo:
        """Rebuild from `to_dict`; raises `UserError` when a field is missing or unknown."""
        names, given = {f.name for f in fields(cls)}, set(map(str, values))
        if given != names:
            odd = sorted(names.symmetric_difference(given))
            raise UserError(
                f"the stored target description is not readable: missing or unknown fields {odd}."
            )
        return build(cls, values, "target")

    def require_same(self, other: TargetInfo) -> None:
        """Raise `UserError` unless a drafter made for `self` can serve `other`.

        A moved folder is accepted (the id may differ while revision and tokenizer agree); other
        weights or another vocabulary are not.
        """
        for name in ("tokenizer_hash", "hidden_size", "num_layers", "vocab_size", "revision"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise UserError(
                    f"this drafter was trained for target '{self.id}' with {name} {mine}, but was "
                    f"given '{other.id}' with {name} {theirs}. Load it with the target it was "
                    f"trained for, or train a drafter for '{other.id}'."
                )

    def require_same_sizes(self, other: TargetInfo) -> None:
        """Raise `UserError` unless sizes and tokenizer of `other` are the same."""
        for name in ("tokenizer_hash", "vocab_size", "hidden_size", "num_layers"):
            if getattr(self, name) != getattr(other, name):
                raise UserError(
                    f"the drafter was trained for target '{self.id}' with {name} "
                    f"{getattr(self, name)}; '{other.id}' has {getattr(other, name)}, so its "
                    "weights mean nothing there. Train a fresh drafter."
                )


@dataclass(frozen=True)
class Rotary:
    """A target's rotary positions as its own module computes them, scaling included.

    inverse_frequencies [D / 2] float32; scale: factor on cosine and sine (1 but for YaRN).
    """

    inverse_frequencies: Tensor
    scale: float = 1.0


@dataclass
class TargetWeights:
    """The target's frozen weights that drafters share or start from; not saved with them."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]; the same tensor as `embedding` when tied
    logits: Callable[[Tensor], Tensor]
    """Post-final-norm states [..., H] -> the target's own logits [..., V]."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """Every named tensor of the target, for drafters that copy its layers."""
    rotary: Rotary | None = None
    """Its rotary positions; None when it has none, or several (local and global layers)."""
    windows: tuple[int, ...] = ()
    """Per layer, how many latest positions its attention sees; 0: all. Empty: all, in all
    layers."""
    norm_offset: float = 0.0
    """What the target's norms add to their weights before they multiply by them: 1 in families such
    as Gemma and Qwen3-Next, whose weights are trained around 0."""

    def final_norm(self) -> Tensor | None:
        """The factors [H] of the target's final RMSNorm, as a norm that adds nothing stores them;
        None if the norm does not have Hugging Face's usual name."""
        weight = self.state.get("model.norm.weight")
        return weight if weight is None or not self.norm_offset else weight + self.norm_offset

    def embed(self, tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The embeddings [..., H] of tokens [...], in `dtype` if given."""
        return F.embedding(tokens, self.embedding).to(dtype or self.embedding.dtype)

    def project(self, states: Tensor) -> Tensor:
        """`logits` [..., V] of states [..., H] of any dtype."""
        return self.logits(states.to(self.lm_head.dtype))


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of everything that decides how text becomes ids: vocabulary, special tokens."""
    content = [
        sorted(tokenizer.get_vocab().items()),
        {k: str(v) for k, v in sorted(tokenizer.special_tokens_map.items())},
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
