"""Lightning attention: a matrix per head that decays at the head's rate (2401.04658).

With S [k, v] the state and r > 0 the head's rate:

    S <- e^{-r} S + k v^T,    o = S^T q

For a tree, the state after a node is the sum in `inference.target.recurrent.states`, with g = -r,
a = k and b = v. MiniMax's layer is one method from its projections to its output and accepts no
state for several tokens, so this module reimplements it with the layer's parts.

Legend: R rows being prefilled, B rows, T tokens, N nodes, h heads, k head size.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from inference.target.recurrent.decay import weighted_sums
from inference.target.recurrent.passes import PackedPass, PromptPass, TreePass, current
from inference.target.recurrent.states import Kind, StateShape

BLOCK = 256
"""Tokens of a prompt whose pairs are weighted at once; the state holds what precedes them."""


def lightning_attention(module: nn.Module, mixer: int) -> None:
    """Give a `MiniMaxLightningAttention`, mixer number `mixer`, a forward pass that supports
    trees."""
    library = type(module).forward

    def forward(
        self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, H] -> output [B, T, H], no state."""
        now = current()
        if now is None:
            found: tuple[Tensor, Tensor | None] = library(self, hidden_states, *args, **kwargs)
            return found
        if isinstance(now, PackedPass):

            def alone(hidden: Tensor) -> Tensor:
                out: Tensor = library(self, hidden, None, None)[0]
                return out

            return now.apart(alone, hidden_states), None
        summed = _summed(self, now, mixer, hidden_states)
        normed = self.norm(summed.transpose(1, 2).flatten(2).to(hidden_states.dtype))
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * normed), None

    module.forward = types.MethodType(forward, module)


def _summed(layer: Any, now: PromptPass | TreePass, mixer: int, hidden: Tensor) -> Tensor:
    """The heads' outputs [B, h, T, k], in float32 or wider."""
    heads, size = layer.num_attention_heads, layer.head_dim
    wide = torch.promote_types(hidden.dtype, torch.float32)
    projected = layer.act_fn(layer.qkv_proj(hidden)).unflatten(-1, (heads, 3 * size))
    queries, keys, values = projected.transpose(1, 2).to(wide).split(size, -1)
    rate = layer.slope_rate.to(wide)[None]  # [1, h, 1, 1]
    place = now.key(mixer, "state")
    shape = StateShape(Kind.RANK_ONE, (heads, size, size), wide, hidden.device, left_heads=heads)
    state = now.states.state(place, shape)
    if isinstance(now, PromptPass):
        out, after = _along_prompt(now.before(state), queries, keys, values, rate, now.valid)
        state[now.rows] = after
        return out
    total = (-rate * (now.tree.depth + 1).to(wide)[:, None, :, None]).expand(
        hidden.shape[0], -1, -1, -1
    )
    now.states.add(place, total, keys, values)
    return weighted_sums(state, queries, keys, values, total, now.tree.ancestors[:, None])


def _along_prompt(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, rate: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [R, h, T, k] and the states [R, h, k, k] after the prompts. valid [R, T] bool:
    padding neither decays a state nor is added to it."""
    found = []
    for start in range(0, valid.shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        mine = valid[:, None, part, None].to(state.dtype)
        total = -rate * mine.cumsum(2)
        causal = torch.ones(mine.shape[2], mine.shape[2], dtype=torch.bool, device=valid.device)
        k, v = keys[:, :, part] * mine, values[:, :, part]
        out = weighted_sums(state, queries[:, :, part], k, v, total, causal.tril()[None, None])
        found.append(out)
        end = total[:, :, -1:]
        state = state * end.exp() + (k * (end - total).exp()).transpose(-1, -2) @ v
    return torch.cat(found, 2), state
