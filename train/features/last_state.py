"""The output of an engine's last layer, which is the stream before the final norm, and the check of
a document by it.

With an answer, an engine returns a token's log-probability. The state before that token, through
the target's final norm and LM head, must give the same; states of another text, another model or
another layer do not.

Legend: H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.api.errors import UserError
from inference.target.model import TargetModel

LOGPROB_GAP = {torch.float64: 1e-3, torch.float32: 1e-3}
LARGEST_GAP = 0.5
"""Tolerance between the engine's log-probability and ours, by the target's dtype; 16 bits: the
largest."""


def normed(target: TargetModel, states: Tensor) -> Tensor:
    """Last hidden states [..., H] of the stream after the last layer. Raises `UserError` for a
    target whose final norm is not known."""
    if target.final_norm is None:
        raise UserError(
            f"the final norm of a {target.info.model_type} model is not known here, and "
            "vLLM leaves states before it. Use features=online, store, remote or group."
        )
    out: Tensor = target.final_norm(states)
    return out


@torch.no_grad()
def gap(target: TargetModel, state: Tensor, token: int, logprob: float) -> float:
    """`gap_of` a state [H] of the stream after the last layer."""
    return gap_of(target, normed(target, state[None].to(target.device))[0], token, logprob)


@torch.no_grad()
def gap_of(target: TargetModel, last_hidden: Tensor, token: int, logprob: float) -> float:
    """The distance between the log-probability that a last hidden state [H] gives to the token
    after it and an engine's; NaN for a token outside the vocabulary."""
    logits = target.weights.logits(last_hidden[None].to(target.device))
    if not 0 <= token < logits.shape[-1]:
        return float("nan")
    return abs(float(logits[0].float().log_softmax(-1)[token]) - logprob)


def agrees(target: TargetModel, found: float) -> bool:
    """Whether rounding in the target's dtype explains a `gap`."""
    return found <= LOGPROB_GAP.get(target.dtype, LARGEST_GAP)
