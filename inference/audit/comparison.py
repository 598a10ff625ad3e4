"""Compares a drafter's answers with those of plain decoding and explains every difference.

If two answers differ, either rounding decided between two tokens with almost equal scores, or there
is a bug. The former is normal in bf16, where a pass over several tokens sums in another order than
a pass over one. To distinguish the two, the answer is replayed token by token through plain
decoding. Where the replay would have picked another token, the target computes the same logits
along two other routes that are mathematically equal: several tokens in one pass, and the whole text
at once. The change of the margin between the two tokens' scores from route to route is the effect
of rounding on this decision. A difference is a near tie if, at every position where the answer
leaves the replay, the margin is at most twice the largest such change; otherwise it is a mismatch.

If the routes' logits differ by more than the number format explains, it is also a mismatch: one of
the routes is wrong. Scores are what the decoder maximises: the logits after the processors, applied
to the answer's own text, with the masks of the request's grammar. On a GPU the replay verifies as
decoding does, with the attention kernel; the whole text at once uses torch's attention.

Legend: V vocabulary, W = V / 32 words of 32 tokens each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.processors import Prefix, process
from inference.decoding.structured.grammars import Grammars
from inference.decoding.structured.matcher import DeadEndError
from inference.decoding.structured.rows import forbid
from inference.kernels.reference.noise import gumbel_noise
from inference.target.model import TargetModel

LARGEST_GAP = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest plausible gap, as a share of the largest logit. The entry of float64 allows for norms and
rotary tables that a family computes in float32.
"""


@dataclass(frozen=True)
class Divergence:
    """One place where an answer differs from plain decoding's pick after the same text.

    place: index in the answer; expected, found: token ids, None after an answer's end; margin: by
    how much plain decoding's scores prefer `expected`, in logits; gap: largest difference of the
    routes' logits; tolerance: the largest margin that rounding explains.
    """

    prompt: int
    place: int
    expected: int | None
    found: int | None
    margin: float
    gap: float
    tolerance: float
    near_tie: bool
    reason: str

    def to_dict(self) -> dict[str, int | float | str | None]:
        """The divergence for JSON, which has no infinity: numbers that are not finite are None."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Divergence:
        """Read the result of `to_dict`."""
        numbers = ("margin", "gap", "tolerance")
        infinite = {key: math.inf for key in numbers if values[key] is None}
        return cls(**{**values, **infinite})


@dataclass
class AuditReport:
    """Counts of compared sequences, and the findings for those that are not identical."""

    sequences: int = 0
    identical: int = 0
    near_ties: int = 0
    mismatches: int = 0
    tokens: int = 0
    """Tokens compared."""
    flips: int = 0
    """Tokens in differing answers that plain decoding would not have picked after the same text."""
    divergences: list[Divergence] = field(default_factory=list)
    """The decisive divergence of each sequence."""
    found: list[Divergence] = field(default_factory=list)
    """Every flip, including those that are not decisive."""

    def counts(self) -> dict[str, int]:
        """The `lossless` block of report.json."""
        names = ("sequences", "identical", "near_ties", "mismatches")
        return {name: getattr(self, name) for name in names}


Known = dict[tuple[Request, tuple[int, ...], int], list[Divergence]]
"""Results of `examine` by (request, answer, width); valid for one target, baseline and sampling."""


def audit(
    target: TargetModel,
    requests: Sequence[Request],
    baseline: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    width: int = 8,
    known: Known | None = None,
    examined: bool = True,
    exact: bool = False,
    chunk: int = DecodeConfig.prefill_chunk,
) -> AuditReport:
    """Compare `answers` with `baseline`, both one list of new tokens per request, and examine the
    differences.

    width: tokens per pass of the second route; the number of nodes of the drafter's verifications
    is a good choice. known: answers that were examined before, for callers that audit several
    drafters against the same baseline; extended in place. examined: if False, differing answers
    count as mismatches without the minutes of examination, for rules that do not promise equal
    text. exact: the answers and the baseline were decoded with `decode.exact`. chunk: their
    `decode.prefill_chunk`, since the bits of a prompt's states depend on it.
    """
    report = AuditReport()
    known = {} if known is None else known
    for request, plain, answer in zip(requests, baseline, answers, strict=True):
        report.sequences += 1
        report.tokens += len(answer)
        if list(plain) == list(answer):
            report.identical += 1
            continue
        if not examined:
            report.mismatches += 1
            continue
        # repeats of a prompt differ in the same way: examine once
        key = (request, tuple(answer), width)
        if key not in known:
            with target.computing(exact):
                known[key] = examine(target, request, plain, answer, sampling, width, chunk)
        found = known[key]
        report.flips += len(found)
        report.found += found
        decisive = next((item for item in found if not item.near_tie), found[0])
        report.divergences.append(decisive)
        report.near_ties += decisive.near_tie
        report.mismatches += not decisive.near_tie
    return report


def examine(
    target: TargetModel,
    request: Request,
    plain: Sequence[int],
    answer: Sequence[int],
    sampling: SamplingSettings,
    width: int,
    chunk: int = DecodeConfig.prefill_chunk,
) -> list[Divergence]:
    """Every place where `answer` leaves plain decoding, the first difference included. chunk: see
    `audit`."""
    pairs = list(zip_longest(plain, answer))
    start = next(place for place, (one, other) in enumerate(pairs) if one != other)
    ended = answer and (answer[-1] in target.eos_token_ids or len(answer) == request.max_new_tokens)
    if None in pairs[start] or not ended:
        reason = (
            f"{len(answer)} tokens where plain decoding gave {len(plain)}: one ended at the "
            "wrong place"
        )
        return [Divergence(request.index, start, *pairs[start], math.inf, 0.0, 0.0, False, reason)]
    replay = _Replay(target, request, list(answer), sampling, chunk)
    divergences = []
    for place, logits in enumerate(replay.steps()):
        if place < start:
            continue
        expected = plain[start] if place == start else replay.pick(logits, place)
        if expected != answer[place]:
            divergences.append((place, expected, logits))
    return [replay.judge(place, expected, logits, width) for place, expected, logits in divergences]


def flips_alone(
    target: TargetModel,
    requests: Sequence[Request],
    answers: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    width: int,
    exact: bool = False,
    chunk: int = DecodeConfig.prefill_chunk,
) -> tuple[int, int]:
    """How often the target without a drafter picks another token when it reads its own plain
    answers `width` tokens at a time. Returns the number of tokens picked again, and of those that
    differ.

    A drafter's verification adds its own flips to these. exact, chunk: see `audit`.
    """
    tokens, flips = 0, 0
    for request, answer in zip(requests, answers, strict=True):
        replay = _Replay(target, request, list(answer), sampling, chunk)
        with target.computing(exact):
            picks = [replay.pick(logits, place) for place, logits in enumerate(replay.steps(width))]
        tokens += len(picks)
        flips += sum(pick != token for pick, token in zip(picks, answer, strict=True))
    return tokens, flips


@dataclass
class _Replay:
    """One answer, recomputed by the target along several routes."""

    target: TargetModel
    request: Request
    answer: list[int]
    sampling: SamplingSettings
    chunk: int

    def __post_init__(self) -> None:
        tokens, self.prompt = self.request.tokens, len(self.request.tokens)
        self.text = torch.tensor([[*tokens, *self.answer]], device=self.target.device)
        self.cache = self.target.new_cache(1, self.text.shape[1] + 1)
        self.masks = self._masks()

    def _masks(self) -> list[Tensor]:
        """The tokens [W] int32 that the request's grammar allows before every token of the answer;
        empty without one, and none behind a token that it does not allow."""
        if self.request.constraint is None:
            return []
        matcher = Grammars.of(self.target).matcher(self.request.constraint)
        found = []
        for token in self.answer:
            words = torch.zeros(1, -(-self.target.info.vocab_size // 32), dtype=torch.int32)
            matcher.masks(words, [token], [[]])
            found.append(words[0].to(self.target.device))
            try:
                matcher.accept([token])
            except DeadEndError:
                break
        return found

    @torch.no_grad()
    def steps(self, width: int = 1) -> Iterator[Tensor]:
        """Logits [V] before every token of the answer, from passes over `width` of its tokens; with
        width 1 they are those of plain decoding."""
        yield self._read(self.prompt)
        for first in range(1, len(self.answer), width):
            yield from self._verify(first, min(width, len(self.answer) - first), commit=True)

    def _read(self, count: int) -> Tensor:
        """Logits [V] after the first `count` tokens of the text, from a new prefill in the chunks
        of decoding."""
        length = torch.tensor([count], device=self.target.device)
        row = torch.zeros(1, dtype=torch.int64, device=self.target.device)
        text = self.text[:, :count]
        needs = FeatureSpec()
        logits, _ = self.target.prefill(self.cache, row, text, length, needs, self.chunk)
        return logits[0]

    def _verify(self, place: int, width: int, commit: bool = False) -> Tensor:
        """Logits [width, V] before the answer's tokens from `place` on, from one pass over the
        `width` tokens that precede them."""
        device, before = self.target.device, self.prompt + place - 1
        tokens = self.text[:, before : before + width]
        lengths = torch.tensor([before], device=device)
        tree = TokenTree.chain(width - 1, device)
        longest = None if self.target.lengths_on_device else before
        logits, _, _ = self.target.verify(self.cache, tokens, tree, lengths, longest, FeatureSpec())
        if commit:
            path, whole = torch.arange(width, device=device)[None], torch.full_like(lengths, width)
            self.cache.commit(tree, lengths, path, whole - 1, whole)
        return logits[0]

    def _at_once(self, place: int) -> Tensor:
        """Logits [V] before answer token `place`, from one causal pass over the whole text."""
        hidden = self.target.last_states(self.text[:, : self.prompt + place])
        return self.target.weights.logits(hidden[:, -1])[0]

    def scores(self, logits: Tensor, place: int) -> Tensor:
        """The scores that the target maximises [V], in units of logits: the logits after the
        processors, plus the noise times the temperature."""
        device, end = logits.device, self.prompt + place
        root = TokenTree.chain(0, device)
        lengths = torch.tensor([end - 1], device=device)
        prefix = Prefix(self.text[:, :end], lengths, self.text[:, end - 1 : end], root)
        logits = process(logits[None, None], self.sampling, prefix)
        if place < len(self.masks):
            logits = forbid(logits, self.masks[place][None, None])
        logits = logits[0, 0]
        if self.sampling.greedy:
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        seeds = torch.tensor([self.request.seed], dtype=torch.int64, device=device)
        position = torch.tensor([[end]], device=device)
        noise = gumbel_noise(seeds, position, torch.arange(logits.shape[-1], device=device))[0, 0]
        return (shape_logits(logits, self.sampling) + noise) * self.sampling.temperature

    def margin(self, logits: Tensor, place: int, expected: int) -> float:
        """By how much the scores prefer `expected` to the answer's token at `place`."""
        scores = self.scores(logits, place)
        return float(scores[expected] - scores[self.answer[place]])

    def pick(self, logits: Tensor, place: int) -> int:
        return int(self.scores(logits, place).argmax())

    @torch.no_grad()
    def judge(self, place: int, expected: int, logits: Tensor, width: int) -> Divergence:
        """The divergence at `place`, where the answer's token is not `expected`, and whether the
        gap explains it."""
        found = self.answer[place]
        routes = [self._at_once(place)]
        if place > 1:
            width = min(width, place)
            if self.target.recurrent:  # a state cannot go back to an earlier token
                self._read(self.prompt + place - width)
            routes.append(self._verify(place - width + 1, width)[-1])
        margin = self.margin(logits, place, expected)
        moves = [abs(self.margin(route, place, expected) - margin) for route in routes]
        gap = max(float((route.double() - logits.double()).abs().max()) for route in routes)
        scale = max(1.0, float(logits.abs().max()))
        # If the routes happen to agree, the rounding of a logit replaces their change. A penalty
        # multiplies logits, and so their errors.
        penalty = max(self.sampling.repetition_penalty, 1 / self.sampling.repetition_penalty)
        pair = float(logits[[expected, found]].abs().max())
        rounding = penalty * torch.finfo(logits.dtype).eps * max(1.0, pair)
        tolerance = 2 * max([rounding, *(move for move in moves if math.isfinite(move))])
        near = abs(margin) <= tolerance
        # a filter or a bad word removed one token: it may be a tie at the filter's edge
        if math.isinf(margin):
            removed = found if margin > 0 else expected
            near = any(self.pick(route, place) == removed for route in routes)
        if gap > LARGEST_GAP[logits.dtype] * scale:
            near = False
            reason = (
                f"passes over one and over several tokens differ by {gap:.3g} logits: more "
                "than rounding"
            )
        elif near:
            reason = "within the numerical gap"
        else:
            wrong = "not what" if margin > 0 else "what, unlike the baseline's token,"
            reason = f"{wrong} the target picks after the same text"
        index = self.request.index
        return Divergence(index, place, expected, found, margin, gap, tolerance, near, reason)
