"""Triton kernels that write and commit a verification: a layer's new keys and values, the walk
along accepted nodes, and the compaction of all layers' keys and values.

Reference: `reference/commit.py`. In plain torch the walk is a dozen small operations over [B, N, N]
and each layer's compaction four, at 3-10 us per launch. Here the walk is one launch, and the
compaction is one per group of equal layers. Neither does floating-point arithmetic: the results
equal the references' bit by bit.

Legend: L layers, B rows, N nodes, h key/value heads, S slots, C and E numbers per key and value, D
the tree's deepest level.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads.api.tree import TokenTree
from inference.decoding.rules.accept import Walk

MAX_TILE_COLUMNS = 64
"""Columns that one program moves: with D+1 <= 16 rows, at most 8 numbers per thread."""


def accept_walk(tokens: Tensor, picks: Tensor, tree: TokenTree) -> Walk:
    """Follow the target's picks from the root; equals `inference.decoding.rules.accept.walk`.

    tokens, picks [B, N] int64: drafted tokens; the target's choice at each node.
    """
    rows, nodes = tokens.shape
    tokens, picks, parents = tokens.contiguous(), picks.contiguous(), tree.parents.contiguous()
    path = torch.empty(rows, tree.max_depth + 1, dtype=torch.int64, device=tokens.device)
    accepted = torch.empty(rows, dtype=torch.int64, device=tokens.device)
    has_children = torch.empty(rows, dtype=torch.bool, device=tokens.device)
    _walk_kernel[(rows,)](
        *(tokens, picks, parents, path, accepted, has_children),
        *(nodes, tree.max_depth, nodes if parents.shape[0] > 1 else 0),
        CHAIN=tree.is_chain,
        NODES=triton.next_power_of_2(nodes),
        PLACES=triton.next_power_of_2(tree.max_depth + 1),
        num_warps=_warps(nodes),
    )
    return Walk(path, accepted, has_children)


def compact(
    keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor | None = None
) -> None:
    """See `reference.commit.compact`. Keys and values must be contiguous (last stride 1)."""
    assert keys.stride(-1) == 1 and values.stride(-1) == 1, "each key and value must be contiguous"
    layers, rows, heads, _, key_size = keys.shape
    value_size, places = values.shape[-1], path.shape[1]
    columns = min(MAX_TILE_COLUMNS, triton.next_power_of_2(max(key_size, value_size)))
    key_tiles = triton.cdiv(key_size, columns)
    path = path.contiguous()
    _compact_kernel[(layers * rows * heads, key_tiles + triton.cdiv(value_size, columns))](
        *(keys, values, lengths.contiguous(), path),
        path if accepted is None else accepted.contiguous(),
        *(rows, heads, places, key_size, value_size, key_tiles),
        *keys.stride()[:4],
        *values.stride()[:4],
        ALL_MOVE=accepted is None,
        PLACES=triton.next_power_of_2(places),
        COLUMNS=columns,
        num_warps=_warps(places * columns // 8),
    )


def write_slots(
    keys: Tensor, values: Tensor, fresh_keys: Tensor, fresh_values: Tensor, slots: Tensor
) -> None:
    """See `reference.commit.write_slots`."""
    fresh = (
        part if part.stride(-1) == 1 else part.contiguous() for part in (fresh_keys, fresh_values)
    )
    given = keys, values, *fresh
    assert keys.stride(-1) == 1 and values.stride(-1) == 1, "each key and value must be contiguous"
    rows, heads, nodes, key_size = fresh_keys.shape
    value_size = fresh_values.shape[-1]
    columns = triton.next_power_of_2(max(key_size, value_size))
    _write_kernel[(rows * heads, nodes)](
        *(*given, slots.contiguous(), heads, nodes, key_size, value_size),
        *(stride for part in given for stride in part.stride()[:3]),
        COLUMNS=columns,
        num_warps=_warps(columns // 2),
    )


def _warps(threads: int) -> int:
    """Warps of a program that keeps about `threads` threads busy: 1, 2, 4 or 8."""
    return min(8, triton.next_power_of_2(max(1, threads // 32)))


# fmt: off
@triton.jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    tokens, picks, parents, path, accepted, has_children, nodes, depth, parents_stride,
    CHAIN: tl.constexpr, NODES: tl.constexpr, PLACES: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per row. All nodes climb to the root at once, checking picks."""
    row = tl.program_id(0)
    tokens += row * nodes
    picks += row * nodes
    parents += row * parents_stride
    node = tl.arange(0, NODES)
    real = node < nodes
    parent = tl.load(parents + node, mask=real, other=0)
    at, above = node.to(tl.int64), parent
    reached = real
    level = tl.zeros([NODES], tl.int64)
    for _ in range(depth):
        token = tl.load(tokens + at, mask=real, other=0)
        pick = tl.load(picks + above, mask=real, other=0)
        reached = reached & ((at == 0) | (token == pick))
        level += (at != 0).to(tl.int64)
        at = above
        above = tl.load(parents + at, mask=real, other=0)
    # the deepest reached node ends the path; of several (siblings with the same token) the
    # lowest-numbered one
    score = tl.where(reached, level, -1)
    deepest = tl.max(score, 0)
    last = tl.min(tl.where(score == deepest, node, NODES), 0)
    tl.store(accepted + row, deepest)
    child = (parent == last) & real & (node > 0)
    tl.store(has_children + row, tl.max(child.to(tl.int32), 0) != 0)
    place = tl.arange(0, PLACES)
    found = tl.zeros([PLACES], tl.int64)
    if CHAIN:
        found += place
    else:
        here = last.to(tl.int64)
        for back in range(depth):
            found = tl.where(place == deepest - back, here, found)
            here = tl.load(parents + here)
    tl.store(path + row * (depth + 1) + place, found, mask=place <= depth)


# fmt: off
@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    keys, values, fresh_keys, fresh_values, slots, heads, nodes, key_size, value_size,
    key_row, key_head, key_slot, value_row, value_head, value_slot,
    fresh_key_row, fresh_key_head, fresh_key_node,
    fresh_value_row, fresh_value_head, fresh_value_node,
    COLUMNS: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per row, head and node."""
    node = tl.program_id(1)
    head = (tl.program_id(0) % heads).to(tl.int64)  # offsets of whole heads outgrow 32 bits
    row = (tl.program_id(0) // heads).to(tl.int64)
    slot = tl.load(slots + row * nodes + node)
    column = tl.arange(0, COLUMNS)
    source = fresh_keys + row * fresh_key_row + head * fresh_key_head + node * fresh_key_node
    target = keys + row * key_row + head * key_head + slot * key_slot
    mask = column < key_size
    tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)
    source = fresh_values + row * fresh_value_row + head * fresh_value_head
    source += node * fresh_value_node
    target = values + row * value_row + head * value_head + slot * value_slot
    mask = column < value_size
    tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)


# fmt: off
@triton.jit
def _compact_kernel(  # type: ignore[no-untyped-def]
    keys, values, lengths, path, accepted, rows, heads, places, key_size, value_size, key_tiles,
    key_layer, key_row, key_head, key_slot, value_layer, value_row, value_head, value_slot,
    ALL_MOVE: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per layer, row, head and tile of columns, keys' tiles first."""
    number, tile = tl.program_id(0), tl.program_id(1)
    head, row = (number % heads).to(tl.int64), (number // heads) % rows
    layer, far = (number // heads // rows).to(tl.int64), row.to(tl.int64)
    place = tl.arange(0, PLACES)
    # the root stays where it is
    moves = (place > 0) & (place < places)
    if not ALL_MOVE:
        moves = moves & (place <= tl.load(accepted + row))
    node = tl.load(path + row * places + place, mask=moves, other=0)
    length = tl.load(lengths + row)
    source, target = length + node, length + place
    if tile < key_tiles:
        start = keys + layer * key_layer + far * key_row + head * key_head
        _move(start, key_slot, source, target, moves, tile * COLUMNS, key_size, COLUMNS)
    else:
        start = values + layer * value_layer + far * value_row + head * value_head
        first = (tile - key_tiles) * COLUMNS
        _move(start, value_slot, source, target, moves, first, value_size, COLUMNS)


# fmt: off
@triton.jit
def _move(  # type: ignore[no-untyped-def]
    start, slot_stride, source, target, moves, first, size,
    COLUMNS: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """Copy slots `source` to slots `target` in columns first .. first + COLUMNS. All is loaded
    before anything is stored: the barrier keeps one warp from storing into a slot that another has
    still to load."""
    column = first + tl.arange(0, COLUMNS)
    mask = moves[:, None] & (column < size)[None, :]
    contents = tl.load(start + source[:, None] * slot_stride + column[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(start + target[:, None] * slot_stride + column[None, :], contents, mask=mask)
