"""Mamba-2's recurrence: a matrix per head that decays by a number per token (2405.21060).

With S [s, p] the state, A < 0 a head's rate and dt a token's step:

    S <- e^{A dt} S + dt B x^T,    y = S^T C + D x

For a tree, the state after a node is the sum in `inference.target.recurrent.states`, with g = A dt,
a = B and b = dt x.

Legend: B rows, T prompt tokens, N nodes, h heads, p head size, G groups of B and C, s state size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.target.recurrent.decay import weighted_sums
from inference.target.recurrent.passes import PackedPass, PromptPass, current
from inference.target.recurrent.states import Kind, StateShape

NO_LIMIT = (0.0, float("inf"))


def mamba2(library: Callable[..., Any], mixer: int) -> Callable[..., Any]:
    """The function that mixer number `mixer` calls instead of `library`, its
    `mamba2_chunk_scan`."""

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = NO_LIMIT,
        return_final_states: bool = False,
        **more: Any,
    ) -> Any:
        """hidden_states [B, T, h, p], dt [B, T, h], A [h], B and C [B, T, G, s], D [h] -> output
        [B, T, h, p], and a state if requested."""
        now, x = current(), hidden_states
        if now is None:
            given = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return library(
                *(x, dt, A, B, C, chunk_size),
                **given,
                return_final_states=return_final_states,
                **more,
            )
        # clamped here in every pass: some families clamp only in this form, which training uses
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = torch.clamp(F.softplus(dt) if dt_softplus else dt, *dt_limit)
        if isinstance(now, PackedPass):

            def alone(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
                found: Tensor = library(x, dt, A, B, C, chunk_size, D=D)
                return found

            out = now.apart(alone, x, dt, B, C)
            return (out, None) if return_final_states else out
        wide = torch.promote_types(x.dtype, torch.float32)
        sizes = x.shape[2], B.shape[3], x.shape[3]
        place = now.key(mixer, "state")
        shape = StateShape(Kind.RANK_ONE, sizes, wide, x.device, left_heads=B.shape[2])
        state = now.states.state(place, shape)
        if isinstance(now, PromptPass):
            out, after = library(
                *(x, dt * now.valid[:, :, None], A, B, C, chunk_size),  # padding: steps of length 0
                D=D,
                initial_states=now.before(state).transpose(-1, -2),
                return_final_states=True,
            )
            state[now.rows] = after.to(wide).transpose(-1, -2)
        else:
            groups = x.shape[2] // B.shape[2]
            values = (x.to(wide) * dt.to(wide)[..., None]).transpose(1, 2)  # [B, h, N, p]
            left, right = (part.to(wide).transpose(1, 2) for part in (B, C))  # [B, G, N, s]
            keys, queries = (part.repeat_interleave(groups, 1) for part in (left, right))
            decays = (A.to(wide) * dt.to(wide)).transpose(1, 2)[..., None]  # [B, h, N, 1]
            ancestors = now.tree.ancestors[:, None]
            total = ancestors.to(wide) @ decays
            out = weighted_sums(state, queries, keys, values, total, ancestors)
            now.states.add(place, total, left, values)
            out = out.transpose(1, 2).contiguous()  # some families reshape it with view
            out = out if D is None else out + D[:, None] * x.to(wide)
        return (out, state) if return_final_states else out

    return mamba2_chunk_scan
