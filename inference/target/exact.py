"""`decode.exact=true`: the result for a token does not depend on the other tokens of its pass.

Rounding depends on the order of sums, which libraries choose by the shape of their inputs. So in
bfloat16 a pass over a chain of six tokens gives different logits from six passes over one token,
and one greedy pick in some hundreds differs. Here everything that sums over features uses shapes
that do not depend on the number of tokens:

- products with weights, the LM head's included: `ROW_LINEAR` on a GPU; elsewhere the library's
  product of `TILE` rows;
- norms, with or without weights: `TILE` tokens at a time, or `HEADS` heads of tokens;
- activations on a CPU: `TILE` tokens at a time, because its loops compute the elements that do not
  fill a vector register by another function;
- attention: on a GPU the kernel, with the same launch for any number of nodes; elsewhere token by
  token, each over its own committed tokens and ancestors, in their order;
- prompts: read one at a time, in the library's shapes, which then depend only on the prompt.

So plain decoding, drafted decoding, one row and many rows give the same bits. For chains this holds
by construction: a node is in the cache slot where the same token is after the commit. For trees it
holds if attention goes token by token. In the kernel, an ancestor may be at another place of its
tile than the committed token later, so that the sums of one tile can differ in their order.

Legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from heads.api.errors import UserError
from heads.kernels.dispatch import choose
from inference.kernels.reference.row_linear import ROW_LINEAR, InTiles

_NOW: ContextVar[bool] = ContextVar("headstart_exact", default=False)
ACTIVATIONS = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
HEADS = 256
"""Rows of a norm over single heads: the 32 heads of `TILE` tokens."""
_GIVEN = "headstart_exact"
"""Attribute of modules whose forward method `install_exact` has replaced."""


@contextmanager
def exactly(active: bool) -> Iterator[None]:
    """Within the block, modules that `install_exact` has prepared compute token by token."""
    token = _NOW.set(active)
    try:
        yield
    finally:
        _NOW.reset(token)


def is_exact() -> bool:
    """Whether the code runs within `exactly(True)`."""
    return _NOW.get()


def install_exact(model: nn.Module) -> None:
    """Give products, norms and activations of a model a path for `exactly`; a second call changes
    nothing. Norms are found by their class, because some have no weights (NanoChat, OLMo, Llama 4).

    Raises `UserError` for a model with weights in other kinds of modules, before any is changed.
    """
    chosen: list[tuple[nn.Module, Callable[..., Any]]] = []
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if isinstance(module, nn.Embedding) or hasattr(module, _GIVEN):
            continue
        if "Norm" in type(module).__name__ and next(module.children(), None) is None:
            # weights [D], [heads, D] (Cohere's norm of heads), or none
            kept = max([weight.ndim for weight in own], default=1)
            chosen.append((module, _tiled(module.forward, kept)))
        elif not own:
            if isinstance(module, ACTIVATIONS):
                chosen.append((module, _tiled_on_cpu(module.forward)))
        elif _is_plain_linear(module):
            chosen.append((module, _linear(module)))
        elif isinstance(module, Conv1D):
            chosen.append((module, _tiled(module.forward)))
        else:
            raise UserError(
                f"decode.exact=true needs a target whose weights are in linear layers, norms and "
                f"embeddings; this one has {type(module).__name__} (experts, convolutions, "
                "recurrent layers and quantised weights have sums of their own). Leave out "
                "decode.exact."
            )
    for module, forward in chosen:
        module.forward = forward
        setattr(module, _GIVEN, True)


class ExactHead:
    """A target's LM head [B, N, H] -> [B, N, V], in tiles if a pass is exact. It needs none if the
    product of `plain`, which is `module`, keeps rows apart by itself: the rest is elementwise."""

    def __init__(self, plain: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        self.plain, self.module, self.tiled = plain, module, InTiles(plain)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of last states."""
        if not is_exact() or (_is_plain_linear(self.module) and _by_rows(hidden)):
            return self.plain(hidden)
        return self.tiled(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `install_exact` gives a module the path of `_linear`."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _by_rows(x: Tensor) -> bool:
    """Whether products of `x` run in a kernel in which a row depends on nothing but itself."""
    return choose(ROW_LINEAR, x.device, x.dtype).implementation == "triton"


def _linear(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    plain, tiled = linear.forward, _tiled(linear.forward)

    def forward(x: Tensor) -> Tensor:
        if not is_exact():
            return plain(x)
        if not _by_rows(x):
            return tiled(x)
        found: Tensor = ROW_LINEAR(x.flatten(0, -2), linear.weight, linear.bias)
        return found.unflatten(0, x.shape[:-1])

    return forward


def _tiled(plain: Callable[[Tensor], Tensor], kept: int = 1) -> Callable[[Tensor], Tensor]:
    """A module's forward on tiles of rows, each with the last `kept` dimensions of an input: of
    tokens [B, N, H] or [M, H], or of their heads in either order, [B, N, heads, D] or [B, heads, N,
    D]."""
    tokens, heads = InTiles(plain), InTiles(plain, HEADS)

    def forward(x: Tensor) -> Tensor:
        if not is_exact():
            return plain(x)
        rows = x.flatten(0, x.ndim - kept - 1)
        tiles = heads if x.ndim - kept > 2 else tokens
        return tiles(rows).unflatten(0, x.shape[: x.ndim - kept])

    return forward


def _tiled_on_cpu(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`_tiled` for what a GPU computes number by number."""
    tiled = _tiled(plain)
    return lambda x: tiled(x) if x.device.type == "cpu" else plain(x)


def node_by_node(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
) -> Tensor:
    """Attention of every query [B, h*G, N, D] separately, over the keys [B, h, S, D] that it may
    see, without a mask; returns [B, N, h*G, D].

    attend: [1, h*G, 1, D] -> [1, 1, h*G, D]. allowed [B|1, N, S] bool, read on the host; None: all
    keys.
    """
    rows = []
    for row in range(query.shape[0]):
        nodes = []
        for node in range(query.shape[2]):
            keys, values = key[row : row + 1], value[row : row + 1]
            if allowed is not None:
                seen = allowed[min(row, allowed.shape[0] - 1), node].nonzero()[:, 0]
                keys, values = keys[:, :, seen], values[:, :, seen]
            one = query[row : row + 1, :, node : node + 1]
            nodes.append(attend(one, keys.contiguous(), values.contiguous()))
        rows.append(torch.cat(nodes, 1))
    return torch.cat(rows)
