"""Linear maps with weights of 8 or 4 bits, quantised when a drafter is bound to its target.

Eight bits: one scale per output, symmetric. Four bits: groups along the inputs, each with a scale
and an offset. Only the packed numbers and their scales are kept. In bfloat16, torch multiplies
without unpacking them if it has such a product for the device (checked on a probe when the weight
is packed). Otherwise the weight is unpacked for every product, which saves memory and costs time.
The packed numbers are buffers that no checkpoint holds, because the target's weights give them
again.

On a CPU with AVX-512 one row times [4096, 4096] in bfloat16 takes 3.0 ms plain, 1.3 ms with 8 bits
and 0.9 ms with 4; 12 rows take 7.0, 10.2 and 8.8 ms. In float32 and float16 torch's packed products
are 8 to 40 times slower than plain ones, so they are not used.

Legend: O outputs, I inputs, G groups (I / group size), M rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROBE_ROWS, PROBE_TOLERANCE = 3, 2e-2
FAST_DTYPES = (torch.bfloat16,)
SMALLEST = torch.finfo(torch.float16).tiny
"""Smallest scale."""


class PackedLinear(nn.Module):
    """A quantised linear map; `fast`: torch multiplies with the packed weight itself."""

    codes: Tensor
    bias: Tensor | None
    fast: bool

    def __init__(self, shape: torch.Size, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.fast = False

    def forward(self, states: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if not self.fast:
            return F.linear(states, self.unpacked(states.dtype), self.bias)
        out = self._multiply(states.reshape(-1, self.in_features))
        out = out.view(*states.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The quantised weight [O, I] as plain numbers."""
        raise NotImplementedError

    def _multiply(self, rows: Tensor) -> Tensor:
        """[M, I] -> [M, O] with the packed weight, or an error if torch has no such product."""
        raise NotImplementedError

    def _works(self, like: Tensor) -> bool:
        """Whether `_multiply` pays off in this dtype, runs here, and agrees with the unpacked
        one."""
        if like.dtype not in FAST_DTYPES:
            return False
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(PROBE_ROWS, self.in_features, generator=generator).to(like)
        try:
            found = self._multiply(probe)
        except (RuntimeError, NotImplementedError):
            return False
        expected = F.linear(probe, self.unpacked(like.dtype))
        gap = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        return bool(gap <= PROBE_TOLERANCE)


class Int8Linear(PackedLinear):
    """codes [O, I] int8, scale [O]: weight = codes * scale."""

    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape, bias)
        wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        scale = (wide.abs().amax(1) / 127).clamp(min=SMALLEST).to(weight.dtype)
        codes = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.fast = self._works(weight)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return self.codes.to(dtype) * self.scale.to(dtype)[:, None]

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows, self.codes, self.scale)


class Int4Linear(PackedLinear):
    """codes: 4 bits per weight, two in a byte [O, I / 2] or in the order of torch's own product;
    scales [G, O, 2]: scale s and offset z of each group. weight = (code - 8) * s + z, code from 0
    to 15."""

    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, group_size: int) -> None:
        super().__init__(weight.shape, bias)
        assert self.in_features % group_size == 0, "the kind checks that groups fit"
        self.group_size = group_size
        wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        groups = wide.view(self.out_features, -1, group_size)  # [O, G, group size]
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp(min=SMALLEST).to(weight.dtype)
        offset = (low + 8 * scale).to(weight.dtype)
        codes = ((groups - offset[..., None]) / scale[..., None] + 8).round().clamp(0, 15)
        codes = codes.to(torch.uint8).flatten(1)
        scales = torch.stack([scale.T, offset.T], -1).contiguous()
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("codes", _two_in_a_byte(codes), persistent=False)
        packed = self._for_kernel(codes)
        if packed is not None:
            self._packed = packed
            self.fast = self._works(weight)
            if self.fast:
                self.codes = packed  # the kernel's order replaces ours
            del self._packed

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        assert not self.fast, "the kernel's order of codes is its own"
        pairs = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)
        values = pairs.to(dtype).view(self.out_features, -1, self.group_size) - 8
        scale, offset = self.scales.to(dtype).unbind(-1)
        return (values * scale.T[..., None] + offset.T[..., None]).flatten(1)

    def _for_kernel(self, codes: Tensor) -> Tensor | None:
        """codes [O, I] uint8 in the order of the device's product, None if it has none."""
        try:
            if codes.device.type == "cpu":
                return torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 2)
            return torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        except (RuntimeError, NotImplementedError):
            return None

    def _multiply(self, rows: Tensor) -> Tensor:
        packed = self.codes if self.fast else self._packed
        if rows.device.type == "cpu":
            return torch._weight_int4pack_mm_for_cpu(rows, packed, self.group_size, self.scales)
        return torch._weight_int4pack_mm(rows, packed, self.group_size, self.scales)


def _two_in_a_byte(codes: Tensor) -> Tensor:
    """codes [O, I] uint8 below 16 -> [O, I / 2]: the even column in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4
