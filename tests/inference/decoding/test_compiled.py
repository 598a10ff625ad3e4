"""A compiled step decodes as the eager one does, is compiled once, and says what to do when it
cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

import inference.decoding.execution.compiled
from heads.api.errors import UserError
from heads.nn.blocks import residual_blocks
from inference.decoding.buffers import Lanes
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution import function_cache
from inference.decoding.execution.accelerator import Pending
from inference.decoding.execution.compiled import CompiledStep
from inference.decoding.execution.inductor import (
    compile_graph,
    parsing_templates_once,
    prefetching,
    small_blocks,
)
from inference.decoding.requests import Completion
from inference.decoding.sampling.noise import Stream, stream_seeds
from inference.kernels.reference.noise import noise_bits
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import SHAPES, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.steps import under_way
from tests.models import random_target, texts_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("eagle3", {**SHAPES["chain"], "temperature": 1.0}),
    "tree": ("medusa", {**SHAPES["tree"], "batch_size": 2}),
}

# several heads in one tensor, a layer, a block, a chain of small products, a model of its own
COMPILED_KINDS = ["medusa", "eagle3", "dflash", "domino", "hydra_heads", "distilled"]


def compiled_engine(
    target: TargetModel, kind: str | None, config: DecodeConfig, details: bool = False
) -> tuple[Engine, CompiledStep]:
    """An engine whose steps are compiled. details: passes say what was drafted."""
    drafter = None if kind is None else drafter_of(kind, target)
    engine = Engine(target, drafter, config, capacity=96, details=details)
    engine._kept.lanes = lanes = under_way(
        target, drafter, config, count=config.batch_size, details=details
    )
    return engine, compile_steps(lanes)


def compile_steps(lanes: Lanes) -> CompiledStep:
    """Make the lanes run compiled steps."""
    runner = lanes.runner
    step = CompiledStep(runner.decoder, lanes.cache, lanes.rows)

    def run(state: Any, longest: int, exact: bool, length: object) -> tuple[Pending, Any]:
        return Pending(step(state, longest)), state

    runner.step = run  # type: ignore[method-assign]
    return step


@pytest.mark.slow  # half a minute of C++ each
@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_give_the_eager_tokens_and_a_second_prompt_compiles_nothing(
    case: str,
) -> None:
    kind, settings = CASES[case]
    target = random_target()
    config = DecodeConfig(**settings)
    items = requests(4)
    sampling = DecodeConfig(temperature=config.temperature)
    plain = texts_of(Engine(target, None, sampling), items)
    engine, step = compiled_engine(target, kind, config)
    first = texts_of(engine, items[: config.batch_size])
    spent = inference.decoding.execution.compiled.seconds_spent()
    assert len(step._plans) == 1 and spent > 0
    rest = texts_of(engine, items[config.batch_size :])
    assert first | rest == plain
    assert len(step._plans) == 1 and inference.decoding.execution.compiled.seconds_spent() == spent
    assert engine._kept.lanes is not None
    clock = engine._kept.lanes.runner.decoder.clock
    phases = {name for name, seconds in clock.seconds.items() if seconds}
    assert phases >= {"draft", "verify", "commit"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"depth": 3, "batch_size": 3}),
        ("gemma2", {"shape": "tree", "choices": ((0,), (1,), (0, 0), (1, 0)), "batch_size": 2}),
    ],
)
def test_compiled_attention_gives_the_eager_tokens(family: str, settings: dict[str, Any]) -> None:
    """In float32, where it runs; Gemma 2 has windows and soft-capping."""
    target, items = random_target(family, dtype=torch.float32), requests(5)
    plain = texts_of(Engine(target, None, DecodeConfig()), items)
    kind = "ngram" if family == "llama" else "medusa"
    engine, step = compiled_engine(target, kind, DecodeConfig(**settings))
    assert texts_of(engine, items) == plain
    assert len(step._plans) == 1 and step.bound(1) == step._cache.capacity


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPILED_KINDS)
def test_compiled_drafters_draft_the_eager_tokens(kind: str) -> None:
    """Text does not show what a drafter drafts: the passes do. In float32, for which products are
    generated."""
    target, items = random_target(dtype=torch.float32), requests(2)
    config = DecodeConfig(depth=3)
    engine, _ = compiled_engine(target, kind, config, details=True)
    eager = Engine(target, drafter_of(kind, target), config, details=True)
    expected, found = (drafted(each.run(items)) for each in (eager, engine))
    assert len(expected[0]) > 5 and found == expected


def drafted(completions: Iterable[Completion]) -> dict[int, list[tuple[int, ...]]]:
    """What every pass of every request drafted."""
    by_request = {}
    for completion in completions:
        details = [passed.details for passed in completion.passes]
        assert all(details)
        by_request[completion.request.index] = [each.drafted for each in details if each]
    return by_request


def test_products_with_parts_of_a_weight_are_those_parts() -> None:
    weight, bias = torch.randn(2, 3, 64, 64) / 8, torch.randn(2, 3, 64)
    inputs = torch.randn(1, 64)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.expand(2, 1, 64)
            for layer in (0, 1):  # without the first head, whose part begins the storage
                heads = residual_blocks(heads, self.weight[layer, 1:], self.bias[layer, 1:])
            return heads

    module = Heads()
    with torch.no_grad():
        compiled = compile_graph(make_fx(module)(inputs), [inputs])
        torch.testing.assert_close(compiled(inputs), module(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {"rule": "block", "depth": 3}),
        ("medusa", {"rule": "traversal", "shape": "tree", "choices": ((0,), (1,), (0, 0))}),
    ],
)
def test_compiled_rules_decide_as_the_eager_ones(kind: str, settings: dict[str, Any]) -> None:
    """Their coins and what replaces a refused draft are the same draws."""
    target, items = random_target(dtype=torch.float32), requests(5)
    config = DecodeConfig(temperature=1.0, **settings)
    engine, step = compiled_engine(target, kind, config)
    eager = Engine(target, drafter_of(kind, target), config)
    expected, found = (texts_of(each, items) for each in (eager, engine))
    assert found == expected and len(step._plans) == 1


def test_integers_wrap_in_a_compiled_graph_as_in_torch() -> None:
    """Seeds are not negative, and sums of their upper halves with a constant overflow."""

    def bits(seeds: torch.Tensor, roots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        keys = stream_seeds(seeds, Stream.COIN, roots)
        return noise_bits(keys, positions, torch.ones_like(seeds).cumsum(0))

    given = [torch.tensor([0]), torch.tensor([17]), torch.tensor([[18]])]
    compiled = compile_graph(make_fx(bits)(*given), given)
    for number in range(6):
        given[0] = torch.tensor([number * 1234567890123456789 % 2**63])
        assert torch.equal(compiled(*given), bits(*given))


@pytest.mark.slow
def test_steps_that_verify_alike_share_the_compiled_verification() -> None:
    target = random_target(num_hidden_layers=2)
    shared = inference.decoding.execution.compiled._verifications
    items = requests(3)

    def verification(**settings: Any) -> Any:
        """The one compiled verification after decoding with these settings, which must not change
        text."""
        sampling = DecodeConfig(temperature=settings.get("temperature", 0.0))
        plain = texts_of(Engine(target, None, sampling), items)
        engine, step = compiled_engine(target, "ngram", DecodeConfig(depth=3, **settings))
        assert texts_of(engine, items) == plain
        assert len(step._plans) == 1
        ((_, compiled),) = shared[target.model].values()
        return compiled

    first = verification()
    assert verification(temperature=1.0) is first
    assert verification(temperature=1.0, share_noise=False) is first
    with torch.no_grad():  # a compiled step holds the weights that it was compiled with
        target.model.get_input_embeddings().weight.mul_(1.5)
    assert verification() is not first


@pytest.mark.slow
def test_drafters_that_read_other_taps_share_the_verification_while_taps_are_shared() -> None:
    target, items = random_target(num_hidden_layers=2), requests(3)
    shared = inference.decoding.execution.compiled._verifications
    plain = texts_of(Engine(target, None, DecodeConfig()), items)
    with target.taps.share([0, 1, 2]):
        for kind in ("ngram", "eagle3", "medusa"):
            engine, _ = compiled_engine(target, kind, DecodeConfig(depth=2))
            assert texts_of(engine, items) == plain
            assert len(shared[target.model]) == 1
    assert target.taps.last is None


@pytest.mark.slow
def test_compiled_products_keep_one_copy_of_a_weight() -> None:
    constants = function_cache._constants
    linear = nn.Linear(64, 128, bias=False)
    before, kept = len(constants), []
    for rows in (1, 3):
        inputs = torch.randn(1, rows, 64)
        with torch.no_grad():
            compiled = compile_graph(make_fx(linear)(inputs), [inputs])
            torch.testing.assert_close(compiled(inputs), linear(inputs))
        kept.append(compiled)
        assert len(constants) == before + 1


def bounds(longest: list[int], dtype: torch.dtype) -> list[int]:
    """What a step of a cache of 1500 slots may read when the longest row has so many tokens."""
    target = random_target(dtype=dtype)
    engine = Engine(target, None, DecodeConfig(shape="none"), capacity=1500)
    next(iter(engine.run(requests(1, new=2))))
    lanes = engine._kept.lanes
    assert lanes is not None
    step = CompiledStep(lanes.runner.decoder, lanes.cache, lanes.rows)
    return [step.bound(one) for one in longest]


def test_one_graph_serves_every_length() -> None:
    assert bounds([1, 512, 1499], torch.float32) == [1500, 1500, 1500]


def test_without_attention_of_our_own_the_bound_doubles_up_to_the_capacity() -> None:
    found = bounds([1, 511, 512, 1023, 1024, 1499], torch.float64)
    assert found == [512, 512, 1024, 1024, 1500, 1500]


def test_the_generator_of_products_can_still_be_told_to_prefetch() -> None:
    """Speed, not meaning, hangs on it: a torch that writes its products otherwise shows here."""
    with prefetching() as told:
        assert told
    with prefetching() as told_again:
        assert told_again


@pytest.mark.parametrize(("rows", "block"), [(1, 6), (5, 5), (8, 4), (10, 5), (11, 6)])
def test_products_of_many_rows_are_computed_in_small_blocks(rows: int, block: int) -> None:
    import torch._inductor.compile_fx
    from torch._inductor.codegen.cpp_micro_gemm import create_micro_gemm
    from torch._inductor.cpu_vec_isa import VecAVX512, pick_vec_isa
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    if not isinstance(pick_vec_isa(), VecAVX512):
        pytest.skip("needs AVX-512")
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))):
        with small_blocks():
            ours = create_micro_gemm("product", rows, 512, 256, torch.float, torch.float)
        theirs = create_micro_gemm("product", 10, 512, 256, torch.float, torch.float)
    assert ours is not None and ours.register_blocking == (block, 32, 1)
    assert theirs is not None and theirs.register_blocking[0] > 6


def test_templates_of_products_are_parsed_once_while_compiling() -> None:
    import torch._inductor.compile_fx  # noqa: F401  first: its modules import each other
    from torch._inductor.codegen.common import KernelTemplate

    parse = KernelTemplate._template_from_string
    assert parse("{{ a }} rows") is not parse("{{ a }} rows")
    with parsing_templates_once():
        once = KernelTemplate._template_from_string("{{ a }} rows")
        assert KernelTemplate._template_from_string("{{ a }} rows") is once
        assert [once.render(a=number) for number in (1, 2)] == ["1 rows", "2 rows"]
    assert KernelTemplate._template_from_string is parse


def test_the_cpp_compiler_runs_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads: list[threading.Thread] = []
    build, go_on = codecache._worker_compile_cpp, threading.Event()

    def held(lock_path: str, builders: Any) -> None:
        if "precompiled_headers" not in lock_path:  # made before any function, and waited for
            threads.append(threading.current_thread())
            assert go_on.wait(20)
        build(lock_path, builders)

    monkeypatch.setattr(codecache, "_worker_compile_cpp", held)
    values = torch.arange(4.0)
    graph = make_fx(lambda x: (x * 3.25 + 17,))(values)
    function = compile_graph(graph, [values])
    assert not go_on.is_set()
    go_on.set()
    assert torch.equal(function(values)[0], values * 3.25 + 17)
    assert threads[0] is not threading.current_thread()
    assert codecache._worker_compile_cpp is held


@pytest.mark.slow
def test_a_first_step_waits_for_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    build, go_on = codecache._worker_compile_cpp, threading.Event()

    def held(lock_path: str, builders: Any) -> None:
        if "precompiled_headers" not in lock_path:
            assert go_on.wait(300)
        build(lock_path, builders)

    monkeypatch.setattr(codecache, "_worker_compile_cpp", held)
    target, items = random_target(), requests(1, new=8)
    plain = [done.tokens for done in Engine(target, None, DecodeConfig()).run(items)]
    engines = [
        compiled_engine(target, None, DecodeConfig(shape="none"))[0],
        compiled_engine(target, "medusa", DecodeConfig(depth=2))[0],
    ]
    for engine in engines:  # a token by prefill, one or more by the first step
        (done,) = engine.run([replace(items[0], max_new_tokens=2)])
        assert done.tokens == plain[0][:2] and len(done.passes) == 1
    assert not go_on.is_set()
    go_on.set()
    for engine in engines:
        assert [done.tokens for done in engine.run(items)] == plain


def test_without_a_compiler_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    engine, _ = compiled_engine(random_target(), None, DecodeConfig(shape="none"))
    # torch's own patch: what pytest's would put back is a setting that does not exist any more.
    without = torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-compiler"),)})
    for _ in range(2):  # what failed once is no compiled step afterwards
        with without, pytest.raises(UserError, match=r"decode\.compile=false"):
            list(engine.run(requests(1)))


def test_weights_that_cannot_be_traced_are_named() -> None:
    class Untraceable(torch.Tensor):
        """As bitsandbytes' 4-bit weights: no dispatch of its own, and none that tracing knows."""

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return NotImplemented

    engine, _ = compiled_engine(random_target(), None, DecodeConfig(shape="none"))
    plain = torch.nn.Linear.forward

    def forward(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        if get_proxy_mode() is None:
            return plain(layer, states)
        return states.as_subclass(Untraceable).view(-1, 1)  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", forward)
        with pytest.raises(UserError, match="weights that can be traced, which bitsandbytes"):
            list(engine.run(requests(1)))
