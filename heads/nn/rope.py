"""Rotary position embedding in the Llama layout, which rotates the two halves of a head.

Angles are computed in float32 whatever the model's dtype, as Hugging Face does, so that copied
layers get the same rotations.

Legend: B rows, T positions, D head size, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import Rotary

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin [B, T, 1, D]: the sine's first half is negated, so that rotating is one roll
and two multiplications."""


class Rope:
    """Rotations for one head size and base, or for given frequencies (`follow`)."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim, self.theta = head_dim, theta
        self._given: Rotary | None = None
        self._tables: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def follow(self, rotary: Rotary | None) -> None:
        """Rotate as the target does, scaled frequencies included; None: by the base alone.

        Raises `UserError` for frequencies of another head size.
        """
        if rotary is not None and rotary.inverse_frequencies.shape != (self.head_dim // 2,):
            rotated = 2 * rotary.inverse_frequencies.numel()
            raise UserError(
                f"the target rotates {rotated} numbers of each head, which do not fit heads of "
                f"size {self.head_dim}: a drafter made of the target's layers rotates whole heads. "
                "Leave head.from_target_layers out, or choose another kind with head=, for "
                "instance eagle3."
            )
        self._given = rotary
        self._tables = {}

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation for positions [B, T] int64, computed directly (training)."""
        cosine, sine = self._angles(positions).to(dtype).unbind(-2)
        return cosine[..., None, :], sine[..., None, :]

    def table(self, slots: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Rotations of positions from 0 on as one tensor [S, 2, D] for `look_up`; S is `slots`,
        rounded up to a power of two. All tables are kept, because captured steps read theirs."""
        key = 1 << max(0, slots - 1).bit_length(), device, dtype
        if key not in self._tables:
            self._tables[key] = self._angles(torch.arange(key[0], device=device)).to(dtype)
        return self._tables[key]

    def _angles(self, positions: Tensor) -> Tensor:
        angles = positions[..., None].float() * self._frequencies(positions.device)
        scale = 1.0 if self._given is None else self._given.scale
        cosine, sine = angles.cos() * scale, angles.sin() * scale
        return torch.stack([torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)], -2)

    def _frequencies(self, device: torch.device) -> Tensor:
        """Inverse frequencies [D / 2] float32."""
        if self._given is not None:
            return self._given.inverse_frequencies.to(device)
        return inverse_frequencies(self.head_dim, self.theta, device)


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Inverse frequencies [D / 2] float32 of a base, without scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float()
    return 1.0 / (theta ** (exponents / head_dim))


def look_up(table: Tensor, positions: Tensor) -> Rotation:
    """Rotation for positions [B, T] from a table [S, 2, D]: one gather (decoding)."""
    cosine, sine = table[positions].unbind(-2)
    return cosine[:, :, None], sine[:, :, None]


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads [B, T, heads, D]."""
    cosine, sine = rotation
    return torch.addcmul(states * cosine, states.roll(states.shape[-1] // 2, -1), sine)
