"""Checks that a device decodes correctly: the parts of `python -m scripts.evidence.gpu
correctness`.

The attention kernel is compared with its reference and, through a target, with torch's attention.
Captured steps are compared with launched ones. Drafted text is compared with plain text, bit for
bit if the same passes compute both. The device's clock is compared with the host's. The texts are
those of the embedded target, whose prompts are in the repository.

Legend: B rows, N nodes, L committed tokens, D head size.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import DraftShape, TokenTree
from heads.kernels.dispatch import triton_version
from inference.audit.comparison import audit, flips_alone
from inference.audit.drafters import ScriptedDrafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.layers import compile_layers
from inference.decoding.requests import Request
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.kernels.registry import all_ops
from inference.kernels.registry import report as kernels_in_use
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.target.loading import DTYPES, TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.acceptance.parts import Check, Facts, Found, Part, Setting
from scripts.evidence.acceptance.shapes import Shape, as_target, build_model, new_head
from scripts.tools.common import PROMPTS, ROOT, TARGET

KERNEL_GAP = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Largest difference of the attention kernel from its reference, as a share of the largest value;
float32 products may be TF32 on a GPU."""
LOGITS_GAP = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
"""The same limit for a target's logits, compared with those of torch's attention."""
CLOCKS_APART = {"cuda": 0.03, "cpu": 0.1}
"""How far the seconds booked to phases may differ from the wall clock. On a CPU, the host's work
between two steps belongs to no phase."""
MOST_FLIPS = 3.0
"""Flips per thousand tokens that a drafter may have in addition to twice those of the target
alone."""


# Environment and tests


def environment(setting: Setting) -> Found:
    """Versions, the device, and the implementation of every kernel that runs."""
    facts: Facts = {"kernels": kernels_in_use(setting.device), "triton": triton_version()}
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(setting.device)
        facts |= {
            "cuda": torch.version.cuda,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
        }
        if tool := shutil.which("nvidia-smi"):
            facts["nvidia_smi"] = subprocess.run([tool], capture_output=True, text=True).stdout
    others = {item["op"] for item in facts["kernels"] if item["implementation"] != "triton"}
    wanted = {op.name for op in all_ops() if op.by_default} if setting.on_gpu else set[str]()
    missing = len(others & wanted)
    return Found(facts, [Check("kernels that do not run", missing, most=0)])


def device_tests(setting: Setting) -> Found:
    """pytest's tests of this device, in parallel if pytest-xdist is installed."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *setting.sizes.tests]
    if setting.on_gpu:
        probe = "import xdist"
        if not subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode:
            words += ["-n", "8"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    facts = {"command": words[1:], "summary": lines[-1:], "failed": failed[:40]}
    if done.returncode:
        facts["output"] = lines[-60:]
    return Found(facts, [Check("exit status of pytest", done.returncode, least=0, most=0)])


# The attention kernel


def attention(setting: Setting) -> Found:
    """Tree attention compared with its reference, beyond one piece of the cache, for every head
    size."""
    rows, checks = [], []
    for dtype in setting.dtypes:
        for size, length in product(setting.sizes.head_sizes, setting.sizes.lengths):
            gap = max(
                kernel_gap(setting, dtype, size, length, n) for n in (6, max(setting.sizes.nodes))
            )
            name = f"{dtype_name(dtype)}, D={size}, L={length}"
            rows.append(
                {"dtype": dtype_name(dtype), "head_dim": size, "length": length, "gap": gap}
            )
            checks.append(Check(f"kernel against reference, {name}", gap, most=KERNEL_GAP[dtype]))
    return Found({"rows": rows}, checks)


def kernel_gap(setting: Setting, dtype: torch.dtype, size: int, length: int, nodes: int) -> float:
    """The largest difference on random tensors of two rows of different lengths, as a share of the
    largest value: with queries of all nodes, and of the last five nodes, as of a drafter's
    level."""
    device, generator = setting.device, torch.Generator().manual_seed(length + size + nodes)
    heads, groups = 2, 4

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    capacity = length + nodes + 5
    query = draw(2, heads * groups, nodes, size)
    keys, values = draw(2, heads, capacity, size), draw(2, heads, capacity, size)
    lengths = torch.tensor([length, max(1, length // 3)], device=device)
    tree = random_tree(nodes, generator).to(device)
    gaps = []
    for asked in (nodes, min(nodes, 5)):
        words, at = tree.words()[:, -asked:], tree.depth[:, -asked:]
        given = query[:, :, -asked:], keys, values, lengths, words, tree.depth
        found = TREE_ATTENTION(*given, scaling=size**-0.5, at=at).float()
        wanted = TREE_ATTENTION.reference(*given, scaling=size**-0.5, at=at).float()
        gaps.append(float((found - wanted).abs().max() / wanted.abs().max()))
    return max(gaps)


def random_tree(nodes: int, generator: torch.Generator) -> TokenTree:
    """A tree with this many nodes, each below one of the last six."""
    parents = [0]
    for node in range(1, nodes):
        low = max(0, node - 6)
        parents.append(low + int(torch.randint(node - low, (1,), generator=generator)))
    depths = [0]
    for node in range(1, nodes):
        depths.append(depths[parents[node]] + 1)
    return TokenTree.from_parents(torch.tensor([parents]), max(depths))


def verification(setting: Setting) -> Found:
    """Verified logits of a target with random weights, as decoding computes them, compared with one
    pass of the model's own attention over prompt and path."""
    rows, checks = [], []
    for dtype in setting.dtypes:
        for size, length in product(setting.sizes.head_sizes, setting.sizes.lengths):
            gap = logits_gap(setting, dtype, size, length, max(setting.sizes.nodes))
            rows.append(
                {"dtype": dtype_name(dtype), "head_dim": size, "length": length, "gap": gap}
            )
            name = f"{dtype_name(dtype)}, D={size}, L={length}"
            checks.append(Check(f"verified logits, {name}", gap, most=LOGITS_GAP[dtype]))
    return Found({"rows": rows}, checks)


def compiled_layers(setting: Setting) -> Found:
    """`verification` through merged and compiled layers, once. The counting texts of the speed
    parts depend on the layers too little to judge them."""
    sizes, dtype = setting.sizes, setting.dtype
    size, length = sizes.head_sizes[len(sizes.head_sizes) // 2], min(sizes.lengths)
    gap = logits_gap(setting, dtype, size, length, max(sizes.nodes), compiled=True)
    name = f"{dtype_name(dtype)}, D={size}, L={length}"
    check = Check(f"verified logits, compiled, {name}", gap, most=LOGITS_GAP[dtype])
    return Found({"gap": gap}, [check])


@torch.no_grad()
def logits_gap(
    setting: Setting, dtype: torch.dtype, size: int, length: int, nodes: int, compiled: bool = False
) -> float:
    """The largest difference of the logits at four of the tree's leaves, as a share of the largest
    logit. The weights are wide enough for attention to distinguish tokens. compiled: verify through
    compiled layers (on a CPU through traced ones). Raises `UserError` if they do not compile."""
    device, generator = setting.device, torch.Generator().manual_seed(length + size)
    shape = Shape(512, 4 * size, 2, 4, 2, 8 * size, 1, 64, 2, 128, 128)
    model = build_model(shape, device, dtype, length + nodes + 8)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
    tree = random_tree(nodes, generator).to(device)
    prompt = torch.randint(shape.vocab, (1, length), generator=generator).to(device)
    drafted = torch.randint(shape.vocab, (1, nodes), generator=generator).to(device)
    parents = tree.parents[0].tolist()
    leaves = [node for node in range(nodes) if node not in parents[1:]][:4]
    wanted = []
    for leaf in leaves:
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0]])
        text = torch.cat([prompt, drafted[:, path]], 1)
        wanted.append(model(input_ids=text, use_cache=False).logits[0, -1].float())
    target = as_target(model)
    if compiled and not compile_layers(target, 1, nodes, "inductor" if setting.on_gpu else "eager"):
        raise UserError("the layers of a Llama target are not compiled; a warning says why.")
    cache, row = target.new_cache(1, length + nodes + 1), torch.zeros(1, dtype=torch.int64)
    cache.writer.compiled = compiled
    lengths, needs = torch.tensor([length], device=device), FeatureSpec()
    target.prefill(cache, row.to(device), prompt, lengths, needs, 4096)
    longest = None if target.lengths_on_device else length
    found = target.verify(cache, drafted, tree, lengths, longest, needs)[0][0, leaves].float()
    expected = torch.stack(wanted)
    return float((found - expected).abs().max() / expected.abs().max())


# Text


@dataclass(eq=False)
class DeadDrafts:
    """A drafter whose drafts are verified and never count: plain decoding by passes of the same
    number of nodes."""

    kind: ClassVar[str] = "dead"
    drafter: Any

    @property
    def needs(self) -> FeatureSpec:
        """See the protocol."""
        return cast(FeatureSpec, self.drafter.needs)

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        """See the protocol."""
        return self.drafter.start(seen, tree, capacity)

    def propose(self, state: Any, noise: Noise) -> Proposal:
        """See the protocol."""
        proposal: Proposal = self.drafter.propose(state, noise)
        none = torch.zeros(len(proposal.tokens), dtype=torch.int64, device=proposal.tokens.device)
        return replace(proposal, limit=none)

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        """See the protocol."""
        return self.drafter.commit(state, accepted)


@dataclass
class Writing:
    """The embedded target in one dtype, some prompts, and the plain text that follows them."""

    target: TargetModel
    requests: list[Request]
    plain: list[list[int]]

    @classmethod
    def of(
        cls, setting: Setting, dtype: torch.dtype, temperature: float = 0.0, exact: bool = False
    ) -> Writing:
        """Load the target and decode; above temperature 0 with the requests' seeds."""
        config = TargetConfig(str(TARGET), device=str(setting.device), dtype=dtype_name(dtype))
        target = TargetModel.load(config)
        decode = DecodeConfig(
            shape="none",
            max_new_tokens=setting.sizes.tokens,
            temperature=temperature,
            rule="match",
            exact=exact,
        )
        prompts = select_prompts(load_prompts(PROMPTS), 2, 0)[: setting.sizes.texts]
        requests = to_requests(prompts, target.tokenizer, decode)
        writing = cls(target, requests, [])
        writing.plain = writing.decode(None, decode)
        return writing

    def decode(self, drafter: Any, decode: DecodeConfig) -> list[list[int]]:
        """New tokens of every request."""
        done = Engine(self.target, drafter, decode).run(self.requests)
        found = {completion.request.index: completion.tokens for completion in done}
        return [found[request.index] for request in self.requests]

    def guesses(self) -> ScriptedDrafter:
        """A drafter that is right in seven of ten tokens."""
        known = {
            request.tokens: [*request.tokens, *answer]
            for request, answer in zip(self.requests, self.plain, strict=True)
        }
        return ScriptedDrafter(known, self.target.info.vocab_size, 0.7)


def captured(setting: Setting) -> Found:
    """Captured and replayed steps decode the same text as launched ones, bit for bit. Above
    temperature 0, one drafter stands for all in trees."""
    rows, checks = [], []
    for temperature in (0.0, 1.0):
        writing = Writing.of(setting, setting.dtype, temperature)
        target, sizes = writing.target, setting.sizes
        toy = Shape(target.info.vocab_size, 256, 20, 4, 2, 512, 1, 64, 2, 128, 256)
        drafters: dict[str, Any] = {"guesses": writing.guesses()}
        drafters |= {kind: new_head(kind, toy, target) for kind in ("eagle3", "distilled")}
        for name, shape in product(drafters, ("chain", "dynamic")):
            if temperature and shape == "dynamic" and name != "eagle3":
                continue
            decode = DecodeConfig(
                shape=shape,  # type: ignore[arg-type]
                depth=5,
                nodes=min(sizes.nodes),
                temperature=temperature,
                rule="match",
                max_new_tokens=sizes.tokens,
            )
            launched = writing.decode(drafters[name], replace(decode, graph="off"))
            engine = Engine(target, drafters[name], replace(decode, batch_size=1))
            done = {c.request.index: c.tokens for c in engine.run(writing.requests)}
            replayed = [done[request.index] for request in writing.requests]
            differ = sum(one != other for one, other in zip(launched, replayed, strict=True))
            row = {"drafter": name, "shape": shape, "temperature": temperature}
            rows.append({**row, "captured": engine.captured, "differing": differ})
            label = f"{name}, {shape}, T={temperature:g}"
            checks.append(Check(f"texts that capture changes, {label}", differ, most=0))
            if setting.on_gpu:
                checks.append(Check(f"captured, {label}", float(engine.captured), least=1))
    return Found({"rows": rows}, checks)


def padded(setting: Setting) -> Found:
    """Accepted chains give the same tokens as chains that never count, bit for bit: both use the
    same passes, in which rows do not affect one another. A difference is a fault, not rounding."""
    rows, checks = [], []
    for dtype, temperature in product(setting.dtypes, (0.0, 1.0)):
        writing = Writing.of(setting, dtype, temperature)
        decode = DecodeConfig(
            depth=5, temperature=temperature, rule="match", max_new_tokens=setting.sizes.tokens
        )
        guesses = writing.guesses()
        alive = writing.decode(guesses, decode)
        dead = writing.decode(DeadDrafts(guesses), decode)
        differ = sum(one != other for one, other in zip(alive, dead, strict=True))
        name = f"{dtype_name(dtype)}, T={temperature:g}"
        rows.append({"dtype": dtype_name(dtype), "temperature": temperature, "differing": differ})
        checks.append(Check(f"texts that accepting changes, {name}", differ, most=0))
    return Found({"rows": rows}, checks)


def exact(setting: Setting) -> Found:
    """Under `decode.exact`, drafted and batched text equals plain text, bit for bit. In the kernel,
    a tree's ancestors may be at other places of a tile than the same tokens are later. So for
    trees, of one size, near ties are counted instead."""
    rows, checks = [], []
    for dtype, temperature in product(setting.dtypes, (0.0, 1.0)):
        writing = Writing.of(setting, dtype, temperature, exact=True)
        both: dict[str, Any] = {"temperature": temperature, "rule": "match", "exact": True}
        for name, drafter, decode in arms(writing, setting, setting.sizes.nodes[:1]):
            answers = writing.decode(drafter, replace(decode, **both))
            differ = sum(a != b for a, b in zip(answers, writing.plain, strict=True))
            label = f"{name}, {dtype_name(dtype)}, T={temperature:g}"
            rows.append({"arm": label, "differing": differ})
            if not (setting.on_gpu and "tree" in name):
                checks.append(Check(f"texts that differ, {label}", differ, most=0))
    return Found({"rows": rows}, checks)


def texts(setting: Setting) -> Found:
    """Drafted and batched text compared with plain text. Only near ties may occur, about as often
    as the target decides differently between passes of one and of several tokens."""
    rows, checks = [], []
    for dtype in setting.dtypes:
        writing = Writing.of(setting, dtype)
        for name, drafter, decode in arms(writing, setting, setting.sizes.nodes):
            answers = writing.decode(drafter, decode)
            width = max(2, decode.tree().num_nodes if drafter is not None else 2)
            given = writing.target, writing.requests, writing.plain
            report = audit(*given, answers, decode.sampling(), width)
            tokens, flips = flips_alone(*given, decode.sampling(), width)
            rate, alone = 1000 * report.flips / report.tokens, 1000 * flips / tokens
            label = f"{name}, {dtype_name(dtype)}"
            row = {"arm": name, "dtype": dtype_name(dtype), **report.counts()}
            rows.append({**row, "flips_per_1000": rate, "target_alone_per_1000": alone})
            checks += [
                Check(f"mismatches, {label}", report.mismatches, most=0),
                Check(f"flips per 1,000, {label}", rate, most=2 * alone + MOST_FLIPS),
            ]
    return Found({"rows": rows}, checks)


def arms(
    writing: Writing, setting: Setting, trees: Sequence[int]
) -> Iterator[tuple[str, Any, DecodeConfig]]:
    """The arms that are compared with plain decoding, one row at a time. trees: their nodes."""
    plain = DecodeConfig(shape="none", max_new_tokens=setting.sizes.tokens)
    chain = DecodeConfig(depth=5, max_new_tokens=setting.sizes.tokens)
    yield "plain, 8 rows", None, replace(plain, batch_size=8)
    yield "chain of 5", writing.guesses(), chain
    yield "chain of 5, 8 rows", writing.guesses(), replace(chain, batch_size=8)
    for nodes in trees:
        tree = replace(chain, shape="dynamic", nodes=nodes)
        yield f"tree of {nodes}", writing.guesses(), tree


def clocks(setting: Setting) -> Found:
    """The seconds booked to phases, compared with the wall clock over many steps."""
    writing, rows, checks = Writing.of(setting, setting.dtype), [], []
    most = CLOCKS_APART["cuda" if setting.on_gpu else "cpu"]
    for name, drafter in (("plain", None), ("guesses", writing.guesses())):
        decode = DecodeConfig(max_new_tokens=setting.sizes.tokens)
        engine = Engine(writing.target, drafter, decode if drafter else decode.without_draft())
        list(engine.run(writing.requests))  # captures the steps and settles the buffers
        engine.clock.reset()
        begin = time.perf_counter()
        list(engine.run(writing.requests))
        wall, booked = time.perf_counter() - begin, sum(engine.clock.seconds.values())
        rows.append({"arm": name, "wall": wall, "booked": dict(engine.clock.seconds)})
        checks.append(
            Check(f"booked over wall seconds, {name}", booked / wall, 1 - most, 1 + most / 3)
        )
    return Found({"rows": rows}, checks)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in settings."""
    return next(name for name, value in DTYPES.items() if value == dtype)


PARTS: Sequence[Part] = (
    Part("environment", environment, 5),
    Part("attention", attention, 60),
    Part("verification", verification, 60),
    Part("captured", captured, 75),
    Part("padded", padded, 60),
    Part("exact", exact, 65),
    Part("texts", texts, 90),
    Part("clocks", clocks, 30, timed=True),
    Part("tests", device_tests, 120),
)
"""In order of information per second."""
