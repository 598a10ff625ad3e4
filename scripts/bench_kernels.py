"""Kernels against plain torch and the memory's speed: `python -m scripts.bench_kernels --out FILE` on a GPU.

All that is compared runs in one process in shuffled rounds, each call captured as a CUDA graph, a large copy
among them; results are ratios within a round with 95% bootstrap intervals over rounds. A kernel's bandwidth
is what it must read and write at least, over its time, as a share of what the copy moved. Operands are spread
over so many layers that no cache holds them.

Legend: B rows, N nodes, L context, D head size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heads.api.errors import UserError, suggest
from heads.api.tree import TokenTree
from inference.decoding.costs import captured, interleaved
from inference.kernels.dispatch import triton_version
from inference.kernels.reference.attention import TREE_ATTENTION, visible
from inference.kernels.reference.commit import ACCEPT_WALK, COMPACT
from inference.kernels.reference.heads import RESIDUAL_BLOCKS
from inference.kernels.reference.noise import NOISE_PICK
from inference.measure.config import process_facts
from inference.measure.metrics import interval95, resample_weights
from inference.target.hardware import device_facts

Call = Callable[[], Any]
KERNEL, COPY = "kernel", "copy"
WARMUP = 3


@dataclass(frozen=True)
class Sizes:
    """What is measured; the defaults are those of Llama-3.1-8B."""

    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    """Layers whose cache is compacted; and the most that operands are spread over."""
    hidden: int = 4096
    vocab: int = 128256
    contexts: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (1, 32768), (16, 1024), (16, 8192))
    """Pairs of rows and committed tokens per row."""
    nodes: tuple[int, ...] = (1, 8, 64)
    splits: tuple[int, ...] = (128, 256, 512, 1024)
    """Split sizes of tree attention; the first arm, `kernel`, has the default one."""
    spread_bytes: int = 1 << 28
    """Operands are repeated until they hold this much: several times a GPU's level-2 cache."""
    copy_bytes: int = 1 << 29


@dataclass(frozen=True)
class Contest:
    """One thing that several calls do. calls[KERNEL] is ours; `moved`: bytes that one call must read and
    write at least.
    """

    what: dict[str, Any]
    calls: dict[str, Call]
    moved: int
    difference: float
    """Largest difference between the kernel's result and the reference's, as a share of the largest
    result.
    """
    notes: dict[str, Any] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_kernels", description=__doc__.split("\n")[0]
    )
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}; none: all")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON report is written")
    parser.add_argument("--repeats", type=int, default=30, help="rounds")
    given = parser.parse_args(arguments)
    try:
        for name in given.benches:
            if name not in BENCHES:
                raise UserError(f"there is no bench '{name}'.{suggest(name, BENCHES)}")
        if not torch.cuda.is_available():
            raise UserError(
                "kernels are measured on a CUDA device, and torch sees none here; under the interpreter they "
                "run for tests only, at no meaningful speed. Run this on a GPU, with a CUDA build of torch."
            )
        report = measure(given.benches or list(BENCHES), torch.device("cuda"), Sizes(), given.repeats)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{len(report['results'])} comparisons: {given.out}")
    return 0


@torch.no_grad()
def measure(benches: list[str], device: torch.device, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """The report: device, versions, sizes and a result per comparison."""
    results = []
    for name in benches:
        for contest in BENCHES[name](device, sizes):
            results.append({"bench": name, **judge(contest, device, sizes, repeats)})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return {
        **process_facts(),
        "device": device_facts(device),
        "triton": triton_version(),
        "sizes": asdict(sizes),
        "repeats": repeats,
        "results": results,
    }


def judge(contest: Contest, device: torch.device, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Run a contest beside the copy; seconds are medians, speedups and the share of the bandwidth have
    intervals.
    """
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    sink = torch.empty_like(source)
    calls = {**contest.calls, COPY: lambda: sink.copy_(source)}
    if device.type == "cuda":
        calls = {name: captured(call) for name, call in calls.items()}
    rounds = {name: np.array(times) for name, times in interleaved(calls, device, repeats, WARMUP).items()}
    weights = resample_weights(repeats, seed=0)

    def ratio(upper: str, lower: str, factor: float = 1.0) -> dict[str, float]:
        low, high = interval95(weights @ rounds[upper], weights @ rounds[lower])
        value = float(rounds[upper].sum() / rounds[lower].sum())
        return {"value": value * factor, "low": low * factor, "high": high * factor}

    return {
        **contest.what,
        "bytes": contest.moved,
        "difference": contest.difference,
        "seconds": {name: float(np.median(times)) for name, times in rounds.items()},
        "copy_bytes_per_second": 2 * source.nbytes / float(np.median(rounds[COPY])),
        "share_of_copy_bandwidth": ratio(COPY, KERNEL, contest.moved / (2 * source.nbytes)),
        "kernel_is_faster_than": {name: ratio(name, KERNEL) for name in contest.calls if name != KERNEL},
        **contest.notes,
    }


def layers_for(size: int, sizes: Sizes) -> int:
    """How many operands of `size` bytes no cache holds, at most as many as a model has layers."""
    return max(1, min(sizes.layers, -(-sizes.spread_bytes // size)))


def each(function: Callable[..., Any], operands: list[tuple[Any, ...]], **named: Any) -> Call:
    """A call that runs `function` on every set of operands."""

    def call() -> None:
        for operand in operands:
            function(*operand, **named)

    return call


def furthest(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    scale = float(expected.abs().max())
    return float((found.float() - expected.float()).abs().max()) / max(scale, 1e-30)


def wide_tree(nodes: int, device: torch.device) -> TokenTree:
    """A tree of which each node has up to four children, numbered level by level."""
    parents = [max(0, (node - 1) // 4) for node in range(nodes)]
    return TokenTree.from_parents(torch.tensor([parents], device=device), max(1, nodes.bit_length()))


# --- tree attention -----------------------------------------------------------------------------------------


def tree_attention(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """Against scaled_dot_product_attention with the whole mask, which is spared the empty half of the
    buffers.

    `sdpa`: query heads of one group stacked as rows, as the decoder does without the kernel; `sdpa, repeated
    keys`: keys and values copied for each query head, as transformers does where there is a mask.
    """
    for rows, context in sizes.contexts:
        for nodes in sizes.nodes:
            yield _attention_contest(device, sizes, rows, context, nodes)


def _attention_contest(device: torch.device, sizes: Sizes, rows: int, context: int, nodes: int) -> Contest:
    groups, end = sizes.heads // sizes.key_heads, context + nodes
    scaling = sizes.head_dim**-0.5
    tree = wide_tree(nodes, device)
    lengths, words = torch.full((rows,), context, device=device), tree.words()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    buffer = (rows, sizes.key_heads, 2 * context + nodes, sizes.head_dim)  # half empty, as planned memory is
    used = 2 * rows * sizes.key_heads * end * sizes.head_dim * 2
    layers = layers_for(used, sizes)
    operands = [
        (normal(rows, sizes.heads, nodes, sizes.head_dim), normal(*buffer), normal(*buffer))
        for _ in range(layers)
    ]
    bias = torch.zeros(rows, 1, nodes, end, device=device, dtype=torch.bfloat16)
    bias.masked_fill_(~visible(lengths, words, tree.depth, end, None)[:, None], float("-inf"))
    stacked = bias.repeat(1, 1, groups, 1)

    def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        packed = query.reshape(rows, sizes.key_heads, groups * nodes, sizes.head_dim)
        out = scaled_dot_product_attention(
            packed, keys[:, :, :end], values[:, :, :end], stacked, scale=scaling
        )
        return out.reshape(query.shape).transpose(1, 2)

    def repeated(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (x[:, :, :end].repeat_interleave(groups, 1) for x in (keys, values))
        return scaled_dot_product_attention(query, keys, values, bias, scale=scaling).transpose(1, 2)

    whole = [(*operand, lengths, words, tree.depth) for operand in operands]
    kernel = TREE_ATTENTION.triton()
    calls = {KERNEL: each(kernel, whole, scaling=scaling)}
    calls |= {
        f"kernel, splits of {s}": each(kernel, whole, scaling=scaling, split_size=s) for s in sizes.splits
    }
    calls |= {"sdpa": each(sdpa, operands), "sdpa, repeated keys": each(repeated, operands)}
    return Contest(
        {"rows": rows, "context": context, "nodes": nodes, "layers": layers},
        calls,
        layers * (used + 2 * operands[0][0].nbytes),
        furthest(kernel(*whole[0], scaling=scaling), sdpa(*operands[0])),
    )


# --- commit -------------------------------------------------------------------------------------------------


def walk_commit(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """The walk and the compaction of all layers together, against the same in torch operations."""
    for rows, context in sizes.contexts:
        for nodes in sizes.nodes:
            if nodes > 1 and context * rows <= 8192:  # what lies before the tree is not touched
                yield _commit_contest(device, sizes, rows, context, nodes)


def _commit_contest(device: torch.device, sizes: Sizes, rows: int, context: int, nodes: int) -> Contest:
    tree = wide_tree(nodes, device)
    tokens = torch.randint(0, 4, (rows, nodes), device=device)
    picks = tokens.roll(-1, 1)
    lengths = torch.full((rows,), context, device=device)
    shape = (sizes.layers, rows, sizes.key_heads, context + nodes, sizes.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    def commit(walk: Callable[..., Any], compact: Callable[..., None]) -> Call:
        def call() -> None:
            compact(keys, values, lengths, walk(tokens, picks, tree).path)

        return call

    path = ACCEPT_WALK.triton()(tokens, picks, tree).path
    expected = ACCEPT_WALK.reference(tokens, picks, tree).path
    entries = 2 * sizes.layers * rows * sizes.key_heads * path.shape[1] * sizes.head_dim * 2
    return Contest(
        {"rows": rows, "context": context, "nodes": nodes},
        {
            KERNEL: commit(ACCEPT_WALK.triton(), COMPACT.triton()),
            "reference": commit(ACCEPT_WALK.reference, COMPACT.reference),
        },
        2 * entries,
        furthest(path, expected),
    )


# --- noise and heads ----------------------------------------------------------------------------------------


def noise_pick(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """Noise, temperature and argmax in one pass, against the same in torch and against argmax alone, which
    every decoder pays.
    """
    for nodes in sizes.nodes:
        layers = layers_for(nodes * sizes.vocab * 2, sizes)
        positions = torch.arange(nodes, device=device)[None]
        seeds = torch.ones(1, dtype=torch.int64, device=device)
        operands = [
            (torch.randn(1, nodes, sizes.vocab, device=device, dtype=torch.bfloat16), positions, seeds, 0.7)
            for _ in range(layers)
        ]
        kernel = NOISE_PICK.triton()
        different = kernel(*operands[0]) != NOISE_PICK.reference(*operands[0])
        yield Contest(
            {"nodes": nodes, "vocab": sizes.vocab, "layers": layers},
            {
                KERNEL: each(kernel, operands),
                "reference": each(NOISE_PICK.reference, operands),
                "argmax": each(lambda logits, *_: logits.argmax(-1), operands),
            },
            layers * operands[0][0].nbytes,
            float(different.float().mean()),
            {"difference_is": "share of nodes with another pick: scores nearer than the noise's rounding"},
        )


def residual_blocks(device: torch.device, sizes: Sizes) -> Iterator[Contest]:
    """The residual blocks of four Medusa heads, against one batched product and what follows it."""
    heads = 4
    for rows in (1, 4, 16):
        layers = layers_for(heads * sizes.hidden**2 * 2, sizes)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16) / sizes.hidden**0.5

        operands = [
            (
                normal(heads, rows, sizes.hidden),
                normal(heads, sizes.hidden, sizes.hidden),
                normal(heads, sizes.hidden),
            )
            for _ in range(layers)
        ]
        kernel = RESIDUAL_BLOCKS.triton()
        yield Contest(
            {"heads": heads, "rows": rows, "hidden": sizes.hidden, "layers": layers},
            {KERNEL: each(kernel, operands), "reference": each(RESIDUAL_BLOCKS.reference, operands)},
            layers * (operands[0][1].nbytes + 2 * operands[0][0].nbytes),
            furthest(kernel(*operands[0]), RESIDUAL_BLOCKS.reference(*operands[0])),
        )


BENCHES: dict[str, Callable[[torch.device, Sizes], Iterator[Contest]]] = {
    "tree_attention": tree_attention,
    "walk_commit": walk_commit,
    "noise_pick": noise_pick,
    "residual_blocks": residual_blocks,
}
"""What can be measured, by name; a new kernel adds its own."""


if __name__ == "__main__":
    raise SystemExit(main())
