"""Log-probabilities of committed tokens and of the most likely tokens in their place, on request.

They are the target's: the log-softmax of its logits as they leave the model, before bias, penalties
and masks, temperature and filters, as in OpenAI's API and vLLM (`raw_logprobs`). So they depend
only on the text; no drafter, rule or sampling setting changes them.

A verification computes the logits of every node. The log-probabilities of the committed path are
computed from them on the device, in fixed shapes, and copied to the host with the tokens. Those of
a prompt are computed from the hidden states of its prefill.

Legend: B rows, P places (a prompt's, or a path's D+1), T tokens of a prompt, H hidden, V
vocabulary, K = min(`MOST_TOP`, V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_TOP = 20
"""Most tokens per place that a request can ask for; a step always computes this many."""
PROMPT_PLACES = 256
"""Places of a prompt whose logits are in memory at once."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability, and the most likely tokens in its place with their
    log-probabilities, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Logprobs:
    """The log-probabilities that a request asks for, filled while it is decoded.

    most: how many of the most likely tokens, up to `MOST_TOP`; of_prompt: whether the prompt's
    tokens are included. prompt: those of the prompt's tokens from the second on (the first has no
    distribution); answer: those of all committed tokens.
    """

    most: int
    of_prompt: bool = False
    prompt: list[TokenLogprobs] = field(default_factory=list)
    answer: list[TokenLogprobs] = field(default_factory=list)


def columns(vocab_size: int) -> int:
    """Numbers per place: 2 K + 1."""
    return 2 * min(MOST_TOP, vocab_size) + 1


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Packed log-probabilities int64 [..., P, 2 K + 1] of logits [..., P, V] and the tokens
    [..., P] in their place: the K most likely tokens, then the log-probabilities of the token and
    of each of these, as bits of float32."""
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    best = logs.topk(min(MOST_TOP, logs.shape[-1]), dim=-1)
    values = torch.cat([logs.gather(-1, tokens[..., None]), best.values], -1).float()
    return torch.cat([best.indices, values.contiguous().view(torch.int32).to(torch.int64)], -1)


def read_logprobs(
    numbers: Sequence[Sequence[int]], tokens: Sequence[int], most: int
) -> list[TokenLogprobs]:
    """Unpack the numbers [P][2 K + 1] of `token_logprobs` for the first len(tokens) places."""
    found = []
    for row, token in zip(numbers, tokens, strict=False):
        kept = len(row) // 2
        bits = torch.tensor(row[kept:], dtype=torch.int32)
        own, *best = bits.view(torch.float32).tolist()
        found.append(TokenLogprobs(token, own, tuple(zip(row[:most], best, strict=False))[:most]))
    return found


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Sequence[int], most: int
) -> list[TokenLogprobs]:
    """Log-probabilities of a prompt's tokens [T] after the first. head: maps hidden states to
    logits; hidden [T, H]: the last hidden state of every place."""
    found: list[TokenLogprobs] = []
    for begin in range(0, len(tokens) - 1, PROMPT_PLACES):
        following = list(tokens[begin + 1 : begin + 1 + PROMPT_PLACES])
        logits = head(hidden[begin : begin + len(following)])
        numbers = token_logprobs(logits, torch.tensor(following, device=hidden.device))
        found += read_logprobs(numbers.tolist(), following, most)
    return found
