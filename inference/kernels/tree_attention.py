"""Tree attention for decoding, in Triton: few queries, a long cache, read once.

Reference: `reference.attention.tree_attention`. The cache is cut into splits of a fixed size. A
program processes splits of one key/value head for a block of query rows. The Q queries times the G
query heads that share the head are rows of one matrix, so that every loaded tile of keys and values
serves all of them. Committed tokens are visible to every query, so the loop over them has no mask;
ancestor bits are read only in the last tiles, and window edges only in the first ones. At most 32
programs share a head and take its splits in turn, up to the row's length, which is read on the
device. So cost and scratch memory depend on the text and not on the capacity, and one captured CUDA
graph serves every length. A second kernel combines the programs' results by their log-sum-exp. The
assignment of splits to programs depends neither on the batch nor on the length, so the order of a
row's sums is the same alone and in a batch (flash decoding, Dao et al. 2023, with splits of fixed
size).

Legend: B rows, N nodes, Q queries, S slots, W words, h key/value heads, G query heads per key/value
head, D head size, Dv value size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads.kernels.dispatch import is_interpreted
from inference.kernels.reference.attention import parts_of

LOG2E = tl.constexpr(1.4426950408889634)
"""Exponentials are computed to the base 2, for which GPUs have an instruction."""
COMBINE_SPLITS = 16
"""Parts that the combining kernel loads at once."""


MANY_ROWS = 65
"""If results must not depend on the number of query rows, the launch for this number is always
used: it has the largest tiles."""
HOPPER_SHARED = 227 * 1024
"""Most bytes of shared memory of a program on an H100 or H200."""


@dataclass(frozen=True)
class Launch:
    """How the kernels are launched.

    block_m, block_n: query rows of a program and slots of a tile, each a power of two, at least 16.
    num_warps, num_stages: of the split kernel. block_r: query rows of a program of the combining
    kernel, a power of two.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_r: int


def launch_config(
    rows: int, head_dim: int, dtype: torch.dtype, shared: int = HOPPER_SHARED
) -> Launch:
    """The launch for `rows` = Q * G query rows per key/value head, equal for all steps.

    It is chosen for H100 and H200 (132 SMs, 228 KiB of shared memory each, matrix instructions of
    64 rows per four warps) from the compiler's reports for sm_90: 16-bit kernels with heads up to
    256 spill at most 8 bytes of registers, larger heads and float32 some hundred. shared: bytes of
    shared memory per program; on GPUs with less, which are older than Hopper, tiles shrink until
    they fit.
    """
    block_r = 1 if rows <= 64 else 4  # few rows are spread over many programs
    wide = head_dim > 128
    if dtype == torch.float32:
        # exact float32 products run on the ordinary cores with operands in registers, so they need
        # small tiles and many warps
        launch = Launch(16, 16 if wide else 32, 8, 2, block_r)
    else:
        # 16 rows are the minimum for the matrix cores; beyond 32, one instruction of 64 costs no
        # more than two of 32
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or wide else 128
        # a tile of keys and values of 64 slots x 128 x 2 bytes is 32 KiB. Three stages leave room
        # for two programs per SM, and keep a multiple of the 36 KB in flight that an SM's share of
        # 4.8 TB/s needs per microsecond of latency
        launch = Launch(block_m, 32, 8, 2, block_r) if wide else Launch(block_m, 64, 4, 3, block_r)
        if block_m == 128:  # a large tree: its rows read the cache once, not once per 64
            launch = replace(launch, num_warps=8, num_stages=2)
        elif block_m == 64 and not wide and shared < HOPPER_SHARED:
            # before Hopper, matrix instructions read their operands from registers, of which four
            # warps have too few
            launch = replace(launch, block_n=32, num_warps=8)
    size = triton.next_power_of_2(head_dim) * dtype.itemsize
    while launch.block_n > 16:
        if (launch.block_m + 2 * launch.num_stages * launch.block_n) * size <= shared:
            break
        fewer = launch.num_stages > 2
        smaller = (
            {"num_stages": launch.num_stages - 1} if fewer else {"block_n": launch.block_n // 2}
        )
        launch = replace(launch, **smaller)
    return launch


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on `device`; the interpreter has no limit."""
    if device.type != "cuda":
        return HOPPER_SHARED
    properties = torch.cuda.get_device_properties(device)
    # AMD GPUs do not report it, and have 64 KiB
    return int(getattr(properties, "shared_memory_per_block_optin", 64 * 1024))


# fmt: off
@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    words, depth, slot, start, length, asked, valid, position, window, written, word_count,
    block_n: tl.constexpr, windowed: tl.constexpr,
):
    # fmt: on
    """Which of the tile's slots query rows see [M, block_n] bool: committed and ancestors'."""
    child = slot - length  # which node a slot holds; negative for committed tokens
    inside = (child >= 0) & written
    # the bits of a tile lie in few words, since its slots follow one another
    base = tl.maximum(start - length, 0) // 32
    seen = (child < 0)[None, :] & valid[:, None]
    for i in tl.static_range(0, block_n // 32 + 1 + (block_n < 32)):
        number = tl.minimum(base + i, word_count - 1)
        word = tl.load(words + asked * word_count + number, mask=valid, other=0)
        here = (child // 32 == base + i) & inside
        seen = seen | (here[None, :] & (((word[:, None] >> (child % 32)[None, :]) & 1) == 1))
    if windowed:
        below = length + tl.load(depth + child, mask=inside, other=0).to(tl.int32)
        key_position = tl.where(child < 0, slot, below)
        seen = seen & (key_position[None, :] > position[:, None] - window)
    return seen


# fmt: off
@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    query, keys, values, words, depth, start, stop, length, asked, valid, position, peak, total,
    acc, scale, softcap, window, key_s, value_s, word_count, head_dim: tl.constexpr, value_dim:
    tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr, block_n: tl.constexpr, masked:
    tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, upcast: tl.constexpr,
):
    # fmt: on
    """Take block_n slots into a running softmax to the base 2: peak [M], total [M], acc [M, Dv]."""
    slot = start + tl.arange(0, block_n)
    d = tl.arange(0, block_d)
    v = tl.arange(0, block_v)
    place = slot.to(tl.int64)  # offsets of wide drafters' slots outgrow 32 bits
    key_at = keys + place[None, :] * key_s + d[:, None]
    value_at = values + place[:, None] * value_s + v[None, :]
    written = slot < stop
    if masked:
        key = tl.load(key_at, mask=written[None, :] & (d < head_dim)[:, None], other=0.0)
        value = tl.load(value_at, mask=written[:, None] & (v < value_dim)[None, :], other=0.0)
    else:
        if block_d == head_dim:
            key = tl.load(key_at)
        else:
            key = tl.load(key_at, mask=(d < head_dim)[:, None], other=0.0)
        if block_v == value_dim:
            value = tl.load(value_at)
        else:
            value = tl.load(value_at, mask=(v < value_dim)[None, :], other=0.0)
    narrow = value.dtype
    if upcast:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, key, input_precision="ieee")
    factor = scale
    if capped:
        # tanh of |x| through an exponential that cannot overflow
        scores = scores * scale
        bent = tl.exp(-2.0 * tl.abs(scores))
        bent = (1.0 - bent) / (1.0 + bent)
        scores = tl.where(scores < 0, -bent, bent)
        factor = softcap
    if masked:
        seen = _seen(
            words, depth, slot, start, length, asked, valid, position, window, written, word_count,
            block_n, windowed
        )
        scores = tl.where(seen, scores, float("-inf"))
    # The factor is applied in explicit fused operations: a compiler that fuses the product and the
    # difference by itself does so in the loop without a mask only, so that a token's last bit would
    # depend on which loop reads it.
    higher = tl.maximum(peak, tl.max(scores, 1) * factor)
    floor = higher
    if masked:
        floor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    weight = tl.exp2(tl.fma(scores, factor, -floor[:, None]))
    shrink = tl.exp2(peak - floor)
    total = tl.fma(total, shrink, tl.sum(weight, 1))
    weight = weight.to(narrow)
    if upcast:
        weight = weight.to(tl.float32)
    acc = tl.dot(weight, value, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


# fmt: off
@triton.jit(do_not_specialize=["nodes"])  # drafters: another number at every level
def _split_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, lengths, words, depth, at, partial, log_sums, scale, softcap, window,
    query_b, query_h, query_n, key_b, key_h, key_s, value_b, value_h, value_s, words_b, depth_b,
    at_b, word_count, queries, nodes, capacity, key_heads, groups: tl.constexpr, head_dim:
    tl.constexpr, value_dim: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr, block_m:
    tl.constexpr, block_n: tl.constexpr, split_size: tl.constexpr, windowed: tl.constexpr, capped:
    tl.constexpr, upcast: tl.constexpr,
) -> None:
    # fmt: on
    """Program (row block, row and key/value head, part): values [M, Dv], log-sum-exp [M] of
    the splits part, part + parts, ... of the row."""
    head = tl.program_id(1)
    part = tl.program_id(2)
    b = (head // key_heads).to(tl.int64)  # offsets of whole rows outgrow 32 bits
    h = head % key_heads
    length = tl.load(lengths + b).to(tl.int32)
    end = tl.minimum(length + nodes, capacity)
    splits = (end + split_size - 1) // split_size
    if part >= splits:
        return
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    asked = row // groups  # the query that a row of the matrix belongs to
    valid = asked < queries
    words += b * words_b
    depth += b * depth_b
    position = length + tl.load(at + b * at_b + asked, mask=valid, other=0).to(tl.int32)
    oldest = 0  # the first slot that some row sees
    newest = 0  # the first one that all rows see
    if windowed:
        oldest = tl.maximum(tl.min(tl.where(valid, position, 1 << 30)) - window + 1, 0)
        newest = tl.maximum(tl.max(tl.where(valid, position, 0)) - window + 1, 0)

    d = tl.arange(0, block_d)
    v = tl.arange(0, block_v)
    query += b * query_b
    head_at = (h * groups + row % groups)[:, None] * query_h
    query_at = query + head_at + asked[:, None] * query_n + d[None, :]
    rows = tl.load(query_at, mask=valid[:, None] & (d < head_dim)[None, :], other=0.0)
    if upcast:
        rows = rows.to(tl.float32)
    keys += b * key_b + h.to(tl.int64) * key_h
    values += b * value_b + h.to(tl.int64) * value_h
    peak = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    for split in range(part, splits, tl.num_programs(2)):
        first = split * split_size
        stop = tl.minimum(first + split_size, end)
        # tiles [first, edge) reach before the window of some row, [edge, plain) lie before the
        # tree, [plain, stop) need ancestor bits
        plain = tl.minimum(first + split_size, tl.minimum(length, capacity) // block_n * block_n)
        edge = first
        # fmt: off
        if windowed:
            first = tl.maximum(first, oldest // block_n * block_n)
            edge = tl.maximum(first, (newest + block_n - 1) // block_n * block_n)
            for start in tl.range(first, tl.minimum(edge, plain), block_n, num_stages=1):
                peak, total, acc = _tile(
                    rows, keys, values, words, depth, start, stop, length, asked, valid, position,
                    peak, total, acc, scale, softcap, window, key_s, value_s, word_count, head_dim,
                    value_dim, block_d, block_v, block_n, True, True, capped, upcast)
        for start in tl.range(edge, plain, block_n):
            peak, total, acc = _tile(
                rows, keys, values, words, depth, start, stop, length, asked, valid, position, peak,
                total, acc, scale, softcap, window, key_s, value_s, word_count, head_dim, value_dim,
                block_d, block_v, block_n, False, False, capped, upcast)
        for start in tl.range(tl.maximum(first, plain), stop, block_n, num_stages=1):
            peak, total, acc = _tile(
                rows, keys, values, words, depth, start, stop, length, asked, valid, position, peak,
                total, acc, scale, softcap, window, key_s, value_s, word_count, head_dim, value_dim,
                block_d, block_v, block_n, True, windowed, capped, upcast)
        # fmt: on
    # a row that saw nothing here: zeros, and no weight later
    divisor = tl.where(total > 0, total, 1.0)
    place = (head.to(tl.int64) * tl.num_programs(2) + part) * queries * groups + row
    at = partial + place[:, None] * value_dim + v[None, :]
    tl.store(at, acc / divisor[:, None], mask=valid[:, None] & (v < value_dim)[None, :])
    log_sum = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
    tl.store(log_sums + place, log_sum, mask=valid)


# fmt: off
@triton.jit(do_not_specialize=["nodes"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial, log_sums, sinks, out, lengths, queries, nodes, capacity, key_heads, parts, groups:
    tl.constexpr, value_dim: tl.constexpr, block_v: tl.constexpr, block_r: tl.constexpr, block_s:
    tl.constexpr, split_size: tl.constexpr, sunk: tl.constexpr,
) -> None:
    # fmt: on
    """Program (R query rows, row and key/value head): parts weighted by log-sum-exp."""
    b = tl.program_id(1) // key_heads
    h = tl.program_id(1) % key_heads
    length = tl.load(lengths + b).to(tl.int32)
    row = tl.program_id(0) * block_r + tl.arange(0, block_r)
    asked = row // groups
    valid = asked < queries
    head = h * groups + row % groups
    splits = (tl.minimum(length + nodes, capacity) + split_size - 1) // split_size
    stop = tl.minimum(splits, parts)  # the others were never written
    first = tl.program_id(1).to(tl.int64) * parts * queries * groups
    v = tl.arange(0, block_v)
    peak = tl.full([block_r], float("-inf"), tl.float32)
    total = tl.zeros([block_r], tl.float32)
    acc = tl.zeros([block_r, block_v], tl.float32)
    for chunk in range(0, stop, block_s):
        part = chunk + tl.arange(0, block_s)
        there = valid[:, None] & (part < stop)[None, :]
        place = first + part[None, :] * queries * groups + row[:, None]
        log_sum = tl.load(log_sums + place, mask=there, other=float("-inf"))
        at = partial + place[:, :, None] * value_dim + v[None, None, :]
        found = tl.load(at, mask=there[:, :, None] & (v < value_dim)[None, None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(log_sum, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(log_sum - base[:, None])
        shrink = tl.exp2(peak - base)
        total = tl.fma(total, shrink, tl.sum(weight, 1))
        acc = tl.fma(acc, shrink[:, None], tl.sum(weight[:, :, None] * found, 1))
        peak = higher
    if sunk:  # takes weight but has no value
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        higher = tl.maximum(peak, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = (b.to(tl.int64) * queries + asked) * key_heads * groups + head
    at = out + out_row[:, None] * value_dim + v[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=valid[:, None] & (v < value_dim)[None, :])


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    at: Tensor | None = None,
    split_size: int = 256,
    invariant: bool = False,
    launch: Launch | None = None,
) -> Tensor:
    """`reference.attention.tree_attention` in two kernels -> [B, Q, h*G, Dv].

    keys and values may have any strides if their last dimension is contiguous. split_size: a
    multiple of the launch's block_n. launch: for measurements; default: `launch_config`. Scratch
    memory comes from torch's allocator, and so from the graph's pool during a capture. Call it once
    before capturing, so that it is compiled.
    """
    rows, heads, queries, head_dim = query.shape
    key_heads, capacity, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    groups, nodes = heads // key_heads, depth.shape[1]
    at = depth if at is None else at
    shared = _shared_memory(query.device)
    rows_of_launch = MANY_ROWS if invariant else queries * groups
    launch = launch or launch_config(rows_of_launch, head_dim, query.dtype, shared)
    assert query.dtype == keys.dtype == values.dtype, (query.dtype, keys.dtype, values.dtype)
    assert keys.stride(3) == 1 and values.stride(3) == 1, "each key and value must be contiguous"
    assert split_size % launch.block_n == 0, (split_size, launch.block_n)
    fitting = words.shape[1] == at.shape[1] == queries and 32 * words.shape[2] >= nodes
    assert fitting, (words.shape, depth.shape, at.shape)
    query = query if query.stride(3) == 1 else query.contiguous()
    words, depth, at, lengths = (x.contiguous() for x in (words, depth, at, lengths))
    parts = parts_of(capacity, split_size)
    shape = (rows, key_heads, parts, queries * groups, value_dim)
    partial = query.new_empty(shape, dtype=torch.float32)
    log_sums = query.new_empty(rows, key_heads, parts, queries * groups, dtype=torch.float32)
    out = query.new_empty(rows, queries, heads, value_dim)
    # both factors convert scores to the base 2, in which the kernels compute exponentials
    bend = 0.0 if softcap is None else softcap * LOG2E.value
    scale = scaling * LOG2E.value if softcap is None else scaling / softcap
    words_b, depth_b, at_b = (x.stride(0) if x.shape[0] > 1 else 0 for x in (words, depth, at))
    block_v = max(16, triton.next_power_of_2(value_dim))
    _split_kernel[(triton.cdiv(queries * groups, launch.block_m), rows * key_heads, parts)](
        *(query, keys, values, lengths, words, depth, at, partial, log_sums),
        *(scale, bend, window or 0),
        *(*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3]),
        *(words_b, depth_b, at_b, words.shape[2]),
        *(queries, nodes, capacity, key_heads),
        groups=groups,
        head_dim=head_dim,
        value_dim=value_dim,
        block_d=max(16, triton.next_power_of_2(head_dim)),
        block_v=block_v,
        block_m=launch.block_m,
        block_n=launch.block_n,
        split_size=split_size,
        windowed=window is not None,
        capped=softcap is not None,
        # the interpreter stores bfloat16 as raw bits, which numpy cannot multiply
        upcast=is_interpreted() and query.dtype == torch.bfloat16,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    _combine_kernel[(triton.cdiv(queries * groups, launch.block_r), rows * key_heads)](
        *(partial, log_sums, log_sums if sinks is None else sinks, out, lengths),
        *(queries, nodes, capacity, key_heads, parts),
        groups=groups,
        value_dim=value_dim,
        block_v=block_v,
        block_r=launch.block_r,
        block_s=COMBINE_SPLITS,
        split_size=split_size,
        sunk=sinks is not None,
        num_warps=4,
    )
    return out
