"""Zaya's projections to queries, keys and values: two stacked convolutions along the sequence, and
values of which half is the previous token's (compressed convolutional attention, 2510.04476).

The layer's method uses its own states from the cache, which do not support trees, so this module
reimplements it with the layer's parts. A node's convolutions see the inputs of its ancestors, then
those of the row's committed tokens; its delayed half is its parent's.

Legend: B rows, T prompt tokens, N nodes, C channels of queries and keys, V channels of the delayed
half, W inputs before a token's own that the two convolutions reach, h heads, g key heads, d head
size.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from inference.target.recurrent.convolution import last_inputs
from inference.target.recurrent.passes import PackedPass, PromptPass, TreePass, current
from inference.target.recurrent.states import Kind, StateShape


def convolved_projection(module: nn.Module, mixer: int) -> None:
    """Give a `ZayaCCAProjection`, mixer number `mixer`, a forward pass that supports trees."""
    library = type(module).forward

    def forward(
        self: Any, hidden_states: Tensor, past_key_values: Any, conv_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [B, T, H] -> queries [B, T, h, d], keys and values [B, T, g, d]."""
        now = current()
        if now is None:
            found: tuple[Tensor, Tensor, Tensor]
            found = library(self, hidden_states, past_key_values, conv_mask)
            return found
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if isinstance(now, PackedPass):

            def alone(hidden: Tensor) -> Tensor:
                return torch.cat(library(self, hidden, None), 2)

            parts = now.apart(alone, hidden_states).split([heads, groups, groups], 2)
            return parts[0], parts[1], parts[2]
        raw = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states)], -1)
        mixed = _mixed(self, now, mixer, raw.transpose(1, 2)).transpose(1, 2)
        own = raw.unflatten(-1, (heads + groups, self.head_dim))
        each = own[:, :, heads:].repeat_interleave(heads // groups, 2)
        kept = (own[:, :, :heads] + each) * 0.5
        both = torch.cat([kept, kept.unflatten(2, (groups, -1)).mean(3)], 2)
        both = mixed.unflatten(-1, (heads + groups, self.head_dim)) + both
        late = _delayed(self, now, mixer, hidden_states)
        values = torch.cat([self.v_proj_current(hidden_states), late], -1)
        return both[:, :, :heads], both[:, :, heads:], values.unflatten(-1, (groups, -1))

    module.forward = types.MethodType(forward, module)


def _mixed(layer: Any, now: PromptPass | TreePass, mixer: int, raw: Tensor) -> Tensor:
    """Queries and keys [B, C, T] after both convolutions, from raw [B, C, T]."""
    seen = _with_window(now, mixer, "convolution", raw, layer.conv_kernel_size)
    if isinstance(now, PromptPass) or now.tree.is_chain:
        out: Tensor = layer.conv_qk_grouped(layer.conv_qk_depthwise(seen))
        return out
    rows, nodes, width = raw.shape[0], raw.shape[2], layer.conv_kernel_size + 1
    index = now.back(width).expand(rows, -1, -1).flatten(1)[:, None]
    paths = seen.gather(2, index.expand(-1, raw.shape[1], -1)).unflatten(2, (nodes, width))
    paths = paths.transpose(1, 2).flatten(0, 1)  # [B N, C, W+1]
    ends = layer.conv_qk_grouped(layer.conv_qk_depthwise(paths))
    return ends.unflatten(0, (rows, nodes)).squeeze(-1).transpose(1, 2)


def _delayed(layer: Any, now: PromptPass | TreePass, mixer: int, hidden: Tensor) -> Tensor:
    """The half of the values [B, T, V] that is the previous token's projection. The first token
    gets the projection of zeros, which is the bias."""
    bias = layer.v_proj_delayed.bias
    projected = layer.v_proj_delayed(hidden)
    projected = projected if bias is None else projected - bias
    seen = _with_window(now, mixer, "delayed", projected.transpose(1, 2), 1)
    if isinstance(now, PromptPass) or now.tree.is_chain:
        late = seen[:, :, :-1]
    else:
        index = now.back(2)[:, :, 0].expand(seen.shape[0], -1)[:, None]
        late = seen.gather(2, index.expand(-1, seen.shape[1], -1))
    late = late.transpose(1, 2)
    return late if bias is None else late + bias


def _with_window(
    now: PromptPass | TreePass, mixer: int, kind: str, inputs: Tensor, width: int
) -> Tensor:
    """The rows' last `width` inputs followed by `inputs` [B, C, T]; also stores the new window, or
    what a commit needs for it."""
    key = now.key(mixer, kind)
    shape = StateShape(Kind.WINDOW, (inputs.shape[1], width), inputs.dtype, inputs.device)
    window = now.states.state(key, shape)
    if isinstance(now, PromptPass):
        seen = torch.cat([now.before(window), inputs], -1)
        window[now.rows] = last_inputs(seen, now.lengths, width)
    else:
        seen = torch.cat([window, inputs], -1)
        now.states.add(key, seen)
    return seen
