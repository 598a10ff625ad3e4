"""Compiles one traced graph by inductor for the CPU, with settings and replacements that suit steps
of a few rows.

`compile_graph` replaces parts of inductor while it runs and restores them afterwards: the matrix
products and their blocks, how often templates are parsed, when the C++ compiler is waited for, and
how many copies of a packed weight exist.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from inference.decoding.execution import function_cache
from inference.kernels.cpp_operations import in_cpp

OPTIONS: dict[str, Any] = {
    "freezing": True,  # weights are constants
    "cpp_wrapper": True,  # the calls between kernels are C++ too
    # compiled separately from the kernels with less optimisation: as fast, in 0.7 of the time
    "cpp_wrapper_build_separate": True,
    "max_autotune": True,  # offer generated matrix products as well, see `_prefer_own`
    "max_autotune_gemm_backends": "CPP,ATEN",
    "cpp.enable_concat_linear": True,  # layers that read the same input become one product
    # Elements per thread: with inductor's default 512, norms of a few rows of a small model are
    # divided among threads, and synchronizing them takes longer (3 rows of 20 layers of width 256:
    # 2.38 ms with 512, 2.26 ms with this).
    "cpp.min_chunk_size": 8192,
}
"""Inductor's settings."""
PREFETCH_BYTES = 4096
"""How far ahead weights are fetched: the best of 0.5, 1, 2 and 4 kB."""
BLOCKS = [(4, 32, 1), (5, 32, 1), (6, 32, 1)]
"""Rows and columns of a product that are computed together with AVX-512, and the step along the
inner dimension. Inductor's 8 x 32 needs 16 sums, which GCC does not keep in registers. On two cores
of an EPYC, 10 rows through 14 MB of weights take 0.89 ms with it and 0.46 ms with 5 x 32 from the
cache, 1.16 and 0.97 ms from memory (1 row: 0.20 and 0.73 ms). The number of rows is one that
divides the batch's, or else the largest."""
_LOADED = "B + k * ldb + col * VLEN"
_PARTS_OF = {
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.unbind.int,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.view.default,
    operator.getitem,
}
"""Operations that return a view of a tensor or of a part of it."""


def compile_graph(graph: GraphModule, arguments: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph for arguments of these shapes, layouts and types; weights are constants. If
    an earlier process compiled it, the result is read from disk (`function_cache`).

    The C++ compiler may still run at the end: the first call of the result raises its errors
    (RuntimeError, OSError).
    """
    key = function_cache.key_of(graph, arguments, settings())
    with set_up():
        kept = function_cache.load(key)
        if kept is not None:
            return kept
        from torch._inductor.compile_fx import compile_fx  # seconds to import

        _copy_parts_of_weights(graph)
        for node in graph.graph.nodes:
            node.meta.pop("val", None)  # inductor makes new ones, consistent for all inputs
        with function_cache.recording() as made:
            function = cast(Callable[..., Any], compile_fx(graph, arguments))
    return function_cache.keeping(function, made, key)


def settings() -> str:
    """Everything that is set or replaced in inductor, as text."""
    import torch._inductor.config as inductor_config  # seconds to import

    return repr((Path(__file__).read_text("utf-8"), inductor_config.cpp.cxx))


@contextmanager
def set_up() -> Iterator[None]:
    """Set up inductor for compiling graphs within the block."""
    # takes seconds to import, so only when something is compiled
    import torch._inductor.config as inductor_config
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    selector = get_algorithm_selector_cache()
    selector.add_preprocessing_fn(_prefer_own)
    try:
        with (
            inductor_config.patch(OPTIONS),
            prefetching(),
            small_blocks(),
            parsing_templates_once(),
            sharing_constants(),
            wrapping_integers(),
            compiling_aside(),
            in_cpp(),
        ):
            yield
    finally:
        selector.preprocessing_fns.remove(_prefer_own)


def _copy_parts_of_weights(graph: GraphModule) -> None:
    """Replace views of parts of weights with copies.

    For its generated products, inductor packs a weight from the beginning of its storage, even if a
    view shows a later part (torch 2.13): the product of a second head would be that of the first.
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
            continue  # read only through its parts
        name = f"part_{node.name}"
        graph.register_parameter(name, nn.Parameter(part.clone(), requires_grad=False))
        with nodes.inserting_before(node):
            node.replace_all_uses_with(nodes.get_attr(name))
    nodes.eliminate_dead_code()
    graph.recompile()


def _prefer_own(choices: list[Any]) -> list[Any]:
    """The generated product with packed weights if there is one, else the library's.

    Inductor would time them, which depends on the machine's load; for few rows the generated
    product is faster.
    """
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller

    own = [choice for choice in choices if isinstance(choice, CppTemplateCaller)]
    return own[:1] or choices[:1]


@contextmanager
def wrapping_integers() -> Iterator[None]:
    """Make integers wrap in C++ as they do in torch.

    Inductor writes sums and products of signed C++ integers, which must not overflow (torch 2.13).
    GCC relies on that: after `high + constant`, where `high` cannot be negative, it drops the mask
    of a shift, and the noise of `inference.kernels.reference.noise` becomes different.
    """
    from torch._inductor import cpp_builder

    before = cpp_builder._get_ffast_math_flags
    cpp_builder._get_ffast_math_flags = lambda: [*before(), "fwrapv"]
    try:
        yield
    finally:
        cpp_builder._get_ffast_math_flags = before


@contextmanager
def prefetching() -> Iterator[bool]:
    """Make generated products prefetch the weight; yields whether that is possible.

    When it multiplies several rows, a core does not issue its loads far enough ahead. On one core
    of a Xeon, 5 rows through the 18 MB of an 8-layer model's weights take 2.95 ms without
    prefetching and 2.16 ms with it (1 row: 2.08 ms, the time of reading the weights).
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
    """Make generated products compute `BLOCKS` at a time."""
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
    """Make inductor parse each template, and each expression in it, only once. By default it parses
    them for every matrix product, a quarter of its time for a model of 24 layers."""
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
    """Run the C++ compiler while inductor goes on; the first call of a function waits for it. The
    wrapper and the kernels of a function are compiled at the same time.

    Inductor writes C++ in one thread, and the compiler, a separate process, takes as long again.
    The first call also raises the compiler's errors.
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
    """Threads of this process that wait for the C++ compiler; a fork does not inherit them."""
    return ThreadPoolExecutor(2, thread_name_prefix="headstart-cpp")


@contextmanager
def sharing_constants() -> Iterator[None]:
    """Make compiled functions that pack the same weights in the same way share one copy.

    Every graph packs its weights again, so the steps of several drafts would each hold and read a
    separate copy of the target. This would cost memory, and the processor's cache would never hold
    the weights of the next step.
    """
    import torch._inductor.compile_fx  # noqa: F401  first: its modules import each other
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.add_tensor_constant

    def once(graph: Any, data: Tensor, name: str | None = None) -> Any:
        return before(graph, function_cache.shared(data), name)

    setattr(GraphLowering, "add_tensor_constant", once)  # noqa: B010
    try:
        yield
    finally:
        setattr(GraphLowering, "add_tensor_constant", before)  # noqa: B010
