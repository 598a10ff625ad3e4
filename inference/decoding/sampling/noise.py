"""The position-keyed noise that target and drafter share, and the other streams.

At every position the target picks `argmax(log p + g)`, where `g` is Gumbel noise keyed by (seed,
absolute position, token id) and `p` the filtered, tempered distribution. This is exact sampling
from `p` (the Gumbel-max trick). As `g` depends only on the key, the pick does not depend on the
number of verified nodes, the batch or the drafter: the same seed gives the same text. A drafter
that ranks its candidates by `log q + g` with the same noise agrees far more often above temperature
0 (Daliri et al., 2408.07978). One seed belongs to one sequence.

Rules that accept by probability need several independent draws per position. Each has a separate
stream, with a seed derived from the sequence's (`Stream`). A position that was drafted but not
committed is drafted again in the next pass. As the rule may have stopped because of the draft that
it then dropped, drawing the new draft with the old noise would bias it. So these streams are also
keyed by the pass: by the position of its root, which differs between passes and does not depend on
the batch. Nodes of one depth share their position, and so the noise that their children are drawn
with. For rules that judge the children of several of these nodes, drafts are also keyed by the node
(`separate`).

Legend: B rows, M positions per row, V vocabulary (V' its drafted part), C columns of coins.
"""

from __future__ import annotations

from enum import IntEnum
from typing import cast

import torch
from torch import Tensor

from inference.decoding.sampling.distribution import (
    SamplingSettings,
    draft_logits,
    shape_logits,
    target_probabilities,
    widest_float,
)
from inference.kernels.reference.noise import GUMBEL_NOISE, NOISE_PICK, at_temperature, noise_bits

_MASK32 = 0xFFFFFFFF
_MASK63 = (1 << 63) - 1
_STREAM_STEP = 0x5851F42D4C957F2D  # odd: different streams get different seeds
_ROOT_STEP = 0x1E3779B97F4A7C15  # odd: different passes get different seeds
_NODE_STEP = 0x2545F4914F6CDD1D  # odd: different nodes of one depth get different seeds


class Stream(IntEnum):
    """What a draw is for. TARGET is plain decoding's noise, which the others never use."""

    TARGET = 0
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3


def stream_seeds(seeds: Tensor, stream: Stream, roots: Tensor | None = None) -> Tensor:
    """The seeds [B] int64 of a stream: the sequence's own for TARGET, derived ones for the others.

    roots [B] int64: the position of each row's root, which also keys the derived streams.
    """
    if stream is Stream.TARGET:
        return seeds
    keys = seeds ^ ((int(stream) * _STREAM_STEP) & _MASK63)
    if roots is not None:
        keys = keys ^ ((roots + 1) * _ROOT_STEP)  # wraps
    return keys & _MASK63


class SharedNoise:
    """The drafters' `Noise` and the target's draws, for the rows of one batch.

    seeds [B] int64 on the decoding device. drafts: the stream that candidates are ranked with; None
    ranks them by log q alone. keeps_logits: see `heads.api.drafter.Noise`; at temperature 0 no rule
    weighs drafts. roots [B] int64: the position of each row's root, the same tensor that the loop
    advances after a pass (`Rows.lengths`). It keys every stream except TARGET; it may be None only
    for rules that draw only from TARGET. separate: the M nodes of a call, which are those of one
    depth whose children are drawn, get separate noise.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        seeds: Tensor,
        vocab_size: int,
        drafts: Stream | None = Stream.TARGET,
        keeps_logits: bool = False,
        roots: Tensor | None = None,
        separate: bool = False,
    ) -> None:
        self.settings = settings
        self.separate = separate
        self.seeds = seeds
        self.roots = roots
        self.drafts = None if settings.greedy else drafts
        self.keeps_logits = keeps_logits and not settings.greedy
        self._all_tokens = torch.arange(vocab_size, device=seeds.device)

    @property
    def mode(self) -> int:
        """Which operations a step has (`inference.decoding.sampling.row_settings`)."""
        return 0

    @property
    def samples(self) -> bool:
        """Whether any row is above temperature 0."""
        return not self.settings.greedy

    @property
    def greedy_rows(self) -> Tensor | None:
        """The rows [B] bool at temperature 0 if rows have separate settings; otherwise None."""
        return None

    def target_probabilities(self, logits: Tensor) -> Tensor:
        """p [B, M, V] for the target's logits [B, M, V]; float32, or float64 for float64 logits."""
        return target_probabilities(logits, self.settings)

    def draft_logits(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """log q + constant [B, M, V] for the drafter's logits [B, M, V']."""
        return draft_logits(logits, self.settings, token_ids, self._all_tokens.shape[0])

    def stream(self, stream: Stream) -> Tensor:
        """The seeds [B] int64 that a stream's draws of this pass are keyed with."""
        return stream_seeds(self.seeds, stream, self.roots)

    def gumbel(
        self, positions: Tensor, token_ids: Tensor | None = None, stream: Stream = Stream.TARGET
    ) -> Tensor:
        """Gumbel noise float32 [B, M, V'] of a stream at `positions` [B, M]; token_ids [V'],
        default all tokens."""
        ids = self._all_tokens if token_ids is None else token_ids
        return cast(Tensor, GUMBEL_NOISE(self.stream(stream), positions, ids))

    def draw(self, scores: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        """Tokens [B, M] with probabilities proportional to exp(scores [B, M, V]), drawn with a
        stream's noise at `positions` [B, M]."""
        return cast(Tensor, NOISE_PICK(scores, positions, self.stream(stream), 1.0))

    def uniforms(self, positions: Tensor, columns: int, stream: Stream = Stream.COIN) -> Tensor:
        """Independent uniform numbers [B, M, C] strictly between 0 and 1, keyed like the noise, in
        the device's widest float dtype."""
        numbers = self._all_tokens.new_ones(columns).cumsum(0)
        bits = noise_bits(self.stream(stream), positions, numbers).to(torch.int64) & _MASK32
        uniform = (bits.to(widest_float(bits.device)) + 0.5) * 2.0**-32
        # float32 rounds the largest ones to 1
        return uniform if uniform.dtype == torch.float64 else uniform.clamp(max=1 - 2.0**-24)

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        if self.settings.greedy:
            return logits.float().log_softmax(-1)
        ranked = at_temperature(logits.float(), self.settings.temperature).log_softmax(-1)
        return ranked if self.drafts is None else ranked + self._draft_noise(positions, token_ids)

    def _draft_noise(self, positions: Tensor, token_ids: Tensor | None) -> Tensor:
        """The Gumbel noise [B, M, V'] that drafts are drawn with."""
        assert self.drafts is not None
        if not self.separate:
            return self.gumbel(positions, token_ids, self.drafts)
        ids, seeds = (
            self._all_tokens if token_ids is None else token_ids,
            self._node_seeds(positions),
        )
        noise = cast(Tensor, GUMBEL_NOISE(seeds, positions.reshape(-1, 1), ids))
        return noise.view(*positions.shape, -1)

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        if self.drafts is None:
            return logits.argmax(-1)
        temperature = self.settings.temperature
        if self.separate:
            return self._separate_pick(logits, positions, temperature, token_ids)
        seeds = self.stream(self.drafts)
        return cast(Tensor, NOISE_PICK(logits, positions, seeds, temperature, token_ids))

    def tempered(self, logits: Tensor) -> Tensor:
        """See `heads.api.drafter.Noise.tempered`."""
        logits = logits.float()
        return logits if self.settings.greedy else at_temperature(logits, self.settings.temperature)

    def _separate_pick(
        self, logits: Tensor, positions: Tensor, temperature: float, token_ids: Tensor | None
    ) -> Tensor:
        """`pick` for nodes with separate noise."""
        seeds, places = self._node_seeds(positions), positions.reshape(-1, 1)
        nodes = logits.flatten(0, 1)[:, None]
        picks = NOISE_PICK(nodes, places, seeds, temperature, token_ids)
        return cast(Tensor, picks.view_as(positions))

    def _node_seeds(self, positions: Tensor) -> Tensor:
        """The seeds [B * M] int64 that the children of the nodes at `positions` [B, M] are drawn
        with; the first node of every row keeps the row's."""
        assert self.drafts is not None
        number = torch.arange(positions.shape[1], device=positions.device)
        keys = self.stream(self.drafts)[:, None] ^ (number * _NODE_STEP)  # wraps
        return (keys & _MASK63).flatten()

    def target_pick(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's choice [B, N] by logits [B, N, V] of tokens at `positions` [B, N]."""
        if self.settings.greedy:
            return logits.argmax(-1)
        temperature = self.settings.temperature
        if self.settings.filters:
            logits, temperature = shape_logits(logits, self.settings), 1.0
        return cast(Tensor, NOISE_PICK(logits, positions, self.seeds, temperature))
