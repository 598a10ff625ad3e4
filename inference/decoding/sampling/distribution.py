"""How the target's distribution is shaped: processors, temperature, filters.

The order is that of `generate` in transformers. Logit bias, repetition penalty and bad words change
the logits (`inference.decoding.sampling.processors`, also at temperature 0); then come temperature,
top-k, top-p and min-p (`shape_logits`).

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor

from heads.api.config import Fraction, Size, Temperature, TokenId, UnitInterval, config
from heads.api.errors import UserError
from heads.kernels.dispatch import choose
from inference.kernels.reference.filters import FILTER_LOGITS
from inference.kernels.reference.noise import at_temperature

Bias = Annotated[float, Ge(-1e6), Le(1e6)]


@config("decode")
@dataclass(frozen=True)
class SamplingSettings:
    """The settings of the target's distribution; drafts are ranked by the drafter's."""

    temperature: Temperature = 0.0
    """0 picks the most likely token; 1 samples the model's own distribution."""
    top_k: Size = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Fraction = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this share; 1 keeps all."""
    min_p: UnitInterval = 0.0
    """Keep tokens with at least this share of the most likely token's probability; 0 keeps all."""
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    """For tokens of the text, divide a positive logit by this and multiply a negative one; 1:
    off."""
    logit_bias: tuple[tuple[TokenId, Bias], ...] = ()
    """Pairs (token id, value added to its logit), each token at most once."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences that never appear in full: if the text ends with all but the last token, the
    last one is forbidden. A sequence may be an end-of-text token; answers then end at their length
    limit (transformers ignores such a word)."""

    def __post_init__(self) -> None:
        biased = [token for token, _ in self.logit_bias]
        checks = {
            "logit_bias": (
                len(set(biased)) == len(biased),
                "pairs of a token id (each once) and a number, such as [[17, -5.0]]; to forbid a "
                "token use decode.bad_words",
            ),
            "bad_words": (
                all(self.bad_words),
                "lists of at least one token id, such as [[5], [8, 9]]",
            ),
        }
        for name, (fine, allowed) in checks.items():
            if not fine:
                raise UserError(f"decode.{name} must be {allowed}; given: {getattr(self, name)}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether any token is removed from the target's distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def uses_prefix(self) -> bool:
        """Whether a node's logits depend on the text before it."""
        return self.repetition_penalty != 1 or any(len(word) > 1 for word in self.bad_words)

    @property
    def changes_logits(self) -> bool:
        """Whether `inference.decoding.sampling.processors` has anything to do."""
        return self.repetition_penalty != 1 or bool(self.logit_bias) or bool(self.bad_words)


FILTER_BYTES = 40
"""Bytes per logit that a filter holds at once: tempered logits, sorted logits with their int64
places, probabilities, their sums with a copy, the mask of what is removed, and the result; sums in
float32."""


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it: Apple's MPS and some of Intel's XPUs."""
    return torch.float64 if _has_float64(device) else torch.float32


def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def pick_bytes(settings: SamplingSettings, own: bool = False) -> int:
    """Bytes per logit [.., V] that picking a token takes besides the logits in float32. own: rows
    have separate settings, which may filter."""
    return FILTER_BYTES if own or (settings.filters and not settings.greedy) else 0


def shape_logits(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Filtered, tempered logits [..., V] (at least float32; removed: -inf), temperature > 0.

    Order as in common engines: temperature, then top-k, top-p and min-p. Tokens of equal logits are
    kept or removed together.
    """
    scaled = at_temperature(logits, settings.temperature)
    if not settings.filters:
        return scaled
    vocab = scaled.shape[-1]
    if choose(FILTER_LOGITS, scaled.device, scaled.dtype).implementation == "triton":
        flat, one = scaled.reshape(1, -1, vocab), scaled.new_ones(1)
        log_min_p = math.log(settings.min_p) if settings.min_p > 0 else -math.inf
        given = one.long() * (settings.top_k or vocab), one * settings.top_p, one * log_min_p
        return cast(Tensor, FILTER_LOGITS(flat, *given)).view_as(scaled)
    return _filtered(scaled, settings)


def _filtered(scaled: Tensor, settings: SamplingSettings) -> Tensor:
    """`FILTER_LOGITS` with the same settings for all rows; it sorts only for top-p."""
    if settings.top_k and settings.top_k < scaled.shape[-1]:
        kth = scaled.topk(settings.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    if settings.top_p < 1:
        ordered = scaled.sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        kept = (before < settings.top_p).sum(-1, keepdim=True).clamp(min=1)
        scaled = scaled.masked_fill(scaled < ordered.gather(-1, kept - 1), float("-inf"))
    if settings.min_p > 0:
        floor = scaled.amax(-1, keepdim=True) + math.log(settings.min_p)
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    return scaled


def target_probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """p [..., V] for the target's logits [..., V]; float32, or float64 for float64 logits."""
    return shape_logits(logits, settings).softmax(-1)


def draft_logits(
    logits: Tensor, settings: SamplingSettings, token_ids: Tensor | None, vocab_size: int
) -> Tensor:
    """log q + constant [..., V] for the drafter's logits [..., V']; -inf at other tokens.

    The result is at least float32, as drafts are drawn in it, not from a q rounded to bfloat16.
    """
    scaled = at_temperature(logits, settings.temperature)
    return over_vocabulary(scaled, token_ids, vocab_size)


def over_vocabulary(scores: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Scores [..., V] of drafted tokens' [..., V'], -inf at the others."""
    if token_ids is None:
        return scores
    whole = scores.new_full((*scores.shape[:-1], vocab_size), float("-inf"))
    return whole.index_copy(-1, token_ids, scores)
