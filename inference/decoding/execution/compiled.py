"""Compiling a whole decoding step for the CPU: `decode.compile=true`.

Run operation by operation, a step of a small model is Python and dispatch: thousands of calls
around a few milliseconds of memory traffic. Here a step is traced once (`make_fx`, on the real
tensors, so that the traced step is a real one), cut where the clock marks the end of a phase, and
every phase is compiled by inductor into one C++ function. Nothing of the modelling code is left at
run time. That works for every target and kind because a step has fixed shapes, asks the device for
nothing, and keeps what lives from step to step in buffers that it updates in place: the buffers
become inputs of the compiled functions, the weights constants. Verification, most of what there is
to compile, holds no weight but the target's: steps that verify alike share it, for example those of
one draft at several temperatures, and, where taps are shared (`Taps.share`), those of drafters that
read other taps.

Attention in float32 reads what is committed and no more (`inference.kernels.cpu_tree_attention`),
so one graph serves every length. In other types torch's attention runs, and how much of the cache
it reads is a constant of a graph: there is one graph per power of two of slots, at most the
capacity, each compiled when a row first needs it.

Not part of it: prefill, whose shapes change, and the host's reading of results.

Legend: B rows, N nodes, D the tree's deepest level.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import _disable_current_modes

from heads.api.errors import UserError
from inference.decoding.step import Decoder, Rows
from inference.kernels.cpp_operations import in_cpp
from inference.kernels.dispatch import choose, traced_for_cpu
from inference.kernels.packed_linear import unpacked_linears
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target.kv_cache import KVCache

SMALLEST_BOUND = 512
"""Slots of the cache that the smallest graph reads, where graphs have a bound."""
OPTIONS: dict[str, Any] = {
    "freezing": True,  # weights are constants
    "cpp_wrapper": True,  # the calls between kernels are C++ too
    # and are compiled apart from the kernels, with less optimisation: as fast, 0.7 of the time
    "cpp_wrapper_build_separate": True,
    "max_autotune": True,  # with its own matrix products besides the libraries', see `_prefer_own`
    "max_autotune_gemm_backends": "CPP,ATEN",
    "cpp.enable_concat_linear": True,  # layers that read the same input are one product
    # Elements for a thread: with inductor's own 512, norms of a few rows of a small model are
    # divided among threads, whose meeting takes longer (3 rows of 20 layers of width 256: 2.38 and
    # 2.26 ms).
    "cpp.min_chunk_size": 8192,
}
"""Inductor's settings."""
PREFETCH_BYTES = 4096
"""How far ahead the weight is fetched: of 0.5, 1, 2, 4 kB the best."""
BLOCKS = [(4, 32, 1), (5, 32, 1), (6, 32, 1)]
"""Rows and columns of a product that are computed together with AVX-512, and the step along the
inner dimension. Inductor's own 8 x 32 needs 16 sums, which GCC does not keep in registers: on two
cores of an EPYC, 10 rows through 14 MB of weights take 0.89 ms with it and 0.46 ms with 5 x 32 from
the cache, 1.16 and 0.97 ms from memory (1 row: 0.20 and 0.73 ms). A number of rows that divides
those of the batch is chosen, else the largest."""
_LOADED = "B + k * ldb + col * VLEN"
_PARTS = {"draft": 0, "verify": 1, "other": 2, "commit": 2}
"""Which compiled function the work before each of the clock's marks goes to."""
_PARTS_OF = {
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.unbind.int,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.view.default,
    operator.getitem,
}
"""Operations that show a tensor, or a part of it, without a copy."""

_spent = [0.0]
_Known = dict[str, tuple[str, Callable[..., Any]]]
"""Compiled verifications by `_layout`, each with the weights it was compiled with."""
_verifications: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
"""Those of every target."""
_constants: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
"""Packed weights of compiled functions by content, shape and type."""


def seconds_spent() -> float:
    """Seconds this process has spent on tracing and compiling steps."""
    return _spent[0]


class CompiledStep:
    """`Decoder.step` for one set of buffers, compiled; to be called in its place.

    Weights are those of the first step: after changes a new `CompiledStep` is needed.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows) -> None:
        self._decoder, self._cache, self._rows = decoder, cache, rows
        self._plans: dict[tuple[int, int], _Plan] = {}
        with traced_for_cpu():
            choice = choose(TREE_ATTENTION, "cpu", decoder.target.dtype)
        self._reads_committed = choice.implementation == "cpp"

    @property
    def graphs(self) -> int:
        """How many steps were compiled, one for every bound."""
        return len(self._plans)

    def bound(self, longest: int) -> int:
        """The slots that attention may read when the longest row has `longest` committed tokens."""
        if self._reads_committed:
            return self._cache.capacity
        needed, bound = longest + self._decoder.tree.num_nodes, SMALLEST_BOUND
        while bound < needed:
            bound *= 2
        return min(bound, self._cache.capacity)

    def __call__(self, state: Any, longest: int) -> Tensor:
        """One step; returns `StepResult.packed` [B, D+6] int64. `state` is updated in place.

        longest: the longest row's committed tokens or an upper bound of it. The first step of every
        bound is traced, and what was traced is compiled; the next one waits for the C++ compiler,
        which meanwhile runs beside this process. That time is in `seconds_spent` and not on the
        clock. Raises `UserError` when it fails.
        """
        bound = self.bound(longest)
        key = bound, self._decoder.noise.mode
        plan = self._plans.get(key)
        if plan is not None and plan.ready:
            packed = plan.run(self._decoder.clock)
            self._decoder.clock.passes += 1
            return packed
        begin = time.perf_counter()
        try:
            if plan is None:
                with collecting_no_garbage():
                    packed, plan = self._trace(state, bound)
                    plan.build()
                self._plans[key] = plan
            else:
                packed = plan.first_run()
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"compiling a decoding step failed ({type(error).__name__}: "
                f"{str(error).strip().splitlines()[0]}). It needs a C++ compiler such as g++; "
                "without one set decode.compile=false."
            ) from error
        _spent[0] += time.perf_counter() - begin
        self._decoder.clock.passes += 1
        self._decoder.clock.start()
        return packed

    @torch.no_grad()
    def _trace(self, state: Any, bound: int) -> tuple[Tensor, _Plan]:
        """Run one step and record it."""
        decoder, marks = self._decoder, _Marks()
        clock, decoder.clock = decoder.clock, marks  # type: ignore[assignment]
        results: list[Tensor] = []

        def step() -> tuple[Tensor | None, ...]:
            longest = bound - decoder.tree.num_nodes
            result, after = decoder.step(self._cache, self._rows, state, longest, exact=False)
            assert after is state, "a drafter must update its state in place to be compiled"
            results.append(result.packed())
            marks.mark("commit")
            # shared states stay outputs of the verification, whatever this drafter reads of them
            seen = decoder.target.taps.last
            states = () if seen is None else (seen.caught, seen.last_hidden)
            return (results[0], *states)

        try:
            with (
                unpacked_linears(decoder.target.model),
                unpacked_linears(decoder.drafter),
                traced_for_cpu(),
                one_fake_mode(),
            ):
                graph = make_fx(step)()
        finally:
            decoder.clock = clock
        shared = _verifications.setdefault(decoder.target.model, {})
        return results[0], _Plan.cut(graph, _lift_buffers(graph), marks.part, shared)


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Let Python look for no cycles of garbage meanwhile: inductor makes millions of objects that
    live until its end, and walking them again and again is an eighth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def one_fake_mode() -> Iterator[None]:
    """Let tracing describe all values with one `FakeTensorMode`. It makes a new one for each, which
    notes the Python stack: a third of the time of tracing 20 layers."""
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


class _Marks:
    """Stands in for the clock during tracing and notes to which part every operation belongs."""

    passes = 0

    def __init__(self) -> None:
        self.part: dict[str, int] = {}

    def mark(self, phase: str) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        for node in mode.tracer.graph.nodes:
            self.part.setdefault(node.name, _PARTS[phase])


def _lift_buffers(graph: GraphModule) -> list[Tensor]:
    """Turn all tensors of the traced step but weights into inputs; returns them in order."""
    nodes, inputs = graph.graph, {}
    values: list[Tensor] = []
    anchor = nodes.call_function(torch.ops.aten.scalar_tensor.default, (0,))
    next(iter(nodes.nodes)).prepend(anchor)
    for node in list(nodes.find_nodes(op="get_attr")):
        value = getattr(graph, str(node.target))
        if isinstance(value, nn.Parameter):
            continue
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in inputs:
            with nodes.inserting_before(anchor):
                inputs[key] = nodes.placeholder(f"buffer_{len(values)}")
            values.append(value)
        node.replace_all_uses_with(inputs[key])
        nodes.erase_node(node)
    nodes.erase_node(anchor)
    for name in [name for name, _ in graph.named_buffers()]:
        delattr(graph, name)
    graph.recompile()
    return values


@dataclass
class _Part:
    """One phase: its traced graph and, once built, its compiled function.

    takes: places of its arguments among the step's values; gives: the first place of its outputs;
    shared: compiled functions to take this one from and add it to.
    """

    phase: str
    graph: GraphModule
    takes: list[int]
    gives: int
    shared: _Known | None = None
    compiled: Callable[..., Any] | None = None

    def build(self, arguments: list[Tensor]) -> None:
        if self.shared is None:
            self.compiled = _inductor(self.graph, arguments)
            return
        name, weights = _layout(self.graph, arguments), _weights(self.graph)
        before, self.compiled = self.shared.get(name, ("", None))
        if self.compiled is None or before != weights:
            self.compiled = _inductor(self.graph, arguments)
            self.shared[name] = weights, self.compiled


def _layout(graph: GraphModule, arguments: list[Tensor]) -> str:
    """What a compiled graph depends on beside its weights: operations, whatever tracing has called
    their values, and layout of inputs."""
    number = {node: place for place, node in enumerate(graph.graph.nodes)}

    def plain(value: Any) -> Any:
        return map_arg(value, lambda node: f"%{number[node]}")

    operations = []
    for node in graph.graph.nodes:
        name = str(node.target) if node.op.startswith("call") else ""
        operations.append((node.op, name, plain(node.args), plain(node.kwargs)))
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in arguments]
    return repr((operations, layouts, torch.get_num_threads()))


def _weights(graph: GraphModule) -> str:
    """Which weights a graph reads, in its order, and in which version."""
    read = [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")]
    return repr([(w.data_ptr(), w._version, w.shape, w.dtype) for w in read])


def _inductor(graph: GraphModule, arguments: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph with our settings."""
    # seconds to import: only for those who compile
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    _copy_parts_of_weights(graph)
    for node in graph.graph.nodes:
        node.meta.pop("val", None)  # inductor makes its own, for all inputs alike
    selector = get_algorithm_selector_cache()
    selector.add_preprocessing_fn(_prefer_own)
    try:
        with (
            inductor_config.patch(OPTIONS),
            prefetching(),
            small_blocks(),
            parsing_templates_once(),
            sharing_constants(),
            compiling_aside(),
            in_cpp(),
        ):
            return cast(Callable[..., Any], compile_fx(graph, arguments))
    finally:
        selector.preprocessing_fns.remove(_prefer_own)


def _copy_parts_of_weights(graph: GraphModule) -> None:
    """Put copies in place of parts of weights.

    Inductor packs a weight for a product of its own from the beginning of the storage, whatever
    part of it a view shows (torch 2.13): the product of a second head would be that of the first.
    """
    nodes = graph.graph
    shown: dict[Node, Any] = {}
    for node in nodes.nodes:
        if node.op == "get_attr":
            shown[node] = getattr(graph, str(node.target))
        elif node.op == "call_function" and node.target in _PARTS_OF and node.args[0] in shown:
            shown[node] = node.target(shown[node.args[0]], *node.args[1:], **node.kwargs)
    for node, part in shown.items():
        if node.op == "get_attr" or all(user in shown for user in node.users):
            continue  # read through its parts alone
        name = f"part_{node.name}"
        graph.register_parameter(name, nn.Parameter(part.clone(), requires_grad=False))
        with nodes.inserting_before(node):
            node.replace_all_uses_with(nodes.get_attr(name))
    nodes.eliminate_dead_code()
    graph.recompile()


def _prefer_own(choices: list[Any]) -> list[Any]:
    """The generated product with packed weights where there is one, else the library's.

    Inductor would time them, which depends on the machine's load; for few rows it wins.
    """
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller

    own = [choice for choice in choices if isinstance(choice, CppTemplateCaller)]
    return own[:1] or choices[:1]


@contextmanager
def prefetching() -> Iterator[bool]:
    """Let generated products fetch the weight ahead; yields whether that is possible.

    Multiplying several rows keeps a core too busy to run ahead of its loads far enough. On one core
    of a Xeon, 5 rows through the 18 MB of an 8-layer model's weights take 2.95 ms without and 2.16
    ms with it (1 row: 2.08 ms, which is what reading them takes).
    """
    import torch._inductor.compile_fx  # noqa: F401  first: its modules import each other
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmFP32Vec

    before: str = CppMicroGemmFP32Vec.TEMPLATE_KERNEL
    ahead = f"__builtin_prefetch(reinterpret_cast<const char*>({_LOADED}) + {PREFETCH_BYTES});"
    load = f"vb[col] = Vectorized::loadu({_LOADED});"
    CppMicroGemmFP32Vec.TEMPLATE_KERNEL = before.replace(load, f"{ahead}\n            {load}")
    try:
        yield before != CppMicroGemmFP32Vec.TEMPLATE_KERNEL
    finally:
        CppMicroGemmFP32Vec.TEMPLATE_KERNEL = before


@contextmanager
def small_blocks() -> Iterator[None]:
    """Let generated products compute `BLOCKS` at a time."""
    import torch._inductor.compile_fx
    from torch._inductor.codegen.cpp_micro_gemm import (
        CppMicroGemmFP32Vec,
        generate_gemm_config,
        micro_gemm_configs,
    )
    from torch._inductor.cpu_vec_isa import VecAVX512

    before = micro_gemm_configs[CppMicroGemmFP32Vec]
    ours = generate_gemm_config(VecAVX512, BLOCKS, input_dtype=torch.float)
    kept = [
        config
        for config in before
        if (config.vec_isa_cls, config.input_dtype, config.input2_dtype)
        != (VecAVX512, torch.float, torch.float)
    ]
    micro_gemm_configs[CppMicroGemmFP32Vec] = [*ours, *kept]
    try:
        yield
    finally:
        micro_gemm_configs[CppMicroGemmFP32Vec] = before


@contextmanager
def parsing_templates_once() -> Iterator[None]:
    """Let inductor parse each of its templates once, and each expression in them. It parses them
    anew for every matrix product, which is a quarter of its time for a model of 24 layers."""
    import torch._inductor.compile_fx  # noqa: F401  first: its modules import each other
    from torch._inductor.codegen import cpp_template_kernel
    from torch._inductor.codegen.common import KernelTemplate

    template, expression = KernelTemplate._template_from_string, cpp_template_kernel.parse_expr
    once = staticmethod(functools.cache(template))
    setattr(KernelTemplate, "_template_from_string", once)  # noqa: B010
    setattr(cpp_template_kernel, "parse_expr", functools.cache(expression))  # noqa: B010
    try:
        yield
    finally:
        setattr(KernelTemplate, "_template_from_string", staticmethod(template))  # noqa: B010
        setattr(cpp_template_kernel, "parse_expr", expression)  # noqa: B010


@contextmanager
def compiling_aside() -> Iterator[None]:
    """Let the C++ compiler run while inductor goes on: a function is waited for when it is first
    called. The wrapper and the kernels of a function are compiled at the same time.

    Inductor writes C++ in one thread, and the compiler, a process of its own, takes as long again.
    An error of the compiler is raised by that first call.
    """
    import torch._inductor.compile_fx  # noqa: F401  first: its modules import each other
    from torch._inductor import codecache

    load, build = codecache.CppWrapperCodeCache.load_pybinding, codecache._worker_compile_cpp

    def load_later(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        aside = {**kwargs, "submit_fn": _compilers(os.getpid()).submit}
        entry = codecache.CppWrapperCodeCache.load_pybinding_async(*args, **aside)
        return lambda *given: entry()(*given)

    def build_together(lock_path: str, builders: Sequence[Any]) -> None:
        with ThreadPoolExecutor(len(builders)) as pool:
            objects = enumerate(builders[:-1])
            started = [pool.submit(build, f"{lock_path}.{n}", (each,)) for n, each in objects]
        for done in started:
            done.result()
        # the last one links them
        build(lock_path, builders)

    setattr(codecache.CppWrapperCodeCache, "load_pybinding", load_later)  # noqa: B010
    setattr(codecache, "_worker_compile_cpp", build_together)  # noqa: B010
    try:
        yield
    finally:
        setattr(codecache.CppWrapperCodeCache, "load_pybinding", load)  # noqa: B010
        setattr(codecache, "_worker_compile_cpp", build)  # noqa: B010


@functools.cache
def _compilers(process: int) -> ThreadPoolExecutor:
    """Threads of this process that wait for the C++ compiler; a fork has none of its parent's."""
    return ThreadPoolExecutor(2, thread_name_prefix="headstart-cpp")


@contextmanager
def sharing_constants() -> Iterator[None]:
    """Let compiled functions that pack the same weights alike keep one copy of them.

    Every graph packs its weights anew, so that the steps of several drafts would each hold and read
    a target of their own: memory, and a cache that none of them finds warm.
    """
    import torch._inductor.compile_fx  # noqa: F401  first: its modules import each other
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.add_tensor_constant

    def once(graph: Any, data: Tensor, name: str | None = None) -> Any:
        return before(graph, _alike(data), name)

    setattr(GraphLowering, "add_tensor_constant", once)  # noqa: B010
    try:
        yield
    finally:
        setattr(GraphLowering, "add_tensor_constant", before)  # noqa: B010


def _alike(data: Tensor) -> Tensor:
    """The first living constant with this one's content and layout; this one if there is none."""
    if type(data) is not Tensor or data.is_mkldnn or not data.is_contiguous():
        return data
    with _disable_current_modes():
        raw = data.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        content = hashlib.sha256(raw).hexdigest()
    return _constants.setdefault((content, data.shape, data.dtype), data)


class _Plan:
    """A traced step's parts. Values are numbered: buffers, then what the parts hand on."""

    def __init__(self, parts: list[_Part], values: list[Any], result: int) -> None:
        self.parts, self.values, self.result = parts, values, result
        self.ready = False  # until a step has run, with which an error of the compiler shows

    @classmethod
    def cut(
        cls, graph: GraphModule, inputs: list[Tensor], part_of: dict[str, int], shared: _Known
    ) -> _Plan:
        """Cut `graph` into the parts that `part_of` names. shared: verifications of other steps."""
        split = split_module(
            graph, graph, lambda node: part_of[node.name], keep_original_order=True
        )
        places: dict[Node, int] = {}
        order: dict[Node, list[int]] = {}
        values: list[Any] = list(inputs)
        parts: list[_Part] = []
        result = -1
        for node in split.graph.nodes:
            if node.op == "placeholder":
                places[node] = len(places)
            elif node.op == "call_module":
                phase = ("draft", "verify", "commit")[int(str(node.target).rsplit("_", 1)[1])]
                module = getattr(split, str(node.target))
                buffers = _keep_weights(module, split, list(node.args))
                takes = [places[value] for value in buffers]
                known = shared if phase == "verify" else None
                parts.append(_Part(phase, module, takes, len(values), known))
                places[node], order[node] = len(values), _order_outputs(module)
                values += _laid_out(module)
            elif node.op == "call_function":
                assert node.target is operator.getitem
                part, number = node.args
                places[node] = places[part] + order[part][number]
            elif node.op == "output":
                result = places[node.args[0][0]]
        return cls(parts, values, result)

    @torch.no_grad()
    def build(self) -> None:
        """Compile the parts. The C++ compiler may still run at the end, see `compiling_aside`."""
        for part in self.parts:
            part.build([self.values[place] for place in part.takes])

    @torch.no_grad()
    def first_run(self) -> Tensor:
        """Wait for the C++ compiler and run one step -> its result."""
        for part in self.parts:
            self._run(part)
        self.ready = True
        return cast(Tensor, self.values[self.result])

    @torch.no_grad()
    def run(self, clock: Any) -> Tensor:
        """One step; the clock is marked after every part."""
        for part in self.parts:
            self._run(part)
            clock.mark(part.phase)
        return cast(Tensor, self.values[self.result])

    def _run(self, part: _Part) -> None:
        values = self.values
        assert part.compiled is not None
        found = part.compiled(*[values[place] for place in part.takes])
        found = [found] if isinstance(found, Tensor) else found
        values[part.gives : part.gives + len(found)] = found


def _keep_weights(part: GraphModule, whole: GraphModule, arguments: list[Any]) -> list[Node]:
    """Make those arguments of `part` that are weights its own parameters; returns the others."""
    nodes = part.graph
    holders = list(nodes.find_nodes(op="placeholder"))
    first = next(node for node in nodes.nodes if node.op != "placeholder")
    others = []
    for number, (holder, argument) in enumerate(zip(holders, arguments, strict=True)):
        if argument.op != "get_attr":
            others.append(argument)
            continue
        part.register_parameter(f"weight_{number}", getattr(whole, argument.target))
        with nodes.inserting_before(first):
            holder.replace_all_uses_with(nodes.get_attr(f"weight_{number}"))
        nodes.erase_node(holder)
    part.recompile()
    return others


def _order_outputs(part: GraphModule) -> list[int]:
    """Let a part give its values in the order in which it computes them, and not in that in which
    they are read; returns the new place of each."""
    given, output = part.graph.output_node().args[0], part.graph.output_node()
    if not isinstance(given, (list, tuple)):
        return [0]
    computed = {node: place for place, node in enumerate(part.graph.nodes)}
    ordered = sorted(given, key=lambda node: computed[node])
    output.args = (tuple(ordered),)
    part.recompile()
    return [ordered.index(node) for node in given]


def _laid_out(part: GraphModule) -> list[Tensor]:
    """Tensors of any content with the layouts of what a part gave in the trace: the parts behind it
    are compiled for them, before anything runs."""
    given = part.graph.output_node().args[0]
    nodes = cast(Sequence[Node], given if isinstance(given, (list, tuple)) else [given])
    found = [node.meta["val"] for node in nodes]
    return [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype) for v in found]
