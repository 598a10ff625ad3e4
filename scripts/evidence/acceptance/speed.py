"""Measures how close a device decodes to its memory bandwidth: the parts of `python -m
scripts.evidence.gpu speed` and, behind longer contexts, of `contexts`.

Targets have the shape of Llama-3.1-8B and Qwen3-8B and random weights (shapes.py). Every figure is
compared with an external one: transformers' `generate` with a static cache, the bandwidth of a
large copy, and the wall clock, which must agree with the seconds booked to phases.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from heads.kernels.dispatch import is_interpreted
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.measure.roofline import TargetBytes, probe_bandwidth, share_of
from inference.report.model import BandwidthFacts
from inference.target.model import TargetModel
from scripts.evidence.acceptance.correctness import CLOCKS_APART, compiled_layers
from scripts.evidence.acceptance.parts import Check, Facts, Found, Part, Setting
from scripts.evidence.acceptance.shapes import as_target, counting_model, new_head, texts
from scripts.tools import bench_kernels
from scripts.tools.common import REPORTS
from scripts.tools.replay import ReplayDrafter, read_trajectories

TRAJECTORIES, TRAJECTORY = REPORTS / "trajectories.json", "distilled"
Which = Literal["usual", "sampled", "compiled"]
"""Arms. usual: plain decoding, an EAGLE-3 chain and, for one row, dynamic trees; sampled: these,
and the chain at temperature 1 with and without top-p; compiled: plain decoding and the chain with
compiled layers."""
PLAIN_SHARE = 0.65
"""Share of the bandwidth that plain decoding of an 8B model with compiled layers must reach."""
GAP_SHARE = 0.05
"""Largest share of a replayed step without a running kernel."""
MEMORY_SHARE = 0.92
"""Share of the device's memory that weights, cache and features may take."""
DEPTH = 5
LLAMA, QWEN = "llama31_8b", "qwen3_8b"
TOY_KERNELS = bench_kernels.Sizes(4, 2, 16, 2, 64, 256, ((1, 64),), (1, 4), (64,), 1 << 16, 4)

_bandwidths: dict[torch.device, BandwidthFacts] = {}


def bandwidth_of(setting: Setting) -> BandwidthFacts:
    """The bandwidth, probed once per run."""
    if setting.device not in _bandwidths:
        size = 0 if setting.on_gpu else 1 << 22
        _bandwidths[setting.device] = probe_bandwidth(setting.device, setting.dtype, size)
    return _bandwidths[setting.device]


def target_of(setting: Setting, name: str) -> TargetModel:
    """The target of a shape; any other target is dropped for it."""
    if name not in setting.targets:
        setting.release()
        sizes = setting.sizes
        positions = max(sizes.contexts) + sizes.tokens + 64
        model = counting_model(sizes.shapes[name], setting.device, setting.dtype, positions)
        setting.targets[name] = as_target(model)
    return setting.targets[name]


def draw_requests(setting: Setting, target: TargetModel, context: int, rows: int) -> list[Request]:
    """Random prompts: one for every row, or for a single row as many as the setting gives."""
    generator = torch.Generator().manual_seed(context)
    count = max(setting.sizes.prompts if rows == 1 else 0, rows)
    drawn = torch.randint(target.info.vocab_size, (count, context), generator=generator).tolist()
    return [Request(n, tuple(row), n, setting.sizes.tokens) for n, row in enumerate(drawn)]


def bandwidth(setting: Setting) -> Found:
    """The bandwidth of a large copy and of a large matrix-vector product."""
    found = bandwidth_of(setting)
    return Found(found.to_dict(), [Check("bytes per second", found.used_bytes_per_second, 1e8)])


# Decoding


def decoding(setting: Setting, name: str, context: int, rows: int, which: Which) -> Found:
    """Steps and tokens per second of some arms, see `Which`."""
    target = target_of(setting, name)
    if excess := too_large(setting, target, context, rows):
        return Found({"context": context, "rows": rows, "not measured": excess})
    requests = draw_requests(setting, target, context, rows)
    facts: list[Facts] = []
    checks: list[Check] = []
    for label, drafter, decode in arms(setting, target, name, requests, rows, which):
        measured, own = time_arm(setting, target, label, drafter, decode, requests)
        facts.append(measured)
        checks += own
    if setting.on_gpu and which == "compiled":
        plain = next(fact["share"] for fact in facts if fact["arm"] == "plain")
        checks.append(Check("share of the bandwidth, plain", plain, PLAIN_SHARE))
        checks.append(Check("layers compiled", float(bool(target.compiled_attention)), least=1))
    found: Facts = {"context": context, "rows": rows, "arms": facts}
    if which != "usual":
        found["estimated_ms"] = estimates(name, which == "compiled")
    return Found(found, checks)


def too_large(setting: Setting, target: TargetModel, context: int, rows: int) -> str:
    """Why rows of this length do not fit in the device's memory; empty if they do. Three taps and
    the last hidden state of all prompts are held, and once more while chunks are joined."""
    if not setting.on_gpu:
        return ""
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    states = 2 * 4 * target.info.hidden_size * setting.dtype.itemsize
    slots = rows * (context + setting.sizes.tokens + 64 + max(setting.sizes.nodes))
    needed = weights + slots * (target.cache_sizes().slot + states)
    there = torch.cuda.get_device_properties(setting.device).total_memory
    if needed <= MEMORY_SHARE * there:
        return ""
    return f"{needed / 1e9:.0f} GB are needed, the device has {there / 1e9:.0f}"


def estimates(name: str, compiled: bool) -> Facts:
    """The expected time of a step with a short context, from its bytes and launches
    (scripts/evidence/launches.py), for comparison with the measured time."""
    counted = json.loads((REPORTS / "launches.json").read_text(encoding="utf-8"))["rows"]
    row = next(row for row in counted if row["family"] == name)
    return {"plain": row["plain_ms"][compiled], "eagle3 chain": row["eagle3_ms"][compiled]}


def arms(
    setting: Setting,
    target: TargetModel,
    name: str,
    requests: Sequence[Request],
    rows: int,
    which: Which,
) -> Iterator[tuple[str, Any, DecodeConfig]]:
    """Label, drafter and settings of each timed arm."""
    base = DecodeConfig(max_new_tokens=setting.sizes.tokens, batch_size=rows, depth=DEPTH)
    # a CPU needs a different program, which the tests of decode.compile compile
    base = replace(base, compile=which == "compiled" and setting.on_gpu)
    shape = setting.sizes.shapes[name]
    eagle = new_head("eagle3", shape, target)
    trajectory = read_trajectories(TRAJECTORIES)[TRAJECTORY]
    lengths = [len(request.tokens) for request in requests]
    written = texts(target, requests)
    replay = ReplayDrafter(eagle, written, lengths, trajectory, target.info.vocab_size)
    yield "plain", None, base.without_draft()
    yield "eagle3 chain", replay, base
    for nodes in setting.sizes.nodes if rows == 1 and which != "compiled" else ():
        yield f"eagle3 tree of {nodes}", eagle, replace(base, shape="dynamic", nodes=nodes)
    if which == "sampled":
        sampled = replace(base, temperature=1.0, rule="match")
        yield "eagle3 chain, T=1", eagle, sampled
        yield "eagle3 chain, T=1, top-p 0.9", eagle, replace(sampled, top_p=0.9)


def time_arm(
    setting: Setting,
    target: TargetModel,
    label: str,
    drafter: Any,
    decode: DecodeConfig,
    requests: Sequence[Request],
) -> tuple[Facts, list[Check]]:
    """One arm's step by phase, tokens per second and share of the bandwidth, after an untimed
    run."""
    room = len(requests[0].tokens) + decode.max_new_tokens + 64 + decode.nodes
    engine = Engine(target, drafter, decode, capacity=room)
    list(engine.run(requests[: decode.batch_size]))
    engine.clock.reset()
    begin = time.perf_counter()
    done = list(engine.run(requests))
    wall = time.perf_counter() - begin
    seconds, passes = dict(engine.clock.seconds), engine.clock.passes
    engine.clock.require_agreement()
    step_ms = {k: 1000 * v / passes for k, v in seconds.items() if k != "prefill"}
    total = sum(step_ms.values())
    length = len(requests[0].tokens) + decode.max_new_tokens / 2
    nodes = 1 if drafter is None else decode.tree().num_nodes
    moved = TargetBytes.of(target).step(nodes, length * decode.batch_size)
    facts: Facts = {
        "arm": label,
        "nodes": nodes,
        "step_ms": step_ms,
        "tokens_per_second": sum(len(c.tokens) for c in done) / (wall - seconds["prefill"]),
        "prefill_seconds": seconds["prefill"],
        "tau": mean_tau(done),
        "share": share_of(moved, total, bandwidth_of(setting)),
        "captured": engine.captured,
    }
    apart = CLOCKS_APART["cuda" if setting.on_gpu else "cpu"]
    booked = sum(seconds.values()) / wall
    checks = [Check(f"booked over wall seconds, {label}", booked, 1 - apart, 1 + apart / 3)]
    if isinstance(drafter, ReplayDrafter):
        followed = drafter.followed(done, decode.depth)
        checks.append(Check(f"trajectory followed, {label}", float(followed), least=1))
    if setting.on_gpu:
        checks.append(Check(f"captured, {label}", float(facts["captured"]), least=1))
    return facts, checks


def mean_tau(done: Sequence[Completion]) -> float:
    """Committed tokens per pass over all answers."""
    passes = sum(len(completion.passes) for completion in done)
    tokens = sum(record.committed for c in done for record in c.passes)
    return tokens / max(1, passes)


# The composition of a step


def synchronisations(setting: Setting) -> Found:
    """Blocking synchronisations per step, by CUDA's debug mode: those of a long answer minus those
    of a short one."""
    target = target_of(setting, LLAMA)
    request = draw_requests(setting, target, min(setting.sizes.contexts), 1)[0]
    short = setting.sizes.tokens // 2
    if not setting.on_gpu:
        return Found({"not measured": "CUDA counts them"})
    eagle = new_head("eagle3", setting.sizes.shapes[LLAMA], target)
    checks = []
    for label, drafter in (("plain", None), ("eagle3", eagle)):
        decode = DecodeConfig(depth=DEPTH)
        decode = decode if drafter is not None else decode.without_draft()
        engine = Engine(target, drafter, decode, capacity=len(request.tokens) + 400)
        counts, steps = [], []
        for new in (short, 2 * short, short):  # the first run captures
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    done = next(iter(list(engine.run([Request(0, request.tokens, 0, new)]))))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("synchroniz" in str(item.message) for item in caught))
            steps.append(len(done.passes))
        each = (counts[1] - counts[2]) / max(1, steps[1] - steps[2])
        checks.append(Check(f"synchronisations per step, {label}", each, most=0))
    return Found({check.name: check.value for check in checks}, checks)


def trace(setting: Setting) -> Found:
    """The kernels of replayed steps, and the share of their time without a running kernel. Prompt,
    captures and the last steps of an answer are not traced."""
    target = target_of(setting, LLAMA)
    requests = draw_requests(setting, target, min(setting.sizes.contexts), 1)[:1]
    eagle = new_head("eagle3", setting.sizes.shapes[LLAMA], target)
    facts, checks = Facts(), list[Check]()
    activity = ProfilerActivity.CUDA if setting.on_gpu else ProfilerActivity.CPU
    for label, drafter in (("plain", None), ("eagle3", eagle)):
        decode = DecodeConfig(depth=DEPTH)
        decode = decode if drafter is not None else decode.without_draft()
        engine = Engine(target, drafter, decode, capacity=len(requests[0].tokens) + 400)
        list(engine.run(requests))  # captures
        running, few = engine.run(requests, yield_steps=True), max(2, setting.sizes.tokens // 16)
        with closing(running):
            launch(setting, engine, running, few)
            with profile(activities=[activity]) as traced:
                steps = launch(setting, engine, running, few)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in traced.events() or ()
            if not setting.on_gpu or event.device_type == torch.autograd.DeviceType.CUDA
        )
        busy, end = 0.0, spans[0][0]
        for first, last in spans:
            busy += max(0.0, last - max(first, end))
            end = max(end, last)
        gap = 1 - busy / (end - spans[0][0])
        facts[label] = {"kernels_per_step": len(spans) / steps, "gap_share": gap}
        if setting.on_gpu:
            checks.append(
                Check(f"share of the time without a kernel, {label}", gap, most=GAP_SHARE)
            )
    return Found(facts, checks)


def launch(setting: Setting, engine: Engine, running: Iterator[Completion], few: int) -> int:
    """Let a run launch at least a few steps, and wait for the device; returns how many it was."""
    before = engine.clock.passes
    while engine.clock.passes < before + few:
        next(running)
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)
    return engine.clock.passes - before


def generate(setting: Setting) -> Found:
    """transformers' greedy `generate` with a static cache, on the same weights, compared with plain
    decoding: a slow plain loop would inflate every speedup."""
    target = target_of(setting, LLAMA)
    requests = draw_requests(setting, target, min(setting.sizes.contexts), 1)[:2]
    plain = DecodeConfig(shape="none", max_new_tokens=setting.sizes.tokens)
    engine = Engine(target, None, plain)
    list(engine.run(requests[:1]))
    ours = timed(setting, lambda: list(engine.run(requests))) / len(requests)
    ids = torch.tensor([requests[0].tokens], device=setting.device)
    own = target.model.config._attn_implementation
    target.model.set_attn_implementation("sdpa")
    limits = {"max_new_tokens": setting.sizes.tokens, "min_new_tokens": setting.sizes.tokens}

    def theirs() -> Any:
        static = {"cache_implementation": "static", "do_sample": False, "pad_token_id": 0}
        return target.model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **static)

    try:
        theirs()
        spent = timed(setting, theirs)
    finally:
        target.model.set_attn_implementation(own)
    each = {"ours_ms": 1000 * ours / setting.sizes.tokens}
    each["generate_ms"] = 1000 * spent / setting.sizes.tokens
    ratio = each["generate_ms"] / each["ours_ms"]
    least = 1.0 if setting.on_gpu else None
    return Found(each, [Check("plain decoding over generate", ratio, least=least)])


def timed(setting: Setting, call: Callable[[], Any]) -> float:
    """Seconds of a call, including the device's work."""
    begin = time.perf_counter()
    call()
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)
    return time.perf_counter() - begin


def kernels(setting: Setting) -> Found:
    """Every kernel compared with plain torch (scripts/tools/bench_kernels.py)."""
    if setting.on_gpu:
        from triton.testing import do_bench  # triton is installed if there is a GPU

        timer: Any = partial(do_bench, quantiles=(0.5, 0.025, 0.975), warmup=5, rep=15)
        sizes = bench_kernels.Sizes()
    elif not is_interpreted():
        return Found({"not measured": "on a CPU kernels run with TRITON_INTERPRET=1"})
    else:

        def timer(call: Callable[[], Any]) -> Sequence[float]:
            return (1000 * timed(setting, call),) * 3

        sizes = TOY_KERNELS
    found = bench_kernels.measure(list(bench_kernels.BENCHES), setting.device, sizes, timer)
    return Found({"sizes": asdict(sizes), **found})


def _decoding(
    name: str, context: int, row: int, which: Which = "usual"
) -> Callable[[Setting], Found]:
    """`decoding` at the context and the number of rows with these indices in the setting."""

    def work(setting: Setting) -> Found:
        contexts, rows = setting.sizes.contexts, setting.sizes.rows
        place = min(context, len(contexts) - 1), min(row, len(rows) - 1)
        return decoding(setting, name, contexts[place[0]], rows[place[1]], which)

    return work


PARTS: Sequence[Part] = (
    Part("bandwidth", bandwidth, 5, timed=True),
    Part("llama", _decoding(LLAMA, 0, 0, "sampled"), 90, timed=True),
    Part("synchronisations", synchronisations, 20, timed=True),
    Part("trace", trace, 30, timed=True),
    Part("generate", generate, 60, timed=True),
    Part("llama-8-rows", _decoding(LLAMA, 0, 1), 30, timed=True),
    Part("llama-32-rows", _decoding(LLAMA, 0, 2), 45, timed=True),
    Part("compiled", compiled_layers, 20),
    Part("llama-compiled", _decoding(LLAMA, 0, 0, "compiled"), 90, timed=True),
    Part("qwen", _decoding(QWEN, 0, 0), 90, timed=True),
    Part("kernels", kernels, 90, timed=True),
)
"""Behind short contexts. Compiling merges weights of the target, so compiled parts run after the
others; then the target's shape changes."""
CONTEXTS: Sequence[Part] = (
    Part("llama-8k", _decoding(LLAMA, 1, 0), 75, timed=True),
    Part("llama-32k", _decoding(LLAMA, 2, 0), 90, timed=True),
    Part("llama-8k-8-rows", _decoding(LLAMA, 1, 1), 60, timed=True),
    Part("llama-8k-32-rows", _decoding(LLAMA, 1, 2), 140, timed=True),
    Part("llama-32k-8-rows", _decoding(LLAMA, 2, 1), 180, timed=True),
)
"""32 rows behind 32,768 tokens are left out: their cache alone takes 137 GB."""
