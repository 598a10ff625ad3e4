"""Sampling settings per row: requests of different temperature and filters in one batch.

A server's requests have separate settings. The numbers that a step needs are in tensors with one
entry per row, so that a step has the same operations for any rows. The picks equal those of
`SharedNoise` with the row's settings, bit for bit: the operations and their order are the same,
with the row's number instead of a constant (`tests/inference/decoding/test_ragged_batch.py`).

The host's knowledge saves work. `mode` says whether any row samples, and whether any row filters; a
step, and a captured graph, belongs to one mode. If steps are launched one by one on a CPU, only the
rows that need it are processed.

Legend: B rows, R some of them, M positions per row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import cast

import torch
from torch import Tensor

from heads.api.errors import UserError
from inference.decoding.sampling.distribution import SamplingSettings, over_vocabulary, widest_float
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.kernels.reference.filters import FILTER_LOGITS
from inference.kernels.reference.noise import NOISE_PICK

GREEDY, SAMPLED, FILTERED = 0, 1, 2
"""What a batch needs: the best token, noise, or filters; each includes the one before it."""
OWN = ("temperature", "top_k", "top_p", "min_p")
"""The settings that a request may change; all others are the engine's."""
COLUMNS = 5


class RowSettings:
    """The settings of B rows. values [B, 5] in the device's widest float dtype: temperature (1 for
    greedy rows), whether the row samples, top-k, top-p, log of min-p.

    engine: the settings that all rows must share except for `OWN`. static: steps must not depend on
    which rows hold which requests, only on `mode` (captured or compiled steps).
    """

    def __init__(
        self,
        rows: int,
        engine: SamplingSettings,
        vocab_size: int,
        device: torch.device,
        static: bool,
    ) -> None:
        self.engine, self.vocab_size, self.static = engine, vocab_size, static
        self.values = torch.zeros(rows, COLUMNS, dtype=widest_float(device), device=device)
        self.held: list[SamplingSettings] = [engine] * rows
        self.mode = GREEDY
        # rows [R] int64 that sample, or have filters; None: all rows (others are masked)
        self.samples: Tensor | None = None
        self.filters: Tensor | None = None
        self.put(list(range(rows)), self.held)
        self.arrange(range(rows))

    def put(self, rows: Sequence[int], settings: Sequence[SamplingSettings]) -> None:
        """Give `rows` their settings. Raises `UserError` if they change settings of the engine."""
        for row, item in zip(rows, settings, strict=True):
            check_own(item, self.engine)
            self.held[row] = item
        rows_of = [_numbers(item, self.vocab_size) for item in settings]
        # converted before it is moved: the device may not have the host's dtype
        numbers, device = torch.tensor(rows_of, dtype=self.values.dtype), self.values.device
        self.values[torch.tensor(list(rows), device=device)] = numbers.to(device)

    def move(self, source: int, target: int) -> None:
        """Copy a row's settings to another row."""
        self.held[target] = self.held[source]
        self.values[target] = self.values[source]

    def arrange(self, rows: Sequence[int]) -> None:
        """Set the rows that the next step decodes: sets `mode`, `samples` and `filters`."""
        sampled = [row for row in rows if not self.held[row].greedy]
        filtered = [row for row in sampled if self.held[row].filters]
        self.mode = FILTERED if filtered else SAMPLED if sampled else GREEDY
        if self.static:
            return
        everyone = len(rows) == (max(rows) + 1 if rows else 0)

        def subset(some: list[int]) -> Tensor | None:
            whole = everyone and len(some) == len(rows)
            return None if whole else torch.tensor(some, device=self.values.device)

        self.samples, self.filters = subset(sampled), subset(filtered)

    def first(self, count: int) -> RowSettings:
        """The first `count` rows as views of these settings. Call `arrange` on the result."""
        return self._part(self.values[:count], self.held)

    def at(self, rows: Sequence[int]) -> RowSettings:
        """Copies of the settings of `rows`, arranged for all of them."""
        index = torch.tensor(list(rows), device=self.values.device)
        part = self._part(self.values[index], [self.held[row] for row in rows])
        part.arrange(range(len(rows)))
        return part

    def _part(self, values: Tensor, held: list[SamplingSettings]) -> RowSettings:
        part = copy(self)
        part.values, part.held, part.samples, part.filters = values, held, None, None
        return part

    # What a step computes

    def at_temperature(self, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """logits [R, M, V] / temperature, at least float32. rows [R] int64: their rows; None:
        all."""
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return scaled / self._column(0, rows, scaled)

    def sampled(self, rows: Tensor | None = None) -> Tensor:
        """Whether rows sample [R, 1, 1] bool."""
        return self._column(1, rows, self.values) > 0

    def filtered(self, scaled: Tensor, rows: Tensor | None = None) -> Tensor:
        """Tempered logits [R, M, V] with removed tokens at -inf:
        `inference.decoding.sampling.distribution.shape_logits`, row by row."""
        values = self.values if rows is None else self.values[rows]
        top_p, log_min_p = (values[:, number].to(scaled.dtype) for number in (3, 4))
        return cast(Tensor, FILTER_LOGITS(scaled, values[:, 2].long(), top_p, log_min_p))

    def _column(self, number: int, rows: Tensor | None, like: Tensor) -> Tensor:
        """One number per row, [R, 1, 1], in the dtype of `like`."""
        column = self.values[:, number]
        return (column if rows is None else column[rows]).to(like.dtype)[:, None, None]


def check_own(item: SamplingSettings, engine: SamplingSettings) -> None:
    """Raise `UserError` if a request's settings differ from the engine's in more than `OWN`."""
    for name in ("repetition_penalty", "logit_bias", "bad_words"):
        if getattr(item, name) != getattr(engine, name):
            raise UserError(
                f"a request cannot bring a {name} of its own; given {getattr(item, name)}, the "
                f"engine has {getattr(engine, name)}. Requests may set {', '.join(OWN)}."
            )


def _numbers(item: SamplingSettings, vocab_size: int) -> tuple[float, ...]:
    """A row of `RowSettings.values`; a setting that is off has a number that removes nothing."""
    return (
        item.temperature or 1.0,
        0.0 if item.greedy else 1.0,
        min(item.top_k, vocab_size) if item.top_k else vocab_size,
        item.top_p if item.top_p < 1 else math.inf,
        math.log(item.min_p) if item.min_p > 0 else -math.inf,
    )


class RowNoise(SharedNoise):
    """`SharedNoise` for rows with separate settings."""

    def __init__(
        self,
        rows: RowSettings,
        seeds: Tensor,
        vocab_size: int,
        drafts: Stream | None = Stream.TARGET,
        keeps_logits: bool = False,
        roots: Tensor | None = None,
        separate: bool = False,
    ) -> None:
        super().__init__(rows.engine, seeds, vocab_size, None, False, roots, separate)
        self.rows, self.drafts, self.keeps_logits = rows, drafts, keeps_logits

    @property
    def mode(self) -> int:
        return self.rows.mode

    @property
    def samples(self) -> bool:
        return self.mode != GREEDY

    @property
    def greedy_rows(self) -> Tensor | None:
        return ~self.rows.sampled()[:, 0, 0]

    def target_probabilities(self, logits: Tensor) -> Tensor:
        """See `SharedNoise.target_probabilities`; temperature 0 is treated as 1."""
        scaled = self.rows.at_temperature(logits)
        if self.mode == FILTERED:
            scaled = self.rows.filtered(scaled)
        return scaled.softmax(-1)

    def draft_logits(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """See `SharedNoise.draft_logits`; temperature 0 is treated as 1."""
        return over_vocabulary(self.rows.at_temperature(logits), token_ids, self.rows.vocab_size)

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        if self.mode == GREEDY:
            return logits.float().log_softmax(-1)
        ranked = self.rows.at_temperature(logits.float()).log_softmax(-1)
        if self.drafts is None:
            return ranked
        noise = self._draft_noise(positions, token_ids)
        return ranked + torch.where(self.rows.sampled(), noise, 0.0)

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        if self.drafts is None or self.mode == GREEDY:
            return logits.argmax(-1)
        if self.separate:
            picks = self._separate_pick(self.rows.at_temperature(logits), positions, 1.0, token_ids)
            return torch.where(self.rows.sampled()[..., 0], picks, logits.argmax(-1))
        return self._noisy(logits, positions, self.stream(self.drafts), token_ids)

    def tempered(self, logits: Tensor) -> Tensor:
        return logits.float() if self.mode == GREEDY else self.rows.at_temperature(logits.float())

    def target_pick(self, logits: Tensor, positions: Tensor) -> Tensor:
        """See `SharedNoise.target_pick`."""
        if self.mode == GREEDY:
            return logits.argmax(-1)
        if self.mode == SAMPLED:
            return self._noisy(logits, positions, self.seeds)
        subset = self.rows.filters
        if subset is None:
            filtered = self.rows.filtered(self.rows.at_temperature(logits))
            return self._or_best(NOISE_PICK(filtered, positions, self.seeds, 1.0), logits)
        picks = self._noisy(logits, positions, self.seeds)
        part = self.rows.filtered(self.rows.at_temperature(logits[subset], subset), subset)
        picks[subset] = NOISE_PICK(part, positions[subset], self.seeds[subset], 1.0)
        return picks

    def _noisy(
        self, logits: Tensor, positions: Tensor, seeds: Tensor, token_ids: Tensor | None = None
    ) -> Tensor:
        """Picks [B, M] with noise in the rows that sample, without filters."""
        subset = self.rows.samples
        if subset is None:
            noisy = NOISE_PICK(self.rows.at_temperature(logits), positions, seeds, 1.0, token_ids)
            return self._or_best(noisy, logits)
        picks = logits.argmax(-1)
        part = self.rows.at_temperature(logits[subset], subset)
        picks[subset] = NOISE_PICK(part, positions[subset], seeds[subset], 1.0, token_ids)
        return picks

    def _or_best(self, picks: Tensor, logits: Tensor) -> Tensor:
        """`picks` [B, M] in rows that sample, the best token in others. If not `static`, all rows
        here sample."""
        if not self.rows.static:
            return picks
        return torch.where(self.rows.sampled()[..., 0], picks, logits.argmax(-1))
