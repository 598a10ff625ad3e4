"""Block verification of chains (Sun et al., 2403.10444): the drafts are weighed together.

On average this keeps more drafts than rejection sampling, never fewer, and is optimal among rules
for chains. With x_1..x_D the drafts, p and q the distributions after i drafts, and s_0 = 1:

    s_i = min(1, s_{i-1} p(x_i) / q(x_i))                how much of the drafts' mass the target
                                                         grants
    S_i = sum_x max(s_i p(x) - q(x), 0)                  what is left of the target after them
    h_i = S_i / (S_i + 1 - s_i) for i < D,  h_D = s_D

Each length i passes independently with probability h_i. The longest length that passes is kept, and
the next token is drawn from max(s_i p - q, 0), or from p after the last draft.

The rule may stop at i because of drafts after i. Their noise must not be used again; see
`inference.decoding.sampling.noise`.

Certain drafts: `match` keeps a run of them with its probability under the target, and no rule can
keep it more often. So `match` judges certain drafts, and all drafts at temperature 0.

Legend: B rows, N nodes, D = N - 1 drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from heads.api.tree import DraftShape
from inference.decoding.rules.base import Rule, RuleOptions
from inference.decoding.rules.weights import Chain, ChainRule


class BlockVerification(ChainRule):
    """See the module. Chains only."""

    name: ClassVar[str] = "block"

    def keep(self, chain: Chain, coins: Tensor) -> tuple[Tensor, Tensor | None]:
        shares = granted(chain.p_drafted, chain.q_drafted)
        passed = coins < chances(chain, shares)  # strictly: a chance of 0 never passes
        lengths = torch.arange(1, passed.shape[1] + 1, device=passed.device)
        longest = torch.nn.functional.pad(torch.where(passed, lengths, 0), (1, 0)).amax(1)
        return longest, shares


def granted(p_drafted: Tensor, q_drafted: Tensor) -> Tensor:
    """s_0..s_D [B, N] for the drafts' probabilities [B, D]."""
    shares = [p_drafted.new_ones(p_drafted.shape[0])]
    for p, q in zip(p_drafted.unbind(1), q_drafted.unbind(1), strict=True):
        mass = shares[-1] * p
        whole = (mass >= q) & (mass > 0)
        shares.append(torch.where(whole, 1.0, mass / torch.where(whole | (q <= 0), 1.0, q)))
    return torch.stack(shares, 1)


def chances(chain: Chain, shares: Tensor) -> Tensor:
    """h_1..h_D [B, D] for shares [B, N]."""
    share = shares[:, 1:]
    left = (share[..., None] * chain.p[:, 1:] - chain.q[:, 1:]).clamp(min=0).sum(-1)
    whole = left + (1 - share)
    # 0 / 0 means s = 1 and p = q: the draft is kept
    inner = torch.where(whole > 0, left / torch.where(whole > 0, whole, 1.0), 1.0)
    return torch.cat([inner[:, :-1], share[:, -1:]], 1)


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return BlockVerification()
