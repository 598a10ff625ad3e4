"""The real-gated linear recurrent unit of Griffin (2402.19427): one number per channel.

With h [C] the state, a in (0, 1) the token's gate and x its gated input:

    h <- a h + x,    y = h

RecurrentGemma's block keeps its states as attributes of its modules. Here it runs as without a
cache; it then calls its convolution and its scan for any number of tokens, and these two are
replaced.

Legend: B rows, T prompt tokens, N nodes, C channels, K width of the convolution.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.target.recurrent.convolution import convolution
from inference.target.recurrent.mamba1 import along_prompt, along_tree
from inference.target.recurrent.passes import PackedPass, PromptPass, current
from inference.target.recurrent.states import Kind, StateShape


def recurrent_block(module: Any, mixer: int) -> None:
    """Give the parts of a `RecurrentGemmaRecurrentBlock`, mixer number `mixer`, functions that
    support trees."""
    convolve = convolution(_convolved, mixer)

    def forward(self: nn.Conv1d, inputs: Tensor) -> Tensor:
        return convolve(inputs, self.weight[:, 0], self.bias)

    module.conv_1d.forward = types.MethodType(forward, module.conv_1d)
    _replace_scan(module.rg_lru, mixer)


def _convolved(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: None = None
) -> Tensor:
    """Causal convolution with zeros before: inputs [B, C, T], weight [C, K] -> [B, C, T]."""
    channels, width = weight.shape
    padded = F.pad(inputs, (width - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=channels)


def _replace_scan(unit: Any, mixer: int) -> None:
    library = type(unit)._rnn_scan

    def scan(
        self: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states, recurrent_gate [B, T, C], reset [B, T, 1] bool: a text begins ->
        [B, T, C], no state."""
        now = current()
        if now is None:
            found: tuple[Tensor, Tensor | None] = library(
                self, hidden_states, recurrent_gate, reset, recurrent_states, **more
            )
            return found
        if isinstance(now, PackedPass):

            def alone(inputs: Tensor, gates: Tensor, starts: Tensor) -> Tensor:
                out: Tensor = library(self, inputs, gates, starts, None)[0]
                return out

            return now.apart(alone, hidden_states, recurrent_gate, reset), None
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        gates = (recurrent_gate * ~reset).to(wide)[..., None]
        inputs = hidden_states.to(wide)[..., None]
        place = now.key(mixer, "state")
        shape = StateShape(Kind.BY_NODE, (gates.shape[2], 1), wide, hidden_states.device)
        state = now.states.state(place, shape)
        if isinstance(now, PromptPass):
            valid = now.valid[:, :, None, None]  # padding keeps the state
            gates, inputs = torch.where(valid, gates, 1.0), torch.where(valid, inputs, 0.0)
            states = along_prompt(now.before(state), gates, inputs)
            state[now.rows] = states[:, -1]
        else:
            states = along_tree(now.tree, state, gates, inputs)
            now.states.add(place, states)
        return states.squeeze(-1).to(hidden_states.dtype), None

    unit._rnn_scan = types.MethodType(scan, unit)
