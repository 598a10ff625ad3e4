"""A step recorded once and replayed for other prompts, as a CUDA graph will: here on the CPU,
operation by operation.

The record freezes everything that Python decided while recording: shapes, branches, numbers that
were read from tensors. Replayed in the same buffers for other prompts and lengths, it gives the
right tokens only if a step depends on nothing but its buffers. As a graph does, it keeps no tensor
alive that it did not make: one that a later prompt replaces is gone, and the replay fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from heads.api.kinds import kind_names
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.accelerator import Pending
from inference.decoding.execution.layers import compile_layers
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.decoding.test_no_sync import ALL_SHAPES, SAMPLING
from tests.inference.steps import step_on_device, under_way
from tests.models import plain_texts, random_target, texts_of


class Outside:
    """A tensor that a recorded step did not make, which the record does not keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        # weights packed by oneDNN have no storage of their own to refer to
        self.packed = ref(tensor) if tensor.layout == torch._mkldnn else None
        if self.packed:
            return
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype = tensor.dtype
        self.geometry = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """The tensor as it is now."""
        if self.packed:
            packed = self.packed()
            assert packed is not None, "a packed weight that the step reads is gone"
            return packed
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"a tensor {list(self.geometry[1])} that the step reads is gone"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.geometry)


class Record(TorchDispatchMode):
    """The operations that run inside the block, with their arguments, to run again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any], dict[str, Any], list[tuple[Any, Any, Any]]]] = []
        """Operation, its arguments, and which of them are earlier results or tensors from outside:
        (where they are held, index or name, number or `Outside`)."""
        self.results: list[Any] = []
        self.numbers: dict[int, int] = {}
        """Identity of a result -> its place in `results`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = [list(item) if isinstance(item, (list, tuple)) else item for item in args]
        named = dict(kwargs or {})
        lists = [item for item in given if isinstance(item, list)]
        reads: list[tuple[Any, Any, Any]] = [
            (holder, place, self.numbers.get(id(item)))
            for holder in (given, named, *lists)
            for place, item in (holder.items() if holder is named else enumerate(holder))
            if isinstance(item, Tensor)
        ]
        result = func(*args, **named)
        for n, (holder, place, number) in enumerate(reads):
            reads[n] = holder, place, Outside(holder[place]) if number is None else number
            holder[place] = None
        self.calls.append((func, given, named, reads))
        for item in result if isinstance(result, (list, tuple)) else [result]:
            self.numbers[id(item)] = len(self.results)
            self.results.append(item)
        return result

    @torch.no_grad()
    def replay(self, wanted: int) -> Tensor:
        """Run all operations again, on each other's new results and on the same tensors from
        outside; returns the result of that number."""
        results: list[Any] = []
        for func, given, named, reads in self.calls:
            for holder, place, source in reads:
                outside = isinstance(source, Outside)
                holder[place] = source.tensor() if outside else results[source]
            result = func(*given, **named)
            for holder, place, _ in reads:
                holder[place] = None
            results += result if isinstance(result, (list, tuple)) else [result]
        found: Tensor = results[wanted]
        return found


def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`step` as the tensor operations that it runs now."""
    with torch.no_grad(), Record() as operations:
        number = operations.numbers[id(step())]
    operations.results.clear()  # views among them would keep weights alive
    return lambda: operations.replay(number)


def replayed(engine: Engine, step: Callable[[], Tensor]) -> None:
    """Make the engine's lanes replay `step`."""
    lanes = engine._kept.lanes
    assert lanes is not None

    @torch.no_grad()
    def replay(state: Any, longest: int, exact: bool, length: object) -> tuple[Pending, Any]:
        return Pending(step()), state

    lanes.runner.step = replay  # type: ignore[method-assign]


CASES = [
    *((kind, shape, 1.0, "llama") for kind in kind_names() for shape in ALL_SHAPES),
    ("eagle3", "dynamic", 0.0, "llama"),
    *(("eagle3", "tree", 1.0, family) for family in ("gemma3_text", "deepseek_v3")),
    *(("eagle3", "chain", 1.0, family) for family in ("granitemoehybrid", "llama4_text")),
]


DENSE = {"deepseek_v3": {"first_k_dense_replace": 3}}
"""Family -> a target without experts. In float64 on a CPU, transformers computes experts in a loop
over those that have tokens, which is another sequence of operations for other tokens."""


@pytest.mark.rotated
@pytest.mark.parametrize(("kind", "shape", "temperature", "family"), CASES)
def test_a_recorded_step_decodes_other_prompts(
    kind: str, shape: str, temperature: float, family: str
) -> None:
    target = random_target(family, **DENSE.get(family, {}))
    drafter = drafter_of(kind, target)
    config = DecodeConfig(temperature=temperature, batch_size=2, **ALL_SHAPES[shape])
    items = requests(5, new=14)
    plain = Engine(target, None, DecodeConfig(temperature=temperature)).run(items)
    texts = {c.request.index: c.tokens for c in plain}
    engine = Engine(target, drafter, config, capacity=96)
    engine._kept.lanes = under_way(target, drafter, config, count=2)
    lanes = engine._kept.lanes
    replayed(engine, record(lambda: step_on_device(lanes)))
    assert texts_of(engine, items) == texts


def test_a_step_is_not_replayed_once_another_engine_has_merged_weights() -> None:
    """Compiled layers replace weights, which frees those that the step was recorded with."""
    target, config, items = random_target(), DecodeConfig(batch_size=2), requests(5, new=14)
    engine = Engine(target, None, config, capacity=96)
    engine._kept.lanes = lanes = under_way(target, None, config, count=2)
    replayed(engine, record(lambda: step_on_device(lanes)))
    texts = [texts_of(engine, items)]
    assert engine._kept.lanes is lanes
    assert compile_layers(target, backend="eager")
    texts.append(texts_of(engine, items))
    assert texts == [plain_texts(items)] * 2


SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{rule} rule": {"rule": rule, "temperature": 1.0} for rule in ("rejection", "block")},
    **SAMPLING,
    "typical rule": {"rule": "typical", "temperature": 0.7},
    "entropy": {"adaptive": "entropy", "temperature": 1.0},
    "exact": {"exact": True},
}


@pytest.mark.rotated
@pytest.mark.parametrize("name", SETTINGS)
def test_a_recorded_step_with_every_setting(name: str) -> None:
    target = random_target(dtype=torch.float32)
    config = DecodeConfig(batch_size=2, **SETTINGS[name])
    items, texts = requests(5, new=14), []
    for recorded in (False, True):
        engine = Engine(target, drafter_of("eagle3", target), config, capacity=96)
        if recorded:
            assert engine.drafter is not None
            engine._kept.lanes = lanes = under_way(target, engine.drafter, config, count=2)
            replayed(engine, record(partial(step_on_device, lanes)))
        texts.append(texts_of(engine, items))
    assert texts[0] == texts[1]


def test_a_step_that_reads_a_length_on_the_host_is_caught() -> None:
    """The control: a record made with the host's bound on the lengths must fail on longer
    prompts."""
    target = random_target()
    config = DecodeConfig(batch_size=2)
    engine = Engine(target, None, config, capacity=96)
    engine._kept.lanes = lanes = under_way(target, None, config, count=2, first=1)
    longest = int(lanes.rows.lengths.max())

    def bounded() -> Tensor:
        return lanes.runner.decoder.step(lanes.cache, lanes.rows, None, longest)[0].packed()

    replayed(engine, record(bounded))
    items = requests(4)
    assert texts_of(engine, items) != plain_texts(items)
