"""Counts the kernels that a decoding step launches: `python -m scripts.evidence.launches` writes
docs/reports/launches.{json,md}.

The counts are from toy models of the families' shapes, since the number of operations does not
depend on sizes. Without compilation, every torch operation that is neither a view nor an allocation
is a launch. An operation with a Headstart kernel counts that kernel's launches. Inductor compiles
compiled layers (`decode.compile`) for a CPU; its loops and the library's products are counted in
the program that it writes. Libraries may launch more than one kernel for a product.

The time of a step on a GPU is estimated from its bytes and launches (`StepModel`), for comparison
with a measured time (`python -m scripts.evidence.gpu speed`).

Legend: L layers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from heads.kernels.dispatch import Choice, Op
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.layers import compile_layers
from inference.decoding.requests import Request
from inference.kernels import drafter_attention
from inference.report.markdown import markdown_table
from inference.target.model import TargetModel
from scripts.evidence.acceptance.shapes import (
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
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
LAYERS = (2, 4)
DEPTH = 5
ABOUT = (
    "**layer**: launches per target layer; **outside**: of the verification, outside of layers. "
    "**draft**, **judge**, **commit**: of an EAGLE-3 chain of five, where judging is picking "
    "tokens and walking the draft. **ms**: estimated for bfloat16, one row, a short context, on "
    "4.3 TB/s."
)


class Launches(TorchDispatchMode):
    """Counts launches by phase. phase: set by the code that runs the step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.phase, self.paused = "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1].rstrip("_")
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        view = alias is not None and not alias.is_write
        if not view and not self.paused and name not in ALLOCATIONS and returns:
            self.counts[self.phase] += 1
        return out

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within the block, Headstart's operations count as their kernels, and the reference does
        their work. Attention of drafters counts as one kernel."""

        def counted(op: Op, first: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[self.phase] += KERNELS.get(op.name, 1)
            self.paused, before = True, self.paused
            try:
                return op.reference(first, *args, **kwargs)
            finally:
                self.paused = before

        def on_a_gpu(*_given: Any) -> Choice:
            return Choice("triton", "launches are counted")

        with (
            mock.patch.object(Op, "__call__", counted),
            mock.patch.object(drafter_attention, "choose", on_a_gpu),
        ):
            yield


def step_launches(target: TargetModel, drafter: Any) -> dict[str, float]:
    """Launches of a step by phase: "draft", "verify", "other" (judging), "commit"."""
    decode = DecodeConfig(depth=DEPTH, max_new_tokens=24, graph="off")
    decode = decode if drafter is not None else decode.without_draft()
    engine, launches = Engine(target, drafter, decode), Launches()
    border, verify = StepClock.border, TargetModel.verify
    found: Counter[str] = Counter()
    steps: list[int] = []

    def at_border(clock: StepClock, ended: str) -> None:
        border(clock, ended)
        if ended:
            found[ended] += launches.counts.pop("step", 0)
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
    return {phase: count / len(steps) for phase, count in found.items()}


def compiled_layer(shape: Shape) -> int:
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
    return max(counts) + 1 + KERNELS["tree_attention"]


def count_in(program: str) -> int:
    """Launches in a program that inductor writes for a CPU, without those of the opaque
    operation."""
    body = program[program.index("def call") :]
    loops = re.findall(r"^\s+(?:cpp_fused\w*|\w*cpp_\w+)\(", body, re.MULTILINE)
    products = re.findall(r"extern_kernels\.\w+\(", body)
    return len(loops) + len(products)


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step of one row: products read their weights at `products` of the bandwidth,
    every other launch takes `launch_seconds`, and nothing overlaps. bandwidth in bytes per second;
    the defaults are published rates of a Hopper GPU in a replayed graph."""

    bandwidth: float = 4.3e12
    products: float = 0.86
    launch_seconds: float = 1.9e-6

    def milliseconds(self, weight_bytes: float, products: float, launches: float) -> float:
        """Milliseconds of a step with this many launches, of which `products` are products over
        `weight_bytes`."""
        read = weight_bytes / (self.bandwidth * self.products)
        return 1000 * (read + max(0.0, launches - products) * self.launch_seconds)


def target_bytes(shape: Shape) -> float:
    """Bytes of a target's weights that a step reads, in bfloat16."""
    size = shape.hidden // shape.heads
    attention = shape.hidden * size * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return 2.0 * (shape.layers * layer + shape.vocab * shape.hidden)


def eagle3_bytes(shape: Shape) -> float:
    """The same for a level of EAGLE-3's draft: a layer whose attention reads two states, and the
    reduced LM head."""
    size = shape.hidden // shape.heads
    attention = shape.hidden * size * (3 * shape.heads + 4 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return 2.0 * (layer + shape.draft_vocab * shape.hidden)


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
    layer = (plain[many]["verify"] - plain[few]["verify"]) / (many - few)
    outside = plain[few]["verify"] - few * layer
    compiled = compiled_layer(replace(toy, layers=2))
    model, rest = StepModel(), plain[few].get("other", 0.0) + plain[few].get("commit", 0.0)
    chain = {phase: drafted.get(phase, 0.0) for phase in ("draft", "other", "commit")}

    def plain_ms(each: float) -> float:
        launches = large.layers * each + outside + rest
        return model.milliseconds(target_bytes(large), 7 * large.layers + 1, launches)

    def chain_ms(each: float) -> float:
        launches = large.layers * each + outside + sum(chain.values())
        products = 7 * large.layers + 1 + 8 * DEPTH
        moved = target_bytes(large) + DEPTH * eagle3_bytes(large)
        return model.milliseconds(moved, products, launches)

    return {
        "family": name,
        "layer": layer,
        "layer_compiled": compiled,
        "outside": outside,
        "plain": rest,
        "eagle3_chain": chain,
        "plain_ms": [plain_ms(layer), plain_ms(compiled)],
        "eagle3_ms": [chain_ms(layer), chain_ms(compiled)],
        "ideal_ms": 1000 * target_bytes(large) / model.bandwidth,
    }


def page(content: Mapping[str, Any]) -> list[str]:
    """The report as Markdown."""
    header = ["family", "layer", "compiled", "outside", "draft", "judge", "commit"]
    header += ["ms, plain", "compiled", "ideal", "ms, chain", "compiled"]
    body = [
        [
            row["family"],
            *(f"{row[key]:g}" for key in ("layer", "layer_compiled", "outside")),
            *(f"{row['eagle3_chain'][key]:g}" for key in ("draft", "other", "commit")),
            *(f"{ms:.1f}" for ms in (*row["plain_ms"], row["ideal_ms"], *row["eagle3_ms"])),
        ]
        for row in content["rows"]
    ]
    lines = ["# Launches of a step", "", ABOUT, "", f"`{content['command']}`", ""]
    return [*lines, *markdown_table(header, body, texts=1), ""]


main = command(report, out=REPORTS / "launches")

if __name__ == "__main__":
    sys.exit(main())
