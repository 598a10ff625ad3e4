"""The local convolution of DFlash 2: every slot adds a part of the one before it.

It has two taps and is depthwise and causal within the block. The kernel is a fixed part per channel
plus a part per group of channels that depends on the input: out[i, c] = sum over t of (base[t, c] +
delta[i, t, group(c)]) * x[i - t, c]. One projection of the sublayer's input gives the kernels of
both of its sides. It starts as the identity. Parameter names are those of serving engines (vLLM and
SGLang).

Legend: N blocks, b slots, H hidden, C = H / group size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.nn.matrices import set_vectors

TAPS = 2


class BlockConv(nn.Module):
    """The convolution on both sides of one sublayer."""

    def __init__(self, hidden_size: int, group_size: int) -> None:
        super().__init__()
        if group_size < 1 or hidden_size % group_size != 0:
            raise UserError(
                f"head.conv_group_size must divide the hidden size {hidden_size}; given "
                f"{group_size}."
            )
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.empty(2, TAPS, hidden_size))
        set_vectors(self.base_kernel)
        kernels = 2 * TAPS * (hidden_size // group_size)
        self.kernel_projection = nn.Linear(hidden_size, kernels, bias=False)

    @torch.no_grad()
    def initialise(self) -> None:
        """The identity: the sublayer's result is unchanged."""
        self.base_kernel.zero_()[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def before(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Input [N, b, H] -> (convolved input, the output side's kernel [N, b, TAPS, C])."""
        kernels = self.kernel_projection(states).unflatten(-1, (2, TAPS, -1))
        return self._mix(states, kernels[..., 0, :, :], 0), kernels[..., 1, :, :]

    def after(self, states: Tensor, kernel: Tensor) -> Tensor:
        """The sublayer's output [N, b, H], convolved with the kernel from `before`."""
        return self._mix(states, kernel, 1)

    def _mix(self, states: Tensor, delta: Tensor, side: int) -> Tensor:
        # the slot before a block's first is zero
        previous = nn.functional.pad(states[..., :-1, :], (0, 0, 1, 0))
        out = torch.zeros_like(states)
        for tap, values in enumerate((states, previous)):
            varying = values.unflatten(-1, (-1, self.group_size)) * delta[..., tap, :, None]
            out = out + self.base_kernel[side, tap] * values + varying.flatten(-2)
        return out
