"""Writing and committing a verification in plain torch: writing new keys and values to the cache,
the accepted walk, and the cache's compaction.

The walk is `inference.decoding.rules.accept.walk`. Compaction moves the accepted nodes' keys and
values down to the slots after the committed tokens, in one operation for all layers that share a
storage. `commit.py` has the Triton kernels.

Legend: L layers, B rows, N nodes, h key/value heads, S slots, C and E numbers per key and value, D
the tree's deepest level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.kernels.dispatch import Op
from inference.decoding.rules.accept import walk


def compact(
    keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor | None = None
) -> None:
    """Move slot lengths+path[:, d] to slot lengths+d, d = 0..D, in every layer and head.

    keys [L, B, h, S, C], values [L, B, h, S, E], any dtype; lengths [B] int64: committed tokens
    before the verification; path [B, D+1] int64: node numbers, root first; accepted [B] int64:
    entries of the path beyond it are not moved (None: all are moved). Everything is read before
    anything is written, so sources and targets may overlap.
    """
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    place = torch.arange(path.shape[1], device=path.device)
    if accepted is not None:
        # entries that are not moved become a move of the root onto itself, so that no index is
        # beyond the cache
        moves = place <= accepted[:, None]
        path, place = torch.where(moves, path, 0), torch.where(moves, place, 0)
    source, target = lengths[:, None] + path, lengths[:, None] + place
    for storage in (keys, values):
        storage[:, rows, :, target] = storage[:, rows, :, source]


def write_slots(
    keys: Tensor, values: Tensor, fresh_keys: Tensor, fresh_values: Tensor, slots: Tensor
) -> None:
    """Write a pass's keys and values to a layer's cache: node n of row b goes to slot slots[b, n].

    keys [B, h, S, C], values [B, h, S, E], written in place; fresh_keys [B, h, N, C], fresh_values
    [B, h, N, E] of the same dtype; slots [B, N] int64, distinct within a row.
    """
    rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
    keys[rows, :, slots] = fresh_keys.transpose(1, 2)
    values[rows, :, slots] = fresh_values.transpose(1, 2)


WRITE_SLOTS = Op("write_slots", write_slots, "inference.kernels.commit:write_slots")
COMPACT = Op("compact", compact, "inference.kernels.commit:compact")
ACCEPT_WALK = Op("accept_walk", walk, "inference.kernels.commit:accept_walk", (torch.int64,))
