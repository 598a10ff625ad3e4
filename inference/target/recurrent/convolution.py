"""Short causal convolutions along the sequence: a weighted sum of each channel's last K inputs.

In a tree, the K-1 inputs before a node's own are those of its ancestors, then those of the row's
committed tokens. Products are summed in float32 and rounded once: later operations (an L2 norm, for
example) would amplify the rounding of each product.

Legend: B rows, R rows being prefilled, T prompt tokens, N nodes, C channels, K width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from inference.target.recurrent.passes import PackedPass, PromptPass, TreePass, current
from inference.target.recurrent.states import Kind, StateShape


def convolution(library: Callable[..., Tensor], mixer: int) -> Callable[..., Tensor]:
    """The function that mixer number `mixer` calls instead of `library`, its
    `causal_conv1d_fn`."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **more: Any,
    ) -> Tensor:
        """hidden_states [B, C, T], weight [C, K], bias [C] -> [B, C, T]."""
        now = current()
        if now is None:
            return library(hidden_states, weight, bias, activation=activation, **more)
        if isinstance(now, PackedPass):

            def alone(inputs: Tensor) -> Tensor:
                out = library(inputs.transpose(1, 2), weight, bias, activation=activation)
                return out.transpose(1, 2)

            return now.apart(alone, hidden_states.transpose(1, 2)).transpose(1, 2)
        channels, width = weight.shape
        key = now.key(mixer, "convolution")
        sizes = (channels, width - 1)
        shape = StateShape(Kind.WINDOW, sizes, hidden_states.dtype, hidden_states.device)
        window = now.states.state(key, shape)
        if isinstance(now, PromptPass):
            inputs = torch.cat([now.before(window), hidden_states], -1)
            window[now.rows] = last_inputs(inputs, now.lengths, width - 1)
            out = F.conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=channels)
        else:
            inputs = torch.cat([window, hidden_states], -1)
            now.states.add(key, inputs)
            out = _of_nodes(now, inputs, weight, bias)
        out = out if activation is None else ACT2FN[activation](out)
        return out.to(hidden_states.dtype)

    return causal_conv1d_fn


def last_inputs(inputs: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` inputs [R, C, count] of every row. inputs [R, C, count+T]: those before,
    then `lengths` [R] tokens and padding."""
    place = lengths[:, None] + torch.arange(count, device=inputs.device)
    return inputs.gather(2, place[:, None].expand(-1, inputs.shape[1], -1))


def _of_nodes(now: TreePass, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [B, C, K-1+N] -> [B, C, N]."""
    width = weight.shape[1]
    wide = torch.promote_types(weight.dtype, torch.float32)
    if now.tree.is_chain:
        seen = inputs.unfold(2, width, 1)
    else:
        back = now.back(width).expand(inputs.shape[0], -1, -1)
        index = back.flatten(1)[:, None].expand(-1, inputs.shape[1], -1)
        seen = inputs.gather(2, index).unflatten(2, (-1, width))
    out = (seen.to(wide) * weight[:, None].to(wide)).sum(-1)
    out = out if bias is None else out + bias[:, None].to(wide)
    return out.to(weight.dtype)
