"""Compiling a whole decoding step for the CPU: `decode.compile=true`.

Run operation by operation, a step of a small model is mostly Python and dispatch: thousands of
calls around a few milliseconds of memory traffic. Here a step is traced once (`make_fx`, on the
real tensors, so that the traced step is a real one) and cut where the clock marks the end of a
phase. Inductor compiles every phase into one C++ function
(`inference.decoding.execution.inductor`), and no modelling code runs after that. This works for
every target and kind, because a step has fixed shapes, never reads a value back from the device,
and updates its state in place in buffers. The buffers become inputs of the compiled functions, the
weights become constants. Verification, the largest part, holds only the target's weights. Steps
with the same verification share it, for example those of one draft at several temperatures, and, if
taps are shared (`Taps.share`), those of drafters that read other taps.

Attention in float32 reads only committed slots (`inference.kernels.cpu_tree_attention`), so one
graph serves every length. In other types torch's attention runs, and the number of slots that it
reads is a constant of a graph. There is one graph per power of two of slots, at most the capacity,
and each is compiled when a row first needs it.

Prefill, whose shapes change, and the host's reading of results are not compiled.

Legend: B rows, N nodes, D the tree's deepest level.
"""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.passes.split_module import split_module

from heads.api.errors import UserError
from heads.kernels.dispatch import choose, traced_for_cpu
from inference.decoding.execution.function_cache import layout, weights_of
from inference.decoding.execution.inductor import compile_graph
from inference.decoding.step import Decoder, Rows
from inference.kernels.packed_linear import unpacked_linears
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target.kv_cache import KVCache

SMALLEST_BOUND = 512
"""Slots of the cache that the smallest graph reads, where graphs have a bound."""
_PARTS = {"draft": 0, "verify": 1, "other": 2, "commit": 2}
"""The compiled function that the work before each of the clock's marks belongs to."""
_spent = [0.0]
_Known = dict[str, tuple[str, Callable[..., Any]]]
"""Compiled verifications by `layout`, each with the weights it was compiled with."""
_verifications: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
"""The compiled verifications of every target."""


def seconds_spent() -> float:
    """Seconds this process has spent on tracing and compiling steps."""
    return _spent[0]


class NotCompiledError(UserError):
    """A step cannot be compiled, or not on this machine."""


class CompiledStep:
    """`Decoder.step` for one set of buffers, compiled; call it instead.

    It keeps the weights of the first step: changed weights need a new `CompiledStep`.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows) -> None:
        self._decoder, self._cache, self._rows = decoder, cache, rows
        self._plans: dict[tuple[int, int, bool, tuple[bool, bool]], _Plan] = {}
        with traced_for_cpu():
            choice = choose(TREE_ATTENTION, "cpu", decoder.target.dtype)
        self._reads_committed = choice.implementation == "cpp"

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

        longest: the longest row's committed tokens, or an upper bound. The first step of every
        bound is traced and its trace compiled; the C++ compiler runs in parallel with this process,
        and the next step waits for it. This time is in `seconds_spent` and not on the clock. Raises
        `NotCompiledError` if compiling fails.
        """
        bound = self.bound(longest)
        decoder = self._decoder
        key = bound, decoder.noise.mode, decoder.constrained, decoder.wishes.key
        plan = self._plans.get(key)
        if plan is not None and plan.ready:
            return plan.run(self._decoder)
        begin = time.perf_counter()
        try:
            if plan is None:
                with collecting_no_garbage():
                    packed, plan = self._trace(state, bound)
                    plan.build()
                self._plans[key] = plan
            else:
                packed = plan.first_run(self._decoder)
        except (RuntimeError, TypeError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            said = f"{type(error).__name__}: {first}" if first else type(error).__name__
            raise NotCompiledError(
                f"compiling a decoding step failed ({said}). It needs a C++ compiler such as g++ "
                "and weights that can be traced, which bitsandbytes' 4-bit ones cannot; without "
                "them set decode.compile=false."
            ) from error
        _spent[0] += time.perf_counter() - begin
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
            marks.border("commit")
            # shared states stay outputs of the verification even if this drafter reads only some
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
    """Turn off Python's cyclic garbage collection within the block. Inductor makes millions of
    objects that live until its end, and scanning them repeatedly takes an eighth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def one_fake_mode() -> Iterator[None]:
    """Make tracing describe all values with one `FakeTensorMode`. By default it makes a new one for
    each value, which records the Python stack: a third of the time of tracing 20 layers."""
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


class _Marks:
    """Replaces the clock during tracing and notes which part every operation belongs to."""

    def __init__(self) -> None:
        self.part: dict[str, int] = {}

    def border(self, phase: str) -> None:
        if not phase:
            return
        mode = get_proxy_mode()
        assert mode is not None
        for node in mode.tracer.graph.nodes:
            self.part.setdefault(node.name, _PARTS[phase])


def _lift_buffers(graph: GraphModule) -> list[Tensor]:
    """Turn all tensors of the traced step except weights into inputs; returns them in order."""
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
    shared: a store of compiled functions to read this one from and to add it to.
    """

    phase: str
    graph: GraphModule
    takes: list[int]
    gives: int
    shared: _Known | None = None
    compiled: Callable[..., Any] | None = None

    def build(self, arguments: list[Tensor]) -> None:
        if self.shared is None:
            self.compiled = compile_graph(self.graph, arguments)
            return
        name, weights = layout(self.graph, arguments), _weights(self.graph)
        before, self.compiled = self.shared.get(name, ("", None))
        if self.compiled is None or before != weights:
            self.compiled = compile_graph(self.graph, arguments)
            self.shared[name] = weights, self.compiled


def _weights(graph: GraphModule) -> str:
    """The weights that a graph reads, in its order, and their versions."""
    return repr([(w.data_ptr(), w._version, w.shape, w.dtype) for w in weights_of(graph)])


class _Plan:
    """A traced step's parts. Values are numbered: buffers, then the outputs of the parts."""

    def __init__(self, parts: list[_Part], values: list[Any], result: int) -> None:
        self.parts, self.values, self.result = parts, values, result
        self.ready = False  # until a step has run, as it raises the compiler's errors

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
        """Compile the parts. The C++ compiler may still run at the end, see `compile_graph`."""
        for part in self.parts:
            part.build([self.values[place] for place in part.takes])

    @torch.no_grad()
    def first_run(self, decoder: Decoder) -> Tensor:
        """Wait for the C++ compiler and run one step; returns its result."""
        for part in self.parts:
            self._run(part, decoder)
        self.ready = True
        return cast(Tensor, self.values[self.result])

    @torch.no_grad()
    def run(self, decoder: Decoder) -> Tensor:
        """One step; the clock is marked after every part."""
        for part in self.parts:
            self._run(part, decoder)
            decoder.clock.mark(part.phase)
        return cast(Tensor, self.values[self.result])

    def _run(self, part: _Part, decoder: Decoder) -> None:
        if part.phase == "commit" and decoder.constrained:
            assert decoder.grammars is not None
            decoder.grammars.fill()  # a trace does not contain it
        values = self.values
        assert part.compiled is not None
        found = part.compiled(*[values[place] for place in part.takes])
        found = [found] if isinstance(found, Tensor) else found
        values[part.gives : part.gives + len(found)] = found


def _keep_weights(part: GraphModule, whole: GraphModule, arguments: list[Any]) -> list[Node]:
    """Turn those arguments of `part` that are weights into its parameters; returns the others."""
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
    """Make a part return its values in the order in which it computes them, instead of the order in
    which they are read. Returns the new place of each."""
    given, output = part.graph.output_node().args[0], part.graph.output_node()
    if not isinstance(given, (list, tuple)):
        return [0]
    computed = {node: place for place, node in enumerate(part.graph.nodes)}
    ordered = sorted(given, key=lambda node: computed[node])
    output.args = (tuple(ordered),)
    part.recompile()
    return [ordered.index(node) for node in given]


def _laid_out(part: GraphModule) -> list[Tensor]:
    """Tensors with arbitrary content and the layouts of a part's outputs in the trace. The parts
    after it are compiled for them before anything runs."""
    given = part.graph.output_node().args[0]
    nodes = cast(Sequence[Node], given if isinstance(given, (list, tuple)) else [given])
    found = [node.meta["val"] for node in nodes]
    return [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype) for v in found]
