"""Rollouts: a policy's answers, their cost, and the log-probabilities of their tokens.

Legend: B answers read together, T positions of the longest, N tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion
from inference.decoding.rules.names import AUTO, LOSSLESS
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.processors import Prefix, process
from inference.target.chat import Span
from inference.target.model import TargetModel

READ_TOGETHER = 4096
"""Tokens of a pass that computes log-probabilities, padding included."""


@dataclass(frozen=True)
class Rollout:
    """Answers in the order of their prompts. seconds: of decoding, prefill included; logprobs: of
    every token of every answer, if requested (`token_logprobs`)."""

    completions: tuple[Completion, ...]
    seconds: float
    logprobs: tuple[tuple[float, ...], ...] | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(one.tokens) for one in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tau(self) -> float:
        """Committed tokens per verify pass, over all answers; 1.0 if nothing was verified."""
        passes = [one for completion in self.completions for one in completion.passes]
        return sum(one.committed for one in passes) / len(passes) if passes else 1.0

    def documents(self) -> Iterator[tuple[NDArray[np.int32], list[Span]]]:
        """Prompt and answer of each, as trainings read them, and the answer's span."""
        for one in self.completions:
            if one.tokens:
                whole = np.array([*one.request.tokens, *one.tokens], dtype=np.int32)
                yield whole, [(len(one.request.tokens), len(whole))]


def require_rollouts(decode: DecodeConfig, logprobs: bool) -> None:
    """Raise `UserError` for settings with which answers are not samples of the policy, or have no
    log-probabilities."""
    if decode.rule not in (*LOSSLESS, AUTO):
        raise UserError(
            f"rollouts have to be samples of the policy: decode.rule is one of "
            f"{', '.join(LOSSLESS)} and auto; given: {decode.rule}."
        )
    if logprobs and (decode.temperature == 0 or decode.structure):
        given = "decode.temperature=0" if decode.temperature == 0 else "decode.structure"
        raise UserError(
            f"log-probabilities are those of sampling from the whole vocabulary; with {given} "
            "there are none. Leave out one of them."
        )


@torch.no_grad()
def token_logprobs(
    target: TargetModel, completions: Sequence[Completion], sampling: SamplingSettings
) -> tuple[tuple[float, ...], ...]:
    """The natural logarithm of the probability with which the target, as it is now, samples every
    token of the answers under `sampling` (processors, temperature and filters applied).

    The target reads the answers again as a whole, so the numbers are those of a pass over all of
    their tokens: the decoder's own up to rounding. A filter keeps the token that was sampled, which
    may lie so close to its edge that rounding would remove it.
    """
    found: dict[int, tuple[float, ...]] = {}
    # similar lengths together, which needs the least padding
    order = sorted(range(len(completions)), key=lambda place: _length(completions[place]))
    while order:
        count = max(1, READ_TOGETHER // _length(completions[order[0]]))
        while count > 1 and count * _length(completions[order[:count][-1]]) > READ_TOGETHER:
            count -= 1
        group, order = order[:count], order[count:]
        found |= zip(group, _read(target, [completions[i] for i in group], sampling), strict=True)
    return tuple(found[place] for place in range(len(completions)))


def _read(
    target: TargetModel, group: Sequence[Completion], sampling: SamplingSettings
) -> Iterator[tuple[float, ...]]:
    texts = [[*one.request.tokens, *one.tokens] for one in group]
    width = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])  # [B, T]
    place = torch.arange(width)
    # padding is a separate document, which no token of the answer sees
    lengths = torch.tensor([len(text) for text in texts])[:, None]
    segments = torch.where(place < lengths, 1, 2).int()
    positions = torch.where(place < lengths, place, place - lengths)
    tokens, positions, segments = (x.to(target.device) for x in (tokens, positions, segments))
    _, hidden = target.features(tokens, positions, segments, FeatureSpec(last_hidden=True))
    assert hidden is not None
    for row, one in enumerate(group):
        if not one.tokens:
            yield ()
            continue
        root, end = len(one.request.tokens) - 1, len(texts[row])
        logits = target.weights.logits(hidden[row : row + 1, root : end - 1])
        logits = process(logits, sampling, _prefix(tokens[row : row + 1], root, end))
        chosen = tokens[row, root + 1 : end, None]
        shaped = shape_logits(logits, sampling)[0]  # [N, V]
        sampled = logits[0].to(shaped.dtype).gather(-1, chosen) / sampling.temperature
        shares = shaped.scatter(-1, chosen, sampled).log_softmax(-1).gather(-1, chosen)
        yield tuple(shares[:, 0].tolist())


def _prefix(tokens: Tensor, root: int, end: int) -> Prefix:
    """The text before every token of an answer: a chain after the prompt's last token."""
    tree = TokenTree.chain(end - 2 - root, tokens.device)
    lengths = torch.tensor([root], device=tokens.device)
    return Prefix(tokens[:, :end], lengths, tokens[:, root : end - 1], tree)


def _length(one: Completion) -> int:
    return len(one.request.tokens) + len(one.tokens)
