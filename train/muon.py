"""Muon for matrices and AdamW for the rest, in one optimiser. It also works where ZeRO 1 or 2 has
divided the matrices among processes.

Muon (Jordan, https://kellerjordan.github.io/posts/muon; Liu et al., 2502.16982) replaces the update
of a matrix by the nearest matrix with orthonormal rows or columns, so that all directions of a
weight learn at the same rate. Its state is one momentum per element and can be divided like
AdamW's; the orthogonalisation needs the whole matrix. A process orthogonalises the matrices that it
holds whole. A matrix that is cut by a border between processes is summed from its pieces; each
group has at most one such matrix per border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from inference.cpu import multiplies_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iterated quintic polynomial: steep at zero, within [0.7, 1.2] around one."""
ITERATIONS = 5


def orthogonalise(update: Tensor) -> Tensor:
    """Return an approximation of U V', where U S V' is the singular value decomposition of each
    matrix.

    update [..., rows, columns]. The Newton-Schulz iterations start from the matrix divided by its
    Frobenius norm. They run in bfloat16, or in float32 on CPUs that emulate bfloat16; that is also
    the result's dtype.
    """
    a, b, c = COEFFICIENTS
    turned = update.shape[-2] > update.shape[-1]
    emulated = update.device.type == "cpu" and not multiplies_bfloat16()
    x = update.to(torch.float32 if emulated else torch.bfloat16).view(-1, *update.shape[-2:])
    x = x.mT if turned else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if turned else x).reshape(update.shape)


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that one process holds: elements [start, start + count) of the flattened
    weight of `shape`, stored from index `at` on in the flat tensor that is updated. count is 0 for
    a matrix that is divided among other processes."""

    shape: tuple[int, ...]
    start: int
    count: int
    at: int

    @property
    def whole(self) -> bool:
        return self.count == prod(self.shape)


def divide(shapes: Sequence[tuple[int, ...]], size: int, rank: int) -> list[Piece]:
    """Return what process `rank` holds of weights that are stored one after the other and cut every
    `size` elements: the matrices that it holds whole, and all matrices that are cut, which come in
    the same order in every process."""
    pieces, offset = [], 0
    for shape in shapes:
        end = offset + prod(shape)
        first, last = max(offset, rank * size), min(end, (rank + 1) * size)
        if first < last:
            pieces.append(Piece(shape, first - offset, last - first, first - rank * size))
        elif offset // size != (end - 1) // size:
            pieces.append(Piece(shape, 0, 0, 0))
        offset = end
    return pieces


class MuonAdamW(torch.optim.Optimizer):
    """Groups with `muon` set are matrices, or stacks of matrices [..., rows, columns].

    The update of Muon is scaled to the root mean square of AdamW's, 0.2 sqrt(max(rows, columns))
    (2502.16982, section 2.2), so that one learning rate and one weight decay serve both.

    State of a weight: `exp_avg` (Muon's momentum, or AdamW's), `exp_avg_sq` (AdamW only), `step`.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "muon": False}
        super().__init__(groups, defaults)
        self._pieces: dict[int, Sequence[Piece]] = {}
        self._add: Callable[[Tensor], Tensor] = lambda part: part

    def hold(self, pieces: Sequence[Sequence[Piece]], add: Callable[[Tensor], Tensor]) -> None:
        """Describe the flat tensors that have replaced the groups' weights. pieces: those of each
        group (`divide`); add: returns the sum of a tensor over the processes."""
        for group, parts in zip(self.param_groups, pieces, strict=True):
            if group["muon"]:
                (flat,) = group["params"]
                self._pieces[id(flat)] = parts
        self._add = add

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            given = [weight for weight in group["params"] if weight.grad is not None]
            for weight in given:
                self._begin(weight, group["muon"])
            if group["muon"]:
                for weight in given:
                    self._muon(weight, group)
            elif given:
                self._adamw(given, group)

    def _begin(self, weight: Tensor, muon: bool) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg",) if muon else ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, requires_grad=False)

    def _adamw(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            [weight.grad for weight in weights if weight.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(self, weight: Tensor, group: dict[str, Any]) -> None:
        """With momentum B = mu B + (1 - mu) g and Nesterov's look ahead, (1 - mu) g + mu B."""
        state, gradient, keep = self.state[weight], weight.grad, group["momentum"]
        assert gradient is not None
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - keep)
        ahead = gradient.lerp(state["exp_avg"], keep)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        pieces = self._pieces.get(id(weight))
        if pieces is None:
            pieces = [Piece(tuple(weight.shape), 0, weight.numel(), 0)]
        flat, ahead = weight.view(-1), ahead.view(-1)
        for piece in pieces:
            held = slice(piece.at, piece.at + piece.count)
            matrix = self._whole(ahead[held], piece)
            rate = group["lr"] * 0.2 * max(piece.shape[-2:]) ** 0.5
            turned = orthogonalise(matrix).reshape(-1)[piece.start : piece.start + piece.count]
            flat[held].add_(turned, alpha=-rate)

    def _whole(self, part: Tensor, piece: Piece) -> Tensor:
        if not piece.whole:
            padded = part.new_zeros(prod(piece.shape))
            padded[piece.start : piece.start + piece.count] = part
            part = self._add(padded)
        return part.view(piece.shape)
