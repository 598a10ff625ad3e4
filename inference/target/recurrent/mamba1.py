"""Mamba's recurrence: s numbers per channel, each with a separate decay (2312.00752).

With h [C, s] the state, A < 0 rates and dt a token's steps per channel:

    h <- e^{A dt} h + dt B x,    y = h C + D x

The library's scan always starts from zero, so this module also scans prompts. In a tree, every
node's state is computed from its parent's, level by level. As they have few numbers per channel,
all states are kept until the commit.

Legend: B rows, T prompt tokens, N nodes, C channels, s state size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.tree import TokenTree
from inference.target.recurrent.passes import PackedPass, PromptPass, current
from inference.target.recurrent.states import Kind, StateShape


def mamba1(library: Callable[..., Any], mixer: int) -> Callable[..., Any]:
    """The function that mixer number `mixer` calls instead of `library`, its
    `mamba_selective_scan`."""

    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **more: Any,
    ) -> Any:
        """hidden_states, dt, z [B, C, T], A [C, s], B and C [B, s, T], D [C] -> output [B, C, T],
        and a state if requested."""
        now, x = current(), hidden_states
        rest = {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        if now is None:
            return library(
                *(x, dt, A, B, C), z=z, return_last_state=return_last_state, **rest, **more
            )
        if isinstance(now, PackedPass):

            def alone(*parts: Tensor) -> Tensor:
                x, dt, B, C, *gate = (part.transpose(1, 2) for part in parts)
                found: Tensor = library(x, dt, A, B, C, z=gate[0] if gate else None, **rest)
                return found.transpose(1, 2)

            parts = (x, dt, B, C) if z is None else (x, dt, B, C, z)
            out = now.apart(alone, *(part.transpose(1, 2) for part in parts)).transpose(1, 2)
            return (out, None) if return_last_state else out
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = F.softplus(dt) if delta_softplus else dt
        if isinstance(now, PromptPass):
            dt = dt * now.valid[:, None]  # padding: steps of length 0
        place = now.key(mixer, "state")
        state = now.states.state(place, StateShape(Kind.BY_NODE, tuple(A.shape), wide, x.device))
        decays = (A.to(wide)[None, None] * dt.to(wide).transpose(1, 2)[..., None]).exp()
        added = (dt.to(wide) * x.to(wide)).transpose(1, 2)[..., None]
        added = added * B.to(wide).transpose(1, 2)[:, :, None]
        if isinstance(now, PromptPass):
            states = along_prompt(now.before(state), decays, added)
            state[now.rows] = states[:, -1]
        else:
            states = along_tree(now.tree, state, decays, added)
            now.states.add(place, states)
        out = (states @ C.to(wide).transpose(1, 2)[..., None]).squeeze(-1).transpose(1, 2)
        out = out if D is None else out + x * D[:, None]
        out = out if z is None else out * F.silu(z)
        return (out, state) if return_last_state else out

    return mamba_selective_scan


def along_prompt(state: Tensor, decays: Tensor, added: Tensor) -> Tensor:
    """The states [R, T, C, s] after every token, from state [R, C, s] and decays, added
    [R, T, C, s]."""
    found = []
    for step in range(decays.shape[1]):
        state = decays[:, step] * state + added[:, step]
        found.append(state)
    return torch.stack(found, 1)


def along_tree(tree: TokenTree, state: Tensor, decays: Tensor, added: Tensor) -> Tensor:
    """The states [B, N, C, s] after every node; decays, added [B, N, C, s]. After round d the nodes
    down to level d are final."""
    rows = decays.shape[0]
    parents = tree.parents.expand(rows, -1)[..., None, None].expand_as(decays)
    root = (tree.depth == 0).expand(rows, -1)[..., None, None]
    before = state[:, None]
    states = decays * before + added
    for _ in range(tree.max_depth):
        states = decays * torch.where(root, before, states.gather(1, parents)) + added
    return states
