"""Counts the kernels that a decoding step launches: `python -m scripts.evidence.launches` writes
docs/reports/launches.{json,md}.

The counts are from toy models of the families' shapes, since the number of operations does not
depend on sizes. Without compilation, every torch operation that is neither a view nor an allocation
is a launch. An operation with a Headstart kernel counts that kernel's launches. Inductor compiles
compiled layers (`decode.compile`) for a CPU; its loops and the library's products are counted in
the program that it writes. Libraries may launch more than one kernel for a product.

The time of a step on a GPU is estimated from its bytes and launches (`StepModel`), for comparison
with a measured time (`python -m scripts.evidence.gpu speed`). Bytes are the weights that the
products read and the cached keys and values of the text; activations are left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from heads.kernels.dispatch import Choice, Op
from heads.nn.blocks import RMSNorm
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.layers import compile_layers
from inference.decoding.requests import Request
from inference.kernels import drafter_attention
from inference.report.markdown import markdown_table
from inference.target.model import TargetModel
from scripts.evidence.acceptance.shapes import (
    FULL,
    LLAMA,
    QWEN,
    TOY,
    Shape,
    as_target,
    build_model,
    new_head,
)
from scripts.evidence.common import Facts, write_report
from scripts.tools.common import REPORTS, command

KERNELS = {"tree_attention": 2, "write_clock": 0, "row_linear": 2}
"""Launches of Headstart's kernels that have more or fewer than one; the clock does not count."""
PRODUCTS = ("mm", "addmm", "linear")
"""Operations that multiply by a weight."""
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")
"""Allocations, and the view in which a product of more than two dimensions is returned, which its
schema does not call one."""
LAYERS = (2, 4)
DEPTH = 5
ABOUT = (
    "**layer**: launches per target layer, and in brackets how many of them are products with "
    "weights; **outside**: of the verification, outside of layers. **draft**, **judge**, "
    "**commit**: of an EAGLE-3 chain of five, where judging is picking tokens and walking the "
    "draft. **ideal**: milliseconds for reading the target's weights alone."
)
ABOUT_TIMES = (
    "Estimated milliseconds of a step by the tokens in the cache: bfloat16, one row, 4.3 TB/s, of "
    "which reading weights, keys and values reaches 86%; 1.9 us for every launch that is no "
    "product."
)


@dataclass(frozen=True)
class Tally:
    """Launches, and how many of them are products with weights."""

    launches: float = 0.0
    products: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.launches + other.launches, self.products + other.products)

    def __mul__(self, factor: float) -> Tally:
        return Tally(self.launches * factor, self.products * factor)


class Launches(TorchDispatchMode):
    """Counts launches by phase, and those of products. phase: set by the code that runs the
    step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.phase, self.paused = "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1].rstrip("_")
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        view = alias is not None and not alias.is_write
        if not view and not self.paused and name not in FREE and returns:
            self.counts[self.phase] += 1
            self.products[self.phase] += name in PRODUCTS
        return out

    def take(self, phase: str) -> Tally:
        """What was counted in a phase, which then begins anew."""
        return Tally(self.counts.pop(phase, 0), self.products.pop(phase, 0))

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within the block, Headstart's operations count as their kernels, and the reference does
        their work. Attention of drafters counts as one kernel, and so does a norm of theirs, for
        which torch has a fused kernel on a GPU."""
        norm_by_parts = RMSNorm.forward

        def counted(op: Op, first: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[self.phase] += KERNELS.get(op.name, 1)
            with self.pause():
                return op.reference(first, *args, **kwargs)

        def norm(part: RMSNorm, states: Tensor) -> Tensor:
            self.counts[self.phase] += 1
            with self.pause():
                return norm_by_parts(part, states)

        def on_a_gpu(*_given: Any) -> Choice:
            return Choice("triton", "launches are counted")

        with (
            mock.patch.object(Op, "__call__", counted),
            mock.patch.object(RMSNorm, "forward", norm),
            mock.patch.object(drafter_attention, "choose", on_a_gpu),
        ):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing within the block."""
        self.paused, before = True, self.paused
        try:
            yield
        finally:
            self.paused = before


def step_launches(target: TargetModel, drafter: Any) -> dict[str, Tally]:
    """Launches of a step by phase: "draft", "verify", "other" (judging), "commit"."""
    decode = DecodeConfig(depth=DEPTH, max_new_tokens=24, graph="off")
    decode = decode if drafter is not None else decode.without_draft()
    engine, launches = Engine(target, drafter, decode), Launches()
    border, verify = StepClock.border, TargetModel.verify
    found: dict[str, Tally] = {}
    steps: list[int] = []

    def at_border(clock: StepClock, ended: str) -> None:
        border(clock, ended)
        if ended:
            found[ended] = found.get(ended, Tally()) + launches.take("step")
        else:
            steps.append(1)
        launches.phase = "" if ended == "commit" else "step"

    def as_on_a_gpu(self: TargetModel, *given: Any) -> Any:
        # lengths that only the device knows, as in captured steps
        cache, tokens, tree, lengths, _, needs, *_rest = given
        return verify(self, cache, tokens, tree, lengths, None, needs)

    with (
        mock.patch.object(StepClock, "border", at_border),
        mock.patch.object(TargetModel, "verify", as_on_a_gpu),
        launches,
        launches.kernels(),
    ):
        list(engine.run([Request(0, (5, 6, 7, 8), 0, 24)]))
    return {phase: tally * (1 / len(steps)) for phase, tally in found.items()}


def compiled_layer(shape: Shape) -> Tally:
    """Launches of one compiled layer: loops that inductor makes, products, and the launches of the
    opaque attention over the cache: a write and the kernel."""
    from torch._inductor.utils import run_and_get_code  # takes seconds to import

    target = as_target(build_model(shape, torch.device("cpu"), torch.float64, 64))
    torch.compiler.reset()
    compile_layers(target)

    def verify() -> Any:
        cache, row = target.new_cache(1, 16), torch.tensor([0])
        cache.writer.compiled = True
        tokens = torch.arange(1, 10)[None]
        target.prefill(cache, row, tokens[:, :4], row + 4, FeatureSpec())
        tree = TokenTree.chain(4)
        return target.verify(cache, tokens[:, 4:], tree, row + 4, None, FeatureSpec())

    _, programs = run_and_get_code(verify)
    counts = [count_in(program) for program in programs]
    assert counts, "inductor has written no program"
    most = max(counts, key=lambda tally: tally.launches)
    return most + Tally(1 + KERNELS["tree_attention"])


def count_in(program: str) -> Tally:
    """Launches in a program that inductor writes for a CPU, without those of the opaque
    operation."""
    body = program[program.index("def call") :]
    loops = re.findall(r"^\s+(?:cpp_fused\w*|\w*cpp_\w+)\(", body, re.MULTILINE)
    products = re.findall(r"extern_kernels\.\w+\(", body)
    return Tally(len(loops) + len(products), len(products))


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step of one row: weights, keys and values are read at `share` of the bandwidth,
    every launch that is no product takes `launch_seconds`, and nothing overlaps. bandwidth in bytes
    per second; the defaults are published rates of a Hopper GPU in a replayed graph."""

    bandwidth: float = 4.3e12
    share: float = 0.86
    launch_seconds: float = 1.9e-6

    def milliseconds(self, moved: float, tally: Tally) -> float:
        """Milliseconds of a step that reads `moved` bytes."""
        read = moved / (self.bandwidth * self.share)
        return 1000 * (read + max(0.0, tally.launches - tally.products) * self.launch_seconds)


def target_bytes(shape: Shape) -> float:
    """Bytes of a target's weights that a step reads, in bfloat16."""
    size = shape.hidden // shape.heads
    attention = shape.hidden * size * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return 2.0 * (shape.layers * layer + shape.vocab * shape.hidden)


def eagle3_bytes(shape: Shape) -> float:
    """The same for EAGLE-3's draft of `DEPTH` tokens and its commit: the fusion of three taps once;
    for every token a layer whose attention reads two states, and the reduced LM head."""
    size = shape.hidden // shape.heads
    attention = shape.hidden * size * (3 * shape.heads + 4 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    level = layer + shape.draft_vocab * shape.hidden
    return 2.0 * (3 * shape.hidden * shape.hidden + DEPTH * level)


def cache_bytes(shape: Shape, reads: int) -> float:
    """Bytes of keys and values per token of text that a step reads in bfloat16. reads: passes over
    the text by one layer each."""
    return 2.0 * 2 * shape.kv_heads * (shape.hidden // shape.heads) * reads


def report(given: argparse.Namespace) -> None:
    """Count, estimate and write."""
    shapes = {"llama31_8b": (LLAMA, TOY), "qwen3_8b": (QWEN, replace(TOY, family=Qwen3Config))}
    rows = [count(name, large, toy) for name, (large, toy) in shapes.items()]
    content = {"format": 1, "command": given.command, "rows": rows, "torch": torch.__version__}
    write_report(given.out, content, page(content))
    print(f"{given.out}.json, {given.out}.md")


def count(name: str, large: Shape, toy: Shape) -> Facts:
    """The row of one family."""
    device, few, many = torch.device("cpu"), *LAYERS
    plain, drafted = {}, {}
    for layers in LAYERS:
        shape = replace(toy, layers=layers)
        target = as_target(build_model(shape, device, torch.float64, 64))
        plain[layers] = step_launches(target, None)
        if layers == many:
            drafted = step_launches(target, new_head("eagle3", shape, target))
    layer = (plain[many]["verify"] + plain[few]["verify"] * -1) * (1 / (many - few))
    compiled = compiled_layer(replace(toy, layers=2))
    outside = plain[few]["verify"] + layer * -few
    rest = plain[few].get("other", Tally()) + plain[few].get("commit", Tally())
    chain = {phase: drafted.get(phase, Tally()) for phase in ("draft", "other", "commit")}
    verified = [outside + each * large.layers for each in (layer, compiled)]
    drafts = sum(chain.values(), Tally())
    contexts = [times(large, context, verified, rest, drafts) for context in FULL.contexts]
    return {
        "family": name,
        "layer": layer.launches,
        "layer_compiled": compiled.launches,
        "layer_products": [layer.products, compiled.products],
        "outside": outside.launches,
        "plain": rest.launches,
        "eagle3_chain": {phase: tally.launches for phase, tally in chain.items()},
        "eagle3_products": drafts.products,
        "plain_ms": contexts[0]["plain_ms"],
        "eagle3_ms": contexts[0]["eagle3_ms"],
        "ideal_ms": 1000 * target_bytes(large) / StepModel().bandwidth,
        "contexts": contexts,
    }


def times(
    large: Shape, context: int, verified: Sequence[Tally], plain: Tally, drafts: Tally
) -> Facts:
    """Milliseconds of a step behind `context` tokens, for every way of computing the verification
    (`verified`). plain, drafts: the rest of a step without a drafter, and with EAGLE-3's chain."""
    model, moved = StepModel(), target_bytes(large) + context * cache_bytes(large, large.layers)
    more = moved + eagle3_bytes(large) + context * cache_bytes(large, DEPTH)
    return {
        "context": context,
        "plain_ms": [model.milliseconds(moved, tally + plain) for tally in verified],
        "eagle3_ms": [model.milliseconds(more, tally + drafts) for tally in verified],
    }


def page(content: Mapping[str, Any]) -> list[str]:
    """The report as Markdown."""
    header = ["family", "layer", "compiled", "outside", "draft", "judge", "commit", "ideal"]
    body, estimates = [], []
    for row in content["rows"]:
        counts = zip((row["layer"], row["layer_compiled"]), row["layer_products"], strict=True)
        layers = [f"{launches:g} ({products:g})" for launches, products in counts]
        chain = [f"{row['eagle3_chain'][key]:g}" for key in ("draft", "other", "commit")]
        outside, ideal = f"{row['outside']:g}", f"{row['ideal_ms']:.1f}"
        body.append([row["family"], *layers, outside, *chain, ideal])
        for at in row["contexts"]:
            values = [f"{ms:.1f}" for ms in (*at["plain_ms"], *at["eagle3_ms"])]
            estimates.append([row["family"], f"{at['context']:,}", *values])
    lines = ["# Launches of a step", "", ABOUT, "", f"`{content['command']}`", ""]
    lines += [*markdown_table(header, body, texts=1), "", ABOUT_TIMES, ""]
    header = ["family", "tokens", "plain", "compiled", "chain", "compiled"]
    return [*lines, *markdown_table(header, estimates, texts=1), ""]


main = command(report, out=REPORTS / "launches")

if __name__ == "__main__":
    sys.exit(main())
