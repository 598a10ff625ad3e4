"""The gated delta rule: a matrix per head that is corrected towards each token's value.

Along a sequence, with S [k, v] the state, g <= 0 the log decay and beta the rate of a token
(Gated DeltaNet, 2412.06464):

    S <- e^g S,    u = beta (v - S^T k),    S <- S + k u^T,    o = S^T q

In Kimi delta attention (2510.26692) g is one number per key channel. For a tree, with G_i the sum
of g along the path from the root to node i, every node's u depends only on those of its ancestors.
With

    L_ij = beta_i e^{G_i - G_j} k_i . k_j   for j an ancestor of i,
    w_i  = beta_i (v_i - e^{G_i} S^T k_i),

u solves (I + L) u = w, which is triangular because parents come before their children, and

    o_i = e^{G_i} S^T q_i + sum over i and its ancestors j of e^{G_i - G_j} (q_i . k_j) u_j.

Legend: B rows, T prompt tokens, N nodes, D the tree's deepest level, h key heads, H value heads, k
and v key and value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inference.target.recurrent.decay import decay_between
from inference.target.recurrent.passes import PackedPass, PromptPass, TreePass, current
from inference.target.recurrent.states import Kind, StateShape

LEVELS = 16
"""Up to this depth, a tree's system is solved level by level, by products; a deeper one by a
triangular solver, whose time does not depend on the depth."""


def delta_rule(
    library: Callable[..., tuple[Tensor, Tensor | None]], mixer: int, l2norm: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that mixer number `mixer` calls instead of `library`, its rule for many tokens.

    l2norm: the family's norm of queries and keys.
    """

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """query, key [B, T, h, k], value [B, T, H, v], g [B, T, H] or [B, T, H, k], beta
        [B, T, H] -> output [B, T, H, v], a state."""
        now, norm = current(), {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if now is None:
            return library(query, key, value, g=g, beta=beta, **norm, **more)
        if isinstance(now, PackedPass):

            def alone(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
                return library(query, key, value, g=g, beta=beta, **norm)[0]

            return now.apart(alone, query, key, value, g, beta), None
        wide = torch.promote_types(query.dtype, torch.float32)
        sizes = value.shape[2], key.shape[3], value.shape[3]
        place = now.key(mixer, "state")
        by_channel = g.dim() == 4
        shape = StateShape(
            *(Kind.RANK_ONE, sizes, wide, key.device),
            left_heads=value.shape[2] if by_channel else key.shape[2],
            decay_size=g.shape[3] if by_channel else 1,
        )
        state = now.states.state(place, shape)
        if isinstance(now, PromptPass):
            valid = now.valid[:, :, None]
            g = g * (valid if g.dim() == 3 else valid[..., None])  # padding neither decays
            found, after = library(
                *(query, key, value),
                g=g,
                beta=beta * valid,  # nor writes
                initial_state=now.before(state),
                output_final_state=True,
                **norm,
            )
            assert after is not None
            state[now.rows] = after.to(wide)
            return found, after
        parts = (part.transpose(1, 2).to(wide) for part in (query, key, value, g, beta))
        queries, keys, values, decays, rates = parts
        if use_qk_l2norm_in_kernel:
            queries, keys = (l2norm(part, dim=-1, eps=1e-6) for part in (queries, keys))
        queries = queries * queries.shape[-1] ** -0.5
        groups = values.shape[1] // keys.shape[1]
        each = [part.repeat_interleave(groups, 1) for part in (queries, keys)]
        decays = decays if by_channel else decays[..., None]
        total, written, out = _of_nodes(now, state, each[0], each[1], values, decays, rates)
        now.states.add(place, total, each[1] if by_channel else keys, written)
        return out.transpose(1, 2).to(query.dtype), state

    return rule


def _of_nodes(
    now: TreePass,
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    rates: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The module's formulas: state [B, H, k, v], queries, keys [B, H, N, k], values [B, H, N, v],
    decays [B, H, N, k|1], rates [B, H, N] -> G [B, H, N, k|1], u and o [B, H, N, v]."""
    ancestors = now.tree.ancestors[:, None]
    total = ancestors.to(decays.dtype) @ decays
    if decays.shape[-1] == 1:
        gap = decay_between(total, ancestors)
        from_keys, from_queries = (part @ keys.transpose(-1, -2) * gap for part in (keys, queries))
    else:
        gap = total[:, :, :, None] - total[:, :, None]
        gap = gap.masked_fill(~ancestors[..., None], float("-inf")).exp()
        decayed = gap * keys[:, :, None]  # [B, H, N, N, k]: key j as node i finds it
        from_keys, from_queries = (
            (decayed @ part[..., None]).squeeze(-1) for part in (keys, queries)
        )
    decay = total.exp()
    system = (from_keys * rates[..., None]).tril(-1)
    wanted = rates[..., None] * (values - (keys * decay) @ state)
    written = solve(system, wanted, now.tree.max_depth)
    return total, written, (queries * decay) @ state + from_queries @ written


def solve(system: Tensor, wanted: Tensor, depth: int) -> Tensor:
    """(I + system)^-1 wanted, for a strictly lower triangular system [..., N, N] that is 0 except
    between nodes and their ancestors, at most `depth` levels above.

    After d rounds of substitution, the nodes down to level d are final. Products of powers would
    need only log2(depth) rounds, but they cancel: with equal keys they lose every digit.
    """
    if depth > LEVELS:
        return torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = wanted
    for _ in range(depth):
        out = wanted - system @ out
    return out
