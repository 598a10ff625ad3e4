"""From logits to the target's pick: temperature, filters and the position-keyed noise that target and drafter share.

At every position the target picks `argmax(log p + g)` where `g` is Gumbel noise keyed by (seed, absolute position, token id) and
`p` the filtered, tempered distribution. That is exact sampling from `p` (the Gumbel-max trick), and because nothing but the key
enters `g`, the pick does not depend on how many nodes were verified, in which batch, or by which drafter: the same seed gives the
same text. A drafter that ranks its candidates by `log q + g` with the same noise agrees far more often at temperature above 0
(Daliri et al., 2408.07978). One seed belongs to one sequence.

Legend: B rows, M positions per row, V vocabulary (V' its drafted part).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.errors import UserError

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingSettings:
    """How the target's distribution is shaped. Filters act on the target only; drafts are ranked by their own distribution."""

    temperature: float = 0.0
    """0 picks the most likely token; 1 samples the model's own distribution."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this share; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the most likely one; 0 keeps all."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
        }
        for name, (fine, allowed) in checks.items():
            if not fine:
                raise UserError(f"decode.{name} must be {allowed}; given: {getattr(self, name)}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def shape_logits(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Filtered and tempered logits [..., V] (at least float32; removed tokens are -inf). Temperature must be above 0.

    Order as in common engines: temperature first, then top-k, top-p and min-p on the tempered distribution.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / settings.temperature
    if settings.top_k and settings.top_k < scaled.shape[-1]:
        kth = scaled.topk(settings.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    if settings.top_p < 1:
        ordered, index = scaled.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # mass of the strictly better tokens: the first token always stays
        removed = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, index, before >= settings.top_p)
        scaled = scaled.masked_fill(removed, float("-inf"))
    if settings.min_p > 0:
        floor = scaled.amax(-1, keepdim=True) + torch.log(scaled.new_tensor(settings.min_p))
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    return scaled


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer on int32 tensors (two multiply-xorshift rounds); wraps like unsigned arithmetic."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x21F0AAAD
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 values as int32 with the same bit pattern."""
    x = x & _MASK32
    return torch.where(x > 0x7FFFFFFF, x - (1 << 32), x).to(torch.int32)


def noise_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits per (row, position, token) as int32 [B, M, V'].

    seeds [B] int64 (non-negative), positions [B, M] int64, token_ids [V'] int64. The 64-bit seed and the position make two
    32-bit keys; each token id passes two keyed mixing rounds. Kernels must reproduce these bits exactly.
    """
    low, high = _low32(seeds)[:, None], _low32(seeds >> 32)[:, None]
    where = _low32(positions)
    key_a = _mix(where ^ _mix(low ^ 0x3C6EF372))
    key_b = _mix(key_a ^ _mix(high + 0x1B873593) ^ (where * 0x2545F491))
    tokens = _low32(token_ids * 0x9E3779B1)
    return _mix(_mix(tokens ^ key_a[..., None]) + key_b[..., None])


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [B, M, V'] from `noise_bits`: g = -log(-log(1 - v)) with v uniform in (0, 1).

    Winners are large g, that is small v, where float32 keeps full relative precision; v is capped below 1 so that g is finite.
    """
    unsigned = noise_bits(seeds, positions, token_ids).to(torch.int64) & _MASK32
    v = ((unsigned.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


class SharedNoise:
    """The `Noise` that drafters see: the target's own for these rows, or none (`share=False`: drafts ranked by log q alone).

    seeds [B] int64 on the decoding device.
    """

    def __init__(self, settings: SamplingSettings, seeds: Tensor, vocab_size: int, share: bool = True) -> None:
        self.settings = settings
        self.seeds = seeds
        self.shares = share and not settings.greedy
        self._all_tokens = torch.arange(vocab_size, device=seeds.device)

    def _noise(self, positions: Tensor, token_ids: Tensor | None) -> Tensor:
        return gumbel_noise(self.seeds, positions, self._all_tokens if token_ids is None else token_ids)

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See `heads.api.drafter.Noise.scores`."""
        if self.settings.greedy:
            return logits.float().log_softmax(-1)
        ranked = (logits.float() / self.settings.temperature).log_softmax(-1)
        return ranked + self._noise(positions, token_ids) if self.shares else ranked

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See `heads.api.drafter.Noise.pick`."""
        if not self.shares:
            return logits.argmax(-1)
        return (logits.float() / self.settings.temperature + self._noise(positions, token_ids)).argmax(-1)

    def target_pick(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's choice [B, N] at nodes whose next token stands at `positions` [B, N]; logits [B, N, V]."""
        if self.settings.greedy:
            return logits.argmax(-1)
        return (shape_logits(logits, self.settings) + self._noise(positions, None)).argmax(-1)
