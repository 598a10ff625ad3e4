"""Compares kernels with plain torch and the memory bandwidth: `python -m
scripts.tools.bench_kernels --out FILE`.

It needs a GPU. `triton.testing.do_bench` times every call many times, each with an empty level-2
cache. A kernel's bandwidth is the number of bytes that it must read and write at least, over its
median time. It is reported as a share of the bandwidth of a large copy.

Legend: B rows, N nodes, L context, D head size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heads.api.errors import UserError, suggest
from heads.api.tree import TokenTree
from heads.kernels.dispatch import triton_version
from heads.kernels.reference.row_losses import NAMES, ROW_LOSSES
from inference.kernels.reference.attention import TREE_ATTENTION, visible
from inference.kernels.reference.commit import ACCEPT_WALK, COMPACT
from inference.kernels.reference.heads import RESIDUAL_BLOCKS
from inference.kernels.reference.noise import NOISE_PICK
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.target.hardware import device_facts
from scripts.tools.common import command

Call = Callable[[], Any]
Timer = Callable[[Call], Sequence[float]]
"""Milliseconds of a call: the median, and the ends of the middle 95%."""
KERNEL, COPY = "kernel", "copy"
BF16 = torch.bfloat16


CONTEXTS = ((1, 1024), (1, 8192), (1, 32768), (16, 1024), (16, 8192))


@dataclass(frozen=True)
class Sizes:
    """The measured sizes; the defaults are those of Llama-3.1-8B."""

    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    """Layers whose cache is compacted."""
    hidden: int = 4096
    vocab: int = 128256
    contexts: tuple[tuple[int, int], ...] = CONTEXTS
    """Pairs of rows and committed tokens per row."""
    nodes: tuple[int, ...] = (1, 8, 64)
    splits: tuple[int, ...] = (128, 256, 512, 1024)
    """Split sizes of tree attention; the first arm, `kernel`, has the default one."""
    copy_bytes: int = 1 << 29
    rows: int = 1024
    """Rows of logits of a loss."""


@dataclass(frozen=True)
class Contest:
    """Several calls that do the same; calls[KERNEL] is Headstart's kernel."""

    what: dict[str, int]
    calls: dict[str, Call]
    moved: int
    """Bytes that one call must read and write at least."""
    difference: float
    """Largest difference of the kernel's result from the reference's, as a share of the largest
    value.

    For `noise_pick`: share of nodes with another pick (scores that differ by less than the noise's
    rounding).
    """


def report(given: argparse.Namespace) -> None:
    """Measure and write."""
    for name in given.benches:
        if name not in BENCHES:
            raise UserError(f"there is no bench '{name}'.{suggest(name, BENCHES)}")
    if not torch.cuda.is_available():
        raise UserError(
            "kernels are measured on a CUDA device, and torch sees none here; under the "
            "interpreter they run for tests only, at no meaningful speed. Run this on a GPU, "
            "with a CUDA build of torch."
        )
    from triton.testing import do_bench

    timer = partial(do_bench, quantiles=(0.5, 0.025, 0.975))
    device = torch.device("cuda")
    content = measure(given.benches or list(BENCHES), device, Sizes(), timer)
    write_json(given.out, {"command": given.command, **content})
    print(given.out)


@torch.no_grad()
def measure(
    benches: Sequence[str], device: torch.device, sizes: Sizes, timer: Timer
) -> dict[str, object]:
    """The report: device, versions, sizes and a result per comparison."""
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    sink = torch.empty_like(source)
    copy = timer(lambda: sink.copy_(source))
    bandwidth = 2 * source.nbytes / copy[0]
    results = []
    for name in benches:
        for contest in BENCHES[name](device, sizes):
            times = {label: timer(call) for label, call in contest.calls.items()}
            own = times[KERNEL][0]
            others = {label: found[0] / own for label, found in times.items() if label != KERNEL}
            results.append(
                {
                    "bench": name,
                    **contest.what,
                    "bytes": contest.moved,
                    "difference": contest.difference,
                    "milliseconds": {label: list(found) for label, found in times.items()},
                    "share_of_copy_bandwidth": contest.moved / own / bandwidth,
                    "kernel_is_faster_than": others,
                }
            )
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return {
        **process_facts(),
        "device": device_facts(device),
        "triton": triton_version(),
        "sizes": asdict(sizes),
        "copy_milliseconds": list(copy),
        "results": results,
    }


def furthest(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    scale = max(float(expected.abs().max()), 1e-30)
    return float((found.float() - expected.float()).abs().max()) / scale


def wide_tree(nodes: int, device: torch.device) -> TokenTree:
    """A tree in which each node has up to four children, numbered level by level."""
    parents = [max(0, (node - 1) // 4) for node in range(nodes)]
    return TokenTree.from_parents(
        torch.tensor([parents], device=device), max(1, nodes.bit_length())
    )


def tree_attention(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """Compared with scaled_dot_product_attention with the whole mask, without the empty half of the
    buffers.

    `sdpa`: query heads of one group stacked as rows, as the decoder does without the kernel; `sdpa,
    repeated keys`: keys and values copied for each query head, as transformers does with a mask.
    """
    groups, scaling = sizes.heads // sizes.key_heads, sizes.head_dim**-0.5
    for (rows, context), nodes in product(sizes.contexts, sizes.nodes):
        end, tree = context + nodes, wide_tree(nodes, device)
        lengths, words = torch.full((rows,), context, device=device), tree.words()
        # like planned memory
        buffer = (rows, sizes.key_heads, 2 * context + nodes, sizes.head_dim)
        asked = (rows, sizes.heads, nodes, sizes.head_dim)
        query, keys, values = (
            torch.randn(shape, device=device, dtype=BF16) for shape in (asked, buffer, buffer)
        )
        bias = torch.zeros(rows, 1, nodes, end, device=device, dtype=BF16)
        hidden = ~visible(lengths, words, tree.depth, end, None)[:, None]
        bias.masked_fill_(hidden, float("-inf"))
        stacked = bias.repeat(1, 1, groups, 1)
        kernel = partial(
            TREE_ATTENTION.triton(),
            *(query, keys, values, lengths, words, tree.depth),
            scaling=scaling,
        )
        used = (keys[:, :, :end], values[:, :, :end])
        calls: dict[str, Call] = {
            KERNEL: kernel,
            "sdpa": partial(attend_stacked, query, *used, stacked, scaling),
            "sdpa, repeated keys": partial(attend_repeated, query, *used, bias, scaling),
        }
        for size in sizes.splits:
            calls[f"kernel, splits of {size}"] = partial(kernel, split_size=size)
        moved = 2 * rows * sizes.key_heads * end * sizes.head_dim * 2 + 2 * query.nbytes
        what = {"rows": rows, "context": context, "nodes": nodes}
        yield Contest(what, calls, moved, furthest(kernel(), calls["sdpa"]()))


def attend_stacked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention [B, N, heads, D], the query heads of one group stacked as rows of one key head."""
    packed = query.reshape(*keys.shape[:2], -1, query.shape[-1])
    out = scaled_dot_product_attention(packed, keys, values, mask, scale=scaling)
    return out.reshape(query.shape).transpose(1, 2)


def attend_repeated(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention [B, N, heads, D], keys and values copied for each query head."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    return scaled_dot_product_attention(query, keys, values, mask, scale=scaling).transpose(1, 2)


def walk_commit(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """The walk and the compaction of all layers together, compared with the same in torch
    operations."""
    for (rows, context), nodes in product(sizes.contexts, sizes.nodes):
        if nodes == 1 or context * rows > 8192:  # the cache before the tree is not touched
            continue
        tree = wide_tree(nodes, device)
        tokens = torch.randint(0, 4, (rows, nodes), device=device)
        walked = (tokens, tokens.roll(-1, 1), tree)
        shape = (sizes.layers, rows, sizes.key_heads, context + nodes, sizes.head_dim)
        keys, values = (torch.randn(shape, device=device, dtype=BF16) for _ in range(2))
        cache = (keys, values, torch.full((rows,), context, device=device))

        path = ACCEPT_WALK.triton()(*walked).path
        kernels = (ACCEPT_WALK.triton(), COMPACT.triton())
        calls: dict[str, Call] = {
            KERNEL: partial(commit, *kernels, walked, cache),
            "reference": partial(commit, ACCEPT_WALK.reference, COMPACT.reference, walked, cache),
        }
        entries = 2 * sizes.layers * rows * sizes.key_heads * path.shape[1] * sizes.head_dim * 2
        difference = furthest(path, ACCEPT_WALK.reference(*walked).path)
        what = {"rows": rows, "context": context, "nodes": nodes}
        yield Contest(what, calls, 2 * entries, difference)


def commit(walk: Any, compact: Any, walked: tuple[Any, ...], cache: tuple[Any, ...]) -> None:
    compact(*cache, walk(*walked).path)


def noise_pick(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """Noise, temperature and argmax in one pass, compared with the same in torch and with argmax
    alone."""
    seeds = torch.ones(1, dtype=torch.int64, device=device)
    for nodes in sizes.nodes:
        logits = torch.randn(1, nodes, sizes.vocab, device=device, dtype=BF16)
        operands = (logits, torch.arange(nodes, device=device)[None], seeds, 0.7)
        calls = both(NOISE_PICK, operands)
        different = calls[KERNEL]() != calls["reference"]()
        calls["argmax"] = partial(torch.argmax, logits, -1)
        what = {"nodes": nodes, "vocab": sizes.vocab}
        yield Contest(what, calls, logits.nbytes, float(different.float().mean()))


def residual_blocks(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """The residual blocks of four Medusa heads, compared with one batched product and the
    operations after it."""
    heads, size = 4, sizes.hidden
    for rows in (1, 4, 16):
        shapes = ((heads, rows, size), (heads, size, size), (heads, size))
        operands = tuple(
            torch.randn(shape, device=device, dtype=BF16) / size**0.5 for shape in shapes
        )
        calls = both(RESIDUAL_BLOCKS, operands)
        moved = operands[1].nbytes + 2 * operands[0].nbytes
        difference = furthest(calls[KERNEL](), calls["reference"]())
        yield Contest({"heads": heads, "rows": rows, "hidden": size}, calls, moved, difference)


def row_losses(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """Losses for training drafters, forward and backward, compared with plain torch."""
    for names in (("soft_cross_entropy",), ("cross_entropy", "total_variation"), NAMES):
        logits, target = (torch.randn(sizes.rows, sizes.vocab, device=device) for _ in range(2))
        labels = torch.randint(sizes.vocab, (sizes.rows,), device=device)
        given = (4 * logits).to(BF16).requires_grad_(), (4 * target).to(BF16), labels, names
        calls: dict[str, Call] = {
            KERNEL: partial(gradient, ROW_LOSSES.triton(), *given),
            "reference": partial(gradient, ROW_LOSSES.reference, *given),
        }
        difference = furthest(calls[KERNEL](), calls["reference"]())
        # both are read twice, and the gradient is written
        moved = 5 * given[0].nbytes
        what = {"losses": len(names), "rows": sizes.rows, "vocab": sizes.vocab}
        yield Contest(what, calls, moved, difference)


def gradient(losses: Any, logits: Tensor, *given: Any) -> Tensor:
    """The gradient of the logits for the sum of all losses."""
    with torch.enable_grad():
        found = losses(logits, *given)
        (slope,) = torch.autograd.grad(torch.stack(list(found.values.values())).sum(), logits)
    return slope


def both(op: Any, operands: tuple[Any, ...]) -> dict[str, Call]:
    """The kernel of an operation and its reference, as calls."""
    return {KERNEL: partial(op.triton(), *operands), "reference": partial(op.reference, *operands)}


BENCHES: dict[str, Callable[[torch.device, Sizes], Iterator[Contest]]] = {
    bench.__name__: bench
    for bench in (tree_attention, walk_commit, noise_pick, residual_blocks, row_losses)
}
"""Benchmarks by name; a new kernel adds its own."""


main = command(
    report,
    benches={
        "positional": True,
        "nargs": "*",
        "metavar": "BENCH",
        "help": f"of {', '.join(BENCHES)}; none: all",
    },
    out={"type": Path, "required": True, "help": "where the JSON report is written"},
)

if __name__ == "__main__":
    sys.exit(main())
